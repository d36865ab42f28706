"""Runs whose prompts are prepared in threads (data.dataloader_num_workers) are those without threads."""

import threading

import pytest
import torch

from tests.trainer.conftest import run_settings
from tests.trainer.runs import metrics_of
from tests.trainer.test_asynchronous import GRPO, VERSIONS, ThreadCluster
from tests.trainer.test_operator_watch import AllBut, wait_until_measured
from tests.trainer.test_vision_run import letters, settings, vision  # noqa: F401 (a fixture)
from verl import PPOTrainer, SFTTrainer
from verl.data import prefetch
from verl.data.images import MediaError
from verl.trainer.guards import operator_watch
from verl.trainer.guards.operator_watch import OperatorTimeout

THREADS = "data.dataloader_num_workers"


@pytest.fixture(autouse=True)
def no_thread_remains():
    yield
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("data ")]:
        thread.join(10)
        assert not thread.is_alive()


def trained(config, kind=PPOTrainer, **more):
    """The uids of every step of a run, and its trainer."""
    trainer, seen = kind(config, **more), []
    trainer.on_step.append(lambda report: seen.append(list(report.batch.non_tensor_batch["uid"])))
    trainer.fit()
    return seen, trainer


@pytest.mark.slow
def test_a_run_on_images_is_the_same_and_resumes_to_the_same(vision, tmp_path):  # noqa: F811
    def run(name, threads, steps, **more):
        more |= {THREADS: threads, "trainer.total_training_steps": steps, "trainer.test_freq": -1}
        return trained(settings(vision, tmp_path / name, **more), reward_fn=letters)

    plain, _ = run("plain", 0, 3)
    threaded, trainer = run("threaded", 3, 3)
    assert threaded == plain and metrics_of(tmp_path / "threaded") == metrics_of(tmp_path / "plain")
    assert "; 3 threads prepare the next batch" in trainer.plan()
    first, _ = run("resumed", 3, 1)
    rest, _ = run("resumed", 2, 3)  # not another experiment
    assert first + rest == plain and metrics_of(tmp_path / "resumed") == metrics_of(tmp_path / "plain")


def test_threads_are_the_default_for_images_only(vision, tmp_path, monkeypatch, settings_of_text):  # noqa: F811
    def source(config, **more):
        return PPOTrainer(config, **more).source.describe()

    monkeypatch.setattr(prefetch.os, "sched_getaffinity", lambda _: range(3))
    assert "3 threads prepare" in source(settings(vision, tmp_path / "run"), reward_fn=letters)
    monkeypatch.setattr(prefetch.os, "sched_getaffinity", lambda _: range(64))
    assert "8 threads prepare" in source(settings(vision, tmp_path / "run"), reward_fn=letters)
    assert "prepare" not in source(settings_of_text)
    # data.gen_batch_size takes several batches at once
    groups = {"algorithm.filter_groups.enable": True, "data.gen_batch_size": 10, THREADS: 2}
    assert "2 threads prepare the next 3 batches" in source(settings_of_text | groups)


@pytest.fixture
def settings_of_text(tiny, tmp_path):
    lines = run_settings(tiny, tmp_path / "run")
    return dict(line.split("=", 1) for line in lines) | {"trainer.logger": ["jsonl"]}


class Counting(torch.utils.data.Dataset):
    """A custom dataset, which notices several threads."""

    def __init__(self, hang_at=None):
        self.busy, self.calls, self.hang_at, self.end = threading.Lock(), 0, hang_at, threading.Event()

    def __len__(self):
        return 24

    def __getitem__(self, row):
        assert self.busy.acquire(blocking=False), "two threads at once"
        try:
            self.calls += 1
            if self.calls == self.hang_at:
                self.end.wait(60)
            return {"prompt_ids": [5 + row % 3], "data_source": "x", "reward_model": {"ground_truth": "a"}}
        finally:
            self.busy.release()


def test_items_of_a_custom_dataset_are_read_by_one_thread(settings_of_text, caplog):
    more = {"trainer.total_training_steps": 3, "data.val_files": []}
    caplog.set_level("INFO")
    plain, trainer = trained(settings_of_text | more, train_dataset=Counting())
    assert "prepare" not in trainer.source.describe()
    more |= {THREADS: 4, "trainer.resume_mode": "disable"}
    threaded, trainer = trained(settings_of_text | more, train_dataset=Counting())
    assert threaded == plain and "1 thread prepares the next batch" in trainer.source.describe()
    assert "the items of a custom dataset are read by one thread" in caplog.text


@pytest.mark.slow
def test_an_image_that_is_gone_is_the_error_of_its_row(vision, tmp_path):  # noqa: F811
    errors = []
    for threads in (0, 3):
        for path in vision.glob("*.png"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "train.jsonl").write_bytes((vision / "train.jsonl").read_bytes())
        more = {THREADS: threads, "data.train_files": str(tmp_path / "train.jsonl"), "data.shuffle": False}
        more |= {"trainer.test_freq": -1, "trainer.resume_mode": "disable"}
        trainer = PPOTrainer(settings(vision, tmp_path / "run", **more), reward_fn=letters)
        for name in ("6.png", "4.png"):
            (tmp_path / name).unlink()
        with pytest.raises(MediaError) as error:
            trainer.fit()
        assert trainer.global_step == 1 and trainer.source.state_dict()["step_in_epoch"] == 1  # of the step before
        errors.append(str(error.value))
    assert errors[0] == errors[1] and "train.jsonl, line 5, image 0 (4.png): expected a file" in errors[0]


@pytest.mark.slow
def test_dynamic_sampling_draws_the_same_prompts(settings_of_text, tmp_path):
    groups = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "seq_reward"}
    groups |= {"data.gen_batch_size": 6, "data.train_batch_size": 8, "algorithm.adv_estimator": "grpo"}
    groups |= {"trainer.total_training_steps": 3}
    found = []
    for threads in (0, 2):
        run = tmp_path / str(threads)
        more = groups | {THREADS: threads, "trainer.default_local_dir": str(run)}
        found.append((trained(settings_of_text | more)[0], metrics_of(run)))
    assert found[0] == found[1]
    assert any(line.get("filter_groups/passes", 0) > 1 for line in found[0][1].values())  # further batches were drawn


def test_sft_on_images_is_the_same(vision, tmp_path):  # noqa: F811
    found = []
    for threads in (0, 3):
        run = {"trainer.default_local_dir": str(tmp_path / str(threads)), "trainer.logger": ["jsonl"]}
        data = {"train_files": str(vision / "sft.jsonl"), "train_batch_size": 3, "max_length": 64}
        data["num_workers"] = threads  # public verl's name
        steps = {"model.path": str(vision / "model"), "trainer.total_training_steps": 4}
        trained(run | steps | {"data": data}, SFTTrainer)
        found.append(metrics_of(tmp_path / str(threads)))
    assert found[0] == found[1]


# ---- a read that hangs ----------------------------------------------------------------------------------------------


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(operator_watch, "_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(operator_watch, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(prefetch, "_JOIN_SECONDS", 0.2)
    return {"trainer.wait_minimum": 1, "reward.timeout": 0.5, "trainer.total_training_steps": 6, "data.val_files": []}


@pytest.mark.fast("1")
@pytest.mark.parametrize("threads", [0, 1])
def test_a_read_that_hangs_ends_the_run_with_its_stack(settings_of_text, short_waits, threads, monkeypatch):
    dataset = Counting(hang_at=14)
    trainer = PPOTrainer(settings_of_text | short_waits | {THREADS: threads}, train_dataset=dataset)
    trainer.view.unwatched = AllBut("prompts")
    trainer.on_step.append(lambda report: wait_until_measured(trainer, "prompts"))
    with pytest.raises(OperatorTimeout, match=r"^operator 'prompts' has not ended after 1 s") as error:
        trainer.fit()
    if threads:
        assert "--- thread data reader" in str(error.value) and "self.end.wait(60)" in str(error.value)
    dataset.end.set()
    monkeypatch.setattr(prefetch, "_JOIN_SECONDS", 10.0)
    trainer.source.close()


def asynchronous(settings: dict, *more: str) -> list[str]:
    return [f"{k}={v}" for k, v in settings.items() if k != "trainer.logger"] + [*GRPO, *VERSIONS, *more]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_read_that_hangs_ends_asynchronous_training(settings_of_text, short_waits, threads, monkeypatch):
    dataset = Counting(hang_at=18)
    overrides = asynchronous(settings_of_text | short_waits | {THREADS: threads}, "trainer.async.max_staleness=1")
    trainer = PPOTrainer(overrides=overrides, train_dataset=dataset, cluster=ThreadCluster())
    with pytest.raises(OperatorTimeout, match=r"no group of responses has arrived") as error:
        trainer.fit()
    assert "self.end.wait(60)" in str(error.value)
    dataset.end.set()
    monkeypatch.setattr(prefetch, "_JOIN_SECONDS", 10.0)
    trainer.source.close()
    trainer.runner.producer.stop()  # ends with its read


def test_asynchronous_training_loses_and_repeats_no_prompt(settings_of_text, tmp_path):
    overrides = asynchronous(settings_of_text | {THREADS: 2}, "trainer.async.max_staleness=2", "trainer.save_freq=1")

    def stop(report):
        if report.step == 3:
            raise KeyboardInterrupt

    seen = []
    for steps in (stop, None):
        trainer = PPOTrainer(overrides=[*overrides, "trainer.total_training_steps=6"], cluster=ThreadCluster())
        trainer.on_step.append(lambda report: seen.extend(dict.fromkeys(report.batch.non_tensor_batch["uid"])))
        if steps is not None:
            trainer.on_step.append(steps)
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
        else:
            trainer.fit()
    assert sorted(seen) == sorted(f"0:{row}" for row in range(24))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_processes_and_ray(vision, tmp_path, executor):  # noqa: F811
    """Compared with two processes without threads."""
    more = {"trainer.n_gpus_per_node": 2, "trainer.test_freq": -1}
    plain, _ = trained(settings(vision, tmp_path / "plain", **more, **{THREADS: 0}), reward_fn=letters)
    if executor == "ray":
        pytest.importorskip("ray")
        more |= {"trainer.backend": "ray", "ray_kwargs.ray_init.num_cpus": 5, "ray_kwargs.ray_init.address": "local"}
    threaded, _ = trained(settings(vision, tmp_path / "threads", **more, **{THREADS: 3}), reward_fn=letters)
    assert threaded == plain and metrics_of(tmp_path / "threads") == metrics_of(tmp_path / "plain")
