"""Streaming: the rows, their order and their errors are those of files in memory, and no row stays in memory."""

import json
import logging
import sys
from pathlib import Path

import pytest

from verl.data.collate import collate_prompts
from verl.data.files import is_streamed, read_rows
from verl.data.order import PromptSource
from verl.data.readers import JsonLines
from verl.data.rlhf_dataset import RLHFDataset

ROWS = [{"prompt": f"{'ab' * (1 + i % 3)}=", "answer": str(i)} for i in range(2500)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write_any(write, tmp_path):
    def write_any(name, rows):
        if not name.endswith(".csv"):
            return write(name, rows)
        lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return write_any


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv", "a.json"])
def test_the_same_rows(write_any, name):
    path = write_any(name, ROWS)
    streamed, loaded = read_rows(path, streaming=True), read_rows(path)
    assert list(streamed) == list(loaded) == ROWS
    for rows in (streamed, loaded):
        assert [rows[i] for i in (0, 1023, 1024, 2499)] == [ROWS[i] for i in (0, 1023, 1024, 2499)]
        assert rows.to_table().to_pylist() == ROWS
    assert streamed.location(1500) == loaded.location(1500)
    assert streamed.columns == loaded.columns == ("prompt", "answer")


def test_a_parquet_file_that_changes_is_read_again(write):
    assert len(read_rows(write("a.parquet", ROWS[:3]), streaming=True)) == 3
    assert len(read_rows(write("a.parquet", ROWS[:4]), streaming=True)) == 4


def test_without_the_library(write, monkeypatch):
    path = write("a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"a.parquet is streamed .*pip install datasets, or set data.streaming=false"):
        read_rows(path, streaming=True)
    monkeypatch.setattr("verl.data.files.STREAMED_BYTES", 1000)
    monkeypatch.setattr("verl.data.files.is_installed", lambda name: False)
    assert not is_streamed([path], None) and is_streamed([write("a.jsonl", ROWS)], None)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_batches_are_those_of_files_in_memory(write, char_tokenizer, name):
    path = write(name, ROWS)
    sources = [
        PromptSource(RLHFDataset(path, char_tokenizer, {"streaming": on}), 64, seed=3, collate=collate_prompts)
        for on in (True, False)
    ]
    for _ in range(3):
        streamed, loaded = (source().non_tensor_batch for source in sources)
        assert streamed.keys() == loaded.keys()
        for key in streamed:
            assert list(streamed[key]) == list(loaded[key]), key
    saved = sources[0].state_dict()
    sources[1].load_state_dict(saved)  # a run may switch
    assert list(sources[0]().non_tensor_batch["uid"]) == list(sources[1]().non_tensor_batch["uid"])


def test_overlong_prompts_are_dropped_by_a_pass_that_keeps_numbers(write, char_tokenizer):
    """Lengths 3, 5, 7, 3, 5, 7, ...: with a limit of 5, every third row is dropped."""
    path = write("a.jsonl", ROWS)
    settings = {"streaming": True, "filter_overlong_prompts": True, "max_prompt_length": 5}
    dataset = RLHFDataset(path, char_tokenizer, settings)
    assert len(dataset) == 2500 - 833
    assert [dataset[i]["index"] for i in range(4)] == [0, 1, 3, 4]
    assert dataset[2]["prompt_ids"] == char_tokenizer.encode("ab=", add_special_tokens=False)
    assert dataset._prompt_ids.checked == len(dataset)


def test_overlong_prompts_are_errors_in_the_sample_and_when_they_are_read(write, char_tokenizer, monkeypatch):
    rows = [dict(row, prompt="a=") for row in ROWS]
    for late in (2001, 2003):  # not in the sample: the first 1,024 rows, and every second
        rows[late]["prompt"] = "abcdefgh="
    path = write("a.jsonl", rows)
    settings = {"streaming": True, "max_prompt_length": 5}
    dataset = RLHFDataset(path, char_tokenizer, settings)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2002 has 9 tokens, the limit is 5.*one pass over the data"):
        dataset[2001]
    assert len(RLHFDataset(path, char_tokenizer, {**settings, "truncation": "left"})[2001]["prompt_ids"]) == 5
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")
    with pytest.raises(ValueError, match="2 of 2,500 prompts longer than 5 tokens"):
        RLHFDataset(path, char_tokenizer, settings)
    monkeypatch.delenv("VERL_STRICT_DATA_CHECK")
    rows[100]["prompt"] = "abcdefgh="
    with pytest.raises(ValueError, match=r"1 of 1,762 prompts longer than 5 tokens; the first is .*line 101"):
        RLHFDataset(write("b.jsonl", rows), char_tokenizer, settings)


def test_keys_that_occur_late_are_refused(write, char_tokenizer):
    path = write("a.jsonl", [*ROWS[:1500], {**ROWS[0], "late": 1}])
    with pytest.raises(ValueError, match=r"line 1501: the keys \['late'\] are not in the first 1,024 lines"):
        read_rows(path, streaming=True)[1500]
    assert read_rows(path)[1500]["late"] == 1


def test_large_files_are_streamed_by_themselves(write, monkeypatch):
    path = write("a.jsonl", ROWS)
    assert not is_streamed([path], None) and is_streamed([path], True)
    monkeypatch.setattr("verl.data.files.STREAMED_BYTES", 1000)
    assert is_streamed([path], None) and not is_streamed([path], False)


def test_only_offsets_of_lines_are_in_memory(write_any):
    file = read_rows(write_any("a.jsonl", ROWS)).files[0]
    assert isinstance(file, JsonLines)
    assert {type(value).__name__ for value in vars(file).values()} <= {
        "PosixPath", "str", "BufferedReader", "array", "bool", "tuple", "dict"
    }  # fmt: skip
    assert set(file._empty.values()) == {None}


def test_a_csv_row_with_line_breaks_and_a_list_that_is_not_streamed(tmp_path, caplog):
    (tmp_path / "a.csv").write_text('prompt,answer\n"two\nlines, ""quoted""",007\n\n', encoding="utf-8-sig")
    assert list(read_rows(tmp_path / "a.csv")) == [{"prompt": 'two\nlines, "quoted"', "answer": "007"}]
    (tmp_path / "a.json").write_text(json.dumps(ROWS[:2]))
    with caplog.at_level(logging.INFO, "verl.data"):
        assert list(read_rows(tmp_path / "a.json", streaming=True)) == ROWS[:2]
    assert "a.json is read into memory" in caplog.text


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv", "json"])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_sources_of_all_rows_are_those_of_each(suffix, streaming, write):
    """With a key of the same name within another column, characters that are escaped, and numbers in JSON."""
    if suffix == "csv":
        rows = [{"data_source": name, "prompt": "a"} for name in ("b", "é", "b")]
        path = Path(write("a.jsonl", [])).with_suffix(".csv")
        path.write_text("data_source,prompt\n" + "".join(f"{row['data_source']},a\n" for row in rows))
    else:
        rows = [{"prompt": {"data_source": "x"}, "data_source": name} for name in ("b", 'é"\\', "b")]
        path = write(f"a.{suffix}", rows)
    indices, names = read_rows([path], streaming=streaming).sources("data_source")
    assert [names[i] for i in indices] == [row["data_source"] for row in rows]


@pytest.mark.parametrize(
    "text", ['{"p": 1}\n', '\n  \n{"s": 5}\n{"s": null}\n', '{"s": "a"}\n{"s": 5}\n', '\ufeff{"s": "a"}\n']
)
def test_sources_that_are_no_text_are_read_row_by_row(text, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"s": "first"}\n' + text if "\ufeff" not in text else text)
    rows = read_rows([tmp_path / "a.jsonl"], streaming=True)
    indices, names = rows.sources("s")
    assert [names[i] for i in indices] == [str(row["s"]) for row in rows]
