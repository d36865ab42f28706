"""The flow of policy optimization, in execution order (with `trainer.overlap`, operators may overlap).

    prompts -> repeat -> gen -> [gen_baseline] -> sleep_rollout -> [rm] -> reward -> [reward_baseline]
            -> [old_log_prob] -> [ref] -> [values] -> [kl] -> adv -> [update_critic] -> update_actor -> sync_weights

The operators in brackets exist if the estimator or the loss reads their columns: an estimator whose signature has
`values` adds the critic's operators, one with `reward_baselines` adds the greedy rollout. There is no list of
algorithms. `old_log_prob` is removed at the end if the update itself computes its columns (`skip_old_log_prob`).
The operators are in `operators`; edits of this flow in `dynamic_sampling` and `rollout_correction`; recipes have
further ones.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import optional_columns, reads_all_columns, required_columns
from verl.algorithms.kl import get_kl_controller
from verl.algorithms.policy_losses import get_policy_loss_fn
from verl.columns import KEPT_TOKENS
from verl.config import schema
from verl.dataflow import CONTROLLER, DataFlow, Operator
from verl.protocol import DataProto
from verl.rewards import RewardManager
from verl.trainer.ppo.distillation import teacher_columns
from verl.trainer.ppo.operators import (
    GENERATED,
    SEQUENCES,
    GreedyBaseline,
    KLInReward,
    Reward,
    Roles,
    Update,
    advantage,
    free_rollout_cache,
    generate,
    infer,
    model_scores,
    old_log_prob,
    repeat,
    sync_weights,
    uses_agent_loop,
)
from verl.trainer.runner import FlowRunner
from verl.trainer.view import RunView

if TYPE_CHECKING:
    from verl.trainer.ppo.weights import RolloutWeights

logger = logging.getLogger("verl.trainer")

#: columns that generation reads
PROMPTS = ("prompt_ids", "uid")
#: the experts that the routers of a mixture of experts chose
ROUTED_EXPERTS = ("routed_experts",)


def estimator_columns(algorithm: schema.AlgorithmConfig) -> tuple[str, ...]:
    """The columns that the configured estimator reads."""
    return required_columns(get_adv_estimator_fn(algorithm.adv_estimator), algorithm.settings)


def needs_critic(config: schema.Config) -> bool:
    """Whether the configured estimator reads the column `values`."""
    return "values" in estimator_columns(config.algorithm)


def needs_reference(config: schema.Config) -> bool:
    """Whether the reference policy is enabled, or needed for a KL in the reward or the loss."""
    policy = config.actor_rollout_ref
    return bool(policy.ref.enable) or config.algorithm.use_kl_in_reward or policy.actor.use_kl_loss


def loss_columns(config: schema.Config) -> tuple[str, ...]:
    """The columns that the actor's loss reads, including those of a KL loss and of distillation."""
    actor = config.actor_rollout_ref.actor
    loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
    settings = {**actor.loss_settings, "loss_agg_mode": actor.loss_agg_mode}
    # parameters of a loss whose column has another name; `log_prob` comes from the model, which needs no column
    columns = {"old_log_prob": "old_log_probs", "rollout_log_prob": "rollout_log_probs", "log_prob": "response_mask"}
    required = tuple(columns.get(name, name) for name in required_columns(loss, settings))
    reference = ("ref_log_prob",) if actor.use_kl_loss else ()
    return (*required, *reference, *teacher_columns(config.distillation))


def generated_columns(config: schema.Config) -> tuple[str, ...]:
    """The columns that generation writes."""
    return GENERATED + (ROUTED_EXPERTS if config.actor_rollout_ref.rollout.enable_rollout_routing_replay else ())


def kept_columns(config: schema.Config) -> tuple[str, ...]:
    """The columns that make training compute log-probs over the tokens that the filters of sampling keep."""
    return KEPT_TOKENS if config.actor_rollout_ref.rollout.filters_log_probs else ()


def reward_operators(config: schema.Config, roles: Roles, reward: Reward) -> list[Operator]:
    """From responses to rewards: the scores of the reward model, if there is one, and the reward manager."""
    writes = ("token_level_scores", "token_level_rewards")
    reads = ("responses", "response_mask", "data_source", "reward_model")
    if not config.reward.reward_model.enable:
        return [Operator("reward", reward, reads, writes, on=CONTROLLER)]
    rm = Operator("rm", model_scores(roles), (*SEQUENCES, "response_mask"), "rm_scores", on="reward")
    return [rm, Operator("reward", reward, (*reads, "rm_scores"), writes, on=CONTROLLER)]


def build_ppo_flow(
    config: schema.Config,
    prompts: Callable[[], DataProto],
    roles: Roles,
    manager: RewardManager,
) -> DataFlow:
    """The flow of the configured algorithm over the roles actor, rollout, ref and critic. The roles are looked up when
    an operator runs: a flow is built and checked before any model is loaded."""
    algorithm = config.algorithm
    required, kept = estimator_columns(algorithm), kept_columns(config)
    shuffle_seed = config.trainer.seed if algorithm.shuffle_rewards else None
    gen = generate(roles, "train", uses_agent_loop(config))
    flow = DataFlow(
        [
            Operator("prompts", prompts, writes=("prompt_ids", "uid", "data_source", "reward_model")),
            Operator("repeat", repeat(config.actor_rollout_ref.rollout.n), reads="uid"),
            Operator("gen", gen, PROMPTS, generated_columns(config), on="rollout"),
            *reward_operators(config, roles, Reward(manager, shuffle_seed)),
        ]
    )
    if "reward_baselines" in required:
        greedy = GreedyBaseline(config, roles, manager)
        flow.insert_after("gen", Operator("gen_baseline", greedy.generate, PROMPTS, on="rollout"))
        flow.add_operator(Operator("reward_baseline", greedy.score, "uid", "reward_baselines"))
    flow.add_operator(_old_log_prob_operator(config, roles, required))
    if needs_reference(config):
        ref = infer(roles, "ref", "compute_ref_log_prob", kept)
        flow.add_operator(Operator("ref", ref, (*SEQUENCES, *kept), "ref_log_prob", on="ref"))
    if "values" in required:
        values = infer(roles, "critic", "compute_values")
        flow.add_operator(Operator("values", values, SEQUENCES, "values", on="critic"))
    if algorithm.use_kl_in_reward:
        kl = KLInReward(get_kl_controller(**algorithm.kl_ctrl.model_dump()), algorithm.kl_penalty)
        reads = ("token_level_rewards", "old_log_probs", "ref_log_prob", "response_mask")
        flow.add_operator(Operator("kl", kl, reads, "token_level_rewards", on=CONTROLLER))
    estimator = get_adv_estimator_fn(algorithm.adv_estimator)
    reads, on = _reads_and_process(flow, estimator, required, CONTROLLER)
    flow.add_operator(Operator("adv", advantage(algorithm), reads, ("advantages", "returns"), on))
    return _add_updates(flow, config, roles)


def _old_log_prob_operator(config: schema.Config, roles: Roles, required: Sequence[str]) -> Operator:
    """Recomputes the log-probs of the sampled tokens, and what the estimator (`required`) or router replay needs."""
    replay = config.actor_rollout_ref.actor.router_replay.mode
    extra = ("sum_pi_squared",) if "sum_pi_squared" in required else ()
    if config.actor_rollout_ref.actor.calculate_sum_pi_squared and not extra:
        estimator = config.algorithm.adv_estimator
        logger.warning("actor.calculate_sum_pi_squared has no effect: %s does not read sum_pi_squared", estimator)
    extra += ROUTED_EXPERTS if replay == "R2" else ()
    replayed = ROUTED_EXPERTS if replay == "R3" else ()
    reads = (*SEQUENCES, "response_mask", "rollout_log_probs", *replayed)
    extra += kept_columns(config)
    writes = ("old_log_probs", "entropys", *extra)
    return Operator("old_log_prob", old_log_prob(roles, extra, replayed), reads, writes, on="actor")


def _reads_and_process(
    flow: DataFlow, function: Callable, required: Sequence[str], on: str
) -> tuple[tuple[str, ...], str | None]:
    """`Operator.reads` and `Operator.on` for a registered function. It reads the required columns, and optional ones
    that some operator writes. If it receives all columns, the operator is a barrier (`on` is None), so that all of them
    are complete."""
    written = dict.fromkeys(column for op in flow for column in op.writes)
    reads = tuple(dict.fromkeys((*required, *optional_columns(function, written))))
    return reads, None if reads_all_columns(function) else on


def _add_updates(flow: DataFlow, config: schema.Config, roles: Roles) -> DataFlow:
    critic = config.critic
    actor = config.actor_rollout_ref.actor
    n = config.actor_rollout_ref.rollout.n
    if "values" in estimator_columns(config.algorithm):
        plan = critic.ppo_mini_batch_size * n, critic.ppo_epochs, critic.shuffle, critic.data_loader_seed
        update = Update(roles, "critic", "update_critic", *plan)
        reads = (*SEQUENCES, "values", "returns", "response_mask")
        flow.add_operator(Operator("update_critic", update, reads, on="critic"))
    warmup = config.trainer.critic_warmup
    plan = actor.ppo_mini_batch_size * n, actor.ppo_epochs, actor.shuffle, actor.data_loader_seed, warmup
    experts = (
        ROUTED_EXPERTS if actor.router_replay.mode == "R2" or "routed_experts" in generated_columns(config) else ()
    )
    required = (*SEQUENCES, "old_log_probs", "advantages", "response_mask", *loss_columns(config), *experts)
    required += kept_columns(config)
    reads, on = _reads_and_process(flow, get_policy_loss_fn(actor.policy_loss.loss_mode), required, "actor")
    return flow.add_operator(Operator("update_actor", Update(roles, "actor", "update_actor", *plan), reads, on=on))


def should_free_cache(config: schema.Config) -> bool:
    """Whether the KV cache is freed while other roles use the device."""
    return config.actor_rollout_ref.rollout.free_cache_engine and not config.rollout_is_separate


def add_weight_sync(flow: DataFlow, config: schema.Config, weights: "RolloutWeights") -> DataFlow:
    """Add the operators `sync_weights`, after `update_actor`, and `sleep_rollout`, if rollout and training share
    devices, after the last operator that generates or, with dynamic sampling, `filter_groups`, which may request more
    passes. A flow that does not generate gets neither."""
    policy = config.actor_rollout_ref
    generating = [name for name in flow.names if flow[name].on == "rollout"]
    if not generating:
        return flow
    sleeps = should_free_cache(config) or (policy.actor.fsdp_config.param_offload and not config.rollout_is_separate)

    def wake(batch: DataProto) -> None:
        weights.require(batch.meta_info["global_step"] - 1)  # pushed again if the rollout was put to sleep

    def sleep(batch: DataProto) -> None:
        weights.sleep()

    if sleeps and "filter_groups" in flow and config.reward.reward_model.enable:
        for name in generating:  # the reward model computes between two passes of one step
            flow.insert_before(name, Operator(f"wake_for_{name}", wake, on="actor"))
            flow.insert_after(name, Operator(f"sleep_after_{name}", sleep, on="rollout"))
    elif sleeps:
        last = max((*generating, *(n for n in flow.names if n == "filter_groups")), key=flow.names.index)
        flow.insert_after(last, Operator("sleep_rollout", sleep, on="rollout"))
    last_update = "update_actor" if "update_actor" in flow else flow.names[-1]
    return flow.insert_after(last_update, Operator("sync_weights", sync_weights(weights), on="actor"))


def skip_old_log_prob(flow: DataFlow, config: schema.Config) -> DataFlow:
    """Remove `old_log_prob` if the only update of a step computes the log-probs of the old policy itself: not with
    several updates or none (critic warm-up), if another operator reads its columns or does not declare what it reads
    (`Operator.on`), or with `actor.old_log_prob_pass=always`."""
    actor = config.actor_rollout_ref.actor
    single = actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
    if actor.old_log_prob_pass == "always" or not single or config.trainer.critic_warmup:
        return flow
    if "old_log_prob" not in flow or flow["old_log_prob"].on != "actor" or "update_actor" not in flow:
        return flow
    *later, update = list(flow)[flow.names.index("old_log_prob") + 1 :]
    written = set(flow["old_log_prob"].writes)
    if not isinstance(update.func, Update) or update.on is None or written & set(update.reads) != {"old_log_probs"}:
        return flow
    if any(op.on is None or written & set(op.reads) for op in later):
        return flow
    optional = [name for op in later for name in op.writes if name == "ref_log_prob"]
    reads = dict.fromkeys((*update.reads, "rollout_log_probs", *optional))
    del reads["old_log_probs"]
    return flow.remove("old_log_prob").replace(update.name, replace(update, reads=tuple(reads)))


class PPORunner(FlowRunner):
    """Runs generation and training one after the other."""

    def __init__(self, view: RunView, weights: "RolloutWeights"):
        super().__init__(view)
        self.weights = weights

    def finish(self, flow: DataFlow) -> DataFlow:
        """The last edit of a flow: operators that depend on how it is run."""
        return add_weight_sync(skip_old_log_prob(flow, self.view.config), self.view.config, self.weights)

    def undo(self, position: Any) -> None:
        self.weights.version = None  # the actor may have been updated
        super().undo(position)

    def reset(self) -> None:
        self.weights.reset()

    def reset_to(self, step: int, total_steps: int) -> None:
        self.weights.version = None


def check_writers(flow: DataFlow) -> None:
    """Raise ValueError if an operator reads rm_scores, which only a recipe and the reward model write, without them, or
    if the update of a recipe does not read the log-probs of the teachers."""
    if "teacher" in flow and not any("teacher_log_probs" in operator.reads for operator in flow):
        raise ValueError("distillation.enabled: the update of this recipe does not learn from teachers: use false")
    if any("rm_scores" in operator.writes for operator in flow):
        return
    for operator in flow:
        if "rm_scores" in operator.reads:
            raise ValueError(
                f"the operator {operator.name!r} reads 'rm_scores', which no operator of this flow writes: run python "
                "-m verl.recipe.prime.main_prime for process rewards, or set reward.reward_model.enable=true"
            )


def build_validation_flow(config: schema.Config, roles: Roles, manager: RewardManager) -> DataFlow:
    """repeat -> gen -> [free_rollout_cache] -> [rm] -> reward, sampled as rollout.val_kwargs says."""
    gen = generate(roles, "validate", uses_agent_loop(config))
    flow = DataFlow(
        [
            Operator("repeat", repeat(config.actor_rollout_ref.rollout.val_kwargs.n), reads=("uid",)),
            Operator("gen", gen, PROMPTS, generated_columns(config), on="rollout"),
            *reward_operators(config, roles, Reward(manager)),
        ]
    )
    if should_free_cache(config):
        flow.insert_after("gen", Operator("free_rollout_cache", free_rollout_cache(roles), on="rollout"))
    return flow
