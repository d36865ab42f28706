"""LoRA adapters that vLLM applies: what it generates is what the trainer and merged weights give (make test-vllm)."""

import asyncio
import importlib.util
from dataclasses import replace

import pytest
import torch

from tests.engines.ranks import make_engine
from tests.rollout.contract import save_model
from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.protocol import DataProto
from verl.rollout.base import RolloutEnv, make_rollout_engine
from verl.rollout.request import Request, SamplingParams, make_requests
from verl.weight_sync import ReplicaSync

pytest.importorskip("peft")
pytestmark = pytest.mark.timeout(600)

LORA = {"lora_rank": 3, "lora_alpha": 6}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2, 3, 4]]
BOUND = 2e-5  # of log-probs, as in test_engine_contract.py


class Pair:
    """A trainer with large adapters, an engine that applies them, and one that gets merged weights."""

    def __init__(self, path: str, **lora):
        self.trainer = make_engine(path, **LORA | lora)
        self.path = path
        self.applied = self.make()
        self.merged = self.make(lora_sync="merged")
        self.sync = ReplicaSync(self.applied, adapters=True)
        self.seed = 0
        self.randomize()

    def make(self, **keys):
        config = schema.RolloutConfig(name="vllm", prompt_length=64, response_length=448, max_num_seqs=8, **keys)
        env = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32, adapters=self.trainer.adapter_config())
        return make_rollout_engine("vllm", config, schema.ModelConfig(path=self.path, **LORA), env, self.trainer)

    @torch.no_grad()
    def randomize(self) -> None:
        """Other adapters in every call."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        for _, parameter in self.trainer.adapters.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def push(self, version: int) -> tuple[int, int]:
        """Bytes of the push to each engine."""
        return self.sync.push(self.trainer, version).bytes, ReplicaSync(self.merged).push(self.trainer, version).bytes

    def mismatch(self, completions) -> float:
        """The largest difference to the trainer's log-probs."""
        columns = build_sequences(PROMPTS, [c.token_ids for c in completions], pad_token_id=0)
        trained = self.trainer.infer(DataProto.from_dict(columns), ("log_probs",), MicroBatching())["log_probs"]
        return (trained - torch.tensor([c.log_probs for c in completions])).abs().max().item()


def greedy(engine, tokens: int = 24):
    return engine.generate(make_requests(PROMPTS, SamplingParams(tokens, (), temperature=0.0, ignore_eos=True)))


#: q, k, v and gate, up are in fused layers; the adapters of llama are those of parts of them
CASES = {
    "qwen2": {},
    "llama": {"target_modules": ["k_proj", "up_proj", "o_proj", "lm_head"], "lora_rank": 9},
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make test-vllm")
    return Pair(save_model(request.param, tmp_path_factory.mktemp("model")), **CASES[request.param])


def test_adapters_give_the_tokens_and_log_probs_of_merged_weights_with_fewer_bytes(pair):
    size = {"base": sum(value.nbytes for _, value in pair.trainer.base_weights(torch.float32))}
    size["adapters"] = sum(value.nbytes for _, value in pair.trainer.adapter_weights())
    assert size["adapters"] < 0.1 * size["base"]
    before = None
    for version in range(3):
        pair.randomize()
        sent = size["adapters"] + (size["base"] if version == 0 else 0)
        assert pair.push(version) == (sent, size["base"])
        applied, merged = greedy(pair.applied), greedy(pair.merged)
        assert [c.token_ids for c in applied] == [c.token_ids for c in merged] != before
        assert pair.mismatch(applied) < BOUND and pair.mismatch(merged) < BOUND
        with pair.trainer.reference():  # the adapters make a difference
            assert pair.mismatch(applied) > 0.1
        before = [c.token_ids for c in applied]
    sampled = pair.applied.generate(make_requests(PROMPTS, SamplingParams(24, (), seed=1)))
    assert pair.mismatch(sampled) < BOUND


def test_sleep_keeps_the_adapter_and_release_the_base_weights(pair):
    pair.push(1)
    before = [c.token_ids for c in greedy(pair.applied)]

    def check() -> None:
        found = greedy(pair.applied)
        assert [c.token_ids for c in found] == before and pair.mismatch(found) < BOUND

    pair.applied.sleep()
    pair.applied.wake()
    check()
    pair.applied.receiver().release()
    with pytest.raises(ValueError, match="has the base weights, but no adapters"):
        greedy(pair.applied)
    assert pair.sync.push(pair.trainer, 2).bytes == sum(value.nbytes for _, value in pair.trainer.adapter_weights())
    check()


def test_running_requests_continue_with_the_new_adapter(pair):
    """Running requests continue with the new adapter, and report where."""
    pair.push(1)
    pair.applied.weight_version = 1

    params = SamplingParams(400, (), temperature=0.0, ignore_eos=True)
    short = Request([3], replace(params, max_tokens=8), 1, "b")

    async def run():
        task = asyncio.create_task(pair.applied.generate_one(Request(PROMPTS[0], params, 0, "a")))
        await pair.applied.generate_one(short)
        pair.randomize()
        pair.sync.push(pair.trainer, 2)
        await pair.applied.generate_one(short)
        pair.applied.abort()
        return await task

    found = asyncio.run(run())
    (start, version), (since, updated) = found.weight_versions
    assert (start, version, updated) == (0, 1, 2) and 0 < since < len(found.token_ids)
    row = build_sequences(PROMPTS[:1], [found.token_ids], pad_token_id=0)
    trained = pair.trainer.infer(DataProto.from_dict(row), ("log_probs",), MicroBatching())["log_probs"][0]
    mismatch = (trained - torch.tensor(found.log_probs)).abs()
    assert mismatch[since:].max() < BOUND < mismatch[:since].max()
