"""What was said, as the tokens of another model: a policy's prompts and answers, to be read by a reward model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.data.tokenization import as_chat_or_text, encode, render_chats
from verl.protocol import DataProto
from verl.utils.decoding import decode_all


class DialogueReader:
    """Token ids of whole dialogues (prompt and answer), for a model with the tokenizer `reader`.

    Where both tokenizers are the same, with the same chat template, the policy's own tokens are handed on. Otherwise
    the answers are decoded, and the dialogue goes through the reader's chat template: of the messages in the column
    raw_prompt, or of a text prompt as the user's message. A reader without a template reads prompt and answer as one
    text.
    """

    def __init__(self, policy: Any, reader: Any):
        self.policy, self.reader = policy, reader
        self.same = reader.chat_template == policy.chat_template and _same_tokens(policy, reader)

    def __call__(self, batch: DataProto) -> list[list[int]]:
        """Reads input_ids and attention_mask (B, P+T), responses (B, T), and raw_prompt where the tokenizers differ."""
        ids, attended = batch.column("input_ids"), batch.column("attention_mask").bool()
        if self.same:
            return _unpadded(ids, attended)
        if "raw_prompt" not in batch:
            raise ValueError(
                "the reward model has another tokenizer or chat template than the policy, so it needs the dialogues as "
                "text, but the dataset gives no column 'raw_prompt' (messages or text)"
            )
        width = batch.column("responses").shape[1]
        answers = decode_all(self.policy, _unpadded(ids[:, -width:], attended[:, -width:]))
        return self._encode(batch.column("raw_prompt"), answers)

    def _encode(self, prompts: np.ndarray, answers: Sequence[str]) -> list[list[int]]:
        if self.reader.chat_template is None:
            return encode(self.reader, [_text(p) + a for p, a in zip(prompts, answers)], add_special_tokens=True)
        chats = [
            [*as_chat_or_text(prompt, "chat", True, f"dialogue {i}"), {"role": "assistant", "content": answer}]
            for i, (prompt, answer) in enumerate(zip(prompts, answers))
        ]
        texts = render_chats(
            self.reader,
            chats,
            add_generation_prompt=False,
            where=lambda i: f"dialogue {i}",
        )
        return encode(self.reader, texts, add_special_tokens=False)


def _same_tokens(a: Any, b: Any) -> bool:
    """Whether the ids of one tokenizer mean the same in the other."""
    return a.get_vocab() == b.get_vocab() and a.special_tokens_map == b.special_tokens_map


def _unpadded(ids: torch.Tensor, attended: torch.Tensor) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(ids, attended)]


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    raise ValueError(
        "the prompts are chats, but the reward model's tokenizer has no chat template: set "
        "reward.reward_model.custom_chat_template"
    )
