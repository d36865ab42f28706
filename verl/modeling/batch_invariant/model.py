"""The trainer's forward pass made batch-invariant, and handed to the rollout: `rollout.deterministic`.

Log-probs of sampling can be bit-equal to those of training only if both come from the same operations. So nothing is
computed twice here: generation calls the trainer's own module, token by token, with its rounding, its autocast and its
kernels. What is left is that a token must not notice who is computed with it. In a decoder only four parts of a token's
way read more than that token, or leave the order of a sum to a library:

- linear layers, the head among them: `verl.modeling.batch_invariant.linear.linear`
- attention: `verl.modeling.batch_invariant.attention`, over packed rows in training and the KV cache in
  generation
- norms and log-sum-exp: one kernel program per row on a GPU; on a CPU as ever, and in pieces
- elementwise functions: alike wherever a token stands on a GPU; on a CPU in pieces

`use_invariant` puts them into a module; `Forward` is what the rollout gets. Gradients are the ordinary ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.activations import ACT2FN

from verl.modeling.attention import packed_attention
from verl.modeling.batch_invariant.attention import Attend, Scores, attend_rows
from verl.modeling.batch_invariant.chunked import elementwise
from verl.modeling.batch_invariant.linear import linear, rms_norm, with_gradient_of
from verl.modeling.log_probs import statistics_by
from verl.modeling.packing import Packing

NAME = "verl_invariant"

_ACTIVATIONS = tuple(type(ACT2FN[name]) for name in ("silu", "gelu", "gelu_pytorch_tanh"))


class _Linear:
    """The forward pass of one linear layer. narrow: its parameters in the dtype to compute in, while they hold."""

    def __init__(self, module: nn.Linear):
        self.module = module
        self.narrow: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.narrow or (self.module.weight, self.module.bias)
        dtype = _compute_dtype(x, weight)
        return linear(x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))


def _activation(ordinary: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return ordinary(x) if x.is_cuda else with_gradient_of(ordinary, partial(elementwise, ordinary), x)


def _norm(module: nn.Module, gemma: bool, x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return type(module).forward(module, x)
    if gemma:
        return rms_norm(x, 1 + module.weight.float(), module.eps, x.dtype)
    return rms_norm(x, module.weight, module.variance_epsilon, _compute_dtype(x, module.weight))


def _compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """What the product of x and weight is computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.result_type(x, weight)


def use_invariant(module: nn.Module) -> None:
    """Let a HuggingFace decoder that was built with the attention NAME compute each token alike in every batch."""
    for child in module.modules():
        name = type(child).__name__
        if type(child) is nn.Linear:
            child.forward = _Linear(child)
        elif isinstance(child, _ACTIVATIONS):
            child.forward = partial(_activation, child.forward)
        elif name.endswith("RMSNorm"):
            child.forward = partial(_norm, child, name.startswith("Gemma"))
        elif name.endswith("RotaryEmbedding") and child.rope_type == "longrope":
            # it would ask the device for the last position, which no graph can; rows that are sampled here stay below
            # the one from which on it has other frequencies (the rollout's max_positions)
            child.rope_type = "default"


def invariant_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    attend: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside the rows of `packing`, or by the rollout's `attend`.

    query (1, HQ, N, D), key and value (1, HK, N, D) -> (1, N, HQ, D).
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # as packed_attention
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in inputs)
        if attend is not None:
            return attend(module.layer_idx, q, k, v, scores)[None]
        if packing.keys is None:
            return attend_rows(q, k, v, packing.lengths, scores)[None]
        # rows that share a prompt: each with all of its tokens, then each token once
        rows = (x[packing.keys.source] for x in (q, k, v))
        return attend_rows(*rows, packing.keys.packing.lengths, scores)[packing.keys.one_use][None]

    def ordinary(*inputs: torch.Tensor) -> torch.Tensor:
        return packed_attention(module, *inputs, None, packing, scores.scale, scores.window, scores.softcap)[0]

    return with_gradient_of(ordinary, ours, query, key, value), None


class Forward:
    """A model's forward pass for one who generates with it. N tokens of any rows, V vocabulary.

    model: an `engines.model.TokenModel` whose kernels are "invariant".
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.linears: list[_Linear] = [child.forward for child in model.modules() if type(child) is nn.Linear]
        self._narrow: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.model.autocast_to or self.model.module.dtype

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Weights do not change in here: what is computed in a narrower dtype than theirs is cast once."""
        if self.model.autocast_to is not None:
            self._cast()
            for layer, narrow in zip(self.linears, self._narrow):
                layer.narrow = narrow
        try:
            yield
        finally:
            for layer in self.linears:
                layer.narrow = None

    def _cast(self) -> None:
        """Into the memory of the last time, where there is some: graphs hold its addresses."""
        wide = [(layer.module.weight, layer.module.bias) for layer in self.linears]
        if not self._narrow:
            self._narrow = [tuple(x if x is None else x.detach().to(self.dtype) for x in pair) for pair in wide]
        else:
            for narrow, pair in zip(self._narrow, wide):
                for x, y in zip(narrow, pair):
                    if x is not None:
                        x.copy_(y)

    def release(self) -> None:
        """Give back the memory of cast weights."""
        self._narrow = []

    def states(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """ids, positions (N,) -> hidden states (N, H) after the last norm."""
        with self._autocast():
            return self.model.trunk_of()(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=attend
            ).last_hidden_state[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(N, H) -> (N, V), not scaled by a temperature."""
        with self._autocast():
            return self.model.head(states)

    def log_probs(self, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """Of tokens (N,) under softmax(logits (N, V) / temperature): (N,) float32."""
        found = statistics_by(logits, tokens, temperature, (True, False, False), invariant=True)
        return found[1].float()

    def _autocast(self) -> torch.autocast:
        to, kind = self.model.autocast_to, self.model.module.device.type
        return torch.autocast(kind, to, enabled=to is not None, cache_enabled=False)


AttentionInterface.register(NAME, invariant_attention)
