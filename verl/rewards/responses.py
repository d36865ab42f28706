"""Reading responses out of a batch: one `Sample` per response, and the token position of its reward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl.columns import DataProtoValidationError
from verl.protocol import DataProto
from verl.rewards.outcome import Sample
from verl.utils.decoding import decode_all


@dataclass(frozen=True)
class ResponseBatch:
    """The responses of a batch.

    Attributes:
        samples: B samples, with the responses decoded.
        lengths: (B,) int64, number of tokens of each response.
        positions: (B,) int64, index of the last token sampled by the policy, which receives the reward; 0 if empty.
        empty: Number of responses without a token sampled by the policy.
        width: T, the number of token positions.
    """

    samples: list[Sample]
    lengths: torch.Tensor
    positions: torch.Tensor
    empty: int
    width: int

    def reward_tensor(self, scores: list[float]) -> torch.Tensor:
        """Return (B, T) float32 with each score at the last sampled token of its response, 0 elsewhere."""
        tensor = torch.zeros(len(self.samples), self.width)
        tensor[torch.arange(len(self.samples)), self.positions] = torch.tensor(scores, dtype=torch.float32)
        return tensor


def read_responses(data: DataProto, tokenizer: Any, reward_fn_key: str) -> ResponseBatch:
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
    width = responses.shape[1]
    if width == 0 and len(responses):
        raise DataProtoValidationError("column 'responses': expected at least one token position, found width 0")
    present, sampled = _token_masks(data)
    positions, lengths = reward_positions(data)
    flat, ends = responses[present].tolist(), lengths.cumsum(0).tolist()
    ids = [flat[end - length : end] for end, length in zip(ends, lengths.tolist())]
    texts = decode_all(tokenizer, ids)
    return ResponseBatch(
        samples=_samples(data, texts, lengths.tolist(), reward_fn_key),
        lengths=lengths,
        positions=positions,
        empty=int((~sampled.any(1)).sum()),
        width=width,
    )


def reward_positions(data: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """The position of the reward of each response, and the length of the response.

    Returns:
        (B,) int64, the index of the last token sampled by the policy (0 if there is none); (B,) int64, lengths.
    """
    present, sampled = _token_masks(data)
    return (sampled * torch.arange(1, present.shape[1] + 1)).amax(1).sub(1).clamp(min=0), present.sum(1)


def _token_masks(data: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) bool: the tokens of the responses, and those sampled by the policy."""
    present = data.column("attention_mask").cpu()[:, -data.column("responses").shape[1] :].bool()
    return present, present & data.column("response_mask").cpu().bool() if "response_mask" in data else present


def prompt_texts(data: DataProto, tokenizer: Any, indices: list[int]) -> list[str]:
    """Decode the prompts at `indices`, with special tokens, as the model received them."""
    prompts = data.column("prompts").cpu()
    mask = data.column("attention_mask").cpu()[:, : prompts.shape[1]].bool()
    return decode_all(tokenizer, [prompts[i][mask[i]].tolist() for i in indices], skip_special_tokens=False)


def _samples(data: DataProto, texts: list[str], lengths: list[int], reward_fn_key: str) -> list[Sample]:
    sources, reward_models = data.column(reward_fn_key), data.column("reward_model")
    extra_infos = data.column("extra_info") if "extra_info" in data else [None] * len(texts)
    trajectory_infos = data.column("trajectory_info") if "trajectory_info" in data else [{}] * len(texts)
    uids, prompts = (data.column(name) if name in data else [None] * len(texts) for name in ("uid", "raw_prompt"))
    added = {"response_length": lengths}
    if "rm_scores" in data:
        added["rm_score"] = data.column("rm_scores").sum(1).tolist()
    samples = []
    for i, text in enumerate(texts):
        if not isinstance(reward_models[i], Mapping) or "ground_truth" not in reward_models[i]:
            raise DataProtoValidationError(
                f"column 'reward_model', row {i}: expected a mapping with 'ground_truth', found {reward_models[i]!r}"
            )
        extra_info = {**(extra_infos[i] or {}), **trajectory_infos[i]}
        extra_info |= {name: values[i] for name, values in added.items()}
        truth = reward_models[i]["ground_truth"]
        samples.append(Sample(sources[i], text, truth, extra_info, i, len(texts), uids[i], prompts[i]))
    return samples
