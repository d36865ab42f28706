"""Log-probs and entropies of logits whose vocabulary is sharded over tensor-parallel ranks.

S: selected states; v: the entries of one rank. The logits stay sharded: the ranks exchange four values per state.
"""

import torch
import torch.distributed as dist

from verl.modeling.log_probs import gradient_of_logits, logit_statistics

Wanted = tuple[bool, bool, bool]


class ShardedStatistics(torch.autograd.Function):
    """(log-probs, entropies, sums of squared probabilities), each (S,), of logits (S, v) on each rank.

    With the log-sum-exp l_i, the entropy H_i and the sum of squares q_i of the entries of rank i, and their share of
    the probability w = softmax(l): H = sum w_i (H_i - log w_i), q = sum w_i^2 q_i.

    The gradient of the logits is that of the rank's own entries; every rank computes the same loss. v may be 0.
    """

    @staticmethod
    def forward(
        ctx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        wanted: Wanted,
        first: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, ...]:
        own = (targets >= first) & (targets < first + logits.shape[1])
        local = torch.where(own, targets - first, -1)
        if logits.shape[1]:
            lse, log_probs, *rest = logit_statistics(logits, local.clamp(min=0), temperature, wanted)
        else:
            wide = torch.promote_types(logits.dtype, torch.float32)
            lse = torch.full(local.shape, float("-inf"), dtype=wide, device=local.device)
            log_probs, *rest = (torch.zeros_like(lse) for _ in range(3))
        target = torch.where(own, lse + log_probs, 0)
        every = torch.empty(group.size(), 4, len(lse), dtype=lse.dtype, device=lse.device)
        dist.all_gather_into_tensor(every.flatten(0, 1), torch.stack([lse, target, *rest]), group=group)
        lses, chosen, entropys, squares = every.unbind(1)
        lse = lses.logsumexp(0)
        log_shares = lses.log_softmax(0)
        shares = log_shares.exp()
        # a rank without entries has no share, and a log-sum-exp of -inf
        terms = torch.where(shares > 0, entropys - log_shares, 0)
        entropy = (shares * terms).sum(0) if wanted[1] else torch.zeros_like(lse)
        square = (shares.square() * squares).sum(0)
        ctx.save_for_backward(logits, local, lse, entropy, square)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen.sum(0) - lse, entropy, square

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits = ctx.saved_tensors[0]
        if not logits.shape[1]:
            return torch.zeros_like(logits), None, None, None, None, None
        return gradient_of_logits(*ctx.saved_tensors, gradients, ctx.temperature), None, None, None, None, None
