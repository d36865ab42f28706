"""What travels to the nodes of a cluster, and what is said before too much would."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

import verl
from verl.processes.child import helper_environment
from verl.single_controller.ray.cluster import (
    check_package,
    default_excludes,
    ignore_matcher,
    package_limit,
    packed_files,
    prepare_runtime_env,
)

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray reads the patterns")


def test_the_limit_is_that_of_ray(monkeypatch):
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    monkeypatch.delenv("RAY_max_grpc_message_size", raising=False)
    assert package_limit() == packaging.GRPC_CPP_MAX_MESSAGE_SIZE == 512 * 2**20
    monkeypatch.setenv("RAY_max_grpc_message_size", "1000")
    assert package_limit() == 1000


def fill(folder: Path, files: dict[str, int]) -> Path:
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)
    return folder


@needs_ray
@pytest.mark.parametrize(
    ("pattern", "left_out", "kept"),
    [
        ("*.pt", ["a.pt", "deep/er/b.pt"], ["a.pty", "pt"]),
        ("/data/", ["data/", "data/x/y"], ["other/data/x", "data.py"]),
        ("data/", ["data/x", "other/data/x"], ["data"]),
        ("runs/*/log", ["runs/1/log", "runs/1/log/x"], ["runs/1/2/log", "x/runs/1/log"]),
        ("docs/**/*.png", ["docs/a.png", "docs/b/c/d.png"], ["a.png", "docs/a.jpg"]),
        ("a?[0-9].txt", ["ab1.txt"], ["ab.txt", "a/1.txt"]),
        ("# a remark", [], ["# a remark"]),
    ],
)
def test_patterns_mean_what_they_mean_in_a_gitignore(pattern, left_out, kept):
    matches = ignore_matcher([pattern])
    assert [path for path in [*left_out, *kept] if matches(path)] == left_out


@needs_ray
def test_the_last_pattern_that_fits_decides():
    matches = ignore_matcher(["*.jsonl", "!small.jsonl"])
    assert matches("a/big.jsonl") and not matches("a/small.jsonl")


@needs_ray
def test_code_travels_and_weights_checkpoints_and_data_do_not(tmp_path):
    code = {"train.py": 1, "pkg/model.py": 2, "pkg/data/load.py": 3, "config.yaml": 4, "pkg/reward.json": 5}
    heavy = ["model/model.safetensors", "run/global_step_3/actor/extra", "data/train.parquet", "a.jsonl", ".git/x/y"]
    heavy += ["checkpoints/x/latest_checkpointed_iteration.txt", "pkg/__pycache__/model.pyc", "weights.pt"]
    fill(tmp_path, code | dict.fromkeys(heavy, 9))
    assert dict(packed_files(tmp_path, default_excludes())) == code


@needs_ray
def test_ignore_files_count_where_they_lie(tmp_path):
    fill(tmp_path, {"a/keep.txt": 1, "a/drop.txt": 1, "drop.txt": 1, "b/x": 1})
    (tmp_path / "a/.rayignore").write_text("drop.txt\n")
    (tmp_path / ".gitignore").write_text("/b/\n# remark\n")
    assert {path for path, _ in packed_files(tmp_path, [])} == {
        ".gitignore", "a/.rayignore", "a/keep.txt", "drop.txt"
    }  # fmt: skip


def test_what_travels_is_what_ray_packs(tmp_path):
    """The second opinion: Ray's own rules over the same folder."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    files = ["train.py", "pkg/a.py", "pkg/a.safetensors", "data/t.parquet", "deep/global_step_1/x", "x/drop.txt", "b/c"]
    fill(tmp_path, dict.fromkeys(files, 1))
    (tmp_path / "x/.gitignore").write_text("drop.txt\n")
    excludes = [*default_excludes(), "/b/"]
    packed = []
    packaging._dir_travel(
        tmp_path, [packaging._get_excludes(tmp_path, excludes)], packed.append, include_gitignore=True
    )
    expected = {path.relative_to(tmp_path).as_posix() for path in packed if path.is_file()}
    assert (
        {path for path, _ in packed_files(tmp_path, excludes)} == expected == {"train.py", "pkg/a.py", "x/.gitignore"}
    )


@needs_ray
def test_a_folder_that_is_too_large_is_explained_by_its_parts(tmp_path):
    fill(tmp_path, {"train.py": 10, "models/a/weights.dat": 3 * 2**20, "models/b.dat": 2**20, "trace.json": 2**20})
    with pytest.raises(ValueError) as error:
        check_package(tmp_path, default_excludes(), 4 * 2**20)
    message = str(error.value)
    assert "5.0 MiB, and Ray sends less than 4.0 MiB" in message
    assert "4.0 MiB excluded by the pattern '/models/'; 1.0 MiB excluded by the pattern '/trace.json'" in message
    check_package(tmp_path, [*default_excludes(), "/models/"], 4 * 2**20)


@needs_ray
def test_a_runtime_env_is_made_ready_for_ray(tmp_path, monkeypatch):
    fill(tmp_path, {"big.dat": 100})
    given = {"working_dir": str(tmp_path), "excludes": ["big.dat"], "env_vars": {"NCCL_IB_DISABLE": 1}, "pip": None}
    env = prepare_runtime_env(given)
    assert env["excludes"] == [*default_excludes(), "big.dat"] and env["env_vars"] == {"NCCL_IB_DISABLE": "1"}
    assert "pip" not in env and json.dumps(env)
    assert prepare_runtime_env({"working_dir": "s3://bucket/x.zip"}) == {"working_dir": "s3://bucket/x.zip"}
    monkeypatch.setenv("RAY_max_grpc_message_size", "50")
    with pytest.raises(ValueError, match="too large to send"):
        prepare_runtime_env({**given, "excludes": []})
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


@pytest.mark.parametrize(
    ("function", "manager"),
    [
        ("sample", "naive"),
        ("sample", "prime"),
        ("coroutine", "naive"),
        ("lists", "batch"),
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
