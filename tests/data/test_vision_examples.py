"""Preprocessing of Geometry3K, images to count, and the tiny vision-language model of the examples."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples.data_preprocess import count_shapes, geo3k
from examples.quickstart.make_tiny_vl_model import tiny_vl_model
from verl.config.schema import ModelConfig
from verl.data.processor import load_processor, media_tokens
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.tokenization import load_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Tokenizer and processor of the tiny model."""
    model = ModelConfig(path=str(tiny_vl_model(tmp_path_factory.mktemp("tiny"))))
    tokenizer = load_tokenizer(model)
    return tokenizer, load_processor(model, tokenizer)


def pixels(row) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")


def shapes_in(image: Image.Image) -> int:
    """Cells whose middle is not white."""
    middle = count_shapes.CELL // 2
    points = [i * count_shapes.CELL + middle for i in range(count_shapes.CELLS)]
    return sum(image.getpixel((x, y)) != (255, 255, 255) for x in points for y in points)


def test_the_images_have_as_many_shapes_as_the_answer(tmp_path, capsys, tiny):
    count_shapes.main(["--save_dir", str(tmp_path), "--train", "40", "--test", "8"])
    assert "train.parquet: 40 rows" in capsys.readouterr().out
    train, test = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert all(shapes_in(pixels(row)) == int(row["reward_model"]["ground_truth"]) for row in train + test)
    assert {row["response"] for row in train} == {"1", "2", "3", "4"}
    assert not {row["images"][0]["bytes"] for row in train} & {row["images"][0]["bytes"] for row in test}
    dataset = RLHFDataset(str(tmp_path / "train.parquet"), tiny[0], {"max_prompt_length": 64}, processor=tiny[1])
    item = dataset[3]
    assert item["prompt_ids"].count(tiny[0].convert_tokens_to_ids("<|image_pad|>")) == 16  # 32 / 8 squared
    assert len(dataset) == 40


def test_controls_keep_the_questions_and_answers():
    rows = {control: count_shapes.make_rows(50, 4, "0", control) for control in count_shapes.CONTROLS}
    answers = {control: [row["response"] for row in found] for control, found in rows.items()}
    assert answers["none"] == answers["shuffled"] == answers["blank"]
    right = [shapes_in(pixels(row)) == int(row["response"]) for row in rows["shuffled"]]
    assert sum(right) < 25 and not any(shapes_in(pixels(row)) for row in rows["blank"])


def geometry(folder, rows):
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")


def random_image(width=40) -> dict:
    out = io.BytesIO()
    Image.new("RGB", (width, 24), "red").save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def test_geometry3k_becomes_rows(tmp_path, tiny, capsys):
    geometry(tmp_path, [{"images": [random_image()], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }"}] * 300)
    geo3k.main(["--local_dir", str(tmp_path), "--save_dir", str(tmp_path / "out")])
    assert "test.parquet: 300 rows" in capsys.readouterr().out
    row = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[299]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2 \\sqrt { 221 }"}
    assert row["prompt"][0]["content"].startswith("<image>Find x.\n") and "\\boxed{}" in row["prompt"][0]["content"]
    assert row["extra_info"]["index"] == 299
    files = str(tmp_path / "out" / "train.parquet")
    item = RLHFDataset(files, tiny[0], {"max_prompt_length": 256}, processor=tiny[1])[0]
    assert item["data_source"] == "hiyouga/geometry3k" and item["multi_modal_data"]["images"][0].size == (40, 24)


def test_geometry3k_errors(tmp_path):
    with pytest.raises(SystemExit, match=r"expected train\*.parquet .* found none"):
        geo3k.main(["--local_dir", str(tmp_path), "--save_dir", str(tmp_path / "out")])
    geometry(tmp_path, [{"images": [random_image()], "problem": "Find x.", "answer": "2"}])
    with pytest.raises(SystemExit, match=r"row 0 .*expected one of images for each <image> of the problem, found 1"):
        geo3k.main(["--local_dir", str(tmp_path), "--save_dir", str(tmp_path / "out")])


def test_a_model_without_its_processor_is_refused(tmp_path):
    folder = tiny_vl_model(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    model = ModelConfig(path=str(folder))
    with pytest.raises(ValueError, match=r"cannot be loaded.*\nExpected preprocessor_config.json beside"):
        load_processor(model, load_tokenizer(model))


def test_the_chat_template_of_the_processor_is_used(tmp_path):
    folder = tiny_vl_model(tmp_path)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer(model := ModelConfig(path=str(folder)))
    processor = load_processor(model, tokenizer)
    assert tokenizer.chat_template == template
    image, count = Image.new("RGB", (64, 32)), media_tokens(processor)
    inputs = processor(text=[processor.image_token], images=[image], return_tensors="pt")
    tokens = int((inputs["input_ids"] == count["image"]).sum())
    assert int(inputs["image_grid_thw"].prod()) == tokens * count["patches"]
