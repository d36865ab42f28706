"""A generative judge: a language model behind an OpenAI-compatible endpoint grades responses (`verl serve`, others).

`reward.reward_function=judge` selects it; its settings are `reward.custom_reward_function.reward_kwargs`. Requests run
at the same time (`reward.reward_kwargs.max_concurrency`), and a response that cannot be graded is an error that
`reward.on_error` handles. A subclass in a custom file may override `messages` and `parse`.
"""

import asyncio
import hashlib
import json
import os
import random
import re
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from verl.rewards.functions import RewardFunction, register_reward

TEMPLATE = """\
Grade the response to a prompt.

<rubric>
{rubric}
</rubric>
<prompt>
{prompt}
</prompt>
<response>
{response}
</response>

{form}
"""
RUBRIC = "How correct, helpful and clear is the response?"

_PLACEHOLDER = re.compile(r"\{(rubric|prompt|response|reference|form)\}")
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_NAMES = r"(?:score|rating|grade|verdict)"
_RETRIED = (408, 409, 425, 429)  # and 500 and above
_THREADS = ThreadPoolExecutor(256, "judge")  # of requests; started as they are needed
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds before a retry; doubled for each further one


class JudgeError(ValueError):
    """The judge gave no verdict."""


@register_reward("judge", accuracy=False)
class Judge(RewardFunction):
    """Grades a response between 0 and 1.

    Args:
        url: the endpoint up to its version, such as "http://127.0.0.1:8000/v1".
        model: the name that the endpoint gives the model.
        rubric: what is graded.
        template: text of the user message, with {response} and optionally {prompt}, {rubric}, {reference} (the ground
            truth) and {form}, which tells the judge how to write its verdict.
        verdict: how the verdict is written. "number": "Score: 7" or [[7]], from `low` to `high`; "letter": "Verdict: A"
            or [[A]], out of `letters`; "json": an object with the key "score", a number or one of `letters`.
        low, high: numbers that become 0 and 1.
        letters: letter -> grade; None: A is 1, B is 0.
        temperature, max_tokens, extra_body: of the request; the last is merged into it.
        api_key_env: environment variable with the key; None: no key.
        timeout: seconds per request.
        retries: further attempts after 429, 5xx, a broken connection, a timeout or a malformed reply, after 1, 2, 4 ...
            seconds, or what Retry-After says.
        requests_per_minute: limit of the rate; None: none.
        cache: SQLite file of the replies; None: none. The key is everything that is sent.
        prompt_price, completion_price: of a million tokens, for `judge_cost`.

    Raises:
        ValueError: a setting is invalid.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        rubric: str = RUBRIC,
        template: str = TEMPLATE,
        verdict: str = "number",
        low: float = 0.0,
        high: float = 10.0,
        letters: Mapping[str, float] | None = None,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        extra_body: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        timeout: float = 60.0,
        retries: int = 4,
        requests_per_minute: float | None = None,
        cache: str | None = None,
        prompt_price: float = 0.0,
        completion_price: float = 0.0,
    ):
        self.url, self.rubric, self.template, self.verdict = url.rstrip("/"), rubric, template, verdict
        self.low, self.high, self.letters = low, high, dict(letters or {"A": 1.0, "B": 0.0})
        self.request = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(extra_body or {})}
        self.timeout, self.retries = timeout, retries
        self.seconds_per_request = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self.prices = prompt_price / 1e6, completion_price / 1e6
        self._next_request, self._lock = 0.0, threading.Lock()
        self._check(api_key_env)
        self._headers = {} if api_key_env is None else {"Authorization": f"Bearer {os.environ[api_key_env]}"}
        self.cache = ReplyCache(cache) if cache is not None else None

    def _check(self, api_key_env: str | None) -> None:
        used = set(_PLACEHOLDER.findall(self.template))
        problems = {
            f"url: expected http:// or https://, found {self.url!r}": not re.match(r"https?://", self.url),
            f"verdict: expected {', '.join(self._FORMS)}, found {self.verdict!r}": self.verdict not in self._FORMS,
            f"low and high: expected low < high, found {self.low:g} and {self.high:g}": self.low >= self.high,
            "template: expected {response} in it, which is what is graded": "response" not in used,
            "rubric: the template has no {rubric}, so it has no effect": self.rubric != RUBRIC and "rubric" not in used,
            f"retries: expected at least 0, found {self.retries}": self.retries < 0,
            f"timeout: expected seconds above 0, found {self.timeout}": self.timeout <= 0,
            f"api_key_env: the variable {api_key_env} is not set": api_key_env and not os.environ.get(api_key_env),
        }
        for problem, is_wrong in problems.items():
            if is_wrong:
                raise ValueError(f"judge: {problem} (reward.custom_reward_function.reward_kwargs)")

    # ---- one response -----------------------------------------------------------------------------------------------

    async def __call__(self, response: str, prompt: Any = None, ground_truth: Any = None) -> dict[str, Any]:
        """Grade a response: "score", and the tokens, cost and cache hits of this call."""
        body = {**self.request, "messages": self.messages(response, prompt, ground_truth)}
        key = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        cached = self.cache.get(key) if self.cache is not None else None
        reply = await self._ask(body) if cached is None else cached
        score = self.parse(reply["text"])
        if self.cache is not None and cached is None:
            self.cache.put(key, reply)
        tokens = reply["tokens"] if cached is None else [0, 0]
        return {
            "score": score,
            "judge_prompt_tokens": tokens[0],
            "judge_completion_tokens": tokens[1],
            "judge_cost": sum(price * count for price, count in zip(self.prices, tokens)),
            "judge_cached": float(cached is not None),
        }

    def messages(self, response: str, prompt: Any, ground_truth: Any) -> list[dict[str, str]]:
        """The chat that is sent. Placeholders in what is inserted stay as they are."""
        form = self._FORMS[self.verdict]
        values = {
            "rubric": self.rubric,
            "prompt": _as_text(prompt),
            "response": response,
            "reference": "" if ground_truth is None else str(ground_truth),
            "form": form.format(low=f"{self.low:g}", high=f"{self.high:g}", letters=" or ".join(self.letters)),
        }
        return [{"role": "user", "content": _PLACEHOLDER.sub(lambda match: values[match[1]], self.template)}]

    # ---- the verdict ------------------------------------------------------------------------------------------------

    _FORMS = {
        "number": 'End with a line "Score: N", where N is a number from {low} (worst) to {high} (best).',
        "letter": 'End with a line "Verdict: X", where X is {letters}.',
        "json": 'End with a JSON object {{"score": N}}, where N is a number from {low} (worst) to {high} (best).',
    }

    def parse(self, text: str) -> float:
        """The grade of a reply, the last one that is stated. Raises JudgeError if there is none."""
        text = text.rpartition("</think>")[2].strip()
        if self.verdict == "json":
            return self._grade(_last_object(text).get("score"), text)
        value = _NUMBER if self.verdict == "number" else "|".join(map(re.escape, self.letters))
        named = rf"\b{_NAMES}\b[\s*:=_\"']*(?:is\b)?[\s*:=_\"']*({value})(?![\w.]*\w)"
        stated = re.findall(rf"\[\[\s*({value})\s*\]\]|(?i:{named})", text)
        alone = re.fullmatch(rf"[^\w+-]*({value})[^\w%]*", text)
        return self._grade("".join(stated[-1]) if stated else alone and alone[1], text)

    def _grade(self, value: Any, text: str) -> float:
        if self.verdict != "number" and str(value) in self.letters:
            return float(self.letters[str(value)])
        if self.verdict != "letter" and re.fullmatch(_NUMBER, str(value)) and self.low <= float(value) <= self.high:
            return (float(value) - self.low) / (self.high - self.low)
        known = " or ".join(self.letters) if self.verdict == "letter" else f"from {self.low:g} to {self.high:g}"
        problem = f"expected a verdict ({self.verdict}, {known}), found {value!r} in the reply {text[-300:]!r}"
        raise JudgeError(f"judge {self.request['model']}: {problem}")

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The text and the token counts of a reply. Raises JudgeError after the last retry."""
        problem = ""
        for attempt in range(self.retries + 1):
            with self._lock:  # calls of several event loops
                now = time.monotonic()
                start = max(now, self._next_request)
                self._next_request = start + self.seconds_per_request
            await asyncio.sleep(start - now)
            try:
                return await asyncio.get_running_loop().run_in_executor(_THREADS, self._attempt, body)
            except _Retriable as error:
                problem = str(error)
                backoff = min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT) * random.uniform(0.75, 1.25)
                if attempt < self.retries:
                    await asyncio.sleep(max(min(error.seconds, _LONGEST_WAIT), backoff))
        raise JudgeError(f"judge {self.url}: {self.retries + 1} attempts failed; the last: {problem}")

    def _attempt(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One request. Raises JudgeError, or _Retriable if another attempt may succeed."""
        headers = {"Content-Type": "application/json", **self._headers}
        request = Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urlopen(request, timeout=self.timeout) as received:
                content = received.read().decode(errors="replace")
        except HTTPError as error:
            problem = f"status {error.code}: {error.read(300).decode(errors='replace')}"
            if error.code in _RETRIED or error.code >= 500:
                wait = error.headers.get("Retry-After", "")  # seconds; only the backoff counts if it is a date
                raise _Retriable(problem, float(wait) if re.fullmatch(r"\d+(\.\d+)?", wait) else 0.0) from error
            raise JudgeError(f"judge {self.url}: {problem}") from error
        except (OSError, HTTPException) as error:  # no connection, a broken one, or a timeout
            raise _Retriable(f"{type(error).__name__}: {error} (timeout: {self.timeout:g} s)") from error
        try:
            reply = json.loads(content)
            text, usage = reply["choices"][0]["message"]["content"], reply.get("usage") or {}
            tokens = [int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion")]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Retriable(f"malformed reply: {content[:300]!r}") from error
        if not isinstance(text, str):
            raise _Retriable(f"a reply without text: {content[:300]!r}")
        return {"text": text, "tokens": tokens}


class _Retriable(Exception):
    """A request that may succeed later. seconds: that the endpoint asks to wait."""

    def __init__(self, problem: str, seconds: float = 0.0):
        super().__init__(problem)
        self.seconds = seconds


class ReplyCache:
    """Replies in an SQLite file, which several processes may use. Raises ValueError if it cannot be written."""

    def __init__(self, path: str):
        try:
            self._database = sqlite3.connect(os.path.expanduser(path), timeout=60.0, check_same_thread=False)
            with self._database:
                self._database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)")
        except sqlite3.Error as error:
            raise ValueError(f"judge: cache: {path} is no SQLite file that can be written: {error}") from error
        self._lock = threading.Lock()

    def get(self, key: str) -> dict[str, Any] | None:
        """The reply of a key; None if there is none."""
        with self._lock:
            row = self._database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, reply: Mapping[str, Any]) -> None:
        """Store a reply."""
        with self._lock, self._database:
            self._database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, json.dumps(reply)))


def _as_text(prompt: Any) -> str:
    """A prompt as text; messages of a chat of several turns with their roles."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return "" if prompt is None else str(prompt)
    contents = [(str(message.get("role")), str(message.get("content") or "")) for message in prompt]
    return contents[0][1] if len(contents) == 1 else "\n\n".join(f"{role}: {text}" for role, text in contents)


def _last_object(text: str) -> dict[str, Any]:
    """The last JSON object in a text that has no other object in it; {} if there is none."""
    for candidate in reversed(re.findall(r"\{[^{}]*\}", text)):
        with suppress(ValueError):
            return json.loads(candidate)
    return {}
