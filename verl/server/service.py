"""Calls to engine requests, and completions to choices and their text."""

import asyncio
import json
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from transformers.convert_slow_tokenizer import bytes_to_unicode

from verl.agents.chat import reads
from verl.agents.tools.parsers import TOOL_PARSERS, extract_calls
from verl.agents.tools.schemas import read_arguments
from verl.rollout.base import RolloutEngine
from verl.rollout.engine_thread import EngineThread
from verl.rollout.request import Completion, Request, SamplingParams, TopLogProbs, check_completions
from verl.server.protocol import ApiError, Call, invalid, too_long, unsupported


class ResponseText:
    """The text of one response, without special tokens, up to the first stop string.

    `feed` returns text that is final: a character whose bytes are incomplete, and text that may be the start of a stop
    string, are held back. The deltas joined are the text of the whole response.

    Args:
        stop: stop strings; the text ends before the first one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.token_ids: list[int] = []
        self._start = self._read = 0  # window of tokens that are decoded again with the next ones
        self._held_back = ""
        self._sent = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the text that they complete."""
        self.token_ids += token_ids
        decoded = self._decode(self.token_ids[self._start : self._read])
        extended = self._decode(self.token_ids[self._start :])
        if extended.endswith("\ufffd") or len(extended) <= len(decoded):
            return ""
        self._start, self._read = self._read, len(self.token_ids)
        self._held_back += extended[len(decoded) :]
        return self._send(len(self._held_back) - max((len(text) - 1 for text in self.stop), default=0))

    def finish(self) -> str:
        """The rest of the text."""
        text = self._cut(self._decode(self.token_ids))
        if not text.startswith(self._sent):
            return self._send(len(self._held_back))
        remaining = text[len(self._sent) :]
        self._sent = text
        return remaining

    def _send(self, length: int) -> str:
        text = self._held_back[: max(0, min(length, len(self._cut(self._held_back))))]
        self._held_back = self._held_back[len(text) :]
        self._sent += text
        return text

    def _cut(self, text: str) -> str:
        positions = [position for string in self.stop if (position := text.find(string)) >= 0]
        return text[: min(positions)] if positions else text

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def text_of(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text of a whole response."""
    reader = ResponseText(tokenizer, stop)
    reader.token_ids = list(token_ids)
    return reader.finish()


def bytes_of(tokenizer: Any, token: int) -> list[int]:
    """The bytes of a token, which may be a part of a character."""
    text, written = tokenizer.decode([token]), tokenizer.convert_ids_to_tokens(token)
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
    if "\ufffd" in text and (byte := re.fullmatch("<0x([0-9A-F]{2})>", written)):  # of SentencePiece
        return [int(byte[1], 16)]
    is_part = "\ufffd" in text and set(written) <= alphabet.keys()
    return [alphabet[character] for character in written] if is_part else list(text.encode())


class Generator(Protocol):
    """The engine as the server uses it. Called in the server's event loop."""

    @property
    def weight_version(self) -> int | None:
        """The version of the weights; None if it is not known."""

    async def generate(self, request: Request) -> Completion:
        """Generate one response. Cancelling the caller cancels the request."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests."""


class EngineLoop:
    """A `Generator` whose engine runs in its own thread.

    A decode step does not delay the server, and HTTP does not delay a decode step.
    """

    def __init__(self, engine: RolloutEngine):
        self.engine = engine
        self.thread = EngineThread("rollout engine")

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    async def generate(self, request: Request) -> Completion:
        return await asyncio.wrap_future(self.thread.submit(self._generate(request)))

    async def _generate(self, request: Request) -> Completion:
        completion = await self.engine.generate_one(request)
        check_completions([request], [completion])
        return completion

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests; None: all of them."""
        self.thread.call(self.engine.abort, request_ids)

    def close(self) -> None:
        """Abort all requests, wait for their completions, and end the thread."""
        if self.thread.is_alive():
            self.abort()
            self.thread.close(cancel=False)


@dataclass(frozen=True)
class ServedModel:
    """The model that is served, and the defaults of its calls.

    Args:
        name: its name in the API.
        tokenizer: has the chat template.
        params: sampling parameters of calls that do not give them; `max_tokens` is the default response length.
        vocab_size: number of tokens.
        max_model_len: maximum length of prompt and response.
        tool_parser: registered name of the parser of tool calls.
        sampling_keys: the sampling parameters that the engine supports; None: not declared.
    """

    name: str
    tokenizer: Any
    params: SamplingParams
    vocab_size: int
    max_model_len: int
    tool_parser: str = "hermes"
    sampling_keys: frozenset[str] | None = None

    def check_name(self, name: str) -> None:
        """Raises ApiError for the name of another model."""
        if name != self.name:
            problem = f"no model {name!r}: this server has {self.name!r}"
            raise ApiError(404, problem, param="model", code="model_not_found")

    def encode_chat(self, call: Call) -> list[int]:
        """Token ids of the messages with the generation prompt. Raises ApiError."""
        if self.tokenizer.chat_template is None:
            raise ApiError(
                400, f"the tokenizer of {self.name} has no chat template: use /v1/completions", param="messages"
            )
        if call.tools and not reads(self.tokenizer, "tools", call.template_kwargs):
            raise unsupported(
                "tools",
                f"the chat template of {self.name} ignores tools, so the model would not see them: use a model whose "
                "template has tools, or set a template (verl serve --chat-template, or "
                "actor_rollout_ref.model.custom_chat_template)",
            )
        try:
            text = self.tokenizer.apply_chat_template(
                call.messages, tools=call.tools, add_generation_prompt=True, tokenize=False, **call.template_kwargs
            )
        except Exception as error:  # templates raise their own errors for messages that they do not support
            message = f"the chat template does not support these messages: {type(error).__name__}: {error}"
            raise ApiError(400, message, param="messages") from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_prompts(self, call: Call) -> list[list[int]]:
        """Token ids of each prompt of a call. Raises ApiError."""
        if call.is_chat:
            return [self.encode_chat(call)]
        encoded = [list(p) if isinstance(p, list) else self.tokenizer(p)["input_ids"] for p in call.prompts]
        for ids in encoded:
            if not ids or min(ids) < 0 or max(ids) >= self.vocab_size:
                raise ApiError(400, f"prompt: expected token ids from 0 to {self.vocab_size - 1}", param="prompt")
        return encoded

    def sampling(self, call: Call, prompt_length: int) -> SamplingParams:
        """Sampling parameters of a call. Raises ApiError if the engine does not support one, or for a long prompt."""
        available = self.max_model_len - prompt_length
        if available < 1 or (call.max_tokens or 1) > available:
            raise too_long(
                f"the prompt has {prompt_length} tokens and max_tokens is {call.max_tokens or 1}, but the maximum "
                f"length is {self.max_model_len} tokens: shorten the messages or the response",
                "messages" if call.is_chat else "prompt",
            )
        asked = call.sampling | call.scores
        for name in list(asked) if self.sampling_keys is not None else ():
            for_sampled = name == "top_logprobs" and not call.is_chat and asked[name] == 1  # what clients mean by it
            if name not in self.sampling_keys and (not for_sampled or not asked.pop(name)):
                raise unsupported(name, f"{name} is not supported by this engine")
        seed = secrets.randbits(63) if call.seed is None else call.seed
        length = self.params.max_tokens if call.max_tokens is None else call.max_tokens
        limit = min(max(length, 1), available)  # engines sample at least one token, which a call without any drops
        try:
            params = replace(self.params, max_tokens=limit, seed=seed, **asked)
        except ValueError as error:
            raise invalid(None, str(error)) from None
        return self.with_stops(call, params)

    def with_stops(self, call: Call, params: SamplingParams) -> SamplingParams:
        """Add the stop strings and tokens of a call. Raises ApiError for a token that does not exist."""
        if any(token >= self.vocab_size for token in call.stop_token_ids):
            raise ApiError(400, f"stop_token_ids: expected ids below {self.vocab_size}", param="stop_token_ids")
        return params.with_stops(call.stop, call.stop_token_ids, self.tokenizer.decode)


@dataclass
class Choice:
    """One response."""

    index: int
    request: Request
    completion: Completion
    content: str  # without tool calls, if the call has tools
    tool_calls: list[dict[str, Any]]  # in OpenAI's form
    weight_version: int | None  # the oldest version of the weights that sampled it

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content if self.content or not calls else None, **calls}

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.tool_calls else self.completion.finish_reason


@dataclass
class Delta:
    """New tokens of one choice; `choice` is set once it is complete."""

    index: int
    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[TopLogProbs] | None = None
    text: str = ""
    choice: Choice | None = None


class Conversation(Protocol):
    """Makes the requests of a call, and receives its choices. A call outside of an episode has a `SingleCall`."""

    generator: Generator

    def requests(self, call: Call) -> list[Request]:
        """Raises ApiError."""

    def complete(self, call: Call, choices: list[Choice]) -> None:
        """The call has succeeded."""

    def release(self) -> None:
        """The call has ended without success."""


class SingleCall(Conversation):
    """A call outside of an episode."""

    def __init__(self, model: ServedModel, generator: Generator):
        self.model, self.generator = model, generator

    def requests(self, call: Call) -> list[Request]:
        self.model.check_name(call.model)
        requests = []
        for prompt in self.model.encode_prompts(call):
            params = self.model.sampling(call, len(prompt))
            for _ in range(call.n):
                index = len(requests)
                requests.append(Request(prompt, params, index, f"{call.call_id}-{index}"))
        return requests


@dataclass
class Running:
    """A call that has been started."""

    call: Call
    requests: list[Request]  # one per choice
    conversation: Conversation
    model: ServedModel
    created: int = field(default_factory=lambda: int(time.time()))
    _is_done: bool = False

    @classmethod
    def start(cls, call: Call, conversation: Conversation, model: ServedModel) -> "Running":
        """Check a call and make its requests. Raises ApiError."""
        return cls(call, conversation.requests(call), conversation, model)

    def echo(self, index: int) -> str:
        """The prompt as the text of a choice starts with it; empty without `echo`."""
        if not self.call.echo:
            return ""
        prompt = self.call.prompts[index // self.call.n]
        return prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt, skip_special_tokens=True)

    async def choices(self) -> list[Choice]:
        """Generate all choices."""
        async with aclosing(self.deltas(progress=False)) as deltas:
            return sorted([delta.choice async for delta in deltas], key=lambda choice: choice.index)

    async def deltas(self, progress: bool = True) -> AsyncIterator[Delta]:
        """Generate, and return new tokens as the engine reports them; the last delta of a choice has the choice.

        If the iteration is stopped early, the requests are aborted.
        """
        events: asyncio.Queue[Any] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._generate(i, events, progress)) for i in range(len(self.requests))]
        texts = [ResponseText(self.model.tokenizer, self._strings(request)) for request in self.requests]
        choices: list[Choice | None] = [None] * len(tasks)
        try:
            while None in choices:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                index, completion, token_ids, *values = event
                seen = len(texts[index].token_ids)
                if completion is None:
                    values += [None] * (2 - len(values))
                    yield Delta(index, token_ids, *values, texts[index].feed(token_ids))
                    continue
                choices[index] = choice = await self._choice(index, completion)
                completion = choice.completion
                texts[index].token_ids = self._visible(choice.request, completion)
                if None not in choices:
                    self.conversation.complete(self.call, sorted(choices, key=lambda c: c.index))
                    self._is_done = True
                every = completion.token_ids, completion.log_probs, completion.top_log_probs
                remaining = [values and values[seen:] for values in every]
                yield Delta(index, *remaining, texts[index].finish(), choice)
        finally:
            self.end()
            for task in tasks:
                task.cancel()

    def end(self) -> None:
        """Abort the requests that are still running."""
        if not self._is_done:
            self._is_done = True
            self.conversation.generator.abort([request.request_id for request in self.requests])
            self.conversation.release()

    async def _generate(self, index: int, events: asyncio.Queue[Any], progress: bool) -> None:
        request, loop = self.requests[index], asyncio.get_running_loop()

        def report(*values: Any) -> None:  # as `Request.on_tokens`
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, (index, None, *values))

        try:
            request = replace(request, on_tokens=report if progress and self.call.max_tokens != 0 else None)
            completion = await self.conversation.generator.generate(request)
        except asyncio.CancelledError:
            events.put_nowait(ApiError(503, "the request was cancelled", code="cancelled"))
            raise
        except Exception as error:
            events.put_nowait(error)
            return
        events.put_nowait((index, completion, []))

    async def _choice(self, index: int, completion: Completion) -> Choice:
        request = self.requests[index]
        asked = {"top_logprobs": request.params.top_logprobs or None, "prompt_logprobs": request.params.prompt_logprobs}
        for name in asked if completion.token_ids else ():
            if asked[name] is not None and getattr(completion, name.replace("logprobs", "log_probs")) is None:
                raise unsupported(name, f"{name} is not supported by this engine")
        if self.call.max_tokens == 0:
            completion = replace(completion, token_ids=[], log_probs=[], top_log_probs=[], finish_reason="length")
        text = text_of(self.model.tokenizer, self._visible(request, completion), self._strings(request))
        content, calls = text, []
        if self.call.tools:
            split = split_tool_calls(self.model, self.call, text, request.prompt_ids, completion.token_ids)
            content, calls = await split
        current = self.conversation.generator.weight_version
        version = min((version for _, version in completion.weight_versions), default=current)
        return Choice(index, request, completion, content, calls, version)

    @staticmethod
    def _visible(request: Request, completion: Completion) -> list[int]:
        """The tokens of a response that are shown as text: without its stop token."""
        ids = completion.token_ids
        return ids[:-1] if ids and ids[-1] in request.params.active_stop_ids else ids

    @staticmethod
    def _strings(request: Request) -> Sequence[str]:
        return request.params.stop.strings if request.params.stop else ()


async def split_tool_calls(
    model: ServedModel, call: Call, text: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> tuple[str, list[dict[str, Any]]]:
    """Split a response into its content and its tool calls, with arguments of the types of the tools' schemas.

    Without a readable call, the content is the whole text.
    """
    parser = TOOL_PARSERS[model.tool_parser](model.tokenizer)
    content, parsed = await extract_calls(parser, model.tokenizer, prompt_ids, token_ids)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in call.tools}
    calls = []
    for written in parsed:
        with suppress(ValueError):  # text that is not a call of the tool
            arguments = read_arguments(written.read_arguments(), schemas.get(written.name, {}))
            function = {"name": written.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    calls = calls if call.parallel_tool_calls else calls[:1]
    return (content.strip() if calls else text), calls
