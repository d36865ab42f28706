"""`verl recipes`: each is read by the real reader, fits its hardware by `verl plan`, and is in docs/recipes.md."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl.cli import plan
from verl.cli.app import app
from verl.cli.programs import PROGRAMS
from verl.config import load_config
from verl.config.sources import read_yaml

ROOT = Path(__file__).parents[1]
RECIPES = {path.parent.name: path.parent for path in sorted((ROOT / "examples/recipes").glob("*/recipe.yaml"))}
TRAINED = [name for name, folder in RECIPES.items() if (folder / "config.yaml").is_file()]
KEYS = ["title", "command", "hardware", "time", "result", "source"]
LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
#: config.json of the models without a built-in size, as published
PUBLISHED = {
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
        assert (RECIPES[name] / "results/curve.png").is_file() and (ROOT / record["source"]).is_file()


@pytest.mark.parametrize("name", TRAINED)
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
