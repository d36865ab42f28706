"""The way from a laptop to a cluster: one script, four configuration files, and nothing else changes."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from examples.migration import train
from examples.quickstart.tiny_model import tiny_model
from verl.config import load_config

FILES = Path(train.__file__).parent
ROOT = Path(train.__file__).resolve().parents[2]
SMALL = [
    "data.train_files=[train.jsonl]",
    "data.train_batch_size=4",
    "data.max_response_length=6",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
]


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


PAGE = (ROOT / "docs" / "executors.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_names_the_files_and_its_settings_are_settings():
    (commands,) = blocks("bash")
    listed = [line.split()[1:] for line in commands.splitlines()]
    assert listed == [
        ["examples/migration/train.py", f"examples/migration/{p.name}"] for p in sorted(FILES.glob("*.yaml"))
    ]
    for text in blocks("yaml"):
        load_config(overrides=[f"{key}={value}" for key, value in flat(yaml.safe_load(text)).items()])


def flat(settings: dict, before: str = "") -> dict[str, object]:
    found = {}
    for name, value in settings.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return found


def test_the_pages_reward_function_combines(home, tmp_path, caplog):
    """In one process, where overlap has nothing to do, which is said."""
    (function,) = blocks("python")
    (tmp_path / "combined.py").write_text(function)
    chosen = ["use_rm=true", "reward_model.model.path=models/reward", "reward.custom_reward_function.path=combined.py"]
    metrics = train.main(str(FILES / "1_local.yaml"), [*SMALL, *chosen, "trainer.overlap=true"])
    assert metrics["critic/score/mean"] == pytest.approx(metrics["reward/rm_score_mean"], abs=1e-6)
    assert "trainer.overlap=true: all roles share their processes" in caplog.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1_local", {"critic/vf_loss", "actor/ref_kl"}),
        ("2_processes", {"critic/vf_loss", "actor/ref_kl"}),
        pytest.param("3_ray", set(), marks=pytest.mark.slow),
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
