"""One generate call on a GPU: which rows are in which slots and pages, and when.

The host launches CHUNK steps at a time and looks at their outcome while the next ones run, so the GPU never waits for
it. A row's pages are all reserved when it gets a slot: generation cannot run out of memory half-way.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from verl.rollout.base import Generation, SamplingParams
from verl.rollout.native import triton_kernels
from verl.rollout.native.cuda_decoder import CHUNK, CudaDecoder, bucket_of, upload
from verl.rollout.native.requests import Row
from verl.rollout.native.triton_kernels import PAGE
from verl.rollout.sampling import check_finite, uniform


@dataclass(eq=False)
class Group:
    """The samples of one prompt. Its full pages are shared; its tail, a page begun, is copied for each sample."""

    prompt: list[int]
    waiting: int = 0
    living: int = 0
    shared: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # after the prompt, (V,) float32

    @property
    def full_pages(self) -> int:
        return len(self.prompt) // PAGE

    @property
    def tail_pages(self) -> int:
        return int(len(self.prompt) % PAGE > 0)


@dataclass(eq=False)
class Sample:
    """A row at work. out: where its answer begins. launched: tokens that it has at most. own: pages of its own.

    text_end: tokens of its answer, where a text ended it.
    """

    row: Row
    group: Group
    out: int
    own: list[int] = field(default_factory=list)
    launched: int = 1
    ended: bool = False
    tokens: list[int] = field(default_factory=list)  # that were looked at for text that ends the row
    text_end: int | None = None

    @property
    def own_pages(self) -> int:
        return -(-self.row.length // PAGE) - self.group.full_pages


@dataclass(eq=False)
class Launched:
    """Steps under way: `status` (slots,) holds the outcome once `event` has come.

    recent: with texts that end rows, how many tokens each row has, then its last CHUNK + 1: (slots, CHUNK + 2).
    """

    event: torch.cuda.Event
    status: torch.Tensor
    recent: torch.Tensor | None
    samples: list[Sample | None]


def group_rows(rows: list[Row]) -> list[Sample]:
    """The rows with their groups, and the place of each answer in the flat buffers."""
    groups: dict[tuple[int, ...], Group] = {}
    samples, out = [], 0
    for row in rows:
        group = groups.setdefault(tuple(row.prompt), Group(row.prompt))
        group.waiting += 1
        samples.append(Sample(row, group, out))
        out += row.limit
    return samples


def pages_for(samples: list[Sample]) -> int:
    """Pages with which all samples can be at work at once."""
    groups = {id(sample.group): sample.group for sample in samples}.values()
    return sum(g.full_pages + g.tail_pages for g in groups) + sum(sample.own_pages for sample in samples)


def pages_for_one(samples: list[Sample]) -> int:
    """Pages without which some sample could never be at work."""
    return max(s.group.full_pages + s.group.tail_pages + s.own_pages for s in samples)


class PagedBatch:
    """Rows waiting, rows in slots, and pages free. max_rows: rows at once."""

    def __init__(self, samples: list[Sample], params: SamplingParams, decoder: CudaDecoder, max_rows: int):
        self.all = samples
        self.params = params
        self.decoder = decoder
        self.arena = decoder.arena
        self.device = decoder.decoder.embedding.device
        self.max_rows = max_rows
        self.waiting = deque(samples)
        self.free = list(range(self.arena.pages.shape[1]))
        self.slots: list[Sample | None] = []
        self.stops = () if params.ignore_eos else params.stop_token_ids
        self.arena.is_stop.zero_()
        if self.stops:
            self.arena.is_stop[upload(list(self.stops), torch.int64, self.device)] = 1
        self.arena.state[triton_kernels.STATUS] = triton_kernels.DONE
        self.steps = 0

    def run(self) -> list[Generation]:
        before: Launched | None = None
        self._refill()
        while self.slots:
            now = self._launch()
            if before is not None:
                self._look(before)
            before = now
            self._refill()
        return self._answers()

    # ---- steps --------------------------------------------------------------------------------------------------

    def _launch(self) -> Launched | None:
        """Launch some steps of all slots; None where every row has all its tokens under way."""
        count = min(CHUNK, max(s.row.limit - s.launched for s in self.slots if s is not None))
        if count <= 0:
            return None
        state, rows = self.arena.state, len(self.slots)
        state[triton_kernels.START].copy_(state[triton_kernels.STEP])
        if not self.params.greedy:
            first = state[triton_kernels.STEP, :rows].long()
            at = torch.arange(CHUNK, device=self.device)[:, None] + first
            self.arena.uniforms[:, :rows] = uniform(self.params.seed, self.arena.sample_ids[:rows], at)
        self.decoder.steps(count, bucket_of(rows), self.params)
        self.steps += count
        status = torch.empty(rows, dtype=torch.int32, pin_memory=True)
        status.copy_(state[triton_kernels.STATUS, :rows], non_blocking=True)
        recent = self._recent(rows) if self.params.stop is not None else None
        event = torch.cuda.Event()
        event.record()
        for sample in self.slots:
            if sample is not None:
                sample.launched += count
        return Launched(event, status, recent, list(self.slots))

    def _recent(self, rows: int) -> torch.Tensor:
        """As Launched.recent, on its way to the host."""
        arena = self.arena
        steps, outs = arena.state[triton_kernels.STEP, :rows].long(), arena.state[triton_kernels.OUT, :rows].long()
        back = torch.arange(-CHUNK - 1, 0, device=self.device)
        tokens = arena.tokens[((outs + steps)[:, None] + back).clamp_(min=0)]
        host = torch.empty(rows, CHUNK + 2, dtype=torch.int32, pin_memory=True)
        return host.copy_(torch.cat((steps[:, None].int(), tokens), 1), non_blocking=True)

    def _look(self, launched: Launched) -> None:
        """Wait for steps, and mark the rows that ended in them. Raises ValueError when a row's logits were broken."""
        launched.event.synchronize()
        for sample, status in zip(launched.samples, launched.status.tolist()):
            if sample is None:
                continue
            if status == triton_kernels.BROKEN:
                check_finite(torch.tensor([torch.nan]), [sample.row.index], [sample.row.sample_id])
            sample.ended |= status == triton_kernels.DONE
        if launched.recent is not None:
            self._look_for_text(launched)

    def _look_for_text(self, launched: Launched) -> None:
        """Mark the rows that a text ended, and stop them on the device."""
        for sample, (count, *recent) in zip(launched.samples, launched.recent.tolist()):
            if sample is None or sample.text_end is not None:
                continue
            seen = len(sample.tokens)
            sample.tokens += recent[len(recent) - (count - seen) :]
            sample.text_end = self.params.stop.find(sample.tokens, seen)
            if sample.text_end is not None and sample in self.slots:
                sample.ended = True
                self.arena.state[triton_kernels.STATUS, self.slots.index(sample)] = triton_kernels.DONE

    # ---- slots and pages ----------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Free what rows that ended hold, and give it to rows that wait, when that is worth a pass over new prompts."""
        for slot, sample in enumerate(self.slots):
            if sample is not None and (sample.ended or sample.launched >= sample.row.limit):
                self._free(sample)
                self.slots[slot] = None
        alive = sum(sample is not None for sample in self.slots)
        room = self.max_rows - alive
        refill = bool(self.waiting) and (alive == 0 or room >= min(len(self.waiting), max(1, self.max_rows // 16)))
        if refill or alive == 0 or bucket_of(alive) < bucket_of(len(self.slots)):
            self._compact(alive)
        if refill:
            self._admit(room)

    def _free(self, sample: Sample) -> None:
        group = sample.group
        self.free += sample.own
        group.living -= 1
        if not group.living and not group.waiting:
            self.free += group.shared

    def _compact(self, alive: int) -> None:
        """Move the last rows into the holes: slots 0 .. alive - 1 are at work."""
        holes = [slot for slot in range(alive) if self.slots[slot] is None]
        last = [slot for slot in range(alive, len(self.slots)) if self.slots[slot] is not None]
        arena, end = self.arena, len(self.slots)
        if holes:
            source, target = upload([last, holes], torch.int64, self.device)
            arena.state.index_copy_(1, target, arena.state[:, source])
            arena.table.index_copy_(0, target, arena.table[source])
            arena.sample_ids.index_copy_(0, target, arena.sample_ids[source])
        arena.state[triton_kernels.STATUS, alive:end] = triton_kernels.DONE
        for hole, slot in zip(holes, last):
            self.slots[hole] = self.slots[slot]
        del self.slots[alive:]

    def _admit(self, room: int) -> None:
        """Give slots and pages to waiting rows as far as both reach, compute their prompts, draw their first tokens."""
        chosen: list[Sample] = []
        fresh: list[Group] = []
        while self.waiting and len(chosen) < room:
            sample = self.waiting[0]
            group = sample.group
            new = group.logits is None and group not in fresh
            need = sample.own_pages + (group.full_pages + group.tail_pages if new else 0)
            if need > len(self.free):
                break
            self.waiting.popleft()
            if new:
                fresh.append(group)
                group.shared, group.tail = self._take(group.full_pages), self._take(group.tail_pages)
            sample.own = self._take(sample.own_pages)
            group.waiting -= 1
            group.living += 1
            chosen.append(sample)
        assert chosen or self.slots, "pages for one row were reserved"
        if not chosen:
            return
        if fresh:
            logits = self.decoder.prefill([g.prompt for g in fresh], [g.shared + g.tail for g in fresh])
            for group, row in zip(fresh, logits):
                group.logits = row
        self._copy_tails(chosen)
        self._open(chosen)
        for group in {id(s.group): s.group for s in chosen}.values():
            if not group.waiting:
                self.free += group.tail
                group.logits = None

    def _take(self, count: int) -> list[int]:
        at = len(self.free) - count
        taken = self.free[at:]
        del self.free[at:]
        return taken

    def _copy_tails(self, chosen: list[Sample]) -> None:
        """Give each sample its own copy of its prompt's last page."""
        pairs = [(s.group.tail[0], s.own[0]) for s in chosen if s.group.tail]
        if pairs:
            source, target = upload([list(x) for x in zip(*pairs)], torch.int64, self.device)
            for layer in self.arena.pages:
                layer.index_copy_(0, target, layer[source])

    def _open(self, chosen: list[Sample]) -> None:
        """Write the slots of the chosen rows and draw their first tokens."""
        arena, first = self.arena, len(self.slots)
        slots = slice(first, first + len(chosen))
        width = arena.width
        pages = [s.group.shared + s.own for s in chosen]
        arena.table[slots] = upload([p + [0] * (width - len(p)) for p in pages], torch.int32, self.device)
        lines = [[0, len(s.row.prompt) - 1, 0, 0, s.row.limit, s.out, triton_kernels.LIVE] for s in chosen]
        arena.state[:, slots] = upload(lines, torch.int32, self.device).T
        arena.sample_ids[slots] = upload([s.row.sample_id for s in chosen], torch.int64, self.device)
        if not self.params.greedy:
            arena.uniforms[0, slots] = uniform(self.params.seed, arena.sample_ids[slots], 0)
        groups = {id(s.group): s.group for s in chosen}
        order = {key: i for i, key in enumerate(groups)}
        logits = torch.stack([group.logits for group in groups.values()])
        index = [order[id(s.group)] for s in chosen]
        if len(groups) < len(chosen):
            logits = logits[upload(index, torch.int64, self.device)]
        self.decoder.sample(logits, first, self.params, capped=True)
        self.slots += chosen

    # ---- answers ------------------------------------------------------------------------------------------------

    def _answers(self) -> list[Generation]:
        total = sum(sample.row.limit for sample in self.all)
        tokens, log_probs = self.arena.tokens[:total].cpu().numpy(), self.arena.log_probs[:total].cpu().numpy()
        is_stop = np.isin(tokens, list(self.stops))
        answers: list[Generation | None] = [None] * len(self.all)
        for sample in self.all:
            row, at = sample.row, sample.out
            hits = is_stop[at : at + row.limit]
            stopped = bool(hits.any())
            end = at + (int(hits.argmax()) + 1 if stopped else row.limit)
            if self.params.stop is not None and sample.text_end is None:  # the last steps were not looked at
                sample.text_end = self.params.stop.find(tokens[at:end].tolist(), len(sample.tokens))
            if sample.text_end is not None:
                stopped, end = True, at + sample.text_end
            if not np.isfinite(log_probs[at:end].sum()):
                check_finite(torch.tensor([torch.nan]), [row.index], [row.sample_id])
            reason = "stop" if stopped else "length"
            answers[row.index] = Generation(tokens[at:end].tolist(), log_probs[at:end].tolist(), reason)
        return answers
