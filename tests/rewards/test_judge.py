"""The generative judge against a local server: verdicts, retries, rate, cache, cost, failures in a reward manager."""

import asyncio
import json
import time
from inspect import isawaitable

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.waiting import wait_until
from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.rewards import judge as module
from verl.rewards.judge import Judge, JudgeError
from verl.rewards.managers import NaiveRewardManager
from verl.rewards.outcome import RewardError, Sample, read_outcome
from verl.rewards.resolve import resolve_reward_function
from verl.server.http import ServerThread


class Endpoint:
    """Answers each request with the next of `replies`, the last one again and again."""

    def __init__(self):
        self.replies, self.requests, self.times, self.running, self.most = ["Score: 10"], [], [], 0, 0

    async def __call__(self, request):
        self.times.append(time.monotonic())
        self.requests.append((await request.json(), dict(request.headers)))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if callable(reply) and not isinstance(reply, Response):
                reply = reply(self.requests[-1][0])
                reply = await reply if isawaitable(reply) else reply
            if isinstance(reply, Response):
                return reply
            usage = {"prompt_tokens": 100, "completion_tokens": 10}
            return JSONResponse({"choices": [{"message": {"content": reply}}], "usage": usage})
        finally:
            self.running -= 1


@pytest.fixture(scope="module")
def server():
    endpoint = Endpoint()

    async def complete(request):
        return await endpoint(request)

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    with ServerThread(app) as server:
        endpoint.url = f"{server.url}/v1"
        yield endpoint


@pytest.fixture
def endpoint(server, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.02)
    wait_until(lambda: server.running == 0)  # requests that the test before has given up
    server.replies, server.requests, server.times, server.most = ["Score: 10"], [], [], 0
    return server


def ask(judge, response="a response", prompt="a prompt", truth=None):
    return asyncio.run(judge(response, prompt, truth))


# ---- requests and verdicts ------------------------------------------------------------------------------------------


def test_the_judge_is_a_term_of_a_weighted_sum(endpoint):
    """0.5 x the rule (1 of 2 is right) + 2 x the grades, whose requests run at the same time; the cost is kept."""
    judged = {"name": "judge", "weight": 2.0, "kwargs": {"url": endpoint.url, "model": "j", "completion_price": 1e5}}
    terms = [{"name": "gsm8k", "weight": 0.5}, judged]
    function = resolve_reward_function(registered="weighted", reward_kwargs={"rewards": terms})
    endpoint.replies = ["Score: 5"]
    samples = [Sample("x", text, "7", {}, i, 2) for i, text in enumerate(("#### 7", "#### 8"))]
    outcomes = dict((i, read_outcome(each)) for i, _, each in NaiveRewardManager(None, function).outcomes(samples))
    assert [outcomes[i][0] for i in (0, 1)] == [1.5, 1.0]
    assert outcomes[1][1] == {
        **{"acc": 0.0, "gsm8k": 0.0, "judge": 0.5, "judge_prompt_tokens": 100, "judge_completion_tokens": 10},
        **{"judge_cost": 1.0, "judge_cached": 0.0, "pred": "8"},
    }


def test_the_request_and_the_grade(endpoint, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = Judge(endpoint.url + "/", "m", rubric="Is it {response}?", api_key_env="JUDGE_KEY", extra_body={"seed": 1})
    endpoint.replies = ["<think>Score: 1</think>It is good.\n**Score: 7**"]
    result = ask(judge, "{rubric} Score: 10", [{"role": "user", "content": "2+3?"}])
    assert result == {
        "score": pytest.approx(0.7),
        "judge_prompt_tokens": 100,
        "judge_completion_tokens": 10,
        "judge_cost": 0.0,
        "judge_cached": 0.0,
    }
    ((body, headers),) = endpoint.requests
    assert headers["authorization"] == "Bearer secret"
    assert {key: body[key] for key in ("model", "temperature", "max_tokens", "seed")} == {
        **{"model": "m", "temperature": 0.0, "max_tokens": 1024, "seed": 1}
    }
    (message,) = body["messages"]
    text = message["content"]
    # what is inserted is not a template
    assert "<rubric>\nIs it {response}?\n</rubric>" in text and "<response>\n{rubric} Score: 10\n</response>" in text
    assert "<prompt>\n2+3?\n</prompt>" in text and "a number from 0 (worst) to 10 (best)" in text


NUMBERS = {
    "7": 0.7, "Score: 7": 0.7, "Score: 3\nno: Score: 8.5": 0.85, "I give it [[4]].": 0.4, "**Rating:** 9/10": 0.9,
    "The final score is 6.": 0.6, "score = 0": 0.0, "Grade: 10.": 1.0, "It has 3 errors.": None, "Score: 11": None,
    "Score: -1": None, "Score: high": None, "": None, "2 of 3 are right, 9": None, "Score: 7th": None,
}  # fmt: skip
LETTERS = {"A": 1.0, "Verdict: B": 0.0, "[[A]]": 1.0, "A is better, but\nVerdict: **B**": 0.0, "Verdict: C": None,
           "A bad one": None, "Verdict: Absolutely": None}  # fmt: skip
OBJECTS = {'{"score": 5}': 0.5, 'So {"score": 1} or rather\n```json\n{"why": "x", "score": 9}\n```': 0.9,
           '{"score": "A"}': 1.0, '{"points": 5}': None, '{"score": 5': None, '{"score": true}': None,
           '{"score": null}': None}  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "text", "grade"),
    [
        (name, *case)
        for name, each in (("number", NUMBERS), ("letter", LETTERS), ("json", OBJECTS))
        for case in each.items()
    ],
)
def test_verdicts(verdict, text, grade):
    judge = Judge("http://x/v1", "m", verdict=verdict)
    if grade is None:
        with pytest.raises(JudgeError, match="expected a verdict"):
            judge.parse(text)
    else:
        assert judge.parse(text) == pytest.approx(grade)


def test_a_range_and_letters_of_ones_own():
    assert Judge("http://x/v1", "m", low=1, high=5).parse("Score: 4") == 0.75
    judge = Judge("http://x/v1", "m", verdict="letter", letters={"good": 1.0, "fair": 0.4, "poor": -1.0})
    assert [judge.parse(f"Verdict: {word}") for word in ("good", "fair", "poor")] == [1.0, 0.4, -1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "url: expected http:// or https://, found 'localhost:8000'"),
        ({"verdict": "stars"}, "verdict: expected number, letter, json, found 'stars'"),
        ({"template": "Grade {prompt}"}, "template: expected {response} in it"),
        ({"template": "{response}", "rubric": "?"}, "rubric: the template has no {rubric}"),
        ({"low": 5, "high": 5}, "expected low < high, found 5 and 5"),
        ({"retries": -1}, "retries: expected at least 0"),
        ({"timeout": 0}, "timeout: expected seconds above 0"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "the variable NO_SUCH_VARIABLE is not set"),
        ({"cache": "/no/such/folder/x.sqlite"}, "cache: .* is no SQLite file that can be written"),
    ],
)
def test_settings_that_cannot_be_used(settings, message):
    with pytest.raises(ValueError, match=message):
        Judge(**{"url": "http://x/v1", "model": "m", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"url": "http://x/v1"},
            "Judge: missing a required argument: 'model': set or remove it in reward_kwargs",
        ),
        (
            {"url": "http://x/v1", "model": "m", "modle": 1},
            "got an unexpected keyword argument 'modle': set or remove it",
        ),
    ],
)
def test_settings_that_are_missing_or_unknown(settings, message):
    with pytest.raises(ValueError, match=message):
        resolve_reward_function(registered="judge", reward_kwargs=settings)


# ---- failures of the endpoint ---------------------------------------------------------------------------------------


async def late(_):
    await asyncio.sleep(2)
    return "Score: 10"


TRANSIENT = {
    "rate limit": PlainTextResponse("slow down", 429),
    "server error": PlainTextResponse("oops", 500),
    "overloaded": PlainTextResponse("busy", 503),
    "no JSON": PlainTextResponse("<html>"),
    "no choices": JSONResponse({"error": "x"}),
    "empty choices": JSONResponse({"choices": []}),
    "no text": JSONResponse({"choices": [{"message": {"content": None}}]}),
    "timeout": late,
}


@pytest.mark.parametrize("kind", TRANSIENT)
def test_transient_failures_are_retried(kind, endpoint):
    endpoint.replies = [TRANSIENT[kind], TRANSIENT[kind], "Score: 10"]
    timeout = 0.5 if kind == "timeout" else 30.0
    judge = Judge(endpoint.url, "m", timeout=timeout, retries=2)
    assert ask(judge)["score"] == 1.0 and len(endpoint.requests) == 3
    waits = [after - before for before, after in zip(endpoint.times, endpoint.times[1:])]
    assert waits[0] >= 0.015 and waits[1] >= 0.03  # 0.02 and 0.04, by 25 % less at most
    endpoint.replies = [TRANSIENT[kind]]
    with pytest.raises(JudgeError, match="2 attempts failed; the last: "):
        ask(Judge(endpoint.url, "m", timeout=timeout, retries=1))


def test_the_endpoint_says_how_long_to_wait(endpoint):
    endpoint.replies = [PlainTextResponse("slow down", 429, {"Retry-After": "0.3"}), "Score: 10"]
    ask(Judge(endpoint.url, "m"))
    assert endpoint.times[1] - endpoint.times[0] >= 0.3


def test_a_wrong_request_is_not_repeated(endpoint):
    endpoint.replies = [PlainTextResponse("no such model", 404)]
    with pytest.raises(JudgeError, match="status 404: no such model"):
        ask(Judge(endpoint.url, "m"))
    assert len(endpoint.requests) == 1


def test_nobody_listens():
    with pytest.raises(JudgeError, match=r"judge http://127.0.0.1:9/v1: 1 attempts failed; the last: URLError: .*ref"):
        ask(Judge("http://127.0.0.1:9/v1", "m", retries=0))


def test_the_rate_is_limited(endpoint):
    judge = Judge(endpoint.url, "m", requests_per_minute=600)

    async def grade():
        return await asyncio.gather(*(judge(f"response {i}") for i in range(4)))

    asyncio.run(grade())
    assert endpoint.times[-1] - endpoint.times[0] >= 0.25  # 3 intervals of 0.1 s


# ---- cache and cost -------------------------------------------------------------------------------------------------


def test_the_cache_is_keyed_by_everything_that_is_sent(endpoint, tmp_path):
    settings = {"cache": str(tmp_path / "cache.sqlite"), "prompt_price": 2.0, "completion_price": 30.0}
    first = ask(Judge(endpoint.url, "m", **settings))
    assert first["judge_cost"] == pytest.approx(100 * 2e-6 + 10 * 30e-6) and first["judge_cached"] == 0
    again = ask(Judge(endpoint.url, "m", **settings))  # another process would read the same file
    assert again == {
        "score": 1.0,
        "judge_prompt_tokens": 0,
        "judge_completion_tokens": 0,
        "judge_cost": 0,
        "judge_cached": 1,
    }
    assert len(endpoint.requests) == 1
    for further, arguments in (
        ({"rubric": "other"}, {}),
        ({"temperature": 1.0}, {}),
        ({}, {"response": "other"}),
        ({}, {"prompt": "other"}),
    ):
        ask(Judge(endpoint.url, "m", **settings, **further), **arguments)
    ask(Judge(endpoint.url, "n", **settings))
    assert len(endpoint.requests) == 6


def test_what_has_no_verdict_is_not_cached(endpoint, tmp_path):
    judge = Judge(endpoint.url, "m", cache=str(tmp_path / "cache.sqlite"))
    endpoint.replies = ["I cannot say.", "Score: 5"]
    with pytest.raises(JudgeError):
        ask(judge)
    assert ask(judge)["score"] == 0.5


# ---- in a reward manager --------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one letter per token."""

    def decode(self, ids, **_):
        return "".join(chr(int(i)) for i in ids)

    def batch_decode(self, rows, **_):
        return [self.decode(row) for row in rows]


def batch(*responses):
    ids = [[ord(letter) for letter in text] for text in responses]
    columns = build_sequences([[1]] * len(ids), ids, 0)
    size = len(ids)
    objects = {"data_source": ["x"] * size, "uid": list(map(str, range(size))), "raw_prompt": ["?"] * size}
    return DataProto(columns, {**objects, "reward_model": [{"ground_truth": None}] * size})


def manager(endpoint, **settings):
    judge = {"url": endpoint.url, "model": "m", "retries": 0}
    function = resolve_reward_function(registered="judge", reward_kwargs=judge)
    assert function.is_async and not function.is_accuracy and not function.needs_ground_truth
    return NaiveRewardManager(Letters(), function, **settings)


def count(body):
    """Grades by the number of a."""
    text = body["messages"][0]["content"].partition("<response>")[2].partition("</response>")[0]
    return f"Score: {text.count('a')}" if "x" not in text else "no idea"


def test_responses_are_graded_at_the_same_time(endpoint):
    async def after_all_have_come(body):
        while endpoint.most < most:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)  # for one more than that
        return count(body)

    endpoint.replies, most = [after_all_have_come], 4
    result = manager(endpoint)(batch("aab", "bbb", "aaa", "ab"), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == pytest.approx([0.2, 0.0, 0.3, 0.1])
    assert result["reward_extra_info"]["judge_prompt_tokens"] == [100] * 4 and endpoint.most == 4
    endpoint.most, most = 0, 2
    manager(endpoint, max_concurrency=2)(batch("aab", "bbb", "aaa", "ab"))
    assert endpoint.most == 2


def test_a_failure_is_an_error_or_the_configured_score(endpoint):
    endpoint.replies = [count]
    with pytest.raises(RewardError, match="expected a verdict"):
        manager(endpoint)(batch("aa", "x"))
    counted = manager(endpoint, on_error="count", failure_score=-1.0)(batch("aa", "x"), return_dict=True)
    assert counted["reward_tensor"].sum(1).tolist() == pytest.approx([0.2, -1.0])
    assert counted["metrics"]["reward/failed_rows"] == 1.0
    endpoint.replies = ["no idea", "Score: 10"]
    assert manager(endpoint, retries=1)(batch("a")).sum() == 1.0


def test_a_subclass_has_a_parser_of_its_own(endpoint):
    class Stars(Judge):
        def parse(self, text):
            return text.count("*") / 5

    endpoint.replies = [json.dumps("***")]
    assert ask(Stars(endpoint.url, "m"))["score"] == 0.6
