"""The HTTP application: response bodies, routes, authentication, limits, and disconnects.

Fields of a response that OpenAI does not have: `weight_version` of every choice, and with return_token_ids=true
`prompt_token_ids` and `token_ids` of every choice.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from verl.rollout.request import PromptLogProbs, TopLogProbs
from verl.server.protocol import ApiError, Call, read_call
from verl.server.service import Choice, Conversation, Delta, Generator, Running, ServedModel, SingleCall, bytes_of

logger = logging.getLogger("verl.server")

# ---- response bodies and stream chunks ------------------------------------------------------------------------------


async def full_body(running: Running) -> dict[str, Any]:
    """Generate, and return the response body."""
    call, choices = running.call, await running.choices()
    entries = []
    for choice in choices:
        entry: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
        if call.is_chat:
            entry["message"] = {"refusal": None, **choice.message}
        else:
            entry["text"] = running.echo(choice.index) + choice.content
        completion = choice.completion
        values = completion.token_ids, completion.log_probs, completion.top_log_probs
        if call.echo and call.logprobs is not None:
            values = _with_prompt(choice, call.top_logprobs)
        entry["logprobs"] = _log_probs(running, *values, 0)
        entry |= _own_fields(running, choice, completion.token_ids)
        entries.append(entry if call.is_chat else entry | _prompt_log_probs(running, choice))
    object_type = "chat.completion" if call.is_chat else "text_completion"
    body = {**_head(running, object_type), "choices": entries, "usage": _usage(running, choices)}
    return body | _prompt_log_probs(running, choices[0]) if call.is_chat else body


async def chunks(running: Running) -> AsyncIterator[dict[str, Any]]:
    """Generate, and return the chunks of a stream. Closing the iterator aborts the requests."""
    call = running.call
    object_type = "chat.completion.chunk" if call.is_chat else "text_completion"
    head, usage = _head(running, object_type), {"usage": None} if call.stream_options.include_usage else {}
    for index in range(len(running.requests)) if call.is_chat or call.echo else ():
        start = {"text": running.echo(index), "logprobs": None}
        start = {"delta": {"role": "assistant", "content": ""}} if call.is_chat else start
        yield {**head, "choices": [{"index": index, **start, "finish_reason": None}], **usage}
    choices: list[Choice] = []
    characters = [0] * len(running.requests)
    async with aclosing(running.deltas(progress=call.tools is None)) as deltas:
        async for delta in deltas:
            entry = _chunk_choice(running, delta, characters[delta.index])
            if entry["logprobs"] and not call.is_chat:
                characters[delta.index] += sum(map(len, entry["logprobs"]["tokens"]))
            yield {**head, "choices": [entry], **usage}
            if delta.choice is not None:
                choices.append(delta.choice)
    if call.stream_options.include_usage:
        yield {**head, "choices": [], "usage": _usage(running, choices)}


def _chunk_choice(running: Running, delta: Delta, offset: int) -> dict[str, Any]:
    call, choice = running.call, delta.choice
    entry: dict[str, Any] = {"index": delta.index, "finish_reason": choice.finish_reason if choice else None}
    if not call.is_chat:
        entry["text"] = delta.text
    elif call.tools and choice is not None:  # sent at once, so that calls are not sent as text first
        calls = [{"index": i, **function_call} for i, function_call in enumerate(choice.tool_calls)]
        entry["delta"] = ({"content": choice.content} if choice.content else {}) | (
            {"tool_calls": calls} if calls else {}
        )
    else:
        entry["delta"] = {"content": delta.text} if delta.text else {}
    entry["logprobs"] = _log_probs(running, delta.token_ids, delta.log_probs, delta.top_log_probs, offset)
    if choice is not None:
        return entry | _own_fields(running, choice, delta.token_ids)
    return entry | ({"token_ids": delta.token_ids} if call.return_token_ids else {})


def _head(running: Running, object_type: str) -> dict[str, Any]:
    call = running.call
    return {"id": call.call_id, "object": object_type, "created": running.created, "model": call.model}


def _own_fields(running: Running, choice: Choice, token_ids: list[int]) -> dict[str, Any]:
    fields: dict[str, Any] = {"weight_version": choice.weight_version}
    if running.call.return_token_ids:
        fields |= {"prompt_token_ids": choice.request.prompt_ids, "token_ids": token_ids}
    return fields


def _usage(running: Running, choices: Iterable[Choice]) -> dict[str, int]:
    prompts = sum(len(request.prompt_ids) for request in running.requests[:: running.call.n])
    sampled = sum(len(choice.completion.token_ids) for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


def _log_probs(
    running: Running,
    token_ids: Sequence[int],
    log_probs: Sequence[float | None],
    top: Sequence[TopLogProbs | None] | None,
    offset: int,
) -> dict[str, Any] | None:
    """The log-probs of tokens in OpenAI's form; None without `logprobs`. offset: number of characters before them."""
    call, tokenizer, decode = running.call, running.model.tokenizer, running.model.tokenizer.decode
    if call.logprobs is None:
        return None
    if call.is_chat:

        def entry(token: int, value: float) -> dict[str, Any]:
            return {"token": decode([token]), "logprob": value, "bytes": bytes_of(tokenizer, token)}

        best = [[entry(*each) for each in others] for others in top or [()] * len(token_ids)]
        every = zip(token_ids, log_probs, best, strict=True)
        return {"content": [entry(*each) | {"top_logprobs": others} for *each, others in every], "refusal": None}
    texts, best = [decode([token]) for token in token_ids], None
    if top is not None:  # with the sampled token; of tokens with the same text the most probable one
        every = zip(token_ids, log_probs, top, strict=True)
        both = [each and [*each, (token, value)] for token, value, each in every]
        texts_of = [each and {decode([token]): value for token, value in reversed(each)} for each in both]
        best = [each and dict(sorted(each.items(), key=lambda entry: -entry[1])) for each in texts_of]
    return {
        "tokens": texts,
        "token_logprobs": list(log_probs),
        "top_logprobs": best,
        "text_offset": [offset + position for position in accumulate(map(len, texts[:-1]), initial=0)][: len(texts)],
    }


def _with_prompt(choice: Choice, count: int) -> tuple[list[int], list[float | None], list[TopLogProbs | None] | None]:
    """Tokens, log-probs and top log-probs of the prompt and the response."""
    completion, prompt_ids = choice.completion, choice.request.prompt_ids
    prompt = completion.prompt_log_probs or [None] * len(prompt_ids)  # of an aborted call
    log_probs = [each and each[0][1] for each in prompt] + completion.log_probs
    best = [each and [entry[:2] for entry in each[1 : 1 + count]] for each in prompt]
    top = [*best, *(completion.top_log_probs or ())] if count else None
    return prompt_ids + completion.token_ids, log_probs, top


def _prompt_log_probs(running: Running, choice: Choice) -> dict[str, Any]:
    """The log-probs of a prompt in vLLM's form; empty without `prompt_logprobs`."""
    if running.call.prompt_logprobs is None:
        return {}
    decode, count = running.model.tokenizer.decode, running.call.prompt_logprobs

    def entries(each: PromptLogProbs) -> dict[str, dict[str, Any]]:
        kept = each[: 1 + count]
        return {str(i): {"logprob": value, "rank": rank, "decoded_token": decode([i])} for i, value, rank in kept}

    return {"prompt_logprobs": [each and entries(each) for each in choice.completion.prompt_log_probs or ()]}


# ---- the application ------------------------------------------------------------------------------------------------

T = TypeVar("T")

#: bytes of the largest request body
MAX_BODY = 16 * 2**20

#: bytes of a body above which it is tokenized in one of a few threads, so that other calls do not wait for it
LARGE_BODY = 2**16
LARGE_THREADS = 2

#: episode id -> its conversation. Raises ApiError for an unknown one
FindEpisode = Callable[[str], Conversation]


def make_app(
    model: ServedModel,
    api_key: str,
    *,
    generator: Generator | None = None,
    find_episode: FindEpisode | None = None,
    max_body: int = MAX_BODY,
    cors_origins: Sequence[str] = (),
) -> Starlette:
    """The application.

    Args:
        model: the model that is served.
        api_key: token of the header "Authorization: Bearer ...".
        generator: the engine of the routes /v1/...; None: there are no such routes.
        find_episode: adds the routes /episodes/{id}/v1/..., whose calls join one trajectory per episode.
        max_body: bytes of the largest request body.
        cors_origins: origins of web pages that may use the server ("*": all); none by default.
    """
    routes = _Routes(model, generator, max_body, find_episode)
    paths = [Route("/health", routes.health)]
    for base, users in (("/v1", generator), ("/episodes/{episode}/v1", find_episode)):
        if users is not None:
            paths += [Route(base + "/models", routes.models), Route(base + "/models/{name:path}", routes.model_info)]
            paths.append(Route(base + "/chat/completions", partial(routes.respond, is_chat=True), methods=["POST"]))
    if generator is not None:
        paths.append(Route("/v1/completions", partial(routes.respond, is_chat=False), methods=["POST"]))
    app = Starlette(routes=paths, exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error})
    app.add_middleware(_Authentication, api_key=api_key)
    if cors_origins:  # outermost: browsers send no token with the request that asks for permission
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])
    return app


class _Routes:
    def __init__(self, model: ServedModel, generator: Any, max_body: int, find_episode: FindEpisode | None):
        self.model, self.generator, self.max_body, self.find_episode = model, generator, max_body, find_episode
        self._large = ThreadPoolExecutor(LARGE_THREADS, thread_name_prefix="tokenize")

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model_info(self, request: Request) -> Response:
        self.model.check_name(request.path_params["name"])
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": 0,
            "owned_by": "verl",
            "max_model_len": self.model.max_model_len,
            "weight_version": None if self.generator is None else self.generator.weight_version,
        }

    async def respond(self, request: Request, is_chat: bool) -> Response:
        running = None
        try:
            body, size = await _read_json(request, self.max_body)
            running = await self._start(read_call(is_chat, body), size, request)
            if running.call.stream:
                return _EventStream(running)
            return JSONResponse(await _unless_disconnected(request.receive, full_body(running)))
        except ClientDisconnect:
            call = f"{running.call.call_id}: aborted: the" if running else "a"
            logger.info("%s client has disconnected%s", call, "" if running else " before its call was started")
            return Response(status_code=499)
        except Exception as error:
            if running is None or isinstance(error, ApiError):
                raise
            raise _engine_error(running.call.call_id, error) from error

    async def _start(self, call: Call, size: int, request: Request) -> Running:
        """Start a call with a body of `size` bytes. Raises ApiError, and ClientDisconnect."""
        episode = request.path_params.get("episode")
        if episode is not None:
            return Running.start(call, self.find_episode(episode), self.model)
        # in threads: to tokenize a body of several MiB takes seconds, for which other calls would wait. Calls of
        # clients that disconnect leave the queue
        threads = self._large if size > LARGE_BODY else None
        single = SingleCall(self.model, self.generator)
        tokenized = asyncio.get_running_loop().run_in_executor(threads, Running.start, call, single, self.model)
        return await _unless_disconnected(request.receive, tokenized)


async def _unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Wait for `work`, and cancel it if the client disconnects. Raises ClientDisconnect."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, disconnect):
            future.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events with the chunks of a call."""

    media_type = "text/event-stream"

    def __init__(self, running: Running):
        super().__init__(self._events(), headers={"cache-control": "no-cache"})
        self.running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self.running.end()

    async def _events(self) -> AsyncIterator[str]:
        try:
            async with aclosing(chunks(self.running)) as stream:
                async for chunk in stream:
                    yield f"data: {json.dumps(chunk)}\n\n"
        except Exception as error:
            known = error if isinstance(error, ApiError) else _engine_error(self.running.call.call_id, error)
            yield f"data: {json.dumps(known.body())}\n\n"
        yield "data: [DONE]\n\n"


def _engine_error(call_id: str, error: Exception) -> ApiError:
    logger.error("%s: the rollout engine failed", call_id, exc_info=error)
    return ApiError(500, f"the rollout engine failed: {type(error).__name__}: {error}", code="engine_error")


async def _read_json(request: Request, max_body: int) -> tuple[Any, int]:
    """The body and its bytes. Raises ApiError for one that is too large or not JSON."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_body:
            raise ApiError(413, f"the request body exceeds {max_body:,} bytes", code="request_too_large")
    try:
        content = json.loads(bytes(body))
        if b"\\u" in body:
            json.dumps(content, ensure_ascii=False).encode()  # tokenizers refuse lone surrogates, such as "\\ud800"
        return content, len(body)
    except (ValueError, RecursionError) as error:
        message = f"the request body is not JSON: {error}".encode(errors="backslashreplace").decode()
        raise ApiError(400, message, code="invalid_json") from None


# ---- errors and authentication --------------------------------------------------------------------------------------


async def _on_api_error(request: Request, error: ApiError) -> Response:
    # OpenAI's client retries calls with status 409, which would fail in the same way
    headers = {"x-should-retry": "false"} if error.status == 409 else {}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    message = f"{error.detail}: {request.method} {request.url.path}"
    return await _on_api_error(request, ApiError(error.status_code, message, code="invalid_url"))


class _Authentication:
    """Rejects requests without the token, except for /health, and those that a proxy could read in another way."""

    def __init__(self, app: ASGIApp, api_key: str):
        self.app, self.api_key = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._problem(scope) if scope["type"] == "http" else None
        with suppress(asyncio.CancelledError):  # by a server that stops: uvicorn would log a traceback of every call
            if error is None:
                return await self.app(scope, receive, send)
            response = await _on_api_error(Request(scope), error)
            response.headers["connection"] = "close"
            await response(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        names = [name for name, _ in scope["headers"]]
        if b"transfer-encoding" in names and b"content-length" in names:
            return ApiError(400, "expected Content-Length or Transfer-Encoding, found both", code="invalid_headers")
        tokens = [value for name, value in scope["headers"] if name == b"authorization"]
        if scope["path"] == "/health":
            return None
        scheme, _, token = (tokens[0] if len(tokens) == 1 else b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self.api_key):
            return None
        problem = ("none", "a wrong token")[len(tokens)] if len(tokens) < 2 else f"{len(tokens)} such headers"
        message = f'expected the header "Authorization: Bearer TOKEN" with the server\'s token, found {problem}'
        return ApiError(401, message, code="invalid_api_key")
