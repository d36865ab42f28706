"""The configurations of generation (`GenerationConfig`) and of evaluation (`EvalConfig`) without training."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from verl.config.aliases import EVAL, OFFLINE
from verl.config.fields import FilePath, FilePaths, Node, Texts, Tree, key, part
from verl.config.known_keys import EVAL_KNOWN, GENERATION_KNOWN
from verl.config.schema.data import CustomRewardFunctionConfig
from verl.config.schema.model import ModelConfig, Precision
from verl.config.schema.rollout import SamplingConfig


class GenerationDataConfig(Node):
    """`data`: the questions and where the answers go."""

    path: FilePaths = key([], "files with the prompts: .parquet, .json, .jsonl")
    prompt_key: str = key("prompt", "column of the prompt: chat messages or text")
    prompt_format: Literal["auto", "chat", "text"] = key("auto", "prompts are chat messages or plain text; auto: look")
    n_samples: int = key(1, "answers per prompt", ge=1)
    batch_size: int = key(128, "prompts that are answered and written together", ge=1)
    max_samples: int = key(-1, "use this many rows; -1: all", ge=-1)
    output_path: FilePath | None = key(None, "file of the answers: .parquet or .jsonl")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "arguments of the chat template, such as enable_thinking")


class GenerationRolloutConfig(SamplingConfig):
    """`rollout`: sampling."""

    seed: int = key(42, "seed of sampling", follows="${trainer.seed}", ge=0)
    dtype: Precision = key("auto", "dtype of the model; auto: fp32 on a CPU, bf16 on a GPU")


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
    compare_path: FilePaths = key([], "answers of another model to the same prompts, to compare with")


class EvalRewardConfig(Node):
    """`reward`: what scores an answer, what that may cost, and what becomes of one that cannot be scored."""

    custom_reward_function: CustomRewardFunctionConfig = part(CustomRewardFunctionConfig, "a function by address")
    timeout: float | None = key(300.0, "seconds for one answer; null: no limit", gt=0)
    on_error: Literal["raise", "count"] = key("raise", "an answer that cannot be scored: stop, or count it as wrong")
    num_processes: int | None = key(None, "processes that score; null: as many as cores, at most 16", ge=1)


class EvaluationConfig(Node):
    """`evaluation`: the figures."""

    k: list[Annotated[int, Field(ge=1)]] = key([], "the k of pass@k; empty: 1, 2, 4 ... answers per prompt")
    right_from: float = key(1.0, "an answer is right when its `acc`, else its score, is at least this")
    confidence: float = key(0.95, "share of bootstrap samples that an interval holds", gt=0, lt=1)
    bootstrap_samples: int = key(10_000, "data sets drawn for the intervals and p-values", ge=100)
    seed: int = key(42, "seed of the bootstrap", ge=0)
    output_path: FilePath | None = key(None, "JSON file of all figures; null: beside data.path, .eval.json at its end")


class EvalConfig(Tree):
    """The root of `main_eval`."""

    dialect: ClassVar = EVAL
    known: ClassVar = EVAL_KNOWN

    data: EvalDataConfig = part(EvalDataConfig, "answers")
    reward: EvalRewardConfig = part(EvalRewardConfig, "what scores an answer, and its limits")
    evaluation: EvaluationConfig = part(EvaluationConfig, "the figures")
    imports: Texts = key([], "Python files or modules that are imported first: one's own code")
