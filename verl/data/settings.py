"""The settings of a dataset, read from a mapping: defaults, types, and the nearest key for a wrong one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from verl.data.tokenization import TRUNCATIONS
from verl.registry import did_you_mean

# Keys of the `data` section that other parts read. A dataset is handed the whole section.
OTHER_DATA_KEYS = frozenset(
    [
        "custom_cls",
        "dataloader_num_workers",
        "filter_overlong_prompts_workers",
        "function_tool_path",
        "gen_batch_size",
        "image_patch_size",
        "max_response_length",
        "max_token_len_per_gpu",
        "micro_batch_size_per_gpu",
        "mm_processor_kwargs",
        "return_full_prompt",
        "return_multi_modal_inputs",
        "return_raw_input_ids",
        "seed",
        "shuffle",
        "tokenizer",
        "tool_config_path",
        "train_batch_size",
        "train_files",
        "trust_remote_code",
        "use_dynamic_bsz",
        "use_shm",
        "val_batch_size",
        "val_files",
        "val_max_samples",
        "validation_shuffle",
    ]
)


class Config(Protocol):
    """A dict, an OmegaConf node, or anything else with `get`."""

    def get(self, key: str, default: Any = None) -> Any: ...


S = TypeVar("S")


@dataclass(frozen=True)
class PromptSettings:
    """What `RLHFDataset` reads of the `data` section."""

    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    prompt_format: str = "auto"  # auto | chat | text
    max_prompt_length: int = 1024  # tokens
    filter_overlong_prompts: bool = False
    truncation: str = "error"  # error | left | right | middle
    train_max_samples: int = -1  # the first so many rows of the files; -1: all
    max_samples: int | None = None  # the same for this dataset alone, such as one for validation; goes first
    chat_template: str | None = None  # Jinja text instead of the tokenizer's own
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    return_raw_chat: bool = True
    image_key: str = "images"
    video_key: str = "videos"
    audio_key: str = "audios"

    def __post_init__(self) -> None:
        check_choice("prompt_format", self.prompt_format, ("auto", "chat", "text"))
        check_choice("truncation", self.truncation, TRUNCATIONS)
        check_at_least("max_prompt_length", self.max_prompt_length, 1)
        check_at_least("train_max_samples", self.train_max_samples, -1)
        check_at_least("max_samples", -1 if self.max_samples is None else self.max_samples, -1)

    def rows_used(self, num_rows: int) -> int:
        """How many of the rows of the files are used, from the first on."""
        return _rows_used(self, num_rows)


@dataclass(frozen=True)
class SFTSettings:
    """What `SFTDataset` reads of the `data` section. Columns that are not named are looked for."""

    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    prompt_dict_keys: list[str] | None = None  # the way into a column of dicts, such as extra_info -> question
    response_dict_keys: list[str] | None = None
    prompt_format: str = "auto"  # auto | chat | text
    max_length: int = 1024  # tokens of prompt and response together
    truncation: str = "error"  # error | left | right
    train_max_samples: int = -1
    max_samples: int | None = None
    chat_template: str | None = None
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("prompt_format", self.prompt_format, ("auto", "chat", "text"))
        check_choice("truncation", self.truncation, ("error", "left", "right"))
        check_at_least("max_length", self.max_length, 2)
        check_at_least("train_max_samples", self.train_max_samples, -1)
        check_at_least("max_samples", -1 if self.max_samples is None else self.max_samples, -1)

    def rows_used(self, num_rows: int) -> int:
        """How many of the rows of the files are used, from the first on."""
        return _rows_used(self, num_rows)


def read_settings(cls: type[S], config: Config | None, further_keys: frozenset[str] = OTHER_DATA_KEYS) -> S:
    """The settings `cls` out of `config`; a key without a value (None) keeps its default.

    Raises:
        ValueError: a value of the wrong kind, or, where the keys of `config` can be listed, one that nobody reads.
    """
    if config is None:
        return cls()
    known = [f.name for f in fields(cls)]
    if isinstance(config, Mapping):
        for key in config:
            if key not in known and key not in further_keys:
                raise ValueError(f"data config: unknown key {key!r}: {did_you_mean(str(key), known)}")
    given = {key: config.get(key, None) for key in known}
    return cls(**{key: value for key, value in given.items() if value is not None})


def _rows_used(settings: PromptSettings | SFTSettings, num_rows: int) -> int:
    limit = settings.train_max_samples if settings.max_samples is None else settings.max_samples
    return num_rows if limit < 0 else min(limit, num_rows)


def check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"data.{key}: expected one of {', '.join(choices)}, found {value!r}")


def check_at_least(key: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"data.{key}: expected a whole number from {least}, found {value!r}")
