"""Log-probs of sampling are bit-identical to the trainer's, for each architecture, precision and micro-batching."""

import pytest
import torch

from tests.engines.ranks import make_engine
from tests.rollout import test_native_families as families
from verl.config.schema import ModelConfig, OptimConfig, RolloutConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.engines.torch_engine import TorchEngine
from verl.modeling import attention
from verl.modeling.batch_invariant import model as batch_invariant
from verl.protocol import DataProto
from verl.rollout.base import RolloutEnv
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.factory import make_native
from verl.rollout.request import SamplingParams, make_requests
from verl.workers.engine_worker import aggregation
from verl.workers.policy import policy_objective

#: dtypes of the parameters and of the computation: bf16 with fp32 masters is the default on a GPU
PRECISIONS = {
    "fp32": {"model_dtype": "fp32", "dtype": "fp32"},
    "bf16": {"model_dtype": "fp32", "dtype": "bf16"},
    "bf16 weights": {"model_dtype": "bf16", "dtype": "bf16"},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CUTS = [MicroBatching(rows=1), MicroBatching(tokens=130)]
TEMPERATURE = 0.7
PARAMS = SamplingParams(16, (3, 4, 9), temperature=TEMPERATURE, seed=1)
#: mixtures of experts have no batch-invariant kernels
DENSE = [case for case in families.CASES if case not in ("qwen3-moe", "mixtral")]
SETTINGS = {"clip_ratio": 0.2, "entropy_coeff": 0.01, "use_kl_loss": False}
# samples of one prompt; and sequences that end before, in and after the second block of 64 keys
PROMPTS = [*families.PROMPTS, *families.PROMPTS[:2], [(7 * i) % 90 + 3 for i in range(60)]]


def engine(
    case: str, precision: str, optimizer: OptimConfig | None = None, kernels: str = "batch_invariant"
) -> TorchEngine:
    dtypes = PRECISIONS[precision]
    module = families.model(case, DTYPES[dtypes["model_dtype"]])
    module.config.max_position_embeddings = 48 if case == "phi3-longrope" else 128
    module.set_attn_implementation(batch_invariant.NAME if kernels == "batch_invariant" else attention.NAME)
    return make_engine("", optimizer, kernels=kernels, module=module, **dtypes)


def sample(engine: TorchEngine, prompts: list[list[int]], max_rows: int = 4, sample_ids: list[int] | None = None):
    rollout = NativeRollout(engine.module, max_rows=max_rows, forward=engine.model_forward())
    return rollout.generate(make_requests(prompts, PARAMS, sample_ids))


def as_batch(prompts: list[list[int]], answers) -> DataProto:
    columns = build_sequences(prompts, [answer.token_ids for answer in answers], 0)
    log_probs = torch.zeros(columns["responses"].shape)
    log_probs[columns["response_mask"].bool()] = torch.tensor([p for answer in answers for p in answer.log_probs])
    return DataProto.from_dict({**columns, "rollout_log_probs": log_probs})


def prompts_for(case: str) -> list[list[int]]:
    return PROMPTS[:-1] if case == "phi3-longrope" else PROMPTS  # it has 48 positions


@pytest.mark.fast(
    "gemma2-bf16",
    "gemma3-bf16",
    "qwen2-fp32",
    "qwen3-bf16",
    "llama-bf16",
    "phi3-longrope-bf16",
    "qwen2-bf16 weights",
)
@pytest.mark.parametrize(
    ("case", "precision"),
    [
        *((case, "bf16") for case in DENSE),
        *(("qwen2", p) for p in ("fp32", "bf16 weights")),
        *(pytest.param(case, "fp32", marks=pytest.mark.slow) for case in DENSE if case != "qwen2"),
    ],
)
def test_log_probs_are_bit_equal(case, precision):
    trained, prompts = engine(case, precision), prompts_for(case)
    batch = as_batch(prompts, sample(trained, prompts))
    assert int(batch.batch["response_mask"].sum()) > 40
    for cut in CUTS:
        found = trained.infer(batch, ("log_probs",), cut, TEMPERATURE)["log_probs"]
        assert torch.equal(found, batch.batch["rollout_log_probs"])


class Sharded:
    """A training engine whose module cannot be shared, as with FSDP2: the rollout has a copy of the weights."""

    def __init__(self, engine: TorchEngine):
        self.model_forward, self.buffers = engine.model_forward, engine.buffers

    def shared_module(self) -> None:
        return None


@pytest.mark.fast("qwen3-bf16 weights", "gemma2-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16 weights"])
@pytest.mark.parametrize("case", ["qwen3", "gemma2"])  # without and with a softcap of the logits
def test_log_probs_of_a_copy_of_the_weights_are_bit_equal(case, precision, tmp_path):
    trained = engine(case, precision)
    trained.module.save_pretrained(tmp_path)
    env = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, DTYPES[PRECISIONS[precision]["dtype"]])
    rollout = make_native(RolloutConfig(deterministic=True), ModelConfig(path=str(tmp_path)), env, Sharded(trained))
    rollout.receiver().receive(trained.weights(), 0)
    batch = as_batch(PROMPTS, rollout.generate(make_requests(PROMPTS, PARAMS)))
    found = trained.infer(batch, ("log_probs",), MicroBatching(tokens=130), TEMPERATURE)["log_probs"]
    assert torch.equal(found, batch.batch["rollout_log_probs"]) and int(batch.batch["response_mask"].sum()) > 40


@pytest.mark.parametrize("case", ["qwen2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_response_is_the_same_whatever_else_is_in_the_batch(case):
    trained = engine(case, "bf16")
    together = sample(trained, PROMPTS, max_rows=3, sample_ids=list(range(len(PROMPTS))))
    for i in (0, 3, len(PROMPTS) - 1):
        assert sample(trained, [PROMPTS[i]], sample_ids=[i]) == [together[i]]
    order = list(reversed(range(len(PROMPTS))))
    again = sample(trained, [PROMPTS[i] for i in order], max_rows=20, sample_ids=order)
    assert [again[i] for i in order] == together


@pytest.mark.fast("qwen3-fp32", "gemma2-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["qwen3", "gemma2"])
def test_an_update_starts_from_the_same_bits_and_has_the_ordinary_gradient(case, precision):
    optimizer = OptimConfig(lr=1e-3)
    exact = engine(case, precision, optimizer)
    batch = as_batch(PROMPTS, sample(exact, PROMPTS))
    batch.batch["advantages"] = torch.randn(batch.batch["responses"].shape, generator=torch.manual_seed(0))
    plain = engine(case, precision, optimizer, kernels="plain")
    metrics = []
    for trained in (exact, plain):
        agg = aggregation("token-mean", batch.batch["response_mask"], trained, None)
        objective = policy_objective("vanilla", SETTINGS, agg, old_is_current=True)
        metrics.append(trained.train_batch(batch, objective, MicroBatching(tokens=130), TEMPERATURE))
    assert metrics[0]["rollout/logprob_gap_max"] == (0.0, 1.0)
    assert metrics[1]["rollout/logprob_gap_max"] > (0.0, 1.0)
    tolerance = 1e-4 if precision == "fp32" else 5e-2
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=tolerance)
