"""Limits of a model: its vocabulary and its maximum sequence length."""

from dataclasses import dataclass
from typing import Any

from verl.config import schema
from verl.rollout.native.model import family_of


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a model, read from its config without loading weights.

    Attributes:
        path: the model's name in messages.
        vocab_size: token ids are 0 to vocab_size - 1.
        positions: tokens in a sequence; None if the config sets no limit.
        architectures: class names of the saved weights.
    """

    path: str
    vocab_size: int
    positions: int | None
    architectures: tuple[str, ...]

    @classmethod
    def of(cls, model: schema.ModelConfig) -> "ModelLimits":
        """The limits of the model that a `model` section names."""
        from transformers import AutoConfig

        hf = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).get_text_config()
        positions = {**hf.to_dict(), **model.override_config}.get("max_position_embeddings")
        return cls(model.path, hf.vocab_size, positions, tuple(hf.architectures or ()))

    def check_vocabulary(self, tokenizer: Any, largest_id: int) -> None:
        """Raise ValueError if token ids exceed the vocabulary. largest_id: the largest id of the dataset."""
        largest = max(largest_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
        if largest >= self.vocab_size:
            raise ValueError(
                f"the tokenizer produces token id {largest}, but the model {self.path!r} has ids 0 to "
                f"{self.vocab_size - 1}: use the tokenizer of this model (model.tokenizer_path)"
            )

    def check_response_length(self, longest_prompt: int, response_length: int, key: str, instead: str) -> None:
        """Raise ValueError if the longest prompt plus a response exceeds the positions of the model.

        Args:
            longest_prompt: tokens.
            response_length: tokens, the limit that `key` sets.
            key: the config key named in the message.
            instead: the fix if shorter responses do not help.
        """
        if self.positions is not None and longest_prompt + response_length > self.positions:
            left = self.positions - longest_prompt
            raise ValueError(
                f"the longest prompt has {longest_prompt} tokens and a response may have {key}={response_length}, but "
                f"the model {self.path!r} has {self.positions} positions (max_position_embeddings): "
                f"{f'set {key}={left}, or ' if left > 0 else ''}{instead}"
            )

    def check_sequence_length(self, longest: int, key: str) -> None:
        """Raise ValueError if a sequence of `longest` tokens has more tokens than the model has positions."""
        if self.positions is not None and longest > self.positions:
            raise ValueError(
                f"the longest sequence has {longest} tokens, but the model {self.path!r} has {self.positions} "
                f"positions (max_position_embeddings): set {key}={self.positions}"
            )

    def check_engine(self, name: str) -> None:
        """Raise ValueError if the rollout engine `name` does not support the architecture."""
        if name == "native":
            for architecture in self.architectures:
                if architecture.endswith(("ForCausalLM", "LMHeadModel")):  # other heads are ignored when it is loaded
                    family_of(architecture)
