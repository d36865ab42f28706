"""Workers that learn from preferences: the actor of an online run, and the models of an offline one.

A loss of preferences needs the log-probs of both responses of a pair at once (of the whole mini-batch, for KTO), but
engines split a mini-batch into micro-batches as memory allows. So an update has two passes: the first computes the
log-prob of every response without gradient, and from it d loss / d log-prob; the second is a sum weighted by that,
which may be split in any way. The gradient is the same. The score of a reward model takes the place of the log-prob.
"""

from typing import Any

import torch

from verl.algorithms.preference import PreferenceLoss, sequence_log_prob
from verl.config.fields import section
from verl.config.schema import PreferenceLossConfig, SFTConfig
from verl.config.schema.ppo import Config
from verl.data.sequences import position_ids_of
from verl.engines.base import MicroBatching, Objective, Tensors, TrainEngine
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.engine_worker import EngineWorker, micro_batching, update_micro_batching
from verl.workers.policy import ActorWorker

#: columns of `PreferenceLoss` that a batch brings along
_COLUMNS = ("label", "margin", "pair_weight", "ref_log_prob")


class OnlineDPOConfig(Config):
    """The root of a configuration of online preference optimization."""

    dpo: PreferenceLossConfig = section(PreferenceLossConfig, "the loss")


# ---- one update -----------------------------------------------------------------------------------------------------


def sequence_columns(values: torch.Tensor, rows: Tensors) -> Tensors:
    """The columns of `PreferenceLoss`, (B,) each, of log-probs or scores (B, T)."""
    mask = rows["response_mask"]
    columns = {name: rows[name] for name in _COLUMNS if name in rows}
    if "ref_log_prob" in rows:
        columns["ref_log_prob"] = sequence_log_prob(rows["ref_log_prob"], mask)
    return {**columns, "log_prob": sequence_log_prob(values, mask), "length": mask.sum(-1).clamp(min=1)}


def with_mismatched(batch: DataProto) -> DataProto:
    """A batch in which each row is followed by its prompt with the response of the next row, for the KL of KTO. Raises
    ValueError for rows with positions of several axes, as of images, which depend on the prompt."""
    tensors, size = batch.tensors, len(batch)
    if tensors["position_ids"].dim() > 2:
        raise ValueError("a loss with a KL estimate (kto) is not supported for prompts with images: use another one")
    width = tensors["prompts"].shape[1]
    attention = torch.cat([tensors["attention_mask"][:, :width], tensors["attention_mask"].roll(-1, 0)[:, width:]], 1)
    responses = tensors["responses"].roll(-1, 0)
    mismatched = {
        **tensors,
        "responses": responses,
        "response_mask": tensors["response_mask"].roll(-1, 0),
        "input_ids": torch.cat([tensors["prompts"], responses], 1),
        "attention_mask": attention,
        "position_ids": position_ids_of(attention),
    }
    order = torch.arange(2 * size).view(2, size).T.flatten()  # 0, size, 1, size + 1, ...
    return DataProto.concat([batch, batch.replace(**mismatched)])[order]


def split_mismatched(rows: Tensors) -> tuple[Tensors, torch.Tensor]:
    """The rows of responses to their own prompts, and the log-ratios of the mismatched ones of `with_mismatched`."""
    matched = {name: value[0::2] for name, value in rows.items()}
    return matched, (rows["log_prob"] - rows["ref_log_prob"])[1::2]


def count_preferences(loss: PreferenceLoss, rows: Tensors) -> float:
    """The number of pairs, or of labeled responses, without those of weight 0."""
    return rows["pair_weight"].sum().item() / (2 if loss.is_paired else 1)


def update_on_preferences(
    engine: TrainEngine,
    mini: DataProto,
    loss: PreferenceLoss,
    micro: MicroBatching,
    output: str = "log_probs",
    temperature: float = 1.0,
) -> dict[str, Any]:
    """One optimizer step on this rank's rows of a mini-batch. Returns its metrics.

    Args:
        mini: rows 2i and 2i + 1 are a pair; or with a KL estimate, a labeled response and a mismatched one.
        output: what the loss reads of the model: log_probs, or values of a reward model.
    """
    values = engine.infer(mini, (output,), micro, temperature=temperature)[output]
    rows, kl = sequence_columns(values, mini.tensors), 0.0
    extra = {}
    if loss.needs_kl:
        rows, log_ratios = split_mismatched(rows)
        mini = mini[torch.arange(0, len(mini), 2)]
        total, number = engine.sum_over_ranks([log_ratios.sum().item(), float(len(log_ratios))])
        kl = max(total / number, 0.0)
        extra["dpo/kl"] = (kl * len(log_ratios), len(log_ratios))
    (count,) = engine.sum_over_ranks([count_preferences(loss, rows)])
    rows["log_prob"].requires_grad_()
    value, metrics = loss(rows, count, kl)
    (weights,) = torch.autograd.grad(value, rows["log_prob"])
    metrics = {**metrics, **extra, "loss": (value.detach() * count, count_preferences(loss, rows))}

    def weighted_sum(outputs: Tensors, rows: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:  # with the same gradient
        return (rows["sequence_weight"] * sequence_log_prob(outputs[output], rows["response_mask"])).sum(), {}

    objective = Objective(weighted_sum, (output,))
    return metrics | engine.train_batch(mini.replace(sequence_weight=weights), objective, micro, temperature)


# ---- workers --------------------------------------------------------------------------------------------------------


class DPOActorWorker(ActorWorker):
    """The policy of an online run. loss: of the section `dpo`; other arguments as for `ActorWorker`."""

    def __init__(self, *args: Any, loss: PreferenceLoss, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.loss = loss

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_dpo(self, batch: DataProto) -> dict[str, Any]:
        """One pass over this rank's rows. Reads the meta_info of `update_pass`."""
        micro, temperature = update_micro_batching(self.config.actor), self.config.rollout.temperature
        with self.update_pass(batch, "actor") as update:
            for mini in update.mini_batches:
                metrics = update_on_preferences(self.engine, mini, self.loss, micro, temperature=temperature)
                update.add({"dpo/loss": metrics.pop("loss"), **metrics})
        return update.finish()


class PreferenceWorker(EngineWorker):
    """A model of an offline run.

    Args:
        loss: None: the reference model, which is not trained.
        is_reward_model: a sequence classifier that learns scores, instead of a policy.
        pad_token_id: written to the configuration of a reward model, which needs it to read padded rows.
    """

    def __init__(
        self,
        config: SFTConfig,
        *,
        loss: PreferenceLoss | None,
        is_reward_model: bool = False,
        total_training_steps: int = -1,
        pad_token_id: int | None = None,
    ):
        data, model = config.data, config.model
        self.checkpoint, self.loss = config.checkpoint, loss
        self.output = "values" if is_reward_model else "log_probs"
        self.micro = micro_batching(data.micro_batch_size_per_gpu, data.use_dynamic_bsz, data.max_token_len_per_gpu)
        if is_reward_model:
            overrides = {**model.override_config, "pad_token_id": pad_token_id}
            model = model.model_copy(update={"override_config": overrides})
        self.engine = self.build_engine(
            config.engine.strategy,
            model,
            config.engine.selected,
            config.optim if loss is not None else None,
            kind="reward" if is_reward_model else "causal_lm",
            device=config.trainer.device,
            total_training_steps=total_training_steps,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> dict[str, Any]:
        """One optimizer step on the batch."""
        with self.update_pass(batch, "train", one_step=True) as update:
            for mini in update.mini_batches:
                update.add(update_on_preferences(self.engine, mini, self.loss, self.micro, self.output))
        return update.finish()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_outputs(self, batch: DataProto) -> DataProto:
        """Column log_probs or values, with the current weights."""
        return DataProto.from_dict(self.engine.infer(batch, (self.output,), self.micro))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Column ref_log_prob: of this model, which is the reference, or of a LoRA policy without its adapters."""
        if self.loss is None:
            values = self.engine.infer(batch, ("log_probs",), self.micro)
        else:
            with self.engine.reference():
                values = self.engine.infer(batch, ("log_probs",), self.micro)
        return DataProto.from_dict({"ref_log_prob": values["log_probs"]})
