"""What a rollout engine offers: token ids in, token ids and log-probs out. It knows no text and no DataProto."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from verl.rollout.stop_strings import StopStrings


@dataclass(frozen=True)
class SamplingParams:
    """How answers are drawn.

    max_tokens: response tokens at most, the end token among them. temperature: 0 is greedy. top_k: -1 is off.
    seed: with a row's `sample_id`, fixes its random numbers. stop_token_ids: a row ends with the first of these, which
    belongs to the answer. ignore_eos: go on to max_tokens (benchmarks). stop: texts that end an answer, too.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop: StopStrings | None = None

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
        ):
            if not fits:
                raise ValueError(f"sampling: {name} must be {expected}, found {self.__dict__[name]}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether tokens are excluded, so that log-probs are not those of the model's distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass
class Generation:
    """One answer. token_ids and log_probs are of one length; log_probs are of the distribution that was
    sampled from (after temperature, top-k, top-p, min-p), and of the unscaled distribution when greedy.
    finish_reason: "stop" (an end token or text) or "length"."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


@dataclass
class RolloutStats:
    """What a generate call did, for the metrics: tokens made, decoding steps, seconds."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


class RolloutEngine(ABC):
    """Generates answers to prompts. After `generate`, `stats` tells what it did.

    copies_weights: it has weights of its own, which `load_weights` must fill after each `wake`.
    """

    copies_weights: bool = False
    stats: RolloutStats

    @abstractmethod
    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, sample_ids: Sequence[int] | None = None
    ) -> list[Generation]:
        """One answer per prompt, in the order of the prompts.

        prompts: token ids, not padded, none empty. Equal prompts are samples of one group: the engine may share work.
        sample_ids: one integer per row that, with params.seed, fixes its random numbers; None is 0, 1, 2 ...
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights, (HuggingFace name, tensor). An engine on the trainer's own module has nothing to copy."""

    @abstractmethod
    def sleep(self) -> None:
        """Give back the memory that only generation needs."""

    @abstractmethod
    def wake(self) -> None:
        """Be ready to generate again."""
