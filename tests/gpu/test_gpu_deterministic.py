"""On a GPU: sampled log-probs equal the trainer's in every bit, by blocks, graphs and Triton's kernels."""

import random

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.engines.ranks import make_engine
from tests.rollout import test_native_families as families
from tests.rollout.test_continuous import staggered
from verl.config.schema import OptimConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.engines.torch_engine import TorchEngine
from verl.modeling import attention
from verl.modeling.batch_invariant import model as batch_invariant
from verl.protocol import DataProto
from verl.rollout.native.engine import NativeRollout
from verl.rollout.request import Completion, SamplingParams, make_requests
from verl.workers.engine_worker import aggregation
from verl.workers.policy import policy_objective

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA, FP32, BF16 = torch.device("cuda"), torch.float32, torch.bfloat16
#: (of the parameters, of the computation): bf16 with fp32 masters is the default on a GPU
PRECISIONS = {"fp32": (FP32, FP32), "bf16": (FP32, BF16), "bf16 weights": (BF16, BF16)}
CUTS = [MicroBatching(rows=1), MicroBatching(tokens=200), MicroBatching(rows=7)]
TEMPERATURE = 0.7
# prompts that end before, at and after the end of a block of 64 tokens, and samples of one
PROMPTS = families.PROMPTS + [[(7 * i + n) % 90 + 3 for i in range(n)] for n in (1, 63, 64, 65, 130, 130)]


def on_gpu(module: torch.nn.Module, precision: str, kernels: str = "batch_invariant") -> TorchEngine:
    names = {FP32: "fp32", BF16: "bf16"}
    dtypes = dict(zip(("model_dtype", "dtype"), (names[dtype] for dtype in PRECISIONS[precision])))
    module.set_attn_implementation(batch_invariant.NAME if kernels == "batch_invariant" else attention.NAME)
    off = {"enable_gradient_checkpointing": False}
    return make_engine("", OptimConfig(lr=1e-4), kernels=kernels, module=module, device="cuda", **dtypes, **off)


def engine(case: str, precision: str, kernels: str = "batch_invariant") -> TorchEngine:
    module = families.model(case, PRECISIONS[precision][0]).cuda()
    module.config.max_position_embeddings = 48 if case == "phi3-longrope" else 300
    return on_gpu(module, precision, kernels)


def rollout(trained: TorchEngine, **settings) -> NativeRollout:
    settings = {"memory_share": 0.2, **settings}
    return NativeRollout(trained.module, forward=trained.model_forward(), **settings)


def as_batch(prompts: list[list[int]], answers: list[Completion]) -> DataProto:
    columns = build_sequences(prompts, [answer.token_ids for answer in answers], 0)
    log_probs = torch.zeros(columns["responses"].shape)
    log_probs[columns["response_mask"].bool()] = torch.tensor([p for answer in answers for p in answer.log_probs])
    return DataProto.from_dict({**columns, "rollout_log_probs": log_probs})


def check(trained: TorchEngine, batch: DataProto, cuts: list[MicroBatching], temperature: float) -> None:
    for cut in cuts:
        found = trained.infer(batch, ("log_probs",), cut, temperature)["log_probs"]
        gap = (found - batch.batch["rollout_log_probs"]).abs()
        assert torch.equal(found, batch.batch["rollout_log_probs"]), f"{cut}: {int((gap > 0).sum())}, {gap.max()}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "mistral", "phi3-partial", "gemma2", "gemma3"])
def test_log_probs_are_bit_equal(case, precision):
    trained = engine(case, precision)
    params = SamplingParams(40, (3, 4, 9), temperature=TEMPERATURE, seed=1)
    batch = as_batch(PROMPTS, rollout(trained, max_rows=5).generate(make_requests(PROMPTS, params)))
    assert int(batch.batch["response_mask"].sum()) > 60
    check(trained, batch, CUTS, TEMPERATURE)


def test_rotary_frequencies_that_depend_on_the_length():
    trained, prompts = engine("phi3-longrope", "bf16"), families.PROMPTS
    batch = as_batch(prompts, rollout(trained).generate(make_requests(prompts, SamplingParams(24, (), seed=1))))
    check(trained, batch, CUTS, 1.0)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_response_is_the_same_whatever_else_is_in_the_batch(graphs):
    trained = engine("qwen2", "bf16")
    params, ids = SamplingParams(40, (3,), temperature=TEMPERATURE, seed=1), list(range(len(PROMPTS)))
    together = rollout(trained, max_rows=3, graphs=graphs).generate(make_requests(PROMPTS, params, ids))
    for i in (0, 3, len(PROMPTS) - 1):
        assert rollout(trained, graphs=graphs).generate(make_requests([PROMPTS[i]], params, [i])) == [together[i]]
    again = rollout(trained, graphs=graphs).generate(make_requests(PROMPTS[::-1], params, ids[::-1]))
    assert again[::-1] == together


@pytest.mark.parametrize("most_yields", [0, 8])
def test_the_time_of_arrival_changes_no_bit(most_yields):
    trained = engine("qwen2", "bf16")
    params = SamplingParams(40, (3,), temperature=TEMPERATURE, seed=1)
    requests, generator = make_requests(PROMPTS, params), rollout(trained, max_rows=3)
    expected = generator.generate(requests)
    assert staggered(generator, requests, 0, most_yields) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_of_training(precision):
    """Sample and update, three times, with one engine for rollout: no gap in any update, ordinary gradients."""
    trained = engine("qwen3", precision)
    generator = rollout(trained, max_rows=6)
    settings = {"clip_ratio": 0.2, "entropy_coeff": 0.01, "use_kl_loss": False}
    params = SamplingParams(40, (3,), temperature=TEMPERATURE, seed=1)
    for step in range(3):
        batch = as_batch(PROMPTS, generator.generate(make_requests(PROMPTS, params)))
        batch.batch["advantages"] = torch.randn(batch.batch["responses"].shape, generator=torch.manual_seed(step))
        if step == 1:
            generator.sleep()  # and once without, so that graphs and copies of weights outlive an update
        agg = aggregation("token-mean", batch.batch["response_mask"], trained, None)
        objective = policy_objective("vanilla", settings, agg, old_is_current=True)
        if step == 0:
            plain = engine("qwen3", precision, "plain")
            expected = plain.train_batch(batch, objective, MicroBatching(tokens=200), TEMPERATURE)["grad_norm"]
        metrics = trained.train_batch(batch, objective, MicroBatching(tokens=200), TEMPERATURE)
        assert metrics["rollout/logprob_gap_max"] == (0.0, 1.0)
        if step == 0:
            assert metrics["grad_norm"] == pytest.approx(expected, rel=1e-3 if precision == "fp32" else 5e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_shape_of_a_real_model(precision):
    """Qwen2.5-0.5B with few layers: wide products, a large vocabulary, many rows, refilled, of all lengths."""
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=3,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with CUDA:
        module = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.mul_(3 if p.dim() > 1 and "embed" not in name else 1)
    trained, rng = on_gpu(module, precision), random.Random(0)
    prompts = [[rng.randrange(151936) for _ in range(rng.randrange(1, 200))] for _ in range(20)]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    limits = [rng.randrange(1, 150) for _ in prompts]
    answers = rollout(trained, max_rows=50).generate(
        make_requests(prompts, SamplingParams(150, (), seed=1), limits=limits)
    )
    cuts = [MicroBatching(rows=1), MicroBatching(tokens=3000), MicroBatching(tokens=16384)]
    check(trained, as_batch(prompts, answers), cuts, 1.0)
