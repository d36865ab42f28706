"""GSM8K to parquet: the rows of our own making, and the real ones where they are."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from verl.data.rlhf_dataset import RLHFDataset
from verl.registry import import_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gsm8k():
    return import_module(str(ROOT / "examples" / "data_preprocess" / "gsm8k.py"))


def folder_of(tmp_path, rows):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_rows_have_the_five_columns(gsm8k, tmp_path, chat_tokenizer, capsys):
    rows = [{"question": "1+1?", "answer": "It is 2.\n#### 2"}, {"question": "Big?", "answer": "#### 1,234"}]
    gsm8k.main(["--local_dir", str(folder_of(tmp_path, rows)), "--save_dir", str(tmp_path / "out")])
    assert "train.parquet: 2 rows" in capsys.readouterr().out
    found = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert list(found[0]) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert found[1]["reward_model"] == {"style": "rule", "ground_truth": "1234"}
    assert found[1]["extra_info"] == {"split": "test", "index": 1, "question": "Big?", "answer": "#### 1,234"}
    assert found[0]["prompt"][0]["content"].startswith("1+1?\n") and "####" in found[0]["prompt"][0]["content"]
    item = RLHFDataset(str(tmp_path / "out" / "train.parquet"), chat_tokenizer)[0]
    assert (item["data_source"], item["ability"]) == ("openai/gsm8k", "math")


@pytest.mark.parametrize(
    "row, message",
    [
        ({"question": "x", "answer": "no mark"}, "line 1: expected a solution that ends with '#### <number>'"),
        ({"question": "x", "answer": "#### "}, "line 1: expected a solution"),
        ({"question": "x"}, r"line 1: expected strings under 'question' and 'answer', missing: \['answer'\]"),
    ],
)
def test_a_bad_row_ends_with_its_line(gsm8k, tmp_path, row, message):
    with pytest.raises(SystemExit, match=message):
        gsm8k.main(["--local_dir", str(folder_of(tmp_path, [row])), "--save_dir", str(tmp_path / "out")])


def test_a_missing_folder(gsm8k, tmp_path):
    with pytest.raises(SystemExit, match=r"train\.jsonl: expected a data file, found no such file"):
        gsm8k.main(["--local_dir", str(tmp_path / "none"), "--save_dir", str(tmp_path / "out")])


def test_the_real_data_set(gsm8k, gsm8k_folder, tmp_path, chat_tokenizer, caplog):
    gsm8k.main(["--local_dir", str(gsm8k_folder), "--save_dir", str(tmp_path)])
    train, test = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert (len(train), len(test)) == (7473, 1319)
    assert train[0]["reward_model"]["ground_truth"] == "72"
    for row in train + test:
        float(row["reward_model"]["ground_truth"])
    with caplog.at_level(logging.INFO, logger="verl.data"):
        dataset = RLHFDataset(str(tmp_path / "test.parquet"), chat_tokenizer, {"max_prompt_length": 1024})
    assert len(dataset) == 1319 and "normalizer" not in caplog.text


def test_a_hub_that_cannot_be_reached_is_one_line(gsm8k, tmp_path, monkeypatch):
    def load_dataset(*args, **keys):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nmore")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(SystemExit) as stopped:
        gsm8k.main(["--save_dir", str(tmp_path / "out")])
    expected = (
        "gsm8k: Couldn't reach 'openai/gsm8k' on the Hub. Use --local_dir: a folder with train.jsonl and test.jsonl"
    )
    assert str(stopped.value).startswith(expected) and "more" not in str(stopped.value)
    assert not (tmp_path / "out").exists()
