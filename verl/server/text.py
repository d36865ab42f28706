"""Responses as text, at once or token by token."""

import re
from collections.abc import Sequence
from typing import Any

#: the characters that encode bytes in the tokens of byte-level BPE (Radford et al. 2019, GPT-2): visible ones encode
#: themselves, the others the remaining bytes in order
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _VISIBLE}
_BYTES |= {chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(0x100)} - {*_VISIBLE}))}
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece


class ResponseText:
    """The text of one response, without special tokens, up to the first stop string.

    `feed` returns text that is final: a character whose bytes are incomplete, and text that may be the start of a stop
    string, are held back. The deltas joined are the text of the whole response.

    Args:
        stop: stop strings; the text ends before the first one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.token_ids: list[int] = []
        self._start = self._read = 0  # window of tokens that are decoded again with the next ones
        self._held_back = ""
        self._sent = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the text that they complete."""
        self.token_ids += token_ids
        decoded = self._decode(self.token_ids[self._start : self._read])
        extended = self._decode(self.token_ids[self._start :])
        if extended.endswith("\ufffd") or len(extended) <= len(decoded):
            return ""
        self._start, self._read = self._read, len(self.token_ids)
        self._held_back += extended[len(decoded) :]
        return self._send(len(self._held_back) - max((len(text) - 1 for text in self.stop), default=0))

    def finish(self) -> str:
        """The rest of the text."""
        text = self._cut(self._decode(self.token_ids))
        if not text.startswith(self._sent):
            return self._send(len(self._held_back))
        remaining = text[len(self._sent) :]
        self._sent = text
        return remaining

    def _send(self, length: int) -> str:
        text = self._held_back[: max(0, min(length, len(self._cut(self._held_back))))]
        self._held_back = self._held_back[len(text) :]
        self._sent += text
        return text

    def _cut(self, text: str) -> str:
        positions = [position for string in self.stop if (position := text.find(string)) >= 0]
        return text[: min(positions)] if positions else text

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def text_of(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text of a whole response."""
    reader = ResponseText(tokenizer, stop)
    reader.token_ids = list(token_ids)
    return reader.finish()


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of one token, which may be a part of a character."""
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text.encode()
    characters = tokenizer.convert_ids_to_tokens(token)
    if (byte := _BYTE_TOKEN.fullmatch(characters)) is not None:
        return bytes.fromhex(byte[1])
    if all(character in _BYTES for character in characters):
        return bytes(_BYTES[character] for character in characters)
    return text.encode()
