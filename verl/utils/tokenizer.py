"""Tokenizers and processors under the names of public verl."""

import copy
import functools
from collections.abc import Sequence
from typing import Any


def hf_tokenizer(name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any) -> Any:
    """Load a tokenizer of transformers.

    Args:
        name_or_path: folder, or name on the hub.
        correct_pad_token: use the EOS token for padding if the tokenizer has no padding token.
        correct_gemma2: use <end_of_turn> as EOS token of gemma-2-2b-it.
        kwargs: for `AutoTokenizer.from_pretrained`.
    """
    from transformers import AutoTokenizer

    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        kwargs["eos_token"] = "<end_of_turn>"
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return with_id_lists(tokenizer)


def with_id_lists(tokenizer: Any) -> Any:
    """A copy of a tokenizer for code of public verl: `apply_chat_template` returns the token ids as a list, not a dict,
    which is what transformers did before its release 5."""
    with_lists = copy.copy(tokenizer)
    with_lists.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    return with_lists


def set_pad_token_id(tokenizer: Any) -> None:
    """Use the EOS token for padding if the tokenizer has no padding token."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Load the processor of a multimodal model; None for a text-only model."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (ValueError, OSError):  # transformers: "Unrecognized processing class"
        return None
    return processor if isinstance(processor, ProcessorMixin) else None


# ---- decoding -------------------------------------------------------------------------------------------------------


def decode_all(tokenizer: Any, rows: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
    """Like `tokenizer.batch_decode`, in the threads of the tokenizers library if it alone produces the text.
    transformers decodes one sequence at a time: 0.1 s for 512 responses of 512 tokens. rows: token ids of each
    response."""
    from transformers import PreTrainedTokenizerFast

    uses_backend = isinstance(tokenizer, PreTrainedTokenizerFast) and not tokenizer.clean_up_tokenization_spaces
    if uses_backend and type(tokenizer)._decode is PreTrainedTokenizerFast._decode:  # not overridden
        return tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=skip_special_tokens)
    return tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens)
