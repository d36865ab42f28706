"""The functions between the GEMMs of a layer on a CPU against formulas in float64; layers and updates made of them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.ranks import make_engine
from verl.config.schema import OptimConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.modeling import layers_cpu
from verl.modeling.indexing import gather_rows, repeat_rows, scatter_rows
from verl.modeling.layers_cpu import AddRMSNorm, RMSNorm, Rotary, RotaryQKV, SwiGLU
from verl.protocol import DataProto
from verl.workers.engine_worker import aggregation
from verl.workers.policy import policy_objective


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Rows do not fit into one block, nor the last block into its size."""
    monkeypatch.setattr(layers_cpu, "BLOCK", 100)


def check(ours, formula, inputs: list[torch.Tensor]) -> None:
    """Outputs and gradients in float32 against the formula's in float64."""
    results = []
    for function, dtype in ((ours, torch.float32), (formula, torch.float64)):
        given = [x.to(dtype).requires_grad_() for x in inputs]
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum((y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view(y.shape)).sum() for y in outputs)
        results.append((*outputs, *torch.autograd.grad(total, given)))
    for found, expected in zip(*results):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3)


def test_norm_and_norm_of_a_sum():
    def of_a_sum(x, branch, weight):
        return AddRMSNorm.apply(x, branch, weight, 1e-3, x.dtype)

    inputs = [normal(2, 7, 24), normal(2, 7, 24) * 3, normal(24)]
    check(of_a_sum, lambda x, branch, weight: (x + branch, rms_norm(x + branch, weight)), inputs)
    # the sum may go nowhere, as after the last layer
    check(lambda *given: of_a_sum(*given)[1], lambda x, branch, weight: rms_norm(x + branch, weight), inputs)
    check(lambda x, weight: RMSNorm.apply(x, weight, 1e-3, x.dtype), rms_norm, [inputs[0], inputs[2]])


def test_swiglu_of_two_tensors_and_of_one():
    def formula(gate, up):
        return gate * torch.sigmoid(gate) * up

    check(SwiGLU.apply, formula, [normal(2, 5, 24), normal(2, 5, 24) + 1])
    check(SwiGLU.apply, lambda joint: formula(*joint.chunk(2, -1)), [normal(2, 5, 48)])


@pytest.mark.parametrize("norms", [0, 2])
def test_rotary_embedding_of_queries_and_keys(norms):
    heads, size, tokens = (6, 2), 8, 9
    angles = normal(tokens, size // 2).double()
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))

    def formula(qkv, *weights):
        q, k, v = qkv.view(tokens, -1, size).split((*heads, heads[1]), 1)
        q, k = (rms_norm(x, w) for x, w in zip((q, k), weights)) if weights else (q, k)
        first, second = slice(0, size // 2), slice(size // 2, None)
        q, k = (x * cos[:, None] + torch.cat((-x[..., second], x[..., first]), -1) * sin[:, None] for x in (q, k))
        return q, k, v

    def ours(qkv, *weights):
        return RotaryQKV.apply(qkv, cos.float(), sin.float(), heads, 1e-3, *weights)

    check(ours, formula, [normal(tokens, 10 * size), *(normal(size + i)[:size] for i in range(norms))])


def test_rotary_embedding_of_heads():
    heads, size, tokens = 3, 8, 9
    cos, sin = normal(tokens, size).double(), normal(tokens + 1, size)[:tokens].double()

    def formula(x):
        turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return x * cos[:, None] + turned * sin[:, None]

    # not contiguous
    check(
        lambda x: Rotary.apply(x[:, :heads], cos.float(), sin.float()),
        lambda x: formula(x[:, :heads]),
        [normal(tokens, heads + 2, size)],
    )


def test_scatter_and_gather_of_rows():
    index = torch.tensor([4, 0, 3])
    check(
        lambda x: scatter_rows(x, index, 6),
        lambda x: torch.zeros(6, 2).double().index_copy(0, index, x),
        [normal(3, 2)],
    )
    check(lambda x: gather_rows(x, index), lambda x: x[index], [normal(6, 2)])
    source = torch.tensor([1, 0, 2, 1, 1])
    check(lambda x: repeat_rows(x, source, torch.tensor([1, 3, 2])), lambda x: x[source], [normal(3, 2)])


def update(folder, kernels: str, remove_padding: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Log-probs, gradients of an update, and the tokens that its embedding saw."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(97, (n,), generator=generator).tolist() for n in (5, 5, 3)]
    answers = [torch.randint(97, (n,), generator=generator).tolist() for n in (4, 7, 1, 6, 7, 2)]
    columns = build_sequences([prompts[i // 2] for i in range(6)], answers, pad_token_id=0)
    shape = columns["responses"].shape
    columns |= {"old_log_probs": torch.full(shape, -4.6), "advantages": torch.randn(shape, generator=generator)}
    batch = DataProto.from_dict(columns)
    engine = make_engine(
        folder, OptimConfig(lr=0.0), random_init=True, kernels=kernels, use_remove_padding=remove_padding
    )
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


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_fused_layers_over_shared_prompts_are_the_plain_ones_over_padded_rows(kind, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **sizes, num_key_value_heads=2, vocab_size=97, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    log_probs, gradients, tokens = update(tmp_path, "fused", remove_padding=True)
    expected, expected_gradients, _ = update(tmp_path, "plain", remove_padding=False)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert tokens == 4 + 7 + 1 + 6 + 7 + 2 + 5 + 5 + 3, "a prompt of two rows is computed once"


def test_what_a_layer_returns_is_no_view():
    """FSDP2 hooks the outputs of a layer: torch warns for views, on which an in-place operation would drop the hook."""
    x, branch = torch.randn(1, 5, 8, requires_grad=True), torch.randn(1, 5, 8)
    outputs = layers_cpu.AddRMSNorm.apply(x, branch, torch.ones(8), 1e-6, torch.float32)
    outputs = [*outputs, scatter_rows(x[0, :, 0], torch.tensor([0, 2, 3, 4, 7]), 2, 4)]
    assert all(output.requires_grad and output._base is None for output in outputs)
    assert torch.equal(outputs[2].flatten()[[0, 2, 3, 4, 7]], x[0, :, 0])
