"""The tables that `verl eval` prints."""

import json

from verl.trainer.main_eval import main


def test_each_row_of_the_tables_has_its_data_source(tmp_path, capsys):
    rewards = tmp_path / "half.py"
    rewards.write_text(
        "def compute_score(data_source, solution_str, ground_truth):\n    return {'a': 1, 'b': 0}[solution_str]\n"
    )
    rows = [
        {"prompt": f"{s} {i}", "data_source": s, "answer": "", "responses": ["a", "b", "c"]}
        for s in ("x", "y")
        for i in (1, 2)
    ]
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"custom_reward_function.path={rewards}", "reward.on_error=count", "evaluation.bootstrap_samples=100"]
    assert main([f"data.path={tmp_path / 'one.jsonl'}", f"data.compare_path={tmp_path / 'two.jsonl'}", *settings]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    of_source = {name: [words for words in lines if words[:1] == [name]] for name in ("x", "y", "all")}
    # twice accuracy, pass@1, 2 and 3, and failures; and five rows of the comparison
    assert {name: len(found) for name, found in of_source.items()} == {"x": 14, "y": 14, "all": 14}
    assert [words[1:] for words in of_source["y"] if "failed" in words] == 2 * [["failed", "to", "score", "2"]]


def test_a_registered_reward_function_scores_a_data_source_without_a_rule(tmp_path, capsys):
    rows = [{"prompt": "q", "data_source": "shapes", "answer": "3", "responses": ["3", "4", "3", "5"]}]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([f"data.path={path}", "reward_function=accuracy_reward"]) == 0
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert line == ["shapes", "1", "4", "accuracy", "0.5000"]
    assert main([f"data.path={path}"]) == 1
    assert "no reward rule for data_source 'shapes'" in capsys.readouterr().err
