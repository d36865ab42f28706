"""Runs of this project that trained adapters: their checkpoints hold no weights but these, and merge all the same."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.trainer.conftest import make_tiny, run_settings
from verl.model_merger.__main__ import main
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.main_generation import main as generate

peft = pytest.importorskip("peft")

ADAPTERS = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def train(tiny: Path, run: Path, *more: str) -> Path:
    own = ["trainer.save_freq=2", "trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=1e-2"]
    LocalPPOTrainer(overrides=[*run_settings(tiny, run), *ADAPTERS, *own, *more]).fit()
    return run / "global_step_2"


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    """The checkpoint of one process, with a critic that has adapters, too."""
    critic = ["algorithm.adv_estimator=gae", "critic.model.lora_rank=2", "critic.model.lora_alpha=6"]
    return train(tiny, tmp_path_factory.mktemp("run"), *critic)


@pytest.fixture
def sharded(tiny, tmp_path) -> Path:
    """The checkpoint of two processes, which share one copy of the weights."""
    return train(tiny, tmp_path / "run", "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2")


def merged(role: Path, target: Path, *options: str, status: int = 0) -> Path:
    arguments = ["merge", "--backend", "fsdp", "--local_dir", str(role), "--target_dir", str(target), *options]
    assert main(arguments) == status
    return target


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12)[None]).logits


@pytest.mark.parametrize("run", ["saved", pytest.param("sharded", marks=pytest.mark.slow)])
def test_the_merged_models_are_what_peft_makes_of_the_adapters(run, request, tiny, tmp_path):
    saved = request.getfixturevalue(run)
    classes = {"actor": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
    assert not list(saved.glob("*/huggingface/*.safetensors"))
    for name in sorted(path.name for path in saved.iterdir() if path.is_dir()):
        labels = {"num_labels": 1} if name == "critic" else {}
        base = classes[name].from_pretrained(tiny / "model", **labels)
        untrained = logits(base)
        expected = logits(peft.PeftModel.from_pretrained(base, saved / name / "lora_adapter").merge_and_unload())
        found = logits(classes[name].from_pretrained(merged(saved / name, tmp_path / name)))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (found - untrained).abs().max() > 1e-3
        test = ["test", "--backend", "fsdp", "--local_dir", str(saved / name), "--test_hf_dir", str(tmp_path / name)]
        assert main(test) == 0


def test_a_base_that_has_moved_must_be_named(saved, tiny, tmp_path, capsys):
    copy = Path(shutil.copytree(saved / "actor", tmp_path / "actor"))
    for file in (copy / "lora_adapter" / "adapter_config.json", copy / "huggingface" / "config.json"):
        file.write_text(file.read_text().replace(str(tiny / "model"), "/gone"))
    merged(copy, tmp_path / "merged", status=1)
    assert "their base model is required: ['/gone'] is not on this machine" in capsys.readouterr().err
    merged(copy, tmp_path / "merged", "--base", str(tiny / "model"))


def test_generation_says_how_to_get_the_weights(saved, tiny, tmp_path, capsys):
    folder = saved / "actor" / "huggingface"
    paths = [f"model.path={folder}", f"data.path={tiny / 'test.jsonl'}", f"data.output_path={tmp_path / 'out.jsonl'}"]
    assert generate(paths) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "Traceback" not in shown
    assert f"python -m verl.model_merger merge --backend fsdp --local_dir {saved / 'actor'} --target_dir" in shown
