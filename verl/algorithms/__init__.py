"""The mathematics of the algorithms: tensors in, tensors out.

- `masked`: masked sums, groups, loss aggregation, metrics that merge
- `advantages`, `token_baselines`, `prime`: advantage estimators
- `policy_losses`, `off_policy_losses`: policy losses
- `kl`: KL, entropy, value and SFT losses; `distillation`: losses of a teacher; `preference`: preference losses, SPPO
- `rollout_correction`: training-inference mismatch
- `binding`: finds the arguments of a function by the names of its parameters
- `core_algos`: the functions of public verl
"""

from verl.algorithms import off_policy_losses, preference, prime, token_baselines  # noqa: F401 (they register names)
from verl.utils.lazy import lazy_names

_HOME = {
    "verl.algorithms.advantages": "ADV_ESTIMATOR_REGISTRY get_adv_estimator_fn register_adv_est",
    "verl.algorithms.binding": "bind_arguments missing_settings required_columns",
    "verl.algorithms.kl": (
        "apply_kl_penalty entropy_from_logits entropy_loss get_kl_controller kl_loss kl_penalty sft_nll "
        "sum_pi_squared_from_logits value_loss"
    ),
    "verl.algorithms.masked": (
        "LOSS_AGG_MODES LossAggregation agg_loss masked_mean masked_sum masked_var masked_whiten mean_parts"
    ),
    "verl.algorithms.policy_losses": "POLICY_LOSS_REGISTRY get_policy_loss_fn register_policy_loss",
    "verl.algorithms.rollout_correction": "compute_rollout_correction_and_rejection_mask",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
