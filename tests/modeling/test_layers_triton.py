"""The kernels between the GEMMs of a layer, and the layers made of them, against float64 formulas and plain torch.

They run on a GPU, and on a CPU by Triton's interpreter: TRITON_INTERPRET=1 with the package triton installed.
"""

import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.ranks import SIZES, make_engine
from verl.config.schema import OptimConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.protocol import DataProto
from verl.workers.engine_worker import aggregation
from verl.workers.policy import policy_objective

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from verl.modeling.layers_triton import AddRMSNorm, Repeat, RMSNorm, Rotary, RotaryQKV, SwiGLU, column_sums

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def normal(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def farthest(ours, formula, inputs: list[torch.Tensor]) -> float:
    """How far the outputs and gradients of a kernel are from those of a formula in float64, at most."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    pairs = []
    for function, given in ((ours, inputs), (formula, wide)):
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        weights = [torch.randn(y.shape, device=DEVICE).to(BF16) for y in outputs]
        gradients = torch.autograd.grad(outputs, given, [w.to(y.dtype) for w, y in zip(weights, outputs)])
        pairs.append((*outputs, *gradients))
    return max(apart(a, b) for a, b in zip(*pairs))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


# 16-bit outputs are right to 2**-9, and so are sums of many of them
TOLERANCE = {FP32: 3e-6, BF16: 6e-3}


@pytest.mark.parametrize("width", [24, 896, 2560])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_norm_of_a_sum(width, dtype):
    torch.manual_seed(0)
    x, branch, weight = normal(3, 7, width), normal(3, 7, width, dtype=dtype), normal(width)

    def ours(x, branch, weight):
        return AddRMSNorm.apply(x, branch, weight, 1e-3, dtype)

    def formula(x, branch, weight):
        return x + branch, rms_norm(x + branch, weight, 1e-3)

    assert farthest(ours, formula, [x, branch, weight]) < TOLERANCE[dtype]
    # the sum may go nowhere, as after the last layer
    alone = farthest(lambda *given: ours(*given)[1], lambda *given: formula(*given)[1], [x, branch, weight])
    assert alone < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 4, 64), (2100, 100)])
def test_norm(shape):
    torch.manual_seed(0)
    inputs = [normal(*shape), normal(shape[-1])]
    assert (
        farthest(lambda x, w: RMSNorm.apply(x, w, 1e-3, FP32), lambda x, w: rms_norm(x, w, 1e-3), inputs)
        < TOLERANCE[FP32]
    )


@pytest.mark.parametrize("width", [24, 1100])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_swiglu_of_two_tensors_and_of_one(width, dtype):
    torch.manual_seed(0)

    def formula(gate, up):
        return gate * torch.sigmoid(gate) * up

    parts = [normal(2, 5, width, dtype=dtype) for _ in range(2)]
    assert farthest(SwiGLU.apply, formula, parts) < TOLERANCE[dtype]
    joint = torch.cat([part.detach() for part in parts], -1).requires_grad_()
    assert farthest(SwiGLU.apply, lambda x: formula(*x.chunk(2, -1)), [joint]) < TOLERANCE[dtype]


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(14, 2, 64), (3, 1, 6), (4, 4, 80)])
def test_rotary_embedding_of_queries_and_keys(heads, key_heads, size, norms):
    torch.manual_seed(0)
    tokens = 9
    qkv, half = normal(tokens, (heads + 2 * key_heads) * size), size // 2
    cos, sin = torch.randn(2, tokens, size, device=DEVICE)

    def turned(x):
        c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        return x * c + torch.cat((-x[..., half:], x[..., :half]), -1) * s

    def formula(qkv, *weights):
        q, k, v = qkv.view(tokens, -1, size).split((heads, key_heads, key_heads), 1)
        if weights:
            q, k = (rms_norm(x, w, 1e-3) for x, w in zip((q, k), weights))
        return turned(q), turned(k), v

    def ours(qkv, *weights):
        return RotaryQKV.apply(qkv, cos, sin, (heads, key_heads), 1e-3, *weights)

    assert farthest(ours, formula, [qkv, *(normal(size) for _ in range(2 * norms))]) < TOLERANCE[FP32]

    def keys_of(qkv):  # not contiguous
        return qkv.view(tokens, -1, size)[:, heads:-key_heads]

    found = farthest(lambda qkv: Rotary.apply(keys_of(qkv), cos, sin), lambda qkv: turned(keys_of(qkv)), [qkv])
    assert found < TOLERANCE[FP32]


@pytest.mark.parametrize("rows", [0, 1, 31, 2050])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_sums_of_columns(rows, dtype):
    torch.manual_seed(0)
    x = torch.randn(rows, 200, device=DEVICE).to(dtype)
    found = column_sums(x)
    assert found.dtype == FP32
    assert torch.allclose(found.double(), x.double().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_of_rows_that_are_used_several_times(dtype):
    torch.manual_seed(0)
    source = torch.tensor([2, 0, 2, 4, 2, 4], device=DEVICE)  # rows 1 and 3 are not used
    uses, offsets = torch.tensor([1, 0, 2, 4, 3, 5], device=DEVICE), torch.tensor([0, 1, 1, 4, 4, 6], device=DEVICE)

    def ours(x):
        return Repeat.apply(x, source, offsets.int(), uses.int())

    assert farthest(ours, lambda x: x[source], [normal(5, 2, 40, dtype=dtype)]) < TOLERANCE[dtype]


def _batch() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(100, (n,), generator=generator).tolist() for n in (9, 7, 12, 10)]
    ids[2][:5] = ids[0][:5]
    columns = build_sequences([r[:5] for r in ids], [r[5:] for r in ids], pad_token_id=0)
    shape = columns["responses"].shape
    columns |= {"old_log_probs": torch.full(shape, -4.6), "advantages": torch.randn(shape, generator=generator)}
    return DataProto.from_dict(columns)


def _update(folder, kernels: str, checkpointing: bool, padding: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, and the gradients of an update in several micro-batches."""
    torch.manual_seed(0)
    engine = make_engine(
        folder,
        OptimConfig(lr=0.0),
        kernels=kernels,
        random_init=True,
        device=DEVICE.type,
        dtype="fp32",
        enable_gradient_checkpointing=checkpointing,
        use_remove_padding=not padding,
    )
    if kernels != "plain":  # share prefixes on any device
        engine._shares_prefix = lambda lengths: not padding
    batch, micro = _batch(), MicroBatching(tokens=24)
    log_probs = engine.infer(batch, ("log_probs",), micro)["log_probs"]
    gradients: dict[str, torch.Tensor] = {}
    names = {p: name for name, p in engine.module.named_parameters()}
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: p.grad.clone() for p, name in names.items()})
    )
    agg = aggregation("token-mean", batch.batch["response_mask"], engine, None)
    settings = {"clip_ratio": 0.2, "entropy_coeff": 0.1, "use_kl_loss": False}
    engine.train_batch(batch, policy_objective("vanilla", settings, agg), micro)
    return log_probs, gradients


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("tied", "checkpointing", "padding"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_fused_layers_are_the_plain_ones(kind, tied, checkpointing, padding, tmp_path):
    sizes = {**SIZES, "vocab_size": 100, "head_dim": 8, "tie_word_embeddings": tied}
    extra = {} if kind == "llama" else {"sliding_window": 4}
    extra |= {"use_sliding_window": True, "max_window_layers": 1} if kind.startswith("qwen") else {}
    config = AutoConfig.for_model(kind, **sizes, **extra)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (ours, gradients), (expected, exact) = (
        _update(tmp_path, kernels, checkpointing, padding) for kernels in ("fused", "plain")
    )
    assert apart(ours, expected) < 3e-6
    assert gradients.keys() == exact.keys()
    assert {name: e for name in exact if (e := apart(gradients[name], exact[name])) > 3e-5} == {}
