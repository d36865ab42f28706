"""The tokens between two turns of the policy, without rendering its turns again.

Rendering a chat again with the text of a sampled turn gives other tokens than those sampled: text has several
tokenizations, and templates strip or rewrite earlier turns. The policy would then be trained on tokens that it never
sampled. Here only new messages are rendered, after a placeholder for the turn, and what the template adds to the
placeholder is tokenized and appended.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

_PLACEHOLDER = "turnofthepolicy"
_BEFORE = [{"role": "user", "content": "message"}, {"role": "assistant", "content": _PLACEHOLDER}]
#: keys of a message with its reasoning, of which templates know one
REASONING = ("reasoning_content", "reasoning", "thinking")
_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


def reads(tokenizer: Any, name: str, template_kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the rendering of a chat depends on an argument of the chat template, or on a key of `REASONING`.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        name: "tools", an argument that is true or false, or the key.
        template_kwargs: other arguments of the template.
    """
    settings = {**(template_kwargs or {}), "tokenize": False}
    if name in REASONING:
        variants = [([_BEFORE[0], _BEFORE[1] | key], settings) for key in ({name: "thought"}, {})]
    else:
        values = ([_TOOL], None) if name == "tools" else (True, False)
        variants = [(_BEFORE[:1], settings | {"add_generation_prompt": True, name: value}) for value in values]
    try:
        first, second = (tokenizer.apply_chat_template(chat, **arguments) for chat, arguments in variants)
    except Exception:  # the template rejects this chat or tool in its own way, and may accept others
        return True
    return first != second


class ChatContinuation:
    """Continues chats of one tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tools: schemas of the tools, for the template.
        template_kwargs: arguments of the template.

    Raises:
        ValueError: the tokenizer has no chat template, or the template does not show the turns of the policy.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        if tokenizer.chat_template is None:
            raise ValueError(
                "a multi-turn agent loop needs a chat template, which the tokenizer does not have: use the tokenizer "
                "of an instruction-tuned model, or set actor_rollout_ref.model.custom_chat_template"
            )
        self.tokenizer = tokenizer
        self._settings = {**(template_kwargs or {}), "tools": list(tools) or None, "tokenize": False}
        for role in ("user", "tool") if tools else ("user",):
            if "message" not in self.between([{"role": role, "content": "message"}]):
                raise ValueError(f"the chat template does not show a {role} message after an assistant message")

    def start_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a prompt."""
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **self._settings)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def between(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text with the messages from the end of a turn of the policy up to the start of its next turn.

        Raises:
            ValueError: the template does not support these messages.
        """
        chat = [*_BEFORE, *messages]
        try:
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, **self._settings)
        except jinja2.TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"the chat template does not support messages of {roles} after a turn of the policy: {error}. Set "
                "actor_rollout_ref.model.custom_chat_template"
            ) from error
        _, separator, continuation = text.partition(_PLACEHOLDER)
        if not separator:
            raise ValueError("the chat template does not show assistant messages: set another custom_chat_template")
        return continuation

    def next_tokens(self, sampled: Sequence[int], stop_ids: Sequence[int], messages: Sequence[Mapping]) -> list[int]:
        """The tokens to append after a turn, so that the policy can start its next turn.

        Args:
            sampled: the tokens of the turn.
            stop_ids: token ids that end a turn.
            messages: the messages between the two turns.

        Returns:
            The end of the turn as the template writes it, without the end token that the policy has sampled itself; the
            messages; and the generation prompt.
        """
        text = self.between(messages).encode(errors="replace").decode()  # tools can return lone surrogates
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        end_ids = {*stop_ids, self.tokenizer.eos_token_id}
        if sampled and sampled[-1] in end_ids and ids and ids[0] in end_ids:
            return ids[1:]
        return ids
