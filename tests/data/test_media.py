"""Rows with images: from columns and messages to token ids and the tensors of the processor."""

import gc
import json
import logging
import pickle
import weakref
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.data.conftest import written
from tests.vl_models import FAMILIES, PLACEHOLDER, processor, random_image
from verl.columns import DataProtoValidationError, check
from verl.config.schema import DataConfig, GenerationConfig
from verl.data.collate import PromptCollator
from verl.data.files import read_rows
from verl.data.media import MediaReader
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset, collate_sft
from verl.evaluation.prompts import PromptSet, Responses, write_output
from verl.protocol import DataProto
from verl.single_controller.remote_batch import dumps, loads
from verl.trainer.state.saved_state import load_state, save_state

LIMITS = {"max_prompt_length": 200}
TORCHVISION = find_spec("torchvision") is not None


def row(prompt="<image>How many?", images=None, **more):
    return {"prompt": prompt, "answer": "3", "images": [written(random_image(1))] if images is None else images, **more}


def dataset_of(models, rows, family="qwen2_vl", **settings):
    tokenizer, processor = models(family)
    return RLHFDataset(rows, tokenizer, {**LIMITS, **settings}, processor=processor)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether values are those of the processors of Pillow; with torchvision, others resize, and round otherwise."""
    return torch.equal(found, expected) if not TORCHVISION else torch.allclose(found, expected, atol=0.03)


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


# ---- what an item has -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_an_item_has_what_the_processor_returns(models, family):
    first, second = random_image(1), random_image(2, 40, 24)
    text = "Here <image> and <image>?"
    item = dataset_of(models, [row(text, [written(first), {"bytes": written(second), "path": None}])], family)[0]
    rendered = chat(text.replace("<image>", PLACEHOLDER[family]))
    expected = processor(family)(text=rendered, images=[first, second])
    assert item["prompt_ids"] == expected.pop("input_ids")[0].tolist()
    inputs = item["multi_modal_inputs"]
    assert set(inputs) == set(expected) - {"token_type_ids"}
    assert all(same(inputs[name], expected[name]) for name in inputs)
    assert item["raw_prompt_ids"] == models(family)[0].encode(rendered, add_special_tokens=False)
    assert [image.size for image in item["multi_modal_data"]["images"]] == [(16, 24), (40, 24)]
    assert [part["type"] for part in item["raw_prompt"][0]["content"]] == ["text", "image", "text", "image", "text"]
    assert "images" not in item


def test_a_prompt_that_is_neither_text_nor_messages_is_not_one_with_media():
    """It is refused as a prompt, with its row; reading its media must not fail before that."""
    reader = MediaReader(None, None, DataConfig())
    assert [reader.read({"images": None}, prompt, Path(), "row 1") for prompt in (None, 7)] == [None, None]


def test_placeholders_are_as_many_as_the_patches(models):
    """16 x 24 pixels: 4 x 6 patches of 4 x 4 pixels, 2 x 2 of them in a token: 6 tokens."""
    item = dataset_of(models, [row()])[0]
    image_token = models()[0].convert_tokens_to_ids("<|image_pad|>")
    assert item["prompt_ids"].count(image_token) == 6 and item["raw_prompt_ids"].count(image_token) == 1
    assert item["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 6, 4]]


def test_forms_of_prompts_with_the_same_meaning(models, tmp_path):
    (tmp_path / "a.png").write_bytes(written(random_image(1)))
    text, image = {"type": "text", "text": "How many?"}, {"type": "image"}
    path = tmp_path / "rows.jsonl"
    lines = [
        {"prompt": "<image>How many?", "images": "a.png"},
        {"prompt": [{"role": "user", "content": "<image>How many?"}], "images": [{"path": "a.png", "bytes": None}]},
        {"prompt": [{"role": "user", "content": [image, text]}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [{**image, "image": "a.png"}, text]}], "images": []},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, text]}]},
    ]
    path.write_text("".join(json.dumps(line | {"answer": "3"}) + "\n" for line in lines))
    dataset = dataset_of(models, path)
    items = [dataset[i] for i in range(len(dataset))]
    assert all(item["prompt_ids"] == items[0]["prompt_ids"] for item in items)
    assert all(item["raw_prompt"] == items[0]["raw_prompt"] for item in items)
    assert all(
        torch.equal(item["multi_modal_inputs"]["pixel_values"], items[0]["multi_modal_inputs"]["pixel_values"])
        for item in items
    )


def test_a_parquet_file_as_public_verl_writes_it(models, tmp_path, monkeypatch):
    images = pa.array(
        [[{"bytes": written(random_image(1)), "path": "1.png"}], []],
        pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
    )
    prompts = [[{"role": "user", "content": text}] for text in ("<image>How many?", "How many?")]
    truth = [{"style": "rule", "ground_truth": "3"}] * 2
    pq.write_table(pa.table({"prompt": prompts, "images": images, "reward_model": truth}), tmp_path / "a.parquet")
    for limit in (1 << 30, 0):  # read into memory, and memory-mapped
        monkeypatch.setattr("verl.data.files.MAPPED_BYTES", limit)
        dataset = dataset_of(models, tmp_path / "a.parquet")
        assert dataset[0]["multi_modal_data"]["images"][0].size == (16, 24)
        assert dataset[1]["multi_modal_data"] is None and dataset[1]["multi_modal_inputs"] is None
        assert dataset[1]["raw_prompt_ids"] == dataset[1]["prompt_ids"]


def test_a_dataset_of_the_datasets_library(models, tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"prompt": datasets.Value("string"), "answer": datasets.Value("string")}
    features = datasets.Features(columns | {"images": datasets.List(datasets.Image())})
    rows = datasets.Dataset.from_list([row(), row("text", [])], features=features)
    rows.save_to_disk(str(tmp_path / "saved"))
    dataset = dataset_of(models, [str(tmp_path / "saved")])
    assert isinstance(dataset.dataframe[0]["images"][0]["bytes"], bytes)  # not decoded
    for found in (dataset, dataset_of(models, rows)):
        assert found[0]["multi_modal_data"]["images"][0].size == (16, 24)
        assert found[1]["multi_modal_data"] is None


def test_columns_and_limits_can_be_set(models):
    rows = [{"prompt": "<image>?", "answer": "3", "shots": [written(random_image(1, 160, 160))], "note": "n"}]
    item = dataset_of(models, rows, image_key="shots", max_pixels=64)[0]
    assert item["multi_modal_data"]["images"][0].size == (8, 8) and item["note"] == "n" and "shots" not in item
    size = {"size": {"shortest_edge": 64, "longest_edge": 64}}
    sized = dataset_of(models, rows, image_key="shots", mm_processor_kwargs=size)
    assert sized[0]["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 2, 2]]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad, message",
    [
        (row("How many?"), "row 1 .*expected one <image> .*column 'images', found 0 in the prompt and 1 in the column"),
        (row("<image><image>"), "found 2 in the prompt and 1 in the column: add or remove <image>"),
        (row(images=[]), "expected one entry in the column 'images' for each <image> of the prompt, found 1"),
        (row(images=[b""]), "row 1 .*, image 0: .*found 0 bytes"),
        (row(images=["no.png"]), r"row 1 .*, image 0 \(no.png\): expected a file"),
        (row("<image><|image_pad|>"), r"expected text without <\|image_pad\|>, .*found '<image><\|image_pad\|>'"),
        ({"prompt": "a <|video_pad|>", "answer": "3"}, r"row 1 .*expected text without <\|video_pad\|>"),
        (row([{"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"}]}], images=[]), "expected text"),
        (
            row(images=[written(Image.new("RGB", (5000, 8)))]),
            "row 1 .*, image 0: the model's processor rejects it: .*ratio",
        ),
        (row([{"role": "user", "content": [{"type": "sound"}]}]), "expected parts like .*found {'type': 'sound'}"),
    ],
)
def test_bad_rows_name_the_row(models, bad, message):
    with pytest.raises(ValueError, match=message):
        dataset_of(models, [row(), bad])


def test_a_column_of_images_with_another_name_must_be_named(models):
    renamed = {"seen" if key == "images" else key: value for key, value in row().items()}
    with pytest.raises(ValueError, match=r"no column 'images' among .*'seen'.*: set data.image_key, or remove <image>"):
        dataset_of(models, [renamed])
    assert len(dataset_of(models, [renamed], image_key="seen")) == 1


def test_a_text_model_refuses_images(models):
    with pytest.raises(ValueError, match=r"column 'images' has images.* use a vision-language model"):
        RLHFDataset([row()], models()[0], LIMITS)


def test_bad_rows_can_be_skipped(models, caplog):
    bad = [[written(random_image(2))[:60]], [b"x"], [written(Image.new("RGB", (5000, 8)))]]
    rows = [row(), *(row(images=images) for images in bad), row("no placeholder"), row()]
    with caplog.at_level(logging.WARNING, logger="verl.data"):
        dataset = dataset_of(models, rows, max_bad_rows=4)
    assert len(dataset) == 2 and [dataset[i]["index"] for i in range(2)] == [0, 5]
    assert [*dataset.bad_rows] == [1, 2, 3, 4] and "damaged" in dataset.bad_rows[1]
    assert "dropped 4 of 6 rows" in caplog.text
    with pytest.raises(ValueError, match=r"4 of 6 rows cannot be used, more than data.max_bad_rows=3"):
        dataset_of(models, rows, max_bad_rows=3)


def test_a_damaged_image_is_found_at_the_start(models):
    with pytest.raises(ValueError, match=r"row 1 .*, image 0: expected a complete image, found a damaged file"):
        dataset_of(models, [row(), row(images=[written(random_image(2, 64, 64))[:3000]])])


def test_an_image_that_changes_after_the_start(models, tmp_path):
    (tmp_path / "a.png").write_bytes(written(random_image(1)))
    dataset = dataset_of(models, [row(images=[str(tmp_path / "a.png")])])
    (tmp_path / "a.png").write_bytes(written(random_image(1, 80, 80)))
    with pytest.raises(ValueError, match="the files of the images or videos have changed"):
        dataset[0]


def test_image_tokens_count_for_the_length(models):
    rows = [row(), row(images=[written(random_image(1, 64, 64))])]  # the second has 64 patches more: 10 tokens more
    lengths = [len(dataset_of(models, rows)[i]["prompt_ids"]) for i in range(2)]
    assert lengths[1] - lengths[0] == 16 - 6
    kept = dataset_of(models, rows, max_prompt_length=lengths[0], filter_overlong_prompts=True)
    assert [kept[i]["index"] for i in range(len(kept))] == [0]
    with pytest.raises(ValueError, match=f"1 of 2 prompts longer than {lengths[0]} tokens.*reduce data.max_pixels"):
        dataset_of(models, rows, max_prompt_length=lengths[0])
    with pytest.raises(ValueError, match=r"truncation would cut an image.*reduce data.max_pixels"):
        dataset_of(models, rows, max_prompt_length=lengths[0], truncation="left")


# ---- batches --------------------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_share_its_pixels(models):
    dataset = dataset_of(models, [row(images=[written(random_image(i, 60, 60))]) for i in range(2)])
    batch = PromptCollator(models()[0], DataConfig(), models()[1])([dataset[i] for i in range(2)])
    pixels = batch.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"]
    one = len(pickle.dumps(batch))
    samples = batch.repeat(8)
    assert samples.non_tensor_batch["multi_modal_inputs"][7]["pixel_values"] is pixels
    assert len(pickle.dumps(samples)) < 1.2 * one
    for chunk in (samples.chunk(2)[1], samples[8:], samples.select([], ["multi_modal_inputs", "multi_modal_data"])[8:]):
        back = pickle.loads(pickle.dumps(chunk))
        assert len(pickle.dumps(chunk)) < 0.7 * one  # the pixels of one prompt of two, once
        inputs = back.non_tensor_batch["multi_modal_inputs"]
        assert all(found is inputs[0] for found in inputs)
        assert torch.equal(inputs[3]["pixel_values"], chunk.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"])
    joined = DataProto.concat(samples.chunk(2))
    assert joined.non_tensor_batch["multi_modal_data"][0] is batch.non_tensor_batch["multi_modal_data"][0]
    assert len(joined.union(DataProto.from_dict(non_tensors={"x": [1] * 16}))) == 16


def test_pixels_are_sent_to_a_worker_once_per_prompt(models):
    dataset = dataset_of(models, [row(images=[written(random_image(i, 60, 60))]) for i in range(2)])
    batch = PromptCollator(models()[0], DataConfig(), models()[1])([dataset[i] for i in range(2)]).repeat(8)
    head, buffers = dumps(batch.select([], ["multi_modal_inputs"]))
    pixels = [batch.non_tensor_batch["multi_modal_inputs"][i]["pixel_values"] for i in (0, 8)]
    grids = 2 * 3 * 8  # two grids of three int64
    assert sum(b.nbytes for b in buffers) == sum(p.numel() * 4 for p in pixels) + grids and len(head) < 4096
    found = loads(head, [bytearray(b) for b in buffers]).non_tensor_batch["multi_modal_inputs"]
    assert found[0] is found[7] and torch.equal(found[15]["pixel_values"], pixels[1])


def test_waiting_prompts_with_images_are_saved(models, tmp_path):
    dataset = dataset_of(models, [row(), {**row("text"), "images": []}])
    batch = PromptCollator(models()[0], DataConfig(), models()[1])([dataset[0], dataset[1]])
    save_state({"waiting": batch}, tmp_path, "trainer")
    found = load_state(tmp_path, "trainer")["waiting"].non_tensor_batch
    image, given = (objects["multi_modal_data"][0]["images"][0] for objects in (found, batch.non_tensor_batch))
    assert image.mode == "RGB" and image.tobytes() == given.tobytes()
    pixels = [objects["multi_modal_inputs"][0]["pixel_values"] for objects in (found, batch.non_tensor_batch)]
    assert torch.equal(*pixels) and found["multi_modal_inputs"][1] is None


def strict_batch(models):
    dataset = dataset_of(models, [row(), {**row("text"), "images": []}])
    items = [dataset[i] for i in range(2)]
    ids, length = [item["prompt_ids"] for item in items], len(items[0]["prompt_ids"])
    prompts = torch.tensor([tokens[:length] + [0] * (length - len(tokens)) for tokens in ids])[:, -length:]
    prompts[1] = torch.tensor([0] * (length - len(ids[1])) + ids[1])
    attention = torch.ones_like(prompts)
    attention[1, : length - len(ids[1])] = 0
    positions = (attention.cumsum(1) - 1).clamp_min(0)[:, None].repeat(1, 3, 1)
    token = models()[0].convert_tokens_to_ids
    facts = {"image": token("<|image_pad|>"), "video": token("<|video_pad|>"), "patches": 4}
    return DataProto.from_dict(
        {"prompts": prompts, "attention_mask": attention, "position_ids": positions},
        {"multi_modal_inputs": [item["multi_modal_inputs"] for item in items]},
        {"media_tokens": facts},
    )


def test_the_strict_check_of_images(models, monkeypatch):
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")
    check(strict_batch(models))
    batch = strict_batch(models)
    batch.batch["prompts"][0, batch.batch["prompts"][0].tolist().index(batch.meta_info["media_tokens"]["image"])] = 5
    message = "expected 6 image tokens in row 0, as its image_grid_thw has, found 5"
    with pytest.raises(DataProtoValidationError, match=message):
        check(batch)
    batch = strict_batch(models)
    batch.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"][3, 1] = float("nan")
    with pytest.raises(DataProtoValidationError, match="found NaN or infinity in 'pixel_values' of row 0"):
        check(batch)
    batch = strict_batch(models)
    batch.batch["position_ids"][1, 2, -1] += 1
    with pytest.raises(DataProtoValidationError, match=r"at row 1, axis 2"):
        check(batch)
    batch = strict_batch(models)
    batch.batch["position_ids"] = batch.batch["position_ids"][..., :-1]
    batch.batch["responses"] = torch.zeros(2, 0, dtype=torch.long)
    with pytest.raises(DataProtoValidationError, match="column 'position_ids': expected shape"):
        check(batch)


def test_items_are_not_kept(models):
    """The dataset keeps the compressed bytes; a decoded image and its tensors live as long as the item."""
    dataset = dataset_of(models, [row(images=[written(random_image(i, 32, 32))]) for i in range(4)])
    pixels = [weakref.ref(dataset[i]["multi_modal_inputs"]["pixel_values"]) for i in (0, 1, 0)]
    images = [weakref.ref(dataset[i]["multi_modal_data"]["images"][0]) for i in (0, 1, 0)]
    gc.collect()
    assert not any(ref() is not None for ref in pixels + images)


# ---- custom datasets ------------------------------------------------------------------------------------------------


def test_columns_of_a_row_hold_for_rows_with_images(models):
    """A weight of a row is refused, and `tools` must be read by the template, in data files and in custom datasets."""
    tokenizer, loaded = models()
    with pytest.raises(ValueError, match="column 'loss_mask': a row has no weight, found 0"):
        SFTDataset([row(loss_mask=0)], tokenizer, {"max_length": 200}, processor=loaded)
    content = [{"type": "image", "image": random_image(1)}, {"type": "text", "text": "How many?"}]
    item = {"data_source": "x", "reward_model": {"ground_truth": "3"}, "tools": [{"name": "count"}]}
    item["raw_prompt"] = [{"role": "user", "content": content}]
    with pytest.raises(ValueError, match="the chat template does not read 'tools'"):
        PromptCollator(tokenizer, DataConfig(), loaded)([item])


def test_items_of_custom_datasets(models):
    tokenizer, loaded = models()
    collate = PromptCollator(tokenizer, DataConfig(max_prompt_length=200), loaded)
    own = dataset_of(models, [row()])[0]
    further = {"data_source": "x", "reward_model": {"ground_truth": "3"}}
    content = [{"type": "image", "image": random_image(1)}, {"type": "text", "text": "How many?"}]
    messages = [{"role": "user", "content": content}]
    typed = [{"role": "user", "content": "<image>How many?"}]
    given = [
        {**further, "raw_prompt": messages},
        {**further, "raw_prompt": typed, "multi_modal_data": {"image": [random_image(1)]}},
        {
            **further,
            "input_ids": torch.tensor(own["prompt_ids"]),
            "raw_prompt_ids": own["raw_prompt_ids"],
            "multi_modal_data": {"image": [random_image(1)]},
            "multi_modal_inputs": own["multi_modal_inputs"],
        },
    ]
    for item in given:
        found = collate([item]).non_tensor_batch
        assert found["prompt_ids"][0] == own["prompt_ids"] and found["raw_prompt_ids"][0] == own["raw_prompt_ids"]
        assert found["multi_modal_data"][0]["images"][0].size == (16, 24)
        assert torch.equal(found["multi_modal_inputs"][0]["pixel_values"], own["multi_modal_inputs"]["pixel_values"])
    length = len(own["prompt_ids"])
    limited = PromptCollator(tokenizer, DataConfig(max_prompt_length=length - 1), loaded)
    message = rf"item 0 of the batch: the prompt has {length} tokens, .* {length - 1}:.*or reduce data.max_pixels"
    for item in given[:2]:
        with pytest.raises(ValueError, match=message):
            limited([item])
    text = collate([{**further, "raw_prompt": "text"}]).non_tensor_batch
    assert text["multi_modal_inputs"][0] is None


def test_text_and_images_mix(models):
    mixed = dataset_of(models, [row(), {"prompt": "text", "answer": "1"}])
    batch = PromptCollator(*[models()[0], DataConfig(), models()[1]])([mixed[0], mixed[1]])
    assert [inputs is None for inputs in batch.non_tensor_batch["multi_modal_inputs"]] == [False, True]


# ---- SFT, generation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_sft_examples_have_images_before_the_loss(models, family):
    tokenizer, loaded = models(family)
    rows = [{"prompt": "<image>How many?", "response": "three", "images": [written(random_image(1))]}]
    rows += [{"prompt": "text", "response": "ok", "images": None}]
    dataset = SFTDataset(rows, tokenizer, {"max_length": 200}, processor=loaded)
    rendered = chat(PLACEHOLDER[family] + "How many?")
    expected = processor(family)(text=rendered, images=[random_image(1)])
    assert dataset[0]["prompt_ids"] == expected["input_ids"][0].tolist()
    assert tokenizer.decode(dataset[0]["response_ids"]) == "three<|im_end|>"
    assert same(dataset[0]["multi_modal_inputs"]["pixel_values"], expected["pixel_values"])
    batch = collate_sft([dataset[0], dataset[1]], 0)
    assert batch.non_tensor_batch["multi_modal_inputs"][1] is None
    # a chat may begin with the assistant, which is not trained there: an image may follow
    turns = [("assistant", "Hello"), ("user", "<image>How many?"), ("assistant", "three")]
    greeting = [{"messages": [{"role": role, "content": text} for role, text in turns], "images": rows[0]["images"]}]
    greeted = SFTDataset(greeting, tokenizer, {"max_length": 200}, processor=loaded)[0]
    assert tokenizer.decode(greeted["response_ids"]) == "three<|im_end|>"


@pytest.mark.parametrize(
    "bad, message",
    [
        ([("user", "a"), ("assistant", "b"), ("user", "<image>"), ("assistant", "c")], "before the first assistant"),
        ([("user", "a"), ("assistant", "b")], "found 0 in the prompt and 1 in the column"),
    ],
)
def test_sft_refuses(models, bad, message):
    rows = [{"messages": [{"role": role, "content": text} for role, text in bad], "images": [written(random_image(1))]}]
    with pytest.raises(ValueError, match=f"row 0 .*{message}"):
        SFTDataset(rows, models()[0], {"max_length": 200}, processor=models()[1])
    with pytest.raises(ValueError, match="use a vision-language model"):
        SFTDataset(rows, models()[0], {"max_length": 200})


def test_sft_skips_bad_rows(models):
    rows = [{"prompt": "<image>?", "response": "a", "images": [image]} for image in (b"", written(random_image(1)))]
    dataset = SFTDataset(rows, models()[0], {"max_length": 200, "max_bad_rows": 1}, processor=models()[1])
    assert len(dataset) == 1 and dataset[0]["index"] == 1 and [*dataset.bad_rows] == [0]


def test_prompts_of_offline_generation(models, tmp_path):
    (tmp_path / "a.png").write_bytes(written(random_image(1)))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "<image>?", "images": ["a.png"]}) + "\n" + json.dumps({"prompt": "b"}) + "\n")
    config = GenerationConfig.model_validate(
        {"data": {"path": [str(path)], "output_path": str(tmp_path / "out.jsonl")}, "model": {"path": "x"}}
    )
    prompts = PromptSet(config, *models())
    columns = prompts.columns([0, 1])
    assert columns["uid"] == ["0", "1"] and columns["multi_modal_inputs"][1] is None
    assert columns["multi_modal_inputs"][0]["image_grid_thw"].tolist() == [[1, 6, 4]]
    (tmp_path / "b").touch()  # the text of a prompt is no path
    (tmp_path / "away").mkdir()
    for out, image in ((tmp_path / "out", "a.png"), (tmp_path / "away" / "out", str(tmp_path / "a.png"))):
        for suffix in (".jsonl", ".parquet"):
            write_output(prompts, [Responses(["c"], [1], ["stop"])] * 2, out.with_suffix(suffix))
            rows = read_rows(out.with_suffix(suffix))
            assert [(row["prompt"], row["images"]) for row in rows] == [("<image>?", [image]), ("b", None)]
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a.jsonl, line 1, image 0 \(a.png\): .*0 bytes"):
        PromptSet(config, *models())
