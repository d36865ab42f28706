"""Log-probs of a served model beside those of the sampled tokens: of the most probable tokens, and of prompts."""

import math
from dataclasses import replace

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.quickstart.tiny_model import tiny_model
from tests.rollout.float64 import float64_logits
from tests.rollout.test_native_generic import model as module_of
from verl.cli.serve import load
from verl.rollout.checks import check_request
from verl.rollout.native import scheduler
from verl.rollout.native.engine import NativeRollout
from verl.rollout.request import Completion, Request, SamplingParams
from verl.server.app import make_app
from verl.server.http import ServerThread
from verl.server.protocol import ApiError, read_call
from verl.server.service import EngineLoop, bytes_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "seed": 3, "max_tokens": 24}
PROMPT = {"model": "tiny", "prompt": "abc de", "max_tokens": 6, "temperature": 0}
SAMPLING = [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.02}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(engine, model, client)."""
    folder = tiny_model("qwen2", tmp_path_factory.mktemp("served") / "model")
    with load({"name": "native"}, {"path": str(folder), "template": None}, "cpu", (1024, 32), "tiny") as loaded:
        generator = EngineLoop(loaded[0])
        with ServerThread(make_app(loaded[1], "key", generator=generator)) as server:
            yield *loaded, openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)
        generator.close()


def expected(module, ids: list[int], temperature: float = 1, top_k: int = -1, top_p: float = 1) -> torch.Tensor:
    """(T, V) float64 log-probs after each token."""
    logits = float64_logits(module, ids) / (temperature or 1)
    ordered, order = logits.sort(-1, descending=True)
    ordered[:, top_k if top_k > 0 else logits.shape[1] :] = -math.inf
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    ordered[before >= top_p] = -math.inf
    return torch.empty_like(logits).scatter_(1, order, ordered).log_softmax(-1)


def entries_of(client, stream: bool, **call):
    """(prompt token ids, response token ids, entries of the log-probs)."""
    extra = {"return_token_ids": True} | {name: call.pop(name) for name in ("top_k",) if name in call}
    response = client.chat.completions.create(**CHAT | call, logprobs=True, stream=stream, extra_body=extra)
    choices = [choice for chunk in response for choice in chunk.choices] if stream else response.choices
    ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or ()]
    return choices[-1].prompt_token_ids, ids, [e for c in choices if c.logprobs for e in c.logprobs.content]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_the_most_probable_tokens(served, sampling):
    engine, model, client = served
    prompt, ids, entries = entries_of(client, False, top_logprobs=5, **sampling)
    assert entries_of(client, True, top_logprobs=5, **sampling) == (prompt, ids, entries)
    log_probs = expected(engine.module, prompt + ids, **sampling)[len(prompt) - 1 : -1]
    assert len(entries) == len(ids) == 24
    for row, token, entry in zip(log_probs, ids, entries):
        best = [pair for pair in zip(*map(torch.Tensor.tolist, row.topk(5))) if pair[0] > -math.inf]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([value for value, _ in best], abs=1e-5)
        assert [top.token for top in entry.top_logprobs] == [model.tokenizer.decode([i]) for _, i in best]
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-5)
    assert {len(entry.top_logprobs) for entry in entries} <= ({3} if "top_k" in sampling else set(range(1, 6)))


def test_a_stop_string_cuts_them_too(served):
    text = served[2].chat.completions.create(**CHAT).choices[0].message.content
    for stream in (False, True):
        _, ids, entries = entries_of(served[2], stream, top_logprobs=2, stop=[text[5:7]])
        assert 0 < len(ids) == len(entries) < 24 and all(len(entry.top_logprobs) == 2 for entry in entries)


def test_calls_that_do_not_ask_pay_nothing(served, monkeypatch):
    def fail(*_):
        raise AssertionError("computed")

    monkeypatch.setattr(scheduler, "top_log_probs", fail)
    assert all(entry.top_logprobs == [] for entry in entries_of(served[2], False, top_logprobs=0)[2])
    with pytest.raises(openai.InternalServerError, match="computed"):
        entries_of(served[2], False, top_logprobs=1)


def test_the_prompt_of_a_completion(served):
    engine, model, client = served
    ids = model.tokenizer("abc de")["input_ids"]
    choice = client.completions.create(**PROMPT, logprobs=3, echo=True, extra_body={"prompt_logprobs": 2}).choices[0]
    whole = choice.logprobs
    plain = client.completions.create(**PROMPT, logprobs=3).choices[0].logprobs
    assert whole.tokens == [*(model.tokenizer.decode([i]) for i in ids), *plain.tokens]
    assert whole.top_logprobs[len(ids) :] == plain.top_logprobs and all(plain.top_logprobs)
    assert whole.token_logprobs[len(ids) :] == plain.token_logprobs
    assert whole.token_logprobs[0] is whole.top_logprobs[0] is choice.prompt_logprobs[0] is None
    assert whole.text_offset[: len(ids)] == list(range(len(ids))) and choice.text.startswith("abc de")
    columns = ids, whole.token_logprobs, whole.top_logprobs, choice.prompt_logprobs
    for row, token, value, top, entries in zip(expected(engine.module, ids), *(column[1:] for column in columns)):
        values, order = row.sort(descending=True)
        assert value == pytest.approx(row[token].item(), abs=1e-5)
        shown = sorted({token, *order[:3].tolist()}, key=lambda i: row[i])  # of the same text, the most probable one
        assert top == pytest.approx({model.tokenizer.decode([i]): row[i].item() for i in shown}, abs=1e-5)
        rank = int((order == token).nonzero()) + 1
        assert next(iter(entries)) == str(token) and entries[str(token)]["rank"] == rank
        assert entries.keys() == {str(token), *map(str, order[:2].tolist())}
        best = sorted(entries.values(), key=lambda entry: entry["rank"])[:2]
        assert [entry["logprob"] for entry in best] == pytest.approx(values[:2].tolist(), abs=1e-5)
    chat = client.chat.completions.create(**CHAT, n=2, extra_body={"prompt_logprobs": 0}).model_dump()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_without_a_response(served, stream):
    """Clients score texts so."""
    call = PROMPT | {"max_tokens": 0, "echo": True, "n": 2}
    if stream:
        chunks = list(served[2].completions.create(**call, stream=True, stream_options={"include_usage": True}))
        texts = ["".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) for index in range(2)]
        assert texts == ["abc de"] * 2 and chunks[-1].usage.completion_tokens == 0
        return
    found = served[2].completions.create(**call, logprobs=2)
    whole = served[2].completions.create(**call | {"max_tokens": 3}, logprobs=2).choices[0].logprobs
    assert found.usage.completion_tokens == 0 and [c.finish_reason for c in found.choices] == ["length"] * 2
    for choice in found.choices:
        assert choice.text == "abc de" and choice.logprobs.tokens == whole.tokens[:-3]
        assert choice.logprobs.token_logprobs == whole.token_logprobs[:-3]
        assert choice.logprobs.top_logprobs == whole.top_logprobs[:-3]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {name: i for i, name in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + ["a", "b", "é", "<unk>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_bytes_of_tokens_that_are_parts_of_characters(made):
    text, tokenizer = "naïve – 日本語 🙂\ufffd\n a\tb é", PreTrainedTokenizerFast(tokenizer_object=made())
    ids = tokenizer(text)["input_ids"]
    assert bytes(byte for token in ids for byte in bytes_of(tokenizer, token)) == text.encode()
    assert len(ids) > len(text)  # some are parts


def test_bytes_of_a_response(served):
    entries = entries_of(served[2], False, top_logprobs=3)[2]
    for entry in [*entries, *(other for each in entries for other in each.top_logprobs)]:
        assert "\ufffd" in entry.token or bytes(entry.bytes).decode() == entry.token


@pytest.mark.parametrize(
    ("is_chat", "call", "param"),
    [
        (True, {"top_logprobs": 2}, "top_logprobs"),
        (True, {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        (True, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (True, {"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        (False, {"logprobs": 21}, "logprobs"),
        (False, {"logprobs": True}, "logprobs"),
        (False, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (False, {"prompt_logprobs": 1025}, "prompt_logprobs"),
        (False, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (False, {"echo": True, "logprobs": 1, "stream": True}, "echo"),
        (False, {"max_tokens": 0}, "max_tokens"),
        (True, {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_refused(served, is_chat, call, param):
    create, base = (served[2].chat.completions, CHAT) if is_chat else (served[2].completions, PROMPT)
    with pytest.raises(openai.BadRequestError, match=param) as error:
        create.create(**base, extra_body=call)
    assert error.value.param == param


def test_engines_that_only_know_the_sampled_token(served):
    """`logprobs` of a completion may be 1 there: clients send it for the sampled token."""
    limited = replace(served[1], sampling_keys=frozenset({"temperature"}))
    assert limited.sampling(read_call(False, PROMPT | {"logprobs": 1}), 3).top_logprobs == 0
    for body in ({"logprobs": 2}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}):
        with pytest.raises(ApiError, match="_logprobs is not supported by this engine"):
            limited.sampling(read_call(False, PROMPT | body), 3)


def test_an_engine_that_ignores_them(served, monkeypatch):
    """Custom engines need not declare what they support."""

    async def complete(request: Request) -> Completion:
        return Completion([5, 6], [-1.0, -1.0], "length")

    monkeypatch.setattr(served[0], "generate_one", complete)
    with pytest.raises(ValueError, match=r"top_logprobs and prompt_logprobs are not given by rollout\.name=hf"):
        check_request("prompt 0", Request([5], SamplingParams(4, (), prompt_logprobs=0), 0), "hf", 99, None, "")
    for name, call in (("top_logprobs", {"logprobs": 2}), ("prompt_logprobs", {"prompt_logprobs": 0})):
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported by this engine"):
            served[2].completions.create(**PROMPT, extra_body=call)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "mamba2"])
def test_models_without_fused_layers(kind):
    module, ids = module_of(kind), [5, 9, 3, 7, 11, 2, 40]
    params = SamplingParams(3, (), 1, prompt_logprobs=97, top_logprobs=97)
    (completion,) = NativeRollout(module).generate([Request(ids, params, 0)])
    with torch.no_grad():
        rows = module(torch.tensor([ids + completion.token_ids])).logits[0].log_softmax(-1)
    for row, *entry in zip(rows, [entry[1:] for entry in completion.prompt_log_probs[1:]] + completion.top_log_probs):
        for token, value, *_ in entry[0]:
            assert value == pytest.approx(row[token].item(), abs=2e-5)
