"""What a model can be given: token ids of its vocabulary, and no more of them in a row than it has positions."""

from dataclasses import dataclass
from typing import Any

from verl.config import schema
from verl.rollout.native.model import family_of


@dataclass(frozen=True)
class ModelLimits:
    """Of the model of a `model` section, read from its config: nothing is loaded.

    path: as messages name the model. vocab_size: ids 0 to vocab_size - 1. positions: tokens in a row, None where the
    config sets no limit. architectures: names of the classes that the weights were saved from.
    """

    path: str
    vocab_size: int
    positions: int | None
    architectures: tuple[str, ...]

    @classmethod
    def of(cls, model: schema.ModelConfig) -> "ModelLimits":
        from transformers import AutoConfig

        hf = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).get_text_config()
        positions = {**hf.to_dict(), **model.override_config}.get("max_position_embeddings")
        return cls(model.path, hf.vocab_size, positions, tuple(hf.architectures or ()))

    def check_vocabulary(self, tokenizer: Any, largest_id: int) -> None:
        """The tokenizer is the model's own, or fits it. largest_id: of all texts. Raises ValueError."""
        largest = max(largest_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
        if largest >= self.vocab_size:
            raise ValueError(
                f"the tokenizer gives the token id {largest}, but the model {self.path!r} has the ids 0 to "
                f"{self.vocab_size - 1}: use the tokenizer of this model (model.tokenizer_path)"
            )

    def check_answers(self, longest_prompt: int, answer: int, key: str, instead: str) -> None:
        """There is a position for every token of an answer to the longest prompt. Raises ValueError.

        key: the setting that says how long an `answer` may be. instead: what to do where shorter ones are no help.
        """
        if self.positions is not None and longest_prompt + answer > self.positions:
            left = self.positions - longest_prompt
            raise ValueError(
                f"the longest prompt has {longest_prompt} tokens and an answer may have {key}={answer}, but the model "
                f"{self.path!r} has {self.positions} positions (max_position_embeddings): "
                f"{f'set {key}={left}, or ' if left > 0 else ''}{instead}"
            )

    def check_rows(self, longest: int, key: str) -> None:
        """There is a position for every token of the longest row. Raises ValueError. key: the limit of rows."""
        if self.positions is not None and longest > self.positions:
            raise ValueError(
                f"the longest row has {longest} tokens, but the model {self.path!r} has {self.positions} positions "
                f"(max_position_embeddings): set {key}={self.positions}"
            )

    def check_engine(self, name: str) -> None:
        """The engine of `rollout.name` generates with the model. Raises ValueError."""
        if name == "native":
            for architecture in self.architectures:
                if architecture.endswith(("ForCausalLM", "LMHeadModel")):  # other heads are left out when it is loaded
                    family_of(architecture)
