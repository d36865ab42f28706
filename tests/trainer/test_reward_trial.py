"""The trial of the reward function on the data of a run, before a model is loaded."""

import json
import logging

import pytest

from tests.trainer.test_python_api import config  # noqa: F401 (a fixture)
from verl.trainer import PPOTrainer

ROW = {"prompt": "ab=", "answer": "7"}


def try_out(config, rows, reward, val=None, **overrides):  # noqa: F811
    return PPOTrainer(config, overrides=overrides, train_dataset=rows, val_dataset=val, reward=reward)


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (lambda response: 1.0, "pays every response the same"),
        (lambda response, ground_truth: float(response == str([ground_truth])), "pays nothing for a right response"),
        (lambda response, response_length: len(response) / 10, "pays a wrong response as much as a right one"),
        (lambda response, answer: float(response == answer), None),
    ],
)
def test_a_wrong_reward_is_a_warning_before_the_run(config, caplog, reward, fault):  # noqa: F811
    try_out(config, [{**ROW, "data_source": "a/b"}] * 4, reward)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "REWARD" in r.getMessage()]
    assert len(warnings) == (fault is not None)
    assert fault is None or (fault in warnings[0] and "data source 'a/b'" in warnings[0])


@pytest.mark.parametrize(
    ("reward", "warns"),
    [
        (lambda solution_str, ground_truth: len(solution_str) / 10, True),
        (lambda solution_str, expected: len(solution_str) / 10, False),
    ],
)
def test_a_ground_truth_that_no_row_has_is_a_warning_before_the_run(config, caplog, reward, warns):  # noqa: F811
    try_out(config, [{"prompt": "ab=", "expected": "7"}] * 4, reward)
    messages = [r.getMessage() for r in caplog.records if "no ground truth: the reward function" in r.getMessage()]
    assert len(messages) == warns
    assert not warns or messages[0].endswith("(data.ground_truth_key); found prompt, expected")


def test_a_parameter_that_is_no_column_ends_the_start(config):  # noqa: F811
    with pytest.raises(ValueError, match=r"no value for level: it is no column of the data .*: answer, "):
        try_out(config, [ROW] * 4, lambda response, level: 1.0)


def test_all_data_sources_of_all_rows_are_known_before_the_run(config, caplog, tmp_path):  # noqa: F811
    rows = [{**ROW, "data_source": "openai/gsm8k"}] * 6 + [{**ROW, "data_source": "my/src"}] * 2
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = (
        r"row 6 .*: no reward rule for data_source 'my/src'(?s:.*)rows per data source: 'openai/gsm8k' 6, 'my/src' 2"
    )
    with pytest.raises(ValueError, match=expected):
        try_out(config, rows, None)
    files = {"data.val_files": [str(path)], "data.reward_fn_key": "data_source"}
    with pytest.raises(ValueError, match=r"val.jsonl, line 7: no reward rule for data_source 'my/src'"):
        PPOTrainer(config, overrides=files, train_dataset=rows[:6])
