"""Hub datasets and folders: names, known conversions, errors at once. The hub itself is never asked."""

import json
import sys
import types

import pytest

from examples.data_preprocess.gsm8k import local_rows
from verl.config import load_config
from verl.config.errors import ConfigError
from verl.config.inputs import check_data
from verl.data.files import read_rows
from verl.data.hub import KNOWN, MATH
from verl.utils.data_names import DataName, source_name, with_split

QUESTIONS = [{"question": f"{i}+1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(4)]


@pytest.fixture
def fake(monkeypatch):
    """The library `datasets` with one dataset per name in `found`: (name, config, split) -> rows."""
    found, calls = {}, []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        if (name, config, split) not in found:
            raise ValueError(f'Unknown split "{split}"')
        return found[name, config, split]

    errors = types.SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
    fake_library = types.SimpleNamespace(load_dataset=load_dataset, exceptions=errors, Dataset=type("Dataset", (), {}))
    monkeypatch.setitem(sys.modules, "datasets", fake_library)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return types.SimpleNamespace(found=found, calls=calls)


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ("openai/gsm8k", ("openai/gsm8k", None, None)),
        ("openai/gsm8k:test", ("openai/gsm8k", None, "test")),
        ("openai/gsm8k@main:train", ("openai/gsm8k", "main", "train")),
        ("HuggingFaceH4/MATH-500@default", ("HuggingFaceH4/MATH-500", "default", None)),
    ],
)
def test_names(entry, parts):
    name = DataName.parse(entry)
    assert (name.path, name.config, name.split) == parts and name.is_hub_name and str(name) == entry


def test_the_split_of_validation():
    assert with_split("openai/gsm8k", "test") == "openai/gsm8k:test"
    assert with_split("openai/gsm8k@main:train", "test") == "openai/gsm8k@main:train"
    assert with_split("data/gsm8k/test.parquet", "test") == "data/gsm8k/test.parquet"


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("data/addition.jsonl", "addition"),
        ("data/gsm8k/train.parquet", "gsm8k"),
        ("data/gsm8k/test-00000-of-00001.parquet", "gsm8k"),
        ("data/training.csv", "training"),
        ("openai/gsm8k@main:test", "openai/gsm8k"),
    ],
)
def test_data_sources_are_named_after_the_data(entry, source):
    assert source_name(entry) == source


def test_gsm8k_gives_the_rows_of_the_preprocess_script(fake, tmp_path):
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    fake.found["openai/gsm8k", "main", "test"] = QUESTIONS
    rows = read_rows("openai/gsm8k:test")
    assert list(rows) == local_rows(tmp_path, "test")
    assert rows[3]["reward_model"]["ground_truth"] == "4"
    assert rows.location(2) == "openai/gsm8k@main:test, row 2 (the first is 0)"


def test_math_has_the_last_box_as_ground_truth():
    row = {"problem": "1/2?", "solution": "Not \\boxed{3}, it is \\boxed{\\frac{1}{2}}."}
    found = KNOWN[MATH](row, "train", 7)
    assert found["reward_model"]["ground_truth"] == "\\frac{1}{2}"
    assert found["prompt"][0]["content"] == "1/2?\nReason step by step. Put the final answer in \\boxed{}."
    assert (found["data_source"], found["extra_info"]) == (MATH, {"split": "train", "index": 7})
    with pytest.raises(ValueError, match=r"a solution with \\boxed"):
        KNOWN[MATH]({"problem": "x", "solution": "none"}, "train", 0)


def test_another_dataset_is_read_as_it_is(fake):
    fake.found["me/sums", None, "train"] = [{"prompt": "1+1=", "answer": "2"}]
    rows = read_rows("me/sums")
    assert list(rows) == [{"prompt": "1+1=", "answer": "2"}] and rows.source(0) == "me/sums"


def test_errors_come_at_once(fake, monkeypatch):
    with pytest.raises(ValueError, match=r'me/sums:dev: the dataset cannot be loaded: ValueError: Unknown split "dev"'):
        read_rows("me/sums:dev")
    fake.found["openai/gsm8k", "main", "train"] = [{"question": "x", "answer": "none"}]
    with pytest.raises(ValueError, match=r"gsm8k@main:train, row 0 .*ends with '#### <number>'"):
        read_rows("openai/gsm8k")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    given = {}

    def unreachable(self, name, repo_type, timeout):
        given["timeout"] = timeout
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", unreachable)
    calls = len(fake.calls)
    with pytest.raises(ValueError, match=r"me/sums: no file .*not reachable \(.*: no route\).*HF_HUB_OFFLINE=1"):
        read_rows("me/sums")
    assert given["timeout"] == 10 and len(fake.calls) == calls


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"me/sums is no file, .*: pip install datasets"):
        read_rows("me/sums")
    with pytest.raises(ValueError, match="is a folder, which needs the package datasets"):
        read_rows(tmp_path)


def test_the_configuration_accepts_names_and_refuses_other_files(tmp_path):
    def check(*entries):
        load_config(overrides=[f"data.train_files={json.dumps(entries)}"], extra_checks=[check_data])

    check("openai/gsm8k@main:train", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'notes\.txt': expected a file .* or a hub dataset"):
        check("notes.txt")
    with pytest.raises(ConfigError, match=r"there is no file 'data/train\.jsonl'"):
        check("data/train.jsonl")


# ---- with the library -----------------------------------------------------------------------------------------------


def test_folders(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i}=", "answer": str(i)} for i in range(5)]
    both = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:2])}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "mine"))
    assert list(read_rows(tmp_path / "mine")) == rows
    found = read_rows(f"{tmp_path / 'mine'}:test")
    assert list(found) == rows[:2] and found.source(0) == "mine"
    with pytest.raises(ValueError, match="expected one of the splits train, test, found 'dev'"):
        read_rows(f"{tmp_path / 'mine'}:dev")
    both["test"].save_to_disk(str(tmp_path / "one"))
    assert list(read_rows(tmp_path / "one")) == rows[:2]
    (tmp_path / "files").mkdir()
    for split, part in both.items():
        part.to_parquet(str(tmp_path / "files" / f"{split}.parquet"))
    assert list(read_rows(f"{tmp_path / 'files'}:test")) == rows[:2]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"read from the folder .*/openai/gsm8k, not from the hub"):
        read_rows("openai/gsm8k")


def test_the_cache_of_the_hub(tmp_path, monkeypatch):
    """A dataset that was loaded before, without network: the layout of the cache of `datasets`."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    files = {"train": str(tmp_path / "train.jsonl")}
    datasets.load_dataset_builder("json", data_files=files, cache_dir=str(tmp_path / "made")).download_and_prepare()
    (made,) = (tmp_path / "made").rglob("dataset_info.json")
    info = json.loads(made.read_text()) | {"config_name": "main", "dataset_name": "gsm8k"}
    made.write_text(json.dumps(info))
    place = tmp_path / "openai___gsm8k" / "main" / "0.0.0" / "abc"
    place.parent.mkdir(parents=True)
    made.parent.rename(place)
    (place / "json-train.arrow").rename(place / "gsm8k-train.arrow")
    rows = read_rows("openai/gsm8k")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["1", "2", "3", "4"]
    with pytest.raises(ValueError, match="cannot be loaded"):
        read_rows("openai/gsm8k@socratic")
