"""What travels to the nodes of a cluster."""

import json
import os
from pathlib import Path

import pytest

import verl
from verl.processes.child import helper_environment
from verl.single_controller.ray.cluster import default_excludes, prepare_runtime_env


def fill(folder: Path, files: dict[str, int]) -> Path:
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)
    return folder


def test_code_travels_and_weights_checkpoints_and_data_do_not(tmp_path):
    """By Ray's own rules, with the patterns that are always excluded."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    code = {"train.py", "pkg/model.py", "pkg/data/load.py", "config.yaml", "pkg/reward.json", "x/.gitignore"}
    heavy = ["model/model.safetensors", "run/global_step_3/actor/extra", "data/train.parquet", "a.jsonl", ".git/x/y"]
    heavy += ["checkpoints/x/latest_checkpointed_iteration.txt", "pkg/__pycache__/model.pyc", "weights.pt", "b/c"]
    fill(tmp_path, dict.fromkeys([*code, *heavy, "x/drop.txt"], 9))
    (tmp_path / "x/.gitignore").write_text("drop.txt\n")
    packed, excludes = [], [*default_excludes(), "/b/"]
    packaging._dir_travel(
        tmp_path, [packaging._get_excludes(tmp_path, excludes)], packed.append, include_gitignore=True
    )
    assert {path.relative_to(tmp_path).as_posix() for path in packed if path.is_file()} == code


def test_a_runtime_env_is_made_ready_for_ray(tmp_path):
    pytest.importorskip("ray")
    fill(tmp_path, {"big.dat": 100})
    given = {"working_dir": str(tmp_path), "excludes": ["big.dat"], "env_vars": {"NCCL_IB_DISABLE": 1}, "pip": None}
    env = prepare_runtime_env(given)
    assert env["excludes"] == [*default_excludes(), "big.dat"] and env["env_vars"] == {"NCCL_IB_DISABLE": "1"}
    assert "pip" not in env and json.dumps(env)
    assert prepare_runtime_env({"working_dir": "s3://bucket/x.zip"}) == {"working_dir": "s3://bucket/x.zip"}
    with pytest.raises(ValueError, match="there is no folder"):
        prepare_runtime_env({"working_dir": str(tmp_path / "missing")})


@pytest.mark.slow
def test_workers_have_the_folder_that_was_sent_and_the_variables_that_were_given(settings, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(verl.__file__).parents[1]))
    from verl.trainer.ray_trainer import RayPPOTrainer

    fill(tmp_path / "mine", {"my_ideas.py": 3, "model.safetensors": 9, "notes/a.txt": 9})
    sent = "ray_kwargs.ray_init.runtime_env"
    cluster = ["trainer.backend=ray", "trainer.device=cpu", "ray_kwargs.ray_init={num_cpus: 2, address: local}"]
    given = [f"{sent}.working_dir={tmp_path / 'mine'}", f"{sent}.excludes=[/notes/]", f"{sent}.env_vars.HERE=7"]
    given += ["trainer.worker_env.NCCL_SOCKET_IFNAME=lo", "algorithm.name=grpo"]
    (tmp_path / "mine/my_ideas.py").write_text("x=1")
    trainer = RayPPOTrainer(overrides=[*settings, *cluster, *given])
    trainer.init_workers()
    try:

        def look(actor) -> tuple:
            return os.getcwd(), os.listdir(), os.environ["HERE"], os.environ["NCCL_SOCKET_IFNAME"]

        (rank,) = trainer.roles["actor"]._pool._ranks
        folder, files, here, interface = ray.get(rank.actor.__ray_call__.remote(look))
    finally:
        trainer.shutdown()
    assert files == ["my_ideas.py"] and folder != str(tmp_path / "mine") and (here, interface) == ("7", "lo")


@pytest.mark.slow
def test_values_of_environment_variables_are_in_no_file_of_the_run(settings, tmp_path):
    from verl.trainer.local_trainer import LocalPPOTrainer

    given = ["trainer.worker_env.KEY=s3cret", "trainer.logger=[jsonl,tensorboard]", "trainer.save_freq=1"]
    LocalPPOTrainer(overrides=[*settings, *given, "trainer.total_training_steps=1", "algorithm.name=grpo"]).fit()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "trainer.json"} <= {path.name for path in files}
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []


def test_settings_that_a_running_ray_would_not_hear_are_refused(settings, monkeypatch):
    ray = pytest.importorskip("ray")
    from verl.trainer.ray_trainer import RayPPOTrainer

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    overrides = [*settings, "trainer.backend=ray", "algorithm.name=grpo", "ray_kwargs.ray_init.num_cpus=2"]
    with pytest.raises(ValueError, match="ray_init sets num_cpus, but Ray is already running in this process"):
        RayPPOTrainer(overrides=overrides)


READS_ENVIRONMENT = """
import os

import numpy as np

def sample(data_source, solution_str, ground_truth, extra_info=None):
    return float(os.environ["JUDGE"])

async def coroutine(data_source, solution_str, ground_truth, extra_info=None):
    return float(os.environ["JUDGE"])

def lists(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [float(os.environ["JUDGE"])] * len(solution_strs)

def columns(batch):
    return np.full(len(batch), float(os.environ["JUDGE"]))

class Public:
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source"):
        self.compute_score = compute_score

    def __call__(self, data, return_dict=False):
        return np.full(len(data), self.compute_score("", "", ""))
"""


@pytest.mark.fast("sample-Public", "coroutine-naive")
@pytest.mark.parametrize(
    ("function", "manager"),
    [
        ("sample", "naive"),
        ("coroutine", "naive"),
        *(pytest.param(*kinds, marks=pytest.mark.slow) for kinds in (("sample", "prime"), ("lists", "batch"))),
        pytest.param("columns", "naive", marks=pytest.mark.slow),  # the process imports torch
        ("sample", "Public"),
    ],
)
def test_rewards_and_tools_have_the_variables_of_the_workers(function, manager, settings, tmp_path):
    from verl.trainer.local_trainer import LocalPPOTrainer

    (tmp_path / "judge.py").write_text(READS_ENVIRONMENT)
    given = [f"reward.custom_reward_function.path={tmp_path / 'judge.py'}", "reward.isolation=process"]
    given += [f"reward.custom_reward_function.name={function}", f"reward.reward_manager.name={manager}"]
    if manager == "Public":
        given += [
            "reward.reward_manager.source=importlib",
            f"reward.reward_manager.module.path={tmp_path / 'judge.py'}",
        ]
    overrides = [*settings, "algorithm.name=grpo", *given]
    trainer = LocalPPOTrainer(overrides=[*overrides, "trainer.worker_env.JUDGE=7"])  # scores a trial response
    assert helper_environment(JUDGE="1", OTHER="2") == {**os.environ, "JUDGE": "7", "OTHER": "2"}
    assert set(trainer.run.reward_values) <= {"acc"}
    with pytest.raises(ValueError, match="JUDGE"):
        LocalPPOTrainer(overrides=overrides)  # a further trainer without it
