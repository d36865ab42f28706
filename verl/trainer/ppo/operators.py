"""The operators of policy optimization, which `flow` arranges into a data flow."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.agents import SINGLE_TURN
from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import bind_arguments
from verl.algorithms.kl import FixedKLController, apply_kl_penalty
from verl.columns import outside_vocabulary
from verl.config import schema
from verl.data.order import PromptSource
from verl.dataflow.flow import Total
from verl.dataflow.operator import Stateful
from verl.engines.micro_batch import MetricSums
from verl.protocol import DataProto
from verl.rewards import RewardManager
from verl.rewards.responses import reward_tensor
from verl.rollout.request import MEDIA_COLUMNS
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.output.metrics import response_lengths
from verl.utils.balance import balanced_partition
from verl.utils.rng import fork_seed

logger = logging.getLogger("verl.trainer")

if TYPE_CHECKING:
    from verl.trainer.ppo.weights import RolloutWeights

#: columns that `gen` adds to the prompts
GENERATED = (
    *("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"),
    *("rollout_log_probs", "weight_version", "finish_reason", "trajectory_info"),
)
#: counts among the metrics of a reward manager
_COUNTS = ("reward/failed_rows", "reward/empty_responses")
#: reserved names of extra reward values: reward_<name> is already another column or metric
RESERVED_EXTRAS = {"model", "baselines", "failed_rows", "empty_responses", "greedy_mean", "tied_groups"}
#: columns that a forward pass over whole sequences reads
SEQUENCES = ("input_ids", "attention_mask", "position_ids", "responses")
#: role -> its workers
Roles = Mapping[str, WorkerGroup]


@dataclass(eq=False, repr=False)
class Prompts(Stateful):
    """The source of training prompts. meta_info has global_step and, for the checks of `verl.columns`, vocab_size and
    (with images) media_tokens."""

    source: PromptSource
    step: Callable[[], int]
    vocab_size: int
    media_tokens: Mapping[str, int] | None = None

    def meta_info(self) -> dict[str, Any]:
        media = {} if self.media_tokens is None else {"media_tokens": self.media_tokens}
        return {"global_step": self.step(), "vocab_size": self.vocab_size, **media}

    def __call__(self) -> DataProto:
        batch = self.source()
        batch.meta_info.update(self.meta_info())
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, also from a checkpoint with a queue of prompts. Raises ValueError if prompts are waiting in it."""
        if "waiting" in state:
            if state["waiting"] is not None and len(state["waiting"]):
                raise ValueError(
                    f"the checkpoint has {len(state['waiting'])} prompts that were taken from the data and are not "
                    "trained yet, of asynchronous training or dynamic sampling: resume with the same "
                    "trainer.async.max_staleness and algorithm.filter_groups"
                )
            state = state["source"]
        self.source.load_state_dict(state)


def repeat(n: int) -> Callable[[DataProto], DataProto]:
    """Repeat every prompt n times, interleaved, and add the column sample_index: 0 .. n-1 within a group."""

    return lambda batch: batch.repeat(n).replace(sample_index=np.tile(np.arange(n), len(batch)).astype(object))


def generate(
    roles: Roles, sampling: str | Mapping[str, Any], all_columns: bool = False
) -> Callable[[DataProto], DataProto]:
    """Generate responses to the prompts of the batch.

    Args:
        sampling: "train", "greedy" or "validate"; or sampling parameters that replace those of training.
        all_columns: also send the other columns, for agent loops that read them.
    """

    def gen(batch: DataProto) -> DataProto:
        inputs = prompt_columns(batch, all_columns)
        inputs.meta_info["sampling"] = sampling
        responses = roles["rollout"].generate_sequences(inputs)
        check_vocabulary(responses.batch["responses"], batch.meta_info.get("vocab_size"))
        check_failures(responses, raise_if_all=sampling == "train")
        responses.meta_info["metrics"] |= length_metrics(responses)
        return responses

    return gen


def prompt_columns(batch: DataProto, all_columns: bool) -> DataProto:
    """The columns that a rollout worker reads. all_columns: all object columns, for agent loops that read them; implied
    by the column agent_name."""
    media = [name for name in MEDIA_COLUMNS if name in batch.non_tensor_batch]
    all_columns = all_columns or "agent_name" in batch.non_tensor_batch
    return batch.select([], None if all_columns else ["prompt_ids", "uid", "sample_index", *media], [])


def sequence_columns(batch: DataProto, extra: tuple[str, ...] = ()) -> DataProto:
    """The columns that a model reads to compute log-probs or values, and `extra` ones."""
    return batch.select([*SEQUENCES, *extra], media_columns(batch), [])


def media_columns(batch: DataProto) -> list[str]:
    """Names of the object columns that a model reads: the tensors of images, if the batch has any."""
    return ["multi_modal_inputs"] if "multi_modal_inputs" in batch.non_tensor_batch else []


def length_metrics(batch: DataProto) -> dict[str, Any]:
    """The metrics response_length/* of generated responses."""
    lengths = response_lengths(batch)
    truncated = batch.non_tensor_batch["finish_reason"] == "length"
    return {
        "response_length/mean": (lengths.sum().item(), len(batch)),
        "response_length/max": lengths.max().item(),
        "response_length/min": lengths.min().item(),
        "response_length/clip_ratio": (int(truncated.sum()), len(batch)),
    }


def check_vocabulary(responses: torch.Tensor, vocab_size: int | None) -> None:
    """Raise ValueError for a token id that the model does not have."""
    if position := outside_vocabulary(responses, vocab_size):
        raise ValueError(
            f"sample {position[0]}: the rollout engine or agent loop returned token id {int(responses[position])}, but "
            f"the model's vocabulary has {vocab_size} tokens"
        )


def check_failures(batch: DataProto, raise_if_all: bool) -> None:
    """Log how many agents or interactions of a batch failed, with the first error.

    Args:
        batch: generated samples; `trajectory_info` has `agent_failure` for those that failed.
        raise_if_all: whether a batch in which all samples failed is an error.

    Raises:
        ValueError: all samples failed, so there is nothing to learn from.
    """
    infos: Sequence[dict[str, Any]] = batch.non_tensor_batch.get("trajectory_info", ())
    failed = [(row, info["agent_failure"]) for row, info in enumerate(infos) if "agent_failure" in info]
    if not failed:
        return
    row, error = failed[0]
    message = (
        f"the agent or interaction of {len(failed)} of {len(batch)} samples failed; the first one, of sample {row}: "
        f"{error}"
    )
    if raise_if_all and len(failed) == len(batch):
        raise ValueError(f"{message}. A step in which all samples fail cannot be trained on")
    logger.warning("%s", message)


def sync_weights(weights: "RolloutWeights") -> Callable[[DataProto], None]:
    """Push the updated weights to the rollout. Reports weight_sync/version, bytes, seconds and others."""

    def sync(batch: DataProto) -> None:
        batch.meta_info["metrics"] = weights.push(batch.meta_info["global_step"])

    return sync


def free_rollout_cache(roles: Roles) -> Callable[[DataProto], None]:
    """Free the rollout's KV cache. The weights are kept for the next prompts."""

    def free(batch: DataProto) -> None:
        roles["rollout"].free_rollout_cache()

    return free


def value_metrics(values: Mapping[str, Sequence[Any]]) -> dict[str, tuple[float, int]]:
    """reward/<name> of the values that a reward function returned: sum and count of the numbers among them, so that the
    mean over several passes does not depend on which samples were in which pass."""
    numbers = {
        name: [float(value) for value in column if isinstance(value, bool | int | float | np.number)]
        for name, column in values.items()
    }
    return {f"reward/{name}": (sum(column), len(column)) for name, column in numbers.items() if column}


@dataclass(eq=False, repr=False)
class Reward:
    """Scores the responses with the reward manager.

    Args:
        manager: the configured reward manager.
        shuffle_seed: if set, shuffle the results of the reward function across samples, as a negative control in which
            nothing can be learned. All values of a sample are moved together, so that no estimator sees the true ones.
    """

    manager: RewardManager
    shuffle_seed: int | None = None

    def __call__(self, batch: DataProto) -> DataProto:
        rewards = self.manager(batch, return_dict=True)
        scores, extra = rewards["reward_tensor"], rewards["reward_extra_info"]
        reserved = sorted({*extra} & RESERVED_EXTRAS)
        if reserved:
            raise ValueError(
                f"the reward function returns the value {reserved[0]!r}, which is a reserved name: rename it"
            )
        metrics = {name: Total(value) if name in _COUNTS else value for name, value in rewards["metrics"].items()}
        if self.shuffle_seed is not None:
            seed = fork_seed(self.shuffle_seed, *map(str, batch.non_tensor_batch["uid"][:8]))
            order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
            scores = reward_tensor(batch, scores[order].sum(1))
            extra = {name: [values[i] for i in order] for name, values in extra.items()}
        return DataProto.from_dict(
            {"token_level_scores": scores, "token_level_rewards": scores},
            {f"reward_{name}": values for name, values in extra.items()},
            {"metrics": metrics | value_metrics(extra)},
        )


def model_scores(roles: Roles) -> Callable[[DataProto], DataProto]:
    """Column rm_scores: scores of the reward model. Reads raw_prompt if its tokenizer differs from the policy's."""

    def rm(batch: DataProto) -> DataProto:
        chats = ["raw_prompt"] if "raw_prompt" in batch else []
        output = roles["reward"].compute_rm_score(batch.select([*SEQUENCES, "response_mask"], chats, []))
        output.meta_info["metrics"] = {"reward/rm_score_mean": (output.batch["rm_scores"].sum().item(), len(output))}
        return output

    return rm


@dataclass(eq=False, repr=False)
class GreedyBaseline:
    """The reward of one greedy response to each prompt (ReMax, Li et al. 2023, arXiv 2310.10505). Two operators:
    `generate`, directly after the samples while the rollout is awake, and `score`."""

    config: schema.Config
    roles: Roles
    manager: RewardManager
    _responses: DataProto | None = None  # one row per prompt, between the two operators of one pass

    def generate(self, batch: DataProto) -> None:
        """Generate a greedy response to every prompt of the batch."""
        _, first_rows, _ = _group_by_prompt(batch)
        names = [name for name in batch.non_tensor_batch if name not in GENERATED]  # without the sampled responses
        prompts = batch.select([], names)[first_rows].replace(sample_index=np.zeros(len(first_rows), dtype=object))
        gen = generate(self.roles, "greedy", all_columns=uses_agent_loop(self.config))
        self._responses = prompts.union(gen(prompts))

    def score(self, batch: DataProto) -> DataProto:
        """Column reward_baselines (B,): total reward of the greedy response to the same prompt."""
        responses, self._responses = self._responses, None
        if self.config.reward.reward_model.enable:
            responses = responses.union(model_scores(self.roles)(responses))
        scores = self.manager(responses, return_dict=True)["reward_tensor"].sum(1)
        _, _, group = _group_by_prompt(batch)
        return DataProto.from_dict(
            {"reward_baselines": scores[group]},
            meta_info={"metrics": {"reward/greedy_mean": (scores.sum().item(), len(scores))}},
        )


def _group_by_prompt(batch: DataProto) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group rows by prompt: the uids, the first row of each group, and the group of each row."""
    return np.unique(batch.non_tensor_batch["uid"].astype(str), return_index=True, return_inverse=True)


def uses_agent_loop(config: schema.Config) -> bool:
    """Whether the configured agent loop is not single-turn."""
    return config.actor_rollout_ref.rollout.agent.default_agent_loop not in SINGLE_TURN


def old_log_prob(roles: Roles, extra: tuple[str, ...], reads: tuple[str, ...] = ()) -> Callable[[DataProto], DataProto]:
    """Columns old_log_probs and entropys (B, T): the policy before the update, computed by the training engine.

    Args:
        extra: further outputs of the model.
        reads: further columns for the workers.
    """

    def recompute(batch: DataProto) -> DataProto:
        inputs = sequence_columns(batch, reads)
        inputs.meta_info["outputs"] = ("entropys", *extra)
        output = roles["actor"].compute_log_prob(inputs)
        mask = batch.batch["response_mask"].bool()
        mismatch = (output.batch["old_log_probs"] - batch.batch["rollout_log_probs"]).abs()[mask]
        output.meta_info["metrics"] = {
            "actor/entropy": output.batch["entropys"][mask].mean().item(),
            "rollout/logprob_gap_mean": mismatch.mean().item(),
            "rollout/logprob_gap_max": mismatch.max().item(),
        }
        return output

    return recompute


def infer(roles: Roles, role: str, method: str, reads: tuple[str, ...] = ()) -> Callable[[DataProto], DataProto]:
    """The columns (B, T) that a forward pass of a role over whole sequences gives, such as ref_log_prob or values.
    reads: further columns for the workers."""

    return lambda batch: getattr(roles[role], method)(sequence_columns(batch, reads))


@dataclass(eq=False, repr=False)
class KLInReward(Stateful):
    """reward_t <- reward_t - coefficient * KL_t, by a kind of `kl_penalty`. The coefficient may adapt, so it is state.
    The penalty is subtracted from the current rewards, so changes by earlier operators are kept."""

    controller: FixedKLController
    kl_estimator: str

    def __call__(self, batch: DataProto) -> DataProto:
        columns = batch.tensors
        coefficient = self.controller.value
        rewards, kl = apply_kl_penalty(
            columns["token_level_rewards"],
            columns["old_log_probs"],
            columns["ref_log_prob"],
            columns["response_mask"],
            kl_coef=coefficient,
            kl_penalty_kind=self.kl_estimator,
        )
        self.controller.update(kl, len(batch))
        metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
        return DataProto.from_dict({"token_level_rewards": rewards}, meta_info={"metrics": metrics})

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state)


def advantage(algorithm: schema.AlgorithmConfig) -> Callable[[DataProto], DataProto]:
    """Advantages and returns of the configured estimator, whose parameters are bound by name."""
    estimator = get_adv_estimator_fn(algorithm.adv_estimator)
    settings = algorithm.settings

    def adv(batch: DataProto) -> DataProto:
        columns = {**batch.non_tensor_batch, **batch.tensors}
        advantages, returns = estimator(**bind_arguments(estimator, columns, settings))
        return DataProto.from_dict({"advantages": advantages, "returns": returns})

    return adv


def order_rows_for_ranks(lengths: Sequence[int], update: "Update", ranks: int, seed: int) -> list[int]:
    """Order the units of one pass so that splitting them evenly gives each rank its share of every mini-batch, which
    contains the same rows for any number of ranks, with about the same number of tokens. lengths: tokens of each
    unit."""
    rows = list(range(len(lengths)))
    if update.shuffle:
        rows = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    if ranks == 1:
        return rows
    shares: list[list[int]] = [[] for _ in range(ranks)]
    size = update.mini_batch_rows // update.rows_per_unit
    for start in range(0, len(rows), size):
        mini = rows[start : start + size]
        for share, members in zip(shares, balanced_partition([lengths[i] for i in mini], ranks, equal_size=True)):
            share += [mini[i] for i in members]
    return [i for share in shares for i in share]


def update_rows(batch: DataProto) -> DataProto:
    """The columns that an update reads. Tokens outside of a column `loss_mask` are excluded from the loss."""
    rows = batch.select(None, media_columns(batch), [])
    if "loss_mask" in rows:
        rows = rows.drop("loss_mask").replace(response_mask=rows.batch["loss_mask"])
    return rows


@dataclass(frozen=True, eq=False, repr=False)
class Update:
    """Updates the actor or the critic: calls `method` of the role's workers once per pass.

    Args:
        mini_batch_rows: rows of one optimizer step, over all ranks.
        epochs: passes over the batch.
        shuffle: shuffle each pass; the order depends on seed and step.
        seed: seed of the shuffle.
        warmup: training steps without an update, while only the critic is trained.
        rows_per_unit: consecutive rows that stay together (2 for preference pairs).
    """

    roles: Roles
    role: str
    method: str
    mini_batch_rows: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0
    warmup: int = 0
    rows_per_unit: int = 1

    def __call__(self, batch: DataProto) -> None:
        step, unit_rows = batch.meta_info["global_step"], self.rows_per_unit
        if step < 1:
            raise ValueError(
                f"training steps are numbered from 1, found global_step {step}: call trainer.step(), or increment "
                "trainer.global_step before pipeline.run()"
            )
        if step <= self.warmup:
            return
        group = self.roles[self.role]
        ranks = group.layout().dp_size
        rows = update_rows(batch)
        lengths = rows.batch["attention_mask"].sum(1).view(-1, unit_rows).sum(1).tolist()
        sums = MetricSums()
        for epoch in range(self.epochs):
            units = order_rows_for_ranks(lengths, self, ranks, fork_seed(self.seed, step, epoch))
            order = [unit * unit_rows + i for unit in units for i in range(unit_rows)]
            ordered = rows if order == list(range(len(order))) else rows[order]
            ordered.meta_info.update(mini_batch_rows=self.mini_batch_rows, last_pass=epoch == self.epochs - 1)
            sums.add(group.submit(self.method, ordered).get())
        batch.meta_info["metrics"] = {name: total / count for name, (total, count) in sums.result().items()}
