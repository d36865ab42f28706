"""Response bodies and stream chunks in the form of OpenAI's API.

Fields that OpenAI does not have: `weight_version` of every choice, and with return_token_ids=true `prompt_token_ids`
and `token_ids` of every choice.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from verl.server.service import Choice, Delta, Running
from verl.server.text import token_bytes


async def full_body(running: Running) -> dict[str, Any]:
    """Generate, and return the response body."""
    call, choices = running.call, await running.choices()
    entries = []
    for choice in choices:
        entry: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
        if call.is_chat:
            entry["message"] = {"refusal": None, **choice.message}
        else:
            entry["text"] = choice.content
        ids = choice.completion.token_ids
        entry["logprobs"] = _log_probs(running, ids, choice.completion.log_probs, 0) if call.logprobs else None
        entries.append(entry | _own_fields(running, choice, ids))
    object_type = "chat.completion" if call.is_chat else "text_completion"
    return {**_head(running, object_type), "choices": entries, "usage": _usage(running, choices)}


async def chunks(running: Running) -> AsyncIterator[dict[str, Any]]:
    """Generate, and return the chunks of a stream. Closing the iterator aborts the requests."""
    call = running.call
    object_type = "chat.completion.chunk" if call.is_chat else "text_completion"
    head, usage = _head(running, object_type), {"usage": None} if call.include_usage else {}
    if call.is_chat:
        for index in range(len(running.requests)):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield {**head, "choices": [first], **usage}
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
    if call.include_usage:
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
    log_probs = _log_probs(running, delta.token_ids, delta.log_probs, offset) if call.logprobs else None
    entry["logprobs"] = log_probs
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


def _log_probs(running: Running, token_ids: Sequence[int], log_probs: Sequence[float], offset: int) -> dict[str, Any]:
    """The log-probs of tokens in OpenAI's form. offset: number of characters of the response before them."""
    tokenizer = running.model.tokenizer
    texts = [tokenizer.decode([token]) for token in token_ids]
    if running.call.is_chat:
        content = [
            {"token": text, "logprob": value, "bytes": list(token_bytes(tokenizer, token)), "top_logprobs": []}
            for token, text, value in zip(token_ids, texts, log_probs, strict=True)
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": texts,
        "token_logprobs": list(log_probs),
        "top_logprobs": None,
        "text_offset": [offset + position for position in accumulate(map(len, texts[:-1]), initial=0)][: len(texts)],
    }
