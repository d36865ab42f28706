"""A chat -> token ids and a mask of the tokens that an assistant wrote, turn by turn."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.data.tokenization import Message, encode, render_chats

logger = logging.getLogger("verl.data")


def encode_conversations(
    tokenizer: Any,
    chats: Sequence[Sequence[Message]],
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    where: Callable[[int], str] = lambda i: f"chat {i}",
) -> list[tuple[list[int], list[int]]]:
    """Chats -> (token ids, 1 where a token is an assistant's), up to the eos that ends the last assistant turn.

    The text before a turn is what the template makes of the messages so far with its generation prompt: what a rollout
    would be given. The turn is what the template adds to that. Each is tokenized on its own, as in a rollout, and the
    template has to agree that the pieces make up the whole. A turn is the assistant's up to and including its eos
    token; what the template puts after it is not. An assistant message at the very start is read, not trained.

    Raises:
        ValueError: a chat without a turn to train, a template that rewrites earlier turns, an answer with eos inside.
    """
    turns = [(i, t) for i, chat in enumerate(chats) for t, m in enumerate(chat) if t > 0 and m["role"] == "assistant"]
    _check_every_chat_has_a_turn(chats, turns, where)
    settings = {
        "chat_template": chat_template,
        "template_kwargs": template_kwargs,
        "where": lambda k: where(turns[k][0]),
    }
    prefixes = render_chats(tokenizer, [chats[i][:t] for i, t in turns], add_generation_prompt=True, **settings)
    wholes = render_chats(tokenizer, [chats[i][: t + 1] for i, t in turns], add_generation_prompt=False, **settings)
    contexts, answers, done = [], [], [""] * len(chats)
    for (i, t), prefix, whole in zip(turns, prefixes, wholes):
        if not (prefix.startswith(done[i]) and whole.startswith(prefix)):
            raise ValueError(
                f"{where(i)}: the chat template writes the messages before turn {t} in another way once that turn is "
                "there (some drop the reasoning of earlier turns, or begin an answer differently), so what is trained "
                "would not be what is generated: give one row per assistant turn, or another data.chat_template"
            )
        contexts.append(prefix[len(done[i]) :])
        answers.append(whole[len(prefix) :])
        done[i] = whole
    result: list[tuple[list[int], list[int]]] = [([], []) for _ in chats]
    context_ids = encode(tokenizer, contexts, add_special_tokens=False)
    answer_ids = encode(tokenizer, answers, add_special_tokens=False)
    for k, (i, _) in enumerate(turns):
        ids, mask = result[i]
        end = _length_of_answer(tokenizer, answer_ids[k], answers[k], where(i))
        is_last = k + 1 == len(turns) or turns[k + 1][0] != i
        rest = [] if is_last else answer_ids[k][end:]
        ids += context_ids[k] + answer_ids[k][:end] + rest
        mask += [0] * len(context_ids[k]) + [1] * end + [0] * len(rest)
    return result


def _check_every_chat_has_a_turn(
    chats: Sequence[Sequence[Message]], turns: Sequence[tuple[int, int]], where: Callable[[int], str]
) -> None:
    with_turn = {i for i, _ in turns}
    for i, chat in enumerate(chats):
        if i not in with_turn:
            roles = [message["role"] for message in chat]
            raise ValueError(f"{where(i)}: the chat has no assistant turn to learn from; its roles are {roles}")


def _length_of_answer(tokenizer: Any, ids: list[int], text: str, where: str) -> int:
    """Number of tokens up to and including eos; all of them, with a warning, where the template ends with another."""
    count = ids.count(tokenizer.eos_token_id)
    if count > 1:
        raise ValueError(
            f"{where}: an assistant turn has the eos token {tokenizer.eos_token!r} {count} times: a model that learns "
            "it would stop at the first; take it out of the text"
        )
    if count == 1:
        return ids.index(tokenizer.eos_token_id) + 1
    _warn_of_ending(text[-20:], tokenizer.eos_token)
    return len(ids)


@functools.cache
def _warn_of_ending(ending: str, eos_token: str) -> None:
    """Once per ending, not once per row."""
    logger.warning(
        "the chat template ends an assistant turn with %r and not with the eos token %r: the model learns to end "
        "there, and generation stops there only if that token is a stop token",
        ending,
        eos_token,
    )
