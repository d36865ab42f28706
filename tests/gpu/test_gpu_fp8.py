"""FP8 on a Hopper GPU: the kernels compute what the emulation defines, and training and rollout the same log-probs."""

import pytest
import torch

from tests.engines.ranks import OPTIMIZER, make_batch, make_spec, qwen2, save_model, train

pytestmark = pytest.mark.gpu
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
if not is_hopper:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from verl.data.sequences import build_sequences  # noqa: E402
from verl.engines.base import MicroBatching  # noqa: E402
from verl.engines.torch_engine import TorchEngine  # noqa: E402
from verl.modeling import fp8, fp8_triton  # noqa: E402
from verl.modeling.fp8 import (  # noqa: E402
    BLOCK,
    Fp8Linear,
    Quantized,
    matmul,
    quantize_rows,
    quantize_weights,
    rounded,
    transposed,
)
from verl.protocol import DataProto  # noqa: E402
from verl.rollout.native.engine import NativeRollout  # noqa: E402
from verl.rollout.request import SamplingParams, make_requests  # noqa: E402

BF16 = torch.bfloat16


def randn(*shape: int) -> torch.Tensor:
    """Normal numbers whose size differs between columns."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    x = torch.randn(shape, device="cuda", generator=generator)
    return x * torch.rand(shape[-1], device="cuda", generator=generator).mul(6).exp()


@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
def test_rows_are_rounded_as_the_emulation_rounds_them(rows):
    x = randn(rows, 1408).to(BF16)
    codes, scales, _ = quantize_rows(x, emulated=False)
    groups = codes[:rows].float().view(rows, -1, BLOCK) * scales[:, :rows].t()[..., None]
    assert torch.equal(groups.view(rows, -1).to(BF16), rounded(x))


def test_weights_are_rounded_as_the_emulation_rounds_them():
    weights = [randn(256, 640), randn(128, 640)]
    codes, scales, _ = quantize_weights(weights, BF16, emulated=False)
    expected = quantize_weights(weights, BF16, emulated=True).codes
    blocks = codes.float().view(3, BLOCK, 5, BLOCK) * scales[:, None, :5, None]
    assert torch.equal(blocks.view(384, 640).to(BF16), expected)
    codes, scales, _ = transposed(Quantized(codes, scales), weights, BF16)
    blocks = codes.float().view(5, BLOCK, 3, BLOCK) * scales[:, None, :3, None]
    assert torch.equal(blocks.view(640, 384).to(BF16), expected.t())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_does_not_become_finite(bad):
    x = randn(80, 256).to(BF16)
    x[2, 5] = bad
    y = matmul(quantize_rows(x, False), quantize_weights([randn(128, 256)], BF16, False))
    assert not y[2].isfinite().any() and y[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(("outputs", "width"), [(256, 128), (1152, 896), (896, 4864), (640, 3584)])
def test_a_row_gets_the_same_bits_in_every_batch(outputs, width):
    """Both GEMMs add the groups in one order, whatever the number of rows: `rollout.deterministic` depends on it."""
    x, weight, bias = randn(4096, width).to(BF16), randn(outputs, width), randn(1, outputs)[0].to(BF16)
    quantized = quantize_weights([weight], BF16, emulated=False)
    whole = matmul(quantize_rows(x, False), quantized, bias)
    values = quantize_weights([weight], BF16, emulated=True).codes.double()
    expected = rounded(x).double() @ values.t() + bias.double()
    # tensor cores add the 128 terms of a group with 14 bits
    bound = 2**-6 * (rounded(x).double().abs() @ values.abs().t() + bias.double().abs())
    assert ((whole.double() - expected).abs() <= bound).all()
    for rows in (0, 1, 2, 5, 64, 65, 100, 128, 129, 256, 500, 1024, 2000):
        few = matmul(quantize_rows(x[:rows], False), quantized, bias)
        assert torch.equal(few, whole[:rows]), rows
    for rows in (1, 5, 64, 128):
        shares = fp8_triton.matmul_few_rows(*quantize_rows(x[:rows], False), *quantized[:2], splits=fp8_triton.SPLITS)
        close = shares.sum(0).double() + bias.double()
        assert ((close - expected[:rows]).abs() <= bound[:rows]).all()


def test_gradients_are_those_of_the_emulation():
    def gradients() -> list[torch.Tensor]:
        layer = torch.nn.Linear(640, 384, device="cuda")
        with torch.no_grad():
            layer.weight.copy_(randn(384, 640) / 100)
        layer.__class__ = Fp8Linear
        x = randn(300, 640).requires_grad_()
        with torch.autocast("cuda", BF16):
            layer(x).backward(randn(300, 384).to(BF16))
        return [x.grad, layer.weight.grad, layer.bias.grad]

    computed = gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "has_kernels", lambda weights, dtype: False)
        for x, y in zip(computed, gradients()):
            assert (x - y).norm() <= 0.01 * y.norm()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    config = qwen2()
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 384, 64
    return save_model(config, tmp_path_factory.mktemp("fp8"))


@pytest.mark.parametrize("deterministic", [True, False])
def test_training_and_rollout_compute_the_same_log_probs(path, deterministic):
    import dataclasses

    spec = dataclasses.replace(
        make_spec(path, OPTIMIZER, quantization="fp8", device="cuda"), deterministic=deterministic
    )
    engine = TorchEngine(spec)
    rollout = NativeRollout(engine.module, dtype=BF16, forward=engine.model_forward())
    prompts = [[1 + (7 * i + j) % 30 for j in range(1 + i % 9)] for i in range(80)]
    requests = make_requests(prompts, SamplingParams(40, (), seed=1, ignore_eos=True))
    for _ in range(2):  # before and after an update
        with torch.inference_mode():
            completions = rollout.generate(requests)
        columns = build_sequences(prompts, [each.token_ids for each in completions], pad_token_id=0)
        trained = engine.infer(DataProto.from_dict(columns), ("log_probs",), MicroBatching())["log_probs"]
        difference = (trained - torch.tensor([each.log_probs for each in completions])).abs()
        assert difference.max() == 0 if deterministic else difference.mean() < 0.1
        train(engine, make_batch(), MicroBatching(), steps=1)
