"""The mathematics of the algorithms: tensors in, tensors out.

- `masked`: masked sums, groups, loss aggregation, metrics that merge
- `advantages`, `token_baselines`, `prime`: advantage estimators
- `policy_losses`, `off_policy_losses`: policy losses
- `kl`: KL, entropy, value and SFT losses; `distillation`: losses of a teacher; `preference`: preference losses, SPPO
- `rollout_correction`: training-inference mismatch
- `binding`: finds the arguments of a function by the names of its parameters
- `core_algos`: the functions of public verl
"""

from verl.algorithms import off_policy_losses, preference, prime, token_baselines
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn, register_adv_est
from verl.algorithms.binding import bind_arguments, missing_settings, required_columns
from verl.algorithms.kl import (
    apply_kl_penalty,
    entropy_from_logits,
    entropy_loss,
    get_kl_controller,
    kl_loss,
    kl_penalty,
    sft_nll,
    sum_pi_squared_from_logits,
    value_loss,
)
from verl.algorithms.masked import (
    LOSS_AGG_MODES,
    LossAggregation,
    agg_loss,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    mean_parts,
)
from verl.algorithms.policy_losses import POLICY_LOSS_REGISTRY, get_policy_loss_fn, register_policy_loss
from verl.algorithms.rollout_correction import compute_rollout_correction_and_rejection_mask

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "LOSS_AGG_MODES",
    "POLICY_LOSS_REGISTRY",
    "LossAggregation",
    "agg_loss",
    "apply_kl_penalty",
    "bind_arguments",
    "compute_rollout_correction_and_rejection_mask",
    "entropy_from_logits",
    "entropy_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_loss",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "mean_parts",
    "missing_settings",
    "off_policy_losses",
    "preference",
    "prime",
    "register_adv_est",
    "register_policy_loss",
    "required_columns",
    "sft_nll",
    "sum_pi_squared_from_logits",
    "token_baselines",
    "value_loss",
]
