"""On a GPU: fused kernels and variable-length attention compute what plain torch computes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.ranks import make_engine
from verl.config.schema import OptimConfig
from verl.data.sequences import build_sequences
from verl.engines import memory
from verl.engines.base import MicroBatching
from verl.engines.torch_engine import TorchEngine
from verl.modeling import attention, log_probs
from verl.modeling.packing import Packing, build_input, to_device
from verl.protocol import DataProto
from verl.workers.engine_worker import aggregation
from verl.workers.policy import policy_objective

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def random_heads(tokens: int, heads: int, key_heads: int, dim: int) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient of the output, in bf16."""
    shapes = [(1, heads, tokens, dim), (1, key_heads, tokens, dim), (1, key_heads, tokens, dim)]
    leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    return [*leaves, torch.randn(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16)]


def attended(packing: Packing, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, **options) -> list:
    """Attention's output and the gradients of its inputs."""
    out, _ = attention.packed_attention(None, q, k, v, None, packing, **options)
    return [out, *torch.autograd.grad(out, (q, k, v), g)]


def apart_from_float64(packing: Packing, tokens: int, sizes: tuple[int, int, int], window: int | None) -> float:
    inputs = random_heads(tokens, *sizes)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = (attended(packing, *x, sliding_window=window) for x in (inputs, wide))
    return max(map(apart, found, expected))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 4, 64), (14, 2, 64), (16, 8, 128)])
def test_rows_by_the_variable_length_kernel(heads, key_heads, dim, window):
    torch.manual_seed(0)
    lengths = torch.tensor([3, 130, 1, 64, 77])
    packing = Packing.from_lengths(lengths.cuda())
    n = int(lengths.sum())
    assert apart_from_float64(packing, n, (heads, key_heads, dim), window) < 1e-2


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 4, 64), (14, 2, 64), (16, 8, 128)])
def test_rows_that_share_prompts_by_the_variable_length_kernel(heads, key_heads, dim, window):
    torch.manual_seed(0)
    prompts = [[1] * 70, [2] * 3, [1] * 70, [1] * 70, [2] * 3, [3] * 129]
    answers = [[5] * n for n in (60, 200, 1, 0, 7, 0)]
    columns = build_sequences(prompts, answers, pad_token_id=0)
    packing = to_device(build_input(columns, True, shared_prefix=True).packing, torch.device("cuda"))
    n = sum(packing.lengths)
    assert n == 70 + 3 + 129 + 268
    assert apart_from_float64(packing, n, (heads, key_heads, dim), window) < 1e-2


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(14, 2, 64), (16, 8, 128)])
@pytest.mark.parametrize("lengths", [[4096], [5003, 3700], [1, 9000]])
def test_long_rows_one_by_one(heads, key_heads, dim, lengths, monkeypatch):
    torch.manual_seed(0)
    packing = Packing.from_lengths(torch.tensor(lengths).cuda())
    n = sum(lengths)
    q, k, v, g = random_heads(n, heads, key_heads, dim)
    assert attention._one_call_per_row(packing, q) == attention._fast_cudnn(q.device)
    found = {}
    for by_row in (True, False):
        monkeypatch.setattr(attention, "_one_call_per_row", lambda *_, by_row=by_row: by_row)
        found[by_row] = attended(packing, q, k, v, g)
    assert max(map(apart, found[True], found[False])) < 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [50, 9001, 151936])
def test_statistics_of_the_logits_and_their_gradient(vocabulary, temperature):
    torch.manual_seed(0)
    states = torch.randn(33, 64, device="cuda", requires_grad=True)
    weight = (torch.randn(vocabulary, 64, device="cuda") / 4).requires_grad_()
    targets = torch.randint(vocabulary, (33,), device="cuda")
    found = {}
    for dtype in (torch.float32, torch.float64):
        s, w = (x.detach().to(dtype).requires_grad_() for x in (states, weight))
        names = log_probs.OUTPUTS
        outs = log_probs.token_statistics(s, targets, lambda x, w=w: x @ w.t(), vocabulary, names, temperature)
        total = sum((outs[name] * (i + 1)).sum() for i, name in enumerate(log_probs.OUTPUTS))
        found[dtype] = [*outs.values(), *torch.autograd.grad(total, (s, w))]
    assert max(map(apart, found[torch.float32], found[torch.float64])) < 1e-3


def engine(folder, kernels: str, dtype: str) -> TorchEngine:
    torch.manual_seed(0)
    return make_engine(
        folder,
        OptimConfig(lr=0.0),
        kernels=kernels,
        random_init=True,
        device="cuda",
        dtype=dtype,
        enable_gradient_checkpointing=False,
    )


@pytest.mark.parametrize("kernels", ["fused", "liger"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_kernels_give_the_gradient_of_plain_layers(kind, kernels, tmp_path):
    if kernels == "liger":
        pytest.importorskip("liger_kernel")
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    config = AutoConfig.for_model(kind, **sizes, num_key_value_heads=2, head_dim=64, vocab_size=1000)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1000, (n,), generator=generator).tolist() for n in (30, 7, 64, 90)]
    ids[2][:5] = ids[0][:5]  # prompts are shared in 16 bits alone
    columns = build_sequences([r[:5] for r in ids], [r[5:] for r in ids], pad_token_id=0)
    shape = columns["responses"].shape
    columns |= {"old_log_probs": torch.full(shape, -6.9), "advantages": torch.randn(shape, generator=generator)}
    batch = DataProto.from_dict(columns)
    # nothing is clipped: a token at the border would be on the one side in 16 bits, on the other in 32
    settings = {"clip_ratio": 5.0, "clip_ratio_c": 100.0, "entropy_coeff": 0.1, "use_kl_loss": False}
    found = {}
    for name, dtype in (("plain", "fp32"), (kernels, "bf16")):
        made = engine(tmp_path, name, dtype)
        agg = aggregation("token-mean", batch.batch["response_mask"], made, None)
        log_probs = made.infer(batch, ("log_probs",), MicroBatching(tokens=128))["log_probs"]
        kept = {}
        made.optimizer.step = lambda kept=kept, made=made: kept.update(
            {n: p.grad.clone() for n, p in made.module.named_parameters()}
        )
        made.train_batch(batch, policy_objective("vanilla", settings, agg), MicroBatching(tokens=128))
        found[name] = (log_probs, kept)
    (ours, gradients), (expected, exact) = found[kernels], found["plain"]
    assert (ours - expected).abs().mean() < 5e-3
    assert {n: round(apart(gradients[n], exact[n]), 3) for n in exact if apart(gradients[n], exact[n]) > 0.05} == {}


def test_activations_per_token_are_what_the_device_allocates(tmp_path):
    sizes = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8)
    config = AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=2, vocab_size=331)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    made = engine(tmp_path, "fused", "bf16")
    used = []
    with made._fixed_weights(training=True):
        kept = memory.measure_activations(made.probe_forward, made.module, made.model.vocab_size)
        for tokens in (2048, 6144):
            before = torch.cuda.memory_allocated()
            outputs = made.probe_forward(tokens)
            used.append(torch.cuda.memory_allocated() - before)
            del outputs
    per_token = (used[1] - used[0]) / 4096
    assert per_token == pytest.approx(kept.plain * 4 / (4 + memory.WORKING_LAYERS), rel=0.1)
