"""Runs that are paid by a reward model: alone or with a rule, in one process, in several, on Ray."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from examples.quickstart.tiny_model import tiny_model
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


def test_a_function_combines_the_models_score_with_a_rule(judged, tmp_path):
    rule = tmp_path / "rule.py"
    rule.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 0.5 * extra_info['rm_score'] + len(solution_str), 'length': len(solution_str)}\n"
    )
    metrics, columns = run(judged, f"reward.custom_reward_function.path={rule}", "algorithm.name=remax")
    lengths = columns["token_level_scores"].sum(1) - 0.5 * columns["rm_scores"].sum(1)
    assert torch.allclose(lengths, lengths.round(), atol=1e-4)
    assert lengths.mean().item() == pytest.approx(metrics[-1]["reward/length"], abs=1e-4)


def test_a_function_that_cannot_see_the_models_score_is_refused(judged, tmp_path):
    blind = tmp_path / "blind.py"
    blind.write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1.0\n")
    with pytest.raises(ValueError, match=r"does not take extra_info, which holds the score of the model"):
        LocalPPOTrainer(overrides=[*judged, f"reward.custom_reward_function.path={blind}"])


def test_a_score_that_is_not_read_is_said(judged, tmp_path, caplog):
    said = "THE REWARD MODEL'S SCORE HAS NO EFFECT"
    rules = {"deaf": "len(solution_str)", "listening": "extra_info['rm_score'] + len(solution_str)"}
    for name, value in rules.items():
        rule = tmp_path / f"{name}.py"
        rule.write_text(
            f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {value}\n"
        )
        caplog.clear()
        LocalPPOTrainer(overrides=[*judged, f"reward.custom_reward_function.path={rule}"])
        assert (f"{said}: the reward function compute_score() at {rule}:1" in caplog.text) == (name == "deaf")
    caplog.clear()
    LocalPPOTrainer(overrides=judged)  # the score itself is the reward
    assert said not in caplog.text


def test_a_reward_model_that_is_not_switched_on_is_said(judged, settings, caplog):
    path = next(setting for setting in judged if "model_path" in setting)
    LocalPPOTrainer(overrides=[*settings, "algorithm.name=grpo", path])
    assert "has no effect with reward.reward_model.enable=false" in caplog.text


def test_a_reward_model_without_a_path_is_refused(judged):
    with pytest.raises(ValueError, match=r"reward\.reward_model\.model_path: null, but .*enable is true"):
        LocalPPOTrainer(overrides=[*judged, "reward.reward_model.model_path=null"])


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_several_processes_and_ray_give_the_scores_of_one(executor, judged):
    trainer_class, more = LocalPPOTrainer, ["trainer.n_gpus_per_node=2"]
    if executor == "ray":
        pytest.importorskip("ray")
        from verl.trainer.ray_trainer import RayPPOTrainer

        trainer_class = RayPPOTrainer
        more += ["trainer.backend=ray", "trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=3"]
        more += ["ray_kwargs.ray_init.address=local"]
    expected, _ = run(judged)
    found, _ = run(judged, *more, trainer_class=trainer_class)
    for a, b in zip(found, expected, strict=True):
        shared = {name: b[name] for name in COMPARED}
        assert {name: a[name] for name in COMPARED} == pytest.approx(shared, rel=1e-3, abs=1e-5)
