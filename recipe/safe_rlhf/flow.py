"""Safe RLHF (Dai et al. 2023, arXiv 2310.12773) as an edit of the flow.

    ... reward -> [cost_model] -> cost -> ... -> [values] -> [cost_values] -> adv -> cost_adv
               -> [update_critic] -> [update_cost_critic] -> update_actor

Maximize the reward such that the mean cost of a response stays below `safe_rlhf.cost_limit`. Costs have their own
advantages, by the estimator of the rewards, and their own critic if that estimator reads values. The policy learns from
(A - lambda A_cost) / (1 + lambda), and log lambda <- log lambda + lambda_lr * lambda * (mean cost - limit).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.dataflow import DataFlow, Operator, Stateful
from verl.protocol import DataProto
from verl.recipe.safe_rlhf.config import SafeRLHFConfig
from verl.trainer.ppo.flow import estimator_columns
from verl.trainer.ppo.operators import SEQUENCES, Roles, Update, advantage, infer


def cost_of_function(batch: DataProto) -> dict[str, torch.Tensor]:
    """Column token_level_costs (B, T): the value `cost` of the reward function, at the last token of a response."""
    if "reward_cost" not in batch or not all(
        isinstance(c, int | float | np.number) for c in batch.column("reward_cost")
    ):
        raise ValueError(
            "safe_rlhf needs the cost of every response: return {'score': ..., 'cost': ...} from the reward function, "
            "or set safe_rlhf.cost_model.enable=true"
        )
    mask = batch.batch["response_mask"]
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    costs = torch.tensor(batch.column("reward_cost").astype(np.float32))
    return {"token_level_costs": torch.zeros(mask.shape).scatter(1, last[:, None], costs[:, None])}


def cost_of_model(roles: Roles) -> Callable[[DataProto], dict[str, torch.Tensor]]:
    """The same column, from the score of the cost model."""

    def cost(batch: DataProto) -> dict[str, torch.Tensor]:
        chats = ["raw_prompt"] if "raw_prompt" in batch else []
        scores = roles["cost"].compute_rm_score(batch.select([*SEQUENCES, "response_mask"], chats, []))
        return {"token_level_costs": scores.batch["rm_scores"]}

    return cost


@dataclass(eq=False, repr=False)
class LagrangeAdvantage(Stateful):
    """Subtracts the advantages of the costs, and updates the multiplier, which is state."""

    config: SafeRLHFConfig
    log_lambda: float = field(init=False)

    def __post_init__(self) -> None:
        self.log_lambda = math.log(self.config.safe_rlhf.lambda_init)
        self.estimate = advantage(self.config.algorithm)

    def __call__(self, batch: DataProto) -> DataProto:
        safe, costs = self.config.safe_rlhf, batch.batch["token_level_costs"]
        further = {"values": batch.batch["cost_values"]} if "cost_values" in batch else {}
        of_costs = self.estimate(batch.replace(token_level_rewards=costs, **further)).batch
        mean_cost, largest = costs.sum(1).mean().item(), math.log(safe.lambda_max)
        excess = mean_cost - safe.cost_limit
        multiplier = math.exp(min(self.log_lambda + safe.lambda_gain * excess, largest))
        self.log_lambda = min(self.log_lambda + safe.lambda_lr * math.exp(self.log_lambda) * excess, largest)
        advantages = (batch.batch["advantages"] - multiplier * of_costs["advantages"]) / (1 + multiplier)
        metrics = {"safe_rlhf/cost_mean": mean_cost, "safe_rlhf/lambda": multiplier}
        columns = {"advantages": advantages, "cost_returns": of_costs["returns"]}
        return DataProto.from_dict(columns, meta_info={"metrics": metrics})

    def state_dict(self) -> dict[str, Any]:
        return {"log_lambda": self.log_lambda}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.log_lambda = state["log_lambda"]


def update_cost_critic(roles: Roles, config: SafeRLHFConfig) -> Callable[[DataProto], None]:
    """The update of the critic's worker, with the values and returns of the costs."""
    critic = config.critic
    rows = critic.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    update = Update(roles, "cost_critic", "update_critic", rows, critic.ppo_epochs, critic.shuffle)

    def update_rows(batch: DataProto) -> None:
        rows = batch.replace(values=batch.batch["cost_values"], returns=batch.batch["cost_returns"])
        update(rows)
        metrics = rows.meta_info["metrics"]
        batch.meta_info["metrics"] = {name.replace("critic/", "cost_critic/"): metrics[name] for name in metrics}

    return update_rows


def safe_flow(flow: DataFlow, config: SafeRLHFConfig, roles: Roles) -> DataFlow:
    """Edit the flow of the main trainer."""
    if config.safe_rlhf.cost_model.enable:
        reads, func, on = (*SEQUENCES, "response_mask"), cost_of_model(roles), "cost"
    else:
        reads, func, on = ("response_mask",), cost_of_function, None  # reads a value of the reward function
    flow.insert_after("reward", Operator("cost", func, reads, "token_level_costs", on=on))
    required = estimator_columns(config.algorithm)
    reads = ("advantages", "token_level_costs", *required)
    if "values" in required:
        reads += ("cost_values",)
        values = infer(roles, "cost_critic", "compute_values")

        def cost_values(batch: DataProto) -> dict[str, torch.Tensor]:
            return {"cost_values": values(batch).batch["values"]}

        flow.insert_after("values", Operator("cost_values", cost_values, SEQUENCES, "cost_values", "cost_critic"))
        columns = (*SEQUENCES, "cost_values", "cost_returns", "response_mask")
        update = Operator("update_cost_critic", update_cost_critic(roles, config), columns, on="cost_critic")
        flow.insert_before("update_actor", update)
    combine = Operator("cost_adv", LagrangeAdvantage(config), reads, ("advantages", "cost_returns"))
    return flow.insert_after("adv", combine)
