"""The showcase: its task, where it finds the model, a run of it, and the commands of the page of baselines."""

import json
import os
import re
import shlex
import subprocess
import sys
from urllib.error import HTTPError, URLError

import pytest

from examples.quickstart import arithmetic, run, smollm2
from examples.quickstart.tiny_model import tiny_model
from tests.pages import ROOT, blocks
from verl.config import load_config


@pytest.mark.parametrize(
    ("response", "score", "acc"),
    [
        (" 85", 1.0, 1.0),
        (" 85\n", 1.0, 1.0),
        ("85.\n\nThe sum", 1.0, 1.0),
        ("37 + 48 = 85", 0.5, 0.0),  # a longer line
        ("85 is not 86", 0.0, 0.0),  # the last number counts
        ("75", 0.1 + 0.3 / 2, 0.0),  # one of two digits
        ("185", 0.1, 0.0),  # another number of digits
        ("-85", 0.1, 0.0),
        ("", 0.0, 0.0),
        ("eighty-five", 0.0, 0.0),
    ],
)
def test_score(response, score, acc):
    found = arithmetic.compute_score("arithmetic", response, "85")
    assert found == {"score": pytest.approx(score), "acc": acc}


def test_no_test_question_is_in_the_training_set(tmp_path):
    folder = arithmetic.write_arithmetic(tmp_path, rows=8000, seed=1)
    train, test = (
        [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    )
    pairs = []
    for row in [*train, *test]:
        a, b = map(int, re.fullmatch(r"23 \+ 45 = 68\n(\d\d) \+ (\d\d) =", row["prompt"]).groups())
        assert row["reward_model"]["ground_truth"] == str(a + b)
        pairs.append((a, b))
    trained, tested = set(pairs[:8000]), set(pairs[8000:])
    assert len(train) == 8000 and len(tested) == len(test) == 200
    assert not tested & trained and not {(b, a) for a, b in tested} & trained


def test_the_settings_were_chosen_on_other_questions():
    chosen_on, test = arithmetic.held_out(seed=arithmetic.VALIDATION_SEED), arithmetic.held_out()
    assert len(chosen_on) == len(test) == 200
    assert len(set(test) - set(chosen_on)) >= 180  # some of 8,100 questions are drawn twice


# ------------------------------------------------------------------------------------------------ where the model is
@pytest.fixture
def sources(monkeypatch, tmp_path):
    """The names of the sources that were asked; each one fails unless its name is in `works`."""
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "check_tokenizer", lambda folder: None)
    asked, works = [], set()

    def source(name):
        def fetch(folder):
            asked.append(name)
            if name not in works:
                raise OSError(f"no {name}\nfor a reason")
            folder.mkdir()
            (folder / "config.json").write_text("{}")

        return fetch

    monkeypatch.setattr(smollm2, "from_hub", source("hub"))
    monkeypatch.setattr(smollm2, "from_package", source("package"))
    return asked, works


def test_sources_in_order_and_one_line_for_each_failure(sources):
    asked, works = sources
    works.add("package")
    lines = []
    folder = smollm2.find_model(say=lines.append)
    assert asked == ["hub", "package"] and (folder / "config.json").is_file()
    assert [line for line in lines if "not from" in line] == [
        "SmolLM2-135M-Instruct: not from the hub HuggingFaceTB/SmolLM2-135M-Instruct: no hub for a reason"
    ]
    assert smollm2.find_model(say=lines.append) == folder  # from the cache
    assert asked == ["hub", "package"]


@pytest.mark.parametrize(
    "error, line",
    [
        (URLError(OSError(-2, "Name or service not known")), "Name or service not known"),
        (URLError(TimeoutError("timed out")), "timed out"),
        (URLError("unknown url type: ftp"), "<urlopen error unknown url type: ftp>"),
        (HTTPError("http://hub", 404, "Not Found", {}, None), "HTTP Error 404: Not Found"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
    ],
)
def test_a_source_that_cannot_be_reached_has_a_plain_reason(error, line):
    assert smollm2._one_line(error) == line


def test_what_the_package_needs_is_named_before_the_hub_is_tried(sources, monkeypatch):
    sources[1].add("hub")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    lines = []
    smollm2.find_model(say=lines.append)
    assert lines[0].endswith("needs: pip install gguf accelerate") and "trying the hub" in lines[1]


LOADING = "; from transformers import LlamaConfig, LlamaForCausalLM as M\n"
LOADING += "sizes = dict(intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)\n"
LOADING += "M(LlamaConfig(hidden_size=8, **sizes)).save_pretrained(sys.argv[1]); M.from_pretrained(sys.argv[1])\n"


@pytest.mark.parametrize("loading", ["\n", pytest.param(LOADING, marks=pytest.mark.slow)], ids=["tqdm", "transformers"])
def test_no_bar_of_a_library_stands_between_the_lines(loading, tmp_path):
    """A program of ours prints its own lines; a bar that was asked for is shown."""
    code = "import sys; from verl.utils.log import setup_logging; setup_logging(); from tqdm.auto import tqdm"
    code += loading + "list(tqdm([1]))"
    seen = {}
    for name, env in {"plain": {}, "asked": {"TQDM_DISABLE": ""}}.items():
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, check=True)
        seen[name] = done.stderr
    assert seen["plain"] == "" and "100%" in seen["asked"]


def test_no_source_names_the_fix_and_leaves_nothing_behind(sources):
    lines = []
    with pytest.raises(ValueError, match="--model FOLDER"):
        smollm2.find_model(say=lines.append)
    assert len([line for line in lines if "not from" in line]) == 2
    assert not list(smollm2.cache_folder().parent.iterdir())


def test_what_reads_the_package_is_installed_by_make_and_named_if_it_is_missing(monkeypatch, tmp_path):
    recipe = (ROOT / "Makefile").read_text().partition("\nshowcase:")[2].partition("\n\n")[0]
    assert all(name in recipe for name in smollm2.READERS)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed: gguf, accelerate: pip install gguf accelerate"):
        smollm2.from_package(tmp_path)


def test_a_given_folder_is_the_only_source(sources, tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        smollm2.find_model(str(tmp_path), say=print)
    assert sources[0] == []


# ------------------------------------------------------------------------------------------------------------- a run
def test_a_run_prints_accuracy_and_responses_before_and_after(tmp_path, capsys):
    tiny_model("qwen2", tmp_path / "model")
    policy = "actor_rollout_ref."
    small = ["data.train_batch_size=2", f"{policy}actor.ppo_mini_batch_size=2", f"{policy}rollout.n=2"]
    given = ["--model", str(tmp_path / "model"), "--steps", "2", "--test-rows", "4", "--out", str(tmp_path / "out")]
    assert run.main([*given, *small]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"accuracy 0\.\d\d -> 0\.\d\d on 4 held-out questions, greedy", shown)
    assert "question before after answer" in shown
    assert (tmp_path / "out" / "rl" / "global_step_2" / "actor" / "huggingface" / "config.json").is_file()


RECIPES = [command.replace("\\\n", "") for command in blocks("internals/baselines.md", "bash") if "main_ppo" in command]


@pytest.mark.parametrize("command", RECIPES, ids=["0.5B", "1.5B", "7B"])
def test_the_settings_of_the_recipes_are_valid(command):
    config = load_config(None, shlex.split(command)[3:])
    assert config.actor_rollout_ref.model.path.startswith("Qwen/")
