"""Scheduler of a batch in plain torch: assigns slots to rows.

Rows can be added at any time and are admitted between decode steps.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from verl.rollout.checks import check_request
from verl.rollout.native.decoder import Decoder
from verl.rollout.native.speculation import INTERVAL, PromptLookup, accepted_drafts
from verl.rollout.native.torch_decoder import TorchDecoder
from verl.rollout.native.vision import PromptImages
from verl.rollout.request import SEARCH_INTERVAL, Completion, Request, SamplingParams, StopStrings
from verl.rollout.sampling import check_finite, read_top, top_log_probs, uniform

#: steps for which random numbers are generated at once, and after which log-probs are checked
_BLOCK_STEPS = 32

# rows of SlotScheduler.state; those of _COUNTERS increase by one per token
_TOKEN, _POSITION, _STEP, _OUT, _LAST, _LINE, _SAMPLE, _SEED = range(8)
_COUNTERS = slice(_POSITION, _OUT + 1)


@dataclass(frozen=True, eq=False)
class Row:
    """One request of a batch.

    Args:
        index: index of the request.
        prompt: token ids.
        sample_id, seed: determine its random numbers.
        limit: max response tokens.
        stop: stop strings.
        images: those of the prompt.
    """

    index: int
    prompt: list[int]
    sample_id: int
    limit: int
    seed: int = 0
    stop: StopStrings | None = None
    images: PromptImages | None = None

    @cached_property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Rows with equal keys are samples of one prompt."""
        return tuple(self.prompt), id(self.images and self.images.inputs)

    @property
    def rope_offset(self) -> int:
        """See `PromptImages.offset`."""
        return 0 if self.images is None else self.images.offset

    @property
    def reach(self) -> int:
        """Number of rotary positions up to the end of the response."""
        return len(self.prompt) + self.limit + max(0, self.rope_offset)

    @property
    def length(self) -> int:
        """Max tokens in the KV cache; the last token is never fed back."""
        return len(self.prompt) + self.limit - 1

    @classmethod
    def from_request(cls, index: int, request: Request, decoder: Decoder) -> "Row":
        """The row of a request. Raises ValueError that names the request by `index`."""
        limits = decoder.vocab_size, decoder.max_positions, decoder.max_positions_reason
        vision = decoder.vision
        prompt = check_request(f"prompt {index}", request, "native", *limits, images=vision is not None, scores=True)
        images = None if vision is None else vision.images_of(prompt, request)
        params = request.params
        return cls(index, prompt, request.sample_id, params.max_tokens, params.seed, params.stop, images)


def admission_order(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by length, longest first, with the samples of a prompt adjacent."""
    longest: dict[tuple[tuple[int, ...], int], int] = {}
    for row in rows:
        longest[row.key] = max(row.length, longest.get(row.key, 0))
    return sorted(rows, key=lambda row: (-longest[row.key], row.key, -row.limit))


class SlotScheduler:
    """Waiting rows, active rows in slots 0 .. active - 1, and output buffers (lines, width) with one line per row.

    Args:
        params: the sampling parameters that all rows share (SamplingParams.shared).
        decoder: computes prompts and steps over its KV cache.
        slots: max concurrent rows, at most the slots of the cache.
        lines: number of output lines. A line is reused after `take_finished`.
        width: tokens per line.
        lookup: verify drafts.
    """

    def __init__(
        self,
        params: SamplingParams,
        decoder: TorchDecoder,
        slots: int,
        lines: int,
        width: int,
        lookup: PromptLookup | None = None,
    ):
        self.params = params
        self.decoder = decoder
        self.waiting: deque[Row] = deque()
        self.device = decoder.decoder.embedding.device
        self.slots = slots
        self.width = width
        self.rows: list[Row | None] = [None] * lines
        self.free_lines = deque(range(lines))
        self.tokens = torch.zeros(lines * width, dtype=torch.int64, device=self.device)
        self.log_probs = torch.zeros(lines * width, dtype=torch.float32, device=self.device)
        top = min(params.top_logprobs, decoder.decoder.vocab_size)
        self.top = torch.zeros(lines * width, top, 2, device=self.device)  # of `top_log_probs`
        self.lengths = [0] * lines
        #: choices of the routers per output token, and of the prompt of each line (with decoder.records)
        self.routed_experts: torch.Tensor | None = None
        self.prompt_experts: dict[int, torch.Tensor] = {}
        if decoder.records:
            shape = (lines * width, *decoder.decoder.routed_experts_shape)
            self.routed_experts = torch.zeros(shape, dtype=torch.int16, device=self.device)
        self.state = torch.zeros(_SEED + 1, slots, dtype=torch.int64, device=self.device)
        self.uniforms = torch.zeros(slots, _BLOCK_STEPS, dtype=torch.float64, device=self.device)
        self.column = 0  # column of `uniforms` for the next token
        self.stops = frozenset(params.active_stop_ids)
        self.is_stop = torch.zeros(decoder.decoder.vocab_size, dtype=torch.bool, device=self.device)
        self.is_stop[list(self.stops)] = True
        self.has_stop_strings = False
        self.text_ends: dict[int, int] = {}  # line -> length of its response, if a stop string ended it
        self.searched = [0] * lines  # tokens of each line already searched for stop strings
        self.finished: list[int] = []  # lines that `take_finished` has not read
        self.aborted: set[int] = set()
        self.dropped: list[Row] = []  # aborted before they were admitted
        self.active = 0
        self.due = 0  # steps until the first active row reaches its limit
        self.steps = 0
        self.lookup = lookup
        self.verifies = False  # whether the next steps verify drafts
        self.counts = [0, 0]
        # prompts and responses by slot; the last columns are never read
        self.sequences = self.state.new_zeros(slots, decoder.cache.length + 2 if lookup else 0)
        decoder.start_step_at(self.state[_POSITION, :0])

    # ---- what the engine calls ----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.active)

    @property
    def has_results(self) -> bool:
        """Whether `take_finished` has something to return."""
        return bool(self.finished or self.dropped)

    def take_draft_counts(self) -> list[int]:
        """The number of drafts that were verified since the last call, and of those accepted."""
        counts, self.counts = self.counts, [0, 0]
        return counts

    def add(self, rows: Sequence[Row]) -> None:
        """Queue rows, in the order in which they are to be admitted."""
        self.waiting.extend(rows)
        self.has_stop_strings |= any(row.stop is not None for row in rows)

    def advance(self) -> None:
        """Admit waiting rows, or decode one token for every active row."""
        free = self.slots - self.active
        # wait for several free slots: a prefill of few prompts costs as much as one of many
        if self.waiting and (free >= max(1, self.slots // 8) or free >= len(self.waiting)):
            self._admit(min(free, len(self.waiting), len(self.free_lines)))
        else:
            self._step() if self.lookup is None else self._verify()

    def abort(self, matches: Callable[[Row], bool]) -> None:
        """End the rows for which `matches` is true; `take_finished` returns the tokens that they have."""
        self.dropped += [row for row in self.waiting if matches(row)]
        self.waiting = deque(row for row in self.waiting if not matches(row))
        lines = self.state[_LINE, : self.active].tolist()
        matched = {line for line in lines if matches(self.rows[line])}
        if matched:
            self.aborted |= matched
            self._retire(slice(0, self.active))

    def take_finished(self) -> list[tuple[Row, Completion]]:
        """Return the rows that finished since the last call. Raises ValueError for non-finite log-probs."""
        completions = [(row, Completion([], [], "abort")) for row in self.dropped]
        self.dropped = []
        if not self.finished:
            return completions
        lines, self.finished = sorted(self.finished), []
        index = torch.tensor(lines, device=self.device)
        tokens, log_probs = self.tokens.view(-1, self.width)[index], self.log_probs.view(-1, self.width)[index]
        rows = [self.rows[line] for line in lines]
        check_finite(log_probs.sum(-1), [row.index for row in rows], [row.sample_id for row in rows])
        for line, row, ids, lps in zip(lines, rows, tokens.tolist(), log_probs.tolist()):
            length = self.lengths[line]
            completion = Completion(ids[:length], lps[:length], self._reason(line, ids[length - 1]))
            if self.params.top_logprobs:
                completion.top_log_probs = read_top(self.top[line * self.width :][:length])
            if self.routed_experts is not None:  # of the prompt and all but the last response token
                start = line * self.width
                choices = self.prompt_experts.pop(line), self.routed_experts[start : start + length - 1]
                completion.routed_experts = torch.cat(choices).cpu().numpy()
            completions.append((row, completion))
            self.rows[line], self.searched[line] = None, 0
            self.text_ends.pop(line, None)
            self.aborted.discard(line)
        self.free_lines += lines
        return completions

    def sampled(self, since: Mapping[int, int]) -> list[tuple]:
        """(row, new tokens, ...) of active rows, as `Request.on_tokens` gets them. since: Row.index -> tokens that the
        caller already has."""
        tokens = []
        for line, step in self.state[[_LINE, _STEP], : self.active].T.tolist():
            row = self.rows[line]
            # text after a stop string must not be reported
            end = step + 1 if row.stop is None else self.searched[line]
            if since.get(row.index, end) < end:
                new = slice(line * self.width + since[row.index], line * self.width + end)
                top = [read_top(self.top[new])] if self.params.top_logprobs else []
                tokens.append((row, self.tokens[new].tolist(), self.log_probs[new].tolist(), *top))
        return tokens

    def resize(self, decoder: TorchDecoder, slots: int, width: int) -> None:
        """Continue with a larger cache: `slots` slots, and as many lines of at least `width` tokens."""
        lines, before, width = max(slots, len(self.rows)), len(self.rows), max(width, self.width)

        def widened(old: torch.Tensor) -> torch.Tensor:
            new = old.new_zeros(lines, width, *old.shape[1:])
            new[:before, : self.width] = old.unflatten(0, (before, self.width))
            return new.flatten(0, 1)

        self.tokens, self.log_probs, self.top = map(widened, (self.tokens, self.log_probs, self.top))
        self.routed_experts = None if self.routed_experts is None else widened(self.routed_experts)
        shift = self.state[_LINE] * (width - self.width)
        self.state[_OUT] += shift
        self.state[_LAST] += shift
        added = max(0, slots - self.slots)
        self.state = torch.nn.functional.pad(self.state, (0, added))
        self.uniforms = torch.nn.functional.pad(self.uniforms, (0, 0, 0, added))
        longer = decoder.cache.length + 2 - self.sequences.shape[1] if self.lookup else 0
        self.sequences = torch.nn.functional.pad(self.sequences, (0, longer, 0, added))
        for values, fill in ((self.rows, None), (self.lengths, 0), (self.searched, 0)):
            values += [fill] * (lines - before)
        self.free_lines += range(before, lines)
        self.slots, self.width = max(slots, self.slots), width
        self.decoder = decoder
        decoder.start_step_at(self.state[_POSITION, : self.active])

    # ---- one iteration ------------------------------------------------------------------------------------------

    def _admit(self, count: int) -> None:
        """Assign slots to `count` waiting rows, prefill their prompts and sample their first tokens."""
        rows = [self.waiting.popleft() for _ in range(count)]
        lines = [self.free_lines.popleft() for _ in rows]
        for line, row in zip(lines, rows):
            self.rows[line] = row
        slots = slice(self.active, self.active + count)
        groups: dict[tuple, list[int]] = {}
        for slot, row in enumerate(rows, self.active):
            groups.setdefault(row.key, []).append(slot)
        first = [rows[members[0] - self.active] for members in groups.values()]
        images = ([row.images for row in first],) if self.decoder.decoder.vision is not None else ()
        logits = self.decoder.prefill([row.prompt for row in first], list(groups.values()), *images)
        if self.routed_experts is not None:
            by_prompt = zip(groups.values(), self.decoder.prompt_experts)
            of_slot = {slot: routed_experts for members, routed_experts in by_prompt for slot in members}
            self.prompt_experts |= {line: of_slot[slot] for slot, line in enumerate(lines, self.active)}
        group_of = {slot: g for g, members in enumerate(groups.values()) for slot in members}
        self.state[:, slots] = torch.tensor(
            [
                [0, len(row.prompt) - 1, -1, start - 1, start + row.limit - 1, line, row.sample_id, row.seed]
                for row, line, start in zip(rows, lines, (line * self.width for line in lines))
            ],
            device=self.device,
        ).T
        if not self.params.greedy:
            self.uniforms[slots] = self._random(slots, self.state[_STEP, slots] + 1 - self.column)
        if self.lookup is not None:
            for slot, row in enumerate(rows, self.active):
                self.sequences[slot, : len(row.prompt)] = torch.tensor(row.prompt)
        self.active += count
        self._sample(logits[[group_of[slot] for slot in range(slots.start, slots.stop)]], slots)
        self._retire(slots)

    def _random(self, slots: slice, first: torch.Tensor) -> torch.Tensor:
        """(B, _BLOCK_STEPS) uniforms of the rows in `slots`, from position first (B,) on."""
        steps = torch.arange(_BLOCK_STEPS, device=self.device)
        seeds, sample_ids = self.state[_SEED, slots, None], self.state[_SAMPLE, slots, None]
        return uniform(seeds, sample_ids, first[:, None] + steps)

    def _step(self) -> None:
        """Decode one token for every active row."""
        live = slice(0, self.active)
        self.column += 1
        if self.column == _BLOCK_STEPS:
            self.column = 0
            if not self.params.greedy:
                self.uniforms[live] = self._random(live, self.state[_STEP, live] + 1)
            self._check()
        logits = self.decoder.step(self.state[_TOKEN, live])
        if self.routed_experts is not None:
            self.routed_experts.index_copy_(0, self.state[_OUT, live], self.decoder.step_experts)
        self.due -= 1
        self.steps += 1
        self._retire_ended(self._sample(logits, live))

    def _verify(self) -> None:
        """Decode one token for every active row, and the drafts that it accepts."""
        state, sequences = self.state[:, : self.active], self.sequences[: self.active]
        sequences.scatter_(1, state[_POSITION, :, None], state[_TOKEN, :, None])
        if self.steps % INTERVAL == 0:
            accepted = self.lookup.hindsight(sequences, state[_POSITION] + 1).double().mean().item()
            self.verifies = self.lookup.pays(accepted, self.active, self.device.type)
        if self.steps % _BLOCK_STEPS == 0:
            self._check()
        drafts, exist = self.lookup.propose(sequences, state[_POSITION] + 1)
        at = torch.arange(1 + self.lookup.tokens if self.verifies and bool(exist.any()) else 1, device=self.device)
        drafts, steps = drafts[:, : len(at) - 1], state[_STEP, :, None] + 1 + at
        is_draft = exist[:, None] & (state[_OUT, :, None] + at[1:] < state[_LAST, :, None])
        tokens, positions = torch.cat((state[_TOKEN, :, None], drafts), 1), state[_POSITION, :, None] + at
        logits = self.decoder.verify(tokens, positions)
        uniforms = uniform(state[_SEED, :, None], state[_SAMPLE, :, None], steps).flatten()
        sampled, log_probs = self.decoder.choose(logits, self.params, uniforms)
        sampled = sampled.view(tokens.shape)
        accepted = accepted_drafts(sampled[:, :-1], drafts, is_draft & ~self.is_stop[sampled[:, :-1]])
        is_kept = (at <= accepted[:, None]).flatten()
        out = (state[_OUT, :, None] + 1 + at).flatten()[is_kept]
        self.tokens[out], self.log_probs[out] = sampled.flatten()[is_kept], log_probs[is_kept]
        if self.params.top_logprobs:
            self.top[out] = top_log_probs(logits, self.params)[is_kept]
        if self.routed_experts is not None:
            self.routed_experts[out - 1] = self.decoder.step_experts[is_kept]
        sequences.scatter_(1, positions + 1, sampled)
        state[_COUNTERS].add_(accepted + 1)
        state[_TOKEN] = sampled.gather(1, accepted[:, None])[:, 0]
        self.counts = [self.counts[0] + int(is_draft.sum()), self.counts[1] + int(accepted.sum())]
        self.steps += 1
        self.due = int((state[_LAST] - state[_OUT]).min())
        self._retire_ended(state[_TOKEN])

    def _retire_ended(self, tokens: torch.Tensor) -> None:
        """Free the slots of rows that ended, if there are any. tokens: the last ones of the active rows."""
        live = slice(0, self.active)
        ended = self.due == 0 or (bool(self.stops) and bool(self.is_stop[tokens].any()))
        if self.has_stop_strings and self.steps % SEARCH_INTERVAL == 0:
            for line, step in self.state[[_LINE, _STEP], live].T.tolist():
                ended |= self._text_end(line, step + 1) is not None
        if ended:
            self._retire(live)

    def _text_end(self, line: int, length: int) -> int | None:
        """Number of tokens up to the first stop string in the first `length` tokens of a row; None if there is none."""
        stop = self.rows[line].stop
        if stop is not None and line not in self.text_ends:
            tokens = self.tokens[line * self.width : line * self.width + length].tolist()
            end = stop.find(tokens, self.searched[line])
            self.searched[line] = length
            if end is not None:
                self.text_ends[line] = end
        return self.text_ends.get(line)

    def _sample(self, logits: torch.Tensor, slots: slice) -> torch.Tensor:
        """Sample a token for each row of `slots` and write it to its line. Returns the tokens (B,)."""
        state = self.state[:, slots]
        tokens, log_probs = self.decoder.choose(logits, self.params, self.uniforms[slots, self.column])
        state[_TOKEN] = tokens
        state[_COUNTERS].add_(1)
        out = state[_OUT]
        self.tokens.index_copy_(0, out, tokens)
        self.log_probs.index_copy_(0, out, log_probs)
        if self.params.top_logprobs:
            self.top.index_copy_(0, out, top_log_probs(logits, self.params))
        return tokens

    def _retire(self, slots: slice) -> None:
        """Free the slots of ended rows and move the last rows into them, so that slots 0 .. active - 1 stay active."""
        state = self.state[:, slots]
        ended = self.is_stop[state[_TOKEN]] | (state[_OUT] == state[_LAST])
        lines, steps = self.state[_LINE].tolist(), self.state[_STEP].tolist()
        if self.text_ends or self.aborted:
            forced = self.text_ends.keys() | self.aborted
            ended |= torch.tensor([line in forced for line in lines[slots]], device=self.device)
        moves: dict[int, int] = {}  # free slot -> the slot of the row that gets it
        for slot in reversed((ended.nonzero()[:, 0] + slots.start).tolist()):
            line, length = lines[slot], steps[slot] + 1
            self.lengths[line] = self._text_end(line, length) or length
            self.finished.append(line)
            self.active -= 1
            source = moves.pop(self.active, self.active)
            if slot != self.active:
                moves[slot] = source
        if moves:
            sources, targets = torch.tensor([[*moves.values()], [*moves]], device=self.device)
            self.decoder.move(sources, targets)
            self.state[:, targets] = self.state[:, sources]
            for values in (self.uniforms, self.sequences):
                values[targets] = values[sources]
        state = self.state[:, : self.active]
        self.decoder.start_step_at(state[_POSITION])
        if self.active:
            self.due = int((state[_LAST] - state[_OUT]).min())

    def _reason(self, line: int, last_token: int) -> str:
        if line in self.text_ends or last_token in self.stops:
            return "stop"
        return "abort" if line in self.aborted and self.lengths[line] < self.rows[line].limit else "length"

    def _check(self) -> None:
        """Raise ValueError if the last log-prob of an active row is not finite."""
        state = self.state[:, : self.active]
        rows = [self.rows[line] for line in state[_LINE].tolist()]
        check_finite(self.log_probs[state[_OUT]], [r.index for r in rows], [r.sample_id for r in rows])
