"""`verl recipes`: each is read by the real reader, fits its hardware by `verl plan`, and is in docs/recipes.md."""

import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.recipes import tasks
from verl.cli import plan
from verl.cli.app import app
from verl.cli.programs import PROGRAMS
from verl.config import load_config, schema
from verl.config.sources import read_yaml

ROOT = Path(__file__).parents[1]
RECIPES = {path.parent.name: path.parent for path in sorted((ROOT / "examples/recipes").glob("*/recipe.yaml"))}
TRAINED = [name for name, folder in RECIPES.items() if (folder / "config.yaml").is_file()]
RECORDED = [name for name in RECIPES if name.startswith("smollm2_")]
SCHEMAS = {"sft": schema.SFTConfig, "dpo": schema.DPOConfig}
KEYS = ["title", "command", "hardware", "time", "result", "source"]
LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
#: config.json of the models without a built-in size, as published
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": LLAMA
    | {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "tie_word_embeddings": True}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA
    | {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "tie_word_embeddings": True},
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA
    | {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "tie_word_embeddings": False},
    "google/gemma-3-4b-it": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "head_dim": 256}
        | {"intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304}
        | {"num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14},
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": {"model_type": "qwen2_5_vl", "hidden_size": 3584, "num_hidden_layers": 28}
    | {"intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}
    | {"tie_word_embeddings": False, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    | {
        "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
        | {"out_hidden_size": 3584, "patch_size": 14}
    },
}


def about(name: str) -> dict:
    return {key: setting.value for key, setting in read_yaml(RECIPES[name] / "recipe.yaml").items()}


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["recipes", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_needs_and_what_comes_of_it(name):
    recipe, readme = about(name), (RECIPES[name] / "README.md").read_text()
    assert list(recipe) == KEYS and recipe["command"].split()[0] in {program.name for program in PROGRAMS}
    assert readme.startswith(f"# {recipe['title']}\n") and f"verl recipes run {name}" in readme
    if recipe["source"] is None:
        assert recipe["result"] == "not run here; no public figure"
    elif recipe["source"].startswith("https://"):
        assert recipe["result"].startswith("not run here; published is ") and recipe["source"] in readme
    else:
        record = json.loads((RECIPES[name] / recipe["source"]).read_text())
        assert all(f"{run['after']:g}" in recipe["result"] for run in record["runs"])
        assert {f"curve-{style}.png" for style in ("light", "dark")} < {
            path.name for path in RECIPES[name].glob("results/*")
        }
        assert (ROOT / record["source"]).is_file() and "results/curve-dark.png" in readme
        for run in record["runs"]:
            assert re.search(rf"\| {run['seed']} \| {run['before']:g} \| {run['after']:g} \|", readme), run["seed"]


def test_the_real_model_has_recorded_recipes():
    """At least eight; five of them with three seeds; the result names every seed."""
    assert len(RECORDED) >= 8
    with_three = 0
    for name in RECORDED:
        seeds: dict[str, list[int]] = {}
        for run in json.loads((RECIPES[name] / "results/record.json").read_text())["runs"]:
            seeds.setdefault(run.get("variant", ""), []).append(run["seed"])
        with_three += [1, 2, 3] in seeds.values()
        for found in seeds.values():
            named = f"(seed{'s' * (len(found) > 1)} {', '.join(map(str, found))})"
            assert named in about(name)["result"], (name, named)
    assert with_three >= 5


@pytest.mark.parametrize("name", RECORDED)
def test_the_scripts_and_settings_of_a_recorded_recipe_are_read(name, tmp_path):
    """Every configuration file, with the reader of its command; the memory of RL fits into one GPU."""
    for file in RECIPES[name].glob("*.yaml"):
        if file.name == "recipe.yaml":
            continue
        command = {"sft.yaml": "sft", "rl.yaml": "train"}.get(file.name, about(name)["command"])
        config = load_config(file, schema=SCHEMAS.get(command, schema.Config))
        if command == "train":
            (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[config.actor_rollout_ref.model.path]))
            teacher = [f"distillation.teacher_models.teacher.model_path={tmp_path}"] * config.distillation.enabled
            words = ["--gpus", "1", "--gpu", "H200", "--model", str(tmp_path), str(file), *teacher]
            assert plan.main(words) == 0
    script = RECIPES[name] / "run.sh"
    if script.is_file():
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
        for line in re.findall(r"\$RECIPES/([\w./]+)", script.read_text()):
            assert (RECIPES[name].parent / line).exists(), line


@pytest.mark.parametrize("task", tasks.ROWS)
def test_the_tasks_of_the_recipes(task):
    """Answers get the full reward, other texts less; no prompt of the test set is trained on."""
    files = tasks.files(task, seed=1, train=64)
    prompts = {name: {json.dumps(row["prompt"]) for row in files[name]} for name in ("train", "test")}
    assert not prompts["train"] & prompts["test"]
    row = files["train"][0]
    answer = row["reward_model"]["ground_truth"]
    right = solve(answer) if task == "countdown" else answer
    if task == "format":
        right = "\n".join(f"- it has {word} legs" for word in ("two", "three", "four", "five")[: int(answer)]) + "\nend"
    scores = [tasks.compute_score(task, text, answer, row.get("extra_info")) for text in (right, "I do not know.")]
    full, none = (score if isinstance(score, float) else score["score"] for score in scores)
    assert full == 1 and none < 0.5


def solve(answer: str) -> str:
    """The expression of a row of countdown, found by trying all."""
    numbers, target = answer.split(" = ")
    for first, second, third in itertools.permutations(numbers.split()):
        for signs in itertools.product("+-", repeat=2):
            text = f"{first} {signs[0]} {second} {signs[1]} {third}"
            if eval(text) == int(target):
                return text
    raise AssertionError(answer)


@pytest.mark.parametrize(
    ("task", "response", "answer", "score"),
    [
        ("sort", " 2 3 1 9 8\n", "1 2 3 8 9", 0.4),  # all numbers, no place
        ("sort", "1 2 3 8 8", "1 2 3 8 9", 0.4 * 0.8 + 0.3 * 0.8),
        ("sort", "1 2 3 8", "1 2 3 8 9", 0.0),
        ("countdown", "4 + 5 - 2", "5 4 2 = 9", 0.3),
        ("countdown", "4 + 4 - 2", "5 4 2 = 7", 0.2),
        ("countdown", "5 + 4 - 2 = 7", "5 4 2 = 7", 0.0),
        ("format", "- It is old\nend", "2", 0.6),  # a capital, and one fact too few
    ],
)
def test_part_of_the_reward(task, response, answer, score):
    found = tasks.compute_score(task, response, answer)
    assert found == {"score": pytest.approx(score), "acc": 0.0}


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in RECORDED])
def test_the_settings_are_read_and_fit_the_hardware(name, tmp_path, capsys):
    """Time: that of `verl plan`, within a quarter."""
    recipe, file = about(name), RECIPES[name] / "config.yaml"
    config = load_config(file)
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert recipe["hardware"] == f"{gpus} x H100"
    path = config.actor_rollout_ref.model.path
    if path in PUBLISHED:
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[path]))
    model = str(tmp_path) if path in PUBLISHED else re.search(r"-([\d.]+B(-A\d+B)?)(-|$)", path)[1]
    assert plan.main(["--gpus", str(gpus), "--gpu", "H100", "--model", model, str(file)]) == 0
    output = capsys.readouterr().out
    assert ": fits into" in output
    seconds = float(re.search(r"step about (\S+) s", output)[1]) * config.trainer.total_training_steps
    number, unit = re.match(r"at most (\d+) (min|h|days), predicted by verl plan$", recipe["time"]).groups()
    size = {"min": 60, "h": 3600, "days": 86400}[unit]
    assert (int(number) - 1) * size < 1.25 * seconds and seconds < 1.25 * int(number) * size


def test_the_page_has_a_row_of_each():
    rows = [line for line in (ROOT / "docs/recipes.md").read_text().splitlines() if line.startswith("| [")]
    expected = [
        f"| [{name}](../examples/recipes/{name}/README.md) | {(item := about(name))['title']} | {item['hardware']} | "
        f"{item['time']} | {item['result']} |"
        for name in RECIPES
    ]
    assert sorted(rows) == sorted(expected)


def test_commands(monkeypatch, tmp_path):
    assert [line for line in call("list").splitlines() if line in RECIPES] == list(RECIPES)
    text = call("show", "qwen2_5_7b_math")
    assert "title: GRPO on MATH, Qwen2.5-7B-Instruct\n" in text and "Qwen/Qwen2.5-7B-Instruct" in text
    text = call("run", "qwen2_5_7b_math", "--print-config", "trainer.seed=7")
    assert "seed: 7" in text and "path: Qwen/Qwen2.5-7B-Instruct" in text
    assert "usage: verl quickstart" in call("run", "smollm2_sums", "-h")
    result = CliRunner().invoke(app, ["recipes", "show", "qwen2_5_7b_mathe"])
    assert result.exit_code == 1 and "did you mean 'qwen2_5_7b_math'?" in result.output
