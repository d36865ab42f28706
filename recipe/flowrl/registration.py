"""Registers the loss: every process of a run imports this module, by `imports` of flowrl.yaml."""

from verl.algorithms.policy_losses import register_policy_loss
from verl.recipe.flowrl.loss import flowrl

register_policy_loss("flowrl")(flowrl)
