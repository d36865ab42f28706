"""The functions between the GEMMs of a layer, on a CPU and by Triton kernels, against float64 formulas; layers of them.

The kernels run on a GPU, and on a CPU by Triton's interpreter: TRITON_INTERPRET=1 with the package triton installed.
"""

import importlib
import importlib.util
import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.ranks import SIZES, make_engine
from verl.config.schema import OptimConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.modeling import layers_cpu
from verl.modeling.packing import gather_rows, repeat_rows, scatter_rows
from verl.protocol import DataProto
from verl.workers.engine_worker import aggregation
from verl.workers.policy import policy_objective

BF16, FP32 = torch.bfloat16, torch.float32
GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None and (GPU or os.environ.get("TRITON_INTERPRET") == "1")
TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs a GPU, or TRITON_INTERPRET=1")
# 16-bit outputs are right to 2**-9, and so are sums of many of them
TOLERANCE = {FP32: 3e-6, BF16: 6e-3}


@pytest.fixture(params=["layers_cpu", pytest.param("layers_triton", marks=TRITON)])
def functions(request, monkeypatch):
    # rows do not fit into one block, nor the last block into its size
    monkeypatch.setattr(layers_cpu, "BLOCK", 100)
    torch.manual_seed(0)
    return importlib.import_module(f"verl.modeling.{request.param}")


def normal(functions, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda" if GPU and functions is not layers_cpu else "cpu").to(dtype)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def check(ours, formula, inputs: list[torch.Tensor], dtype: torch.dtype = FP32) -> None:
    """Outputs and gradients, against the formula's in float64."""
    results = []
    for function, given in ((ours, inputs), (formula, [x.double() for x in inputs])):
        leaves = [x.detach().requires_grad_() for x in given]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        weights = [torch.randn(y.shape, device=y.device).to(BF16).to(y.dtype) for y in outputs]
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, weights)))
    for found, expected in zip(*results):
        assert apart(found, expected) < TOLERANCE[dtype]
        if not found.is_cuda and dtype == FP32 and inputs[0].numel() < 2000:  # sums of many have larger errors
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3)


def dtypes(functions) -> tuple[torch.dtype, ...]:
    """On a CPU, all inputs have one dtype."""
    return (FP32,) if functions is layers_cpu else (FP32, BF16)


@pytest.mark.parametrize("width", [24, 896, 2560])
def test_norm_of_a_sum(functions, width):
    for dtype in dtypes(functions):
        x, weight = normal(functions, 3, 7, width), normal(functions, width)
        inputs = [x, normal(functions, 3, 7, width, dtype=dtype) * 3, weight]

        def ours(x, branch, weight, dtype=dtype):
            return functions.AddRMSNorm.apply(x, branch, weight, 1e-3, dtype)

        check(ours, lambda x, branch, weight: (x + branch, rms_norm(x + branch, weight)), inputs, dtype)
        # the sum may go nowhere, as after the last layer
        alone = (lambda *given, ours=ours: ours(*given)[1]), lambda x, branch, weight: rms_norm(x + branch, weight)
        check(*alone, inputs, dtype)


@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 4, 64), (2100, 100)])
def test_norm(functions, shape):
    inputs = [normal(functions, *shape), normal(functions, shape[-1])]
    check(lambda x, weight: functions.RMSNorm.apply(x, weight, 1e-3, FP32), rms_norm, inputs)


@pytest.mark.parametrize("width", [24, 1100])
def test_swiglu_of_two_tensors_and_of_one(functions, width):
    def formula(gate, up):
        return gate * torch.sigmoid(gate) * up

    for dtype in dtypes(functions):
        halves = [normal(functions, 2, 5, width, dtype=dtype), normal(functions, 2, 5, width, dtype=dtype) + 1]
        check(functions.SwiGLU.apply, formula, halves, dtype)
        check(functions.SwiGLU.apply, lambda x: formula(*x.chunk(2, -1)), [torch.cat(halves, -1)], dtype)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(14, 2, 64), (3, 1, 6), (4, 4, 80)])
def test_rotary_embedding(functions, heads, key_heads, size, norms):
    tokens, half = 9, size // 2
    cos, sin = normal(functions, 2, tokens, size)

    def rotated(x):
        c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        return x * c + torch.cat((-x[..., half:], x[..., :half]), -1) * s

    def formula(qkv, *weights):
        q, k, v = qkv.view(tokens, -1, size).split((heads, key_heads, key_heads), 1)
        q, k = (rms_norm(x, w) for x, w in zip((q, k), weights)) if weights else (q, k)
        return rotated(q), rotated(k), v

    def ours(qkv, *weights):
        return functions.RotaryQKV.apply(qkv, cos, sin, (heads, key_heads), 1e-3, *weights)

    qkv = normal(functions, tokens, (heads + 2 * key_heads) * size)
    check(ours, formula, [qkv, *(normal(functions, size) for _ in range(2 * norms))])

    def keys_of(qkv):  # not contiguous
        return qkv.view(tokens, -1, size)[:, heads:-key_heads]

    check(lambda qkv: functions.Rotary.apply(keys_of(qkv), cos, sin), lambda qkv: rotated(keys_of(qkv)), [qkv])


@TRITON
@pytest.mark.parametrize("rows", [0, 1, 31, 2050])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_sums_of_columns(rows, dtype):
    from verl.modeling.layers_triton import column_sums

    torch.manual_seed(0)
    x = torch.randn(rows, 200, device="cuda" if GPU else "cpu").to(dtype)
    found = column_sums(x)
    assert found.dtype == FP32
    assert torch.allclose(found.double(), x.double().sum(0), rtol=1e-5, atol=1e-4)


@TRITON
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_of_rows_that_are_used_several_times(dtype):
    from verl.modeling import layers_triton

    device = "cuda" if GPU else "cpu"
    source = torch.tensor([2, 0, 2, 4, 2, 4], device=device)  # rows 1 and 3 are not used
    uses, offsets = torch.tensor([1, 0, 2, 4, 3, 5], device=device), torch.tensor([0, 1, 1, 4, 4, 6], device=device)

    def ours(x):
        return layers_triton.Repeat.apply(x, source, offsets.int(), uses.int())

    check(ours, lambda x: x[source], [normal(layers_triton, 5, 2, 40, dtype=dtype)], dtype)


def test_scatter_and_gather_of_rows():
    index, source = torch.tensor([4, 0, 3]), torch.tensor([1, 0, 2, 1, 1])

    def scattered(x):
        return torch.zeros(6, 2).double().index_copy(0, index, x)

    check(lambda x: scatter_rows(x, index, 6), scattered, [torch.randn(3, 2)])
    check(lambda x: gather_rows(x, index), lambda x: x[index], [torch.randn(6, 2)])
    check(lambda x: repeat_rows(x, source, torch.tensor([1, 3, 2])), lambda x: x[source], [torch.randn(3, 2)])


def update(folder, kernels: str, checkpointing: bool, padding: bool) -> tuple[torch.Tensor, dict, int]:
    """Log-probs, gradients of an update in several micro-batches, and the tokens that its embedding saw."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(97, (n,), generator=generator).tolist() for n in (5, 5, 3)]
    answers = [torch.randint(97, (n,), generator=generator).tolist() for n in (4, 7, 1, 6, 7, 2)]
    columns = build_sequences([prompts[i // 2] for i in range(6)], answers, pad_token_id=0)
    shape = columns["responses"].shape
    columns |= {"old_log_probs": torch.full(shape, -4.6), "advantages": torch.randn(shape, generator=generator)}
    batch = DataProto.from_dict(columns)
    options = {"enable_gradient_checkpointing": checkpointing, "use_remove_padding": not padding, "dtype": "fp32"}
    options |= {"device": "cuda" if GPU else "cpu", "random_init": True}
    engine = make_engine(folder, OptimConfig(lr=0.0), kernels=kernels, **options)
    log_probs = engine.infer(batch, ("log_probs",), MicroBatching(rows=6))["log_probs"]
    gradients: dict[str, torch.Tensor] = {}
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: p.grad.clone() for name, p in engine.module.named_parameters()})
    )
    seen: list[int] = []
    engine.module.get_input_embeddings().register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
    agg = aggregation("token-mean", batch.batch["response_mask"], engine, None)
    settings = {"clip_ratio": 0.2, "entropy_coeff": 0.1, "use_kl_loss": False}
    engine.train_batch(batch, policy_objective("vanilla", settings, agg), MicroBatching(rows=4))
    return log_probs, gradients, sum(seen)


@pytest.mark.fast(
    "True-True-False-qwen3",
    "False-False-False-qwen2",
    "True-False-True-mistral",
    "False-False-False-llama",
    "True-False-True-llama",
)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("tied", "checkpointing", "padding"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_fused_layers_are_the_plain_ones(kind, tied, checkpointing, padding, tmp_path):
    """On a CPU, also those over packed rows that share prompts are compared with plain ones over padded rows."""
    extra = {} if kind == "llama" else {"sliding_window": 4}
    extra |= {"use_sliding_window": True, "max_window_layers": 1} if kind.startswith("qwen") else {}
    sizes = SIZES | {"vocab_size": 100, "head_dim": 8, "tie_word_embeddings": tied}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **extra)).save_pretrained(tmp_path)
    log_probs, gradients, tokens = update(tmp_path, "fused", checkpointing, padding)
    expected, exact, _ = update(tmp_path, "plain", checkpointing, padding or not GPU)
    assert apart(log_probs, expected) < 3e-6
    assert gradients.keys() == exact.keys()
    assert {name: e for name in exact if (e := apart(gradients[name], exact[name])) > 3e-5} == {}
    if not GPU:
        torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients, exact, rtol=1e-4, atol=1e-6)
    if not padding:
        assert tokens == 4 + 7 + 1 + 6 + 7 + 2 + 5 + 5 + 3, "a prompt of two rows is computed once"


def test_what_a_layer_returns_is_no_view():
    """FSDP2 hooks the outputs of a layer: torch warns for views, on which an in-place operation would drop the hook."""
    x, branch = torch.randn(1, 5, 8, requires_grad=True), torch.randn(1, 5, 8)
    outputs = layers_cpu.AddRMSNorm.apply(x, branch, torch.ones(8), 1e-6, FP32)
    outputs = [*outputs, scatter_rows(x[0, :, 0], torch.tensor([0, 2, 3, 4, 7]), 2, 4)]
    assert all(output.requires_grad and output._base is None for output in outputs)
    assert torch.equal(outputs[2].flatten()[[0, 2, 3, 4, 7]], x[0, :, 0])
