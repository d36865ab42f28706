"""The native engine over two ranks generates what it generates on one, and refuses what it cannot split."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.ranks import run_on_ranks
from tests.rollout.test_native_families import CASES, PROMPTS, model
from verl.config import schema
from verl.engines.parallel import init_process_group
from verl.rollout.base import Request, RolloutEnv, SamplingParams, gather_coroutines, make_requests, run_coroutine
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.factory import make_native
from verl.rollout.native.slices import Slices, check_sizes
from verl.rollout.stop_strings import StopStrings
from verl.rollout.tensor_parallel import TensorParallel

CPU = torch.device("cpu")
GREEDY = SamplingParams(24, (), temperature=0)
SAMPLED = SamplingParams(20, (3, 50), seed=5, temperature=1.2, top_k=20)
SIZES = {"vocab_size": 96}
#: attention and MLP biases, tied embeddings and q/k/v biases, norms per head, fused projections, both softcaps
FAST = ("llama", "qwen2", "qwen3", "one-kv-head")
NAMES = [name for name in (*CASES, "one-kv-head") if name != "phi3-longrope"]


def decode(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def save(folder: Path, case: str) -> Path:
    more = {"num_key_value_heads": 1} if case == "one-kv-head" else {}
    module = model("qwen2" if case == "one-kv-head" else case, **SIZES, **more)
    module.save_pretrained(folder / case)
    return folder / case


def engine_of(path: Path, rank: int = 0, size: int = 1, **config) -> NativeRollout:
    env = RolloutEnv(rank, size, rank, CPU, 0, None, tp_rank=rank, tp_size=size)
    section = schema.RolloutConfig(tensor_model_parallel_size=size, prompt_length=40, response_length=24, **config)
    section = section.model_copy(update={"dtype": "fp32"})
    return make_native(section, schema.ModelConfig(path=str(path)), env)


def answer(engine: NativeRollout) -> dict:
    """What both sizes generate: a batch, then agent loops."""
    limits = [24, 3, 17, 24, 9]
    sampled = make_requests(PROMPTS, SAMPLED, limits=limits)
    answers = {
        "greedy": engine.generate(make_requests(PROMPTS, GREEDY)),
        "lengths": engine.generate(make_requests(PROMPTS, GREEDY, limits=limits)),
        "sampled": engine.generate(sampled),
    }
    stop = StopStrings((decode(answers["greedy"][0].token_ids[4:6]),), decode)
    stopping = SamplingParams(24, (), temperature=0, stop=stop)
    answers["stop"] = engine.generate(make_requests(PROMPTS[:3], stopping))

    async def turns(i: int) -> list:
        """Two turns of a conversation; the second prompt is longer than what was asked for so far."""
        first = await engine.generate_one(Request(PROMPTS[i], SAMPLED, i, f"first {i}"))
        await asyncio.sleep(0.001 * i)
        prompt = [*PROMPTS[i], *first.token_ids, *range(10 + i)]
        return [first, await engine.generate_one(Request(prompt, SAMPLED, i, f"second {i}"))]

    async def aborted() -> list:
        long, before = SamplingParams(24, (), seed=1), engine.stats
        tasks = [asyncio.ensure_future(engine.generate_one(Request([9, i], long, i, str(i)))) for i in range(4)]
        while engine.stats is before or engine.stats.steps < 3:
            await asyncio.sleep(0)
        engine.abort(["1", "2"])
        return await asyncio.gather(*tasks)

    answers["turns"] = sum(run_coroutine(gather_coroutines([turns(i) for i in range(len(PROMPTS))])), [])
    answers["aborted"] = run_coroutine(aborted())
    return answers


def on_rank(paths: list[Path]) -> list:
    init_process_group(CPU)
    rank, found = torch.distributed.get_rank(), []
    for path in paths:
        engine = engine_of(path, rank, 2)
        if rank == 0:
            with engine.leading():
                found.append(answer(engine))
        else:
            engine.follow()
            found.append({"cache": engine._cache.keys.shape, "parameters": sum(p.numel() for p in engine.module.parameters())})
    return found


def assert_same(found: dict, expected: dict) -> None:
    for kind, answers in expected.items():
        for a, b in zip(found[kind], answers, strict=True):
            if kind == "aborted":
                assert a.finish_reason == b.finish_reason and a.token_ids[:3] == b.token_ids[:3], kind
                continue
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), kind
            torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "names", [pytest.param(FAST, id="fast"), pytest.param(NAMES, id="every family", marks=pytest.mark.slow)]
)
def test_two_ranks_generate_what_one_generates(names, tmp_path):
    paths = [save(tmp_path, name) for name in names]
    leader, follower = run_on_ranks(2, on_rank, paths)
    for path, found, other in zip(paths, leader, follower, strict=True):
        one = engine_of(path)
        expected = answer(one)
        assert expected["stop"][0].finish_reason == "stop" and expected["aborted"][1].finish_reason == "abort"
        assert_same(found, expected)
        heads = one._cache.keys.shape[2]
        assert other["cache"][2] == max(1, heads // 2)
        assert other["parameters"] < 0.6 * sum(p.numel() for p in one.module.parameters())
