"""Requests to a rollout engine, how they are sampled, and completions: token ids in, token ids and log-probs out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from numbers import Integral
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError

from verl.config.schema.rollout import LOWEST_TEMPERATURE, SamplingConfig

#: decode steps between searches for stop strings
SEARCH_INTERVAL = 8


@dataclass(frozen=True)
class StopStrings:
    """Ends a response with the token that completes one of `strings`.

    Raises:
        ValueError: no strings, or an empty one.
    """

    strings: tuple[str, ...]  # the stop strings
    decode: Callable[[list[int]], str]  # the tokenizer's method, token ids -> text

    def __post_init__(self) -> None:
        if not self.strings or not all(self.strings):
            raise ValueError(f"stop: expected non-empty strings, found {list(self.strings)}")

    def find(self, token_ids: Sequence[int], start: int = 0) -> int | None:
        """Number of tokens to keep; None without a match. The first `start` tokens have already been searched."""
        # a token is at least one byte, so earlier ones cannot be part of a match; one more, since decoding may strip
        # the space of the first
        begin = max(0, start - max(len(text.encode()) for text in self.strings) - 1)
        if not self._contains_stop(token_ids[begin:]):
            return None
        ends = range(max(start, begin) + 1, len(token_ids))
        return next((end for end in ends if self._contains_stop(token_ids[begin:end])), len(token_ids))

    def _contains_stop(self, token_ids: Sequence[int]) -> bool:
        text = self.decode(list(token_ids))
        return any(string in text for string in self.strings)


#: fields of `schema.SamplingConfig` that `SamplingParams` has in another form: max_tokens, and stop with its tokenizer
_OTHER_FORM = ("response_length", "stop")
#: sampling key -> default, of the others
SAMPLING_DEFAULTS = {name: f.default for name, f in SamplingConfig.model_fields.items() if name not in _OTHER_FORM}
FILTERS = SamplingConfig.filters()

#: a keyword-only dataclass with the fields of `schema.SamplingConfig`: temperature, top_k, top_p, min_p, ignore_eos
_SamplingFields = make_dataclass(
    "_SamplingFields",
    [(name, SamplingConfig.model_fields[name].annotation, default) for name, default in SAMPLING_DEFAULTS.items()],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True)
class SamplingParams(_SamplingFields):
    """How the response to one prompt is sampled.

    Args:
        max_tokens: maximum response length in tokens, including the stop token.
        stop_token_ids: a response ends with the first of these tokens, which is part of the response.
        seed: random seed; with the request's `sample_id` it determines the random numbers of the response.
        stop: stop strings.
        top_logprobs: K, for `Completion.top_log_probs`; 0: none.
        prompt_logprobs: K, for `Completion.prompt_log_probs`; None: none.
        temperature, top_k, top_p, min_p, ignore_eos: keyword-only fields, declared with defaults and bounds by
            `verl.config.schema.SamplingConfig`; a field that is added there is a field here. temperature=0 is greedy
            decoding, and top_k=-1, top_p=1 and min_p=0 are off.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int = 0
    stop: StopStrings | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"sampling: max_tokens must be at least 1, found {self.max_tokens}")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"sampling: temperature={self.temperature}: expected 0 or at least {LOWEST_TEMPERATURE:g}")
        if self.top_k == 0:
            raise ValueError("sampling: top_k must be -1 (off) or at least 1, found 0")
        try:
            SamplingConfig(**{name: getattr(self, name) for name in SAMPLING_DEFAULTS})
        except ValidationError as error:
            (detail, *_) = error.errors()
            expected = detail["msg"].replace("Input should be", "expected a value")
            raise ValueError(f"sampling: {detail['loc'][0]}={detail['input']!r}: {expected}") from None

    @classmethod
    def from_config(
        cls, section: BaseModel, *, stop_token_ids: tuple[int, ...], stop: StopStrings | None = None
    ) -> "SamplingParams":
        """Make the parameters from a `rollout` section, field by field.

        Args:
            section: `verl.config.schema.SamplingConfig` or a subclass.
            stop_token_ids: the end tokens of the tokenizer and the model.
            stop: `section.stop` with the tokenizer's `decode` (`stop_strings`).
        """
        settings = section.model_dump()
        values = {name: settings[name] for name in (*SAMPLING_DEFAULTS, "seed") if name in settings}
        return cls(settings["response_length"], stop_token_ids, stop=stop, **values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether one of `FILTERS` is on, so that log-probs are not those of the model's distribution."""
        return not self.greedy and any(getattr(self, name) != off for name, off in FILTERS.items())

    @property
    def active_stop_ids(self) -> tuple[int, ...]:
        """The token ids that end a response; empty with `ignore_eos`."""
        return () if self.ignore_eos else self.stop_token_ids

    def with_stops(self, strings: Iterable[str], token_ids: Iterable[int], decode: Callable) -> "SamplingParams":
        """Add stop strings and stop tokens. decode: the tokenizer's method, see `StopStrings`."""
        present = self.stop.strings if self.stop is not None else ()
        stop_strings = tuple(dict.fromkeys((*present, *strings)))
        stop_token_ids = tuple(dict.fromkeys((*self.stop_token_ids, *token_ids)))
        stop = StopStrings(stop_strings, decode) if stop_strings else None
        return replace(self, stop=stop, stop_token_ids=stop_token_ids)

    @property
    def shared(self) -> "SamplingParams":
        """The parameters that all requests of a batch must share: all except max_tokens, seed and stop."""
        return replace(self, max_tokens=1, seed=0, stop=None)


def stop_strings(strings: Sequence[str], tokenizer: Any) -> StopStrings | None:
    """Make the `StopStrings` of `rollout.stop`; None if there are none."""
    return StopStrings(tuple(strings), tokenizer.decode) if strings else None


@dataclass(frozen=True)
class Request:
    """A request for one response to a prompt.

    Args:
        prompt_ids: token ids, unpadded, at least one.
        params: sampling parameters.
        sample_id: determines, with `params.seed`, the random numbers of the response, independent of the batch.
        request_id: identifies the request in `abort`.
        multi_modal_data: the images and videos of the prompt, for engines that process them themselves.
        on_tokens: called by `generate_one` with new token ids and their log-probs, and with `top_logprobs` the third
            argument `top_log_probs`, by engines that report progress. The completion has all tokens.
        multi_modal_inputs: these as tensors of the processor, for engines that run the model; one object per prompt.
        raw_prompt_ids: the prompt with one placeholder token per image, for engines that process images; `prompt_ids`
            has as many as an image has features.
        continued: number of tokens of earlier turns at the end of `prompt_ids`; placeholder tokens among them are text.
    """

    prompt_ids: list[int]
    params: SamplingParams
    sample_id: int
    request_id: str = ""
    multi_modal_data: Any = None
    on_tokens: Callable[..., None] | None = None
    multi_modal_inputs: Mapping[str, Any] | None = None
    raw_prompt_ids: list[int] | None = None
    continued: int = 0

    @property
    def has_images(self) -> bool:
        """Whether the prompt has images or videos."""
        return bool(self.multi_modal_data) or bool(self.multi_modal_inputs)


#: columns of a batch that are fields of a request with images
MEDIA_COLUMNS = ("multi_modal_data", "multi_modal_inputs", "raw_prompt_ids")


def media_of(columns: Mapping[str, Any], sampled: Sequence[int] = ()) -> dict[str, Any]:
    """The fields of a request for a prompt with images; empty without images.

    Args:
        columns: the columns of one sample.
        sampled: tokens after the prompt, which the request continues.
    """
    media = {name: columns[name] for name in MEDIA_COLUMNS if columns.get(name) is not None}
    if not (media.get("multi_modal_data") or media.get("multi_modal_inputs")):
        return {}
    if "raw_prompt_ids" in media:
        media["raw_prompt_ids"] = [*media["raw_prompt_ids"], *sampled]
    return media


FinishReason = Literal["stop", "length", "abort"]
_FINISH_REASONS = get_args(FinishReason)
#: (token id, log-prob) of the most probable tokens of one position, in this order
TopLogProbs = list[tuple[int, float]]
#: (token id, log-prob, rank from 1) of a token of a prompt, and of the most probable ones in its place
PromptLogProbs = list[tuple[int, float, int]]


@dataclass
class Completion:
    """The response to one request.

    Args:
        token_ids: the response, including its stop token.
        log_probs: one per token, of the distribution that it was sampled from (after temperature, top-k, top-p and
            min-p); of the unscaled distribution when greedy.
        finish_reason: "stop" (a stop token or string), "length" (max_tokens), or "abort".
        weight_versions: spans (first token, weight version from that token on). May be empty: the whole response was
            then sampled with the last synchronized version.
        routed_experts: the experts that the routers chose (`verl.rollout.routed_experts`); None: not recorded.
        top_log_probs: per token the `params.top_logprobs` most probable ones of the distribution of `log_probs`, fewer
            if top-k, top-p or min-p left fewer; None: not asked for, or not supported.
        prompt_log_probs: per token of the prompt, by the model's distribution at temperature 1; of the first one None.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    routed_experts: Any = None
    top_log_probs: list[TopLogProbs] | None = None
    prompt_log_probs: list[PromptLogProbs | None] | None = None


def batches_of(requests: Sequence[Request]) -> list[tuple[SamplingParams, list[int]]]:
    """Group requests that can share a batch: (shared parameters, indices), in order of first appearance.

    max_tokens, seed and stop may differ within a batch.
    """
    shared: dict[int, SamplingParams] = {}  # most requests have the same parameters object
    batches: dict[SamplingParams, list[int]] = {}
    for index, request in enumerate(requests):
        params = shared.get(id(request.params))
        if params is None:
            params = shared[id(request.params)] = request.params.shared
        batches.setdefault(params, []).append(index)
    return list(batches.items())


def check_completions(requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Raise ValueError for completions that break the contract of `RolloutEngine.generate`."""
    if len(completions) != len(requests):
        raise ValueError(f"the rollout engine returned {len(completions)} completions for {len(requests)} requests")
    for index, (request, completion) in enumerate(zip(requests, completions)):
        problem = _problem_of(request, completion)
        if problem:
            raise ValueError(
                f"the rollout engine's completion of request {index} (sample_id {request.sample_id}): {problem}"
            )


def _problem_of(request: Request, completion: Completion) -> str | None:
    if not isinstance(completion, Completion):
        return f"expected a Completion, found {type(completion).__name__}"
    tokens = len(completion.token_ids)
    if len(completion.log_probs) != tokens:
        return f"expected one log-prob per token, found {len(completion.log_probs)} for {tokens} tokens"
    if completion.finish_reason not in _FINISH_REASONS:
        return f"expected finish_reason {' or '.join(_FINISH_REASONS)}, found {completion.finish_reason!r}"
    if wrong := [kind for kind in set(map(type, completion.token_ids)) if not issubclass(kind, Integral)]:
        return f"expected token ids that are ints, found {wrong[0].__name__}"
    if any(version < 0 for _, version in completion.weight_versions):
        return f"expected weight versions of at least 0, found {completion.weight_versions}"
    if tokens > request.params.max_tokens:
        return f"expected at most max_tokens={request.params.max_tokens} tokens, found {tokens}"
    if not tokens and completion.finish_reason != "abort":
        return "it has no tokens, but was not aborted"
    return None


def matches_ids(request: Request, request_ids: Sequence[str] | None) -> bool:
    """Whether `abort(request_ids)` applies to this request."""
    return request_ids is None or request.request_id in request_ids


def make_requests(
    prompts: Sequence[list[int]],
    params: SamplingParams,
    sample_ids: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
) -> list[Request]:
    """Make one request per prompt.

    Args:
        prompts: token ids of each prompt.
        params: sampling parameters of all requests.
        sample_ids: one per prompt; None: 0, 1, 2 ...
        limits: max response tokens, one per prompt; None: params.max_tokens.

    Raises:
        ValueError: lists of different length.
    """
    for name, values in (("sample_ids", sample_ids), ("limits", limits)):
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"expected as many {name} as prompts ({len(prompts)}), found {len(values)}")
    ids = range(len(prompts)) if sample_ids is None else sample_ids
    each = [params] * len(prompts) if limits is None else [replace(params, max_tokens=n) for n in limits]
    return [Request(list(p), sampling, int(i)) for p, sampling, i in zip(prompts, each, ids)]
