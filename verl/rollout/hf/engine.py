"""`rollout.name=hf`: transformers' `generate`, for all causal language models in transformers."""

import inspect
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from verl.config import schema
from verl.modeling.attention import use_default_attention
from verl.modeling.casting import autocast_dtype
from verl.modeling.positions import batch_positions, position_axes
from verl.modeling.vision import Media, TextTokens, attention_of, is_vision_config
from verl.rollout.base import RolloutEngine, RolloutEnv, RolloutStats, SharesWeights
from verl.rollout.checks import check_request
from verl.rollout.loading import empty_module, load_module
from verl.rollout.request import Completion, Request, SamplingParams, StopStrings, batches_of
from verl.rollout.sampling import SAMPLING_KEYS, check_finite, choose, uniform
from verl.utils.device import resolve_dtype
from verl.weight_sync import ModuleReceiver

#: the cause of the limit of positions, in error messages
_POSITIONS = "the model's max_position_embeddings"


class _Sampler(LogitsProcessor):
    """Logits processor that samples the next token, records its log-prob, and masks all other tokens.

    transformers' sampling uses one random stream for the whole batch and keeps the scores of every step. This one uses
    counter-based random numbers (seed, sample id, position) and keeps one log-prob per token.
    """

    def __init__(self, requests: Sequence[Request], prompt_width: int, device: torch.device):
        self.params = requests[0].params
        self.sample_ids = torch.tensor([request.sample_id for request in requests], device=device)
        self.seeds = torch.tensor([request.params.seed for request in requests], device=device)
        self.prompt_width = prompt_width
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        position = input_ids.shape[1] - self.prompt_width
        uniforms = None if self.params.greedy else uniform(self.seeds, self.sample_ids, position)
        tokens, log_probs = choose(scores, self.params, uniforms)
        check_finite(log_probs, range(len(log_probs)), self.sample_ids.tolist())
        self.log_probs.append(log_probs)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)


class _StopText(StoppingCriteria):
    """Stopping criterion: ends a row whose last token completes a stop string."""

    def __init__(self, stops: Sequence[StopStrings | None], prompt_width: int):
        self.stops = stops
        self.prompt_width = prompt_width

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        responses = input_ids[:, self.prompt_width :].tolist()
        ended = [
            stop is not None and stop.find(response, len(response) - 1) is not None
            for stop, response in zip(self.stops, responses)
        ]
        return torch.tensor(ended, device=input_ids.device)


class HFRollout(RolloutEngine):
    """Generates with a HuggingFace causal language model in this process, usually the trainer's module.

    Args:
        module: the model.
        pad_token_id: padding token of prompts.
        max_rows: max rows per `generate` call of transformers; limits the memory of the KV cache.
        compute_dtype: dtype of the forward pass, if different from the parameters.
        weights: receiver of the module's weights, if they are not shared with the trainer.
    """

    sampling_keys = SAMPLING_KEYS

    def __init__(
        self,
        module: torch.nn.Module,
        pad_token_id: int,
        max_rows: int = 1024,
        compute_dtype: torch.dtype | None = None,
        weights: ModuleReceiver | None = None,
    ):
        self.module = module
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.autocast_to = autocast_dtype(module.dtype, compute_dtype)  # the trainer's module may cast at use instead
        self.weights = weights
        self.reads_images = is_vision_config(module.config)
        self.stats = RolloutStats()
        self._reads_padding: bool | None = None  # a call then has prompts of one length; known at the first call

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutEngine.generate`. Requests that differ in temperature, filters or stop tokens run in separate
        batches.

        Raises:
            ValueError: an invalid request (see `check_request`), non-finite logits, or weights that were not received.
        """
        vocab_size, max_positions = self._limits()
        for index, request in enumerate(requests):
            check_request(f"prompt {index}", request, "hf", vocab_size, max_positions, _POSITIONS, self.reads_images)
        if self.weights is not None:
            self.weights.check_filled()
        start = time.perf_counter()
        self.stats = RolloutStats()
        completions: list[Completion | None] = [None] * len(requests)
        attention, training = attention_of(self.module.config), self.module.training
        # the trainer's packed attention has no cache
        use_default_attention(self.module)
        # `generate` fills what is not set from the model's own file: its end tokens, a repetition penalty, ...
        defaults, self.module.generation_config = self.module.generation_config, GenerationConfig()
        self.module.eval()
        try:
            if self._reads_padding is None:
                self._reads_padding = self._changes_with_padding()
            for indices in self._batches(requests, max_positions):
                for index, completion in zip(indices, self._generate([requests[i] for i in indices])):
                    completions[index] = completion
        finally:
            self.module.generation_config = defaults
            self.module.set_attn_implementation(attention)
            self.module.train(training)
        self.stats.seconds = time.perf_counter() - start
        return completions

    async def generate_one(self, request: Request) -> Completion:
        """See `RolloutEngine.generate_one`. An invalid request fails without affecting the others."""
        name = f"the prompt of sample_id {request.sample_id!r}"
        check_request(name, request, "hf", *self._limits(), _POSITIONS, self.reads_images)
        return await super().generate_one(request)

    def _limits(self) -> tuple[int, int | None]:
        """Size of the vocabulary, and max length of prompt plus response (None: no limit)."""
        text = self.module.config.get_text_config()
        return text.vocab_size, getattr(text, "max_position_embeddings", None)

    def _batches(self, requests: Sequence[Request], max_positions: int | None) -> list[list[int]]:
        """Indices of the requests of each call. Prompts of similar length share a call, which reduces padding.

        All rows of a call take as many steps as the longest response, so a long prompt does not share a call with a
        long response if that exceeds the positions.
        """
        batches: list[list[int]] = []
        for _, members in batches_of(requests):
            batch, steps = [], 0
            for i in sorted(members, key=lambda i: len(requests[i].prompt_ids)):
                limit, length = requests[i].params.max_tokens, len(requests[i].prompt_ids)
                too_long = max_positions is not None and length + max(steps, limit) > max_positions
                other = self._reads_padding and batch and len(requests[batch[0]].prompt_ids) != length
                if batch and (too_long or other or len(batch) == self.max_rows):
                    batches.append(batch)
                    batch, steps = [], 0
                batch.append(i)
                steps = max(steps, limit)
            batches.append(batch)
        return batches

    def _changes_with_padding(self) -> bool:
        """Whether padding on the left of a prompt changes its logits: the model counts it as positions, for example."""
        ids = torch.tensor([[self.pad_token_id] * 3 + [5, 6, 7, 8]], device=self.module.device) % self._limits()[0]
        mask = (torch.arange(7, device=ids.device) >= 3).long()[None]
        config = GenerationConfig(
            max_new_tokens=1, pad_token_id=self.pad_token_id, output_logits=True, return_dict_in_generate=True
        )
        with torch.autocast(ids.device.type, self.autocast_to, enabled=self.autocast_to is not None):
            padded, alone = (
                self.module.generate(ids[:, n:], attention_mask=mask[:, n:], generation_config=config).logits[0]
                for n in (0, 3)
            )
            forward = self.module(ids[:, 3:], use_cache=False).logits[:, -1]
        # 16 bits: other shapes round differently
        bound = 1e-3 if (self.autocast_to or self.module.dtype).itemsize > 2 else 0.05
        bound *= forward.abs().max()
        if (alone - forward).abs().max() > bound:
            raise ValueError(
                f"rollout.name=hf: transformers generates with other logits than the forward pass of "
                f"{type(self.module).__name__} has: it is not supported"
            )
        return not (padded - alone).abs().max() <= bound

    def _generate(self, requests: list[Request]) -> list[Completion]:
        params, device = requests[0].params, self.module.device
        prompts = [list(request.prompt_ids) for request in requests]
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad_token_id] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        sampler = _Sampler(requests, width, device)
        config = GenerationConfig(
            max_new_tokens=max(request.params.max_tokens for request in requests),
            do_sample=False,
            eos_token_id=None if params.ignore_eos else list(params.stop_token_ids),
            pad_token_id=self.pad_token_id,
            use_cache=True,
        )
        images, embedded = self._images(requests, ids, mask)
        stops = [request.params.stop for request in requests]
        criteria = StoppingCriteriaList([_StopText(stops, width)]) if any(stops) else None
        autocast = torch.autocast(device.type, self.autocast_to, enabled=self.autocast_to is not None)
        with autocast, embedded:
            output = self.module.generate(
                images.pop("input_ids", ids),
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=criteria,
                **images,
            )[:, width:]
        log_probs = torch.stack(sampler.log_probs, 1).tolist()
        self.stats.steps += output.shape[1]
        every = zip(output.tolist(), log_probs, requests)
        return [self._truncate(tokens, lps, request.params) for tokens, lps, request in every]

    def _images(
        self, requests: list[Request], ids: torch.Tensor, mask: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], AbstractContextManager[None]]:
        """The arguments of a model for the images of left-padded prompts (b, P), with the positions of training, none
        without images; and the context for calling the model (`TextTokens.embedded`)."""
        config, inputs = self.module.config, [request.multi_modal_inputs for request in requests]
        if not self.reads_images or not any(inputs):
            return {}, nullcontext()
        continued = [request.continued for request in requests]
        lengths = [count if image else ids.shape[1] for image, count in zip(inputs, continued)]
        text = TextTokens.find(config, ids, torch.tensor(lengths))
        media = Media(config, inputs)
        columns = media.by_row(media.index.tolist())
        if position_axes(config) > 1:
            positions = batch_positions(config, ids.cpu(), mask.cpu(), 0, inputs, continued)
            if (positions[:, :, -1] != positions.amax((1, 2))[:, None]).any():
                raise ValueError("rollout.name=hf: expected prompts that end with text, found an image at the end")
            columns["position_ids"] = positions.transpose(0, 1)
        else:
            columns["token_type_ids"] = (text.ids == config.image_token_id).long()
        known = inspect.signature(self.module.forward).parameters
        arguments = {name: values.to(ids.device) for name, values in columns.items() if name in known}
        return {"input_ids": text.ids, **arguments}, text.embedded(self.module)

    def _truncate(self, tokens: list[int], log_probs: list[float], params: SamplingParams) -> Completion:
        """The response up to and including its first stop token."""
        tokens = tokens[: params.max_tokens]
        end = next((t + 1 for t, token in enumerate(tokens) if token in params.active_stop_ids), None)
        text_end = params.stop.find(tokens[:end]) if params.stop is not None else None
        end = end if text_end is None else text_end
        length = end if end is not None else len(tokens)
        self.stats.tokens += length
        return Completion(tokens[:length], log_probs[:length], "stop" if end is not None else "length")

    def receiver(self) -> ModuleReceiver | None:
        return self.weights


# ---- factory --------------------------------------------------------------------------------------------------------


def make_hf(
    config: schema.RolloutEngineConfig,
    model: schema.ModelConfig,
    env: RolloutEnv,
    train_engine: SharesWeights | None = None,
) -> HFRollout:
    """Make the engine, on the trainer's module if it is unsharded (adapters may be unmerged), otherwise on a copy."""
    dtype = env.compute_dtype or resolve_dtype(config.dtype, env.device)
    shared = None if train_engine is None else train_engine.shared_module()
    weights = None
    if shared is None and train_engine is None:
        shared = load_module(model, dtype, env.device)
        weights = ModuleReceiver(shared, filled=True)
    elif shared is None:
        shared = empty_module(model, dtype, env.device, train_engine.buffers())
        weights = ModuleReceiver(shared)
    options = {"max_rows": config.max_num_seqs, "compute_dtype": dtype, "weights": weights}
    return HFRollout(shared, env.pad_token_id, **options)
