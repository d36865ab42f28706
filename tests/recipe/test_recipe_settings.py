"""Settings that a recipe refuses before a model is loaded."""

import pytest

from verl.config import load_config
from verl.recipe.dpo import DPOTrainer as dpo
from verl.recipe.flowrl import FlowRLTrainer as flowrl
from verl.recipe.gkd import GKDTrainer as gkd
from verl.recipe.prime import PRIMETrainer as prime
from verl.recipe.safe_rlhf import SafeRLHFTrainer as safe_rlhf
from verl.recipe.spin import SPINTrainer as spin

N = "actor_rollout_ref.rollout.n"
REFUSED = [
    (dpo, f"{N}=1", "a preference needs two responses"),
    (dpo, "actor_rollout_ref.ref.enable=null", "needs the reference"),
    (dpo, "algorithm.adv_estimator=gae", "does not compute advantages"),
    (dpo, "actor_rollout_ref.actor.use_kl_loss=true", r"limits the KL by dpo\.beta"),
    (dpo, "dpo.loss=simpo", "the loss simpo reads no reference: use false"),
    (dpo, "dpo.loss=simpoo", "did you mean 'simpo'"),
    (dpo, "dpo={loss: ipo, label_smoothing: 0.1}", "ipo has no setting 'label_smoothing': it has beta"),
    (prime, "algorithm.adv_estimator=grpo", "PRIME has its own"),
    (prime, "actor_rollout_ref.ref.enable=null", "needs the reference"),
    (prime, "algorithm.filter_groups.enable=true", "two filters"),
    (prime, "prime.ppo_mini_batch_size=3", "does not divide"),
    (prime, "prime.filter.accuracy_lower_bound=0.9", "no prompt could be preferred"),
    (prime, "prime.betta=1", "beta"),
    (flowrl, "imports=[]", "registers the loss"),
    (flowrl, f"{N}=1", "a mean over responses"),
    (flowrl, "actor_rollout_ref.ref.enable=null", "reads the reference"),
    (gkd, "distillation.enabled=false", "GKD needs a teacher"),
    (gkd, "distillation.distillation_loss.use_task_rewards=true", "GKD has no rewards"),
    (safe_rlhf, "algorithm.adv_estimator=remax", "a baseline of the rewards"),
    (safe_rlhf, "safe_rlhf.cost_model.enable=true", "set it to a sequence-classification model"),
    (spin, "spin.preferred=data", "use 1 with spin.preferred=data"),
    (spin, "spin={preferred: data, response_keyy: x}", "response_key"),
    (spin, "actor_rollout_ref.ref.enable=null", "needs the reference"),
    (spin, "actor_rollout_ref.actor.use_kl_loss=true", r"limits the KL by algorithm\.dpo_beta"),
]


@pytest.mark.parametrize(("trainer", "override", "message"), REFUSED)
def test_settings_that_do_not_fit(trainer, override, message):
    recipe = trainer.recipe
    overrides = [f"{N}=2", override]
    with pytest.raises(ValueError, match=message):
        load_config(overrides=overrides, base=recipe.read(), schema=recipe.schema, extra_checks=[recipe.check])
