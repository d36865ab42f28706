"""What clients of OpenAI's API expect, and what the server does with connections that are slow, many or ambiguous."""

import asyncio
import json
import logging
import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest

from examples.quickstart.tiny_model import tiny_model
from tests.waiting import wait_until
from verl.cli.serve import load
from verl.rollout.request import Completion, Request
from verl.server import http as server_module
from verl.server.app import LARGE_BODY, LARGE_THREADS, make_app
from verl.server.http import ServerThread
from verl.server.service import EngineLoop, ServedModel

KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
BEARER = f"authorization: Bearer {KEY}"
ORIGIN = "https://page.example"
CHAT = {"model": "a/tiny", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8}
PROMPT = {"model": "a/tiny", "prompt": "abc def", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(engine, model, running server) of a model whose name has a slash."""
    folder = tiny_model("qwen2", tmp_path_factory.mktemp("served") / "model")
    with load({"name": "native"}, {"path": str(folder), "template": None}, "cpu", (1024, 32), "a/tiny") as loaded:
        generator = EngineLoop(loaded[0])
        app = make_app(loaded[1], KEY, generator=generator, max_body=100_000, cors_origins=[ORIGIN])
        with ServerThread(app) as server:
            yield *loaded, server
        generator.close()


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served[2].url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_the_model_is_listed_and_described(client):
    assert client.models.retrieve("a/tiny") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="no model 'other': this server has 'a/tiny'"):
        client.models.retrieve("other")


def test_parameters_that_agents_send(client):
    plain = client.chat.completions.create(**CHAT, seed=1).choices[0].message.content
    sent = {"parallel_tool_calls": False, "reasoning_effort": "low", "store": True, "service_tier": "auto", "stop": ""}
    sent |= {"metadata": {"a": "b"}, "prediction": {"type": "content", "content": "x"}, "verbosity": "medium"}
    text = {"type": "text", "text": "hello there", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [text], "cache_control": {"type": "ephemeral"}}]
    assert (
        client.chat.completions.create(**{**CHAT, "messages": messages}, seed=1, **sent).choices[0].message.content
        == plain
    )


def test_ignored_parameters_are_logged_once(client, caplog, monkeypatch):
    monkeypatch.setattr("verl.server.protocol._noted", set())
    caplog.set_level(logging.INFO, "verl.server")
    for _ in range(2):
        client.chat.completions.create(**CHAT, user="me")
    assert [r.getMessage() for r in caplog.records] == ["the parameter 'user' of a call has no effect here"]


def test_the_template_reads_the_reasoning_effort(served, client, monkeypatch):
    tokenizer = served[1].tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ reasoning_effort }}!" + tokenizer.chat_template)
    choice = client.chat.completions.create(
        **CHAT, reasoning_effort="low", extra_body={"return_token_ids": True}
    ).choices[0]
    assert tokenizer.decode(choice.prompt_token_ids).startswith("low!")


@pytest.mark.parametrize("prompt", ["abc def", [5, 6, 7]])
def test_echo(served, client, prompt):
    whole = PROMPT | {"prompt": prompt}
    text = client.completions.create(**whole).choices[0].text
    start = prompt if isinstance(prompt, str) else served[1].tokenizer.decode(prompt)
    assert client.completions.create(**whole, echo=True).choices[0].text == start + text
    chunks = client.completions.create(**whole, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == start + text


def test_log_probs_of_completions(client):
    first, second = (client.completions.create(**PROMPT, logprobs=n).choices[0].logprobs for n in (0, 1))
    assert first.token_logprobs == second.token_logprobs and len(first.token_logprobs) == 8
    assert first.top_logprobs is None
    for token, value, best in zip(second.tokens, second.token_logprobs, second.top_logprobs):
        assert best == pytest.approx({token: value}, abs=1e-5)


@pytest.mark.parametrize(("parallel", "expected"), [(True, ["add", "sub"]), (False, ["add"])])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_ask_for_one_tool_call_at_a_time(served, client, monkeypatch, parallel, expected, stream):
    tokenizer = served[1].tokenizer
    text = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{"a": "1"}}}}</tool_call>' for name in ("add", "sub"))
    ids = tokenizer(text)["input_ids"]

    async def write(request: Request) -> Completion:
        return Completion(ids, [-0.5] * len(ids), "stop")

    monkeypatch.setattr(served[0], "generate_one", write)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("add", "sub")]
    chat = CHAT | {"max_tokens": 200, "tools": tools, "parallel_tool_calls": parallel}
    if stream:
        chunks = client.chat.completions.create(**chat, stream=True)
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    else:
        calls = client.chat.completions.create(**chat).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == expected
    assert all(json.loads(call.function.arguments) == {"a": 1} for call in calls)


# ---- headers --------------------------------------------------------------------------------------------------------


def test_web_pages_of_the_named_origins(served):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    for origin, status in ((ORIGIN, 200), ("https://other.example", 400)):
        response = httpx.options(f"{served[2].url}/v1/chat/completions", headers=ask | {"Origin": origin})
        assert response.status_code == status
        assert response.headers.get("access-control-allow-origin") == (ORIGIN if status == 200 else None)
    response = httpx.get(f"{served[2].url}/v1/models", headers=HEADERS | {"Origin": ORIGIN})
    assert response.headers["access-control-allow-origin"] == ORIGIN
    with ServerThread(make_app(served[1], KEY)) as other:  # by default there are none
        assert httpx.options(f"{other.url}/health", headers=ask | {"Origin": ORIGIN}).status_code == 405


def raw(server, head: str, body: str = "") -> str:
    """The response to a request that no client library would send."""
    with socket.create_connection((server.host, server.port)) as connection:
        connection.settimeout(30)
        connection.sendall(f"{head}\r\nhost: x\r\n\r\n{body}".encode())
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
            if b"\r\n\r\n" in received:
                break
    return received.decode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Authorization: bearer secret", 200),
        ("authorization: BEARER   secret", 200),
        ("Authorization: Basic secret", 401),
        ("Authorization: Bearer", 401),
        ("Authorization: Bearer secre", 401),
        ("Authorization: Bearer wrong\r\nAuthorization: Bearer secret", 401),
        ("Authorization: Bearer secret\r\nAuthorization: Bearer secret", 401),
        ("Authorization: Bearer secret\r\nContent-Length: 2\r\nContent-Length: 3", 400),
        ("Authorization: Bearer secret\r\nContent-Length: 2\r\nTransfer-Encoding: chunked", 400),
        ("Authorization: Bearer secret\r\nContent-Length: -2", 400),
        (f"Authorization: Bearer secret\r\nX-Long: {'x' * 1_000_000}", 400),
    ],
)
def test_headers(served, headers, status):
    response = raw(served[2], f"GET /v1/models HTTP/1.1\r\n{headers}")
    assert response.startswith(f"HTTP/1.1 {status} ")
    assert status != 400 or "connection: close" in response.lower()


# ---- connections ----------------------------------------------------------------------------------------------------

HALF_HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\nx"
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\ncontent-length: 99\r\n\r\n{"


def connect(server, data: bytes) -> socket.socket:
    connection = socket.create_connection((server.host, server.port))
    connection.sendall(data)
    connection.settimeout(30)
    return connection


@pytest.mark.parametrize("data", [b"", HALF_HEAD, HALF_BODY])
def test_a_request_that_is_not_completed_in_time_is_closed(served, monkeypatch, data):
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.2)
    with connect(served[2], data) as connection, suppress(ConnectionResetError):
        assert connection.recv(100) == b""
    with httpx.Client(base_url=served[2].url) as again:  # a kept connection may be used until its own limit
        assert again.get("/health").status_code == 200
        assert again.post("/v1/completions", json=PROMPT, headers=HEADERS).status_code == 200


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("POST /v1/completions", "content-length: 50000", 401),
        ("POST /v1/completions", f"{BEARER}\r\ncontent-length: 50000\r\ntransfer-encoding: chunked", 400),
        ("POST /v1/completions", f"{BEARER}\r\ncontent-length: 2\r\ncontent-length: 50000", 400),
        ("POST /v1/completions", f"{BEARER}\r\ncontent-length: 50000000\r\nconnection: close", 413),
        ("POST /v1/nothing", f"{BEARER}\r\ncontent-length: 50000\r\nconnection: close", 404),
    ],
)
def test_a_refusal_reaches_a_client_that_still_sends(served, request_line, headers, status):
    """A closed socket answers data with a reset, for which the client drops a response that it has not read."""
    for _ in range(100):
        head = f"{request_line} HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n".encode()
        with connect(served[2], head + b" " * (100_001 if status == 413 else 0)) as connection:
            select.select([connection], [], [], 30)
            for _ in range(5):
                connection.sendall(b" " * 10_000)
            connection.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert received.startswith(f"HTTP/1.1 {status} ".encode()), received
        assert len(received.partition(b"\r\n\r\n")[2]) > 20


def test_a_refused_client_that_sends_without_end_is_closed(served, monkeypatch):
    monkeypatch.setattr(server_module, "LINGER_SECONDS", 0.2)
    with connect(served[2], HALF_BODY.replace(b"secret", b"wrong")) as connection, pytest.raises(OSError):
        for _ in range(3000):
            connection.sendall(b"x")
            time.sleep(0.01)


def test_new_connections_replace_those_that_send_nothing(served, monkeypatch):
    monkeypatch.setattr(server_module.resource, "getrlimit", lambda _: (20, 20))  # connections have half of the files
    connections = [connect(served[2], HALF_HEAD) for _ in range(60)]
    try:
        assert httpx.get(f"{served[2].url}/health", timeout=20).status_code == 200
        assert httpx.post(f"{served[2].url}/v1/completions", json=PROMPT, headers=HEADERS, timeout=20).is_success
        assert len(served[2]._server.server_state.connections) <= 10
    finally:
        for connection in connections:
            connection.close()


def test_a_server_that_stops_does_not_wait_for_bodies(served):
    server = ServerThread(make_app(served[1], KEY, generator=EngineLoop(served[0])))
    server._server.config.timeout_graceful_shutdown = 60
    connections = [connect(server, data) for data in (HALF_BODY, HALF_HEAD, b"") for _ in range(5)]
    wait_until(lambda: len(server._server.server_state.connections) >= 15)
    start = time.monotonic()
    server.close()
    assert time.monotonic() - start < 20
    for connection in connections:
        connection.close()


# ---- large prompts wait for each other, not other calls for them ----------------------------------------------------


def test_calls_that_are_cancelled_before_they_are_tokenized(served, monkeypatch, caplog):
    caplog.set_level("INFO", "verl.server")
    end, tokenized, plain = threading.Event(), [], ServedModel.encode_chat
    url, impatient = f"{served[2].url}/v1/chat/completions", httpx.Timeout(60, read=0.5)

    def encode(model: ServedModel, call) -> list[int]:
        tokenized.append(len(call.messages[0]["content"]))
        if tokenized[-1] > LARGE_BODY:
            assert end.wait(60)
        return plain(model, call)

    def leave(_: int) -> None:
        large = CHAT | {"messages": [{"role": "user", "content": "x" * (LARGE_BODY + 1)}]}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=large, headers=HEADERS, timeout=impatient)

    monkeypatch.setattr(ServedModel, "encode_chat", encode)
    try:
        with ThreadPoolExecutor(12) as clients:
            list(clients.map(leave, range(12)))
        # the threads for large prompts are all busy: a small one does not wait for them
        assert httpx.post(url, json=CHAT, headers=HEADERS, timeout=60).is_success
        wait_until(lambda: caplog.text.count("disconnected before its call was started") >= 12)
    finally:
        end.set()
    assert httpx.post(url, json=CHAT, headers=HEADERS, timeout=60).is_success
    assert sum(length > LARGE_BODY for length in tokenized) == LARGE_THREADS  # of 12


def test_a_large_prompt_is_answered_as_a_small_one(served):
    url, body = f"{served[2].url}/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "é" * 16000}]}
    assert LARGE_BODY < len(json.dumps(body)) < 100_000
    found = httpx.post(url, json=body, headers=HEADERS, timeout=60)
    assert found.status_code == 400 and found.json()["error"]["code"] == "context_length_exceeded"
    refused = httpx.post(url, json=body | {"n": "x"}, headers=HEADERS, timeout=60)
    assert refused.status_code == 400


# ---- many streams and requests --------------------------------------------------------------------------------------


async def _stream(http: httpx.AsyncClient, index: int, limit: int | None) -> int:
    """The number of chunks of one stream, which is left after `limit` of them."""
    chunks, body = 0, PROMPT | {"prompt": [5, index % 90], "max_tokens": 20, "stream": True, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            chunks += line.startswith("data: {")
            if chunks == limit:
                break
    return chunks


def run_streams(server, count: int, limit: int | None) -> list[int]:
    async def run() -> list[int]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=300, limits=limits) as http:
            return await asyncio.gather(*(_stream(http, index, limit) for index in range(count)))

    return asyncio.run(run())


@pytest.mark.slow
def test_500_streams_at_once_and_cancelled_ones_free_their_slots(served):
    engine, _, server = served
    assert all(chunks >= 2 for chunks in run_streams(server, 500, None))
    assert run_streams(server, 300, 1) == [1] * 300
    wait_until(lambda: not (engine._batch.is_busy() or server._server.server_state.connections))
    assert httpx.post(f"{server.url}/v1/completions", json=PROMPT, headers=HEADERS, timeout=60).is_success


@pytest.mark.slow
def test_5000_requests_without_growth(served):
    def resources() -> tuple[int, int, int]:
        wait_until(lambda: not served[2]._server.server_state.connections)  # of the clients that have just left
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20, len(os.listdir("/proc/self/fd")), threading.active_count()

    async def ask(count: int) -> None:
        async with httpx.AsyncClient(base_url=served[2].url, headers=HEADERS, timeout=300) as http:
            for _ in range(count // 50):
                body = PROMPT | {"max_tokens": 2}
                responses = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(50)))
                assert all(response.is_success for response in responses)

    asyncio.run(ask(1000))
    (memory, files, threads), _ = resources(), asyncio.run(ask(5000))
    now = resources()
    print(f"MiB, open files, threads: {(memory, files, threads)} -> {now}")
    assert not served[0]._batch.is_busy()
    assert now[0] < memory + 50 and now[1] <= files + 2 and now[2] <= threads + 2
