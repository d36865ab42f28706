"""The `data` section of RL: prompts for training and validation."""

from typing import Annotated, Any, Literal

from pydantic import Field

from verl.config.fields import FilePath, FilePaths, Section, field, is_set, section

PromptFormat = Literal["auto", "chat", "text"]


class CustomClassConfig(Section):
    """A custom class, by file and name."""

    path: FilePath | None = field(None, "Python file or module")
    name: str | None = field(None, "name of the class")


class DatasetClassConfig(CustomClassConfig):
    """`data.custom_cls`: a custom dataset class."""

    kwargs: dict[str, Any] = field(
        {}, "further settings of the class: keys of its `config`", active_when=("path", is_set)
    )


class SamplerConfig(Section):
    """`data.sampler`: a custom order of the training prompts."""

    class_path: FilePath | None = field(None, "Python file or module")
    class_name: str | None = field(None, "name of the class, a verl.data.order.AbstractSampler")


BAD_ROWS = "training rows that may be dropped because they cannot be used"


NUM_WORKERS = "threads that prepare the next batch during a step; null: 0 for text, up to 8 for images"


class MediaSection(Section):
    """Images and videos of a vision-language model: part of every `data` section with prompts."""

    image_key: str = field("images", "column of the images")
    video_key: str = field("videos", "column of the videos")
    mm_processor_kwargs: dict[str, Any] = field({}, "arguments of the model's processor")
    min_pixels: int | None = field(None, "enlarge images with fewer pixels (width x height)", ge=1)
    max_pixels: int | None = field(None, "shrink images with more pixels (width x height)", ge=16)
    max_video_frames: int | None = field(None, "frames of a video, evenly spaced; null: all", ge=1)


class DataConfig(MediaSection):
    """`data`: prompts for training and validation. A dataset class receives this section."""

    train_files: FilePaths = field([], "training data: .parquet, .jsonl, .json, .csv, or hub names")
    val_files: FilePaths = field([], "validation data")
    train_weights: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = field(
        [], "share of the prompts that each of train_files gets, in any unit; empty: as many as it has"
    )
    train_max_samples: int = field(-1, "number of training rows to use; -1: all", ge=-1)
    val_max_samples: int = field(-1, "number of validation rows to use; -1: all", ge=-1)
    train_batch_size: int = field(1024, "PROMPTS per training step", ge=1)
    gen_batch_size: int | None = field(None, "prompts per generation with filter_groups; null: train_batch_size", ge=1)
    val_batch_size: int | None = field(None, "prompts per validation batch; null: all at once", ge=1)
    prompt_key: str = field("prompt", "column of the prompt: chat messages or text")
    prompt_format: PromptFormat = field("auto", "chat messages or plain text; auto: detect")
    ground_truth_key: str = field("answer", "column of the ground truth; if set, reward_model is not read")
    reward_fn_key: str = field("data_source", "column that selects the reward function")
    max_prompt_length: int = field(512, "maximum prompt length in tokens", ge=1)
    max_response_length: int = field(512, "maximum response length in tokens", ge=1)
    max_bad_rows: int = field(0, BAD_ROWS, ge=0)
    filter_overlong_prompts: bool = field(False, "drop prompts longer than max_prompt_length")
    truncation: Literal["error", "left", "right", "middle"] = field("error", "how to truncate overlong prompts")
    shuffle: bool = field(True, "shuffle the training rows in every epoch")
    seed: int = field(42, "shuffle seed", default_from="${trainer.seed}", ge=0, le=2**62)
    dataloader_num_workers: int | None = field(None, NUM_WORKERS, ge=0)
    custom_cls: DatasetClassConfig = section(DatasetClassConfig, "custom dataset class that replaces RLHFDataset")
    sampler: SamplerConfig = section(SamplerConfig, "custom order of the prompts, instead of shuffle and seed")
    apply_chat_template_kwargs: dict[str, Any] = field({}, "arguments of the chat template, such as enable_thinking")
    tool_config_path: FilePath | None = field(
        None,
        "YAML file with the tools that prompts describe",
        default_from="${actor_rollout_ref.rollout.multi_turn.tool_config_path}",
    )
    function_tool_path: FilePath | None = field(
        None,
        "Python file with the function tools that prompts describe",
        default_from="${actor_rollout_ref.rollout.multi_turn.function_tool_path}",
    )
