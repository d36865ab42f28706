"""Asynchronous training with a tensor-parallel rollout: rank 0 of a group generates, and the others follow it."""

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rollout.float64 import float64_logits
from tests.trainer.runs import RAY
from tests.trainer.test_asynchronous import uids_of
from tests.trainer.test_rollout_role import CALCULATOR
from verl.protocol import DataProto
from verl.rollout.tensor_parallel import TensorParallel
from verl.single_controller.worker_group import WorkerDied, WorkerError
from verl.trainer.base import StepReport
from verl.trainer.ppo_trainer import PPOTrainer

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PAIR = f"{ROLLOUT}.tensor_model_parallel_size=2"
#: one rank trains
TWO = ["trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.rollout_devices=[1]"]
THREE = ["trainer.n_gpus_per_node=3", "placement.actor_devices=[0]", "placement.rollout_devices=[1,2]", PAIR]
FIVE = ["trainer.n_gpus_per_node=5", "placement.actor_devices=[0]", "placement.rollout_devices=[1,2,3,4]", PAIR]
GRPO = ["algorithm.name=grpo", "trainer.async.max_staleness=1"]
WHOLE = "trainer.async.partial_rollout=false"  # responses end before a push
BOUND = 1e-5  # of log-probs in float32 (docs/rollout.md)

slow = pytest.mark.slow


def train(overrides: list[str], steps: int = 6, *also) -> list[StepReport]:
    """The reports of a run whose weights are checked in every step, also in the rollout."""
    more = [*GRPO, f"{ROLLOUT}.check_every=1", f"trainer.total_training_steps={steps}"]
    trainer, reports = PPOTrainer(overrides=[*more, *overrides]), []
    trainer.on_step += [reports.append, *also]
    trainer.fit()
    for report in reports:
        assert report.metrics["weight_sync/version"] == report.step and report.metrics["weight_sync/bytes"] > 0
        assert report.metrics["weight_sync/canary_mismatch"] < BOUND
    return reports


def check_run(reports: list[StepReport], k: int = 1, steps: int = 6) -> None:
    """Every prompt of the epoch is trained once, and no sample is too old."""
    assert [report.step for report in reports] == [*range(1, steps + 1)]
    assert sorted(uids_of(reports)) == sorted(f"0:{row}" for row in range(4 * steps))
    for report in reports:
        staleness = report.step - 1 - report.batch.batch["weight_version"]
        assert staleness.min() >= 0 and staleness.max() <= k
        assert report.metrics["async/dropped"] == 0


def samples_of(reports: Iterable[StepReport]) -> dict[tuple[str, int], tuple[list[int], torch.Tensor]]:
    """(uid, sample) -> its tokens and log-probs."""
    found = {}
    for batch in (report.batch for report in reports):
        for row, (uid, sample) in enumerate(zip(batch.non_tensor_batch["uid"], batch.non_tensor_batch["sample_index"])):
            mask = batch.batch["response_mask"][row].bool()
            columns = (batch.batch[name][row][mask] for name in ("responses", "rollout_log_probs"))
            found[uid, int(sample)] = tuple(columns)
    return found


# ---- the numbers of one rank ----------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("placement", [pytest.param(THREE, id="one group"), pytest.param(FIVE, id="two groups")])
def test_two_ranks_generate_what_one_generates(placement, settings, tmp_path):
    """With a learning rate of 0, samples do not depend on when they are generated."""
    same = [*settings, WHOLE, f"{ACTOR}.optim.lr=0", "trainer.test_freq=3", "trainer.val_before_train=true"]
    runs = {}
    for name, devices in (("one", TWO), ("group", placement)):
        folders = [f"trainer.default_local_dir={tmp_path / name}", f"trainer.validation_data_dir={tmp_path / name}"]
        reports = train([*same, *devices, *folders])
        check_run(reports)
        greedy = [(tmp_path / name / f"{step}.jsonl").read_text().splitlines() for step in (0, 3, 6)]
        runs[name] = samples_of(reports), [[json.loads(line)["output"] for line in lines] for lines in greedy]
    (one, greedy_of_one), (group, greedy_of_group) = runs.values()
    assert greedy_of_one == greedy_of_group and len(greedy_of_one[0]) == 6
    assert one.keys() == group.keys() and len(one) == 48
    for sample, (tokens, log_probs) in one.items():
        assert torch.equal(group[sample][0], tokens), sample
        torch.testing.assert_close(group[sample][1], log_probs, atol=BOUND, rtol=0)


class Models:
    """The policy of each version, from the checkpoints of a run."""

    def __init__(self, first: Path, run: Path):
        self.first, self.run = first, run
        self.models: dict[int, torch.nn.Module] = {}

    def log_probs(self, version: int, prompt: list[int], response: list[int]) -> torch.Tensor:
        """(T,) log-probs in float64 of a response."""
        if version not in self.models:
            folder = self.run / f"global_step_{version}/actor/huggingface" if version else self.first
            self.models[version] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = float64_logits(self.models[version], [*prompt, *response])[len(prompt) - 1 : -1]
        return logits.log_softmax(-1)[range(len(response)), response]


def check_versions(batch: DataProto, models: Models) -> list[float]:
    """Every token has the log-prob of the version that its span says.

    Returns, for tokens after an interruption, how far the log-probs of the version before it are from those reported.
    """
    others = []
    for row, spans in enumerate(batch.non_tensor_batch["weight_versions"]):
        width = batch.batch["prompts"].shape[1]
        prompt = batch.batch["prompts"][row][batch.batch["attention_mask"][row, :width].bool()].tolist()
        mask = batch.batch["response_mask"][row].bool()
        response = batch.batch["responses"][row][mask].tolist()
        found = batch.batch["rollout_log_probs"][row][mask].double()
        versions = [version for _, version in spans]
        assert versions == sorted(set(versions)) and spans[0][0] == 0
        assert batch.batch["weight_version"][row] == versions[0]
        ends = [first for first, _ in spans[1:]] + [len(response)]
        for index, ((first, version), end) in enumerate(zip(spans, ends)):
            at = slice(first, end)
            expected = models.log_probs(version, prompt, response)[at]
            torch.testing.assert_close(found[at], expected, atol=BOUND, rtol=0)
            if index:
                before = models.log_probs(versions[index - 1], prompt, response)[at]
                others.append(float((found[at] - before).abs().max()))
    return others


SAVED = ["trainer.save_freq=1", f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]"]
LONG = ["data.max_response_length=48", f"{ROLLOUT}.ignore_eos=true", f"{ACTOR}.optim.lr=1e-2"]


@slow
@pytest.mark.parametrize("partial", [True, False])
def test_every_token_is_of_the_version_that_its_span_says(partial, settings, tiny, tmp_path):
    more = [] if partial else [WHOLE]
    reports = train([*settings, *THREE, *LONG, *SAVED, *more])
    check_run(reports)
    models = Models(tiny / "model", tmp_path / "run")
    others = [difference for report in reports for difference in check_versions(report.batch, models)]
    assert bool(others) == partial == any(report.metrics["async/partial"] for report in reports)
    assert not partial or sorted(others)[len(others) // 2] > 100 * BOUND, "versions cannot be told apart"


CASES = {
    "agent loops": CALCULATOR,
    "filter_groups": ["algorithm.filter_groups.enable=true", f"{ROLLOUT}.n=4", "trainer.total_epochs=8"],
    "two groups, k=2": [*FIVE, "trainer.async.max_staleness=2"],
    "lora": ["actor_rollout_ref.model.lora_rank=4"],
    "ray": [*RAY],
}


@slow
@pytest.mark.parametrize("case", CASES)
def test_runs_of_other_kinds(case, settings, tmp_path, monkeypatch):
    if case == "ray":
        pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    k = 2 if "k=2" in case else 1
    reports = train([*settings, *THREE, "trainer.test_freq=2", *CASES[case]])
    if case != "filter_groups":
        return check_run(reports, k)
    uids = uids_of(reports)
    assert len(set(uids)) == len(uids) == 24
    for report in reports:
        scores = report.batch.batch["token_level_scores"].sum(1).view(4, 4)
        assert (scores.min(1).values < scores.max(1).values).all()


# ---- errors ---------------------------------------------------------------------------------------------------------

#: environment variable: the rank of the tensor-parallel group that fails
FAILING = "FAILING_RANK"


def fail_on_a_rank() -> None:
    """In the workers of a run with `imports` of this file: one rank runs out of memory while it generates."""
    failing, calls, all_reduce = os.environ.get(FAILING), [], TensorParallel.all_reduce

    def fails(self: TensorParallel, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if self.size > 1 and self.rank == int(failing) and len(calls) > 150:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return all_reduce(self, x)

    if failing is not None:
        TensorParallel.all_reduce = fails


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_a_rank_ends_the_run(rank, settings, monkeypatch, tmp_path):
    module = tmp_path / "failing.py"
    module.write_text(f"from {__name__} import fail_on_a_rank\n\nfail_on_a_rank()\n")
    monkeypatch.setenv(FAILING, str(rank))
    reports: list[StepReport] = []
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"OutOfMemoryError: tried to allocate 2 GiB") as caught:
        train([*settings, *THREE, f"imports=[{module}]"], 6, reports.append)
    assert caught.value.role == "rollout" and time.monotonic() - start < 60
    assert reports and len(reports) < 6, "it fails while the policy is trained"


@slow
@pytest.mark.parametrize(("placement", "rank"), [(TWO, 0), (THREE, 0), (THREE, 1)])
def test_a_dead_process_ends_the_run(placement, rank, settings):
    overrides = [*settings, *GRPO, *placement, *LONG, "trainer.total_training_steps=6"]
    trainer, reports = PPOTrainer(overrides=overrides), []

    def kill(report: StepReport) -> None:
        os.kill(trainer.roles["rollout"].processes._ranks[rank].process.pid, signal.SIGKILL)

    trainer.on_step += [reports.append, kill]
    with pytest.raises(WorkerDied, match="rollout"):  # and not WorkerTimeout
        trainer.fit()
    assert [report.step for report in reports] == [1]
