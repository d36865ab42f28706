"""The engine of strategy=megatron in one process: weights, logits and updates of the fsdp engine."""

import pytest
import torch

from tests.engines.megatron_cpu import skip_reason

if reason := skip_reason():
    pytest.skip(reason, allow_module_level=True)

from transformers import AutoModelForCausalLM

from tests.engines.megatron_cpu.ranks import MODELS, OPTIMIZER, megatron_engine, read_shards
from tests.engines.ranks import make_batch, make_engine, save_model, train
from verl.engines.base import MicroBatching
from verl.engines.megatron.layout import ShardRank, conversions
from verl.engines.megatron.memory import optimizer_tensors
from verl.model_merger.__main__ import main as merger

CONTENTS = ("model", "optimizer", "extra", "hf_model")
OUTPUTS = ("log_probs", "entropys", "sum_pi_squared")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral"])
def test_five_steps_are_those_of_the_fsdp_engine(name, tmp_path):
    path = save_model(MODELS[name], tmp_path)
    found, expected, batch = megatron_engine(path), make_engine(path, OPTIMIZER), make_batch()
    original = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = dict(found.weights())
    assert weights.keys() == dict(original.named_parameters()).keys()
    assert all(torch.equal(weights[key], p) for key, p in original.named_parameters())
    for micro in (MicroBatching(), MicroBatching(rows=3), MicroBatching(tokens=18)):
        for key, value in found.infer(batch, OUTPUTS, micro, temperature=0.7).items():
            assert torch.allclose(value, expected.infer(batch, OUTPUTS, micro, 0.7)[key], atol=1e-5), key
    for _ in range(5):
        ours, theirs = (train(each, batch, MicroBatching(rows=3), steps=1) for each in (found, expected))
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    after = [each.infer(batch, ("log_probs",), MicroBatching())["log_probs"] for each in (found, expected)]
    assert torch.allclose(*after, atol=1e-5)


def computed_tokens(engine):
    """A list that gets the number of tokens of each forward pass from now on."""
    found = []
    engine.chunks[0].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].input_ids.shape[1]))
    return found


@pytest.mark.parametrize("name", ["mistral", "qwen3_moe"])
def test_a_prompt_is_computed_once_for_its_responses(name, tmp_path):
    path, batch = save_model(MODELS[name], tmp_path), make_batch(samples=4)
    engines = megatron_engine(path), make_engine(path, OPTIMIZER, use_remove_padding=False)
    tokens = computed_tokens(engines[0])
    for _ in range(5):
        found, expected = (train(each, batch, MicroBatching(tokens=60), steps=1) for each in engines)
        for key in ("grad_norm", "pg_loss", "kl_loss", "entropy"):
            if key in expected:
                assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key
    after = [each.infer(batch, OUTPUTS, MicroBatching(tokens=60)) for each in engines]
    assert all(torch.allclose(after[0][key], value, atol=1e-5) for key, value in after[1].items())
    mask = batch.batch["attention_mask"]
    width = batch.batch["responses"].shape[1]
    prompts, responses = mask[:, :-width].sum(1), mask[:, -width:].sum(1)
    assert sum(tokens) == 6 * int(prompts[::4].sum() + responses.sum())


def test_routers_with_losses_see_the_prompt_of_every_row(tmp_path):
    """The load-balancing loss is a mean over all tokens."""
    path, batch = save_model(MODELS["qwen3_moe"], tmp_path), make_batch(samples=4)
    engine = megatron_engine(path, override_transformer_config={"moe_aux_loss_coeff": 0.1})
    tokens = computed_tokens(engine)
    train(engine, batch, MicroBatching(), steps=1)
    assert tokens == [int(batch.batch["attention_mask"].sum())]


def test_padding_is_not_computed_and_has_the_same_results(tmp_path):
    path, batch = save_model(MODELS["qwen3"], tmp_path), make_batch()
    engines = [megatron_engine(path, use_remove_padding=False), make_engine(path, OPTIMIZER, use_remove_padding=False)]
    found, expected = (train(each, batch, MicroBatching(rows=3), 1) for each in engines)
    assert all(found[key] == pytest.approx(value, rel=1e-5, abs=1e-5) for key, value in expected.items())
    outputs = [each.infer(batch, OUTPUTS, MicroBatching(rows=3)) for each in engines]
    assert all(torch.allclose(outputs[0][key], value, atol=1e-5) for key, value in outputs[1].items())


def test_a_sampled_padding_token_gets_the_gradient_of_transformers(tmp_path):
    """transformers gives the embedding row of the padding token no gradient."""
    config = MODELS["llama"].__class__.from_dict(MODELS["llama"].to_dict() | {"pad_token_id": 13})
    path, batch = save_model(config, tmp_path), make_batch()
    assert (batch.batch["responses"] == 13).any()
    found, expected = (
        train(each, batch, MicroBatching(), 1) for each in (megatron_engine(path), make_engine(path, OPTIMIZER))
    )
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
SELECTIVE = {"override_transformer_config": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}}


@pytest.mark.parametrize(
    "keys",
    [SELECTIVE, OFFLOAD, {"use_distributed_optimizer": False} | OFFLOAD, {"enable_gradient_checkpointing": True}],
)
def test_a_checkpoint_resumes_exactly_and_exports(keys, tmp_path):
    path, batch = save_model(MODELS["qwen3"], tmp_path / "model"), make_batch()
    engine = megatron_engine(path, **keys)
    train(engine, batch, MicroBatching(rows=3))
    engine.save(tmp_path / "saved", CONTENTS)
    resumed = megatron_engine(path, **keys)
    resumed.load(tmp_path / "saved", CONTENTS[:3])
    norms = [train(each, batch, MicroBatching(rows=3))["grad_norm"] for each in (engine, resumed)]
    assert norms[0] == norms[1] and engine.lr_step() == resumed.lr_step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(engine.weights(), resumed.weights()))
    exported = make_engine(str(tmp_path / "saved" / "huggingface"))
    straight = make_engine(path, OPTIMIZER)
    train(straight, batch, MicroBatching(rows=3))
    outputs = [each.infer(batch, ("log_probs",), MicroBatching())["log_probs"] for each in (exported, straight)]
    assert torch.allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize("distributed", [True, False])
def test_the_float32_weights_of_a_bf16_model_are_restored(distributed, tmp_path):
    """A learning rate below the resolution of bf16: the weights change only through their float32 copies."""
    path, batch = save_model(MODELS["qwen2"], tmp_path / "model"), make_batch()
    keys = {"dtype": "bf16", "use_distributed_optimizer": distributed} | OFFLOAD
    small = OPTIMIZER.model_copy(update={"lr": 1e-4})
    engine = megatron_engine(path, small, **keys)
    train(engine, batch, MicroBatching(), steps=3)
    engine.save(tmp_path / "saved", CONTENTS[:3])
    resumed = megatron_engine(path, small, **keys)
    resumed.load(tmp_path / "saved", CONTENTS[:3])
    for each in (engine, resumed):
        train(each, batch, MicroBatching(), steps=3)
        each.save(tmp_path / f"{each is engine}", CONTENTS[:2])
    one, two = (read_shards(tmp_path / f"{flag}" / "shards") for flag in (True, False))
    assert one.keys() == two.keys() and any(key.endswith(".main") for key in one)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_offloaded_state_has_no_memory_between_phases(tmp_path):
    engine, batch = megatron_engine(save_model(MODELS["qwen3_moe"], tmp_path), **OFFLOAD), make_batch()
    train(engine, batch, MicroBatching(rows=3), steps=1)
    weights = [p for chunk in engine.chunks for p in chunk.parameters()]
    gradients = [p.main_grad for p in weights]
    state = optimizer_tensors(engine.optimizer, weights)
    assert len(state) == 2 * len(weights)
    assert {x.untyped_storage().nbytes() for x in (*weights, *gradients, *state)} == {0}
    with engine.on_device():
        assert min(x.untyped_storage().nbytes() for x in weights) > 0 == state[0].untyped_storage().nbytes()


def test_a_checkpoint_is_merged(tmp_path):
    engine = megatron_engine(save_model(MODELS["mixtral"], tmp_path / "model"))
    engine.save(tmp_path / "actor", ("model", "optimizer"))
    words = ["merge", "--backend", "megatron", "--allow_unchanged", "--local_dir", str(tmp_path / "actor")]
    assert merger([*words, "--target_dir", str(tmp_path / "merged")]) == 0
    merged = dict(make_engine(str(tmp_path / "merged")).weights())
    assert all(torch.equal(merged[name], tensor) for name, tensor in engine.weights())


def test_the_auxiliary_losses_have_the_gradient_of_their_formula(tmp_path):
    """One micro-batch, one layer with experts: E / (k T^2) sum_e count_e P_e, and the mean of logsumexp^2."""
    settings = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}
    config = MODELS["mixtral"].__class__.from_dict(MODELS["mixtral"].to_dict() | {"num_hidden_layers": 1})
    path, batch = save_model(config, tmp_path), make_batch()
    gradients, unclipped = [], OPTIMIZER.model_copy(update={"clip_grad": 1e9})
    for section in ({}, settings):
        engine = megatron_engine(path, unclipped, override_transformer_config=section)
        kept = {}
        router = engine.chunks[0].decoder.layers[0].mlp.router
        router.register_forward_pre_hook(lambda _, args, kept=kept: kept.update(states=args[0].detach()))
        train(engine, batch, MicroBatching(), steps=1)
        gradients.append(router.weight.main_grad.clone())
    weight = make_engine(path).module.model.layers[0].mlp.gate.weight.detach().requires_grad_()
    logits = kept["states"].flatten(0, -2) @ weight.T
    tokens, probs = len(logits), logits.softmax(-1)
    counts = torch.zeros(4).index_add_(0, logits.topk(2).indices.flatten(), torch.ones(2 * tokens))
    aux = 4 / (2 * tokens**2) * (counts * probs.sum(0)).sum()
    (0.3 * aux + 0.2 * logits.logsumexp(-1).square().mean()).backward()
    assert torch.allclose(gradients[1] - gradients[0], weight.grad, atol=1e-6) and weight.grad.abs().max() > 1e-3


def test_a_gradient_that_is_not_finite_skips_the_update(tmp_path):
    engine, batch = megatron_engine(save_model(MODELS["llama"], tmp_path)), make_batch()
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    batch.batch["advantages"][0] = float("inf")
    assert train(engine, batch, MicroBatching(), steps=1)["grad_skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())
    assert engine.non_finite_state() == []
    next(iter(engine.chunks[0].parameters())).data[0] = float("nan")
    assert engine.non_finite_state() == ["embedding.word_embeddings.weight"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_conversions_are_inverse(name, size):
    """qwen3: 33 entries of the vocabulary, which two ranks do not divide."""
    config = MODELS[name]
    shapes = {key: tuple(p.shape) for key, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    for conversion in conversions(config, "causal_lm"):
        full = {source: torch.randn(shapes.pop(source)) for source in conversion.sources}
        assert tuple(tuple(x.shape) for x in full.values()) == conversion.shapes
        found = {source: torch.full_like(x, float("nan")) for source, x in full.items()}
        ranks = [(t, e) for t in range(size) for e in range(size if conversion.is_expert else 1)]
        for position in (ShardRank(t, size, e, size) for t, e in ranks):
            regions = conversion.regions(position)
            local = conversion.join([full[region.source][region.slices] for region in regions], position)
            for region, values in conversion.boxes(local, position):
                found[region.source][region.slices] = values
        assert all(torch.equal(found[source], x) for source, x in full.items())
    assert not shapes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"t": 3}, "tensor_model_parallel_size 3 does not divide num_attention_heads 4"),
        ({"t": 2}, "does not divide the 1 ranks"),
        ({"p": 4}, "4 pipeline chunks do not divide the 2 layers"),
        ({"lora_rank": 2}, "does not support LoRA"),
        (
            {"override_transformer_config": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}},
            "expected some of .'core_attn', 'mlp', 'moe'., found .'moe_act'.",
        ),
        ({"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1}}, "need more pipeline stages"),
        ({"dtype": "fp16"}, "does not support megatron.dtype=fp16"),
    ],
)
def test_settings_that_are_not_supported_are_refused(keys, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        megatron_engine(save_model(MODELS["qwen2"], tmp_path), **keys)
