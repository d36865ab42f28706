"""Chats as tokens: with a loss mask for SFT, and for a reward model whose tokenizer differs from the policy's."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from verl.data.messages import Chat, Message, trained_turns
from verl.data.tokenization import as_chat_or_text, check_rendering, encode, render_chats
from verl.protocol import DataProto
from verl.utils.tokenizer import decode_all

logger = logging.getLogger("verl.data")

# ---- with a loss mask -----------------------------------------------------------------------------------------------


def encode_conversations(
    tokenizer: Any,
    chats: Sequence[Sequence[Message]],
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    location: Callable[[int], str] = lambda i: f"chat {i}",
    expanders: Mapping[int, Callable[[str], str]] | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Token ids of chats up to the eos token of the last assistant turn, and a loss mask.

    The context of a turn is the rendered messages before it plus the generation prompt; the turn is what the template
    adds to that, up to its eos token. Both are tokenized separately, as in a rollout, and the context must
    not change. An assistant message at the start, and one with a weight of 0 (`TRAINED`), is context.

    Args:
        chat_template: Jinja text that replaces the tokenizer's template. template_kwargs: its arguments.
        location: name of chat i in errors.
        expanders: chat -> the function that expands the image placeholders in parts of its text, in their order.

    Returns:
        For each chat its token ids, and a mask of the same length: 1 for the tokens in the loss.

    Raises:
        ValueError: a chat without an assistant turn, a template that renders earlier turns differently later on, or an
            assistant turn with several eos tokens.
    """
    chats = [Chat(chat, getattr(chat, "settings", {})) for chat in chats]
    trained = [trained_turns(chat, location(i)) for i, chat in enumerate(chats)]
    turns = [(i, t) for i, each in enumerate(trained) for t in each]
    settings = {"template_kwargs": template_kwargs, "chat_template": chat_template}
    render = functools.partial(render_chats, tokenizer, location=lambda k: location(turns[k][0]), **settings)
    prefixes = render([chats[i].before(t) for i, t in turns], add_generation_prompt=True)
    with_turn = render([chats[i].before(t + 1) for i, t in turns], add_generation_prompt=False)
    contexts, responses, done = [], [], [""] * len(chats)
    for (i, t), prefix, text in zip(turns, prefixes, with_turn):
        if not (prefix.startswith(done[i]) and text.startswith(prefix)):
            raise ValueError(
                f"{location(i)}: the chat template renders the messages before turn {t} differently once that turn is "
                "added (some templates drop the reasoning of earlier turns, or start a response differently), so that "
                "training differs from generation: train one turn per row (loss_mask 0 for the other assistant turns), "
                "or set model.custom_chat_template"
            )
        expand = (expanders or {}).get(i, str)
        contexts.append(expand(prefix[len(done[i]) :]))
        responses.append(expand(text[len(prefix) :]))
        done[i] = text
    whole = [chat.before(each[-1] + 1) for chat, each in zip(chats, trained)]  # up to the last trained turn
    check_rendering(tokenizer, whole, done, location, trained, add_generation_prompt=False, **settings)
    result: list[Any] = [([], []) for _ in chats]
    context_ids = encode(tokenizer, contexts, add_special_tokens=False)
    response_ids = encode(tokenizer, responses, add_special_tokens=False)
    for k, (i, _) in enumerate(turns):
        ids, mask = result[i]
        end = _response_length(tokenizer, response_ids[k], responses[k], location(i))
        is_last = k + 1 == len(turns) or turns[k + 1][0] != i
        rest = [] if is_last else response_ids[k][end:]
        ids += context_ids[k] + response_ids[k][:end] + rest
        mask += [0] * len(context_ids[k]) + [1] * end + [0] * len(rest)
    return result


def _response_length(tokenizer: Any, ids: list[int], text: str, location: str) -> int:
    """Number of tokens up to and including eos; all of them, with a warning, if the template ends a turn otherwise."""
    count = ids.count(tokenizer.eos_token_id)
    if count > 1:
        raise ValueError(
            f"{location}: an assistant turn contains the eos token {tokenizer.eos_token!r} {count} times, but "
            "generation stops at the first: remove it from the text"
        )
    if count == 1:
        return ids.index(tokenizer.eos_token_id) + 1
    _warn_of_ending(text[-20:], tokenizer.eos_token)
    return len(ids)


@functools.cache
def _warn_of_ending(ending: str, eos_token: str) -> None:
    """Warn once per ending instead of once per row."""
    logger.warning(
        "the chat template ends an assistant turn with %r and not with the eos token %r: the model learns that ending, "
        "and generation stops there only if its token is a stop token",
        ending,
        eos_token,
    )


# ---- for a reward model ---------------------------------------------------------------------------------------------


class DialogueReader:
    """Token ids of dialogues (prompt and response) for a reward model with the tokenizer `reader`.

    If both tokenizers and chat templates are the same, the policy's tokens are reused. Otherwise the responses are
    decoded, and the dialogue goes through the reader's chat template: the messages in the column raw_prompt, or a text
    prompt as the user's message. A reader without a template reads prompt and response as one text.

    Args:
        policy: the policy's tokenizer.
        reader: the reward model's tokenizer.
    """

    def __init__(self, policy: Any, reader: Any):
        self.policy, self.reader = policy, reader
        self.same = reader.chat_template == policy.chat_template and reader.get_vocab() == policy.get_vocab()
        self.same = self.same and reader.special_tokens_map == policy.special_tokens_map

    def __call__(self, batch: DataProto) -> list[list[int]]:
        """Token ids of the B dialogues of a batch. Reads input_ids and attention_mask (B, P+T), responses (B, T), and
        raw_prompt if the tokenizers differ."""
        ids, attended = batch.column("input_ids"), batch.column("attention_mask").bool()
        if self.same:
            return _unpadded(ids, attended)
        if "raw_prompt" not in batch:
            raise ValueError(
                "the reward model and the policy have different tokenizers or chat templates, so the dialogues are "
                "needed as text: the dataset must have a column 'raw_prompt' (messages or text)"
            )
        width = batch.column("responses").shape[1]
        responses = decode_all(self.policy, _unpadded(ids[:, -width:], attended[:, -width:]))
        prompts = batch.column("raw_prompt")
        if self.reader.chat_template is None:
            texts = [_text(prompt) + response for prompt, response in zip(prompts, responses)]
            return encode(self.reader, texts, add_special_tokens=True)
        chats = [
            [*as_chat_or_text(prompt, "chat", True, f"dialogue {i}"), {"role": "assistant", "content": response}]
            for i, (prompt, response) in enumerate(zip(prompts, responses))
        ]
        texts = render_chats(self.reader, chats, add_generation_prompt=False, location=lambda i: f"dialogue {i}")
        return encode(self.reader, texts, add_special_tokens=False)


def _unpadded(ids: torch.Tensor, attended: torch.Tensor) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(ids, attended)]


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    raise ValueError(
        "the prompts are chats, but the reward model's tokenizer has no chat template: set "
        "reward.reward_model.custom_chat_template"
    )
