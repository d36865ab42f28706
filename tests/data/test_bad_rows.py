"""Bad rows: one message with file and row, and dropped up to data.max_bad_rows."""

import json
import re

import pytest

from verl.data.bad_rows import BadRowsError
from verl.data.files import read_rows
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.trainer.local_trainer import LocalPPOTrainer

GOOD = {"prompt": "ab", "answer": "a"}
DEEP = "[" * 100_000 + "]" * 100_000
BAD_LINES = [
    ('{"prompt": "a", "answer": "b", "answer": "c"}', "the key 'answer' occurs twice"),
    (f'{{"prompt": "a", "answer": {DEEP}}}', "nested more than 200 deep"),
    (f'{{"prompt": "a", "answer": "b", "extra_info": {{"x": {"[" * 300 + "]" * 300}}}}}', "nested more than 200 deep"),
    (f'{{"prompt": "a", "answer": {"9" * 5000}}}', "found an integer of more than 4,300 digits"),
    ('{"prompt": "a", "answ', "Unterminated string starting at character 17"),
    ('{"prompt": "a", "answer": "b"', "Expecting ',' delimiter at character 30"),
    ('{"prompt": "a\tb", "answer": "b"}', "Invalid control character at character 14"),
    ('{"prompt": "a", "answer": "b"},', "Extra data at character 31"),
    ('["a", "b"]', 'expected a JSON object such as {"prompt": ...}, found list'),
    ("null", "found NoneType"),
    ('{"prompt": "a", "answer": NaN}', r"the ground truth \(column 'answer'\) is missing: found nan"),
    ('{"prompt": "a", "answer": Infinity}', r"the ground truth \(column 'answer'\) is inf"),
    ('{"prompt": "\\ud83d", "answer": "b"}', "half of a surrogate pair"),
    ('{"prompt": "a", "answer": null}', "is missing: found None"),
    ('{"prompt": 5, "answer": "b"}', "expected a list of chat messages, found 5"),
]


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=[message for _, message in BAD_LINES])
def test_a_bad_row_is_one_message_with_file_and_line(tmp_path, char_tokenizer, line, message):
    path = write(tmp_path / "rows.jsonl", [json.dumps(GOOD), line])
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2(.|\n)*{message}"):
        RLHFDataset(path, char_tokenizer)


def test_bytes_that_are_no_text(tmp_path, char_tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff", "answer": "b"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: expected UTF-8 text: .* position 12"):
        RLHFDataset(str(path), char_tokenizer)


def test_an_error_in_a_list_names_the_line_of_the_file(tmp_path, char_tokenizer):
    path = write(tmp_path / "rows.json", ["[", json.dumps(GOOD) + ",", '{"prompt": "a" "answer": "b"}', "]"])
    with pytest.raises(ValueError, match=r"rows.json: .*Expecting ',' delimiter at line 3, character 16"):
        RLHFDataset(path, char_tokenizer)


def test_files_with_a_byte_order_mark_can_be_concatenated(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b"\xef\xbb\xbf" + json.dumps({"prompt": text}).encode() + b"\r\n" for text in "ab"))
    assert [row["prompt"] for row in read_rows([path])] == ["a", "b"]


def test_a_response_that_no_tokenizer_reads(tmp_path, char_tokenizer):
    path = write(tmp_path / "rows.jsonl", [json.dumps(GOOD), '{"prompt": "a", "answer": "\\ud83d"}'])
    config = {"prompt_key": "prompt", "response_key": "answer"}
    with pytest.raises(ValueError, match=r"line 2: the response \(column 'answer'\): character 0 is .*surrogate"):
        SFTDataset(path, char_tokenizer, config)
    assert len(SFTDataset(path, char_tokenizer, config | {"max_bad_rows": 1})) == 1


@pytest.mark.parametrize("value", ["9" * 30, '"\\ud83d"'])
def test_values_that_arrow_does_not_have_are_one_error(tmp_path, value):
    path = write(tmp_path / "rows.jsonl", [f'{{"prompt": "a", "number": {value}}}'])
    with pytest.raises(ValueError, match=r"rows.jsonl: a value has no type of Arrow"):
        read_rows([path]).to_table()


ROWS = [GOOD, {"prompt": "c", "answer": None}, {"prompt": "d", "answer": "d"}, {"prompt": 7, "answer": "e"}]


def test_bad_rows_are_dropped_up_to_the_limit(tmp_path, char_tokenizer, caplog):
    path = write(tmp_path / "rows.jsonl", map(json.dumps, [*ROWS, GOOD]))
    found = RLHFDataset(path, char_tokenizer, {"max_bad_rows": 2})
    assert [found[i]["index"] for i in range(len(found))] == [0, 2, 4]
    assert [found[i]["prompt_ids"] for i in range(3)] == [char_tokenizer(text).input_ids for text in ("ab", "d", "ab")]
    assert [*found.bad_rows] == [1, 3] and re.search("line 2: .* is missing", found.bad_rows[1])
    assert re.search(r"dropped 2 of 5 rows, .*; the first:\n  \S*rows.jsonl, line 2.*\n  .*line 4", caplog.text)
    with pytest.raises(
        BadRowsError,
        match=r"2 of 5 rows cannot be used, more than data.max_bad_rows=1; .*lists all of a file.*; the first:\n",
    ):
        RLHFDataset(path, char_tokenizer, {"max_bad_rows": 1})
    with pytest.raises(ValueError, match="line 2"):
        RLHFDataset(path, char_tokenizer)


def test_a_run_drops_bad_rows_of_its_training_data(tiny_run, tmp_path):
    settings, _ = tiny_run
    good = (tmp_path / "tiny" / "train.jsonl").read_text().splitlines()
    path = write(tmp_path / "train.jsonl", [good[0], '{"prompt": "abc=", "answer": " "}', *good[1:]])
    chosen = [*settings, f"data.train_files={path}", "algorithm.name=grpo", "trainer.total_training_steps=1"]
    with pytest.raises(ValueError, match="line 2"):
        LocalPPOTrainer(overrides=chosen)
    trainer = LocalPPOTrainer(overrides=[*chosen, "data.max_bad_rows=1"])
    assert len(trainer.train_dataset) == 24
    write(tmp_path / "train.jsonl", [*good, '{"prompt": "a="}', '{"prompt": "b="}'])
    with pytest.raises(ValueError, match=r"2 of 26 rows"):
        LocalPPOTrainer(overrides=[*chosen, "data.max_bad_rows=1"])
