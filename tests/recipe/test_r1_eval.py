"""Evaluation: metrics by hand, hostile reward functions, comparison of two files."""

import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.quickstart.tasks import as_rl_rows, held_out_examples
from examples.quickstart.tiny_model import tiny_model
from tests.pages import as_module
from verl.config import load_config
from verl.config.schema.offline import EvalConfig, GenerationConfig
from verl.recipe.r1.reward_score import final_part, reward_func
from verl.registry import load_object
from verl.rewards import ScoreFunction
from verl.trainer.main_eval import main

ROOT = Path(__file__).parents[2]
REWARDS = ROOT / "tests/rewards/sample_rewards.py"

# ---- a file, from rows to the table ---------------------------------------------------------------------------------

# (source, [1 where the response equals the ground truth])
TABLE = [("sums", [1, 0, 0, 0]), ("words", [1, 1, 1, 1]), ("sums", [0, 0, 0, 0]), ("sums", [1, 1, 0, 1])]


def write_responses(path: Path, table=TABLE, wrong: str = "no", reverse: bool = False) -> Path:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"question {i}"}],
            "data_source": source,
            "reward_model": {"style": "rule", "ground_truth": f"yes {i}"},
            "responses": [f"yes {i}" if right else wrong for right in rights],
        }
        for i, (source, rights) in enumerate(table)
    ]
    pq.write_table(pa.Table.from_pylist(rows[::-1] if reverse else rows), path)
    return path


@pytest.fixture
def responses(tmp_path) -> Path:
    return write_responses(tmp_path / "responses.parquet")


def evaluate(path: Path, *keys: str, function: str = "compute_score", status: int = 0) -> dict:
    reward = [f"custom_reward_function.path={REWARDS}", f"custom_reward_function.name={function}"]
    assert main([f"data.path={path}", *reward, "reward.num_processes=2", *keys]) == status
    out = path.with_suffix(".eval.json")
    return json.loads(out.read_text()) if status == 0 else {}


def values(figures: dict) -> dict[str, float]:
    return {name: figure["value"] for name, figure in figures["metrics"].items()}


def test_metrics_of_a_table_by_hand(responses, capsys):
    report = evaluate(responses)["evaluated"]
    # sums: 1, 0 and 3 of 4 are right; pass@2: 1 - C(3,2)/C(4,2) = 1/2, 0, 1 - C(1,2)/C(4,2) = 1
    sums = {"accuracy": 1 / 3, "pass@1": 1 / 3, "pass@2": 1 / 2, "pass@4": 2 / 3, "avg@4": 1 / 3, "score": 1 / 3}
    assert values(report["sources"]["sums"]) == pytest.approx(sums)
    assert set(values(report["sources"]["words"]).values()) == {1.0}
    assert report["sources"]["words"]["metrics"]["accuracy"]["low"] is None, "one prompt has no interval"
    every = {"accuracy": 1 / 2, "pass@1": 1 / 2, "pass@2": 5 / 8, "pass@4": 3 / 4, "avg@4": 1 / 2, "score": 1 / 2}
    assert values(report["overall"]) == pytest.approx(every)
    counts = {"prompts": 3, "responses": 12, "fewest_responses": 4, "most_responses": 4, "failed": 0, "graded": False}
    assert {k: v for k, v in report["sources"]["sums"].items() if k != "metrics"} == counts
    # the 27 data sets of three prompts: 2.5 % of the means lie at or below 0 ( (1/3)**3 = 3.7 % )
    accuracy = report["sources"]["sums"]["metrics"]["accuracy"]
    assert (accuracy["low"], accuracy["high"]) == pytest.approx((0.0, 0.75))
    shown = capsys.readouterr().out
    assert "sums" in shown and "pass@2" in shown and "0.6250" in shown and "0.0000 .. 0.7500" in shown
    assert "pass@1" in shown and "avg@" not in shown and "score" not in shown  # avg@4 and the score are the accuracy


@pytest.mark.slow
def test_custom_k_and_different_numbers_of_responses(tmp_path, capsys):
    path = write_responses(tmp_path / "a.parquet", [("a", [1, 0, 1]), ("a", [0, 1]), ("b", [1, 0, 0, 0, 1, 1])])
    report = evaluate(path, "evaluation.k=[2]")["evaluated"]
    assert "avg@2" in capsys.readouterr().out
    expected = {"accuracy": (2 / 3 + 1 / 2) / 2, "pass@2": 1.0, "avg@2": 1 / 2, "score": (2 / 3 + 1 / 2) / 2}
    assert values(report["sources"]["a"]) == pytest.approx(expected)
    assert values(report["sources"]["b"])["pass@2"] == pytest.approx(1 - 3 / 15)
    default = evaluate(path)["evaluated"]
    assert [k for k in default["sources"]["b"]["metrics"] if "pass" in k] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert [k for k in default["overall"]["metrics"] if "pass" in k] == ["pass@1", "pass@2"]


def test_the_same_seed_gives_the_same_file(responses):
    evaluate(responses)
    first = responses.with_suffix(".eval.json").read_bytes()
    assert evaluate(responses) == json.loads(first) and responses.with_suffix(".eval.json").read_bytes() == first


@pytest.mark.fast("with_extras", "batch")
@pytest.mark.parametrize("function", ["plugin", "with_extras", "batch", "slow_judge"])
def test_functions_of_every_form(function, responses):
    report = evaluate(responses, function=function)["evaluated"]
    assert values(report["sources"]["sums"])["accuracy"] == pytest.approx(1 / 3)
    if function == "with_extras":  # scores of 1 and -1, with an "acc"
        assert report["overall"]["graded"] and values(report["overall"])["score"] == pytest.approx(0)


def test_right_from(tmp_path):
    rewards = tmp_path / "graded.py"
    rewards.write_text("def half(sampled_response, reference_answer):\n    return 0.5\n")
    path = write_responses(tmp_path / "a.parquet")
    keys = [f"custom_reward_function.path={rewards}", "custom_reward_function.name=half"]
    assert values(evaluate(path, *keys)["evaluated"]["overall"])["accuracy"] == 0
    assert values(evaluate(path, *keys, "evaluation.right_from=0.5")["evaluated"]["overall"])["accuracy"] == 1


def test_rules_by_data_source_and_an_answer_column(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": "1+1", "data_source": "openai/gsm8k", "answer": "2", "responses": ["so\n#### 2", "#### 3"]},
        {"prompt": "x", "data_source": "lighteval/MATH", "answer": "\\frac12", "responses": ["\\boxed{0.5}", "1"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([f"data.path={path}"]) == 0
    report = json.loads((tmp_path / "a.eval.json").read_text())["evaluated"]
    assert {name: values(f)["accuracy"] for name, f in report["sources"].items()} == {
        "lighteval/MATH": 0.5,
        "openai/gsm8k": 0.5,
    }


# ---- hostile functions ----------------------------------------------------------------------------------------------


@pytest.mark.fast("dies_on_b", "raises_on_b")
@pytest.mark.parametrize("function", ["hangs_on_b", "dies_on_b", "raises_on_b"])
def test_hostile_functions_do_not_stop_it(function, tmp_path, capsys):
    """For one response, the function hangs, ends its process or raises."""
    path = write_responses(tmp_path / "a.parquet", [("a", [1, 1]), ("a", [1, 0])], wrong="b")
    report = evaluate(path, "reward.timeout=0.5", "reward.on_error=count", function=function)["evaluated"]
    assert report["overall"]["failed"] == 1
    assert values(report["overall"])["accuracy"] == pytest.approx(3 / 4)
    assert "failed to score" in capsys.readouterr().out
    evaluate(path, "reward.timeout=0.5", function=function, status=1)
    error = capsys.readouterr().err
    assert f"error: reward function {function}() at " in error
    assert "a.parquet, row 1 (the first is 0), response 1" in error


BROKEN = """
def nothing(data_source, solution_str, ground_truth):
    return None
def wrong_acc(sampled_response, reference_answer):
    return {'score': 1, 'acc': 'yes'}
"""


@pytest.mark.parametrize(
    ("function", "keys", "message"),
    [
        ("backtracks", ["reward.timeout=0.5"], "did not end within 0.5 s and was stopped"),  # a regular expression
        ("nothing", ["reward.on_error=count"], "returned None: expected a number"),  # is an error even when counted
        ("wrong_acc", [], "returned a dict whose \"acc\" is 'yes': expected a number"),
    ],
)
def test_a_function_that_scores_nothing_is_an_error(function, keys, message, responses, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(BROKEN)
    own = [] if function == "backtracks" else [f"custom_reward_function.path={tmp_path / 'broken.py'}"]
    evaluate(responses, *own, *keys, function=function, status=1)
    assert message in capsys.readouterr().err
    assert not responses.with_suffix(".eval.json").exists()


# ---- two files ------------------------------------------------------------------------------------------------------


def test_comparison_of_two_files_in_different_order(responses, tmp_path, capsys):
    table = [("sums", [0, 0, 0, 0]), ("words", [1, 1, 1, 0]), ("sums", [0, 0, 0, 0]), ("sums", [0, 1, 0, 0])]
    other = write_responses(tmp_path / "other.parquet", table, reverse=True)
    report = evaluate(responses, f"data.compare_path={other}")
    assert values(report["compared_with"]["overall"])["accuracy"] == pytest.approx((0 + 3 / 4 + 0 + 1 / 4) / 4)
    overall, sums = report["comparison"]["overall"], report["comparison"]["sources"]["sums"]
    assert overall["difference"] == pytest.approx((1 / 4 + 1 / 4 + 0 + 1 / 2) / 4)
    assert [overall[name] for name in ("wins", "losses", "ties")] == [3, 0, 1]
    assert sums["difference"] == pytest.approx((1 / 4 + 0 + 1 / 2) / 3)
    shown = capsys.readouterr().out
    assert "+0.2500" in shown and "3, 0, 1" in shown
    mirrored = evaluate(other, f"data.compare_path={responses}")["comparison"]["overall"]
    assert mirrored["difference"] == -overall["difference"] and mirrored["losses"] == 3


def test_other_prompts_are_not_compared(responses, tmp_path, capsys):
    other = write_responses(tmp_path / "other.parquet", [*TABLE, ("sums", [1, 1, 1, 1])])
    evaluate(responses, f"data.compare_path={other}", status=1)
    assert "0 of 4 are only in data.path, 1 of 5 only in data.compare_path" in capsys.readouterr().err


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.path=nowhere.parquet", "there is no file 'nowhere.parquet'"),
        ("data.response_key=response", "no column 'response' (data.response_key): did you mean 'responses'?"),
        ("data.prompt_key=question", "no column 'question' (data.prompt_key)"),
        ("data.reward_model_key=truth", "no ground truth: expected a column 'truth'"),
        ("data.answer_key=gold", "or 'gold' (data.answer_key); found prompt"),
        ("data.reward_model_key=prompt", "row 0 (the first is 0): expected {'ground_truth': ...} in column 'prompt'"),
        ("data.response_key=reward_model", "row 0 (the first is 0): expected a list of texts in column 'reward_model'"),
        ("data.compare_path=nowhere.parquet", "nowhere.parquet: expected a data file, found no such file"),
        ("evaluation.k=[1,5]", "pass@5 requires 5 responses to every prompt, found 4"),
        ("evaluation.k=[0]", "evaluation.k"),
        ("evaluation.confidence=95", "expected float > 0 and < 1"),
        ("custom_reward_function.path=nowhere.py", "no file 'nowhere.py'"),
        ("custom_reward_function.name=compute_scores", "did you mean 'compute_score'?"),
        ("custom_reward_function.name=which_process", "reward function with a wrong signature"),
        ("custom_reward_function.path=null", "no reward rule for data_source 'sums'"),
        ("data.path=null", "data.path"),
        ("evaluation.output_path=/dev/null/x.json", "output_path: expected a writable folder, found '/dev/null'"),
    ],
)
def test_bad_settings_end_in_one_message(key, message, responses, capsys):
    evaluate(responses, key, status=1)
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "Traceback" not in error


def test_a_name_without_its_file(responses, capsys):
    assert main([f"data.path={responses}", "custom_reward_function.name=reward_func"]) == 1
    assert "'reward_func' without reward.custom_reward_function.path" in capsys.readouterr().err


def test_help(capsys):
    assert main(["--help"]) == 0 and "data.compare_path" in capsys.readouterr().out


def test_dry_run_scores_nothing(responses, capsys):
    function = [f"custom_reward_function.path={REWARDS}", "custom_reward_function.name=compute_score"]
    assert main([f"data.path={responses}", *function, "--dry-run"]) == 0
    assert f"would score 16 responses to 4 prompts with compute_score() at {REWARDS}" in capsys.readouterr().out
    assert not responses.with_suffix(".eval.json").exists()


# ---- the reward of reasoning models ---------------------------------------------------------------------------------


def test_the_final_part_follows_the_thoughts():
    assert final_part("<think>\nIs it 7? No.\n</think>\n\nIt is 8.") == "It is 8."
    assert final_part("Is it 7? No.\n</think>It is 8.") == "It is 8.", "the template had opened the thoughts"
    assert final_part("<think> 7") is None
    assert final_part("It is 8.") == "It is 8."


@pytest.mark.parametrize(
    ("source", "truth", "right", "wrong"),
    [
        ("openai/gsm8k", "8", "#### 8", "#### 7"),
        ("Maxwell-Jia/AIME_2024", "204", "so \\boxed{204}", "\\boxed{205}"),
        ("opencompass/cnmo2024_en", "\\frac{1}{2}", "\\boxed{0.5}", "\\boxed{2}"),
        ("HuggingFaceH4/MATH-500", "x+1", "\\boxed{1+x}", "\\boxed{x-1}"),
        ("Idavidrein/gpqa", "C", "The answer is C", "The answer is D"),
    ],
)
def test_r1_reward_by_data_source(source, truth, right, wrong):
    def score(text: str) -> float:
        found = reward_func(source, text, truth)
        return found["score"] if isinstance(found, dict) else found

    assert score(f"<think>{wrong}</think>{right}") == 1
    assert score(f"<think>{right}</think>{wrong}") == 0
    assert score(f"<think>{right}") == 0
    assert score(right) == 1


def test_r1_reward_of_an_unknown_source():
    with pytest.raises(ValueError, match="no reward rule for data_source 'nobody/knows'"):
        reward_func("nobody/knows", "1", "1")


# ---- the page and the script ----------------------------------------------------------------------------------------


def commands(page: str) -> list[list[str]]:
    """The words of every command in the bash blocks of a page."""
    blocks = [block.partition("```")[0] for block in page.split("```bash\n")[1:]]
    return [
        shlex.split(as_module(line))
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_commands_of_the_page(tmp_path, monkeypatch, capsys):
    """Every command of the page, in its order, on models and prompts at the places that it names."""
    for folder in ("examples", "verl"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    quickstart = tmp_path / "outputs/quickstart/reverse-grpo"
    for seed, step in enumerate(["sft/global_step_200", "rl/global_step_100"]):
        tiny_model("llama", quickstart / step / "actor/huggingface", seed=seed)
    (quickstart / "data").mkdir()
    rows = pa.Table.from_pylist(as_rl_rows("reverse", held_out_examples("reverse")[:30]))
    pq.write_table(rows, quickstart / "data/test.parquet")
    page = commands((ROOT / "docs/generation_and_evaluation.md").read_text())
    found = [words for words in page if "tools.parquet" not in " ".join(words)]  # tests/trainer/test_offline_tools.py
    assert len(found) == 6
    for python, minus_m, module, *arguments in found:
        assert (python, minus_m) == ("python", "-m")
        monkeypatch.setattr("sys.argv", [module, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        assert ended.value.code == 0, (module, capsys.readouterr())
    report = json.loads((tmp_path / "outputs/after.eval.json").read_text())
    assert report["comparison"]["overall"]["prompts"] == 30 and report["evaluated"]["overall"]["responses"] == 240
    assert "`evaluation.bootstrap_samples`" in capsys.readouterr().out


def run_script(folder: Path, python: str | Path, *keys: str) -> str:
    """What verl/recipe/r1/run_r1.sh prints, run from a folder that is not the project's."""
    places = {"MODEL": "model", "DATA": "test.parquet", "OUT": "out", "PYTHON": str(python), "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "verl/recipe/r1/run_r1.sh"), *keys]
    done = subprocess.run(command, env=os.environ | places, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands_of_the_script(tmp_path):
    """Its keys are those of the two programs, its sampling is the paper's, and the end of the line counts."""
    printer = tmp_path / "print_arguments"
    printer.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$*"\n')
    printer.chmod(0o755)
    lines = [line.split() for line in run_script(tmp_path, printer, "data.n_samples=64").splitlines()]
    assert [line[:2] for line in lines] == [["-m", "verl.trainer.main_generation"], ["-m", "verl.recipe.r1.main_eval"]]
    generation = load_config(overrides=lines[0][2:], schema=GenerationConfig)
    sampling = generation.rollout
    assert (sampling.temperature, sampling.top_p, sampling.response_length) == (0.6, 0.95, 32768)
    assert generation.data.n_samples == 64
    evaluation = load_config(overrides=lines[1][2:], schema=EvalConfig)
    assert evaluation.data.path == [generation.data.output_path]
    custom = evaluation.reward.custom_reward_function
    assert ScoreFunction(load_object(custom.path, custom.name)).form == "sample"


@pytest.mark.slow
def test_the_script_generates_and_evaluates(tmp_path):
    tiny_model("llama", tmp_path / "model")
    rows = [{"data_source": "openai/gsm8k", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")
    run_script(tmp_path, sys.executable, "rollout.response_length=4")
    report = json.loads((tmp_path / "out/responses.eval.json").read_text())
    assert report["evaluated"]["overall"]["responses"] == 8 and "avg@8" in report["evaluated"]["overall"]["metrics"]
