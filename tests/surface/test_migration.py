"""The way from a laptop to a cluster: one script, four configuration files, and nothing else changes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from examples.migration import train
from examples.quickstart.tiny_model import tiny_model
from tests.pages import ROOT, commands
from verl.trainer.ppo_trainer import PPOTrainer

FILES = Path(train.__file__).parent
SMALL = ["data.train_files=[train.jsonl]", "data.train_batch_size=4", "data.max_response_length=6"]
SMALL += ["trainer.total_training_steps=1", "trainer.val_before_train=false"]


@pytest.fixture
def home(tmp_path, tiny, monkeypatch):
    """A folder with what the files name: a policy, a reward model, rows."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "policy").symlink_to(tiny / "model")
    (tmp_path / "train.jsonl").symlink_to(tiny / "train.jsonl")
    folder = tiny_model("qwen2", tmp_path / "models" / "reward", seed=1)
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # processes of Ray begin in this folder
    return tmp_path


def test_the_page_names_the_files():
    listed = [command.split()[1:] for command in commands("parallelism.md") if "examples/migration" in command]
    assert listed == [
        ["examples/migration/train.py", f"examples/migration/{p.name}"] for p in sorted(FILES.glob("*.yaml"))
    ]


def test_one_process_for_all_roles_has_nothing_to_overlap(home, tiny, caplog):
    chosen = [f"reward.custom_reward_function.path={tiny / 'reward.py'}", "use_rm=true"]
    trainer = PPOTrainer(
        config_path=FILES / "1_local.yaml",
        overrides=[*SMALL, *chosen, "reward_model.model.path=models/reward", "trainer.overlap=true"],
    )
    trainer.announce()
    assert "trainer.overlap=true: all roles share their processes" in caplog.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1_local", {"critic/vf_loss", "actor/ref_kl"}),
        pytest.param("2_processes", {"critic/vf_loss", "actor/ref_kl"}, marks=pytest.mark.slow),
        pytest.param("3_ray", {"critic/vf_loss", "actor/ref_kl"}, marks=pytest.mark.slow),
        pytest.param("4_ray_roles", {"critic/vf_loss", "actor/ref_kl", "reward/rm_score_mean"}, marks=pytest.mark.slow),
    ],
)
def test_the_same_script_by_every_executor(name, expected, home, tiny):
    overrides = [*SMALL]
    if "ray" in name:
        pytest.importorskip("ray")
        overrides += ["trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=4", "ray_kwargs.ray_init.address=local"]
    if "roles" not in name:
        overrides += [f"reward.custom_reward_function.path={tiny / 'reward.py'}"]
    metrics = train.main(str(FILES / f"{name}.yaml"), overrides)
    assert metrics["training/global_step"] == 1
    assert "my/long_answers" in metrics
    assert {"critic/vf_loss", "actor/ref_kl", "reward/rm_score_mean"} & metrics.keys() == expected
