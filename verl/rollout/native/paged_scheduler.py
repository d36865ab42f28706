"""Scheduler of a batch on a GPU: assigns slots and KV-cache blocks to rows.

The host launches CHUNK steps at a time and reads their status while the next ones run, so the GPU never waits for the
host. All blocks that a row may need are reserved when it is admitted, so generation cannot run out of blocks. Rows can
be added at any time (`extend`).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.rollout.native import triton_kernels
from verl.rollout.native.cuda_decoder import CHUNK, CudaDecoder, bucket_of, upload
from verl.rollout.native.scheduler import Row
from verl.rollout.native.triton_kernels import BLOCK_SIZE
from verl.rollout.native.vision import PromptImages
from verl.rollout.request import Completion, SamplingParams
from verl.rollout.sampling import check_finite, read_top, uniform

_LINES_READ = 2048  # output lines that are copied to the host at once


@dataclass(eq=False)
class Group:
    """The samples of one prompt. Its full blocks are shared; its tail, a partly filled block, is copied per sample."""

    prompt: list[int]
    images: PromptImages | None = None
    waiting: int = 0
    running: int = 0
    shared_blocks: list[int] = field(default_factory=list)
    tail_blocks: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # after the prompt, (V,) float32
    routed_experts: torch.Tensor | None = None  # choices of the routers for the prompt, with decoder.records
    states: Any = None  # of the layers after the prompt

    @property
    def num_full_blocks(self) -> int:
        return len(self.prompt) // BLOCK_SIZE

    @property
    def num_tail_blocks(self) -> int:
        return int(len(self.prompt) % BLOCK_SIZE > 0)


@dataclass(eq=False)
class Sample:
    """A row with its blocks.

    Attributes:
        line: its line in the output buffers; -1 before it is admitted.
        own_blocks: blocks that it does not share.
        launched: number of its launched steps, each of which samples at least one token, if it has not ended.
        text_end: length of its response in tokens if a stop string ended it.
        aborted_at: number of its tokens when it was aborted.
    """

    row: Row
    group: Group
    line: int = -1
    own_blocks: list[int] = field(default_factory=list)
    launched: int = 1
    ended: bool = False
    tokens: list[int] = field(default_factory=list)  # already searched for stop strings
    text_end: int | None = None
    aborted_at: int | None = None

    @property
    def num_own_blocks(self) -> int:
        return -(-self.row.length // BLOCK_SIZE) - self.group.num_full_blocks


@dataclass(eq=False)
class Launched:
    """Launched steps: `status` (slots,) is valid after `event`.

    recent: (slots, T + 2), only with stop strings: number of tokens of each row, then its last T + 1, where T is the
    number of tokens that CHUNK steps sample at most.
    outlook: (), only with speculative decoding: mean number of drafts that a step would accept.
    """

    event: torch.cuda.Event
    status: torch.Tensor
    recent: torch.Tensor | None
    samples: list[Sample | None]
    outlook: torch.Tensor | None = None


def group_rows(rows: Sequence[Row]) -> list[Sample]:
    """Wrap rows as samples and group them by prompt."""
    groups: dict[tuple, Group] = {}
    samples = []
    for row in rows:
        group = groups.setdefault(row.key, Group(row.prompt, row.images))
        group.waiting += 1
        samples.append(Sample(row, group))
    return samples


def blocks_for(samples: Sequence[Sample]) -> int:
    """Blocks needed to run all samples concurrently."""
    groups = {id(sample.group): sample.group for sample in samples}.values()
    return sum(g.num_full_blocks + g.num_tail_blocks for g in groups) + sum(sample.num_own_blocks for sample in samples)


def blocks_for_one(samples: Sequence[Sample]) -> int:
    """Minimum number of blocks that guarantees progress."""
    return max(s.group.num_full_blocks + s.group.num_tail_blocks + s.num_own_blocks for s in samples)


def blocks_for_length(tokens: int) -> int:
    """Blocks of one row of `tokens` tokens, for any prompt length."""
    return -(-tokens // BLOCK_SIZE) + 1


class PagedScheduler:
    """Waiting rows, rows in slots, and free blocks.

    Args:
        params: the sampling parameters that all rows share (SamplingParams.shared).
        decoder: computes prompts and steps over its static buffers.
        max_rows: max concurrent rows.
        lines: number of output lines. A line is reused after `take_finished`.
        line_width: tokens per line.
    """

    def __init__(self, params: SamplingParams, decoder: CudaDecoder, max_rows: int, lines: int, line_width: int):
        self.params = params
        self.decoder = decoder
        self.buffers = decoder.buffers
        self.device = decoder.decoder.embedding.device
        self.max_rows = max_rows
        self.line_width = line_width
        self.free_lines = deque(range(lines))
        top = min(params.top_logprobs, decoder.decoder.vocab_size)
        self.buffers.top = torch.zeros(self.buffers.size.responses + 1, top, 2, device=self.device)
        # (lines, width), and of `top` (lines, width, K, 2)
        self.tokens, self.log_probs, self.top = (
            values[: lines * line_width].unflatten(0, (lines, line_width))
            for values in (self.buffers.tokens, self.buffers.log_probs, self.buffers.top)
        )
        self.waiting: deque[Sample] = deque()
        self.free_blocks = list(range(self.buffers.blocks))
        self.slots: list[Sample | None] = []
        self.finished: list[Sample] = []
        self.stops = params.active_stop_ids
        self.has_stop_strings = False
        self.buffers.is_stop.zero_()
        if self.stops:
            self.buffers.is_stop[upload(list(self.stops), torch.int64, self.device)] = 1
        self.buffers.state[triton_kernels.STATUS] = triton_kernels.DONE
        self.in_flight: Launched | None = None
        self.verifier = decoder.verifier
        self.verifies = False  # whether the next steps verify drafts
        self.reach = 1 if self.verifier is None else self.verifier.width  # max tokens of a step
        if self.verifier is not None:
            self.verifier.counts.zero_()
        self.steps = 0

    # ---- what the engine calls ----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.slots)

    @property
    def has_results(self) -> bool:
        """Whether `take_finished` has something to return."""
        return bool(self.finished)

    def add(self, samples: Sequence[Sample]) -> None:
        """Queue samples, in the order in which they are to be admitted."""
        self.waiting.extend(samples)
        self.has_stop_strings |= any(sample.row.stop is not None for sample in samples)

    def extend(self, rows: Sequence[Row]) -> bool:
        """Queue rows, unless one does not fit the buffers. Returns whether it has."""
        samples, size, blocks = group_rows(rows), self.buffers.size, self.buffers.blocks
        fits = blocks_for_one(samples) <= min(self.buffers.width, blocks)
        fits &= all(row.reach <= size.positions and row.limit <= self.line_width for row in rows)
        if fits:
            self.add(samples)
        return fits

    def take_draft_counts(self) -> list[int]:
        """See `SlotScheduler.take_draft_counts`. Waits for the launched steps."""
        if self.verifier is None:
            return [0, 0]
        counts = self.verifier.counts.tolist()
        self.verifier.counts.zero_()
        return counts

    def advance(self) -> None:
        """Launch steps, read the status of the previous ones, and admit rows to freed slots."""
        if not self.slots:
            self._refill()
        now = self._launch()
        if self.in_flight is not None:
            self._read_status(self.in_flight)
        self.in_flight = now
        self._refill()
        if not self.slots:
            self.in_flight = None

    def abort(self, matches: Callable[[Row], bool]) -> None:
        """End the rows for which `matches` is true; `take_finished` returns the tokens that they have."""
        dropped = [sample for sample in self.waiting if matches(sample.row)]
        self.waiting = deque(sample for sample in self.waiting if not matches(sample.row))
        for sample in dropped:
            sample.aborted_at = 0
            sample.group.waiting -= 1
            self._release(sample.group)
        self.finished += dropped
        for slot, sample in enumerate(self.slots):
            if sample is not None and not sample.ended and matches(sample.row):
                sample.aborted_at = int(self.buffers.state[triton_kernels.STEP, slot])
                sample.ended = True
                self.buffers.state[triton_kernels.STATUS, slot] = triton_kernels.DONE

    def take_finished(self) -> list[tuple[Row, Completion]]:
        """Return the rows that finished since the last call. Waits for the launched steps."""
        samples, self.finished = self.finished, []
        completions = [(sample.row, Completion([], [], "abort")) for sample in samples if sample.line < 0]
        samples = [sample for sample in samples if sample.line >= 0]
        for first in range(0, len(samples), _LINES_READ):
            completions += self._completions(samples[first : first + _LINES_READ])
        self.free_lines += [sample.line for sample in samples]
        return completions

    def sampled(self, since: Mapping[int, int]) -> list[tuple]:
        """See `SlotScheduler.sampled`. Waits for the launched steps."""
        tokens, steps = [], self.buffers.state[triton_kernels.STEP, : len(self.slots)].tolist()
        for sample, step in zip(self.slots, steps):
            if sample is None or sample.ended:
                continue
            first, end = since.get(sample.row.index, step), step if sample.row.stop is None else len(sample.tokens)
            if first < end:
                new = sample.line, slice(first, end)
                top = [read_top(self.top[new])] if self.params.top_logprobs else []
                tokens.append((sample.row, self.tokens[new].tolist(), self.log_probs[new].tolist(), *top))
        return tokens

    # ---- steps --------------------------------------------------------------------------------------------------

    def _launch(self) -> Launched | None:
        """Launch steps for all slots; None if every row already has all its steps launched."""
        count = min(CHUNK, max((s.row.limit - s.launched for s in self.slots if s is not None), default=0))
        if count <= 0:
            return None
        state, rows = self.buffers.state, len(self.slots)
        state[triton_kernels.START].copy_(state[triton_kernels.STEP])
        if not self.params.greedy:
            first = state[triton_kernels.STEP, :rows].long()
            at = torch.arange(CHUNK, device=self.device)[:, None] + first
            seeds, sample_ids = self.buffers.seeds[:rows], self.buffers.sample_ids[:rows]
            self.buffers.uniforms[:, :rows] = uniform(seeds, sample_ids, at)
        outlook = None
        if self.verifier is not None:
            outlook = torch.empty((), pin_memory=True).copy_(self.verifier.hindsight(rows), non_blocking=True)
        decoder = self.verifier if self.verifies else self.decoder
        decoder.steps(count, bucket_of(rows), self.params)
        self.steps += count
        status = torch.empty(rows, dtype=torch.int32, pin_memory=True)
        status.copy_(state[triton_kernels.STATUS, :rows], non_blocking=True)
        recent = self._recent(rows) if self.has_stop_strings else None
        event = torch.cuda.Event()
        event.record()
        for sample in self.slots:
            if sample is not None:
                sample.launched += count
        return Launched(event, status, recent, list(self.slots), outlook)

    def _recent(self, rows: int) -> torch.Tensor:
        """`Launched.recent`, copied to the host asynchronously."""
        buffers = self.buffers
        steps, outs = buffers.state[triton_kernels.STEP, :rows].long(), buffers.state[triton_kernels.OUT, :rows].long()
        back = torch.arange(-CHUNK * self.reach - 1, 0, device=self.device)
        tokens = buffers.tokens[((outs + steps)[:, None] + back).clamp_(min=0)]
        host = torch.empty(rows, len(back) + 1, dtype=torch.int32, pin_memory=True)
        return host.copy_(torch.cat((steps[:, None].int(), tokens), 1), non_blocking=True)

    def _read_status(self, launched: Launched) -> None:
        """Wait for launched steps and mark the rows that ended. Raises ValueError for non-finite logits."""
        launched.event.synchronize()
        if launched.outlook is not None:
            self.verifies = self.verifier.lookup.pays(float(launched.outlook), len(self.slots), "cuda")
        for sample, status in zip(launched.samples, launched.status.tolist()):
            if sample is None:
                continue
            if status == triton_kernels.BROKEN:
                check_finite(torch.tensor([torch.nan]), [sample.row.index], [sample.row.sample_id])
            sample.ended |= status == triton_kernels.DONE
        if launched.recent is not None:
            self._search_stop_strings(launched)

    def _search_stop_strings(self, launched: Launched) -> None:
        """Mark rows that end with a stop string and stop them on the device."""
        for sample, (count, *recent) in zip(launched.samples, launched.recent.tolist()):
            if sample is None or sample.row.stop is None or sample.text_end is not None:
                continue
            seen = len(sample.tokens)
            sample.tokens += recent[len(recent) - (count - seen) :]
            sample.text_end = sample.row.stop.find(sample.tokens, seen)
            if sample.text_end is not None and sample in self.slots:
                sample.ended = True
                self.buffers.state[triton_kernels.STATUS, self.slots.index(sample)] = triton_kernels.DONE

    # ---- slots and blocks ---------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Free finished rows, and admit waiting rows if there are enough free slots for a prefill."""
        for slot, sample in enumerate(self.slots):
            if sample is not None and (sample.ended or sample.launched >= sample.row.limit):
                self.free_blocks += sample.own_blocks
                sample.group.running -= 1
                self._release(sample.group)
                self.finished.append(sample)
                self.slots[slot] = None
        alive = sum(sample is not None for sample in self.slots)
        room = min(self.max_rows - alive, len(self.free_lines))
        refill = bool(self.waiting) and room > 0
        refill &= alive == 0 or room >= min(len(self.waiting), max(1, self.max_rows // 16))
        if refill or alive == 0 or bucket_of(alive) < bucket_of(len(self.slots)):
            self._compact(alive)
        if refill:
            self._admit(room)

    def _release(self, group: Group) -> None:
        """Free the blocks that no sample of the group needs any more."""
        if group.waiting:
            return
        if group.logits is not None:
            self.free_blocks += group.tail_blocks
            group.logits = group.states = None
        if not group.running:
            self.free_blocks += group.shared_blocks
            group.shared_blocks = []

    def _compact(self, alive: int) -> None:
        """Move the last rows into free slots, so that slots 0 .. alive - 1 are active."""
        holes = [slot for slot in range(alive) if self.slots[slot] is None]
        last = [slot for slot in range(alive, len(self.slots)) if self.slots[slot] is not None]
        buffers, end = self.buffers, len(self.slots)
        if holes:
            source, target = upload([last, holes], torch.int64, self.device)
            buffers.state.index_copy_(1, target, buffers.state[:, source])
            for rows in (buffers.table, buffers.sample_ids, buffers.seeds):
                rows.index_copy_(0, target, rows[source])
            self.decoder.move_states(source, target)
            if self.verifier is not None:
                self.verifier.move(source, target)
        buffers.state[triton_kernels.STATUS, alive:end] = triton_kernels.DONE
        for hole, slot in zip(holes, last):
            self.slots[hole] = self.slots[slot]
        del self.slots[alive:]

    def _admit(self, room: int) -> None:
        """Allocate slots and blocks to waiting rows while both last, prefill their prompts, sample first tokens."""
        admitted: list[Sample] = []
        fresh: list[Group] = []
        while self.waiting and len(admitted) < room:
            sample = self.waiting[0]
            group = sample.group
            new = group.logits is None and group not in fresh
            required = sample.num_own_blocks + (group.num_full_blocks + group.num_tail_blocks if new else 0)
            if required > len(self.free_blocks):
                break
            self.waiting.popleft()
            if new:
                fresh.append(group)
                group.shared_blocks = self._take(group.num_full_blocks)
                group.tail_blocks = self._take(group.num_tail_blocks)
            sample.own_blocks = self._take(sample.num_own_blocks)
            sample.line = self.free_lines.popleft()
            group.waiting -= 1
            group.running += 1
            admitted.append(sample)
        assert admitted or self.slots, "blocks for one row were reserved"
        if not admitted:
            return
        if fresh:
            blocks = [g.shared_blocks + g.tail_blocks for g in fresh]
            images = ([g.images for g in fresh],) if self.decoder.decoder.vision is not None else ()
            logits = self.decoder.prefill([g.prompt for g in fresh], blocks, *images)
            for group, row in zip(fresh, logits):
                group.logits = row
            for group, routed_experts in zip(fresh, self.decoder.prompt_experts):
                group.routed_experts = routed_experts
            for group, states in zip(fresh, self.decoder.prompt_states):
                group.states = states
        # each sample gets its own copy of the last block of its prompt
        pairs = [(s.group.tail_blocks[0], s.own_blocks[0]) for s in admitted if s.group.tail_blocks]
        if pairs:
            self.decoder.copy_blocks(*map(list, zip(*pairs)))
        self._fill_slots(admitted)
        for group in {id(s.group): s.group for s in admitted}.values():
            self._release(group)

    def _take(self, count: int) -> list[int]:
        at = len(self.free_blocks) - count
        taken = self.free_blocks[at:]
        del self.free_blocks[at:]
        return taken

    def _fill_slots(self, samples: list[Sample]) -> None:
        """Initialize the slots of the chosen rows and sample their first tokens."""
        buffers, first = self.buffers, len(self.slots)
        slots = slice(first, first + len(samples))
        width = buffers.width
        blocks = [s.group.shared_blocks + s.own_blocks for s in samples]
        buffers.table[slots] = upload([p + [0] * (width - len(p)) for p in blocks], torch.int32, self.device)
        live = triton_kernels.LIVE
        outs = [s.line * self.line_width for s in samples]
        states = [
            [0, len(s.row.prompt) - 1, 0, 0, s.row.limit, out, live, s.row.rope_offset] for s, out in zip(samples, outs)
        ]
        buffers.state[:, slots] = upload(states, torch.int32, self.device).T
        buffers.sample_ids[slots] = upload([s.row.sample_id for s in samples], torch.int64, self.device)
        buffers.seeds[slots] = upload([s.row.seed for s in samples], torch.int64, self.device)
        if not self.params.greedy:
            buffers.uniforms[0, slots] = uniform(buffers.seeds[slots], buffers.sample_ids[slots], 0)
        groups = {id(s.group): s.group for s in samples}
        order = {key: i for i, key in enumerate(groups)}
        logits = torch.stack([group.logits for group in groups.values()])
        index = [order[id(s.group)] for s in samples]
        if len(groups) < len(samples):
            logits = logits[upload(index, torch.int64, self.device)]
        self.decoder.fill_states(first, [s.group.states for s in samples])
        self.decoder.sample(logits, first, self.params, capped=True)
        if self.verifier is not None:
            self.verifier.fill(first, [s.row.prompt for s in samples])
        self.slots += samples

    # ---- completions --------------------------------------------------------------------------------------------

    def _completions(self, samples: list[Sample]) -> list[tuple[Row, Completion]]:
        """Completions of samples that have finished."""
        columns = max(min(sample.row.limit, self.reach * sample.launched) for sample in samples)
        lines = upload([sample.line for sample in samples], torch.int64, self.device)
        tokens, log_probs = (values[:, :columns][lines].cpu().numpy() for values in (self.tokens, self.log_probs))
        outputs = zip(samples, tokens, log_probs, np.isin(tokens, list(self.stops)))
        return [(sample.row, self._completion(sample, *output)) for sample, *output in outputs]

    def _completion(self, sample: Sample, tokens: np.ndarray, log_probs: np.ndarray, is_stop: np.ndarray) -> Completion:
        """Completion of a sample. tokens, log_probs, is_stop: its output, (limit,) or longer."""
        row, limit = sample.row, sample.row.limit if sample.aborted_at is None else sample.aborted_at
        hits = is_stop[:limit]
        stopped = bool(hits.any())
        end = int(hits.argmax()) + 1 if stopped else limit
        if row.stop is not None and sample.text_end is None:  # the last steps have not been searched
            sample.text_end = row.stop.find(tokens[:end].tolist(), len(sample.tokens))
        if sample.text_end is not None:
            stopped, end = True, sample.text_end
        if not np.isfinite(log_probs[:end].sum()):
            check_finite(torch.tensor([torch.nan]), [row.index], [row.sample_id])
        cut = "length" if end == row.limit else "abort"
        completion = Completion(tokens[:end].tolist(), log_probs[:end].tolist(), "stop" if stopped else cut)
        if self.params.top_logprobs:
            completion.top_log_probs = read_top(self.top[sample.line, :end])
        if self.decoder.records:
            out = sample.line * self.line_width
            choices = self.buffers.routed_experts[out : out + max(0, end - 1)]
            completion.routed_experts = torch.cat((sample.group.routed_experts, choices)).cpu().numpy()
        return completion
