"""LoRA: only adapters train, everybody else sees merged weights, and nothing of it can fail silently."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    DeepseekV3Config,
    GptOssConfig,
    JetMoeConfig,
    Mamba2Config,
)

from tests.engines.ranks import (
    FLOAT64,
    MIXTURES,
    OPTIMIZER,
    SIZES,
    UNEVEN,
    assert_same,
    make_batch,
    make_engine,
    make_spec,
    qwen2,
    results,
    run_on_ranks,
    save_model,
    share_of,
    train,
)
from verl.config.schema import EngineConfig, ModelConfig, OptimConfig
from verl.engines.base import EngineSpec, MicroBatching
from verl.engines.loading import check_layers, check_model, load_module, resolve_model
from verl.engines.lora import _kind_of
from verl.engines.torch_engine import TorchEngine
from verl.model_merger.merge import MergeOptions, merge

pytest.importorskip("peft")

LORA = {"lora_rank": 3, "lora_alpha": 6}
CONTENTS = ("model", "optimizer", "extra")


@pytest.mark.parametrize(("adapters", "value"), [(LORA, float("nan")), ({}, float("inf"))])
def test_non_finite_weights_are_refused_at_load(tmp_path, adapters, value):
    path = save_model(qwen2(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 1] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"NaN or infinite values in 1 of \d+ parameters, the first is model.layers.1.mlp"
    ):
        load_module(resolve_model(EngineSpec("causal_lm", ModelConfig(path=path, **adapters))))


def by_hand(base: dict[str, torch.Tensor], adapter: Path, scale: float) -> dict[str, torch.Tensor]:
    """Base weights with the adapters of a folder added, from the files alone."""
    merged = {name: value.clone() for name, value in base.items()}
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            merged[target] = merged[target] + scale * sum(torch.outer(b[:, i], a[i]) for i in range(len(a)))
    return merged


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=atol), name


def test_new_adapters_change_nothing_and_training_changes_the_merged_weights(path, tmp_path):
    base = dict(make_engine(path).weights())
    engine = make_engine(path, OPTIMIZER, **LORA)
    assert engine.shared_module() is None  # a rollout on the module would use the weights without the adapters
    assert_close(dict(engine.weights()), base, atol=0)
    train(engine, make_batch(), MicroBatching(rows=3))
    engine.save(tmp_path, (*CONTENTS, "hf_model"))
    merged = dict(engine.weights())
    assert_close(merged, by_hand(base, tmp_path / "lora_adapter", scale=6 / 3))
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert changed == {name for name in base if name.split(".")[-2] in projections and name.endswith("weight")}
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    assert_close(dict(exported.named_parameters()), merged, atol=0)


def test_the_reference_is_the_model_that_training_started_from(path, tmp_path):
    batch = make_batch()

    def log_probs(engine: TorchEngine) -> torch.Tensor:
        return engine.infer(batch, ("log_probs",), MicroBatching())["log_probs"]

    base = log_probs(make_engine(path))
    engine = make_engine(path, OPTIMIZER, **LORA)
    train(engine, batch, MicroBatching())
    with engine.reference():
        assert torch.equal(log_probs(engine), base)
    after = log_probs(engine)
    assert (after - base).abs().max() > 0.05
    engine.save(tmp_path, ("model",))
    on = make_engine(path, OPTIMIZER, lora_adapter_path=str(tmp_path / "lora_adapter"))
    assert torch.equal(log_probs(on), after)
    config = tmp_path / "lora_adapter" / "adapter_config.json"  # peft adapts a layer that is named by its weight, too
    by_name = json.loads(config.read_text())
    *names, last = by_name["target_modules"]
    config.write_text(json.dumps(by_name | {"target_modules": names, "target_parameters": [f"{last}.weight"]}))
    by_weight = make_engine(path, OPTIMIZER, lora_adapter_path=str(tmp_path / "lora_adapter"))
    assert torch.equal(log_probs(by_weight), after)
    train(on, batch, MicroBatching())
    assert not torch.allclose(log_probs(on), after, atol=1e-3)
    with on.reference():  # not the bare base model: training started from the adapters that it was given
        assert torch.equal(log_probs(on), after)
    with pytest.raises(ValueError, match="all weights are trained"):
        make_engine(path, OPTIMIZER).reference()


def test_adapters_of_other_sizes_are_not_restored(path, tmp_path):
    make_engine(path, OPTIMIZER, **LORA).save(tmp_path, CONTENTS)
    for other, message in (
        ({"lora_rank": 3, "lora_alpha": 5}, "alpha 6"),
        ({"lora_rank": 2, "lora_alpha": 6}, "rank 3"),
        (LORA | {"target_modules": ["q_proj"]}, r"do not match the model: missing \[\], unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine(path, OPTIMIZER, **other).load(tmp_path, CONTENTS)


def test_what_is_saved_does_not_depend_on_the_process(path, tmp_path):
    """Python orders sets of text differently in each process."""
    make_engine(path, OPTIMIZER, **LORA, exclude_modules=["v_proj", "o_proj"]).save(tmp_path, CONTENTS)
    saved = json.loads((tmp_path / "lora_adapter/adapter_config.json").read_text())
    names = ["mlp.down", "mlp.gate", "mlp.up", "self_attn.k", "self_attn.o", "self_attn.q", "self_attn.v"]
    assert saved["target_modules"] == [f"model.layers.{layer}.{name}_proj" for layer in range(2) for name in names]
    assert saved["exclude_modules"] == ["o_proj", "v_proj"]


def test_a_value_model_trains_its_head_too_and_peft_reads_it(tmp_path):
    from peft import PeftModel

    path = save_model(qwen2(), tmp_path / "model", "value")
    engine = make_engine(path, OPTIMIZER, kind="value", **LORA)
    names = [name for name, p in engine.module.named_parameters() if p.requires_grad and ".lora_" not in name]
    assert names == ["score.weight", "score.bias"]
    train(engine, make_batch(), MicroBatching())
    engine.save(tmp_path / "out", CONTENTS)
    adapter = tmp_path / "out" / "lora_adapter"
    base = AutoModelForTokenClassification.from_pretrained(path)
    theirs = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    assert_close(dict(theirs.named_parameters()), dict(engine.weights()))
    other = make_engine(path, OPTIMIZER, kind="value", **LORA)
    other.load(tmp_path / "out", CONTENTS)
    assert_close(dict(other.weights()), dict(engine.weights()), atol=0)


def test_excluded_modules_get_no_adapter_and_the_log_says_what_is_trained(path, caplog):
    modules = {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}
    engine = make_engine(path, OPTIMIZER, lora_rank=2, **modules)
    with caplog.at_level("INFO", "verl.engines"):
        check_model(ModelConfig(path=path, lora_rank=2, **modules))
    adapted = {name.split(".lora_")[0] for name, _ in engine.module.named_parameters() if ".lora_" in name}
    assert adapted == {
        f"model.layers.{name}" for name in ("1.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.v_proj")
    }
    # q: 2 x (32 + 32), v: 2 x (32 + 16), twice; the first q is frozen, 32 x 32
    total = sum(p.numel() for p in engine.module.parameters())
    assert f"rank 2 on 3 layers (self_attn.q_proj, self_attn.v_proj); 320 of {total:,} parameters" in caplog.text
    assert f"self_attn.q_proj {100 * 32 * 32 / total:.2g}%" in caplog.text


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"lora_rank": 4, "target_modules": ["query"]}, "query"),
        ({"lora_rank": 4, "target_modules": ["lm_head"]}, "the weight of lm_head is shared"),
        ({"lora_rank": 4, "target_modules": ["embed_tokens"]}, "embed_tokens is a Embedding, expected Linear"),
        ({"lora_adapter_path": "nowhere/at/all"}, "nowhere/at/all"),
    ],
)
def test_adapters_that_fit_nothing_are_refused(lora, message, path):
    with pytest.raises(ValueError, match=message):
        make_engine(path, OPTIMIZER, **lora)


def test_other_sizes_than_the_given_adapters_are_refused(path, tmp_path):
    make_engine(path, OPTIMIZER, **LORA).save(tmp_path, ("model",))
    for rank, alpha in ((8, 16), (3, 16), (8, 6)):
        lora = {"lora_rank": rank, "lora_alpha": alpha, "lora_adapter_path": str(tmp_path / "lora_adapter")}
        message = rf"lora_rank {rank} and lora_alpha {alpha} differ from .*, 3 and 6: set lora_rank=0"
        with pytest.raises(ValueError, match=message):
            make_engine(path, OPTIMIZER, **lora)


def test_an_update_that_changes_no_adapter_is_an_error(path, monkeypatch):
    engine = make_engine(path, OptimConfig(lr=1e-3, weight_decay=0.0), **LORA)
    monkeypatch.setattr(engine.optimizer, "step", lambda: None)
    with pytest.raises(RuntimeError, match="changed none of the trained parameters"):
        train(engine, make_batch(), MicroBatching(), steps=1)


def test_adapters_on_16_bit_weights_are_trained_in_32(path):
    engine = make_engine(path, OptimConfig(lr=1e-6), dtype="bf16", **LORA)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.requires_grad}
    assert {p.dtype for p in before.values()} == {torch.float32}
    train(engine, make_batch(), MicroBatching())
    now = dict(engine.module.named_parameters())
    assert any(not torch.equal(now[name], p) for name, p in before.items())
    assert {value.dtype for _, value in engine.weights()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("dtypes", "kernels"),
    [({}, "fused"), ({"dtype": "fp32", "model_dtype": "bf16"}, "plain"), ({"dtype": "bf16"}, "plain")],
)
def test_kernels_that_cannot_cast_their_weights_are_not_used(path, dtypes, kernels):
    """On a CPU, which has no fused kernels in 16 bits either."""
    assert resolve_model(make_spec(path, **dtypes)).kernels == kernels


def with_adapters(path, size: float, **options):
    """An engine in bf16 whose adapters are not 0, with random numbers of this size."""
    engine = make_engine(path, OptimConfig(lr=0.0, weight_decay=0.0), dtype="bf16", **LORA, **options)
    torch.manual_seed(1)
    with torch.no_grad():
        for _, p in engine.adapters.parameters():
            p.copy_(size * torch.randn(p.shape))
    return engine


def log_probs(engine) -> torch.Tensor:
    return engine.infer(make_batch(), ("log_probs",), MicroBatching())["log_probs"]


@pytest.mark.parametrize("packs", [True, False])
def test_in_16_bits_training_computes_with_the_weights_that_are_pushed(path, packs):
    """What is lost because it is less than half of the last bit of a weight is lost in both."""
    engine, plain = (with_adapters(path, size, use_remove_padding=packs) for size in (0.03, 0.0))
    initial, pushed = log_probs(plain), dict(engine.weights())
    with torch.no_grad():
        for name, value in plain.adapters.base():
            value.copy_(pushed[name])
    assert torch.equal(log_probs(engine), log_probs(plain))
    assert (log_probs(engine) - initial).abs().max() > 1e-3
    with engine.reference():
        assert torch.equal(log_probs(engine), initial)


def test_gradients_in_16_bits_are_those_of_float32(path):
    def gradients(engine) -> torch.Tensor:
        collected = {}
        hook = lambda *_: collected.update({n: p.grad.clone() for n, p in engine.adapters.parameters()})  # noqa: E731
        engine.optimizer.register_step_pre_hook(hook)
        train(engine, make_batch(), MicroBatching(), steps=1)
        return torch.cat([g.flatten() for g in collected.values()])

    engine = with_adapters(path, 0.1)
    exact = make_engine(path, OptimConfig(lr=0.0, weight_decay=0.0), **LORA, **FLOAT64)
    with torch.no_grad():
        for (_, p), (_, q) in zip(exact.adapters.parameters(), engine.adapters.parameters(), strict=True):
            p.copy_(q)
    computed, expected = gradients(engine).double(), gradients(exact).double()
    assert (computed - expected).norm() < 0.05 * expected.norm()


# ---- over ranks -------------------------------------------------------------------------------------------------


def on_rank(path: str, out: Path, layouts: list[dict]) -> list[dict]:
    """The results of an engine of each layout, and their checkpoints in folders with its number."""
    found = []
    for i, layout in enumerate(layouts):
        engine = make_engine(path, OPTIMIZER, sharded=True, **LORA, **layout, **FLOAT64)
        share = share_of(engine, make_batch())
        with engine.reference():  # before anything else: what FSDP sets up in the first pass must not depend on it
            first = engine.infer(share, ("log_probs",), UNEVEN)["log_probs"]
        found.append(results(engine, make_batch(), UNEVEN))
        with engine.reference():
            assert torch.equal(engine.infer(share, ("log_probs",), UNEVEN)["log_probs"], first)
        engine.save(out / str(i), (*CONTENTS, "hf_model"))
    return found


SP = {"ulysses_sequence_parallel_size": 2}
LAYOUTS = [(2, [{}, SP | {"reshard_after_forward": False}]), (4, [SP | {"fsdp_size": 2}])]


@pytest.mark.parametrize(("world", "layouts"), [LAYOUTS[0], pytest.param(*LAYOUTS[1], marks=pytest.mark.slow)])
def test_ranks_give_the_numbers_of_one_device(world, layouts, path, tmp_path):
    for i, ranks in enumerate(zip(*run_on_ranks(world, on_rank, path, tmp_path, layouts))):
        alone = make_engine(path, OPTIMIZER, **LORA, **FLOAT64)
        assert_same(ranks, results(alone, make_batch(), MicroBatching()), atol=1e-9)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / str(i) / "huggingface", dtype=torch.float64)
        assert_close(dict(exported.named_parameters()), ranks[0]["weights"], atol=0)
        # and one device resumes from the ranks' checkpoint
        alone.load(tmp_path / str(i), CONTENTS)
        assert_close(dict(alone.weights()), ranks[0]["weights"], atol=1e-15)


# ---- mixtures of experts, and layers that an adapter cannot change ---------------------------------------------

MIXTURE = {"lora_rank": 3, "lora_alpha": 6, "target_parameters": ["all-experts"]}


def deepseek() -> DeepseekV3Config:
    """A dense layer, then one with four routed experts and a shared one."""
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    sizes = SIZES | {"num_key_value_heads": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    return DeepseekV3Config(**sizes, **heads, **experts, head_dim=4)


def gpt_oss() -> GptOssConfig:
    """Experts as (experts, in, out), whose down_proj is square."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    return GptOssConfig(**SIZES | experts, head_dim=8, layer_types=["full_attention"] * 2)


@pytest.mark.fast("gpt_oss")
@pytest.mark.parametrize("config", [deepseek, gpt_oss])
def test_adapters_of_experts_are_merged_and_read_by_peft(config, tmp_path):
    from peft import PeftModel

    path, actor = save_model(config(), tmp_path / "model"), tmp_path / "run" / "actor"
    engine = make_engine(path, OPTIMIZER, use_remove_padding=False, **MIXTURE)
    base = {name: value.clone() for name, value in engine.adapters.base()}
    train(engine, make_batch(), MicroBatching())
    engine.save(actor, CONTENTS)
    merged = dict(engine.weights())
    changed = {name.split(".")[-1] for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {"weight", "gate_up_proj", "down_proj"}
    # one expert by hand: row e r + k of A, column k E + e of B, scaled by alpha / r = 2
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(actor / "lora_adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.experts.base_layer"
    a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
    delta = 2 * sum(torch.outer(b[:, k * 4 + 3], a[3 * 3 + k]) for k in range(3))
    expected = base[name][3] + (delta.T if config is gpt_oss else delta)
    assert torch.allclose(merged[name][3], expected, atol=1e-6)
    ids = torch.arange(1, 9)[None]
    logits = engine.module.eval()(ids).logits
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), actor / "lora_adapter").eval()
    assert torch.allclose(theirs(ids).logits, logits, atol=1e-5)
    merge(MergeOptions(actor, tmp_path / "merged"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(plain(ids).logits, logits, atol=1e-4)
    adapter = str(actor / "lora_adapter")
    reloaded = make_engine(path, OPTIMIZER, use_remove_padding=False, lora_adapter_path=adapter)
    assert_close(dict(reloaded.weights()), merged, atol=0)


def test_the_log_names_frozen_experts(tmp_path, caplog):
    path = save_model(deepseek(), tmp_path)
    with caplog.at_level("INFO", "verl.engines"):
        check_model(ModelConfig(path=path, lora_rank=2))
    line = caplog.messages[-1]
    # 4 x (48 x 32 + 32 x 24) of all
    total = sum(p.numel() for p in make_engine(path, lora_rank=2).module.parameters())
    assert f"experts.gate_up_proj {100 * 4 * 48 * 32 / total:.2g}%" in line and "mlp.gate " in line
    assert "shared_experts.up_proj" in line and "model.target_parameters=[all-experts] adapts the experts" in line
    caplog.clear()
    with caplog.at_level("INFO", "verl.engines"):
        check_model(ModelConfig(path=path, **MIXTURE))
    assert "adapts the experts" not in caplog.text


def test_names_of_parameters_without_the_number_of_their_layer():
    names = ("model.layers.0.mlp.up_proj.weight", "backbone.layers.12.norm.weight", "lm_head.weight")
    assert [*map(_kind_of, names)] == ["mlp.up_proj", "norm", "lm_head"]


def adapted_names(config, folder: Path) -> set[str]:
    module = make_engine(save_model(config, folder), use_remove_padding=False, lora_rank=2).module
    return {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in module.named_parameters() if ".lora_A" in name}


def test_layers_that_an_adapter_cannot_change_are_frozen(tmp_path):
    mamba = Mamba2Config(
        **{"num_heads": 8, "head_dim": 8, "hidden_size": 32, "state_size": 8, "n_groups": 1, "chunk_size": 4},
        **{"num_hidden_layers": 2, "vocab_size": 32},
    )
    assert adapted_names(mamba, tmp_path / "mamba") == {"in_proj"}  # out_proj.weight is an argument of its kernel
    router = JetMoeConfig(
        **{"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8},
        **{"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    )
    assert adapted_names(router, tmp_path / "router") == {"kv_proj"}  # not router.layer, of four outputs
    path = str(tmp_path / "mamba")
    with pytest.raises(ValueError, match=r"Mamba2Mixer passes the weight of .*out_proj to a kernel"):
        make_engine(path, use_remove_padding=False, lora_rank=2, target_modules=["out_proj"])


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (qwen2, ["all-experts"], "Qwen2ForCausalLM has no fused experts: remove the key"),
        (deepseek, ["experts.up_proj"], r"no tensor of experts is called 'experts.up_proj': .*experts.gate_up_proj"),
    ],
)
def test_expert_tensors_that_do_not_exist_are_refused(config, names, message, tmp_path):
    path = save_model(config(), tmp_path)
    with pytest.raises(ValueError, match=message):
        check_model(ModelConfig(path=path, lora_rank=2, target_parameters=names))


def test_experts_with_adapters_are_not_distributed(tmp_path):
    model = ModelConfig(path=save_model(MIXTURES["qwen3_moe"], tmp_path), **MIXTURE)
    with pytest.raises(ValueError, match="expert_parallel_size=2: experts with LoRA adapters are not distributed"):
        check_layers(model, "causal_lm", EngineConfig(expert_parallel_size=2), deterministic=False, replays=False)


def in_16_bits_on_rank(path: str, sharded: bool = True) -> tuple[torch.Tensor, float]:
    """Log-probs of this rank's rows after two updates in bf16, and the norm of the last gradient."""
    engine = make_engine(path, OPTIMIZER, sharded=sharded, dtype="bf16", **LORA)
    share = share_of(engine, make_batch())
    metrics = train(engine, share, MicroBatching(), 2)
    return engine.infer(share, ("log_probs",), MicroBatching())["log_probs"], metrics["grad_norm"]


def test_ranks_in_16_bits_train_as_one_device(path):
    """The merged weights are computed from gathered shards, again in the backward pass."""
    log_probs, norm = in_16_bits_on_rank(path, sharded=False)
    ranks = run_on_ranks(2, in_16_bits_on_rank, path)
    assert [found for _, found in ranks] == pytest.approx([norm, norm], rel=0.02)
    assert (torch.cat([found for found, _ in ranks]) - log_probs).abs().max() < 0.02
