"""The configurations of generation (`GenerationConfig`) and of evaluation (`EvalConfig`) without training."""

from typing import ClassVar, Literal

from verl.config.dialects import OFFLINE
from verl.config.known_keys import EVAL_KNOWN, GENERATION_KNOWN
from verl.config.node import FilePath, FilePaths, Node, Texts, Tree, key, part
from verl.config.tree_model import ModelConfig
from verl.config.tree_rollout import SamplingConfig


class GenerationDataConfig(Node):
    """`data`: the questions and where the answers go."""

    path: FilePaths = key([], "files with the prompts: .parquet, .json, .jsonl")
    prompt_key: str = key("prompt", "column of the prompt: chat messages or text")
    prompt_format: Literal["auto", "chat", "text"] = key("auto", "prompts are chat messages or plain text; auto: look")
    n_samples: int = key(1, "answers per prompt", ge=1)
    batch_size: int = key(128, "prompts that are answered and written together", ge=1)
    max_samples: int = key(-1, "use this many rows; -1: all", ge=-1)
    output_path: FilePath | None = key(None, "file of the answers: .parquet or .jsonl")


class GenerationRolloutConfig(SamplingConfig):
    """`rollout`: sampling."""

    seed: int = key(42, "seed of sampling", follows="${trainer.seed}", ge=0)


class OfflineTrainerConfig(Node):
    """`trainer`: who executes."""

    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: a GPU where there is one")
    backend: Literal["local", "ray"] = key("local", "who executes: this host, or a Ray cluster")
    nnodes: int = key(1, "number of hosts", ge=1)
    n_gpus_per_node: int = key(1, "processes per host, one for each GPU (or CPU rank)", ge=1)
    seed: int = key(42, "seed of everything random", ge=0)


class GenerationConfig(Tree):
    """The root of `main_generation`."""

    dialect: ClassVar = OFFLINE
    known: ClassVar = GENERATION_KNOWN

    data: GenerationDataConfig = part(GenerationDataConfig, "questions and answers")
    model: ModelConfig = part(ModelConfig, "the model")
    rollout: GenerationRolloutConfig = part(GenerationRolloutConfig, "sampling")
    trainer: OfflineTrainerConfig = part(OfflineTrainerConfig, "who executes")
    imports: Texts = key([], "Python files or modules that every process imports first: one's own code")


class EvalDataConfig(Node):
    """`data`: answers to be scored."""

    path: FilePaths = key([], "files with the answers: .parquet, .json, .jsonl")
    prompt_key: str = key("prompt", "column of the prompt")
    response_key: str = key("responses", "column of the answers, one list per row")
    data_source_key: str = key("data_source", "column that chooses the reward function")
    reward_model_key: str = key("reward_model", "column with the ground truth")


class EvalRewardConfig(Node):
    """`custom_reward_function`: what scores an answer."""

    path: FilePath | None = key(None, "Python file or module with the reward function; null: data_source chooses")
    name: str = key("compute_score", "name of the function in it")


class EvalConfig(Tree):
    """The root of `main_eval`."""

    known: ClassVar = EVAL_KNOWN

    data: EvalDataConfig = part(EvalDataConfig, "answers")
    custom_reward_function: EvalRewardConfig = part(EvalRewardConfig, "what scores an answer")
    imports: Texts = key([], "Python files or modules that are imported first: one's own code")
