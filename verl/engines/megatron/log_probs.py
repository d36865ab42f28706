"""Log-probs and entropies of logits whose vocabulary is sharded over tensor-parallel ranks.

S: selected states; V: vocabulary; v: the entries of one rank. x: logits / temperature; p: softmax(x); H: entropy.
The logits stay sharded: three reductions of (S,) tensors combine the ranks (maximum, sums, target).
"""

import torch
import torch.distributed as dist

Wanted = tuple[bool, bool, bool]


class ShardedStatistics(torch.autograd.Function):
    """(log-probs, entropies, sums of squared probabilities), each (S,), of logits (S, v) on each rank.

    The gradient of the logits is that of the rank's own entries; every rank computes the same loss.
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
        x = _scaled(logits, temperature)
        top = x.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        e = (x - top[:, None]).exp_()
        own = (targets >= first) & (targets < first + x.shape[1])
        local = torch.where(own, targets - first, 0)
        # one reduction for all sums: of e, e x, e^2 and the target's x
        sums = [e.sum(-1), x.gather(-1, local[:, None])[:, 0].masked_fill(~own, 0)]
        if wanted[1]:
            sums.append((e * x).nansum(-1))  # an entry of -inf (padding of the vocabulary) contributes nothing
        if wanted[2]:
            sums.append(e.square().sum(-1))
        reduced = torch.stack(sums)
        dist.all_reduce(reduced, group=group)
        total, target, *rest = reduced
        lse = top + total.log()
        entropys = lse - rest.pop(0) / total if wanted[1] else torch.zeros_like(lse)
        squares = rest.pop(0) / total.square() if wanted[2] else torch.zeros_like(lse)
        ctx.save_for_backward(logits, local, own, lse, entropys, squares)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return target - lse, entropys, squares

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """d log p_y / dx = 1[y] - p;  d H / dx = -p (log p + H);  d sum p^2 / dx = 2 p (p - sum p^2)."""
        logits, local, own, lse, entropys, squares = ctx.saved_tensors
        log_p = _scaled(logits, ctx.temperature) - lse[:, None]
        p = log_p.exp()
        factor = torch.zeros_like(p)
        if gradients[0] is not None:
            factor -= gradients[0][:, None]
        if gradients[1] is not None:
            finite = log_p.masked_fill(log_p == float("-inf"), 0)
            factor -= gradients[1][:, None] * (finite + entropys[:, None])
        if gradients[2] is not None:
            factor += gradients[2][:, None] * 2 * (p - squares[:, None])
        found = p.mul_(factor)
        if gradients[0] is not None:
            found.scatter_add_(1, local[:, None], (gradients[0] * own)[:, None])
        return found.div_(ctx.temperature).to(logits.dtype), None, None, None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
