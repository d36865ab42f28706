"""The native rollout engine: generation on the training model's own parameters.

The rows are known in advance and nobody streams, so nothing here serves requests: distinct prompts are computed once
for all their samples, rows take the places of those that finished, and random numbers come by counter.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil
import torch

from verl.rollout.base import Generation, RolloutEngine, RolloutStats, SamplingParams
from verl.rollout.native_model import Decoder, check_supported, read_decoder
from verl.rollout.native_torch import SlotCache, TorchDecoder
from verl.rollout.sampling import check_finite, choose, uniform

#: steps for which random numbers are made at once, and after which broken rows are looked for
_BLOCK_STEPS = 32


@dataclass(frozen=True)
class Row:
    """A row to generate: its place among the prompts, its prompt, its sample id, its response tokens at most."""

    index: int
    prompt: list[int]
    sample_id: int
    limit: int

    @property
    def length(self) -> int:
        """Columns of the cache it can need: the last token is never fed back."""
        return len(self.prompt) + self.limit - 1


class NativeRollout(RolloutEngine):
    """Generates with the parameters of a HuggingFace decoder (native_model.FAMILIES) where they are.

    module: whole (not sharded), on one device; its projections are laid out once so that joint products need no copy.
    dtype: None computes in the parameters' own. Another one keeps a copy of the weights in it, made anew by each call.
    max_rows: rows at once at most. cache_bytes: memory for keys and values; None is a quarter of what is available.
    Raises ValueError for a module that it cannot run.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        pad_token_id: int,
        dtype: torch.dtype | None = None,
        max_rows: int = 512,
        cache_bytes: int | None = None,
    ):
        check_supported(module)
        self.module = module
        self.pad_token_id = pad_token_id
        self.dtype = dtype
        self.max_rows = max_rows
        self.cache_bytes = cache_bytes
        self.stats = RolloutStats()
        self._cache: SlotCache | None = None

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        sample_ids: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Generation]:
        """As RolloutEngine.generate. limits: response tokens at most of each row, where params.max_tokens is not it.

        Raises ValueError for an empty prompt, a token outside the vocabulary, a row longer than the model's positions,
        a cache too small for one row, and logits that are not finite (it names the row).
        """
        start = time.perf_counter()
        self.stats = RolloutStats()
        decoder = read_decoder(self.module, self.dtype)
        rows = plan_rows(prompts, params, sample_ids, limits, decoder)
        if not rows:
            return []
        with torch.inference_mode():
            batch = _Batch(rows, params, TorchDecoder(decoder, self._room(decoder, rows)))
            try:
                answers = batch.run()
            except ValueError:
                self.sleep()  # what broken weights left in the cache must not reach another row
                raise
        self.stats.tokens = sum(len(answer.token_ids) for answer in answers)
        self.stats.steps = batch.steps
        self.stats.seconds = time.perf_counter() - start
        return answers

    def _room(self, decoder: Decoder, rows: list[Row]) -> SlotCache:
        """A cache for as many of `rows` at once as fit."""
        length = max(row.length for row in rows)
        per_row = length * decoder.cache_bytes_per_token()
        budget = self.cache_bytes if self.cache_bytes is not None else psutil.virtual_memory().available // 4
        slots = min(len(rows), self.max_rows, budget // per_row)
        if slots < 1:
            raise ValueError(
                f"the key/value cache has {budget:,} bytes, and one row of {length} tokens needs {per_row:,}: allow "
                "more memory, or fewer tokens"
            )
        old = self._cache
        like = decoder.embedding
        fits = old is not None and old.slots >= slots and old.length >= length
        if not fits or old.layers[0].device != like.device or old.layers[0].dtype != like.dtype:
            self._cache = old = None  # freed before the new one is made
            self._cache = SlotCache(decoder, slots, length)
        return self._cache

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights into the module. On the trainer's own module there is nothing to load."""
        present = dict(self.module.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in weights:
                if name not in present:
                    raise ValueError(f"weights of version {version}: {type(self.module).__name__} has no {name!r}")
                if present[name].shape != tensor.shape:
                    raise ValueError(
                        f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, "
                        f"expected {tuple(present[name].shape)}"
                    )
                if present[name].data_ptr() != tensor.data_ptr():
                    present[name].copy_(tensor)

    def sleep(self) -> None:
        """Give back the key/value cache."""
        self._cache = None

    def wake(self) -> None:
        """Nothing: the cache is made by the next call that generates, for the rows it has."""


def plan_rows(
    prompts: Sequence[list[int]],
    params: SamplingParams,
    sample_ids: Sequence[int] | None,
    limits: Sequence[int] | None,
    decoder: Decoder,
) -> list[Row]:
    """The rows in the order of their work: longest first, samples of one prompt side by side. Raises ValueError."""
    for name, values in (("sample_ids", sample_ids), ("limits", limits)):
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many {name}, found {len(values)}")
    sample_ids = range(len(prompts)) if sample_ids is None else sample_ids
    limits = [params.max_tokens] * len(prompts) if limits is None else limits
    rows = [Row(i, list(p), int(s), int(t)) for i, (p, s, t) in enumerate(zip(prompts, sample_ids, limits))]
    for row in rows:
        if not row.prompt:
            raise ValueError(f"prompt {row.index} has no tokens")
        if min(row.prompt) < 0 or max(row.prompt) >= decoder.vocab_size:
            raise ValueError(f"prompt {row.index} has a token outside the vocabulary of {decoder.vocab_size}")
        if not 1 <= row.limit <= params.max_tokens:
            raise ValueError(
                f"limit of row {row.index}: expected 1 to max_tokens={params.max_tokens}, found {row.limit}"
            )
        if len(row.prompt) + row.limit > decoder.max_positions:
            raise ValueError(
                f"row {row.index}: a prompt of {len(row.prompt)} and a response of {row.limit} tokens exceed "
                f"{decoder.max_positions} positions ({decoder.max_positions_reason}); shorten the prompt or the "
                "response"
            )
    return sorted(rows, key=lambda row: (-row.length, row.prompt))


# what a slot knows of its row, one line of _Batch.state each; those of _MOVING grow by one with every token
_TOKEN, _POSITION, _STEP, _OUT, _LAST, _ROW, _SAMPLE = range(7)
_MOVING = slice(_POSITION, _OUT + 1)


class _Batch:
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
        self.active = 0
        self.longest = 0  # 1 + the largest position of an active row
        self.due = 0  # steps until the first active row has all its tokens
        self.steps = 0

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
        logits = self.decoder.step(self.state[_TOKEN, live], self.state[_POSITION, live], self.longest)
        self.longest += 1
        self.due -= 1
        self.steps += 1
        tokens = self._take(logits, live)
        if self.due == 0 or (self.stops and bool(self.is_stop[tokens].any())):
            self._retire(live)

    def _take(self, logits: torch.Tensor, slots: slice) -> torch.Tensor:
        """Draw a token for each row of `slots` and write it down. Returns the tokens."""
        state = self.state[:, slots]
        tokens, log_probs = choose(logits, self.params, self.uniforms[slots, self.column])
        state[_TOKEN] = tokens
        state[_MOVING] += 1
        out = state[_OUT]
        self.tokens.index_copy_(0, out, tokens)
        self.log_probs.index_copy_(0, out, log_probs)
        return tokens

    def _retire(self, slots: slice) -> None:
        """Free those of `slots` whose rows ended; the last rows move into the holes, so active rows stay the first."""
        state = self.state[:, slots]
        ended = (self.is_stop[state[_TOKEN]] | (state[_OUT] == state[_LAST])).nonzero()[:, 0] + slots.start
        rows, steps = self.state[_ROW].tolist(), self.state[_STEP].tolist()
        for slot in reversed(ended.tolist()):
            self.lengths[rows[slot]] = steps[slot] + 1
            self.active -= 1
            if slot != self.active:
                self.decoder.cache.move(self.active, slot)
                self.state[:, slot] = self.state[:, self.active]
                self.uniforms[slot] = self.uniforms[self.active]
        if self.active:
            state = self.state[:, : self.active]
            self.longest = int(state[_POSITION].max()) + 1
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
        for row, length, ids, lps in zip(self.rows, self.lengths, tokens.tolist(), log_probs.tolist()):
            reason = "stop" if ids[length - 1] in self.stops else "length"
            answers[row.index] = Generation(ids[:length], lps[:length], reason)
        return answers
