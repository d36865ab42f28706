"""The `rollout` section: how responses are sampled, and the engine that generates them.

A sampling key is declared in `SamplingConfig`, which makes it a field of `verl.rollout.request.SamplingParams`, and is
applied in `verl.rollout.sampling` by the engines `native` and `hf`.
"""

from typing import Any, Literal

import pydantic

from verl.config.fields import ALWAYS, FilePath, Precision, Section, StrList, field, is_positive, other_than, section
from verl.rollout.traits import built_in_engines, engine_with

_ACTOR = "${actor_rollout_ref.actor."
_SAMPLES = ("temperature", other_than(0))
_DRAFTS = ("method", other_than(None))
_SCHEDULES = ("name", engine_with("own_scheduler"))
_TURNS = ("agent.default_agent_loop", other_than("single_turn_agent"), ", except for rows with the column agent_name")

#: except for 0; logits divided by a lower temperature may exceed float32
LOWEST_TEMPERATURE = 1e-5


class SamplingConfig(Section):
    """How a response is sampled. Engines receive these fields by name (`SamplingParams`)."""

    temperature: float = field(1.0, "sampling temperature", ge=0)
    top_k: int = field(-1, "sample from the k most likely tokens; -1: all", active_when=_SAMPLES, ge=-1)
    top_p: float = field(
        1.0, "nucleus sampling: cumulative probability of the tokens to sample from", active_when=_SAMPLES, gt=0, le=1
    )
    min_p: float = field(
        0.0, "minimum probability of a token, relative to the most likely one", active_when=_SAMPLES, ge=0, le=1
    )
    response_length: int = field(512, "maximum response length in tokens", ge=1)
    stop: StrList = field([], "stop strings; the token that completes one ends the response")
    ignore_eos: bool = field(False, "continue generating after the end-of-sequence token")

    @classmethod
    def filters(cls) -> dict[str, Any]:
        """The keys that change the distribution of the tokens, apart from the temperature, with the values "off"."""
        others = ("temperature", "response_length", "stop", "ignore_eos")
        return {name: f.default for name, f in SamplingConfig.model_fields.items() if name not in others}

    def active_filters(self) -> str:
        """The filters that are on, as in "rollout.top_p=0.9"; empty if there are none, and for greedy decoding."""
        active = {name: getattr(self, name) for name, off in self.filters().items() if getattr(self, name) != off}
        return ", ".join(f"rollout.{name}={value}" for name, value in active.items()) if self.temperature else ""


def _arguments_of(name: str, title: str) -> Any:
    """A field of `engine_kwargs`, which has an effect with the engine of that name, or a custom one."""
    selected = ("name", lambda engine: engine == name or engine not in built_in_engines())
    return dict[str, Any], field({}, f"arguments of {title}", active_when=selected)


_EXTERNAL = {traits.name: traits.package.title for traits in built_in_engines().values() if traits.is_external}

EngineKwargs = pydantic.create_model(
    "EngineKwargs",
    __base__=Section,
    __doc__="Arguments that are passed to an engine unchanged.",
    **{name: _arguments_of(name, title) for name, title in (_EXTERNAL | {"trtllm": "TensorRT-LLM"}).items()},
)


class SpeculativeConfig(Section):
    """`actor_rollout_ref.rollout.speculative`: decoding steps that verify drafts of the next tokens."""

    method: Literal["ngram"] | None = field(
        None,
        "ngram: drafts are the tokens that followed the last ones earlier in the sequence (prompt lookup), with "
        "name=native; null: no drafts",
        active_when=ALWAYS,
    )
    num_speculative_tokens: int = field(4, "drafts per step", active_when=_DRAFTS, ge=1, le=32)
    prompt_lookup_max: int = field(4, "maximum length of the n-gram that is searched", active_when=_DRAFTS, ge=1, le=32)
    prompt_lookup_min: int = field(2, "minimum length of the n-gram that is searched", active_when=_DRAFTS, ge=1, le=32)

    @pydantic.model_validator(mode="after")
    def _check_lengths(self) -> "SpeculativeConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min}: expected at most prompt_lookup_max="
                f"{self.prompt_lookup_max}"
            )
        return self


class RolloutEngineConfig(SamplingConfig):
    """A rollout engine: which one, how it samples, and how much memory it may use."""

    name: str = field(
        "native",
        "registered name of the rollout engine; native: built in, uses the training weights; vllm; sglang; hf: "
        "generate() of transformers; or a custom one",
    )
    prompt_length: int = field(512, "maximum prompt length in tokens", ge=1)
    dtype: Precision = field(
        "auto",
        "dtype of the engine's weights; auto: dtype of the training computation",
        active_when=("name", engine_with("own_dtype")),
    )
    tensor_model_parallel_size: int = field(1, "tensor-parallel size of the engine", ge=1)
    gpu_memory_utilization: float = field(
        0.5, "fraction of the GPU memory for the engine", active_when=("name", engine_with("sleeps")), gt=0, le=1
    )
    enforce_eager: bool = field(False, "do not use CUDA graphs", active_when=("name", engine_with("cuda_graphs")))
    free_cache_engine: bool = field(
        True, "free the KV cache during the update", active_when=("name", engine_with("sleeps"))
    )
    max_num_seqs: int = field(1024, "maximum number of sequences generated concurrently", ge=1)
    max_num_batched_tokens: int = field(
        8192, "maximum number of tokens per forward pass of the engine", active_when=_SCHEDULES, ge=1
    )
    max_model_len: int | None = field(
        None, "maximum length of prompt and response; null: what the lengths need", active_when=_SCHEDULES, ge=1
    )
    enable_chunked_prefill: bool = field(True, "prefill long prompts in chunks", active_when=_SCHEDULES)
    enable_prefix_caching: bool = field(True, "reuse the KV cache of shared prefixes", active_when=_SCHEDULES)
    speculative: SpeculativeConfig = section(SpeculativeConfig, "speculative decoding")
    engine_kwargs: EngineKwargs = section(EngineKwargs, "arguments passed to the engine")


class ValSamplingConfig(Section):
    """`actor_rollout_ref.rollout.val_kwargs`: sampling at validation."""

    do_sample: bool = field(False, "sample; false: greedy decoding")
    temperature: float = field(0.0, "sampling temperature", ge=0)
    top_k: int = field(-1, "sample from the k most likely tokens; -1: all", active_when=("do_sample", True), ge=-1)
    top_p: float = field(
        1.0,
        "nucleus sampling: cumulative probability of the tokens to sample from",
        active_when=("do_sample", True),
        gt=0,
        le=1,
    )
    n: int = field(1, "responses per prompt", ge=1)


class CheckpointEngineConfig(Section):
    """`actor_rollout_ref.rollout.checkpoint_engine`: buckets of the weight sync."""

    update_weights_bucket_megabytes: int = field(
        512, "size of a bucket in MiB; sender and receiver have two buckets each in memory", ge=1
    )


class AgentConfig(Section):
    """`actor_rollout_ref.rollout.agent`: how a prompt becomes a trajectory."""

    default_agent_loop: str = field(
        "single_turn_agent",
        "registered name of the agent loop of samples without a column agent_name; single_turn_agent: one response per "
        "prompt; tool_agent: tools and interactions, the default with multi_turn.enable",
    )
    agent_loop_config_path: FilePath | None = field(None, "YAML list of custom loops, each with name and _target_")


class MultiTurnConfig(Section):
    """`actor_rollout_ref.rollout.multi_turn`: tool calls and interactions of the agent loop tool_agent."""

    enable: bool = field(False, "use the agent loop tool_agent", active_when=ALWAYS)
    max_assistant_turns: int | None = field(None, "maximum number of turns of the policy; null: no limit", ge=1)
    max_user_turns: int | None = field(None, "maximum number of turns of tools and users; null: no limit", ge=0)
    tool_config_path: FilePath | None = field(
        None, "YAML file with tools, a list of class_name, config, tool_schema", active_when=ALWAYS
    )
    function_tool_path: FilePath | None = field(
        None, "Python file with functions decorated with @function_tool", active_when=ALWAYS
    )
    interaction_config_path: FilePath | None = field(None, "YAML file with interactions, a list of name, class_name")
    format: str = field("hermes", "registered name of the parser of tool calls: hermes, qwen, llama")
    max_parallel_calls: int = field(1, "maximum number of tool calls per turn; further calls get an error", ge=1)
    max_tool_response_length: int = field(256, "longer responses of a tool are truncated, in characters", ge=1)
    tool_response_truncate_side: Literal["left", "middle", "right"] = field(
        "middle", "what is removed of a long response: left keeps its end, right its start, middle both ends"
    )
    tool_timeout: float | None = field(60.0, "time limit of a call of a tool or interaction, in seconds", gt=0)
    tool_isolation: Literal["process", "none"] = field(
        "process", "process: tools run in worker processes; none: in the process of the rollout, where breakpoints work"
    )
    tool_processes: int = field(
        2, "number of worker processes for tools, per rollout process", active_when=("tool_isolation", "process"), ge=1
    )
    apply_chat_template_kwargs: dict[str, Any] = field(
        {},
        "arguments of the chat template between turns",
        default_from="${data.apply_chat_template_kwargs}",
        active_when=ALWAYS,
    )


class ServerAgentConfig(Section):
    """`actor_rollout_ref.rollout.server.agent`: the agent that is trained."""

    path: FilePath | None = field(None, "Python file or module of the agent function")
    name: str = field("run", "name of the function; it takes sample, base_url, api_key, model and returns the score")


class ServerConfig(Section):
    """`actor_rollout_ref.rollout.server`: agents that call the policy over HTTP, with mode=server."""

    agent: ServerAgentConfig = section(ServerAgentConfig, "the agent")
    model_name: str = field("policy", "name of the model that the agent receives; it may use any")
    timeout: float = field(600.0, "time limit of an agent per sample, in seconds", gt=0)
    max_concurrency: int = field(256, "maximum number of agents that run concurrently, per rollout process", ge=1)
    on_new_conversation: Literal["error", "last", "longest"] = field(
        "error",
        "a call that does not extend the conversation of its sample; error: rejected with status 409; last, longest: "
        "starts a new trajectory, and the last one or the one with most sampled tokens is trained",
    )
    failure_score: float = field(0.0, "score of a sample whose agent fails or exceeds its time limit")


class AgentRolloutConfig(RolloutEngineConfig):
    """A rollout engine, and the agent loop that calls it."""

    agent: AgentConfig = section(AgentConfig, "agent loop")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "tools and interactions", active_when=_TURNS)
    mode: Literal["async", "sync", "server"] = field(
        "async",
        "async, sync: the rollout process generates the responses (there is no difference); server: an agent calls the "
        "policy over HTTP",
    )
    server: ServerConfig = section(
        ServerConfig, "agents that call the policy over HTTP", active_when=("mode", "server")
    )


class RolloutConfig(AgentRolloutConfig):
    """`actor_rollout_ref.rollout`: generation of the responses that the policy is trained on."""

    n: int = field(1, "responses per prompt (group size)", ge=1)
    truncated_log_probs: bool = field(
        True,
        "with top_k, top_p or min_p, training computes log-probs over the tokens that they keep, as sampling does; "
        "false: over all tokens",
    )
    nnodes: int = field(
        0, "hosts of a rollout with separate devices, in addition to trainer.nnodes; 0: see `placement`", ge=0
    )
    n_gpus_per_node: int | None = field(
        None, "its processes per host; null: trainer.n_gpus_per_node", active_when=("nnodes", is_positive), ge=1
    )
    seed: int = field(42, "sampling seed", default_from="${trainer.seed}", ge=0, le=2**62)
    enable_rollout_routing_replay: bool = field(
        False, "record the experts that a mixture of experts chooses, for actor.router_replay.mode=R3"
    )
    deterministic: bool = field(
        False, "batch-invariant kernels: rollout log-probs bit-identical to those of training, but slower"
    )
    prompt_length: int = field(512, "maximum prompt length in tokens", default_from="${data.max_prompt_length}", ge=1)
    response_length: int = field(
        512, "maximum response length in tokens", default_from="${data.max_response_length}", ge=1
    )
    log_prob_micro_batch_size_per_gpu: int | None = field(
        None,
        "sequences per forward pass when log-probs are computed",
        default_from=_ACTOR + "ppo_micro_batch_size_per_gpu}",
        active_when=("log_prob_use_dynamic_bsz", False),
        ge=1,
    )
    log_prob_use_dynamic_bsz: bool = field(
        False, "size micro-batches by tokens instead of sequences", default_from=_ACTOR + "use_dynamic_bsz}"
    )
    log_prob_max_token_len_per_gpu: int | None = field(
        None,
        "tokens per micro-batch of one rank",
        default_from=_ACTOR + "ppo_max_token_len_per_gpu}",
        active_when=(("log_prob_micro_batch_size_per_gpu", None), ("log_prob_use_dynamic_bsz", True)),
        ge=1,
    )
    weight_sync: Literal["auto", "in_process", "replica", "reshard", "collective"] = field(
        "auto", "how weights reach the rollout engine; auto: chosen by placement and engine"
    )
    check_every: int = field(
        10,
        "steps between two checks of the rollout's weights, which stop a run with old or wrong ones: the parameters "
        "that the engine stores, and its log-probs of a canary prompt; also after the first push; 0: off",
        ge=0,
    )
    max_mismatch: float | None = field(
        None,
        "largest rollout/logprob_gap_mean in nats: above it, the first step stops the run and later ones warn; null: "
        "by dtype, experts and temperature (docs/rollout.md); 0: no limit",
        ge=0,
    )
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig, "buckets of the weight sync")
    val_kwargs: ValSamplingConfig = section(ValSamplingConfig, "sampling at validation")

    @property
    def filters_log_probs(self) -> bool:
        """Whether training computes log-probs over the tokens that top_k, top_p and min_p keep."""
        return self.truncated_log_probs and bool(self.active_filters())
