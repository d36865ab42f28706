"""Reading responses out of a batch: one `Sample` per response, and the token position of its reward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from verl.columns import DataProtoValidationError
from verl.protocol import DataProto
from verl.rewards.outcome import Sample
from verl.utils.tokenizer import decode_all


def read_samples(data: DataProto, tokenizer: Any, reward_fn_key: str) -> list[Sample]:
    """Decode the responses, without special tokens, and collect the inputs of the reward function.

    "response_length" (in tokens) is added to each sample's extra_info, "rm_score" (the sum of its rm_scores) if a
    reward model has scored the batch, and the entries of trajectory_info if an agent loop has generated it.

    Args:
        data: Batch with responses (B, T), attention_mask (B, P + T), `reward_fn_key` and reward_model
            ({"ground_truth": ...}); optional are response_mask (B, T), rm_scores (B, T), extra_info, raw_prompt, uid.
        reward_fn_key: The column with the data source.

    Raises:
        DataProtoValidationError: For a missing column, a sample without ground truth, or responses of width 0.
    """
    responses = data.column("responses").cpu()
    if responses.shape[1] == 0 and len(responses):
        raise DataProtoValidationError("column 'responses': expected at least one token position, found width 0")
    present, _ = token_masks(data)
    texts = decode_all(tokenizer, [row[mask].tolist() for row, mask in zip(responses, present)])
    sources, reward_models = data.column(reward_fn_key), data.column("reward_model")
    optional = ("extra_info", "trajectory_info", "uid", "raw_prompt")
    values = (data.column(name) if name in data else [None] * len(texts) for name in optional)
    extra_infos, trajectory_infos, uids, prompts = values
    added = {"response_length": present.sum(1).tolist()}
    if "rm_scores" in data:
        added["rm_score"] = data.column("rm_scores").sum(1).tolist()
    samples = []
    for i, text in enumerate(texts):
        if not isinstance(reward_models[i], Mapping) or "ground_truth" not in reward_models[i]:
            raise DataProtoValidationError(
                f"column 'reward_model', row {i}: expected a mapping with 'ground_truth', found {reward_models[i]!r}"
            )
        extra_info = {**(extra_infos[i] or {}), **(trajectory_infos[i] or {})}
        extra_info |= {name: column[i] for name, column in added.items()}
        truth = reward_models[i]["ground_truth"]
        info, result = trajectory_infos[i] or {}, None
        if info.get("reward_score") is not None:
            values = info.get("reward_extra_info") or {}
            values = {k: v for k, v in values.items() if isinstance(v, int | float | str)}
            result = {**values, "score": info["reward_score"]}
        samples.append(Sample(sources[i], text, truth, extra_info, i, len(texts), uids[i], prompts[i], result))
    return samples


def add_group_scores(samples: Sequence[Sample], score_group: Callable[[list[Sample]], Sequence[float]]) -> None:
    """Set extra_info["agent_score"] of all samples to the scores that the agent loop gives each group of a prompt."""
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.uid, []).append(sample)
    for group in groups.values():
        scores = list(score_group(group))
        if len(scores) != len(group):
            raise ValueError(f"score_group: expected {len(group)} scores, one per sample, found {len(scores)}")
        for sample, score in zip(group, scores):
            sample.extra_info["agent_score"] = score


def token_masks(data: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) bool: the tokens of the responses, and those sampled by the policy."""
    present = data.column("attention_mask").cpu()[:, -data.column("responses").shape[1] :].bool()
    return present, present & data.column("response_mask").cpu().bool() if "response_mask" in data else present


def reward_tensor(data: DataProto, scores: Any) -> torch.Tensor:
    """(B, T) float32 with each score at the last token of its response that the policy sampled, or the first token."""
    _, sampled = token_masks(data)
    positions = (sampled * torch.arange(1, sampled.shape[1] + 1)).amax(1).sub(1).clamp(min=0)
    rewards = torch.zeros(sampled.shape)
    rewards[torch.arange(len(rewards)), positions] = torch.as_tensor(scores, dtype=torch.float32)
    return rewards


def prompt_texts(data: DataProto, tokenizer: Any, indices: list[int]) -> list[str]:
    """Decode the prompts at `indices`, with special tokens, as the model received them."""
    prompts = data.column("prompts").cpu()
    mask = data.column("attention_mask").cpu()[:, : prompts.shape[1]].bool()
    return decode_all(tokenizer, [prompts[i][mask[i]].tolist() for i in indices], skip_special_tokens=False)
