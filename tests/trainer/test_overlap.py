"""`trainer.overlap`: roles in pools of their own work at the same time, and nothing but the clock tells."""

import time
from itertools import combinations
from pathlib import Path

import pytest
import torch

from tests.trainer.runs import RAY, untimed
from verl.dataflow import Pipeline
from verl.dataflow.operator import depends
from verl.trainer.ppo_trainer import PPOTrainer

SLOW = str(Path(__file__).resolve().parent / "slow_log_probs.py")
PPO = ["algorithm.name=ppo", "algorithm.use_kl_in_reward=true"]
APART = ["trainer.overlap=true", "trainer.n_gpus_per_node=2", f"imports=[{SLOW}]"]
APART += [f"placement.{role}_devices=[{device}]" for role, device in (("actor", 0), ("ref", 1), ("critic", 1))]
STEPS = 2


def run(settings: list[str], *more: str) -> tuple[list, Pipeline, list]:
    """Per step the metrics without those of a clock and the columns; the pipeline; its spans per step."""
    overrides = [*settings, *PPO, *more, f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=disable"]
    trainer = PPOTrainer(overrides=overrides)
    steps, spans = [], []

    def record(report) -> None:
        # fetched now: the processes that have the rows end with the run
        columns = {name: values.clone() for name, values in report.batch.tensors.items()}
        steps.append((untimed(report), columns))
        spans.append((dict(trainer.pipeline.spans), report.metrics["timing_s/step"]))

    trainer.on_step.append(record)
    trainer.fit()
    return steps, trainer.pipeline, spans


def check_same(found: list, expected: list) -> None:
    for (metrics, columns), (other_metrics, other_columns) in zip(found, expected, strict=True):
        assert metrics == other_metrics
        assert columns.keys() == other_columns.keys()
        for name, values in columns.items():
            assert torch.equal(values, other_columns[name]), name


def check_spans(pipeline: Pipeline, spans: list) -> None:
    """What depends on one another never overlaps, nor what shares processes; actor, reference, critic and reward do."""
    names = {"ref": "other", "critic": "other", "rollout": "actor"}
    for at, step_seconds in spans:
        for first, second in combinations(pipeline.operators, 2):
            same_place = names.get(first.on, first.on) == names.get(second.on, second.on)
            if depends(second, first) or same_place:
                assert at[first.name][1] <= at[second.name][0], (first.name, second.name)
        start, end = at["sleep_rollout"][0], at["old_log_prob"][1]  # the actor's processes after generation
        assert all(start < at[name][1] and at[name][0] < end for name in ("reward", "ref", "values"))
        passed = max(stop for _, stop in at.values()) - min(begin for begin, _ in at.values())
        assert passed <= step_seconds < sum(stop - begin for begin, stop in at.values())


def test_every_operator_names_the_processes_that_it_occupies(settings):
    """Operators of different processes may run at the same time; one that names none runs alone."""
    expected = {"controller": {"reward", "kl", "adv"}, "actor": {"old_log_prob", "update_actor", "sync_weights"}}
    expected |= {"rollout": {"gen", "sleep_rollout"}, "critic": {"values", "update_critic"}, "ref": {"ref"}}
    expected |= {None: {"prompts", "repeat"}}
    operators = PPOTrainer(overrides=[*settings, *PPO]).pipeline.operators
    assert {op.name: op.on for op in operators} == {name: on for on, names in expected.items() for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_pools_overlap_with_the_numbers_of_one_process_to_the_last_bit(executor, settings):
    if executor == "ray":
        pytest.importorskip("ray")
    expected, one, spans = run(settings)
    assert all(at[a.name][1] <= at[b.name][0] for at, _ in spans for a, b in combinations(one.operators, 2))
    found, pipeline, spans = run(settings, *APART, *(RAY if executor == "ray" else []))
    check_spans(pipeline, spans)
    check_same(found, expected)


@pytest.mark.slow
def test_an_error_of_one_of_two_reaches_the_user_with_its_operator(settings, paid_by):
    """The reward function fails while the other pool computes the reference's log-probs."""
    fails = paid_by("return {}['no such field'] if calls > 4 else 0.0")  # two are the trial before training
    start = time.monotonic()
    with pytest.raises(Exception, match="no such field") as caught:
        run(settings, fails, *APART)
    assert "raised in operator 'reward'" in caught.value.__notes__
    # not old_log_prob: the actor's pool may still be in sleep_rollout
    assert any("running at the same time" in note and "ref" in note for note in caught.value.__notes__)
    assert time.monotonic() - start < 60
