"""`verl plan` with inputs that make no sense: one error and an exit status, never a traceback."""

import json
import shutil
from pathlib import Path

import pytest

from tests.trainer.conftest import make_tiny, run_settings
from verl.cli import plan
from verl.planner.shapes import ModelShape
from verl.trainer.checks.planning import shape_of


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command."""
    try:
        status = plan.main(list(arguments))
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(tiny, tmp_path) -> list[str]:
    return run_settings(tiny, tmp_path / "run")


@pytest.fixture
def changed(tiny, tmp_path):
    """A function that copies the tiny model with other values in its config.json."""

    def change(**values) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny / "model", folder)
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | values))
        return folder

    return change


@pytest.mark.parametrize("text", ["0", "-1", "8..4", "0..", "1..8", "1.5", "1e3", "abc", "", "99999999999999999999"])
def test_the_number_of_gpus_is_a_whole_number(capsys, text):
    status, out, err = call(capsys, f"--gpus={text}")
    assert (status, out) == (2, "")
    assert f"argument --gpus: expected a whole number from 1 to 1000000000, found '{text}'" in err


@pytest.mark.parametrize("arguments", [["--gpus", "8", "--help"], ["--help", "--gpus"], ["-h"]])
def test_help_is_printed_whatever_else_is_given(capsys, arguments):
    status, out, _ = call(capsys, *arguments)
    assert status == 0 and "usage: verl plan" in out and "--model" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "found 'model', expected FILE.yaml, key=value or --gpus N"),
        (["model/config.json"], "expected FILE.yaml, key=value or --gpus N"),
        (["--model", "7B"], "--model is an option of a simulation, which needs the number of GPUs: add --gpus N"),
        (["trainer.nnodes=1", "--gpu=H200"], "--gpu is an option of a simulation"),
    ],
)
def test_neither_form_of_the_command(capsys, arguments, message):
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "") and message in err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": "abc"}, "transformers refuses its config.json .*expected int, got str"),
        ({"num_attention_heads": 7}, "transformers refuses its config.json .*not a multiple"),
        ({"num_attention_heads": 0}, "transformers refuses its config.json .*ZeroDivisionError"),
        ({"vocab_size": None}, "transformers refuses its config.json"),
        ({"hidden_size": -64}, "has hidden_size=-64: expected int >= 1"),
        ({"num_hidden_layers": 0}, "has num_hidden_layers=0: expected int >= 1"),
        ({"vocab_size": 0}, "has vocab_size=0: expected int >= 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: expected a multiple"),
    ],
)
def test_a_config_that_no_model_has_is_refused_in_a_run_too(settings, changed, capsys, values, message):
    folder = changed(**values)
    with pytest.raises(ValueError, match=message):
        shape_of(str(folder))
    status, _, err = call(capsys, *settings, f"actor_rollout_ref.model.path={folder}")
    assert status == 1 and err.startswith("error: ") and message.split(" .*")[0] in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["--config-name", "--config-path"])
def test_an_option_without_its_value(capsys, name):
    status, _, err = call(capsys, "trainer.nnodes=1", name)
    assert status == 1 and err.strip() == f"error: {name} requires a value"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 0}, "has num_hidden_layers=0: expected whole numbers of at least 1"),
        ({"num_key_value_heads": -2, "head_dim": 0}, "has num_key_value_heads=-2, head_dim=0"),
        ({"hidden_size": 2, "num_attention_heads": 4}, "has hidden_size=2 and num_attention_heads=4"),
        ({"num_experts": 4, "num_experts_per_tok": 0}, "has 4 experts and num_experts_per_tok=0"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "has 4 experts and num_experts_per_tok=5"),
        ({"num_experts": -4, "num_experts_per_tok": 1}, "has -4 experts and num_experts_per_tok=1"),
        ({"num_experts": 4}, "mine has 4 experts, but no num_experts_per_tok"),
        ({"num_hidden_layers": None}, "the config of mine has no num_hidden_layers"),
        ({"kv_lora_rank": 512}, "mine has multi-head latent attention"),
    ],
)
def test_a_shape_that_no_model_has_or_that_is_not_modelled(values, message):
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    config = dict.fromkeys(names, 8)
    assert ModelShape.from_config(config).head_dim == 1
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(config | values, "mine")
