"""Tiny random HuggingFace models with tokenizers, created in seconds, for tests, the quickstart and benchmarks.

Two tokenizers:
    char    one token per character, 32 symbols; the language of the tasks in `tasks.py`; no chat template
    bpe     byte-level BPE of about 550 tokens, trained on the fly; lossless; a ChatML chat template
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.utils.logging import disable_progress_bar

from verl.registry import did_you_mean

logger = logging.getLogger(__name__)

CHARACTERS = "abcdefghij0123456789=,:+-*()"
CHAR_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
BPE_VOCAB_SIZE = 550
CONTEXT_LENGTH = 4096

CHATML_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# "tiny" with the char tokenizer has 103,232 parameters and "mini" 338,592: benchmarks LB-1 and LB-2 of the quickstart
# tasks. "small" with the bpe tokenizer has about 0.43 million; its head size of 32 is one that vLLM accepts.
SIZES = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 172,
    },
    "mini": {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
    },
    "small": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 344,
    },
}

# model type -> default (tokenizer, size, tied embeddings)
ARCHITECTURES = {
    "llama": ("char", "tiny", False),
    "mistral": ("char", "tiny", False),
    "qwen2": ("bpe", "small", True),
    "qwen3": ("bpe", "small", True),
    "mixtral": ("char", "tiny", False),
    "qwen3_moe": ("bpe", "small", True),
}

# model type -> settings of its experts
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
}


def tiny_model(
    kind: str,
    out_dir: str | Path,
    seed: int = 0,
    *,
    size: str | None = None,
    tokenizer: str | None = None,
    texts: Iterable[str] | None = None,
) -> Path:
    """Write a random model of the family `kind`, with tokenizer and generation config, in HuggingFace format.

    Args:
        kind: "llama", "mistral" (char tokenizer, 103k parameters), "mixtral" (the same with four experts), "qwen2",
            "qwen3" (bpe tokenizer, 0.43M) or "qwen3_moe" (eight experts).
        out_dir: folder to write; may exist.
        seed: seed of the weights. The random state of the caller is not changed.
        size: a name of `SIZES`; default: that of the family.
        tokenizer: "char" or "bpe"; default: that of the family.
        texts: texts to train the bpe tokenizer on; default: built-in sentences.

    Returns:
        `out_dir`: a path for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: if a name is unknown, or `AutoTokenizer` does not reload the same tokenizer.
    """
    default_tokenizer, default_size, tied = _lookup(ARCHITECTURES, kind, "model family")
    tokenizers = {"char": char_tokenizer, "bpe": bpe_tokenizer}
    make_tokenizer = _lookup(tokenizers, tokenizer or default_tokenizer, "tokenizer")
    made = make_tokenizer() if texts is None else make_tokenizer(texts)
    shape = _lookup(SIZES, size or default_size, "size")
    special_ids = {
        "bos_token_id": made.bos_token_id,
        "eos_token_id": made.eos_token_id,
        "pad_token_id": made.pad_token_id,
    }
    config = AutoConfig.for_model(
        kind,
        **shape,
        **EXPERTS.get(kind, {}),
        # the default of Qwen3 is 128
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        vocab_size=len(made),
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=tied,
        # matrices this small learn twice as fast as with the 0.02 of large models
        initializer_range=0.06,
        **special_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**special_ids)
    out_dir = Path(out_dir)
    disable_progress_bar()
    model.save_pretrained(out_dir)
    made.save_pretrained(out_dir)
    _check_reload(made, out_dir)
    logger.info("wrote %s, a %s of %s parameters", out_dir, kind, f"{model.num_parameters():,}")
    return out_dir


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of `CHARACTERS`; others are <unk>. Does not add bos or eos."""
    vocab = {symbol: i for i, symbol in enumerate([*CHAR_SPECIAL_TOKENS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def bpe_tokenizer(texts: Iterable[str] | None = None) -> Qwen2Tokenizer:
    """Byte-level BPE of about 550 tokens, trained on `texts`, with a ChatML chat template.

    It has the class of Qwen2, because `AutoTokenizer` reloads the tokenizer of a Qwen2 model with the pre-tokenization
    of that class, whatever the files contain.
    """
    trained = Qwen2Tokenizer().train_new_from_iterator(
        list(texts) if texts is not None else builtin_sentences(),
        vocab_size=BPE_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    trained.eos_token = "<|im_end|>"
    trained.chat_template = CHATML_TEMPLATE
    return trained


def builtin_sentences() -> list[str]:
    """A few hundred sentences like those of word problems, enough for common English merges."""
    people = ["Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo"]
    things = ["apples", "books", "pencils", "tickets", "cookies", "marbles", "flowers", "boxes", "stickers"]
    forms = [
        "{p} has {n} {t} and buys {m} more. How many {t} does {p} have in total?",
        "Each box holds {n} {t}. If {p} fills {m} boxes, how many {t} are there altogether?",
        "{p} gave half of the {n} {t} to a friend and then sold {m} of them for $2 each.",
        "There were {n} {t} at the shop on Monday, and {m} percent of the {t} were sold by the end of the week.",
        "It takes {p} {n} minutes to make one of the {t}; how much time is needed for {m}, and what is left over?",
        "Yesterday the price of {n} {t} was ${m}.50. Today each costs twice as much: what does {p} pay together?",
        "During the first hour {p} walked {n} miles, then rested, and finally ran {m} miles before school began.",
        "A farmer planted {n} rows with {m} trees, but some of them were lost; the remaining ones bear {t} every year.",
    ]
    return [
        form.format(p=person, t=thing, n=3 * i + j + 2, m=2 * j + k + 3)
        for i, person in enumerate(people)
        for j, thing in enumerate(things)
        for k, form in enumerate(forms)
    ]


def _lookup(table: dict, name: str, noun: str):
    if name not in table:
        raise ValueError(f"no {noun} is called {name!r}: {did_you_mean(name, table)}")
    return table[name]


def _check_reload(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise ValueError if `AutoTokenizer`, which chooses a class by model type, reloads a different tokenizer."""
    loaded = AutoTokenizer.from_pretrained(folder)
    texts = ["abcdefghij=", "1,2,3:7=1+2*3", "(9-4)=5", "a Z"]
    if tokenizer.chat_template is not None:
        texts += [*builtin_sentences()[::40], "<|im_start|>user\nA  naïve café's 3½ €5 – “yes”\n\n\ttab<|im_end|>\n"]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        back = loaded(text)["input_ids"]
        if back != ids or loaded.decode(back) != tokenizer.decode(ids):
            raise ValueError(
                f"AutoTokenizer does not reload the {type(tokenizer).__name__} saved in {folder}: {text!r} gives "
                f"{back}, expected {ids}. This model family needs its default tokenizer: remove the tokenizer option"
            )
