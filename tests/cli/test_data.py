"""`verl data inspect` and `verl rewards test`."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from examples.quickstart.tiny_model import tiny_model
from verl.cli.app import app
from verl.data.files import read_rows
from verl.evaluation.prompts import Responses, write_output


@pytest.fixture
def run(tmp_path):
    def call(*command, rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = CliRunner().invoke(app, [*command[:2], str(file), *command[2:]])
        return result.exit_code, result.output

    return call


GSM8K = {"question": "2+3?", "answer": "2+3=5\n#### 5", "data_source": "openai/gsm8k"}


def test_inspect_shows_columns_and_bad_rows(run):
    code, output = run("data", "inspect", rows=[GSM8K, {**GSM8K, "question": ""}])
    assert code == 1
    assert "question             length 0 to 4, mean 2  str 2" in output
    assert "first prompt:  2+3?" in output
    assert "bad rows: 1 of 2" in output and "rows.jsonl, line 2: the prompt is empty" in output
    assert run("data", "inspect", rows=[GSM8K])[0] == 0


def test_rewards_are_tried_for_each_data_source(run):
    mmlu = {"question": "2+3?", "answer": "2", "data_source": "cais/mmlu"}
    rows = [GSM8K, {**GSM8K, "answer": "none"}, {**mmlu, "answer": "C"}, {**mmlu, "data_source": "my/own"}]
    code, output = run("rewards", "test", rows=rows)
    assert code == 1 and "bad rows: 2 of 4" in output
    assert "openai/gsm8k: gsm8k_strict() at " in output and "cais/mmlu: multiple_choice() at " in output
    assert "line 2: raised ValueError: gsm8k: ground truth: expected a number" in output
    assert "line 4: no reward rule for data_source 'my/own'" in output


def test_rewards_test_says_where_the_answer_was(run):
    code, output = run("rewards", "test", rows=[{"prompt": "2+3?", "answer": "5", "data_source": "lighteval/MATH"}])
    assert code == 0 and "answer '5' (box)" in output and "answer None (no final answer is stated)" in output


def test_a_custom_reward_gets_columns_and_its_fault_is_named(run, tmp_path):
    (tmp_path / "own.py").write_text("def f(response, level): return level\ndef g(response): return len(response)\n")
    key = f"reward.custom_reward_function.path={tmp_path / 'own.py'}", "reward.custom_reward_function.name="
    rows = [{"prompt": "2+3?", "answer": "5", "level": 3}]
    code, output = run("rewards", "test", key[0], key[1] + "f", rows=rows)
    assert code == 1 and "pays every response the same (best scores: right 3, wrong 3, empty 3)" in output
    code, output = run("rewards", "test", key[0], key[1] + "g", rows=rows)
    assert code == 1 and "its score grows with the length of the response" in output


@pytest.mark.parametrize(
    ("name", "rows", "text"),
    [
        ("f", [{"question": "2+3?"}] * 3, "rows.jsonl, line 1: reward function f() at"),
        ("f", [{"question": "2+3?"}], "`prompt` gets the prompt, whatever its column"),
        ("g", [{"prompt": "2+3?", "answer": n} for n in "56"], "2 rows, such as "),
        ("h", [{"prompt": "2+3?", "gold": "5"}], "no ground truth: data.answer_key names its column"),
        ("compute_score", [GSM8K], "known: f, g, h. Set reward.custom_reward_function.name"),
    ],
)
def test_a_reward_that_does_not_fit_is_reported_once(name, rows, text, run, tmp_path):
    functions = ("f(response, level): return level", "g(response): ...", "h(response): return 1")
    (tmp_path / "own.py").write_text("".join(f"def {function}\n" for function in functions))
    keys = [f"reward.custom_reward_function.{key}" for key in (f"path={tmp_path / 'own.py'}", f"name={name}")]
    code, output = run("rewards", "test", *keys, rows=rows)
    assert code == 1 and output.count(text) == 1 and output.count("reward function ") <= 1


def test_generated_rows_keep_the_data_source_of_training(tmp_path):
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "test.jsonl").write_text('{"prompt": "2+3?", "answer": "5"}\n')
    prompts = SimpleNamespace(
        rows=read_rows(tmp_path / "my" / "test.jsonl"), prompt_ids=[[1]], media=None, uses_loops=False
    )
    for name in ("out.jsonl", "out.parquet"):
        write_output(prompts, [Responses(["5"], [1], ["stop"])], tmp_path / name)
        assert [row["data_source"] for row in read_rows(tmp_path / name)] == ["my"]


TOOLS = """
from verl.agents.tools.function_tool import function_tool


@function_tool
def add_numbers(a: int, b: int) -> str:
    \"\"\"Add two numbers.

    Args:
        a: The first.
        b: The second.
    \"\"\"
    return str(a + b)
"""
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
)


def test_inspect_reads_prompts_as_training_does(run, tmp_path):
    """With the tools that the template writes; a row that is refused then is a bad row."""
    (tmp_path / "tools.py").write_text(TOOLS)
    tiny_chat = tiny_model("qwen2", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tiny_chat)
    rows = [{"prompt": "2+3=", "answer": "5"}, {"prompt": [{"role": "assistant", "content": "5"}], "answer": "5"}]
    keys = [f"actor_rollout_ref.model.path={tiny_chat}"]
    code, plain = run("data", "inspect", *keys, rows=rows)
    assert code == 1 and "bad rows: 1 of 2" in plain and "line 2: the prompt ends with an assistant message" in plain
    code, output = run("data", "inspect", *keys, f"data.function_tool_path={tmp_path / 'tools.py'}", rows=rows[:1])
    assert code == 0, output
    assert "add_numbers" in output and "add_numbers" not in plain
    length = [int(text.split("prompt in tokens     length ")[1].split()[0]) for text in (plain, output)]
    assert length[1] > length[0]


def test_the_key_of_the_reward_comes_before_the_data_source(run):
    row = {**GSM8K, "kind": "lighteval/MATH", "answer": "5"}
    code, output = run("rewards", "test", "data.reward_fn_key=kind", rows=[row])
    assert code == 0 and output.startswith("lighteval/MATH: math_reward() at ")
