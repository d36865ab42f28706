"""Training of vision-language models: log-probs of transformers' own forward pass, gradients of any layout."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.engines.ranks import FLOAT64, make_engine, objective_of, run_on_ranks, train
from tests.vl_models import FAMILIES, PLACEHOLDER, QWEN, processor, random_image, save_vl_model, video
from verl.config.schema import OptimConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.engines.megatron.checks import refuse_images
from verl.engines.parallel import full_tensor
from verl.modeling.positions import multimodal_positions
from verl.protocol import DataProto

LAYOUTS = (MicroBatching(), MicroBatching(rows=2), MicroBatching(tokens=50))


@functools.cache
def prompts(family: str) -> list[tuple[list[int], dict[str, Any] | None]]:
    """Prompts with two images, none, one, and a video (Qwen): (token ids, tensors of the processor)."""
    sign = PLACEHOLDER[family]
    made = [
        processor(family)(f"a{sign}b{sign}", [random_image(0), random_image(1, 16, 16)]),
        processor(family)("cde"),
        processor(family)(f"{sign}f", [random_image(2, 24, 16)]),
    ]
    if family in QWEN:
        made.append(processor(family)(sign.replace("image", "video") + sign, [random_image(3)], [video()]))
    found = []
    for tensors in made:
        rest = {name: values for name, values in tensors.items() if name not in ("input_ids", "token_type_ids")}
        found.append((tensors["input_ids"][0].tolist(), rest or None))
    return found


def make_batch(family: str, config: Any, axes: bool = True, images: bool = True) -> DataProto:
    """Two or three responses to each prompt, in mixed order; one of them has a sampled placeholder token."""
    known = prompts(family)
    order = [i % len(known) for i in (0, 1, 2, 0, 3, 2, 0, 1)] if images else [1] * 8
    answers = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [15], [16, 17], [18, 19], [20, 21, 22]]
    if family in QWEN:
        answers[3][1] = config.image_token_id
    columns = build_sequences([known[i][0] for i in order], answers, pad_token_id=0)
    if axes and family in QWEN:
        mask, width = columns["attention_mask"].bool(), columns["responses"].shape[1]
        positions = torch.zeros(len(order), 3, mask.shape[1], dtype=torch.long)
        for row, i in enumerate(order):
            prompt = multimodal_positions(config, torch.tensor(known[i][0]), known[i][1])
            end = prompt.max() + 1 + torch.arange(len(answers[row]))
            positions[row][:, mask[row]] = torch.cat([prompt, end.expand(3, -1)], 1)
        assert positions[:, :, :-width].any()
        columns["position_ids"] = positions
    noise, shape = torch.Generator().manual_seed(1), columns["responses"].shape
    for name in ("old_log_probs", "ref_log_prob", "advantages", "values", "returns"):
        drawn = torch.randn(shape, generator=noise)
        columns[name] = drawn * 0.1 - 5.6 if "log" in name else drawn
    inputs = np.empty(len(order), dtype=object)
    inputs[:] = [known[i][1] for i in order]
    return DataProto.from_dict(columns, {"multi_modal_inputs": inputs} if images else {})


def expected_log_probs(path: str, family: str, batch: DataProto) -> torch.Tensor:
    """Row by row with transformers' own positions and placement, in which a sampled placeholder cannot be."""
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").double()
    columns = batch.batch
    width = columns["responses"].shape[1]
    found = torch.zeros(columns["responses"].shape, dtype=torch.float64)
    for row, mask in enumerate(columns["attention_mask"].bool()):
        ids = columns["input_ids"][row][mask]
        given = {k: v for k, v in (batch.non_tensor_batch["multi_modal_inputs"][row] or {}).items()}
        start = int(mask[:-width].sum())
        types = ((ids == model.config.image_token_id).int())[None]
        if family in QWEN:
            types = types + 2 * (ids == model.config.video_token_id).int()
            types[:, start:] = 0
            if (ids[start:] == model.config.image_token_id).any():
                continue
            given["mm_token_type_ids"] = types
        else:
            given["token_type_ids"] = types
        given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
        with torch.no_grad():
            logits = model(ids[None], **given).logits[0] / 0.7
        for t, token in enumerate(ids[start:]):
            found[row, t] = logits[start + t - 1].log_softmax(-1)[token]
    return found


@pytest.fixture(scope="module")
def path(request, tmp_path_factory) -> str:
    return save_vl_model(request.param, tmp_path_factory.mktemp(request.param))


def engine_of(path: str, **keys: Any):
    return make_engine(path, OptimConfig(lr=1e-2), **FLOAT64, **keys)


@pytest.mark.fast("qwen2_vl*", "qwen3_vl*", "gemma3*")
@pytest.mark.parametrize(("path", "family"), [(f, f) for f in FAMILIES], indirect=["path"])
def test_log_probs_are_those_of_transformers(path, family):
    engine = make_engine(path, kernels="fused")
    batch = make_batch(family, engine.module.config)
    expected = expected_log_probs(path, family, batch)
    known = expected.any(1)
    assert known.sum() == len(known) - (family in QWEN)
    for each in (engine, make_engine(path, use_remove_padding=False)):
        rows = []
        for micro in LAYOUTS:
            found = each.infer(batch, ("log_probs",), micro, temperature=0.7)["log_probs"].double()
            assert torch.allclose(found[known], expected[known], atol=1e-4)
            rows.append(found[3])
        assert all(torch.allclose(rows[0], row, atol=1e-4) for row in rows)  # the row with a sampled placeholder


def gradients(engine: Any, batch: DataProto, micro: MicroBatching) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient of one update on the batch, and its norm."""
    found: dict[str, torch.Tensor] = {}

    def step(loss: torch.Tensor) -> dict[str, float]:
        found.update({n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None})
        return {"grad_norm": 0.0, "grad_skipped": 0.0}

    engine._step = step
    engine.train_batch(batch, objective_of(engine, batch), micro)
    return found


@pytest.mark.fast("causal_lm-qwen3_vl*", "value-gemma3*")
@pytest.mark.parametrize(("path", "family"), [(f, f) for f in FAMILIES], indirect=["path"])
@pytest.mark.parametrize("kind", ["causal_lm", "value"])
def test_gradients_do_not_depend_on_packing_and_micro_batches(path, family, kind):
    padded = engine_of(path, use_remove_padding=False, kind=kind)
    if kind == "value":
        torch.nn.init.normal_(padded.module.score.weight, std=0.1)
    batch = make_batch(family, padded.module.config)
    expected = gradients(padded, batch, MicroBatching())
    tower = [name for name in expected if ".visual." in name or ".vision_tower." in name]
    assert tower and all(expected[name].abs().max() > 0 for name in tower if name.endswith("proj.weight"))
    plain = [] if kind == "value" else [dict(kernels="fused"), dict(enable_gradient_checkpointing=True)]
    for keys in ({}, *plain):
        engine = engine_of(path, kind=kind, **keys)
        if kind == "value":
            engine.module.score.load_state_dict(padded.module.score.state_dict())
        for micro in LAYOUTS[: 1 if keys else 3]:
            found = gradients(engine, batch, micro)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), (keys, micro, name)


@pytest.mark.parametrize(("path", "family"), [("qwen2_5_vl", "qwen2_5_vl")], indirect=["path"])
def test_each_image_is_processed_once(path, family, monkeypatch):
    engine = engine_of(path)
    batch = make_batch(family, engine.module.config)
    patches = []
    tower = engine.model.vision.tower
    hook = tower.register_forward_pre_hook(lambda module, args: patches.append(len(args[0])))
    engine.infer(batch, ("log_probs",), MicroBatching())
    hook.remove()
    distinct = {id(x): x for x in batch.non_tensor_batch["multi_modal_inputs"] if x is not None}.values()
    total = sum(len(x[name]) for x in distinct for name in ("pixel_values", "pixel_values_videos") if name in x)
    assert patches == [total]


@pytest.mark.parametrize(("path", "family"), [("qwen2_5_vl", "qwen2_5_vl")], indirect=["path"])
def test_positions_are_computed_if_the_batch_has_one_axis(path, family):
    engine = engine_of(path)
    outputs = [
        engine.infer(make_batch(family, engine.module.config, axes), ("log_probs",), MicroBatching())["log_probs"]
        for axes in (True, False)
    ]
    assert torch.equal(*outputs)


@pytest.mark.fast("gemma3*")
@pytest.mark.parametrize(("path", "family"), [("qwen3_vl", "qwen3_vl"), ("gemma3", "gemma3")], indirect=["path"])
def test_a_frozen_tower_and_adapters_of_the_language_model(path, family):
    engine = engine_of(path, freeze_vision_tower=True)
    batch = make_batch(family, engine.module.config)
    found = gradients(engine, batch, MicroBatching())
    assert found and not any(".visual." in name or ".vision_tower." in name for name in found)
    adapted = engine_of(path, lora_rank=2)
    found = gradients(adapted, batch, MicroBatching())
    assert found and all(".language_model." in name for name in found)
    everywhere = engine_of(path, lora_rank=2, exclude_modules=[])
    assert any(".visual." in name or ".vision_tower." in name for name in gradients(everywhere, batch, MicroBatching()))


@pytest.mark.parametrize(("path", "family"), [("qwen2_vl", "qwen2_vl")], indirect=["path"])
def test_wrong_images_are_refused(path, family, tmp_path):
    from tests.engines.ranks import qwen2, save_model

    engine = engine_of(path)
    batch = make_batch(family, engine.module.config)
    text = make_engine(save_model(qwen2(), tmp_path))
    with pytest.raises(ValueError, match=r"expected prompts without images.*qwen2 is a text model"):
        text.infer(batch, ("log_probs",), MicroBatching())
    inputs = batch.non_tensor_batch["multi_modal_inputs"]
    inputs[0], inputs[2] = inputs[2], inputs[0]
    with pytest.raises(ValueError, match=r"row 0 of a micro-batch: expected 6 image tokens.*found 10"):
        engine.infer(batch, ("log_probs",), MicroBatching())
    with pytest.raises(ValueError, match=r"rollout.deterministic is not supported for vision-language"):
        engine_of(path, kernels="batch_invariant")


def test_a_placeholder_token_outside_an_image_is_text(tmp_path):
    """If an image token has the embedding of another token, a text with it has the log-probs of one with the other."""
    engine = make_engine(save_vl_model("gemma3", tmp_path))
    token, other = engine.module.config.image_token_id, 70
    with torch.no_grad():
        for layer in {engine.module.get_input_embeddings(), engine.module.get_output_embeddings()}:
            layer.weight[token] = layer.weight[other]
    found = []
    for used in (token, other):
        batch = make_batch("gemma3", engine.module.config)
        prompts, without = batch.batch["prompts"], [i is None for i in batch.non_tensor_batch["multi_modal_inputs"]]
        batch.batch["responses"][:, 1] = used  # sampled
        prompts[without.index(True), -1] = used  # in a prompt without images
        batch.batch["input_ids"] = torch.cat([prompts, batch.batch["responses"]], 1)
        found.append(engine.infer(batch, ("log_probs",), MicroBatching())["log_probs"])
    assert torch.allclose(*found, atol=1e-6) and found[0].abs().sum() > 0


def _gradients_on_rank(path: str, family: str, images: bool, micro: MicroBatching, **keys: Any) -> dict[str, Any]:
    """For `run_on_ranks`: the gradient of a sharded engine, and its log-probs. Rank 1 has the rows without images."""
    engine = make_engine(path, OptimConfig(lr=1e-2), sharded=True, **FLOAT64, **keys)
    batch = _sorted(make_batch(family, engine.module.config, images=images))
    batch = batch.chunk(engine.dp_size)[engine.dp_rank]
    found = gradients(engine, batch, micro)
    log_probs = engine.infer(batch, ("log_probs",), micro)["log_probs"]
    return {"gradients": {name: full_tensor(g) for name, g in found.items()}, "log_probs": log_probs}


def _sorted(batch: DataProto) -> DataProto:
    """Rows with images first: of two ranks, the second has micro-batches without images."""
    rows = batch.non_tensor_batch.get("multi_modal_inputs")
    order = list(range(len(batch))) if rows is None else sorted(range(len(batch)), key=lambda i: rows[i] is None)
    return batch.select_idxs(order)


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_ranks_give_the_gradients_of_one_device(family, tmp_path):
    path = save_vl_model(family, tmp_path)
    alone = engine_of(path)
    cases = [(True, MicroBatching(rows=2), {}), (False, MicroBatching(rows=3), {"freeze_vision_tower": True})]
    if family in QWEN:
        cases.append((True, MicroBatching(rows=3), {"ulysses_sequence_parallel_size": 2}))
    found = run_on_ranks(2, _all_cases, path, family, cases)
    for i, (images, _, keys) in enumerate(cases):
        batch = _sorted(make_batch(family, alone.module.config, images=images))
        expected = gradients(alone, batch, MicroBatching())
        log_probs = alone.infer(batch, ("log_probs",), MicroBatching())["log_probs"]
        own = [rank[i]["log_probs"] for rank in found]
        own = own[0] if "ulysses_sequence_parallel_size" in keys else torch.cat(own)
        assert torch.allclose(own, log_probs, atol=1e-5), keys
        for rank in found:
            for name, value in rank[i]["gradients"].items():
                if name in expected:
                    assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), (keys, name)
                else:  # without images anywhere, the tower has the gradient 0
                    assert not value.any()
            missing = expected.keys() - rank[i]["gradients"].keys()
            assert all("visual" in name or "vision" in name for name in missing)


def _all_cases(path: str, family: str, cases: list) -> list[dict[str, Any]]:
    return [_gradients_on_rank(path, family, images, micro, **keys) for images, micro, keys in cases]


@pytest.mark.fast("qwen2_vl-value", "gemma3-causal_lm")
@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen2_vl", "value"), ("gemma3", "value"), ("qwen2_5_vl", "causal_lm"), ("gemma3", "causal_lm")],
)
def test_a_model_is_saved_resumes_and_starts_another(family, kind, tmp_path):
    path, output = save_vl_model(family, tmp_path / "model"), "values" if kind == "value" else "log_probs"

    def infer(engine: Any) -> torch.Tensor:
        return engine.infer(batch, (output,), MicroBatching())[output]

    engine, resumed = (make_engine(path, OptimConfig(lr=1e-2), kind=kind) for _ in range(2))
    batch = make_batch(family, engine.module.config)
    if kind == "value":
        assert not infer(engine).any()  # the head starts at zero
    train(engine, batch, MicroBatching())
    expected = infer(engine)
    assert expected.any()
    contents = ("model", "optimizer", "extra", *(["hf_model"] if kind == "value" else []))
    engine.save(tmp_path / "saved", contents)
    resumed.load(tmp_path / "saved", contents[:3])
    started = make_engine(str(tmp_path / "saved" / "huggingface"), kind=kind)
    for each in (resumed, started):
        assert torch.allclose(infer(each), expected, atol=1e-6)


def test_megatron_refuses_images():
    with pytest.raises(ValueError, match=r"strategy=megatron does not support images"):
        refuse_images({"multi_modal_inputs": [None, {"pixel_values": 1}]})
    refuse_images({"multi_modal_inputs": [None]})
