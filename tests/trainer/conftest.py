"""A tiny policy that already knows a little of a tiny task, made once for all tests of trainers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from examples.quickstart.tiny_model import tiny_model
from verl.single_controller.local.cluster import InProcessCluster, ProcessCluster

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of an answer's characters that are letters: what a random model does sometimes."""
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
'''


def make_tiny(folder: Path) -> Path:
    """Write model/, train.jsonl (24 rows), test.jsonl (6 rows) and reward.py into a folder."""
    tiny_model("llama", folder / "model", seed=0)
    draw = Random(0)
    for name, rows in (("train", 24), ("test", 6)):
        texts = ["".join(draw.choice("abcdefghij") for _ in range(draw.randint(2, 4))) for _ in range(rows)]
        lines = [json.dumps({"prompt": f"{text}=", "answer": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD)
    return folder


def run_settings(tiny: Path, run: Path) -> list[str]:
    """Overrides of a run of 4 prompts x 2 answers: 6 steps an epoch."""
    return [
        f"data.train_files={tiny / 'train.jsonl'}",
        f"data.val_files={tiny / 'test.jsonl'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={tiny / 'model'}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        f"reward.custom_reward_function.path={tiny / 'reward.py'}",
        "reward.isolation=none",  # the default starts a process; test_isolated_rewards.py covers it
        f"trainer.default_local_dir={run}",
        "trainer.logger=[jsonl]",
        "trainer.val_before_train=false",
        "trainer.save_at_end=false",
    ]


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    """Files of these runs need not survive a power failure; those of tests/checkpoints do."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def forbid_workers(monkeypatch):
    """No cluster may start."""

    def start(*_):
        raise AssertionError("workers were started")

    for cluster in (InProcessCluster, ProcessCluster):
        monkeypatch.setattr(cluster, "start", start)


@pytest.fixture
def paid_by(tmp_path) -> Callable[..., str]:
    """(lines) -> the setting of a reward function with these lines, which counts its calls."""

    def write(*lines: str) -> str:
        head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
        body = "".join(f"    {line}\n" for line in ("global calls", "calls += 1", *lines))
        (tmp_path / "paid.py").write_text(f"import random, time\n\ncalls = 0\n\n{head}\n{body}")
        return f"reward.custom_reward_function.path={tmp_path / 'paid.py'}"

    return write


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder that `make_tiny` writes."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory) -> Path:
    """As the fixture `tiny`, with a Mixtral of four experts."""
    folder = make_tiny(tmp_path_factory.mktemp("mixture"))
    tiny_model("mixtral", folder / "model")
    return folder


@pytest.fixture
def settings(tiny, tmp_path) -> list[str]:
    """The overrides of `run_settings`; the run goes to tmp_path / "run"."""
    return run_settings(tiny, tmp_path / "run")
