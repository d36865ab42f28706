"""Decoding on a CPU: a slot is a page that holds the keys and values of one row, position p in column p."""

import sys

import torch

from verl.rollout.native.generic.attention import ForwardPass, attention
from verl.rollout.native.generic.cache import Pages, RowStates
from verl.rollout.native.generic.layers import has_latents, latent_query, values_of_latents
from verl.rollout.native.generic.model import ModuleDecoder, Store
from verl.rollout.sampling import choose


class ModuleCache:
    """Keys, values and states of `slots` rows of up to `length` tokens."""

    def __init__(self, decoder: ModuleDecoder, slots: int, length: int):
        self.device, self.dtype = decoder.embedding.device, decoder.dtype
        self.pages = Pages(decoder.layout, slots, length, self.device)
        self.states = RowStates(decoder.layout, slots, self.device)
        self.slots, self.length = slots, length

    def copy_from(self, other: "ModuleCache") -> None:
        """Copy the rows of a smaller cache, which stay in their slots."""
        for layer, joint in self.pages.joint.items():
            joint[: other.slots, :, : other.length] = other.pages.joint[layer]
        for key, state in self.states.tensors.items():
            state[: other.slots] = other.states.tensors[key]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move the rows of the slots `sources` (n,) to the slots `targets` (n,), which are others."""
        for joint in self.pages.joint.values():
            joint[targets] = joint[sources]
        self.states.move(sources, targets)


class SlotPass(ForwardPass):
    """Decoding steps of rows 0 .. B - 1, whose tokens are at `positions` (B, Q)."""

    def __init__(self, decoder: ModuleDecoder, cache: ModuleCache, positions: torch.Tensor):
        self.pages = cache.pages
        self.rows = torch.arange(len(positions), device=cache.device)
        self.cache = decoder.layout.cache(self, cache.states.first(len(positions)))
        self.is_even = positions.shape[1] == 1 and bool((positions == positions[:1]).all())
        self.set_positions(positions)

    def set_positions(self, positions: torch.Tensor) -> None:
        """Start a step."""
        self.positions = positions
        self.width = int(positions.max()) + 1 if len(positions) else 1
        self.length = self.width - positions.shape[1]
        self.causal: torch.Tensor | None = None
        if not self.is_even:
            self.causal = (torch.arange(self.width, device=positions.device) <= positions[..., None])[:, None]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ForwardPass.write`. Returns all keys and values of the rows."""
        stored = self.pages.keys[layer], self.pages.values[layer]
        for pages, new in zip(stored, (keys, values)):
            pages[self.rows[:, None], :, self.positions] = new.transpose(1, 2).to(pages.dtype)
        return tuple(pages[: len(self.rows), :, : self.width] for pages in stored)

    def expand(self, module, latents, rotated) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ForwardPass.expand`. Keys and values stay latent."""
        return latents, rotated

    def query_positions(self, device: torch.device) -> torch.Tensor:
        """See `ForwardPass.query_positions`."""
        return self.positions

    def attend(self, module, query, key, value, mask, scores) -> torch.Tensor:
        """See `ForwardPass.attend`."""
        mask, query = self.causal if mask is None else mask, query.to(key.dtype)
        if not has_latents(module):
            return attention(query, key, value, mask, scores).transpose(1, 2)
        latents, joint = key, self.pages.joint[module.layer_idx][: len(self.rows), :, : self.width]
        attended = attention(latent_query(module, query), joint, latents, mask, scores)
        return values_of_latents(module, attended).transpose(1, 2)


class ModuleSlotDecoder:
    """Like `torch_decoder.TorchDecoder`, but runs the modules of a model."""

    choose = staticmethod(choose)
    table_length = sys.maxsize  # the model has its own rotary tables

    def __init__(self, decoder: ModuleDecoder, cache: ModuleCache):
        self.decoder = decoder
        self.cache = cache
        self.records = decoder.routing is not None
        self.prompt_experts: list[torch.Tensor] = []
        self.start_step_at(torch.zeros(0, dtype=torch.int64))

    @property
    def step_experts(self) -> torch.Tensor:
        """Choices of the routers in the last step, (B, layers, k)."""
        return self.decoder.routed_experts

    def prefill(self, prompts: list[list[int]], slots: list[list[int]]) -> torch.Tensor:
        """Prefill each prompt once, with keys, values and states for all its `slots`. Returns logits (len(prompts), V)
        float32."""

        def storing(indices: list[int]) -> Store:
            copies = [[[slot] for slot in slots[i]] for i in indices]
            return self.cache.pages.storing([len(prompts[i]) for i in indices], copies, self.cache.device)

        logits, states, self.prompt_experts = self.decoder.prefill(prompts, storing)
        rows = [(slot, state) for targets, state in zip(slots, states) for slot in targets]
        self.cache.states.fill(*zip(*rows))
        return logits

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move the rows of the slots `sources` (n,) to the slots `targets` (n,), which are others."""
        self.cache.move(sources, targets)

    def start_step_at(self, positions: torch.Tensor) -> None:
        """Set the positions (B,) of rows 0 .. B - 1 for the next `step`; each step advances them by one."""
        self.step_pass = SlotPass(self.decoder, self.cache, positions[:, None].clone())

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Decode one step. tokens: (B,) of rows 0 .. B - 1. Returns logits (B, V) float32."""
        step_pass = self.step_pass
        logits = self.decoder.forward(tokens[:, None], step_pass.positions, step_pass)
        step_pass.set_positions(step_pass.positions + 1)
        return logits.float()

    def verify(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Decode tokens (B, Q) at consecutive positions (B, Q) of rows 0 .. B - 1. Returns logits (B Q, V) float32."""
        # drafts behind the longest sequence are not accepted
        known = positions.clamp_max(self.decoder.max_positions - 1)
        step_pass, kept = SlotPass(self.decoder, self.cache, positions), torch.arange(tokens.shape[1])
        return self.decoder.forward(tokens, known, step_pass, kept.to(tokens.device)).float()
