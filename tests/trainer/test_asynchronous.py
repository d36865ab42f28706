"""Asynchronous training: generation overlaps training, staleness is bounded, and no prompt is lost or repeated."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.trainer import version_engine
from tests.trainer.runs import RAY, fit_reports
from tests.trainer.version_engine import VersionEngine
from verl.dataflow import DataFlow, Operator
from verl.single_controller.worker import RankEnv, WorkerSpec, free_port
from verl.single_controller.worker_group import Future, WorkerGroup
from verl.trainer.base import StepReport
from verl.trainer.ppo.flow import PPORunner
from verl.trainer.ppo_trainer import PPOTrainer

ROLLOUT = "actor_rollout_ref.rollout"
TWO = ["trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.rollout_devices=[1]"]
GRPO = ["algorithm.name=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=4", *TWO]
VERSIONS = [f"{ROLLOUT}.name=version", "data.max_response_length=20", "imports=[tests.trainer.version_engine]"]
NAMES = ("producer", "rollout service")


class ThreadGroup(WorkerGroup):
    """One worker in this process; its calls run in a thread of their own."""

    def __init__(self, role: str, spec: WorkerSpec):
        super().__init__(spec.worker_class, 1, role)
        self.worker = spec.build(RankEnv(master_port=free_port()))
        self.calls = ThreadPoolExecutor(1, thread_name_prefix=role)

    def execute(self, method, calls):
        (call,) = calls
        run = self.calls.submit(lambda: [call.finish(getattr(self.worker, method)(*call.args, **call.kwargs))])
        return Future(run.result)

    def shutdown(self):
        self.calls.shutdown(cancel_futures=True)
        if self.name == "rollout" and self.worker._service is not None:
            self.worker._service.close()


class ThreadCluster:
    """A cluster whose roles work at the same time, without processes."""

    def check(self, config):
        """Everything is supported."""

    def start(self, pools, specs):
        self.groups = {role: ThreadGroup(role, spec) for role, spec in specs.items()}
        return self.groups

    def shutdown(self):
        """The groups have ended."""


@pytest.fixture(autouse=True)
def no_thread_remains(monkeypatch):
    monkeypatch.setattr(VersionEngine, "times", [])
    monkeypatch.setattr(VersionEngine, "requests", 0)
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name in NAMES]


class SlowTrainer(PPOTrainer):
    """A trainer whose update takes at least 60 ms."""

    def build_flow(self) -> DataFlow:
        return super().build_flow().insert_before("update_actor", Operator("slow", lambda batch: time.sleep(0.06)))


def make(settings: list[str], *more: str, k: int = 1, steps: int = 6, kind: type = PPOTrainer) -> tuple:
    """A trainer and the list of its reports."""
    overrides = [*settings, *GRPO, *VERSIONS, f"trainer.async.max_staleness={k}", *more]
    trainer = kind(overrides=[*overrides, f"trainer.total_training_steps={steps}"], cluster=ThreadCluster())
    reports: list[StepReport] = []
    trainer.on_step.append(reports.append)
    return trainer, reports


def train(*args, **kwargs) -> tuple:
    """`make`, and the run."""
    trainer, reports = make(*args, **kwargs)
    trainer.fit()
    return trainer, reports


def once(reports: list[StepReport]) -> bool:
    """Whether every prompt of an epoch is trained once."""
    return sorted(uids_of(reports)) == sorted(f"0:{row}" for row in range(24))


def uids_of(reports: list[StepReport]) -> list[str]:
    return [uid for report in reports for uid in dict.fromkeys(report.batch.non_tensor_batch["uid"])]


def check_spans(report: StepReport, k: int) -> set[int]:
    """Every token is of the version that its span says. Returns the number of versions of each sample."""
    batch, counts = report.batch, set()
    for row, spans in enumerate(batch.non_tensor_batch["weight_versions"]):
        tokens = batch.batch["responses"][row][batch.batch["response_mask"][row].bool()].tolist()
        ends = [first for first, _ in spans[1:]] + [len(tokens)]
        assert [1 + v for (first, v), end in zip(spans, ends) for _ in range(first, end)] == tokens
        oldest = min(version for _, version in spans)
        assert batch.batch["weight_version"][row] == oldest
        assert 0 <= report.step - 1 - oldest <= k
        counts.add(len(spans))
    return counts


@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_generation_overlaps_training_within_the_bound(k, settings, monkeypatch):
    monkeypatch.setattr(VersionEngine, "hold", 60.0)
    spans, counts = [], set()

    class Timed(SlowTrainer):
        def build_flow(self) -> DataFlow:
            return super().build_flow().insert_before("update_actor", Operator("overlap", self._overlap))

        def _overlap(self, batch) -> None:
            """Wait for a token, unless there is no sample to generate or those in flight wait for a push."""
            buffer, engine = self.runner.buffer, self.roles["rollout"].worker.rollout.engine
            before = len(engine.times)
            while len(engine.times) == before and (buffer.room() or (buffer.in_flight and not engine.all_held)):
                time.sleep(0.001)

        def step(self):
            report = super().step()
            spans.append(self.pipeline.spans)
            return report

    trainer, reports = train(settings, k=k, kind=Timed)
    assert [op.name for op in trainer.pipeline.operators] == [
        *("prompts", "repeat", "gen", "reward", "buffer"),
        *("old_log_prob", "ref", "adv", "slow", "overlap", "update_actor", "sync_weights"),
    ]
    for report in reports:
        counts |= check_spans(report, k)
        metrics = report.metrics
        staleness = [metrics[f"async/staleness_{i}"] for i in range(k + 1)]
        assert sum(staleness) == len(report.batch) == 8 and metrics["async/dropped"] == 0
        assert metrics["async/staleness_max"] == max(i for i, count in enumerate(staleness) if count)
        assert metrics["response_length/mean"] == report.batch.batch["response_mask"].sum(1).float().mean()
    assert max(report.metrics["async/staleness_max"] for report in reports) == k
    assert max(counts) > 1, "no response was interrupted by a push of weights"
    assert any(report.metrics["async/partial"] for report in reports)
    training = [(at["old_log_prob"][0], at["update_actor"][1]) for at in spans]
    during = [sum(start < t < end for t in VersionEngine.times) for start, end in training]
    assert sum(count > 0 for count in during) >= 3, "tokens are sampled while the policy is trained"
    assert once(reports)


@pytest.mark.slow
def test_no_response_is_interrupted_without_partial_rollout(settings, monkeypatch, caplog):
    monkeypatch.setattr(version_engine, "SECONDS_PER_TOKEN", 0.012)  # responses take longer than an update
    caplog.set_level(logging.INFO, "verl")
    more = ["trainer.async.partial_rollout=false", "trainer.logger=[console,jsonl]"]
    _, reports = train(settings, *more, kind=SlowTrainer, steps=4)
    assert [check_spans(report, 1) for report in reports] == [{1}] * 4
    pushes = [line for line in caplog.messages if line.startswith("[sync_weights] version ")]
    assert [line.partition(":")[0] for line in pushes[-4:]] == [f"[sync_weights] version {n}" for n in range(1, 5)]
    assert all(f"{reports[-1].metrics['weight_sync/bytes'] / 1e3:.3g}kB in " in line for line in pushes)


def test_with_max_staleness_0_the_flow_is_the_synchronous_one(settings):
    zero = PPOTrainer(overrides=[*settings, *GRPO, "trainer.async.max_staleness=0"])
    plain = PPOTrainer(overrides=[*settings, *GRPO])
    assert type(zero.runner) is PPORunner and zero.config == plain.config
    for a, b in zip(zero.pipeline.operators, plain.pipeline.operators, strict=True):
        assert (a.name, a.reads, a.writes, a.on, type(a.func)) == (b.name, b.reads, b.writes, b.on, type(b.func))
    assert zero.pipeline._stage == zero.pipeline.operators


def test_a_resumed_run_neither_loses_nor_repeats_a_prompt(settings):
    saved = ["trainer.save_freq=1"]

    def interrupt(report: StepReport) -> None:
        if report.step == 3:
            raise KeyboardInterrupt

    trainer, first = make(settings, *saved, k=2, kind=SlowTrainer)
    trainer.on_step.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    _, rest = train(settings, *saved, k=2)
    assert [report.step for report in (*first, *rest)] == [1, 2, 3, 4, 5, 6]
    assert once([*first, *rest])
    assert all(check_spans(report, 2) for report in rest)


def test_validation_uses_the_current_weights_and_training_continues(settings):
    validated = []

    class Watched(PPOTrainer):
        def validate(self):
            found = super().validate()
            validated.append({token for row in self.validation_batch["responses"] for token in row.tolist()})
            return found

        def _validate_now(self):
            original = self.validation.run

            def run(prompts):
                scored = original(prompts)
                self.validation_batch = scored.batch
                return scored

            self.validation.run = run
            return super()._validate_now()

    _, reports = train(settings, "trainer.test_freq=1", "trainer.val_before_train=true", kind=Watched, steps=4)
    padding = {0, 1}
    assert [tokens - padding for tokens in validated[1:]] == [{1 + version} for version in (1, 2, 3, 4)]
    assert len(reports) == 4 and all(check_spans(report, 1) for report in reports)


def test_dynamic_sampling_replaces_groups_as_they_arrive(settings, paid_by):
    reward = paid_by("return float(calls % 8 == 0)")  # in every second group of 4
    _, reports = train(settings, reward, "algorithm.filter_groups.enable=true", f"{ROLLOUT}.n=4", steps=3)
    assert sum(report.metrics["async/filtered"] for report in reports) > 0
    for report in reports:
        scores = report.batch.batch["token_level_scores"].sum(1).view(4, 4)
        assert (scores.min(1).values < scores.max(1).values).all()
    assert len(set(uids_of(reports))) == 12


# ---- errors -----------------------------------------------------------------------------------------------------


def test_an_error_of_the_reward_function_ends_the_run_with_it(settings, paid_by):
    with pytest.raises(Exception, match="no such field") as caught:  # and not that of a limit of time
        train(settings, paid_by("return {}['no such field'] if calls > 20 else 0.0"))
    assert "raised in operator 'reward'" in caught.value.__notes__


@pytest.mark.fast("error0")
@pytest.mark.parametrize("error", [RuntimeError("engine is broken"), SystemExit("engine ended")])
def test_an_error_of_the_engine_ends_the_run_with_it(error, settings, monkeypatch):
    monkeypatch.setattr(VersionEngine, "fail_at", (14, error))
    with pytest.raises(type(error)) as caught:
        train(settings)
    assert caught.value is error


@pytest.mark.slow
def test_an_error_of_the_update_ends_the_producer(settings):
    class Broken(PPOTrainer):
        def build_flow(self) -> DataFlow:
            def broken(batch):
                if batch.meta_info["global_step"] == 2:
                    raise ValueError("no update")

            return super().build_flow().insert_before("update_actor", Operator("broken", broken))

    with pytest.raises(ValueError, match="no update"):
        train(settings, kind=Broken)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ROLLOUT}.deterministic=true"], "generates with the weights that are trained"),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2"]
            + ["algorithm.filter_groups.at_limit=fill"],
            "at_limit=fill fills one batch at a time",
        ),
        (["algorithm.name=remax"], "does not support the operator 'gen_baseline'"),
    ],
)
def test_settings_that_are_not_supported_are_refused(overrides, message, settings):
    with pytest.raises(ValueError, match=message):
        PPOTrainer(overrides=[*settings, *GRPO, "trainer.async.max_staleness=1", *overrides])


# ---- log-probs --------------------------------------------------------------------------------------------------


def test_the_old_policy_is_the_one_that_sampled_unless_there_is_a_correction(settings):
    _, reports = train(settings, steps=2)
    for report in reports:
        assert torch.equal(report.batch.batch["old_log_probs"], report.batch.batch["rollout_log_probs"])
    correction = "algorithm.rollout_correction.rollout_is=token"
    trainer, (*_, report) = train(settings, correction, "trainer.resume_mode=disable", steps=2)
    assert "rollout_correction" in [op.name for op in trainer.pipeline.operators]
    assert not torch.equal(report.batch.batch["old_log_probs"], report.batch.batch["rollout_log_probs"])


@pytest.mark.fast("top_p=0.9")
@pytest.mark.parametrize("filter", ["top_p=0.9", "top_k=5", "min_p=0.1"])
def test_filtered_log_probs_of_the_rollout_are_not_those_of_the_old_policy(filter, settings, caplog):
    chosen = [*settings, *GRPO, "trainer.async.max_staleness=1", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    trainer = PPOTrainer(overrides=[*chosen, f"{ROLLOUT}.{filter}"])
    old = next(op for op in trainer.pipeline.operators if op.name == "old_log_prob")
    assert old.on == "actor" and "entropys" in old.writes
    warned = f"those of the distribution filtered by rollout.{filter}. Samples may be 1 update older than these weights"
    assert warned in caplog.text and "rollout_is=token, or turn the filters off" in caplog.text
    caplog.clear()
    PPOTrainer(overrides=[*chosen, f"{ROLLOUT}.{filter}", "algorithm.rollout_correction.rollout_is=token"])
    assert "filtered by" not in caplog.text


# ---- a second fit -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_fit_continues(settings):
    trainer, first = train(settings, "trainer.save_freq=2", k=2, steps=2, kind=SlowTrainer)
    second: list[StepReport] = []
    trainer.on_step.append(second.append)
    trainer.total_steps = 6
    trainer.fit()
    assert [report.step for report in second] == [3, 4, 5, 6]
    assert once([*first[:2], *second])
    assert all(check_spans(report, 2) for report in second)
    assert max(report.metrics["async/staleness_max"] for report in second) > 0, "prompts of later steps are admitted"


# ---- processes --------------------------------------------------------------------------------------------------


THREE = ["trainer.n_gpus_per_node=3", "placement.actor_devices=[0]", "placement.rollout_devices=[1,2]"]
FSDP = ["trainer.n_gpus_per_node=3", "placement.actor_devices=[0,1]", "placement.rollout_devices=[2]"]
PROCESSES = {"k=1": (1, []), "k=2": (2, []), "two rollout ranks": (1, THREE)}
PROCESSES |= {"fsdp and overlap": (1, [*FSDP, "trainer.overlap=true"]), "ray": (1, RAY)}


@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESSES)
def test_processes_with_the_native_engine(case, settings):
    k, more = PROCESSES[case]
    overrides = [*settings, *GRPO, *more, f"trainer.async.max_staleness={k}", "trainer.total_epochs=1"]
    reports = fit_reports(overrides)
    assert once(reports)
    for report in reports:
        staleness = report.step - 1 - report.batch.batch["weight_version"]
        assert staleness.min() >= 0 and staleness.max() <= k
        assert report.metrics["weight_sync/version"] == report.step and report.metrics["weight_sync/bytes"] > 0
