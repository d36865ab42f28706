"""Checks of the settings of mixtures of experts: router replay."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config.errors import Problem

if TYPE_CHECKING:
    from verl.config.schema.ppo import Config

_MODE = "actor_rollout_ref.actor.router_replay.mode"
_RECORDS = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def router_replay(config: "Config") -> Iterator[Problem]:
    """Settings that contradict `actor.router_replay`."""
    policy = config.actor_rollout_ref
    mode, records = policy.actor.router_replay.mode, policy.rollout.enable_rollout_routing_replay
    if mode == "disabled" and not records:
        return
    if policy.actor.strategy not in ("fsdp", "fsdp2", "megatron"):
        what = f"strategy={policy.actor.strategy} does not support router replay: use strategy=fsdp, or disabled"
        yield Problem(_MODE, f"{mode!r}, but {what}")
    if mode == "R3" and not records:
        yield Problem(_MODE, f"'R3' replays the experts that the rollout has recorded: set {_RECORDS}=true, or use R2")
    if mode == "R2" and records:
        yield Problem(_RECORDS, "true, but router_replay.mode=R2 replays what training records: use false, or R3")
    if policy.rollout.deterministic:
        what = "true, but mixtures of experts have no batch-invariant kernels: use false"
        yield Problem("actor_rollout_ref.rollout.deterministic", what)
