"""The OpenAI-compatible server: OpenAI's client on a real socket, refusals, limits, disconnects, many requests."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import httpx
import openai
import pytest

from examples.quickstart.tiny_model import tiny_model
from tests.waiting import wait_until
from verl.cli.serve import load
from verl.rollout.base import RolloutEngine
from verl.rollout.native.torch_decoder import TorchDecoder
from verl.rollout.request import Completion, Request, SamplingParams
from verl.server.app import make_app
from verl.server.http import ServerThread, listen, serve_until_signal
from verl.server.protocol import ApiError, read_call
from verl.server.service import EngineLoop, ResponseText, Running, ServedModel, SingleCall, text_of

KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("qwen2", tmp_path_factory.mktemp("served") / "model")


def loaded(folder, name: str = "native"):
    return load({"name": name}, {"path": str(folder), "template": None}, "cpu", (1024, 32), "tiny")


@pytest.fixture(scope="module")
def served(folder):
    """(engine, model, EngineLoop, running server)."""
    with loaded(folder) as (engine, model):
        generator = EngineLoop(engine)
        with ServerThread(make_app(model, KEY, generator=generator, max_body=100_000)) as server:
            yield engine, model, generator, server
        generator.close()


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served[3].url}/v1", api_key=KEY, max_retries=0) as found:
        yield found


# ---- what OpenAI's client gets ---------------------------------------------------------------------------------------


def test_chat_is_what_the_engine_samples(served, client):
    engine, model, _, _ = served
    found = client.chat.completions.create(
        **CHAT, seed=3, n=3, max_tokens=20, temperature=0.7, logprobs=True, extra_body={"return_token_ids": True}
    )
    text = model.tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=True, tokenize=False)
    prompt = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    params = SamplingParams(20, model.params.stop_token_ids, 3, temperature=0.7)
    expected = engine.generate([Request(prompt, params, index) for index in range(3)])
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    for choice, completion in zip(found.choices, expected):
        assert choice.token_ids == completion.token_ids and choice.prompt_token_ids == prompt
        assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(completion.log_probs, abs=1e-5)
        assert choice.finish_reason == completion.finish_reason and choice.weight_version == 0
        shown = completion.token_ids[: -1 if completion.finish_reason == "stop" else None]
        assert choice.message.content == model.tokenizer.decode(shown, skip_special_tokens=True)
    sampled = sum(len(completion.token_ids) for completion in expected)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), sampled)
    assert len({tuple(choice.token_ids) for choice in found.choices}) == 3


def test_streaming_equals_not_streaming(client):
    whole = client.chat.completions.create(**CHAT, seed=5, n=2, max_tokens=60)
    texts, reasons, chunks = ["", ""], [None, None], 0
    options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    tokens = 0
    for chunk in client.chat.completions.create(**CHAT, seed=5, n=2, max_tokens=60, **options):
        if not chunk.choices:
            assert chunk.usage == whole.usage
            continue
        (choice,) = chunk.choices
        chunks += 1
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        tokens += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == whole.usage.completion_tokens and chunks > 6  # tokens are sent while they are sampled


def test_completions_of_texts_and_token_ids(served, client):
    tokenizer = served[1].tokenizer
    ids = tokenizer("abc")["input_ids"]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 12, "logprobs": 0}
    found = client.completions.create(prompt=["abc", "x y"], n=2, **options)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.choices[0].text == found.choices[1].text  # greedy
    log_probs = found.choices[0].logprobs
    assert len(log_probs.tokens) == len(log_probs.token_logprobs) == len(log_probs.text_offset) == 12
    assert log_probs.text_offset[:3] == [0, len(log_probs.tokens[0]), len("".join(log_probs.tokens[:2]))]
    streamed = client.completions.create(prompt="abc", stream=True, **options)
    choices = [choice for chunk in streamed for choice in chunk.choices if choice.logprobs]
    assert [offset for choice in choices for offset in choice.logprobs.text_offset] == log_probs.text_offset
    assert client.completions.create(prompt=ids, **options).choices[0].text == found.choices[0].text
    streamed = client.completions.create(prompt="abc", stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == found.choices[0].text


def test_seeds_and_stop_strings(client):
    first, again = (client.chat.completions.create(**CHAT, seed=9, max_tokens=40) for _ in range(2))
    other = client.chat.completions.create(**CHAT, max_tokens=40)
    content = first.choices[0].message.content
    assert again.choices[0].message.content == content != other.choices[0].message.content
    stop = content[10:13]
    for stream in (False, True):
        found = client.chat.completions.create(**CHAT, seed=9, max_tokens=40, stop=[stop], stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in found)
        else:
            text = found.choices[0].message.content
            assert found.choices[0].finish_reason == "stop" and found.usage.completion_tokens < 40
        assert text == content[: content.index(stop)]


def test_tool_calls_are_read_and_rendered(served, client, monkeypatch):
    tokenizer = served[1].tokenizer
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = tokenizer("sure " + call)["input_ids"]

    async def write_call(request: Request) -> Completion:
        return Completion(ids, [-0.5] * len(ids), "stop")

    monkeypatch.setattr(served[0], "generate_one", write_call)
    chat = {**CHAT, "max_tokens": 100}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError, match="the chat template of tiny ignores tools") as error:
        client.chat.completions.create(**chat, tools=tools)
    assert error.value.param == "tools"
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template)
    choice = client.chat.completions.create(**chat, tools=tools).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "sure"
    function = choice.message.tool_calls[0].function
    assert function.name == "add" and json.loads(function.arguments) == {"a": 1}
    chunks = list(client.chat.completions.create(**chat, tools=tools, stream=True))
    streamed = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert [each.function.name for each in streamed] == ["add"] and chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "sure"
    plain = client.chat.completions.create(**chat, tools=tools, tool_choice="none").choices[0]
    assert plain.message.content == "sure " + call and plain.message.tool_calls is None
    answered = [*chat["messages"], choice.message, {"role": "tool", "tool_call_id": "x", "content": "2"}]
    assert client.chat.completions.create(**{**chat, "messages": answered}, tools=tools).choices


def test_arguments_of_the_chat_template_reach_it(served, client, monkeypatch):
    tokenizer = served[1].tokenizer
    plain = tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=True, tokenize=False)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ mark }}" + tokenizer.chat_template)
    more = {"chat_template_kwargs": {"mark": "a mark"}, "return_token_ids": True}
    choice = client.chat.completions.create(**CHAT, max_tokens=1, extra_body=more).choices[0]
    assert choice.prompt_token_ids == tokenizer("a mark" + plain)["input_ids"]


def test_the_hf_engine_is_served_too(folder, served, client):
    options = {**CHAT, "temperature": 0, "max_tokens": 10}

    async def ask(model, generator) -> list[str]:
        async with in_process(make_app(model, KEY, generator=generator)) as http:
            found = await asyncio.gather(*(http.post("/v1/chat/completions", json=options) for _ in range(3)))
        return [each.json()["choices"][0]["message"]["content"] for each in found]

    with loaded(folder, "hf") as (engine, model):
        generator = EngineLoop(engine)
        try:
            found = asyncio.run(ask(model, generator))
        finally:
            generator.close()
    assert found == [client.chat.completions.create(**options).choices[0].message.content] * 3


# ---- refusals --------------------------------------------------------------------------------------------------------

REFUSED = {
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 10},
    "response_format": {"type": "json_object"},
    "min_tokens": 3,
    "n": 0,
    "temperature": -1,
    "top_p": 0,
    "max_tokens": 0,
    "stop": [""],
    "seed": "x",
    "messages": [],
    "tool_choice": "required",
    "guided_regex": "a*",
    "chat_template_kwargs": {"chat_template": "{% for i in range(10 ** 9) %}{% endfor %}"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_that_is_not_supported_is_named(client, name):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**CHAT, "extra_body": {name: REFUSED[name]}})
    assert error.value.body["param"] == name and error.value.body["type"] == "invalid_request_error"
    assert name in error.value.body["message"]
    known = name not in (*list(REFUSED)[:4], "tool_choice", "guided_regex")
    assert error.value.body["code"] == ("invalid_value" if known else "unsupported_parameter")


def test_parameters_without_effect_are_accepted(client):
    off = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "top_logprobs": 0, "user": "me"}
    off |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "metadata": {"a": "b"}}
    off |= {"length_penalty": 1.0, "min_tokens": 0, "early_stopping": False, "spaces_between_special_tokens": True}
    off |= {"add_generation_prompt": True, "continue_final_message": False, "include_reasoning": True, "bad_words": []}
    off |= {"functions": [], "function_call": "none", "detokenize": True, "vllm_xargs": {}}
    assert client.chat.completions.create(**CHAT, max_tokens=1, extra_body=off).choices


def test_too_long_prompts_other_models_and_images_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="maximum length is 1024 tokens") as error:
        client.chat.completions.create(**CHAT, max_tokens=1024)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as error:
        client.chat.completions.create(**{**CHAT, "model": "gpt-4"})
    assert error.value.body["type"] == "not_found_error"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match="found one of type 'image_url': the server reads no images"):
        client.chat.completions.create(model="tiny", messages=image)
    with pytest.raises(openai.BadRequestError, match="temperature=1e-300: expected 0 or at least"):
        client.chat.completions.create(**CHAT, temperature=1e-300)
    with pytest.raises(openai.BadRequestError, match="token ids from 0"):
        client.completions.create(model="tiny", prompt=[10**9])


def test_sampling_parameters_that_the_engine_lacks_are_refused(served):
    """An engine that declares none gets all of them."""
    call = read_call(True, {**CHAT, "temperature": 0.5, "min_p": 0.25})
    limited = replace(served[1], sampling_keys=frozenset({"temperature"}))
    with pytest.raises(ApiError, match="min_p is not supported by this engine"):
        limited.sampling(call, 3)
    for keys in (None, frozenset({"temperature", "min_p"})):
        params = replace(served[1], sampling_keys=keys).sampling(call, 3)
        assert (params.temperature, params.min_p) == (0.5, 0.25)


def test_authentication_and_bad_requests(served):
    with httpx.Client(base_url=served[3].url) as http:
        assert http.get("/health").json() == {"status": "ok"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            found = http.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/v1/models", headers=headers).status_code == 401
        entry = http.get("/v1/models", headers=HEADERS).json()["data"][0]
        assert (entry["max_model_len"], entry["weight_version"]) == (1024, 0)
        assert http.post("/v1/chat/completions", content=b"{", headers=HEADERS).status_code == 400
        assert http.post("/v1/chat/completions", json=[1], headers=HEADERS).status_code == 400
        for text in (b'{"model": "tiny", "prompt": "\\ud800"}', b'{"model": "tiny", "prompt": "a", "\\udfff": 1}'):
            surrogate = http.post("/v1/completions", content=text, headers=HEADERS)
            assert surrogate.status_code == 400 and surrogate.json()["error"]["code"] == "invalid_json"
        assert (
            http.post(
                "/v1/completions",
                content=b'{"model": "tiny", "prompt": "\\ud83d\\ude42", "max_tokens": 1}',
                headers=HEADERS,
            ).status_code
            == 200
        )
        large = http.post("/v1/completions", content=b" " * 200_000, headers=HEADERS)
        assert large.status_code == 413 and large.json()["error"]["code"] == "request_too_large"
        assert http.get("/v1/nothing", headers=HEADERS).status_code == 404
        assert http.get("/v1/chat/completions", headers=HEADERS).status_code == 405


def test_the_server_answers_while_a_long_prompt_is_tokenized(served, monkeypatch):
    started, end, plain = threading.Event(), threading.Event(), ServedModel.encode_chat

    def encode(model: ServedModel, call) -> list[int]:
        if call.messages[0]["content"] == "long":
            started.set()
            assert end.wait(60)
        return plain(model, call)

    monkeypatch.setattr(ServedModel, "encode_chat", encode)
    with httpx.Client(base_url=served[3].url, headers=HEADERS, timeout=20) as http, ThreadPoolExecutor() as pool:
        body = {**CHAT, "max_tokens": 1}
        long = body | {"messages": [{"role": "user", "content": "long"}]}
        waiting = pool.submit(
            httpx.post, f"{served[3].url}/v1/chat/completions", json=long, headers=HEADERS, timeout=90
        )
        try:
            assert started.wait(60)
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        finally:
            end.set()
        assert waiting.result().status_code == 200


def test_a_client_that_leaves_within_its_body_is_no_error(served, caplog):
    caplog.set_level("INFO", "verl.server")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 9\r\n\r\n{{"
    with socket.create_connection((served[3].host, served[3].port)) as connection:
        connection.sendall(head.encode())
    wait_until(lambda: "disconnected before its call was started" in caplog.text)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_error_of_the_engine_reaches_the_client(served, client, monkeypatch):
    async def fail(request: Request) -> Completion:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(served[0], "generate_one", fail)
    with pytest.raises(openai.InternalServerError, match="RuntimeError: out of memory"):
        client.chat.completions.create(**CHAT)
    with pytest.raises(openai.APIError, match="out of memory"):
        list(client.chat.completions.create(**CHAT, stream=True))


# ---- many requests, disconnects, shutdown ---------------------------------------------------------------------------


def in_process(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", headers=HEADERS)


def test_200_concurrent_requests_share_batches(served):
    engine, model, generator, _ = served

    async def ask() -> list[list[int]]:
        async with in_process(make_app(model, KEY, generator=generator)) as http:
            body = {"model": "tiny", "max_tokens": 16, "return_token_ids": True}
            calls = [http.post("/v1/completions", json={**body, "prompt": [5, i], "seed": i}) for i in range(200)]
            found = await asyncio.gather(*calls)
        return [each.json()["choices"][0]["token_ids"] for each in found]

    params = [SamplingParams(16, model.params.stop_token_ids, seed) for seed in range(200)]
    expected = engine.generate([Request([5, i], params[i], 0) for i in range(200)])
    assert asyncio.run(ask()) == [completion.token_ids for completion in expected]
    # far fewer steps than 200 responses one after another
    assert engine.stats.steps < 200 * 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_the_request(served, stream, monkeypatch):
    engine, _, _, server = served
    step = TorchDecoder.step
    monkeypatch.setattr(TorchDecoder, "step", lambda *tokens: time.sleep(0.005) or step(*tokens))  # not done in 0.3 s
    body = {**CHAT, "max_tokens": 900, "ignore_eos": True, "stream": stream}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.3, headers=HEADERS) as http:
        if not stream:
            http.post("/v1/chat/completions", json=body)
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
            raise httpx.ReadTimeout("the client closes the connection here")
    wait_until(lambda: not engine._batch.is_busy())
    assert 0 <= engine.stats.tokens < 900


def test_a_call_that_is_closed_early_leaves_no_error_in_the_event_loop(served):
    problems = []

    async def close_early() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        call = read_call(True, {**CHAT, "max_tokens": 900, "ignore_eos": True})
        deltas = Running.start(call, SingleCall(served[1], served[2]), served[1]).deltas()
        await anext(deltas)
        await deltas.aclose()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.001)

    asyncio.run(close_early())
    assert problems == []


def test_requests_have_names_of_their_own(served):
    """An abort names them: it must not end those of another call."""
    model = served[1]
    calls = [Running.start(read_call(True, {**CHAT, "n": 2}), SingleCall(model, served[2]), model) for _ in range(2)]
    names = [request.request_id for call in calls for request in call.requests]
    assert len(set(names)) == 4 and "" not in names


class Waiting(RolloutEngine):
    """Finishes a request when it is told to."""

    def __init__(self):
        self.started, self.aborted = threading.Event(), []
        self.end = None

    async def generate_one(self, request: Request) -> Completion:
        self.end = asyncio.Event()
        self.started.set()
        await self.end.wait()
        return Completion([7, 8], [-1.0, -1.0], "abort" if self.aborted else "length")

    def abort(self, request_ids=None) -> None:
        self.aborted.append(request_ids)
        if self.end is not None:
            self.end.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_calls_finish(served, number):
    engine, model = Waiting(), served[1]
    generator = EngineLoop(engine)
    sock = listen("127.0.0.1", 0)
    found = []

    def use() -> None:
        url = "http://{}:{}/v1/completions".format(*sock.getsockname())
        body = {"model": "tiny", "prompt": [5]}
        call = threading.Thread(target=lambda: found.append(httpx.post(url, json=body, headers=HEADERS)))
        call.start()
        engine.started.wait(10)
        os.kill(os.getpid(), number)
        time.sleep(0.3)
        generator.thread.call(engine.end.set)
        call.join()

    user = threading.Thread(target=use)
    user.start()
    assert serve_until_signal(make_app(model, KEY, generator=generator), sock, 10) == number
    user.join()
    assert found[0].status_code == 200 and found[0].json()["choices"][0]["finish_reason"] == "length"
    assert engine.aborted == []
    generator.close()
    assert engine.aborted == [None]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_outlast_the_server_leave_no_traceback(served, stream, caplog):
    engine = Waiting()
    generator, sock = EngineLoop(engine), listen("127.0.0.1", 0)

    def use() -> None:
        url = "http://{}:{}/v1/completions".format(*sock.getsockname())
        with suppress(httpx.HTTPError):
            httpx.post(url, json={"model": "tiny", "prompt": [5], "stream": stream}, headers=HEADERS, timeout=60)

    def stop() -> None:
        engine.started.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    threads = [threading.Thread(target=function) for function in (use, stop)]
    for thread in threads:
        thread.start()
    serve_until_signal(make_app(served[1], KEY, generator=generator), sock, 0)
    for thread in threads:
        thread.join()
    generator.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain text", "naïve – 日本語 🙂🙃 end", "stop here STOP and more", "ends with STO"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_deltas_join_to_the_whole_text(served, text, size):
    tokenizer = served[1].tokenizer
    ids = tokenizer(text)["input_ids"]
    reader = ResponseText(tokenizer, ["STOP"])
    deltas = [reader.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join([*deltas, reader.finish()]) == text_of(tokenizer, ids, ["STOP"]) == text.partition("STOP")[0]
    assert not any("\ufffd" in delta for delta in deltas) and sum(map(bool, deltas)) > 1
