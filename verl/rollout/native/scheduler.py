"""One generate call in plain torch: which rows are in which slots, and when."""

from collections import deque

import torch

from verl.rollout.base import Generation, SamplingParams
from verl.rollout.native.requests import Row
from verl.rollout.native.torch_decoder import TorchDecoder
from verl.rollout.sampling import check_finite, uniform
from verl.rollout.stop_strings import LOOK_EVERY

#: steps for which random numbers are made at once, and after which broken rows are looked for
_BLOCK_STEPS = 32

# what a slot knows of its row, one line of SlotBatch.state each; those of _MOVING grow by one with every token
_TOKEN, _POSITION, _STEP, _OUT, _LAST, _ROW, _SAMPLE = range(7)
_MOVING = slice(_POSITION, _OUT + 1)


class SlotBatch:
    """One generate call: rows waiting, rows in slots 0 .. active - 1, and the answers (len(rows), longest limit)."""

    def __init__(self, rows: list[Row], params: SamplingParams, decoder: TorchDecoder):
        self.rows = rows
        self.params = params
        self.decoder = decoder
        self.waiting = deque(range(len(rows)))
        self.device = decoder.decoder.embedding.device
        self.slots = min(decoder.cache.slots, len(rows))
        self.width = max(row.limit for row in rows)
        self.tokens = torch.zeros(len(rows) * self.width, dtype=torch.int64, device=self.device)
        self.log_probs = torch.zeros(len(rows) * self.width, dtype=torch.float32, device=self.device)
        self.lengths = [0] * len(rows)
        self.state = torch.zeros(_SAMPLE + 1, self.slots, dtype=torch.int64, device=self.device)
        self.uniforms = torch.zeros(self.slots, _BLOCK_STEPS, dtype=torch.float64, device=self.device)
        self.column = 0  # of uniforms: the numbers that the next token takes
        self.stops = () if params.ignore_eos else frozenset(params.stop_token_ids)
        self.is_stop = torch.zeros(decoder.decoder.vocab_size, dtype=torch.bool, device=self.device)
        self.is_stop[list(self.stops)] = True
        self.text_ends: dict[int, int] = {}  # row -> tokens of its answer, where a text ended it
        self.looked_at = [0] * len(rows)  # tokens of each row in which no text was found that ends it
        self.active = 0
        self.due = 0  # steps until the first active row has all its tokens
        self.steps = 0
        decoder.seat(self.state[_POSITION, :0])

    def run(self) -> list[Generation]:
        while self.waiting or self.active:
            free = self.slots - self.active
            # a few free slots are not worth a pass over new prompts: it costs as much as one over many
            if self.waiting and (free >= max(1, self.slots // 8) or free >= len(self.waiting)):
                self._admit(min(free, len(self.waiting)))
            else:
                self._step()
        return self._answers()

    def _admit(self, count: int) -> None:
        """Give `count` waiting rows slots, compute their prompts and draw their first tokens."""
        chosen = [self.waiting.popleft() for _ in range(count)]
        rows = [self.rows[i] for i in chosen]
        slots = slice(self.active, self.active + count)
        groups: dict[tuple[int, ...], list[int]] = {}
        for slot, row in enumerate(rows, self.active):
            groups.setdefault(tuple(row.prompt), []).append(slot)
        logits = self.decoder.prefill([list(p) for p in groups], list(groups.values()))
        group_of = {slot: g for g, members in enumerate(groups.values()) for slot in members}
        self.state[:, slots] = torch.tensor(
            [
                [0, len(row.prompt) - 1, -1, i * self.width - 1, i * self.width + row.limit - 1, i, row.sample_id]
                for i, row in zip(chosen, rows)
            ],
            device=self.device,
        ).T
        if not self.params.greedy:
            state = self.state[:, slots]
            self.uniforms[slots] = self._random(state[_SAMPLE], state[_STEP] + 1 - self.column)
        self.active += count
        self._take(logits[[group_of[slot] for slot in range(slots.start, slots.stop)]], slots)
        self._retire(slots)

    def _random(self, sample_ids: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """(B, _BLOCK_STEPS) uniforms of positions first (B,) and on."""
        steps = torch.arange(_BLOCK_STEPS, device=self.device)
        return uniform(self.params.seed, sample_ids[:, None], first[:, None] + steps)

    def _step(self) -> None:
        """One more token for every active row."""
        live = slice(0, self.active)
        self.column += 1
        if self.column == _BLOCK_STEPS:
            self.column = 0
            if not self.params.greedy:
                self.uniforms[live] = self._random(self.state[_SAMPLE, live], self.state[_STEP, live] + 1)
            self._check()
        logits = self.decoder.step(self.state[_TOKEN, live])
        self.due -= 1
        self.steps += 1
        tokens = self._take(logits, live)
        ended = self.due == 0 or (self.stops and bool(self.is_stop[tokens].any()))
        if self.params.stop is not None and self.steps % LOOK_EVERY == 0:
            ended |= self._look_for_text()
        if ended:
            self._retire(live)

    def _look_for_text(self) -> bool:
        """Note which active rows a text ended, and whether there are any."""
        found = False
        for row, step in self.state[[_ROW, _STEP], : self.active].T.tolist():
            found |= self._text_end(row, step + 1) is not None
        return found

    def _text_end(self, row: int, length: int) -> int | None:
        """Where a text ends a row that has `length` tokens; None where no text does."""
        if self.params.stop is not None and row not in self.text_ends:
            tokens = self.tokens[row * self.width : row * self.width + length].tolist()
            end = self.params.stop.find(tokens, self.looked_at[row])
            self.looked_at[row] = length
            if end is not None:
                self.text_ends[row] = end
        return self.text_ends.get(row)

    def _take(self, logits: torch.Tensor, slots: slice) -> torch.Tensor:
        """Draw a token for each row of `slots` and write it down. Returns the tokens."""
        state = self.state[:, slots]
        tokens, log_probs = self.decoder.choose(logits, self.params, self.uniforms[slots, self.column])
        state[_TOKEN] = tokens
        state[_MOVING].add_(1)
        out = state[_OUT]
        self.tokens.index_copy_(0, out, tokens)
        self.log_probs.index_copy_(0, out, log_probs)
        return tokens

    def _retire(self, slots: slice) -> None:
        """Free those of `slots` whose rows ended; the last rows move into the holes, so active rows stay the first."""
        state = self.state[:, slots]
        ended = self.is_stop[state[_TOKEN]] | (state[_OUT] == state[_LAST])
        rows, steps = self.state[_ROW].tolist(), self.state[_STEP].tolist()
        if self.text_ends:
            ended |= torch.tensor([row in self.text_ends for row in rows[slots]], device=self.device)
        for slot in reversed((ended.nonzero()[:, 0] + slots.start).tolist()):
            row, length = rows[slot], steps[slot] + 1
            self.lengths[row] = self._text_end(row, length) or length
            self.active -= 1
            if slot != self.active:
                self.decoder.cache.move(self.active, slot)
                self.state[:, slot] = self.state[:, self.active]
                self.uniforms[slot] = self.uniforms[self.active]
        state = self.state[:, : self.active]
        self.decoder.seat(state[_POSITION])
        if self.active:
            self.due = int((state[_LAST] - state[_OUT]).min())

    def _check(self) -> None:
        """Raises ValueError when an active row's last log-prob is not finite."""
        state = self.state[:, : self.active]
        rows = [self.rows[i] for i in state[_ROW].tolist()]
        check_finite(self.log_probs[state[_OUT]], [r.index for r in rows], [r.sample_id for r in rows])

    def _answers(self) -> list[Generation]:
        tokens, log_probs = self.tokens.view(-1, self.width), self.log_probs.view(-1, self.width)
        check_finite(log_probs.sum(-1), [r.index for r in self.rows], [r.sample_id for r in self.rows])
        answers: list[Generation | None] = [None] * len(self.rows)
        every = zip(self.rows, self.lengths, tokens.tolist(), log_probs.tolist())
        for at, (row, length, ids, lps) in enumerate(every):
            reason = "stop" if at in self.text_ends or ids[length - 1] in self.stops else "length"
            answers[row.index] = Generation(ids[:length], lps[:length], reason)
        return answers
