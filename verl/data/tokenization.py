"""Tokenization: encode texts and prompts, render chats, and check that the tokenizer loses no text."""

import array
import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from verl.agents.chat import REASONING, reads
from verl.config import schema
from verl.data.forms import CHAT_TEXT, as_messages
from verl.data.hub import check_hub
from verl.data.messages import (
    Chat,
    Message,
    marked,
    missing_content,
    read_message,
    reads_json_calls,
    shape_of,
    with_json_calls,
)
from verl.modeling.huggingface import model_source, needs_trust

logger = logging.getLogger("verl.data")


class TokenTable:
    """Many lists of token ids in one array: 4 bytes per token, a tenth of the memory of Python lists. typecode: as in
    the `array` module; "i" for ids, "b" for masks."""

    def __init__(self, typecode: str = "i"):
        self._tokens = array.array(typecode)
        self._ends = array.array("q")

    def append(self, ids: Sequence[int]) -> None:
        self._tokens.extend(ids)
        self._ends.append(len(self._tokens))

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def largest(self) -> int:
        """The largest id of all lists. Raises ValueError if there are no ids."""
        return max(self._tokens)

    @property
    def longest(self) -> int:
        """The length of the longest list. Raises ValueError if there are no lists."""
        return max(end - start for start, end in zip([0, *self._ends], self._ends))

    def __getitem__(self, row: int) -> list[int]:
        row = row + len(self) if row < 0 else row
        end = self._ends[row]
        start = self._ends[row - 1] if row else 0
        return self._tokens[start:end].tolist()


def prepare_tokenizer(tokenizer: Any) -> None:
    """Use the eos token as pad token if there is none: padding is always masked, so sharing the id is harmless. Raises
    ValueError if there is no eos token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos token, so no response could end: "
            "set eos_token in its tokenizer_config.json to the token that ends a response"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no pad token: using its eos token %r", tokenizer.eos_token)


def encode(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of many texts. Use add_special_tokens=False for rendered chats, which contain the special tokens."""
    if not texts:
        return []
    encoded = tokenizer(
        list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, truncation=False, verbose=False
    )
    return encoded["input_ids"]


def render_chats(
    tokenizer: Any,
    chats: Sequence[Sequence[Message]],
    *,
    add_generation_prompt: bool,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    location: Callable[[int], str] = lambda i: f"chat {i}",
) -> list[str]:
    """Render chats to text with the chat template. location: the name of chat i in errors."""
    settings = {
        **(template_kwargs or {}),
        "tools": list(tools) or None,
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "tokenize": False,
    }
    has_calls = any(message.get("tool_calls") for chat in chats for message in chat)
    form = with_json_calls if has_calls and reads_json_calls(tokenizer, settings) else list
    texts = []
    for i, chat in enumerate(chats):
        try:
            texts.append(tokenizer.apply_chat_template(form(chat), **settings | getattr(chat, "settings", {})))
        except Exception as error:  # a template raises its own errors, and those of Python
            roles = [message["role"] for message in chat]
            raise ValueError(
                f"{location(i)}: the chat template raises an error for the turns {roles}: {error}"
            ) from error
    return texts


def check_rendering(
    tokenizer: Any,
    chats: Sequence[Sequence[Message]],
    texts: Sequence[str],
    location: Callable[[int], str],
    trained: Sequence[Collection[int]] | None = None,
    **settings: Any,
) -> None:
    """Check that the chat template renders every message of chats, and reads what their rows set for it.

    The content of every message must be in the rendering. The first chat of each shape is also rendered with a mark in
    each text, which is found even if the text is elsewhere too.

    Args:
        texts: the renderings of the chats by `render_chats`, with the arguments `settings`.
        trained: the trained turns of each chat; None: there are none.

    Raises:
        ValueError: the template drops text of a message, or does not depend on a setting of the row or on reasoning.
    """
    shapes: set[Any] = set()
    template = {**(settings.get("template_kwargs") or {}), "chat_template": settings.get("chat_template")}
    for i, (chat, text) in enumerate(zip(chats, texts)):
        turns, columns = (trained[i] if trained else ()), getattr(chat, "settings", {})
        dropped = missing_content(chat, text, turns)
        if (shape := (*map(shape_of, chat), *turns, *columns)) not in shapes:
            shapes.add(shape)
            for name in (*columns, *(key for key in REASONING if any(message.get(key) for message in chat))):
                if not reads(tokenizer, name, template):
                    problem = f"the chat template does not read {name!r}, so it has no effect"
                    raise ValueError(f"{location(i)}: {problem}: remove it, or set model.custom_chat_template")
            pairs = [marked(message, turn, turn in turns) for turn, message in enumerate(chat)]
            marked_chat = Chat([message for message, _ in pairs], columns)
            (text,) = render_chats(tokenizer, [marked_chat], location=lambda _, i=i: location(i), **settings)
            dropped += [(turn, marks[m]) for turn, (_, marks) in enumerate(pairs) for m in marks if m not in text]
        for turn, name in dropped:
            raise ValueError(
                f"{location(i)}: message {turn} ({chat[turn]['role']}): the chat template does not render its {name}, "
                "which the model would not see: remove it, write it into the content of a message that is rendered, or "
                "set model.custom_chat_template"
            )


def check_messages(messages: Any, location: str) -> list[Message]:
    """Check a list of chat messages: role and content must be text. Returns messages of `read_message`."""
    messages = as_messages(messages)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) == 0:
        raise ValueError(f"{location}: expected a list of chat messages, found {messages!r}")
    checked = []
    for turn, message in enumerate(messages):
        if isinstance(message, Mapping):
            message = read_message(message, f"{location}: message {turn}")
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            example = '{"role": "user", "content": "..."}'
            raise ValueError(f"{location}: expected messages like {example}, found {messages[turn]!r}")
        texts = ("role", "content", *(key for key in REASONING if key in message))
        if wrong := [key for key in texts if not isinstance(message[key], str)]:
            names = "role and content" if wrong[0] in texts[:2] else wrong[0]
            kind = type(message[wrong[0]]).__name__
            raise ValueError(f"{location}: message {turn}: expected {names} to be text, found {kind}")
        for key in texts:
            check_encodable(message[key], f"{location}: message {turn}")
        checked.append(message)
    return checked


def check_encodable(text: str, location: str) -> None:
    """Raise ValueError for text that no tokenizer reads: half of a surrogate pair, as in the JSON text "\\ud83d"."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{location}: character {error.start} is {text[error.start]!a}, half of a surrogate pair, which is no "
            "character: remove the row, or write the text again from its source"
        ) from None


def as_chat_or_text(prompt: Any, prompt_format: str, has_template: bool, location: str) -> list[Message] | str:
    """A prompt as chat messages or as plain text.

    Args:
        prompt: messages or text.
        prompt_format: "chat" converts text to a user message, "text" keeps it, "auto" converts it if there is a chat
            template.
        has_template: whether there is a chat template.
        location: name of the prompt in errors.

    Raises:
        ValueError: an empty prompt, invalid messages, or messages with prompt_format "text".
    """
    prompt = as_messages(prompt)
    if isinstance(prompt, str) and CHAT_TEXT.match(prompt):
        raise ValueError(f"{location}: expected a chat as a list of messages or its JSON text, found {prompt!r:.100}")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError(f"{location}: the prompt is empty")
    if isinstance(prompt, str):
        check_encodable(prompt, location)
        as_chat = prompt_format == "chat" or (prompt_format == "auto" and has_template)
        return [{"role": "user", "content": prompt}] if as_chat else prompt
    messages = check_messages(prompt, location)
    if prompt_format == "text":
        raise ValueError(f"{location}: data.prompt_format=text, but the prompt is a list of chat messages")
    return messages


def read_prompt(prompt: Any, prompt_format: str, has_template: bool, location: str) -> list[Message] | str:
    """`as_chat_or_text` for generation: the chat must not end with an assistant message."""
    messages = as_chat_or_text(prompt, prompt_format, has_template, location)
    if not isinstance(messages, str) and messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{location}: the prompt ends with an assistant message, so it contains the response: end it with a user "
            "message, or train on the response with `verl sft`"
        )
    return messages


def refuse_media(row: Mapping[str, Any], keys: Sequence[str], location: str) -> None:
    """Raise ValueError for a row with a value in one of the columns `keys`, which would be ignored silently."""
    for key in keys:
        if row.get(key) is not None and not (isinstance(row[key], Sized) and len(row[key]) == 0):
            raise ValueError(
                f"{location}: column {key!r} has images, video or audio, which this model does not read: use a "
                "vision-language model (images and videos), or remove the column to use only the text"
            )


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[list[Message] | str],
    location: Callable[[int], str],
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[list[int]]:
    """Token ids of prompts from `read_prompt`: chats through the template with its generation prompt, texts unchanged.
    Raises ValueError for a chat without a template, and as `render_chats` and `encode_plain_prompts`."""
    chats = [i for i, prompt in enumerate(prompts) if not isinstance(prompt, str)]
    plain = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
    if chats and chat_template is None and tokenizer.chat_template is None:
        raise ValueError(
            f"{location(chats[0])}: the prompt is a chat, but the tokenizer has no chat template: use the tokenizer "
            "of an instruction-tuned model, set model.custom_chat_template (of a dataset made in Python: "
            'config={"custom_chat_template": ...}), or use plain-text prompts'
        )
    settings = {"chat_template": chat_template, "template_kwargs": template_kwargs, "tools": tools}
    settings["add_generation_prompt"] = True
    messages = [prompts[i] for i in chats]
    rendered = render_chats(tokenizer, messages, location=lambda k: location(chats[k]), **settings)
    check_rendering(tokenizer, messages, rendered, lambda k: location(chats[k]), **settings)
    _warn_of_templated(tokenizer, messages, rendered, lambda k: location(chats[k]))
    chat_ids = encode(tokenizer, rendered, add_special_tokens=False)
    plain_ids = encode_plain_prompts(tokenizer, [prompts[i] for i in plain], lambda k: location(plain[k]))
    encoded = dict(zip([*chats, *plain], [*chat_ids, *plain_ids]))
    return [encoded[i] for i in range(len(prompts))]


#: special tokens that were warned of
_templated: set[str] = set()


def _warn_of_templated(
    tokenizer: Any, chats: Sequence[Sequence[Message]], rendered: Sequence[str], location: Callable[[int], str]
) -> None:
    """Warn of a prompt with a special token that the chat template writes too: it was rendered before."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} - _templated
    for i, (chat, text) in enumerate(zip(chats, rendered)):
        written = "".join(message["content"] for message in chat)
        for token in [token for token in special if token in written and text.count(token) > written.count(token)]:
            special.discard(token)
            _templated.add(token)
            logger.warning(
                "%s: the prompt contains %r, which the chat template writes too: it is rendered twice if it was "
                "rendered before. To use texts as they are, set data.prompt_format=text; otherwise remove it",
                *(location(i), token),
            )


def encode_plain_prompts(tokenizer: Any, prompts: Sequence[str], location: Callable[[int], str]) -> list[list[int]]:
    """Token ids of prompts without a chat template, with a bos token if the tokenizer adds one. A rendered prompt may
    have one already, which counts."""
    encoded = encode(tokenizer, prompts, add_special_tokens=True)
    bos = [tokenizer.bos_token_id] * 2
    encoded = [
        ids[1:] if ids[:2] == bos and p.startswith(tokenizer.bos_token) else ids for p, ids in zip(prompts, encoded)
    ]
    for i, (prompt, ids) in enumerate(zip(prompts, encoded)):
        if ids and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
            raise ValueError(
                f"{location(i)}: the tokenizer appends its eos token {tokenizer.eos_token!r} to the prompt: "
                "set add_eos_token to false in tokenizer_config.json"
            )
        if not ids:
            raise ValueError(f"{location(i)}: the tokenizer returns no tokens for {_shorten(prompt)!r}")
    return encoded


def truncate(ids: list[int], limit: int, method: str) -> list[int]:
    """At most `limit` ids. method: "left" drops the start, "right" drops the end, "middle" keeps both ends."""
    if len(ids) <= limit:
        return ids
    if method == "left":
        return ids[-limit:]
    if method == "right":
        return ids[:limit]
    if method == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise ValueError(f"truncation: expected left, right or middle, found {method!r}")


def check_tokenizer(tokenizer: Any, texts: Sequence[str], location: Callable[[int], str] | None = None) -> None:
    """Check that texts survive encoding and decoding, except for the changes of the tokenizer's normalizer.

    A tokenizer that does not match the data or the model drops characters silently, and the model is then trained on
    prompts that differ from those in the file.

    Args:
        location: name of text i in errors.

    Raises:
        ValueError: a text with no tokens, or only unknown ones, or that decodes to a different text.
    """
    location = location or (lambda i: f"text {i}")
    encoded = encode(tokenizer, texts, add_special_tokens=False)
    normalized = []
    for i, (text, ids) in enumerate(zip(texts, encoded)):
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if decoded == text:
            continue
        if not ids and text:
            raise ValueError(f"{location(i)}: the tokenizer returns no tokens for {_shorten(text)!r}. {_ADVICE}")
        if all(token == tokenizer.unk_token_id for token in ids):
            raise ValueError(f"{location(i)}: every token of {_shorten(text)!r} is unknown to the tokenizer. {_ADVICE}")
        if _normal(tokenizer, decoded) != _normal(tokenizer, text):
            position = next((k for k, (a, b) in enumerate(zip(text, decoded)) if a != b), min(len(text), len(decoded)))
            start = max(position - 20, 0)
            raise ValueError(
                f"{location(i)}: the tokenizer loses text: {text[start : position + 30]!r} decodes to "
                f"{decoded[start : position + 30]!r} (first difference at character {position}). {_ADVICE}"
            )
        normalized.append(i)
    if normalized:
        logger.warning(
            "the tokenizer's normalizer changes %d of %d texts (the first: %s, %r)",
            len(normalized),
            len(texts),
            location(normalized[0]),
            _shorten(texts[normalized[0]]),
        )


_ADVICE = (
    "Is it the tokenizer of this model? AutoTokenizer selects a class by the model type, which may not be the class "
    "that was saved: compare `tokenizer_class` in tokenizer_config.json with the class that is loaded"
)


def _normal(tokenizer: Any, text: str) -> str:
    """Normalize a text like the tokenizer does, and strip it, since SentencePiece models may change outer spaces."""
    if tokenizer.is_fast and tokenizer.backend_tokenizer.normalizer is not None:
        text = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    return text.replace("▁", " ").strip(" ")


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def load_tokenizer(model: schema.ModelConfig) -> Any:
    """Load the tokenizer of a `model` section: that of the model, or of model.tokenizer_path. Raises ValueError if
    there is none."""
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoTokenizer

    path = model_source(model.tokenizer_path or model.path)
    if not Path(path).is_dir() and not isinstance(try_to_load_from_cache(path, "config.json"), str):
        check_hub("model", path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error) and not model.trust_remote_code:
            raise ValueError(needs_trust(path)) from error
        problem = f"in {path!r}" if Path(path).is_dir() else f"there is no folder {path!r}, and as a name of the hub"
        raise ValueError(f"no tokenizer: {problem}: {error}") from error
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer
