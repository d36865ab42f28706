"""The filters top-k, top-p and min-p, and statistics of the distribution over the tokens that they keep.

A response that is sampled with a filter follows softmax(x) over the kept tokens, x: logits / temperature. A policy
gradient of it needs the log-probs of that distribution. The set of kept tokens is recorded once, with the policy before
the update, and stays the same while the policy changes ("keep sampling mask" of DeepSeek-V3.2, arXiv 2512.02556): the
filter of the updated policy could drop a token that was sampled.

B samples, T response tokens, V vocabulary, S states, K: the largest number of tokens kept at one of them.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from verl.modeling.packing import ModelInput

#: in vocabularies above _LARGE, top-p looks at the _NUCLEUS most probable tokens first, and sorts a row completely if
#: it needs more
_LARGE, _NUCLEUS = 4096, 256
#: padding of token ids
NO_TOKEN = -1


@dataclass(frozen=True)
class TokenFilter:
    """The filters of sampling; the defaults are off."""

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """(S, V) float logits, divided by the temperature -> the same, -inf for excluded tokens.

        Top-k, top-p and min-p are applied in this order, each to the result of the previous one. The most probable
        token is always kept, and so are ties with the last token kept by top-k or min-p.
        """
        excluded = float("-inf")
        if 0 < self.top_k < logits.shape[-1]:
            top = logits.topk(self.top_k, -1)
            if self.top_p < 1:  # the remaining ones are already sorted
                kept = top.values.masked_fill(_outside(top.values.softmax(-1), self.top_p), excluded)
                logits = torch.full_like(logits, excluded).scatter_(1, top.indices, kept)
            else:
                logits = logits.masked_fill(logits < top.values[:, -1:], excluded)
        elif self.top_p < 1:
            logits = _nucleus(logits, self.top_p)
        if self.min_p > 0:
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(self.min_p), excluded)
        return logits

    def kept_tokens(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Ids (S, K) of the target, which counts as kept, and of all other kept tokens; then NO_TOKEN.

        Args:
            logits: (S, V), divided by the temperature.
            targets: (S,) the sampled tokens.
        """
        scores = self.apply(logits).scatter(1, targets[:, None], float("inf"))
        most = int((scores > float("-inf")).sum(1).max()) if len(scores) else 1
        top = scores.topk(most, -1)
        return top.indices.masked_fill(top.values == float("-inf"), NO_TOKEN)


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Top-p: (B, V) logits, -inf outside the smallest set of tokens with probability of at least top_p."""
    total, vocabulary = logits.logsumexp(-1, keepdim=True), logits.shape[-1]

    def nucleus(rows: torch.Tensor, total: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The filtered logits, and per row whether the top `size` tokens contain the whole nucleus."""
        top = rows.topk(size, -1)
        outside = _outside((top.values - total).exp_(), top_p)
        kept = top.values.masked_fill_(outside, float("-inf"))
        return torch.full_like(rows, float("-inf")).scatter_(1, top.indices, kept), outside[:, -1]

    size = _NUCLEUS if vocabulary > _LARGE else vocabulary
    filtered, complete = nucleus(logits, total, size)
    if size < vocabulary and len(wide := (~complete).nonzero()[:, 0]):
        filtered[wide] = nucleus(logits[wide], total[wide], vocabulary)[0]
    return filtered


def _outside(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """(B, K) probabilities in decreasing order -> True where the preceding tokens already reach top_p."""
    outside = probs.cumsum(-1) - probs >= top_p
    outside[:, 0] = False  # also for a top_p that float32 rounds to 0
    return outside


def kept_statistics(
    logits: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor | TokenFilter, temperature: float
) -> tuple[torch.Tensor, ...]:
    """Log-probs of the targets, entropies, sums of squared probabilities, each (S,) with gradients, and kept (S, K).

    Args:
        logits: (S, V).
        targets: (S,) token ids.
        kept: (S, K) ids, the target first, NO_TOKEN at the end; or the filter that determines them.
        temperature: divides the logits.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(kept, TokenFilter):
        kept = kept.kept_tokens(logits.detach().to(dtype) / temperature, targets)
    x = logits.gather(1, kept.clamp(min=0)).to(dtype) / temperature
    log_p = x.masked_fill(kept == NO_TOKEN, float("-inf")).log_softmax(-1)
    p = log_p.exp()
    # 0 * -inf is NaN, in the gradient too
    return log_p[:, 0], -(p * log_p.masked_fill(kept == NO_TOKEN, 0)).sum(-1), p.square().sum(-1), kept


def pack_kept(model_input: "ModelInput", kept: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns kept_tokens (b, W) and kept_counts (b, T), int32, of a micro-batch.

    Args:
        model_input: the input; with sequence parallelism, the share of this rank.
        kept: (S, K) ids at its states.
    """
    ranks = model_input.packing.ranks if model_input.packing is not None else None
    is_token = kept != NO_TOKEN
    per_state = is_token.sum(1).to(torch.int32)
    counts = model_input.scatter(per_state)
    counts = counts if ranks is None else ranks.sum_of_shares(counts)
    width = int(counts.sum(1).max())
    first = _offsets(counts).flatten()[model_input.slots] + model_input.slots // counts.shape[1] * width
    within = (is_token.cumsum(1) - 1)[is_token]
    tokens = kept.new_zeros(len(counts) * width)
    tokens[first.repeat_interleave(per_state) + within] = kept[is_token] - NO_TOKEN
    tokens = tokens if ranks is None else ranks.sum_of_shares(tokens)
    return {"kept_tokens": (tokens + NO_TOKEN).to(torch.int32).view(-1, width), "kept_counts": counts.to(torch.int32)}


def unpack_kept(tokens: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Ids (S, K) of the kept tokens at some positions; NO_TOKEN after the last one.

    Args:
        tokens, counts: the columns kept_tokens (b, W) and kept_counts (b, T).
        slots: (S,) indices in (b * T).
    """
    size = counts.flatten()[slots].long()
    position = torch.arange(int(size.max()) if len(size) else 1)
    index = _offsets(counts).flatten()[slots][:, None] + position
    row = slots // counts.shape[1]
    ids = tokens[row[:, None], index.clamp(max=tokens.shape[1] - 1)].long()
    return ids.masked_fill(position >= size[:, None], NO_TOKEN)


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """(b, T) counts -> the sum of those before each position of its row, int64."""
    return counts.long().cumsum(1) - counts
