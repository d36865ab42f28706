"""The canary: a fixed prompt that shows whether the rollout engine generates with the current weights.

After the first weight push and every `rollout.check_every` steps, every DP rank of the rollout generates a short greedy
response, and the training engine computes the log-probs of its tokens. The run stops if

- they differ by more than rounding does (`_LIMITS`). At the first check, after a push that has compared the weights,
  the engine computes something else with the same weights; or
- the engine kept the weights of the last check although training has changed the log-probs: the engine returns the same
  response again, with log-probs that are exactly, or nearly, as they were.

The second test finds old weights where one update changes less than rounding does, as in bfloat16 with a small learning
rate. Nothing is sampled, so the random numbers of the run do not change.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.rollout.request import Completion
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.guards.mismatch import CAUSES, RolloutMismatchError
from verl.weight_sync.base import is_check_due

#: tokens of the prompt and of the response
_TOKENS = 16
#: dtype -> largest (mean, maximum) difference of log-probs due to rounding. About 100 times what is measured in float32
#: and 25 times in bfloat16 (docs/rollout.md). The mean is of `_TOKENS`; that of fewer may be larger
_LIMITS = {"float32": (2e-3, 2e-2), "16 bits": (0.1, 1.0)}
#: dtype -> mean change of the trainer's log-probs above which an update must have caused it
_CHANGED = {"float32": 1e-5, "16 bits": 1e-3}
#: times less than those of the trainer, and of at least half of `_TOKENS`: changes of the engine that has old weights.
#: It computes the same again, but for kernels that add in another order each time
_NEARLY = 8.0


class StaleWeightsError(RolloutMismatchError):
    """The rollout engine does not generate with the weights of the trainer."""


@dataclass
class _Check:
    """What one DP rank of the rollout generated, and the trainer's log-probs of the same tokens."""

    version: int
    tokens: list[int]
    rollout: torch.Tensor
    trained: torch.Tensor

    @property
    def mismatch(self) -> torch.Tensor:
        return (self.rollout - self.trained).abs()


class Canary:
    """Compares the log-probs of the rollout engine and of the training engine.

    Args:
        roles: the roles actor and rollout.
        every: steps between two checks; 0: none.
        vocab_size: token ids of the prompt are below it.
        prompt_length, response_length: longest prompt and response of the engine.
        rounding: how many times larger differences due to rounding are than `_LIMITS` expects.
    """

    def __init__(
        self,
        roles: Mapping[str, WorkerGroup],
        every: int,
        *,
        vocab_size: int,
        prompt_length: int,
        response_length: int,
        rounding: float = 1.0,
    ):
        self.roles = roles
        self.every = every
        self.prompt = [(7 + 37 * i) % vocab_size for i in range(min(_TOKENS, prompt_length))]
        self.max_tokens = min(_TOKENS, response_length)
        self.kind, self.rounding = "float32", rounding
        self.reset()

    def reset(self) -> None:
        """Forget the last checks, for new workers."""
        self._last: dict[int, _Check] = {}  # by DP rank

    def is_due(self, version: int) -> bool:
        """Whether the weights of this version are checked: the first ones of the process, then at multiples."""
        last = max((check.version for check in self._last.values()), default=None)
        return is_check_due(version, last, self.every)

    def check(self, version: int) -> dict[str, float]:
        """Check every DP rank of the rollout.

        Returns:
            The metric weight_sync/canary_mismatch; empty if the engine does not generate with the policy.

        Raises:
            RolloutMismatchError: an engine computes other log-probs.
            StaleWeightsError: it has old weights.
        """
        completions: list[Completion | None] = self.roles["rollout"].canary_response(self.prompt, self.max_tokens)
        if any(completion is None for completion in completions):
            self.every = 0
            return {}
        old = [self._last.get(rank) for rank in range(len(completions))]
        # the old responses too: their log-probs show what training has changed
        responses = [c.token_ids for c in completions] + [check.tokens for check in old if check is not None]
        trained = self._training_log_probs(responses)
        mismatches = []
        for rank, completion in enumerate(completions):
            check = _Check(version, completion.token_ids, torch.tensor(completion.log_probs), trained[rank])
            if old[rank] is not None:
                at = len(completions) + sum(c is not None for c in old[:rank])
                self._compare_with_old(rank, check, old[rank], trained[at])
            self._compare(rank, check)
            self._last[rank] = check
            mismatches.append(float(check.mismatch.mean()))
        return {"weight_sync/canary_mismatch": max(mismatches)}

    def _training_log_probs(self, responses: list[list[int]]) -> list[torch.Tensor]:
        """The training engine's log-probs of each response. Sets `kind`, the precision of the comparison."""
        unique = list(dict.fromkeys(map(tuple, responses)))  # DP ranks with the same weights respond the same
        columns = build_sequences([self.prompt] * len(unique), unique, pad_token_id=0)
        log_probs, *_ = self.roles["actor"].canary_log_probs(DataProto.from_dict(columns))
        self.kind = "16 bits" if any(self.roles["actor"].computes_in_16_bits()) else "float32"
        return [log_probs[unique.index(tuple(response))][: len(response)] for response in responses]

    def _compare(self, rank: int, check: _Check) -> None:
        mean, largest = float(check.mismatch.mean()), float(check.mismatch.max())
        limits = [self.rounding * limit for limit in _LIMITS[self.kind]]
        limits[0] *= math.sqrt(_TOKENS / len(check.tokens))
        if mean <= limits[0] and largest <= limits[1]:
            return
        subject, weights = f"rollout DP rank {rank}", f"the weights of version {check.version}"
        difference = (
            f"its log-probs of a greedy response differ from those of the trainer by {mean:.3g} on average and "
            f"{largest:.3g} at most, expected at most {limits[0]:.2g} and {limits[1]:g} ({self.kind})"
        )
        if (old := self._last.get(rank)) is not None:  # so the computation is the same
            problem = (
                f"but did with those of version {old.version}: a push does not update a copy that it computes with"
            )
        elif self.roles["rollout"].has_compared_weights()[rank]:
            raise RolloutMismatchError(
                f"{subject} has {weights}, but computes something else with them: {difference}. {CAUSES}. {_ADVICE}"
            )
        else:
            problem = (
                "and they cannot be compared: its receiver() is no StoredWeights. Check that it loads every one; "
                f"otherwise its computation differs. {CAUSES}"
            )
        raise StaleWeightsError(f"{subject} does not generate with {weights}, {problem}; {difference}. {_ADVICE}")

    def _compare_with_old(self, rank: int, check: _Check, old: _Check, trained: torch.Tensor) -> None:
        """trained: the current log-probs of the old response."""
        changed = float((trained - old.trained).abs().mean())
        if check.tokens != old.tokens or changed <= self.rounding * _CHANGED[self.kind]:
            return
        engine_changed = float((check.rollout - old.rollout).abs().mean())
        if engine_changed == 0 or (len(old.tokens) * 2 >= _TOKENS and engine_changed * _NEARLY < changed):
            raise StaleWeightsError(
                f"rollout DP rank {rank} still generates with the weights of version {old.version}, expected version "
                f"{check.version}: training has changed the log-probs of its greedy response by {changed:.3g} on "
                f"average, but those of the rollout engine changed by {engine_changed:.3g}. Check the receiver() of "
                f"the rollout engine. {_ADVICE}"
            )


_ADVICE = (
    "An engine that does not generate with the policy sets samples_policy = False. If it computes another distribution "
    "on purpose, such as with quantized weights, set actor_rollout_ref.rollout.check_every=0"
)
