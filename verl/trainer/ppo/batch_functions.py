"""Batch functions of public verl's trainer, with its names and arguments. They change batches in place."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from verl.algorithms import kl
from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import bind_arguments
from verl.config import schema
from verl.protocol import DataProto
from verl.trainer.output.metrics import data_metrics, timing_metrics
from verl.trainer.ppo.operators import KLInReward


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """Return the attention mask of the responses, (B, T)."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[-1] :]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: kl.FixedKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Write token_level_rewards, the scores minus the KL penalty, and update the controller.

    Args:
        data: token_level_scores, old_log_probs, ref_log_prob and response_mask, (B, T).
        kl_ctrl: has the coefficient as `value`.
        kl_penalty: a kind of `verl.algorithms.kl.kl_penalty`.

    Returns:
        The batch, and the metrics of the penalty.
    """
    penalized = KLInReward(kl_ctrl, kl_penalty)(data.replace(token_level_rewards=data.batch["token_level_scores"]))
    data.batch["token_level_rewards"] = penalized.batch["token_level_rewards"]
    return data, penalized.meta_info["metrics"]


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Mapping[str, Any] | None = None,
) -> DataProto:
    """Write advantages and returns by the registered estimator, and return the batch.

    `num_repeat` has no effect: groups are the samples with the same `uid`. Other settings are read from `config`.
    """
    if "response_mask" not in data:
        data.batch["response_mask"] = compute_response_mask(data)
    estimator = get_adv_estimator_fn(adv_estimator)
    settings = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    arguments = bind_arguments(estimator, data.tensors | data.non_tensor_batch, {**(config or {}), **settings})
    data.batch["advantages"], data.batch["returns"] = estimator(**arguments)
    return data


def compute_reward(data: DataProto, reward_fn: Callable) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the token rewards (B, T) of a reward manager, and its extra values."""
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """`data_metrics` and the shares of responses and prompts without padding; values only with a critic."""
    metrics = data_metrics(batch if use_critic else batch.drop([k for k in ("values",) if k in batch]))
    mask, width = batch.batch["attention_mask"].bool(), batch.batch["responses"].shape[-1]
    metrics["response_length/clip_ratio"] = mask[:, -width:].all(1).float().mean().item()
    metrics["prompt_length/clip_ratio"] = mask[:, :-width].all(1).float().mean().item()
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase, and milliseconds per token: of the responses for `gen`, of the sequences for others."""
    tokens = {"gen": int(compute_response_mask(batch).sum())}
    sequence_tokens = int(batch.batch["attention_mask"].sum())
    phases = ("gen", "ref", "values", "adv", "update_critic", "update_actor")
    return {
        **{f"timing_s/{name}": seconds for name, seconds in timing_raw.items()},
        **{
            f"timing_per_token_ms/{name}": timing_raw[name] * 1000 / max(1, tokens.get(name, sequence_tokens))
            for name in phases
            if name in timing_raw
        },
    }


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step, its seconds (`timing_raw["step"]`), and tokens per second of one GPU."""
    metrics = timing_metrics({}, timing_raw["step"], int(batch.batch["attention_mask"].sum()), n_gpus)
    return {name: value for name, value in metrics.items() if name.startswith("perf/")}


def extract_reward(batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    """The token rewards `rm_scores` (B, T) of a batch, and the object columns of `meta_info["reward_extra_keys"]`."""
    keys = batch.meta_info.get("reward_extra_keys", ())
    return batch.batch["rm_scores"], {key: batch.non_tensor_batch[key] for key in keys}


def need_reward_model(config: schema.Config) -> bool:
    """Whether a reward model scores the responses."""
    return config.reward.reward_model.enable
