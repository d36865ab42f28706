"""The configurations of generation (`GenerationConfig`) and evaluation (`EvalConfig`) without training."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from verl.config.fields import FilePath, FilePaths, Precision, Schema, Section, StrList, field, section
from verl.config.public.aliases import EVAL, OFFLINE
from verl.config.schema.data import MediaSection, PromptFormat
from verl.config.schema.model import ModelConfig
from verl.config.schema.reward import REWARD_FUNCTION, CustomRewardFunctionConfig
from verl.config.schema.rollout import AgentRolloutConfig


class GenerationDataConfig(MediaSection):
    """`data`: the prompts, and the file for the responses."""

    path: FilePaths = field([], "prompts: .parquet, .jsonl, .json, .csv, or hub names")
    prompt_key: str = field("prompt", "column of the prompt: chat messages or text")
    prompt_format: PromptFormat = field("auto", "chat messages or plain text; auto: detect")
    n_samples: int = field(1, "responses per prompt", ge=1)
    batch_size: int = field(128, "prompts that are generated and written together", ge=1)
    max_samples: int = field(-1, "number of rows to use; -1: all", ge=-1)
    output_path: FilePath | None = field(None, "file for the responses: .parquet or .jsonl")
    apply_chat_template_kwargs: dict[str, Any] = field({}, "arguments of the chat template, such as enable_thinking")


class GenerationRolloutConfig(AgentRolloutConfig):
    """`rollout`: generation."""

    seed: int = field(42, "sampling seed", default_from="${trainer.seed}", ge=0, le=2**62)
    dtype: Precision = field("auto", "dtype of the model; auto: fp32 on a CPU, bf16 on a GPU")


class OfflineTrainerConfig(Section):
    """`trainer`: the executor."""

    device: Literal["auto", "cpu", "cuda"] = field("auto", "auto: a GPU if there is one")
    backend: Literal["local", "ray"] = field("local", "executor: processes of this host, or a Ray cluster")
    nnodes: int = field(1, "number of hosts", ge=1)
    n_gpus_per_node: int = field(1, "processes per host, one per GPU (or CPU rank)", ge=1)
    seed: int = field(42, "seed of all random number generators", ge=0, le=2**62)


class GenerationConfig(Schema):
    """The root of the configuration of `main_generation`."""

    aliases: ClassVar = OFFLINE
    upstream: ClassVar = "generation"

    data: GenerationDataConfig = section(GenerationDataConfig, "prompts and responses")
    model: ModelConfig = section(ModelConfig, "the model")
    rollout: GenerationRolloutConfig = section(GenerationRolloutConfig, "generation")
    trainer: OfflineTrainerConfig = section(OfflineTrainerConfig, "the executor")
    imports: StrList = field([], "Python files or modules that every process imports first (custom code)")

    @classmethod
    def derive(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """rollout.multi_turn.enable and mode=server select the agent loops tool_agent and server_agent."""
        loops = {"rollout.multi_turn.enable": ("true", "tool_agent"), "rollout.mode": ("server", "server_agent")}
        for key, (value, loop) in loops.items():
            if str(settings.get(key)).lower() == value:
                return {"rollout.agent.default_agent_loop": loop} | settings
        return settings


class EvalDataConfig(Section):
    """`data`: responses to score."""

    path: FilePaths = field([], "files of the responses: .parquet, .jsonl, .json, .csv")
    prompt_key: str = field("prompt", "column of the prompt")
    response_key: str = field("responses", "column of the responses, one list per row")
    data_source_key: str = field("data_source", "column that selects the reward function")
    reward_model_key: str = field("reward_model", "column of the ground truth, as {'ground_truth': ...}")
    ground_truth_key: str = field("answer", "column of the ground truth; if set, reward_model is not read")
    compare_path: FilePaths = field([], "responses of another model to the same prompts, for comparison")


class EvalRewardConfig(Section):
    """`reward`: how a response is scored, the limits, and what happens if it cannot be scored."""

    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig, "custom reward function")
    reward_function: str | None = field(None, REWARD_FUNCTION)
    timeout: float | None = field(300.0, "seconds to score one response; null: no limit", gt=0)
    on_error: Literal["raise", "count"] = field(
        "raise", "when a response cannot be scored: stop, or count it as incorrect"
    )
    num_processes: int | None = field(None, "scoring processes; null: one per core, at most 16", ge=1)


class EvaluationConfig(Section):
    """`evaluation`: the metrics."""

    k: list[Annotated[int, Field(ge=1)]] = field([], "values of k for pass@k; empty: 1, 2, 4 ... responses per prompt")
    right_from: float = field(1.0, "a response is correct if its `acc`, otherwise its score, is at least this")
    confidence: float = field(0.95, "confidence level of the intervals", gt=0, lt=1)
    bootstrap_samples: int = field(10_000, "bootstrap resamples for intervals and p-values", ge=100)
    seed: int = field(42, "bootstrap seed", ge=0, le=2**62)
    output_path: FilePath | None = field(None, "JSON file of all metrics; null: data.path with the suffix .eval.json")


class EvalConfig(Schema):
    """The root of the configuration of `main_eval`."""

    aliases: ClassVar = EVAL
    upstream: ClassVar = "evaluation"

    data: EvalDataConfig = section(EvalDataConfig, "responses")
    reward: EvalRewardConfig = section(EvalRewardConfig, "how a response is scored")
    evaluation: EvaluationConfig = section(EvaluationConfig, "the metrics")
    imports: StrList = field([], "Python files or modules to import first (custom code)")
