"""Files to rows, and the order of training: exact resume at every position."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import SequentialSampler

from verl.config import ConfigError
from verl.data import files
from verl.data.files import read_rows
from verl.data.order import PromptSource, ResumableSampler, WeightedOrder
from verl.data.readers import JsonLines
from verl.data.rlhf_dataset import RLHFDataset
from verl.protocol import DataProto
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.main_ppo import main

ROWS = [{"prompt": f"p{i}", "answer": str(i), "extra": {"k": i}} for i in range(5)]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
def test_the_three_kinds_of_file_hold_the_same_rows(write, name):
    rows = read_rows(write(name, ROWS))
    assert len(rows) == 5
    assert list(rows) == ROWS
    assert [rows[i] for i in range(5)] == ROWS
    assert rows.columns == ("prompt", "answer", "extra")


def test_several_files_are_one_sequence_and_rows_keep_their_place(write):
    rows = read_rows([write("a.parquet", ROWS[:2]), write("b.jsonl", ROWS[2:]), write("c.json", ROWS[:1])])
    assert list(rows) == ROWS + ROWS[:1]
    assert [rows[i]["answer"] for i in range(6)] == ["0", "1", "2", "3", "4", "0"]
    assert rows.location(1).endswith("a.parquet, row 1 (the first is 0)")
    assert rows.location(2).endswith("b.jsonl, line 1")
    assert rows.location(5).endswith("c.json, row 0 (the first is 0)")
    for row in (6, -1):
        with pytest.raises(IndexError, match=f"row {row} of 6"):
            rows[row]


def test_the_name_of_a_folder_is_no_column(tmp_path):
    """Arrow reads key=value in a path as a column, which would shadow the data source of the rows."""
    path = tmp_path / "data_source=none" / "a.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"prompt": ["x"]}), path)
    assert list(read_rows(path)) == [{"prompt": "x"}]


def test_parquet_rows_beyond_one_chunk(write):
    many = [{"n": i} for i in range(2500)]
    rows = read_rows(write("many.parquet", many))
    assert list(rows) == many
    assert rows[2499] == {"n": 2499}


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    """Every parquet file is large enough to be memory-mapped."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(files, "MAPPED_BYTES", 0)


def test_a_large_parquet_file_is_mapped_and_read_again_when_it_changes(write, mapped, monkeypatch):
    for many in ([{"prompt": f"p{i}", "answer": str(i)} for i in range(2500)], ROWS[:4]):
        path = write("a.parquet", many)
        rows = read_rows(path)
        assert list(rows) == many and rows.to_table().to_pylist() == many and rows[3] == many[3]
        assert rows.location(3) == f"{path}, row 3 (the first is 0)"
        assert type(rows.files[0]).__name__ == "RowTable"
    monkeypatch.setattr(files, "is_installed", lambda name: False)
    assert list(read_rows(path)) == ROWS[:4]


def test_only_offsets_of_lines_are_in_memory(write):
    file = read_rows(write("a.jsonl", ROWS)).files[0]
    assert isinstance(file, JsonLines)
    assert {type(value).__name__ for value in vars(file).values()} <= {
        "PosixPath", "str", "BufferedReader", "array", "tuple", "dict"
    }  # fmt: skip
    assert set(file._empty.values()) == {None}


def test_a_csv_row_with_line_breaks(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,answer\n"two\nlines, ""quoted""",007\n\n', encoding="utf-8-sig")
    assert list(read_rows(tmp_path / "a.csv")) == [{"prompt": 'two\nlines, "quoted"', "answer": "007"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "a.json"])
def test_the_items_of_each_data_source(name, write, tmp_path, char_tokenizer):
    """Of rows that are kept: the prompt of row 1 is too long."""
    rows = [
        {"prompt": prompt, "answer": "1", "data_source": source}
        for prompt, source in zip(("a", "bc", "d", "e"), "xyxz")
    ]
    if name.endswith(".csv"):
        Path(tmp_path / name).write_text(
            "".join(",".join(line) + "\n" for line in [rows[0], *(r.values() for r in rows)])
        )
    path = str(tmp_path / name) if name.endswith(".csv") else write(name, rows)
    keys = {"max_prompt_length": 1, "filter_overlong_prompts": True}
    items = RLHFDataset(path, char_tokenizer, keys).items_by_source()
    assert {source: list(each) for source, each in items.items()} == {"x": [0, 1], "z": [2]}
    items = RLHFDataset(path, char_tokenizer, {**keys, "reward_fn_key": "answer"}).items_by_source()
    assert {source: list(each) for source, each in items.items()} == {"1": [0, 1, 2]}


def test_a_json_row_that_lacks_a_key_has_none_there(write):
    assert read_rows(write("a.jsonl", [{"a": 1}, {"b": 2}]))[1] == {"a": None, "b": 2}


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x\u2028y"}\n\n{"prompt": "z"}\n', encoding="utf-8")
    rows = read_rows(path)
    assert [r["prompt"] for r in rows] == ["x\u2028y", "z"]
    assert rows.location(1).endswith("line 3")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n', encoding="utf-8-sig")
    assert read_rows(path)[0] == {"prompt": "x"}


def test_files_of_different_columns_are_refused_by_name(write):
    files = [write("a.parquet", [{"prompt": "x", "answer": "1"}]), write("b.parquet", [{"prompt": "x", "label": "1"}])]
    with pytest.raises(ValueError, match=r"b\.parquet.*same columns as .*a\.parquet.*\['answer'\].*\['label'\]"):
        read_rows(files)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"prompt": 1}\n{"prompt": \n', "line 2: expected one JSON object per line"),
        ("a.jsonl", b"[1, 2", "expected a JSON list of objects"),
        ("a.jsonl", b'{"prompt": 1}\n7\n', "line 2: expected a JSON object.*found int"),
        ("a.json", b'[{"prompt": 1}, "x"]', r"row 1 \(the first is 0\): expected a JSON object.*found str"),
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"\xff\xfe{", "expected UTF-8"),
        ("a.parquet", b"not parquet", "not a valid parquet file"),
        ("a.csv", b"x", "Empty CSV file"),
        ("a.csv", b"x\n", "has no rows"),
        ("a.csv", b"x,y\n1,2\n1,2,3\n", r"not a valid CSV file: .*Row #3: Expected 2 columns, got 3: 1,2,3"),
        ("a.csv", b'x,y\n"1,2\n', "not a valid CSV file"),
        ("a.txt", b"x", r"with the suffix \.parquet, \.jsonl, \.json, \.csv, found \.txt"),
        ("a", b"x", "found no suffix"),
    ],
)
def test_unreadable_files_are_named_with_the_place(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rows(path)
    assert str(path) in str(error.value)


def test_missing_files_and_folders_and_wrong_lists(tmp_path, write):
    with pytest.raises(ValueError, match="no such file"):
        read_rows(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"is a folder, which needs|cannot be loaded"):
        read_rows(str(tmp_path))
    with pytest.raises(ValueError, match="an empty list"):
        read_rows([])
    with pytest.raises(ValueError, match="a path or a list of paths"):
        read_rows([1])
    empty = tmp_path / "empty.parquet"
    pq.write_table(pq.read_table(write("full.parquet", ROWS)).slice(0, 0), empty)
    with pytest.raises(ValueError, match=r"empty\.parquet: the file has no rows"):
        read_rows(empty)


# ---- the order ------------------------------------------------------------------------------------------------------


def batches(sampler, count):
    """[(epoch, rows)]."""
    drawn = [sampler.next_items() for _ in range(count)]
    return [(items[0][0], [row for _, row in items]) for items in drawn]


def test_every_epoch_is_a_permutation_less_the_rows_left_out():
    sampler = ResumableSampler(10, 3, seed=7)
    assert sampler.steps_per_epoch == 3
    drawn = batches(sampler, 9)
    assert [epoch for epoch, _ in drawn] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    orders = [[row for e, rows in drawn if e == epoch for row in rows] for epoch in range(3)]
    for order in orders:
        assert len(set(order)) == 9 and set(order) <= set(range(10))
    assert len({tuple(order) for order in orders}) == 3


def test_the_order_depends_on_seed_and_epoch_alone():
    assert batches(ResumableSampler(50, 7, seed=3), 20) == batches(ResumableSampler(50, 7, seed=3), 20)
    assert batches(ResumableSampler(50, 7, seed=3), 5) != batches(ResumableSampler(50, 7, seed=4), 5)
    fine, coarse = batches(ResumableSampler(12, 2, seed=1), 6), batches(ResumableSampler(12, 6, seed=1), 2)
    assert [row for _, rows in fine for row in rows] == [row for _, rows in coarse for row in rows]


def test_without_shuffle_rows_come_in_order():
    assert batches(ResumableSampler(5, 2, shuffle=False), 4) == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3])]


@pytest.mark.parametrize("num_rows, batch_size", [(10, 3), (9, 3), (4, 4)])
def test_resume_is_exact_at_every_position(num_rows, batch_size):
    """In a new sampler, and in one that has moved on."""
    straight = batches(ResumableSampler(num_rows, batch_size, seed=5), 13)
    for stop in range(13):
        first = ResumableSampler(num_rows, batch_size, seed=5)
        before = batches(first, stop)
        second = ResumableSampler(num_rows, batch_size, seed=5)
        second.load_state_dict(first.state_dict())
        assert (second.epoch, second.step_in_epoch) == divmod(stop, num_rows // batch_size)
        assert before + batches(second, 13 - stop) == straight
        second.load_state_dict(first.state_dict())
        assert before + batches(second, 13 - stop) == straight


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_rows": 12}, "num_rows is 10, but 12 in the checkpoint"),
        ({"batch_size": 2}, "batch_size is 3, but 2 in the"),
        ({"seed": 1}, "seed is 0, but 1 in the"),
        ({"shuffle": False}, "shuffle is True, but False in the"),
        ({"step_in_epoch": 3}, "not a position in 3 steps"),
        ({"epoch": -1}, "not a position"),
        ({"more": 1}, "expected the keys"),
    ],
)
def test_a_position_in_a_different_order_is_refused(change, message):
    sampler = ResumableSampler(10, 3)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})


def test_describe_counts_steps_and_dropped_rows():
    text = ResumableSampler(7473, 256).describe()
    assert text == "7,473 prompts: 29 steps of 256 per epoch, last 49 prompts dropped"
    assert ResumableSampler(5, 4).describe() == "5 prompts: 1 step of 4 per epoch, last 1 prompt dropped"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((5, 6, 0), "is 6 prompts, but the training data has 5 rows: set data.train_batch_size=5 or less"),
        ((5, 0, 0), "int >= 1, found 0"),
        ((5, 1, -1), "seed: expected int >= 0, found -1"),
    ],
)
def test_impossible_batches(arguments, message):
    num_rows, batch_size, seed = arguments
    with pytest.raises(ValueError, match=message):
        ResumableSampler(num_rows, batch_size, seed=seed)


# ---- files with weights ---------------------------------------------------------------------------------------------


def weighted(sizes=(3, 7), weights=(0.6, 0.4), batch_size=4, seed=2, shuffle=True):
    ends = np.cumsum([0, *sizes])
    rows = {name: np.arange(*ends[i : i + 2]) for i, name in enumerate("abcdef"[: len(sizes)])}
    return WeightedOrder(rows, list(weights), batch_size, seed=seed, shuffle=shuffle)


@pytest.mark.parametrize("weights", [(0.7, 0.3), (7, 3)])
def test_counts_follow_the_weights(weights):
    """Prompt n is of the file with the larger of 0.7 n - a and 0.3 n - b, where a and b are what both have had:

    n    1   2   3   4  | 5   6   7   8  | 9   10  11  12     (5: 0.5 and 0.5, 8: 0.6 and 0.4, 9: 0.3 and 0.7)
    a   .7  .4 1.1  .8  | .5  .2  .9  .6 | .3 1.0  .7  .4
    b   .3  .6 -.1  .2  | .5  .8  .1  .4 | .7  .0  .3  .6
    """
    order = weighted((100, 10), weights, shuffle=False)
    drawn = ["".join("a" if row < 100 else "b" for _, row in order.next_items()) for _ in range(3)]
    assert drawn == ["abaa", "abaa", "baab"] and order.taken == [8, 4]
    for _ in range(22):
        order.next_items()
    assert order.taken == [70, 30] and order.epoch == 0  # 110 rows are 27 steps of 4


def test_shares_of_many_draws():
    """0.5, 0.3, 0.15, 0.05 of 4,000: no file is ever a prompt ahead, and at full cycles each has exactly its share."""
    order = weighted((50, 7, 20, 3), (10, 6, 3, 1), 10)
    for step in range(1, 401):
        order.next_items()
        assert all(had < share * 10 * step + 1 for had, share in zip(order.taken, (0.5, 0.3, 0.15, 0.05)))
        assert step % 2 or order.taken == [5 * step, 3 * step, 1.5 * step, 0.5 * step]


def test_a_file_is_read_once_per_pass_in_a_new_order():
    order = weighted((3, 6), (1, 1), 2, seed=5)
    items = [item for _ in range(12) for item in order.next_items()]
    small = [item for item in items if item[1] < 3]
    assert len({*items}) == 24 and len(small) == 12
    passes = [tuple(row for number, row in small if number == n) for n in range(4)]
    assert all({*each} == {0, 1, 2} for each in passes) and len({*passes}) > 1


@pytest.mark.parametrize("stop", range(6))
def test_a_weighted_order_is_resumed_at_every_position(stop):
    order, first, second = weighted(), weighted(), weighted()
    straight = [order.next_items() for _ in range(10)]
    before = [first.next_items() for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    for _ in range(2):  # a new one, and one that has moved on
        second.load_state_dict(state)
        assert before + [second.next_items() for _ in range(10 - stop)] == straight


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weights": [0.5, 0.5]}, r"weights is \[0.6, 0.4\], but \[0.5, 0.5\] in the checkpoint"),
        ({"rows_per_file": [4, 6]}, r"rows_per_file is \[3, 7\]"),
        ({"taken": [1, 2]}, r"\[1, 2\] prompts of 2 files are not those of 1 steps"),
    ],
)
def test_a_position_of_other_weights_is_refused(change, message):
    order = weighted()
    order.next_items()
    with pytest.raises(ValueError, match=message):
        order.load_state_dict({**order.state_dict(), **change})


@pytest.fixture
def mixed_run(tiny_run, tmp_path):
    """4 prompts a step of two files, 0.75 and 0.25: 3 and 1 in every step."""
    settings, _ = tiny_run
    other = tmp_path / "other.jsonl"
    train = Path(next(each for each in settings if each.startswith("data.train_files=")).partition("=")[2])
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    more = ["algorithm.name=grpo", f"data.train_files=[{train},{other}]", "data.train_weights=[0.75,0.25]"]
    return [*settings, *more, "trainer.test_freq=-1", "trainer.save_freq=2"], len(rows)


@pytest.mark.slow
def test_a_run_with_weights_resumes_with_the_same_prompts(mixed_run, tmp_path):
    settings, rows = mixed_run

    def uids(steps, folder):
        arguments = [f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={tmp_path / folder}"]
        trainer, seen = LocalPPOTrainer(overrides=[*settings, *arguments]), []
        trainer.on_step.append(lambda report: seen.append(list(trainer.batch.non_tensor_batch["uid"])))
        trainer.fit()
        return seen

    straight = uids(4, "straight")
    assert [sum(int(uid.split(":")[1]) >= rows for uid in step) for step in straight] == [2] * 4  # n=2
    assert uids(2, "cut") + uids(4, "cut") == straight


def test_a_dry_run_tells_the_share_of_each_file(mixed_run, capsys):
    settings, rows = mixed_run
    assert main([*settings, "--dry-run"]) == 0
    assert re.search(rf"75\.0% tiny \({rows}\), 25\.0% other \(3\): \d+ steps of 4 per epoch", capsys.readouterr().out)


@pytest.mark.parametrize(
    "change, message",
    [
        ("data.train_weights=[1]", "expected one weight for each of data.train_files, found 1 for 2"),
        ("data.train_weights=[1,2,3]", "found 3 for 2"),
        ("data.train_weights=[0,1]", r"data.train_weights.* expected list\[float"),
        ("data.sampler={class_path: a.py, class_name: A}", "decides the order, as data.train_weights does"),
        ("data.train_max_samples=2", r"files with at least one row each, found 2 of tiny, 0 of other"),
    ],
)
def test_weights_that_do_not_fit(change, message, mixed_run):
    with pytest.raises((ConfigError, ValueError), match=message):
        LocalPPOTrainer(overrides=[*mixed_run[0], change])


def test_weights_and_a_sampler_object_are_refused(mixed_run):
    with pytest.raises(ValueError, match="no sampler, found the sampler SequentialSampler: remove one"):
        LocalPPOTrainer(overrides=mixed_run[0], train_sampler=SequentialSampler(range(24)))


def test_a_prompt_source_gives_batches_with_one_uid_per_row():
    def collate(items):
        return DataProto.from_dict(non_tensors={k: [item[k] for item in items] for k in items[0]})

    source = PromptSource(ROWS, 2, seed=1, collate=collate)
    drawn = [source() for _ in range(4)]
    for step, batch in enumerate(drawn):
        for uid, answer in zip(batch.non_tensor_batch["uid"], batch.non_tensor_batch["answer"]):
            epoch, row = map(int, re.fullmatch(r"(\d+):(\d+)", uid).groups())
            assert (epoch, ROWS[row]["answer"]) == (step // 2, answer)
    assert len({uid for batch in drawn for uid in batch.non_tensor_batch["uid"]}) == 8
    assert (source.epoch, source.step_in_epoch, source.steps_per_epoch) == (2, 0, 2)
    again = PromptSource(ROWS, 2, seed=1, collate=collate)
    again()
    position = again.state_dict()
    rest = PromptSource(ROWS, 2, seed=1, collate=collate)
    rest.load_state_dict(position)
    assert list(rest().non_tensor_batch["uid"]) == list(drawn[1].non_tensor_batch["uid"])
    assert rest.describe() == "5 prompts: 2 steps of 2 per epoch, last 1 prompt dropped"
