"""FP8 linear layers: the numbers of E4M3, their gradients, and which layers have them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config

from tests.engines.ranks import MIXTURES, OPTIMIZER, make_batch, make_engine, make_spec, qwen2, save_model, train
from verl.config import load_config
from verl.config.errors import ConfigError
from verl.config.schema import GenerationConfig, ModelConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.engines.quantization import check_quantization
from verl.engines.torch_engine import TorchEngine
from verl.modeling import fp8
from verl.modeling.fp8 import BLOCK, Fp8Linear, power_of_two_scale, rounded, use_fp8
from verl.protocol import DataProto
from verl.rollout.loading import empty_module
from verl.rollout.native.engine import NativeRollout
from verl.rollout.request import SamplingParams, make_requests
from verl.weight_sync import ModuleReceiver

ALL = MicroBatching()
#: all finite numbers of E4M3, from its definition: sign, 4 bits of exponent with bias 7, 3 bits of mantissa
LEVELS = torch.tensor(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1],
    dtype=torch.float64,
)
ALL_LEVELS = torch.cat((-LEVELS.flip(0), LEVELS))


def reference(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`rounded` by its definition, element by element: the nearest number times the scale, in float64."""
    y = torch.empty_like(x, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], BLOCK):
            block = x[i : i + rows, j : j + BLOCK].double()
            scale = 2.0 ** torch.ceil(torch.log2(block.abs().max() / 448))
            nearest = (block[..., None] / scale - ALL_LEVELS).abs().argmin(-1)
            y[i : i + rows, j : j + BLOCK] = ALL_LEVELS[nearest] * scale
    return y


def test_the_largest_number_is_448():
    assert LEVELS.max() == 448 and len(LEVELS) == 127


@pytest.mark.parametrize("shape", [(5, 300), (200, 128), (1, 7)])
@pytest.mark.parametrize("rows", [1, BLOCK])
def test_values_are_the_nearest_e4m3_numbers_of_their_block(shape, rows):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).mul(8).exp()
    expected = reference(x, rows)
    # a number between two levels may be rounded to either
    ties = (rounded(x, rows) - expected).abs() > 0
    assert ties.float().mean() < 1e-3
    assert torch.equal(rounded(x, rows)[~ties].double(), expected[~ties])


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448.0, 1.0), (448.00003, 2.0), (224.0, 0.5), (225.0, 1.0), (1.0, 2.0**-8), (0.0, 2.0**-126)],
)
def test_scales_are_powers_of_two(largest, scale):
    assert power_of_two_scale(torch.tensor([largest])).item() == scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_exact_in_16_bits_and_stay_when_rounded_again(dtype):
    x = torch.randn(130, 257).to(dtype)
    for rows in (1, BLOCK):
        values = rounded(x, rows)
        assert values.dtype == dtype
        assert torch.equal(values.to(torch.bfloat16).to(dtype), values)
        assert torch.equal(rounded(values, rows), values)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_does_not_become_finite(bad):
    x = torch.randn(2, 256)
    x[0, 3] = bad
    values = rounded(x)
    assert not values[0, :128].isfinite().all() and values[0, 128:].isfinite().all() and values[1].isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_straight_through(bias):
    """y = Q(x) Q(W)^T + b, with dQ = 1: dW = g^T x, dx = Q(g) Q(W), db = sum of g."""
    torch.manual_seed(0)
    layer = nn.Linear(160, 24, bias=bias)
    layer.__class__ = Fp8Linear
    x, g = torch.randn(3, 5, 160, requires_grad=True), torch.randn(3, 5, 24)
    y = layer(x)
    y.backward(g)
    values, weight, rows = rounded(x.detach().view(15, 160)), rounded(layer.weight.detach(), BLOCK), g.view(15, 24)
    expected = values.double() @ weight.double().t() + (layer.bias.detach().double() if bias else 0)
    assert torch.allclose(y.detach().view(15, 24).double(), expected, atol=1e-5)
    assert torch.allclose(layer.weight.grad, rows.t() @ x.detach().view(15, 160), atol=1e-5)
    assert torch.allclose(x.grad.view(15, 160), rounded(rows) @ weight, atol=1e-5)
    if bias:
        assert torch.allclose(layer.bias.grad, rows.sum(0), atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", *MIXTURES])
def test_layers_outside_of_the_decoder_layers_and_experts_keep_their_dtype(tmp_path, name):
    config = qwen2() if name == "qwen2" else MIXTURES[name]
    module = make_engine(save_model(config, tmp_path), quantization="fp8").module
    layers = {path.split(".")[-1] for path, each in module.named_modules() if isinstance(each, Fp8Linear)}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert layers == attention | ({"gate_proj", "up_proj", "down_proj"} if name == "qwen2" else set())
    plain = make_engine(save_model(config, tmp_path)).module
    assert [*module.state_dict()] == [*plain.state_dict()]  # checkpoints have the same names


def log_probs(engine, micro: MicroBatching = ALL) -> torch.Tensor:
    return engine.infer(make_batch(), ("log_probs",), micro)["log_probs"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(qwen2(), tmp_path_factory.mktemp("fp8") / "model")


def test_fused_plain_and_padded_layers_compute_the_same_model(path):
    options = {"plain": {}, "fused": {}, "padded": {"use_remove_padding": False}}
    engines = {
        name: make_engine(path, OPTIMIZER, quantization="fp8", kernels="fused" if name == "fused" else "plain", **more)
        for name, more in options.items()
    }
    expected = log_probs(engines["plain"])
    assert (expected - log_probs(make_engine(path))).abs().max() > 1e-3  # rounding is not without effect
    for name, engine in engines.items():
        assert torch.allclose(log_probs(engine, MicroBatching(rows=1)), expected, atol=1e-5), name
        train(engine, make_batch(), MicroBatching(tokens=14))
    trained = {name: engine.module.state_dict() for name, engine in engines.items()}
    for key, value in trained["plain"].items():
        for name in ("fused", "padded"):
            assert torch.allclose(trained[name][key], value, atol=2e-4), (name, key)


@pytest.mark.fast("dtypes0", "dtypes2")
@pytest.mark.parametrize(
    "dtypes", [{"dtype": "bf16"}, {"model_dtype": "bf16", "dtype": "fp32"}, {"model_dtype": "bf16", "dtype": "bf16"}]
)
def test_weights_of_another_dtype_are_trained(path, dtypes):
    """The weights of FP8 layers change as those of the layers around them do."""
    engine = make_engine(path, OPTIMIZER, quantization="fp8", **dtypes)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    expected = log_probs(engine)
    assert (log_probs(engine, MicroBatching(rows=1)) - expected).abs().max() < 0.05
    train(engine, make_batch(), MicroBatching(rows=4), steps=1)
    changed = {name: (value - before[name]).abs().mean() for name, value in engine.module.state_dict().items()}
    assert min(value for name, value in changed.items() if "proj.weight" in name) > 1e-3, changed


@pytest.mark.slow
def test_a_run_resumes_and_exports_the_trained_weights(path, tmp_path):
    contents = ("model", "optimizer", "extra")
    engine = make_engine(path, OPTIMIZER, quantization="fp8")
    train(engine, make_batch(), MicroBatching())
    engine.save(tmp_path / "actor", (*contents, "hf_model"))
    resumed = make_engine(path, OPTIMIZER, quantization="fp8")
    resumed.load(tmp_path / "actor", contents)
    for each in (engine, resumed):
        train(each, make_batch(), MicroBatching())
    assert torch.equal(log_probs(resumed), log_probs(engine))
    exported = make_engine(str(tmp_path / "actor" / "huggingface"), quantization="fp8")
    assert exported.module.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    resumed.load(tmp_path / "actor", contents)
    assert torch.equal(log_probs(exported), log_probs(resumed))


def test_an_update_quantizes_each_weight_once(path, monkeypatch):
    calls, quantize = [], fp8.quantize_weights
    monkeypatch.setattr(fp8, "quantize_weights", lambda *args: calls.append(args) or quantize(*args))
    engine = make_engine(path, OPTIMIZER, quantization="fp8")
    train(engine, make_batch(), MicroBatching(rows=1), steps=1)
    assert len(calls) == 2 * 7  # of two layers


def test_an_input_without_rows_is_an_empty_output():
    layer = nn.Linear(8, 4)
    layer.__class__ = Fp8Linear
    assert layer(torch.zeros(0, 8)).shape == F.linear(torch.zeros(0, 8), layer.weight).shape


# ---- generation ------------------------------------------------------------------------------------------------------


def mismatch(engine: TorchEngine, rollout: NativeRollout) -> torch.Tensor:
    """The differences between the log-probs of sampled tokens, of requests with prompts of several lengths."""
    prompts = [[1, 2, 3, 4], [5, 6, 7], [8, 9]] * 3
    requests = make_requests(prompts, SamplingParams(24, (), seed=1, ignore_eos=True))
    completions = rollout.generate(requests)
    columns = build_sequences(prompts, [each.token_ids for each in completions], pad_token_id=0)
    trained = engine.infer(DataProto.from_dict(columns), ("log_probs",), MicroBatching())["log_probs"]
    return (trained - torch.tensor([each.log_probs for each in completions])).abs()


@pytest.mark.parametrize("name", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_training_and_rollout_have_one_precision(name, tmp_path):
    """A rollout in FP8 with training in float32 differs by far more."""
    path = save_model(qwen2() if name == "qwen2" else MIXTURES[name], tmp_path)
    engine = make_engine(path, OPTIMIZER, quantization="fp8", kernels="fused")
    rollout = NativeRollout(engine.module)
    for _ in range(2):  # after an update too
        assert mismatch(engine, rollout).max() < 1e-4
        train(engine, make_batch(), MicroBatching())
    plain = make_engine(path)
    assert mismatch(plain, NativeRollout(use_fp8(make_engine(path).module))).mean() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_deterministic_log_probs_have_the_same_bits(path, dtype):
    spec = replace(make_spec(path, OPTIMIZER, quantization="fp8", dtype=dtype), deterministic=True)
    engine = TorchEngine(spec)
    rollout = NativeRollout(engine.module, forward=engine.model_forward())
    for _ in range(2):
        assert mismatch(engine, rollout).max() == 0
        train(engine, make_batch(), MicroBatching(), steps=1)


def test_an_engine_with_separate_weights_quantizes_what_it_receives(path):
    engine = make_engine(path, OPTIMIZER, quantization="fp8")
    module = empty_module(engine.spec.model, torch.float32, engine.device, engine.buffers())
    rollout = NativeRollout(module, weights=ModuleReceiver(module))
    for version in range(2):
        rollout.weights.receive(engine.rollout_weights(torch.float32), version)
        assert mismatch(engine, rollout).max() < 1e-4
        train(engine, make_batch(), MicroBatching(), steps=1)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora_rank"),
        (["actor_rollout_ref.model.use_liger=true"], "actor_rollout_ref.model.use_liger"),
        (["actor_rollout_ref.actor.strategy=megatron"], "actor_rollout_ref.actor.strategy"),
        (["actor_rollout_ref.actor.fsdp_config.dtype=fp16"], "actor_rollout_ref.actor.fsdp_config.dtype"),
        (["actor_rollout_ref.rollout.name=hf"], "actor_rollout_ref.rollout.name"),
        (["actor_rollout_ref.rollout.name=vllm"], "actor_rollout_ref.rollout.name"),
        (["critic.model.quantization=fp8", "critic.strategy=megatron"], "critic.strategy"),
    ],
)
def test_what_is_not_supported_is_refused(settings, problem):
    model = ["actor_rollout_ref.model.path=x", "data.train_files=x.parquet", "actor_rollout_ref.model.quantization=fp8"]
    load_config(overrides=model)
    with pytest.raises(ConfigError, match=f"{problem}.*not supported with model.quantization=fp8: use "):
        load_config(overrides=[*model, *settings])


def test_generation_alone_refuses_other_engines_too():
    settings = ["model.path=x", "data.path=x.parquet", "data.output_path=y.parquet", "model.quantization=fp8"]
    read = partial(load_config, schema=GenerationConfig)
    assert read(overrides=[*settings, "rollout.name=native"]).model.quantization == "fp8"
    with pytest.raises(ConfigError, match=r"rollout\.name.*not supported with model.quantization=fp8: use 'native'"):
        read(overrides=[*settings, "rollout.name=vllm"])


def test_families_that_were_not_tried_are_refused(tmp_path):
    path = save_model(GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2), tmp_path)
    with pytest.raises(ValueError, match=r"model\.quantization=fp8: gpt2 is not supported, only llama, "):
        check_quantization(ModelConfig(path=path, quantization="fp8"), 1)
