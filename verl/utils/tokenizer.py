"""Tokenizers and processors under the names of public verl."""

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
    return tokenizer


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
