"""A canary check of an engine, with a HuggingFace model in place of the trainer."""

import torch

from verl.protocol import DataProto
from verl.rollout.base import RolloutEngine
from verl.rollout.request import Completion, Request, SamplingParams
from verl.trainer.ppo.canary import Canary


class Roles:
    """The roles actor and rollout."""

    def __init__(self, rollout: RolloutEngine, module: torch.nn.Module):
        self.rollout, self.module = rollout, module

    def canary_response(self, prompt: list[int], max_tokens: int) -> list[Completion]:
        params = SamplingParams(max_tokens, (), temperature=0.0, ignore_eos=True)
        return self.rollout.generate([Request(prompt, params, 0)])

    @torch.no_grad()
    def canary_log_probs(self, batch: DataProto) -> list[torch.Tensor]:
        responses = batch.batch["responses"]
        logits = self.module(batch.batch["input_ids"]).logits[:, -1 - responses.shape[1] : -1]
        return [logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]]

    def computes_in_16_bits(self) -> list[bool]:
        return [False]

    def has_compared_weights(self) -> list[bool]:
        return [False]


def check_canary(rollout: RolloutEngine, module: torch.nn.Module, version: int) -> None:
    """Raise StaleWeightsError if the engine does not generate with the weights of the module."""
    roles = Roles(rollout, module)
    canary = Canary(
        {"actor": roles, "rollout": roles}, 1, vocab_size=module.config.vocab_size, prompt_length=8, response_length=8
    )
    canary.check(version)
