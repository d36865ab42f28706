"""Rollout by transformers' `generate`, on the module it is given: works for every model that transformers can run."""

import time
from collections.abc import Iterable, Sequence

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from verl.rollout.base import Generation, RolloutEngine, RolloutStats, SamplingParams
from verl.rollout.sampling import draw
from verl.rollout.stop_strings import StopStrings


class _Sampler(LogitsProcessor):
    """Draws the next token itself and leaves `generate` no other choice, so that its log-prob is known.

    transformers' own sampling takes one random stream for the whole batch and keeps the scores of every step; this
    draws by (seed, sample, position) and keeps one number a token.
    """

    def __init__(self, params: SamplingParams, sample_ids: torch.Tensor, prompt_width: int):
        self.params = params
        self.sample_ids = sample_ids
        self.prompt_width = prompt_width
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        position = input_ids.shape[1] - self.prompt_width
        tokens, log_probs = draw(scores, self.params, self.sample_ids, position)
        self.log_probs.append(log_probs)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)


class _Text(StoppingCriteria):
    """Ends a row whose last token completes a stop string."""

    def __init__(self, stop: StopStrings, prompt_width: int):
        self.stop = stop
        self.prompt_width = prompt_width

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        answers = input_ids[:, self.prompt_width :].tolist()
        ended = [self.stop.find(answer, len(answer) - 1) is not None for answer in answers]
        return torch.tensor(ended, device=input_ids.device)


class HFRollout(RolloutEngine):
    """Generates with a HuggingFace causal language model in this process; usually the trainer's own module.

    max_rows: rows per `generate` call at most (key/value memory). compute_dtype: of the forward pass, where it is not
    that of the parameters.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        pad_token_id: int,
        max_rows: int = 1024,
        compute_dtype: torch.dtype | None = None,
    ):
        self.module = module
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.autocast_to = None if compute_dtype == module.dtype else compute_dtype
        self.stats = RolloutStats()

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, sample_ids: Sequence[int] | None = None
    ) -> list[Generation]:
        for row, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {row} has no tokens")
        start = time.perf_counter()
        self.stats = RolloutStats()
        sample_ids = range(len(prompts)) if sample_ids is None else sample_ids
        # neighbours of like length share a call: less padding
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers: list[Generation | None] = [None] * len(prompts)
        attention, training = self.module.config._attn_implementation, self.module.training
        # the trainer's packed attention has no cache
        self.module.set_attn_implementation("sdpa" if self.module._supports_sdpa else "eager")
        self.module.eval()
        try:
            for at in range(0, len(order), self.max_rows):
                rows = order[at : at + self.max_rows]
                made = self._generate([prompts[i] for i in rows], params, [sample_ids[i] for i in rows])
                for i, answer in zip(rows, made):
                    answers[i] = answer
        finally:
            self.module.set_attn_implementation(attention)
            self.module.train(training)
        self.stats.seconds = time.perf_counter() - start
        return answers

    def _generate(self, prompts: list[list[int]], params: SamplingParams, sample_ids: list[int]) -> list[Generation]:
        device, width = self.module.device, max(map(len, prompts))
        ids = torch.tensor([[self.pad_token_id] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        sampler = _Sampler(params, torch.tensor(sample_ids, device=device), width)
        config = GenerationConfig(
            max_new_tokens=params.max_tokens,
            do_sample=False,
            eos_token_id=None if params.ignore_eos else list(params.stop_token_ids),
            pad_token_id=self.pad_token_id,
            use_cache=True,
        )
        with torch.autocast(device.type, self.autocast_to, enabled=self.autocast_to is not None):
            made = self.module.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=None if params.stop is None else StoppingCriteriaList([_Text(params.stop, width)]),
            )[:, width:]
        log_probs = torch.stack(sampler.log_probs, 1).tolist()
        self.stats.steps += made.shape[1]
        return [self._cut(tokens, lps, params) for tokens, lps in zip(made.tolist(), log_probs)]

    def _cut(self, tokens: list[int], log_probs: list[float], params: SamplingParams) -> Generation:
        """The answer up to and including its first end."""
        stops = () if params.ignore_eos else params.stop_token_ids
        end = next((t + 1 for t, token in enumerate(tokens) if token in stops), None)
        text_end = params.stop.find(tokens[:end]) if params.stop is not None else None
        end = end if text_end is None else text_end
        length = end if end is not None else len(tokens)
        self.stats.tokens += length
        return Generation(tokens[:length], log_probs[:length], "stop" if end is not None else "length")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights into the module; raises ValueError for a name that it does not have."""
        present = dict(self.module.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in weights:
                if name not in present:
                    raise ValueError(f"weights of version {version}: {type(self.module).__name__} has no {name!r}")
                present[name].copy_(tensor)

    def sleep(self) -> None:
        """Nothing is kept between calls."""

    def wake(self) -> None:
        """Nothing is kept between calls."""
