"""verl/recipe/safe_rlhf: multiplier and advantages by hand, costs of a function and of a model, two critics, resume."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from examples.quickstart.tiny_model import tiny_model
from tests.recipe.checks import assert_resumes
from tests.trainer.runs import fit
from verl.config import load_config
from verl.protocol import DataProto
from verl.recipe.safe_rlhf import SafeRLHFTrainer
from verl.recipe.safe_rlhf.flow import LagrangeAdvantage, cost_of_function

COSTS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str)), "cost": float(sum(c.isalpha() for c in solution_str))}
"""
GRPO = ["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false"]


@pytest.fixture
def costly(settings, tmp_path):
    """The settings of a run whose reward function returns a cost."""
    (tmp_path / "costs.py").write_text(COSTS)
    path = f"reward.custom_reward_function.path={tmp_path / 'costs.py'}"
    return [*settings, path, "trainer.total_training_steps=2"]


def config_of(*overrides):
    recipe = SafeRLHFTrainer.recipe
    return load_config(overrides=[*GRPO, *overrides], base=recipe.read(), schema=recipe.schema)


def test_the_advantage_and_the_multiplier_by_hand():
    """Two responses to one prompt, GRPO without the division by the standard deviation."""
    config = config_of(
        "algorithm.norm_adv_by_std_in_grpo=false", "safe_rlhf={lambda_init: 2, lambda_lr: 0.5, cost_limit: 1}"
    )
    combine = LagrangeAdvantage(config)
    costs = torch.tensor([[0.0, 3.0], [0.0, 1.0]])
    batch = DataProto.from_dict(
        {
            "token_level_costs": costs,
            "token_level_rewards": torch.zeros(2, 2),
            "advantages": torch.tensor([[6.0, 6.0], [-6.0, -6.0]]),
            "response_mask": torch.ones(2, 2, dtype=torch.long),
        },
        {"uid": ["a", "a"]},
    )
    output = combine(batch)
    # costs 3 and 1: advantages +1 and -1; (6 - 2 * 1) / 3
    torch.testing.assert_close(output.batch["advantages"], torch.tensor([[4 / 3, 4 / 3], [-4 / 3, -4 / 3]]))
    assert output.meta_info["metrics"] == {"safe_rlhf/cost_mean": 2.0, "safe_rlhf/lambda": pytest.approx(2.0)}
    assert combine.log_lambda == pytest.approx(math.log(2) + 0.5 * 2 * (2 - 1))
    other = LagrangeAdvantage(config)
    other.load_state_dict(combine.state_dict())
    assert other(batch).meta_info["metrics"]["safe_rlhf/lambda"] == pytest.approx(2 * math.e)


def test_the_gain_scales_the_multiplier_of_the_step_alone():
    combine = LagrangeAdvantage(config_of("safe_rlhf={lambda_init: 2, lambda_lr: 0, lambda_gain: 3, cost_limit: 1}"))
    columns = {name: torch.ones(2, 2) for name in ("token_level_rewards", "advantages")}
    for cost in (1.5, 0.5):
        columns["token_level_costs"] = torch.tensor([[0.0, cost], [0.0, cost]])
        batch = DataProto.from_dict(
            columns | {"response_mask": torch.ones(2, 2, dtype=torch.long)}, {"uid": ["a", "a"]}
        )
        multiplier = combine(batch).meta_info["metrics"]["safe_rlhf/lambda"]
        assert multiplier == pytest.approx(2 * math.exp(3 * (cost - 1)))


def test_the_multiplier_has_a_bound():
    combine = LagrangeAdvantage(config_of("safe_rlhf={lambda_init: 5, lambda_max: 6, lambda_lr: 10}"))
    batch = DataProto.from_dict(
        {name: torch.ones(2, 2) for name in ("token_level_costs", "token_level_rewards", "advantages")}
        | {"response_mask": torch.ones(2, 2, dtype=torch.long)},
        {"uid": ["a", "a"]},
    )
    combine(batch)
    assert math.exp(combine.log_lambda) == pytest.approx(6)


def test_the_cost_is_at_the_last_token():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    batch = DataProto.from_dict({"response_mask": mask}, {"reward_cost": np.array([2, 3.5, 0.0], dtype=object)})
    expected = torch.tensor([[0, 2, 0], [0, 0, 3.5], [0, 0, 0]])
    assert torch.equal(cost_of_function(batch)["token_level_costs"], expected)


def test_two_critics(costly, tmp_path):
    trainer, reports = fit([*costly, "trainer.save_freq=1"], SafeRLHFTrainer)
    names = [op.name for op in trainer.pipeline.operators]
    assert names.index("cost") == names.index("reward") + 1 and names.index("cost_adv") == names.index("adv") + 1
    assert names[names.index("update_critic") :][:3] == ["update_critic", "update_cost_critic", "update_actor"]
    batch = reports[0].batch
    lengths = [sum(c.isalpha() for c in trainer.tokenizer.decode(ids, skip_special_tokens=True)) for ids in
               batch.batch["responses"]]  # fmt: skip
    assert batch.batch["token_level_costs"].sum(1).tolist() == lengths
    assert reports[0].metrics["safe_rlhf/cost_mean"] == pytest.approx(np.mean(lengths))
    assert not torch.equal(batch.batch["values"], batch.batch["cost_values"]) or reports[1].step == 2
    assert reports[1].metrics["cost_critic/vf_loss"] != reports[1].metrics["critic/vf_loss"]
    assert (tmp_path / "run" / "global_step_2" / "cost_critic").is_dir()


@pytest.mark.slow
def test_resumed_it_is_bit_equal(costly):
    assert_resumes(costly, SafeRLHFTrainer, steps=2)


def test_any_estimator_has_costs_without_critics(costly):
    trainer, reports = fit([*costly, *GRPO], SafeRLHFTrainer)
    assert "cost_critic" not in trainer.specs and "safe_rlhf/lambda" in reports[1].metrics


def test_a_model_gives_the_cost(settings, tmp_path):
    folder = tiny_model("llama", tmp_path / "judge", seed=1)
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    own = ["safe_rlhf.cost_model.enable=true", f"safe_rlhf.cost_model.model_path={folder}"]
    _, reports = fit([*settings, *GRPO, *own, "trainer.total_training_steps=1"], SafeRLHFTrainer)
    batch = reports[0].batch
    row = batch.batch["input_ids"][0][batch.batch["attention_mask"][0].bool()]
    expected = model.eval()(row[None]).logits.item()
    assert batch.batch["token_level_costs"][0].sum().item() == pytest.approx(expected, abs=1e-4)


def test_a_reward_function_without_costs(settings):
    with pytest.raises(ValueError, match="safe_rlhf needs the cost of every response"):
        fit([*settings, *GRPO, "trainer.total_training_steps=1"], SafeRLHFTrainer)
