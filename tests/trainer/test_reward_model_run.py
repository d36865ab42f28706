"""Runs that are paid by a reward model: alone or with a rule, in one process, in several, on Ray."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.runs import RAY
from verl.trainer.local_trainer import LocalPPOTrainer

COMPARED = ("critic/score/mean", "reward/rm_score_mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm")


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A random reward model with a tokenizer and a chat template that are not the policy's."""
    folder = tiny_model("qwen2", tmp_path_factory.mktemp("judge"), seed=1)
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def judged(settings, judge):
    """The settings of a run without a function."""
    chosen = [s for s in settings if not s.startswith("reward.custom_reward_function")]
    return [*chosen, "algorithm.name=grpo", "use_rm=true", f"reward.reward_model.model_path={judge}"]


def run(settings, *more, trainer_class=LocalPPOTrainer):
    """The metrics of two steps, and the last batch."""
    trainer = trainer_class(
        overrides=[*settings, *more, "trainer.total_training_steps=2", "trainer.resume_mode=disable"]
    )
    reports = []
    trainer.on_step.append(lambda r: reports.append((r.metrics, {k: v.clone() for k, v in r.batch.tensors.items()})))
    trainer.fit()
    return [metrics for metrics, _ in reports], reports[-1][1]


def test_the_models_score_is_the_reward(judged):
    found, columns = run(judged, "trainer.test_freq=2")
    assert torch.equal(columns["token_level_scores"], columns["rm_scores"])
    assert columns["rm_scores"].sum(1).unique().numel() > 1
    assert any(name.startswith("val-core/") for name in found[-1])  # validation is scored by the model too
    assert not any("acc" in name.split("/") for metrics in found for name in metrics)  # an opinion is no accuracy


@pytest.mark.slow
def test_a_reward_model_on_separate_devices_gives_the_same_numbers(judged):
    expected, _ = run(judged)
    separate = ["trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.reward_devices=[1]"]
    found, _ = run(judged, *separate, "trainer.overlap=true")
    for a, b in zip(found, expected, strict=True):
        assert {name: a[name] for name in COMPARED} == {name: b[name] for name in COMPARED}


@pytest.mark.slow
def test_a_function_combines_the_models_score_with_a_rule(judged, paid_by):
    score = "0.5 * extra_info['rm_score'] + len(solution_str)"
    rule = paid_by(f"return {{'score': {score}, 'length': len(solution_str)}}")
    metrics, columns = run(judged, rule, "algorithm.name=remax")
    lengths = columns["token_level_scores"].sum(1) - 0.5 * columns["rm_scores"].sum(1)
    assert torch.allclose(lengths, lengths.round(), atol=1e-4)
    assert lengths.mean().item() == pytest.approx(metrics[-1]["reward/length"], abs=1e-4)


def test_a_function_that_cannot_see_the_models_score_is_refused(judged, tmp_path):
    blind = tmp_path / "blind.py"
    blind.write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1.0\n")
    with pytest.raises(ValueError, match=r"does not take extra_info, which holds the score of the model"):
        LocalPPOTrainer(overrides=[*judged, f"reward.custom_reward_function.path={blind}"])


@pytest.mark.parametrize(
    ("score", "is_read"),
    [("len(solution_str)", False), ("extra_info['rm_score'] + len(solution_str)", True), (None, True)],
)
def test_a_score_that_is_not_read_is_said(score, is_read, judged, paid_by, tmp_path, caplog):
    """Without a function, the score itself is the reward."""
    LocalPPOTrainer(overrides=judged if score is None else [*judged, paid_by(f"return {score}")])
    said = f"THE REWARD MODEL'S SCORE HAS NO EFFECT: the reward function compute_score() at {tmp_path / 'paid.py'}:"
    assert (said in caplog.text) == (not is_read)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_several_processes_and_ray_give_the_scores_of_one(executor, judged):
    trainer_class, more = LocalPPOTrainer, ["trainer.n_gpus_per_node=2"]
    if executor == "ray":
        pytest.importorskip("ray")
        from verl.trainer.ray_trainer import RayPPOTrainer

        trainer_class = RayPPOTrainer
        more += RAY
    expected, _ = run(judged)
    found, _ = run(judged, *more, trainer_class=trainer_class)
    for a, b in zip(found, expected, strict=True):
        shared = {name: b[name] for name in COMPARED}
        assert {name: a[name] for name in COMPARED} == pytest.approx(shared, rel=1e-3, abs=1e-5)
