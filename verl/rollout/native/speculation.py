"""Speculative decoding by prompt lookup: the tokens that followed the last ones earlier in the sequence are drafts, and
one step verifies them behind the next token. (Prompt lookup: Saxena 2023; "ngram" in vLLM.)

Each position of a step samples a token with the random number of that position, as without speculation. A draft is kept
if the token sampled in its place is the same. So a draft x is accepted with probability p(x), and the token that
replaces a rejected one has the distribution p without x, renormalized: the rule of speculative sampling (Leviathan et
al., arXiv:2211.17192) for a deterministic proposal. In addition, tokens and log-probs are the same as without
speculation, up to rounding. B rows, k drafts.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

KEY = "rollout.speculative.method"
#: steps between two decisions whether to verify drafts
INTERVAL = 8
#: rows of a step that cost as much as the step itself: reading the weights, and launching kernels
_FIXED_ROWS = {"cuda": 400, "cpu": 16}
#: factor by which verifying must pay, since drafts have to be found
_MARGIN = 1.1


@dataclass(frozen=True)
class PromptLookup:
    """The source of drafts: the tokens after the latest occurrence of the longest matching n-gram.

    Args:
        tokens: k, drafts per step.
        longest: max length of the n-gram, the last tokens of the sequence.
        shortest: min length of it.
    """

    METHOD = "ngram"

    tokens: int
    longest: int
    shortest: int

    def propose(self, sequences: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences (B, L) of `lengths` (B,) tokens -> drafts (B, k), and which rows have them (B,).

        Beyond the end of the sequence, drafts repeat what follows the occurrence.
        """
        width, end = sequences.shape[1], lengths[:, None] - 1
        at = torch.arange(width, dtype=torch.int32, device=sequences.device)
        is_equal = at < end
        matched = torch.zeros(is_equal.shape, dtype=torch.int32, device=sequences.device)
        for back in range(min(self.longest, width)):
            earlier = F.pad(sequences[:, : width - back], (back, 0), value=-1)
            is_equal = is_equal & (earlier == sequences.gather(1, (end - back).clamp_min(0)))
            matched += is_equal
        best = torch.where(matched >= self.shortest, matched * width + at, -1).amax(1, keepdim=True)
        last = best.remainder(width)
        steps = torch.arange(self.tokens, device=sequences.device)
        source = (last + 1 + steps % (end - last).clamp_min(1)).clamp_max(width - 1)
        return sequences.gather(1, source), best[:, 0] >= 0

    def hindsight(self, sequences: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """How many of the last k tokens would have been accepted as drafts, (B,)."""
        before = (lengths - self.tokens).clamp_min(1)
        drafts, exist = self.propose(sequences, before)
        actual = sequences.gather(1, before[:, None] + torch.arange(self.tokens, device=sequences.device))
        return accepted_drafts(actual, drafts, exist[:, None])

    def pays(self, accepted: float, rows: int, device: str) -> bool:
        """Whether a verifying step of `rows` rows, which accepts so many drafts per row, is faster than plain steps."""
        fixed = _FIXED_ROWS[device]
        return (1 + accepted) * (fixed + rows) > _MARGIN * (fixed + rows * (self.tokens + 1))


def accepted_drafts(sampled: torch.Tensor, drafts: torch.Tensor, is_open: torch.Tensor) -> torch.Tensor:
    """Number of leading drafts (B, k) that are equal to the tokens sampled in their places (B, k), (B,).

    is_open: (B, k) or (B, 1), whether a draft exists, and the row goes on behind it.
    """
    return ((sampled == drafts) & is_open).int().cumprod(1).sum(1)
