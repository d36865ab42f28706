"""The HTTP application: routes, authentication, limits, and disconnects."""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from verl.server.protocol import ApiError, Call, read_call
from verl.server.responses import chunks, full_body
from verl.server.service import Conversation, Generator, Running, ServedModel, SingleCall

logger = logging.getLogger("verl.server")

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
) -> Starlette:
    """The application.

    Args:
        model: the model that is served.
        api_key: token of the header "Authorization: Bearer ...".
        generator: the engine of the routes /v1/...; None: there are no such routes.
        find_episode: adds the routes /episodes/{id}/v1/..., whose calls join one trajectory per episode.
        max_body: bytes of the largest request body.
    """
    routes = _Routes(model, generator, max_body, find_episode)
    paths = [Route("/health", routes.health)]
    if generator is not None:
        paths += [
            Route("/v1/models", routes.models),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
        ]
    if find_episode is not None:
        paths += [
            Route("/episodes/{episode}/v1/models", routes.models),
            Route("/episodes/{episode}/v1/chat/completions", routes.chat, methods=["POST"]),
        ]
    app = Starlette(routes=paths, exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error})
    app.add_middleware(_Authentication, api_key=api_key)
    return app


class _Routes:
    def __init__(self, model: ServedModel, generator: Any, max_body: int, find_episode: FindEpisode | None):
        self.model, self.generator, self.max_body, self.find_episode = model, generator, max_body, find_episode
        self._large = ThreadPoolExecutor(LARGE_THREADS, thread_name_prefix="tokenize")

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        entry = {
            "id": self.model.name,
            "object": "model",
            "created": 0,
            "owned_by": "verl",
            "max_model_len": self.model.max_model_len,
            "weight_version": None if self.generator is None else self.generator.weight_version,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, True)

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, False)

    async def _respond(self, request: Request, is_chat: bool) -> Response:
        try:
            body, size = await _read_json(request, self.max_body)
            running = await self._start(read_call(is_chat, body), size, request)
        except ClientDisconnect:
            logger.info("a client has disconnected before its call was started")
            return Response(status_code=499)
        if running.call.stream:
            return _EventStream(running)
        try:
            return JSONResponse(await _unless_disconnected(request.receive, full_body(running)))
        except ApiError:
            raise
        except ClientDisconnect:
            logger.info("%s: the client has disconnected: aborted", running.call.call_id)
            return Response(status_code=499)
        except Exception as error:
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


class _EventStream(Response):
    """Server-sent events with the chunks of a call."""

    media_type = "text/event-stream"

    def __init__(self, running: Running):
        super().__init__()
        self.running = running
        self.headers["cache-control"] = "no-cache"
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with suppress(ClientDisconnect):
            await _unless_disconnected(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    data = f"data: {event}\n\n".encode()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # some servers report a disconnect when sending
            raise ClientDisconnect from None
        finally:
            self.running.end()

    async def _events(self) -> AsyncIterator[str]:
        try:
            async with aclosing(chunks(self.running)) as stream:
                async for chunk in stream:
                    yield json.dumps(chunk)
        except ApiError as error:
            yield json.dumps(error.body())
        except Exception as error:
            yield json.dumps(_engine_error(self.running.call.call_id, error).body())
        yield "[DONE]"


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
    """Rejects requests without the token, except for /health."""

    def __init__(self, app: ASGIApp, api_key: str):
        self.app, self.expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            token = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(token, self.expected):
                problem = "a wrong token" if token else "none"
                message = f'expected the header "Authorization: Bearer TOKEN" with the server\'s token, found {problem}'
                response = await _on_api_error(Request(scope), ApiError(401, message, code="invalid_api_key"))
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)
