"""The input of a forward pass: rows packed without padding, or padded.

Either way the model's hidden states become one list of *selected* states: the ones that predict a response token. So
the last projection, the log-probs and their gradients are computed for response tokens only.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from verl.modeling.indexing import spread_rows
from verl.modeling.sequence_parallel import SequenceRanks
from verl.modeling.shared_prefix import first_with_prompt, lay_out

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Packing:
    """Where the rows of a packed sequence lie. N tokens of b rows, the longest of L tokens.

    slots: (N,) index of each token in the (b * L) right-padded layout. cu_seqlens: (b+1,) int32. lengths: of the rows.
    ranks: those that share the N tokens; None where this process computes them all. keys: what the rows attend to where
    that is more than their own tokens.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    slots: torch.Tensor
    max_length: int
    ranks: SequenceRanks | None = None
    keys: "Keys | None" = None

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, lengths: torch.Tensor) -> "Packing":
        known = tuple(lengths.tolist())
        longest = max(known)
        starts = pad(lengths.cumsum(0), (1, 0))
        rows = torch.arange(lengths.numel(), device=lengths.device)
        row = torch.repeat_interleave(rows, lengths, output_size=sum(known))
        within = torch.arange(row.numel(), device=lengths.device) - starts[row]
        return cls(known, starts.to(torch.int32), row * longest + within, longest)

    def to(self, device: torch.device) -> "Packing":
        """The same with its tensors, which are on the host, on a device."""
        return dataclasses.replace(
            self,
            cu_seqlens=to_device(self.cu_seqlens, device),
            slots=to_device(self.slots, device),
            keys=None if self.keys is None else self.keys.to(device),
        )


@dataclass(frozen=True)
class Keys:
    """The keys and values that packed rows attend to where rows share prompts (`prompt_sharing`), M of N tokens.

    packing: the rows with their prompts. source, one_use, offsets, uses: as `prompt_sharing.Layout` has them.
    """

    packing: Packing
    source: torch.Tensor
    one_use: torch.Tensor
    offsets: torch.Tensor
    uses: torch.Tensor

    def to(self, device: torch.device) -> "Keys":
        """The same with its tensors, which are on the host, on a device."""
        tensors = (self.source, self.one_use, self.offsets, self.uses)
        return Keys(self.packing.to(device), *(to_device(tensor, device) for tensor in tensors))


@dataclass(frozen=True)
class ModelInput:
    """What one forward pass reads, and where its answers go.

    input_ids, position_ids: (1, N) packed or (b, P+T) padded. attention_mask: (b, P+T), or None when packed.
    states: (S,) flat index of the hidden states that predict a response token; targets: (S,) the token each predicts;
    slots: (S,) its index in (b * T). shape: (b, T).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    packing: Packing | None
    states: torch.Tensor
    targets: torch.Tensor
    slots: torch.Tensor
    shape: tuple[int, int]

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """(S,) values of the selected states -> (b, T), 0 elsewhere."""
        return spread_rows(values, self.slots, self.shape[0] * self.shape[1]).view(self.shape)

    def to(self, device: torch.device) -> "ModelInput":
        """The same with its tensors, which are on the host, on a device."""
        mask, packing = self.attention_mask, self.packing
        return dataclasses.replace(
            self,
            input_ids=to_device(self.input_ids, device),
            position_ids=to_device(self.position_ids, device),
            attention_mask=None if mask is None else to_device(mask, device),
            packing=None if packing is None else packing.to(device),
            states=to_device(self.states, device),
            targets=to_device(self.targets, device),
            slots=to_device(self.slots, device),
        )

    def share_of(self, ranks: SequenceRanks) -> "ModelInput":
        """One rank's part of a packed input: its run of tokens (filled up at the very end), and the states in it."""
        total = self.input_ids.shape[1]
        tokens = -(-total // ranks.size)
        fill, start = tokens * ranks.size - total, ranks.rank * tokens
        own = (self.states >= start) & (self.states < start + tokens)
        return dataclasses.replace(
            self,
            input_ids=pad(self.input_ids, (0, fill))[:, start : start + tokens],
            position_ids=pad(self.position_ids, (0, fill))[:, start : start + tokens],
            packing=dataclasses.replace(self.packing, ranks=ranks),
            states=self.states[own] - start,
            targets=self.targets[own],
            slots=self.slots[own],
        )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host's tensor on a device; a GPU fetches it in its turn, and the host does not wait for that."""
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def row_lengths(attention_mask: torch.Tensor) -> list[int]:
    """Tokens of each row."""
    return attention_mask.sum(1).tolist()


def build_input(rows: Tensors, remove_padding: bool, share_prompts: bool = False) -> ModelInput:
    """The model input of a micro-batch with the columns input_ids, attention_mask, position_ids and responses.

    Each row's tokens stand together (left-padded prompt, right-padded response); a response may be followed by padding
    only. share_prompts: tokens of a prompt that several rows have come once; for packed rows.
    """
    attention = rows["attention_mask"].bool()
    width = rows["responses"].shape[1]
    answered = attention[:, -width:]
    b, total = attention.shape
    shape = (b, width)
    slots = answered.flatten().nonzero()[:, 0]
    targets = rows["responses"].flatten()[slots]
    row, t = slots // width, slots % width
    if not remove_padding:
        states = row * total + (total - width) + t - 1
        return ModelInput(
            rows["input_ids"], rows["position_ids"], attention.long(), None, states, targets, slots, shape
        )
    first = first_with_prompt(attention, rows["input_ids"], width) if share_prompts else range(b)
    if len(set(first)) < b:
        packing, kept, states = _shared(attention, width, first, row, t)
    else:
        lengths = attention.sum(1)
        packing = Packing.of(lengths)
        kept = attention.flatten().nonzero()[:, 0]
        prompt_lengths = lengths - answered.sum(1)
        states = packing.cu_seqlens.long()[row] + prompt_lengths[row] + t - 1
    ids, position_ids = (rows[name].flatten()[kept][None] for name in ("input_ids", "position_ids"))
    return ModelInput(ids, position_ids, None, packing, states, targets, slots, shape)


def _shared(
    attention: torch.Tensor, width: int, first: Sequence[int], row: torch.Tensor, t: torch.Tensor
) -> tuple[Packing, torch.Tensor, torch.Tensor]:
    """(packing, flat indices of the tokens, states that predict token t of the answer of a row), prompts shared."""
    layout = lay_out(attention, width, first)
    whole = Packing.of(attention.sum(1)[layout.rows])
    keys = Keys(whole, layout.source, layout.one_use, layout.offsets, layout.uses)
    own = torch.where(layout.own_prompt, layout.end, layout.start)  # where a row's answer begins
    states = torch.where(t == 0, layout.end[row], own[row] + t) - 1
    return dataclasses.replace(Packing.of(layout.queries), keys=keys), layout.kept, states
