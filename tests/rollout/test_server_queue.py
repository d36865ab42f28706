"""Large prompts wait for each other, not other calls for them; those of clients that have left are not tokenized. What
a body may contain."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from examples.quickstart.tiny_model import tiny_model
from verl.cli.serve import load
from verl.server.app import LARGE_BODY, LARGE_THREADS, make_app
from verl.server.http import ServerThread
from verl.server.service import EngineLoop, ServedModel

HEADERS = {"Authorization": "Bearer secret"}
SMALL = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


@pytest.fixture
def server(tmp_path):
    folder = tiny_model("qwen2", tmp_path / "model")
    with load({"name": "native"}, {"path": str(folder), "template": None}, "cpu", (1024, 32), "tiny") as (
        engine,
        model,
    ):
        generator = EngineLoop(engine)
        with ServerThread(make_app(model, "secret", generator=generator)) as server:
            yield server
        generator.close()


def test_calls_that_are_cancelled_before_they_are_tokenized(server, monkeypatch, caplog):
    caplog.set_level("INFO", "verl.server")
    end, tokenized, plain = threading.Event(), [], ServedModel.encode_chat

    def encode(model: ServedModel, call) -> list[int]:
        tokenized.append(len(call.messages[0]["content"]))
        if tokenized[-1] > LARGE_BODY:
            assert end.wait(60)
        return plain(model, call)

    def leave(_: int) -> None:
        large = SMALL | {"messages": [{"role": "user", "content": "x" * (LARGE_BODY + 1)}]}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/chat/completions", json=large, headers=HEADERS, timeout=2)

    monkeypatch.setattr(ServedModel, "encode_chat", encode)
    try:
        with ThreadPoolExecutor(40) as clients:
            list(clients.map(leave, range(40)))
        # the threads for large prompts are all busy: a small one does not wait for them
        assert httpx.post(f"{server.url}/v1/chat/completions", json=SMALL, headers=HEADERS, timeout=60).is_success
        deadline = time.monotonic() + 60
        while caplog.text.count("disconnected before its call was started") < 40:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        end.set()
    assert httpx.post(f"{server.url}/v1/chat/completions", json=SMALL, headers=HEADERS, timeout=60).is_success
    assert sum(length > LARGE_BODY for length in tokenized) == LARGE_THREADS  # of 40


def test_a_large_prompt_is_answered_as_a_small_one(server):
    content = "é" * LARGE_BODY
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=60)
    assert found.status_code == 400 and found.json()["error"]["code"] == "context_length_exceeded"
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"n": "x"}, headers=HEADERS, timeout=60)
    assert refused.status_code == 400
