"""SPIN (Chen et al. 2024, arXiv 2401.01335) as an edit of the flow of online DPO.

    spin.preferred=data      prompts -> gen -> demonstrations -> reward -> pairs -> [update_ref] -> ref -> update_actor
    spin.preferred=reward    prompts -> gen -> reward -> pairs -> [update_ref] -> ref -> update_actor

The policy plays against itself: its response is rejected, and that of the data is chosen. The opponent, the reference
of the DPO loss, becomes the current policy every `trainer.ref_update_freq` steps. With spin.preferred=reward, both
responses are the policy's, and the reward decides.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from verl.algorithms.preference import PreferenceLoss
from verl.config import Problem
from verl.config.fields import Section, field, section
from verl.config.schema import AlgorithmConfig, CheckpointConfig, TrainerConfig
from verl.config.schema.ppo import Config
from verl.data.sequences import build_sequences
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.recipe.dpo.worker import DPOActorWorker
from verl.single_controller import Dispatch, register
from verl.trainer.ppo.operators import Roles
from verl.trainer.startup.inputs import Inputs
from verl.workers.policy import RefWorker

SCORES = ("token_level_scores", "token_level_rewards")


class SPINAlgorithmConfig(AlgorithmConfig):
    """`algorithm`, with the loss."""

    dpo_beta: float = field(0.1, "strength of the KL constraint to the reference", gt=0)
    dpo_loss_type: Literal["sigmoid", "ipo"] = field("sigmoid", "DPO, or IPO (a squared error)")


class SPINTrainerConfig(TrainerConfig):
    """`trainer`, with the update of the reference."""

    ref_update_freq: int = field(-1, "steps after which the reference becomes the policy; -1: never", ge=-1)


class SPINSection(Section):
    """`spin`: which response is better."""

    preferred: Literal["data", "reward"] = field("data", "data: the response of the data; reward: the better of two")
    response_key: str = field("response", "data: the column of the response", active_when=("preferred", "data"))


class SPINConfig(Config):
    """The root of a SPIN configuration."""

    algorithm: SPINAlgorithmConfig = section(SPINAlgorithmConfig, "the loss")
    trainer: SPINTrainerConfig = section(SPINTrainerConfig, "the run")
    spin: SPINSection = section(SPINSection, "self-play")


def check_settings(config: SPINConfig) -> Iterator[Problem]:
    """Settings that are invalid for SPIN."""
    policy, preferred, responses = config.actor_rollout_ref, config.spin.preferred, config.actor_rollout_ref.rollout.n
    rules = {
        "actor_rollout_ref.rollout.n": (
            responses != 1 if preferred == "data" else responses < 2,
            f"found {responses}: use 1 with spin.preferred=data, at least 2 with spin.preferred=reward",
        ),
        "actor_rollout_ref.ref.enable": (not policy.ref.enable, "SPIN needs the reference: use true"),
        "actor_rollout_ref.model.lora_rank": (
            policy.model.has_adapters and config.trainer.ref_update_freq > 0,
            "the reference of a LoRA run is the base model, which is not updated: use trainer.ref_update_freq=-1",
        ),
        "algorithm.adv_estimator": (
            config.algorithm.adv_estimator != "reinforce_plus_plus",
            "SPIN does not compute advantages: leave it at reinforce_plus_plus, whose operator is removed",
        ),
        "algorithm.use_kl_in_reward": (
            config.algorithm.use_kl_in_reward or policy.actor.use_kl_loss,
            "true here or in actor.use_kl_loss, but SPIN limits the KL by algorithm.dpo_beta: use false",
        ),
        "algorithm.filter_groups.enable": (
            config.algorithm.filter_groups.enable and preferred == "data",
            "true, but there are no rewards with spin.preferred=data: use false",
        ),
    }
    yield from (Problem(key, problem) for key, (is_wrong, problem) in rules.items() if is_wrong)


class SPINActorWorker(DPOActorWorker):
    """The actor of DPO, which can write its weights for the reference."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_weights(self, folder: str | Path) -> None:
        """Write the full weights as a Hugging Face model to `folder/huggingface`."""
        self.engine.save(Path(folder), ("hf_model",))
        self.engine.finish_save()


class SPINRefWorker(RefWorker):
    """A reference that becomes the policy of a later step, and is in the checkpoints."""

    checkpoint = CheckpointConfig(save_contents=["model"], load_contents=["model"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def non_finite_state(self) -> list[str]:
        """Nothing: the weights are those of an actor that was checked."""
        return []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_policy(self, folder: str | Path) -> None:
        """Read the weights that `save_weights` of the actor wrote."""
        self.engine.load(Path(folder), ("hf_model",))


def loss_of(config: SPINConfig) -> PreferenceLoss:
    """The loss of a pair."""
    names = {"sigmoid": "dpo", "ipo": "ipo"}
    return PreferenceLoss(names[config.algorithm.dpo_loss_type], {"beta": config.algorithm.dpo_beta})


def response_tokens(response: str | list[dict[str, Any]], tokenizer: Any) -> list[int]:
    """Token ids of a response of the data, with an end token: text, or chat messages whose last one is the response."""
    text = response if isinstance(response, str) else response[-1]["content"]
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def check_responses(config: SPINConfig, inputs: Inputs) -> None:
    """The data has responses within the length limit. Raises ValueError."""
    if config.spin.preferred != "data":
        return
    limit, key, rows = config.data.max_response_length, config.spin.response_key, inputs.train_dataset
    for row in range(len(rows)):
        if key not in rows[row]:
            raise ValueError(
                f"spin.response_key: the data has no column {key!r}, only {', '.join(map(str, rows[row]))}"
            )
        if (length := len(response_tokens(rows[row][key], inputs.tokenizer))) > limit:
            raise ValueError(f"row {row}: {length} tokens in {key!r}, but data.max_response_length is {limit}")


def demonstrations(key: str, tokenizer: Any) -> Callable[[DataProto], DataProto]:
    """Two rows for each: the response of the data, with sample_index 0, and that of the policy, with 1."""

    def add(batch: DataProto) -> DataProto:
        tokens = batch.batch["responses"]
        mask = batch.batch["attention_mask"][:, -tokens.shape[1] :].bool()
        ids: list[list[int]] = []
        for text, policy, keep in zip(batch.column(key), tokens, mask):
            ids += [response_tokens(text, tokenizer), policy[keep].tolist()]
        rows = batch.select([], None).repeat(2)
        columns = build_sequences(list(rows.non_tensor_batch["prompt_ids"]), ids, tokenizer.pad_token_id)
        indices = np.tile(np.arange(2), len(batch)).astype(object)
        return rows.replace(sample_index=indices).union(DataProto.from_dict(columns))

    return add


def prefer_data(batch: DataProto) -> dict[str, torch.Tensor]:
    """Score 1 for the responses of the data, 0 for those of the policy."""
    scores = torch.zeros(batch.batch["response_mask"].shape)
    scores[:, 0] = torch.tensor(batch.column("sample_index").astype(np.float32)) == 0
    return dict.fromkeys(SCORES, scores)


def update_reference(roles: Roles, frequency: int, folder: Path) -> Callable[[DataProto], None]:
    """Every `frequency` steps, the reference becomes the policy, by a file in `folder`."""

    def update(batch: DataProto) -> None:
        steps = batch.meta_info["global_step"] - 1
        if steps and steps % frequency == 0:
            roles["actor"].save_weights(folder)
            roles["ref"].load_policy(folder)

    return update


def spin_flow(flow: DataFlow, config: SPINConfig, roles: Roles, tokenizer: Any, folder: Path) -> DataFlow:
    """Edit the flow of online DPO. folder: where weights are exchanged."""
    if config.spin.preferred == "data":
        reads = ("responses", "attention_mask", "prompt_ids")
        flow.insert_before(
            "reward", Operator("demonstrations", demonstrations(config.spin.response_key, tokenizer), reads)
        )
        flow.replace("reward", Operator("reward", prefer_data, ("response_mask",), SCORES))
    if config.trainer.ref_update_freq > 0:
        update = update_reference(roles, config.trainer.ref_update_freq, folder)
        flow.insert_before("ref", Operator("update_ref", update))
    return flow
