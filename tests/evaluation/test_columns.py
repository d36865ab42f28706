"""Columns of a file of responses reach the reward function of `verl eval`."""

import json

import pytest

from verl.config.schema.offline import EvalConfig
from verl.evaluation.score import Scorer, find_function, read_responses, score_prompts

REWARD = """
def by_name(response, prompt, level, answer): return float((prompt, level, response) == ("2+3=", 3, answer))
def by_info(response, extra_info): return float(extra_info == {"answer": "5", "level": 3, "k": 1})
def unknown(response, absent): return 1.0
"""


def test_columns_are_parameters_and_extra_info(tmp_path):
    row = {"question": "2+3=", "answer": "5", "level": 3, "extra_info": {"k": 1}, "responses": ["5"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (tmp_path / "own.py").write_text(REWARD)

    def function(name):
        custom = {"path": str(tmp_path / "own.py"), "name": name}
        config = EvalConfig.model_validate({"reward": {"custom_reward_function": custom, "num_processes": 1}})
        prompts = read_responses([str(tmp_path / "a.jsonl")], config.data)
        return prompts, find_function(config, prompts), config.reward

    for name in ("by_name", "by_info"):
        prompts, reward, settings = function(name)
        scorer = Scorer(reward, settings)
        try:
            assert score_prompts(prompts, scorer, 1.0)[0].correct.tolist() == [True]
        finally:
            scorer.close()
    (tmp_path / "a.jsonl").write_text(json.dumps({**row, "label": "6"}))
    config = EvalConfig.model_validate({"data": {"ground_truth_key": "label"}})
    assert read_responses([str(tmp_path / "a.jsonl")], config.data)[0].ground_truth == "6"
    with pytest.raises(ValueError, match=r"no value for absent: it is no column .*: answer, k, label, level"):
        function("unknown")
