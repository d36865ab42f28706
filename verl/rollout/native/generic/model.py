"""A model of transformers as the engine sees it: its forward pass, and what its layers cache."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.modeling.attention import pack, unpack
from verl.modeling.moe import install_routing
from verl.modeling.packing import Packing, to_device
from verl.modeling.vision import attention_of
from verl.rollout.native.decoder import position_limit
from verl.rollout.native.generic.attention import NAME, ForwardPass, causal_attention, expand, running
from verl.rollout.native.generic.cache import Layout, StateKey
from verl.rollout.native.generic.layers import adapted, has_latents
from verl.rollout.native.generic.support import (
    CACHE_ARGUMENTS,
    NO_INTERFACE,
    OWN_STATES,
    check_modules,
    unsupported,
)
from verl.rollout.native.model import SHARDED
from verl.rollout.native.torch_decoder import PREFILL_TOKENS, prefill_batch_size
from verl.rollout.tensor_parallel import ALONE

#: stores keys (N, HK, DK) and values (N, HK, DV) of a layer
Store = Callable[[int, torch.Tensor, torch.Tensor], None]


class PromptPass(ForwardPass):
    """The forward pass over prompts: packed into one row, or prompts of equal length as rows."""

    def __init__(self, layout: Layout, lengths: Sequence[int], is_packed: bool, store: Store, device: torch.device):
        self.width = max(lengths)
        self.store = store
        self.packing = to_device(Packing.from_lengths(torch.tensor(lengths)), device) if is_packed else None
        self.cache = layout.cache(self)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ForwardPass.write`."""
        self.store(layer, *(each.transpose(1, 2).flatten(0, 1) for each in (keys, values)))
        return keys, values

    def query_positions(self, device: torch.device) -> torch.Tensor:
        """See `ForwardPass.query_positions`. One mask for all prompts, since they start at position 0."""
        return torch.arange(self.width, device=device)[None]

    def attend(self, module, query, key, value, mask, scores) -> torch.Tensor:
        """See `ForwardPass.attend`."""
        query, key = query.to(value.dtype), key.to(value.dtype)
        if self.packing is None:
            return causal_attention(query, key, value, mask, scores).transpose(1, 2)
        query, key, value = (unpack(each, self.packing) for each in (query, key, value))
        return pack(causal_attention(query, key, value, mask, scores), self.packing)


class _Probe(PromptPass):
    """The forward pass over a prompt of two tokens that finds out what the layers cache."""

    def __init__(self, layout: Layout, device: torch.device):
        super().__init__(layout, [2], True, self._record, device)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.calls = 0
        self.is_plain = True
        self.returned: list[torch.Tensor] = []

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ForwardPass.write`."""
        self.returned += [keys, values]
        return super().write(layer, keys, values)

    def _record(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layer], self.values[layer] = keys[0].to("meta"), values[0].to("meta")

    def attend(self, module, query, key, value, mask, scores) -> torch.Tensor:
        """See `ForwardPass.attend`."""
        self.calls += 1
        unchanged = [any(each is returned for returned in self.returned) for each in (key, value)]
        self.is_plain &= all(unchanged) or has_latents(module)
        if mask is not None and not mask.is_meta and bool(mask[..., 0, 1].any()):
            raise ValueError("its attention is bidirectional")
        return super().attend(module, query, key, value, mask, scores)


class ModuleDecoder:
    """A model that generates with its own modules. Has what the engine and the schedulers read of a `Decoder`.

    Args:
        module: the model, unsharded, on one device.
        dtype: dtype of the parameters that compute; None for those of `module`. Any other is a copy (`update`).
        records: keep the choices of the routers.

    Raises:
        ValueError: the model cannot run.
    """

    tp, vision, final_softcap, attention_softcap = ALONE, None, None, None

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None, records: bool = False):
        self.source = module
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                raise ValueError(SHARDED.format(name))
        self.module = module if dtype is None else _copy(module, dtype)
        self.dtype = next(self.module.parameters()).dtype
        self.routing = install_routing(self.module) if records else None
        #: choices of the routers in the last forward pass, (N, layers, k) int16
        self.routed_experts: torch.Tensor | None = None
        self.embedding = self.module.get_input_embeddings().weight
        self.hidden_size = self.embedding.shape[1]
        ends = {id(part) for part in (self.embedding, self.module.get_output_embeddings().weight)}
        wide = [max(p.shape[-2:]) for p in self.module.parameters() if p.dim() > 1 and id(p) not in ends]
        self.mlp_width = max(wide, default=self.hidden_size)
        self.max_positions, self.max_positions_reason = position_limit(module.config.get_text_config())
        arguments = inspect.signature(type(module).forward).parameters
        self._cache_argument = next(name for name in CACHE_ARGUMENTS if name in arguments)
        self._takes_positions = "position_ids" in arguments
        self._takes_kept = "logits_to_keep" in arguments
        self.layout = Layout.from_config(self.module.config)
        self.layout, self.vocab_size = self._probe()

    def update(self) -> None:
        """Copy the parameters, if this decoder has its own."""
        if self.module is not self.source:
            with torch.no_grad():
                for copied, parameter in zip(self.module.parameters(), self.source.parameters(), strict=True):
                    copied.copy_(parameter)

    @property
    def routed_experts_shape(self) -> tuple[int, int]:
        """Layers with experts, and experts per token."""
        return self.routing.layers, self.routing.top_k

    def cache_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.layout.token_bytes

    @property
    def cache_bytes_per_row(self) -> int:
        """Bytes of the states of one row."""
        return self.layout.row_bytes

    @property
    def max_heads(self) -> int:
        """Largest number of query heads per key head, as far as the config says."""
        config = self.module.config.get_text_config().to_dict()
        return config.get("num_attention_heads") or 1

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the parameters, which captured graphs contain."""
        return tuple(parameter.data_ptr() for parameter in self.module.parameters())

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Context in which the modules call the attention of this package."""
        module, config = self.module, self.module.config
        attention, training = attention_of(config), module.training
        if any(has_keys for has_keys, _ in self.layout.layers):  # otherwise transformers logs a warning
            module.set_attn_implementation(NAME)
        module.eval()
        try:
            with adapted(module, expand):
                yield
        finally:
            module.set_attn_implementation(attention)
            module.train(training)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        forward_pass: ForwardPass,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model over ids (b, T) at positions (b, T).

        positions: None for those of the model.
        kept: the columns of the logits that are returned; None: the last.

        Returns:
            (b, V), or (b kept, V).
        """
        arguments: dict[str, Any] = {self._cache_argument: forward_pass.cache, "use_cache": True}
        if self._takes_positions and positions is not None:
            arguments["position_ids"] = positions
        if kept is None and ids.shape[1] > 1:
            kept = torch.tensor([ids.shape[1] - 1], device=ids.device)
        if self._takes_kept:  # for a number, some models do not compute the other tokens in all layers
            arguments["logits_to_keep"] = 1 if kept is None else kept
        if self.routing is None:
            with running(forward_pass):
                logits = self.module(ids, **arguments).logits
        else:
            with running(forward_pass), self.routing.logging() as choices:
                logits = self.module(ids, **arguments).logits
            self.routed_experts = torch.stack(choices, 1).to(torch.int16)
        if not self._takes_kept:
            logits = logits if kept is None else logits[:, kept]
        return logits.flatten(0, 1)

    def prefill(
        self, prompts: list[list[int]], storing: Callable[[list[int]], Store]
    ) -> tuple[torch.Tensor, list[dict[StateKey, torch.Tensor]], list[torch.Tensor]]:
        """Compute prompts. storing: returns the function that stores the tokens of those of some indices.

        Returns:
            Logits (len(prompts), V) float32 after the prompts, their states, and the choices of the routers for them
            (tokens, layers, k), empty if these are not recorded.
        """
        device = self.embedding.device
        logits = torch.empty(len(prompts), self.vocab_size, device=device)
        states: list[dict[StateKey, torch.Tensor]] = [{} for _ in prompts]
        routed: list[torch.Tensor] = [] if self.routing is None else [logits] * len(prompts)
        for indices in self._batches([len(prompt) for prompt in prompts]):
            batch = [prompts[i] for i in indices]
            lengths = [len(prompt) for prompt in batch]
            is_packed = not self.layout.has_states
            forward_pass = PromptPass(self.layout, lengths, is_packed, storing(indices), device)
            ids = torch.tensor([token for prompt in batch for token in prompt], device=device)
            positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
            shape = (1 if is_packed else len(batch), -1)
            kept = torch.tensor(lengths, device=device).cumsum(0) - 1 if is_packed else None
            result = self.forward(ids.view(shape), positions.view(shape), forward_pass, kept)
            logits[torch.tensor(indices, device=device)] = result.float()
            batch_states = self.layout.states_of(forward_pass.cache)
            for row, i in enumerate(indices):
                states[i] = {key: state[row] for key, state in batch_states.items()}
            if routed:
                for i, choices in zip(indices, self.routed_experts.split(lengths), strict=True):
                    routed[i] = choices
        return logits, states, routed

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Indices of the prompts of each forward pass. Of equal length if there are states."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while order:
            if self.layout.has_states:
                longest = lengths[order[0]]
                equal = sum(lengths[i] == longest for i in order)
                count = min(equal, max(1, PREFILL_TOKENS // longest))
            else:
                count = prefill_batch_size([lengths[i] for i in order])
            yield order[:count]
            order = order[count:]

    @torch.inference_mode()
    def _probe(self) -> tuple[Layout, int]:
        """What the layers cache, and the number of tokens. Raises ValueError if the engine cannot run the model."""
        layout, device = self.layout, self.embedding.device
        probe = _Probe(layout, device)
        ids, positions = torch.tensor([[3, 4]], device=device), torch.arange(2, device=device)[None]
        reason = None
        try:
            with self.generating():
                logits = self.forward(ids, positions, probe)
                usual = self.forward(ids, None, _Probe(layout, device))
        except (ValueError, IndexError, TypeError, AttributeError) as error:
            raise unsupported(type(self.module).__name__, str(error)) from error
        if reason is None and probe.calls < len(probe.keys):
            reason = NO_INTERFACE
        if reason is None and len(probe.cache.layers) != len(layout.layers):
            reason = "its forward method adds layers to the cache"
        has_values = device.type != "meta"
        if reason is None and has_values and not torch.allclose(logits, usual, rtol=1e-2, atol=1e-2, equal_nan=True):
            reason = "its positions do not start at 0"
        states = {key: state[0].to("meta") for key, state in layout.states_of(probe.cache).items()}
        if reason is None and layout.has_states and not states:
            reason = OWN_STATES
        if reason is not None:
            raise unsupported(type(self.module).__name__, reason)
        layout = replace(layout, keys=probe.keys, values=probe.values, states=states, is_plain=probe.is_plain)
        return layout, logits.shape[-1]


def check_forward(model_class: type, config: Any) -> None:
    """`check_modules`, and what a forward pass without weights shows."""
    check_modules(model_class, config)
    if type(config) is not model_class.config_class:
        return  # that of a part of the model
    with torch.device("meta"):
        module = model_class(config)
    try:
        ModuleDecoder(module)
    except (RuntimeError, NotImplementedError):  # it needs values; the engine finds out
        return


def _copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model whose parameters have another dtype; buffers keep theirs."""
    # a copied parameter is the entry of its address in the memo
    with torch.inference_mode(False), torch.no_grad():
        floats = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
        return copy.deepcopy(module, {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in floats})
