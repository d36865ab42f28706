"""The flow of policy optimisation: reading order is running order (where `trainer.overlap` leaves it open, any order).

    prompts -> repeat -> gen -> [rm] -> reward -> [reward_baseline] -> [old_log_prob] -> [ref] -> [values]
            -> [kl] -> adv -> [update_critic] -> update_actor

Which of the operators in brackets exist follows from what is asked for: an estimator whose signature names `values`
makes the critic's operators exist, one that names `reward_baselines` the greedy rollout. No list of algorithms is here.
`old_log_prob` is left out in the end where the update itself has its numbers (`spare_old_log_prob`).
Edits of this flow: `dynamic_sampling` and `rollout_correction`, in the files of these names; recipes have further ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import bind_arguments, optional_columns, reads_all_columns, required_columns
from verl.algorithms.kl import FixedKLController, apply_kl_penalty, get_kl_controller
from verl.algorithms.policy_losses import get_policy_loss_fn
from verl.config import schema
from verl.data.files import PromptSource
from verl.dataflow import CONTROLLER, DataFlow, Operator, Stateful
from verl.engines.metrics import MetricSums
from verl.protocol import DataProto
from verl.rewards import RewardManager
from verl.single_controller import WorkerGroup
from verl.utils.balance import balanced_partition
from verl.utils.rng import fork_seed

#: what `gen` adds to the prompts
GENERATED = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
    "rollout_log_probs",
)
#: names that values beside a score cannot have: reward_<name> is a column or a metric of something else
RESERVED_EXTRAS = {"model", "baselines", "failed_rows", "empty_responses", "greedy_mean", "tied_groups"}
#: what a forward pass over whole sequences reads
SEQUENCES = ("input_ids", "attention_mask", "position_ids", "responses")


Roles = Mapping[str, WorkerGroup]


class Prompts(Stateful):
    """The source of training prompts.

    meta_info has the step that they are for (global_step), and what the strict check of token ids needs (vocab_size).
    """

    def __init__(self, source: PromptSource, step: Callable[[], int], vocab_size: int):
        self.source = source
        self.step = step
        self.vocab_size = vocab_size

    def facts(self) -> dict[str, Any]:
        return {"global_step": self.step(), "vocab_size": self.vocab_size}

    def __call__(self) -> DataProto:
        batch = self.source()
        batch.meta_info.update(self.facts())
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)


def estimator_settings(algorithm: schema.AlgorithmConfig) -> dict[str, Any]:
    """The settings that an advantage estimator may ask for by name: the `algorithm` section."""
    return algorithm.model_dump()


def estimator_columns(algorithm: schema.AlgorithmConfig) -> tuple[str, ...]:
    """The columns that the configured estimator asks for."""
    return required_columns(get_adv_estimator_fn(algorithm.adv_estimator), estimator_settings(algorithm))


def needs_critic(config: schema.Config) -> bool:
    """Whether the configured estimator reads the column `values`."""
    return "values" in estimator_columns(config.algorithm)


def needs_reference(config: schema.Config) -> bool:
    """Whether the reference is asked for by name, or by a KL in the reward or in the loss."""
    policy = config.actor_rollout_ref
    return bool(policy.ref.enable) or config.algorithm.use_kl_in_reward or policy.actor.use_kl_loss


def loss_columns(config: schema.Config) -> tuple[str, ...]:
    """The columns that the actor's loss asks for, the reference's among them where a KL is in the loss."""
    actor = config.actor_rollout_ref.actor
    loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
    settings = {**actor.model_dump(), **actor.policy_loss.model_dump(), "loss_agg_mode": actor.loss_agg_mode}
    # what a loss calls by other names than the batch does; the current log-probs come from the model
    columns = {"old_log_prob": "old_log_probs", "rollout_log_prob": "rollout_log_probs", "log_prob": "response_mask"}
    asked = tuple(columns.get(name, name) for name in required_columns(loss, settings))
    return (*asked, "ref_log_prob") if actor.use_kl_loss else asked


def repeat(n: int) -> Callable[[DataProto], DataProto]:
    """Every prompt n times, side by side, with the column sample_index: 0 .. n-1 within a prompt."""

    def repeat_prompts(batch: DataProto) -> DataProto:
        return batch.repeat(n).replace(sample_index=np.tile(np.arange(n), len(batch)).astype(object))

    return repeat_prompts


def generate(roles: Roles, sampling: str) -> Callable[[DataProto], DataProto]:
    """Answers to the batch's prompts. sampling: "train", "greedy" or "validate"."""

    def gen(batch: DataProto) -> DataProto:
        asked = batch.select([], ["prompt_ids", "uid", "sample_index"], [])
        asked.meta_info["sampling"] = sampling
        return roles["rollout"].generate_sequences(asked)

    return gen


class Reward:
    """Scores of the answers, by the reward manager.

    shuffle_seed: when given, what the reward function returns is dealt out to the rows at random: a control, in which
    nothing can be learnt. The scores and all values beside them move together, so that no estimator sees the truth.
    """

    def __init__(self, manager: RewardManager, shuffle_seed: int | None = None):
        self.manager = manager
        self.shuffle_seed = shuffle_seed

    def __call__(self, batch: DataProto) -> DataProto:
        scored = self.manager(batch, return_dict=True)
        scores, extra = scored["reward_tensor"], scored["reward_extra_info"]
        taken = sorted({*extra} & RESERVED_EXTRAS)
        if taken:
            raise ValueError(f"the reward function returns the value {taken[0]!r}, a name that is in use: rename it")
        metrics = dict(scored["metrics"])
        if self.shuffle_seed is not None:
            order = self._shuffled_rows(batch)
            scores = _moved_to_the_end(scores[order], batch.batch["response_mask"])
            extra = {name: [values[i] for i in order] for name, values in extra.items()}
        for name, values in extra.items():
            numbers = [float(v) for v in values if isinstance(v, bool | int | float | np.number)]
            if len(numbers) == len(values) and numbers:
                metrics[f"reward/{name}"] = sum(numbers) / len(numbers)
        columns = {f"reward_{name}": values for name, values in extra.items()}
        result = DataProto.from_dict({"token_level_scores": scores, "token_level_rewards": scores}, columns)
        result.meta_info["metrics"] = metrics
        return result

    def _shuffled_rows(self, batch: DataProto) -> list[int]:
        seed = fork_seed(self.shuffle_seed, *map(str, batch.non_tensor_batch["uid"][:8]))
        return torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()


def _moved_to_the_end(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of each row of scores (B, T), at the last token of that row's response."""
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    return torch.zeros_like(scores).scatter(1, last[:, None], scores.sum(1)[:, None])


def model_scores(roles: Roles) -> Callable[[DataProto], DataProto]:
    """The reward model's scores, rm_scores. Where its tokenizer is not the policy's it reads raw_prompt."""

    def rm(batch: DataProto) -> DataProto:
        dialogues = ["raw_prompt"] if "raw_prompt" in batch else []
        found = roles["reward"].compute_rm_score(batch.select([*SEQUENCES, "response_mask"], dialogues, []))
        found.meta_info["metrics"] = {"reward/rm_score_mean": found.batch["rm_scores"].sum(1).mean().item()}
        return found

    return rm


def reward_operators(config: schema.Config, roles: Roles, reward: Reward) -> list[Operator]:
    """From answers to rewards: the reward model's scores, where there is one, and the reward manager's verdict."""
    writes = ("token_level_scores", "token_level_rewards")
    reads = ("responses", "response_mask", "data_source", "reward_model")
    if not config.reward.reward_model.enable:
        return [Operator("reward", reward, reads, writes, on=CONTROLLER)]
    rm = Operator("rm", model_scores(roles), (*SEQUENCES, "response_mask"), "rm_scores", on="reward")
    return [rm, Operator("reward", reward, (*reads, "rm_scores"), writes, on=CONTROLLER)]


def reward_baseline(config: schema.Config, roles: Roles, manager: RewardManager) -> Callable[[DataProto], DataProto]:
    """The reward of one greedy answer to each prompt (ReMax, Li et al. 2023, arXiv 2310.10505)."""

    def greedy_reward(batch: DataProto) -> DataProto:
        uids, first, group = np.unique(
            batch.non_tensor_batch["uid"].astype(str), return_index=True, return_inverse=True
        )
        prompts = batch.select([], None)[first].replace(sample_index=np.zeros(len(uids), dtype=object))
        answered = prompts.union(generate(roles, "greedy")(prompts))
        if config.reward.reward_model.enable:
            answered = answered.union(model_scores(roles)(answered))
        scores = manager(answered, return_dict=True)["reward_tensor"].sum(1)
        return DataProto.from_dict(
            {"reward_baselines": scores[group]}, meta_info={"metrics": {"reward/greedy_mean": scores.mean().item()}}
        )

    return greedy_reward


def old_log_prob(roles: Roles, extra: tuple[str, ...]) -> Callable[[DataProto], DataProto]:
    """Log-probs of the policy as it is before the update, and its entropy."""

    def recompute(batch: DataProto) -> DataProto:
        asked = batch.select(list(SEQUENCES), [], [])
        asked.meta_info["outputs"] = ("entropys", *extra)
        found = roles["actor"].compute_log_prob(asked)
        mask = batch.batch["response_mask"].bool()
        gap = (found.batch["old_log_probs"] - batch.batch["rollout_log_probs"]).abs()[mask]
        found.meta_info["metrics"] = {
            "actor/entropy": found.batch["entropys"][mask].mean().item(),
            "rollout/logprob_gap_mean": gap.mean().item(),
            "rollout/logprob_gap_max": gap.max().item(),
        }
        return found

    return recompute


def ref_log_prob(roles: Roles) -> Callable[[DataProto], DataProto]:
    """Log-probs of the reference policy."""

    def ref(batch: DataProto) -> DataProto:
        return roles["ref"].compute_ref_log_prob(batch.select(list(SEQUENCES), [], []))

    return ref


def values(roles: Roles) -> Callable[[DataProto], DataProto]:
    """The critic's values."""

    def compute_values(batch: DataProto) -> DataProto:
        return roles["critic"].compute_values(batch.select(list(SEQUENCES), [], []))

    return compute_values


class KLInReward(Stateful):
    """reward_t <- reward_t - coefficient * KL_t; the coefficient may be steered, so it is state.

    It takes from the rewards as they are then, so that what an operator before it did to them stays.
    """

    def __init__(self, controller: FixedKLController, kind: str):
        self.controller = controller
        self.kind = kind

    def __call__(self, batch: DataProto) -> DataProto:
        columns = batch.tensors
        coefficient = self.controller.value
        rewards, kl = apply_kl_penalty(
            columns["token_level_rewards"],
            columns["old_log_probs"],
            columns["ref_log_prob"],
            columns["response_mask"],
            kl_coef=coefficient,
            kl_penalty_kind=self.kind,
        )
        self.controller.update(kl, len(batch))
        metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
        return DataProto.from_dict({"token_level_rewards": rewards}, meta_info={"metrics": metrics})

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state)


def advantage(algorithm: schema.AlgorithmConfig) -> Callable[[DataProto], DataProto]:
    """Advantages and returns by the configured estimator, its parameters bound by name."""
    estimator = get_adv_estimator_fn(algorithm.adv_estimator)
    settings = estimator_settings(algorithm)

    def adv(batch: DataProto) -> DataProto:
        columns = {**batch.non_tensor_batch, **batch.tensors}
        advantages, returns = estimator(**bind_arguments(estimator, columns, settings))
        return DataProto.from_dict({"advantages": advantages, "returns": returns})

    return adv


@dataclass(frozen=True)
class UpdatePlan:
    """How a batch is gone through. mini_batch_rows: responses of one optimizer step, over all ranks. epochs: passes.

    shuffle: each pass in an order of its own, by seed and step. warmup: training steps in which nothing is done (the
    critic learns first). together: consecutive rows that are never parted (a pair is 2).
    """

    mini_batch_rows: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0
    warmup: int = 0
    together: int = 1


def arrange(lengths: Sequence[int], plan: UpdatePlan, ranks: int, seed: int) -> list[int]:
    """Units (rows, or rows that stay together) in the order of one pass, so that equal shares of it go to the ranks.

    A mini-batch holds the same rows however many ranks there are: each rank gets its part of every mini-batch, parts
    of about the same number of tokens, one mini-batch after another. lengths: tokens of each unit.
    """
    rows = list(range(len(lengths)))
    if plan.shuffle:
        rows = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    if ranks == 1:
        return rows
    shares: list[list[int]] = [[] for _ in range(ranks)]
    size = plan.mini_batch_rows // plan.together
    for start in range(0, len(rows), size):
        mini = rows[start : start + size]
        for share, part in zip(shares, balanced_partition([lengths[i] for i in mini], ranks, equal_size=True)):
            share += [mini[i] for i in part]
    return [i for share in shares for i in share]


class Update:
    """An update of the actor or the critic: `method` of the role's workers, once for each pass.

    Where the batch has a `loss_mask`, the tokens outside it are left out of the update.
    """

    def __init__(self, roles: Roles, role: str, method: str, plan: UpdatePlan):
        self.roles = roles
        self.role = role
        self.method = method
        self.plan = plan

    def __call__(self, batch: DataProto) -> None:
        step, plan = batch.meta_info["global_step"], self.plan
        if step <= plan.warmup:
            return
        group = self.roles[self.role]
        ranks = group.layout().dp_size
        rows = batch.select(None, [], [])
        if "loss_mask" in rows:
            rows = rows.drop("loss_mask").replace(response_mask=rows.batch["loss_mask"])
        lengths = rows.batch["attention_mask"].sum(1).view(-1, plan.together).sum(1).tolist()
        sums = MetricSums()
        for epoch in range(plan.epochs):
            units = arrange(lengths, plan, ranks, fork_seed(plan.seed, step, epoch))
            order = [unit * plan.together + i for unit in units for i in range(plan.together)]
            share = rows if order == list(range(len(order))) else rows[order]
            facts = {"mini_batch_rows": plan.mini_batch_rows, "last_pass": epoch == plan.epochs - 1}
            share.meta_info.update(facts)
            sums.add(group.submit(self.method, share).get())
        batch.meta_info["metrics"] = {name: total / count for name, (total, count) in sums.result().items()}


def build_ppo_flow(
    config: schema.Config,
    prompts: Callable[[], DataProto],
    roles: Roles,
    manager: RewardManager,
) -> DataFlow:
    """The flow of the configured algorithm over the roles actor, rollout, ref and critic.

    The roles are looked up when an operator runs: a flow is built and checked before any model is loaded.
    """
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    asked = estimator_columns(algorithm)
    shuffle_seed = config.trainer.seed if algorithm.shuffle_rewards else None
    flow = DataFlow(
        [
            Operator("prompts", prompts, writes=("prompt_ids", "uid", "data_source", "reward_model")),
            Operator("repeat", repeat(n), reads="uid"),
            Operator("gen", generate(roles, "train"), reads=("prompt_ids", "uid"), writes=GENERATED),
            *reward_operators(config, roles, Reward(manager, shuffle_seed)),
        ]
    )
    if "reward_baselines" in asked:
        greedy = reward_baseline(config, roles, manager)
        flow.add_operator(Operator("reward_baseline", greedy, ("prompt_ids", "uid"), "reward_baselines"))
    extra = tuple(name for name in ("sum_pi_squared",) if name in asked)
    reads = (*SEQUENCES, "response_mask", "rollout_log_probs")
    writes = ("old_log_probs", "entropys", *extra)
    flow.add_operator(Operator("old_log_prob", old_log_prob(roles, extra), reads, writes, on="actor"))
    if needs_reference(config):
        flow.add_operator(Operator("ref", ref_log_prob(roles), SEQUENCES, "ref_log_prob", on="ref"))
    if "values" in asked:
        flow.add_operator(Operator("values", values(roles), SEQUENCES, "values", on="critic"))
    if algorithm.use_kl_in_reward:
        kl = KLInReward(get_kl_controller(**algorithm.kl_ctrl.model_dump()), algorithm.kl_penalty)
        reads = ("token_level_rewards", "old_log_probs", "ref_log_prob", "response_mask")
        flow.add_operator(Operator("kl", kl, reads, "token_level_rewards", on=CONTROLLER))
    estimator = get_adv_estimator_fn(algorithm.adv_estimator)
    reads, on = _reads(flow, estimator, asked, CONTROLLER)
    flow.add_operator(Operator("adv", advantage(algorithm), reads, ("advantages", "returns"), on))
    return _add_updates(flow, config, roles)


def _reads(flow: DataFlow, function: Callable, asked: Sequence[str], on: str) -> tuple[tuple[str, ...], str | None]:
    """What the operator around a registered function reads of a flow, and where it runs.

    It reads what is asked for, and what the function takes where it is there. Of a function that receives all columns
    nobody can say what it reads: its operator has no place, so that all of them are there.
    """
    written = dict.fromkeys(column for op in flow for column in op.writes)
    reads = tuple(dict.fromkeys((*asked, *optional_columns(function, written))))
    return reads, None if reads_all_columns(function) else on


def _add_updates(flow: DataFlow, config: schema.Config, roles: Roles) -> DataFlow:
    critic, actor, n = config.critic, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    if "values" in estimator_columns(config.algorithm):
        plan = UpdatePlan(critic.ppo_mini_batch_size * n, critic.ppo_epochs, critic.shuffle, critic.data_loader_seed)
        update = Update(roles, "critic", "update_critic", plan)
        reads = (*SEQUENCES, "values", "returns", "response_mask")
        flow.add_operator(Operator("update_critic", update, reads, on="critic"))
    warmup = config.trainer.critic_warmup
    plan = UpdatePlan(actor.ppo_mini_batch_size * n, actor.ppo_epochs, actor.shuffle, actor.data_loader_seed, warmup)
    asked = (*SEQUENCES, "old_log_probs", "advantages", "response_mask", *loss_columns(config))
    reads, on = _reads(flow, get_policy_loss_fn(actor.policy_loss.loss_mode), asked, "actor")
    return flow.add_operator(Operator("update_actor", Update(roles, "actor", "update_actor", plan), reads, on=on))


def spare_old_log_prob(flow: DataFlow, config: schema.Config) -> DataFlow:
    """Leave `old_log_prob` out where the only update of a step has the log-probs of the old policy itself.

    It stays where there are several updates or none (the critic's warm-up), where another operator reads what it
    writes or does not promise what it reads (`Operator.on`), and where `actor.old_log_prob_pass` says so.
    """
    actor = config.actor_rollout_ref.actor
    single = actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
    if actor.old_log_prob_pass == "always" or not single or config.trainer.critic_warmup:
        return flow
    if "old_log_prob" not in flow or flow["old_log_prob"].on != "actor" or "update_actor" not in flow:
        return flow
    *others, update = list(flow)[flow.names.index("old_log_prob") + 1 :]
    written = set(flow["old_log_prob"].writes)
    if not isinstance(update.func, Update) or update.on is None or written & set(update.reads) != {"old_log_probs"}:
        return flow
    if any(op.on is None or written & set(op.reads) for op in others):
        return flow
    reported = [name for op in others for name in op.writes if name == "ref_log_prob"]
    reads = dict.fromkeys((*update.reads, "rollout_log_probs", *reported))
    del reads["old_log_probs"]
    return flow.remove("old_log_prob").replace(update.name, replace(update, reads=tuple(reads)))


def build_validation_flow(config: schema.Config, roles: Roles, manager: RewardManager) -> DataFlow:
    """repeat -> gen -> [rm] -> reward, sampled as rollout.val_kwargs says."""
    return DataFlow(
        [
            Operator("repeat", repeat(config.actor_rollout_ref.rollout.val_kwargs.n), reads=("uid",)),
            Operator("gen", generate(roles, "validate"), reads=("prompt_ids", "uid"), writes=GENERATED),
            *reward_operators(config, roles, Reward(manager)),
        ]
    )
