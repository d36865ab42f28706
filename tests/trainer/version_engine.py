"""A rollout engine for tests of asynchronous training: every token it samples is 1 + the version of its weights."""

import asyncio
import time
from collections.abc import Iterable

import torch

from verl.rollout.base import RolloutEngine, register_rollout_engine
from verl.rollout.request import Completion, Request
from verl.utils.rng import fork_seed

SECONDS_PER_TOKEN = 0.004


class VersionEngine(RolloutEngine):
    """Samples responses of 1 to max_tokens tokens. Its log-probs are those of a uniform distribution of 8 tokens.

    One of 8 requests stops after two tokens until a push of weights interrupts it, for at most `hold` seconds; requests
    that continue others do not, nor those of version 0: step 1 waits for all responses of the first prompts.
    """

    samples_policy = False
    hold = 0.0

    #: when tokens were sampled, by time.perf_counter; of all engines of this process
    times: list[float] = []
    #: raised by the request with this number, if there is one
    fail_at: tuple[int, BaseException] | None = None
    requests = 0

    def __init__(self) -> None:
        self._aborted = 0
        self._running = self._held = self._longest = 0

    @property
    def all_held(self) -> bool:
        """Whether every running request waits for a push."""
        return 0 < self._running == self._held

    async def generate_one(self, request: Request) -> Completion:
        VersionEngine.requests += 1
        if self.fail_at is not None and VersionEngine.requests == self.fail_at[0]:
            raise self.fail_at[1]
        count = 1 + fork_seed(request.sample_id) % request.params.max_tokens
        self._longest = max(self._longest, request.params.max_tokens)
        held = request.params.max_tokens == self._longest and fork_seed("held", request.sample_id) % 8 == 0
        held = held and self.weight_version > 0
        tokens, aborted = [], self._aborted
        self._running += 1
        try:
            while len(tokens) < count and self._aborted == aborted:
                await asyncio.sleep(SECONDS_PER_TOKEN)
                tokens.append(1 + self.weight_version)
                self.times.append(time.perf_counter())
                end = time.monotonic() + self.hold
                self._held += held
                while held and len(tokens) == 2 and self._aborted == aborted and time.monotonic() < end:
                    await asyncio.sleep(SECONDS_PER_TOKEN)
                self._held -= held
        finally:
            self._running -= 1
        reason = "abort" if len(tokens) < count else "length" if count == request.params.max_tokens else "stop"
        return Completion(tokens, [-2.0794415] * len(tokens), reason)

    def abort(self, request_ids=None) -> None:
        self._aborted += 1

    def receiver(self) -> "VersionEngine":
        return self

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        assert not self._running, "weights are replaced while a request is running"
        for _ in weights:
            pass

    def release(self) -> None:
        """Nothing to free."""


@register_rollout_engine("version")
def make_version_engine(config, model, env, train_engine=None) -> VersionEngine:
    return VersionEngine()
