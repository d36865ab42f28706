"""The configuration of supervised fine-tuning: `load_config(..., tree=SFTConfig)`."""

from typing import Any, ClassVar, Literal

from verl.config.aliases import SFT
from verl.config.fields import FilePath, FilePaths, Node, Texts, Tree, key, part
from verl.config.known_keys import SFT_KNOWN
from verl.config.schema.data import CustomClassConfig
from verl.config.schema.model import CheckpointConfig, EngineConfig, ModelConfig, OptimConfig, Strategy
from verl.config.schema.trainer import RunConfig


class SFTDataConfig(Node):
    """`data`: rows of chat messages, or of a prompt and a response."""

    train_files: FilePaths = key([], "training files: .parquet, .json, .jsonl")
    val_files: FilePaths = key([], "validation files")
    train_max_samples: int = key(-1, "use this many training rows; -1: all", ge=-1)
    val_max_samples: int = key(-1, "use this many validation rows; -1: all", ge=-1)
    train_batch_size: int = key(256, "rows per optimizer update, over all ranks", ge=1)
    micro_batch_size_per_gpu: int | None = key(4, "rows per forward and backward pass without use_dynamic_bsz", ge=1)
    use_dynamic_bsz: bool = key(True, "make micro-batches by a number of tokens instead of a number of rows")
    max_token_len_per_gpu: int = key(8192, "tokens in a micro-batch of one rank with use_dynamic_bsz", ge=1)
    messages_key: str | None = key(None, "column of chat messages; null: looked for")
    prompt_key: str | None = key(None, "column of the prompt, where there are no messages; null: looked for")
    response_key: str | None = key(None, "column of the response")
    prompt_dict_keys: Texts | None = key(None, "the way into a prompt column of mappings")
    response_dict_keys: Texts | None = key(None, "the way into a response column of mappings")
    prompt_format: Literal["auto", "chat", "text"] = key("auto", "prompts are chat messages or plain text; auto: look")
    max_length: int = key(1024, "longest row in tokens, prompt and response together", ge=2)
    truncation: Literal["error", "left", "right"] = key("error", "what happens to a row that is too long")
    shuffle: bool = key(True, "shuffle the training rows in every epoch")
    seed: int = key(1, "seed of that order", follows="${trainer.seed}", ge=0)
    custom_cls: CustomClassConfig = part(CustomClassConfig, "dataset class instead of SFTDataset")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "arguments of the chat template")


class SFTOptimConfig(OptimConfig):
    """`optim`."""

    lr: float = key(1e-5, "peak learning rate", ge=0)


class SFTEngineConfig(EngineConfig):
    """`engine`: precision, sharding, offloading."""

    strategy: Strategy = key("fsdp", "training engine")


class SFTCheckpointConfig(CheckpointConfig):
    """`checkpoint`."""

    load_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        ["model", "optimizer", "extra"], "parts to restore", follows="${checkpoint.save_contents}"
    )


class SFTTrainerConfig(RunConfig):
    """`trainer`: the run."""

    total_epochs: int = key(4, "passes over the training rows", ge=1)
    project_name: str = key("gsm8k-sft", "name of the project for trackers and folders")
    experiment_name: str = key("test", "name of the run")
    default_local_dir: FilePath = key(
        "checkpoints/gsm8k-sft/test",
        "folder of checkpoints and logs",
        follows="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    )
    seed: int = key(1, "seed of everything random", ge=0)
    max_ckpt_to_keep: int | None = key(None, "keep the newest so many checkpoints; null: all", ge=1)


class SFTConfig(Tree):
    """The root."""

    dialect: ClassVar = SFT
    known: ClassVar = SFT_KNOWN

    data: SFTDataConfig = part(SFTDataConfig, "rows")
    model: ModelConfig = part(ModelConfig, "the model")
    optim: SFTOptimConfig = part(SFTOptimConfig, "optimizer")
    engine: SFTEngineConfig = part(SFTEngineConfig, "precision, sharding, offloading")
    checkpoint: SFTCheckpointConfig = part(SFTCheckpointConfig, "what a checkpoint holds")
    trainer: SFTTrainerConfig = part(SFTTrainerConfig, "the run")
    imports: Texts = key([], "Python files or modules that every process imports first: one's own code")
