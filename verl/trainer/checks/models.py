"""Checks of the models of a run before they are built, of their limits, and of the devices that compute them."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config import schema
from verl.config.checks.run import ModelRole, model_roles
from verl.config.fields import Schema
from verl.config.inputs import check_model_path
from verl.data.tokenization import load_tokenizer
from verl.engines import loading
from verl.engines.base import check_device
from verl.engines.loading import check_kernels
from verl.engines.quantization import check_quantization
from verl.engines.traits import strategy_traits
from verl.modeling.huggingface import experts_of, model_source, read_config
from verl.registry import load_object
from verl.rollout.checks import check_images
from verl.rollout.traits import engine_traits
from verl.trainer.checks.preflight import Run
from verl.trainer.startup.roles import pools_of, roles_of
from verl.utils.device import resolve_device

logger = logging.getLogger("verl.trainer")

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "num_key_value_heads", "head_dim")


def check_models(run: Run) -> None:
    """The config of each model exists and accepts the overrides; LoRA finds its modules."""
    config = run.config
    if not isinstance(config, schema.Config):
        is_reward_model = isinstance(config, schema.RMConfig)
        check_model(config.model, "reward" if is_reward_model else "causal_lm", new_head=is_reward_model)
        if isinstance(config, schema.SFTConfig):
            ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
            check_quantization(config.model, ranks)
            check_megatron(model_roles(config), {"actor": ("", ranks)})
            check_layers(config.model, "causal_lm", config.engine.selected, deterministic=False, replays=False)
        return
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward.reward_model
    check_model(policy.model, "causal_lm")
    check_moe(config)
    deterministic, replays = policy.rollout.deterministic, _replays_routing(policy)
    placed = pools_of(config, roles_of(config)).values()
    pools = {role: (pool.name, pool.world_size) for roles in placed for role, pool in roles}
    check_megatron(model_roles(config), pools)
    check_quantization(policy.model, pools["actor"][1])
    if "critic" in pools:
        check_model(critic.model, "value")
        check_quantization(critic.model, pools["critic"][1])
    for role in model_roles(config):
        if role.name in pools:
            is_critic = role.name == "critic"
            kind = "value" if is_critic else "causal_lm"
            check_layers(
                role.model, kind, role.engine, deterministic and not is_critic, replays and role.name == "actor"
            )
    for teacher in config.distillation.local_teachers.values():
        check_model(teacher.model, "causal_lm")
    if reward.enable:
        section = schema.ModelConfig(path=reward.model_path, trust_remote_code=reward.trust_remote_code)
        check_model(section, "reward")


def check_devices(run: Run) -> None:
    """The training engines and the chosen kernels run on the device."""
    config = run.config
    if run.backend == "ray":  # the nodes may differ from this host: the workers check
        return
    device = resolve_device(config.trainer.device)
    names = ["actor"] if isinstance(config, schema.SFTConfig) else roles_of(config)
    for role in model_roles(config):
        if role.name in names:
            check_device(role.strategy, device)
            check_kernels(role.model, device)


def warn_of_narrow_weights(config: Schema) -> None:
    """Warn of trained weights in 16 bits, which small updates do not change."""
    names = ["actor"] if isinstance(config, schema.SFTConfig) else ["actor", *(set(roles_of(config)) & {"critic"})]
    for role in model_roles(config):
        if role.name not in names or role.model.has_adapters:
            continue
        key, engine = role.engine_key, role.engine
        dtype = engine.get("model_dtype")
        is_bf16, is_fp16 = dtype in ("bf16", "bfloat16"), dtype in ("fp16", "float16")
        if is_fp16 or (is_bf16 and not engine.stochastic_rounding):
            logger.warning(
                "%s.model_dtype=%s: an update of less than %g %% of a weight is lost to rounding, so that with a small "
                "learning rate nearly no weight changes: use auto (float32 weights; the computation stays in dtype)%s",
                *(key, dtype, 0.2 if is_bf16 else 0.02),
                f" or {key}.stochastic_rounding=true (the same memory)" if is_bf16 else "",
            )


# ---- one model ------------------------------------------------------------------------------------------------------


def check_model(model: schema.ModelConfig, kind: str, new_head: bool = False) -> None:
    """The config of a model can be read, accepts its overrides, and fits its use (`verl.engines.loading.check_model`).
    Otherwise ValueError."""
    readable_config(model.path, model.override_config, model.trust_remote_code)
    loading.check_model(model, kind, new_head)


def check_layers(model: schema.ModelConfig, kind: str, engine: object, deterministic: bool, replays: bool) -> None:
    """`verl.engines.loading.check_layers`, for strategies that build the layers of transformers."""
    if isinstance(engine, schema.EngineConfig):
        loading.check_layers(model, kind, engine, deterministic, replays)


def readable_config(path: str, overrides: Mapping[str, Any], trust_remote_code: bool = False) -> Any:
    """`read_config`, with a ValueError also for sizes that no model has, and for what else transformers refuses."""
    for problem in check_model_path("model", path):
        raise ValueError(problem.message)
    try:
        config = read_config(path, overrides, trust_remote_code)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # strict dataclasses raise a separate error type, checks of single models any
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{path!r}: transformers refuses its config.json ({reason}): expected that of a model"
        ) from error
    _check_sizes(path, config.get_text_config())
    return config


def _check_sizes(path: str, config: Any) -> None:
    fields, aliases = config.to_dict(), config.attribute_map  # reading a field that differs by layer is an error
    sizes = {name: size for name in _SIZES if isinstance(size := fields.get(aliases.get(name, name)), int)}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"the config of {path!r} has {name}={size}: expected int >= 1")
    heads, key_heads = (sizes.get(name, 1) for name in ("num_attention_heads", "num_key_value_heads"))
    if "num_attention_heads" in sizes and heads % key_heads:
        raise ValueError(
            f"the config of {path!r} has num_attention_heads={heads} and num_key_value_heads={key_heads}: expected a "
            "multiple"
        )


# ---- limits of a model -----------------------------------------------------------------------------------------------

#: fraction of differing tokens above which two vocabularies belong to different tokenizers
_DIFFERENT_SHARE = 0.01


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a model, read from its config without loading weights."""

    path: str
    vocab_size: int  # token ids are 0 to vocab_size - 1
    positions: int | None  # tokens in a sequence; None if the config sets no limit
    architectures: tuple[str, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)  # the config of the language model by key
    hf_config: Any = None  # that of the whole model

    @classmethod
    def from_config(cls, model: schema.ModelConfig) -> "ModelLimits":
        """The limits of the model that a `model` section names."""
        from transformers import AutoConfig

        source = model_source(model.path)
        whole = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
        hf = whole.get_text_config()
        sizes = {**hf.to_dict(), **model.override_config}
        positions = sizes.get("max_position_embeddings")
        return cls(model.path, hf.vocab_size, positions, tuple(whole.architectures or ()), sizes, whole)

    def check_vocabulary(self, tokenizer: Any, largest_id: int) -> None:
        """Raise ValueError if token ids exceed the vocabulary. largest_id: the largest id of the dataset."""
        largest = max(largest_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
        if largest >= self.vocab_size:
            raise ValueError(
                f"the tokenizer produces token id {largest}, but the model {self.path!r} has ids 0 to "
                f"{self.vocab_size - 1}: use the tokenizer of this model (model.tokenizer_path)"
            )

    def check_response_length(self, longest_prompt: int, response_length: int, key: str, instead: str) -> None:
        """Raise ValueError if the longest prompt plus a response exceeds the positions of the model.

        Args:
            key: sets response_length, in tokens.
            instead: the fix if shorter responses do not help.
        """
        if self.positions is not None and longest_prompt + response_length > self.positions:
            left = self.positions - longest_prompt
            raise ValueError(
                f"the longest prompt has {longest_prompt} tokens and a response may have {key}={response_length}, but "
                f"the model {self.path!r} has {self.positions} positions (max_position_embeddings): "
                f"{f'set {key}={left}, or ' if left > 0 else ''}{instead}"
            )

    def check_sequence_length(self, longest: int, key: str) -> None:
        """Raise ValueError if a sequence of `longest` tokens has more tokens than the model has positions."""
        if self.positions is not None and longest > self.positions:
            raise ValueError(
                f"the longest sequence has {longest} tokens, but the model {self.path!r} has {self.positions} "
                f"positions (max_position_embeddings): set {key}={self.positions}"
            )

    def check_engine(self, rollout: schema.RolloutEngineConfig) -> None:
        """Raise ValueError if the rollout engine does not support the architecture, or cannot split it over ranks."""
        traits = engine_traits(rollout.name)
        if self.hf_config is not None:
            check_images(traits, self.hf_config)
        if traits.check_model:
            check_model = load_object(*traits.check_model.split(":"))
            deterministic = isinstance(rollout, schema.RolloutConfig) and rollout.deterministic
            check_model(self.architectures, self.sizes, rollout.tensor_model_parallel_size, deterministic)


def check_reads_tokens_of(policy: str, tokenizer: Any, model: schema.ModelConfig, role: str, largest_id: int) -> None:
    """Raise ValueError if a model that reads the token ids of the policy has another tokenizer or too few embeddings.

    Args:
        policy: path of the policy's model, which has the tokenizer.
        model: the model that reads the sequences of the policy, as `role`.
        largest_id: the largest token id of the dataset.
    """
    if model.path == policy:
        return
    advice = f"the {role} reads the token ids of the policy, so use a {role} with the tokenizer of {policy!r}"
    try:
        ModelLimits.from_config(model).check_vocabulary(tokenizer, largest_id)
    except ValueError as error:
        raise ValueError(f"{role} {model.path!r}: {error}; {advice}") from error
    folder = Path(model_source(model.path))
    if folder.is_dir() and not [*folder.glob("*token*"), *folder.glob("vocab*")]:
        logger.warning("%s %r has no tokenizer to compare with that of the policy: %s", role, model.path, advice)
        return
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    theirs = load_tokenizer(model.model_copy(update={"tokenizer_path": None})).get_vocab()
    different = [(token, index) for token, index in theirs.items() if ours.get(index, token) != token]
    if not different:
        return
    token, index = min(different, key=lambda item: item[1])
    difference = (
        f"{len(different):,} of {len(ours):,} token ids differ: id {index} is {ours[index]!r} for {policy!r} and "
        f"{token!r} for {model.path!r}"
    )
    if len(different) > _DIFFERENT_SHARE * len(ours):
        raise ValueError(
            f"the {role} has another tokenizer than the policy: {difference}. {advice[0].upper()}{advice[1:]}"
        )
    logger.warning("the tokenizers of policy and %s differ: %s", role, difference)


def _replays_routing(policy: schema.ActorRolloutRefConfig) -> bool:
    return policy.actor.router_replay.mode != "disabled" or policy.rollout.enable_rollout_routing_replay


def check_moe(config: schema.Config) -> None:
    """Expert parallelism and router replay fit the policy. Raises ValueError for a model without experts, or sizes that
    do not divide."""
    policy, devices = config.actor_rollout_ref, config.placement.actor_devices
    actor, replays = policy.actor, _replays_routing(policy)
    is_sharded = strategy_traits(actor.strategy).model_parallel is False
    size = actor.fsdp_config.expert_parallel_size if is_sharded else 1
    if size == 1 and not replays:
        return
    from verl.engines.expert_parallel import check_experts

    hf_config = read_config(policy.model.path, policy.model.override_config, policy.model.trust_remote_code)
    ranks = len(devices) if devices else config.trainer.nnodes * config.trainer.n_gpus_per_node
    check_experts(hf_config, size, ranks)
    if replays and not experts_of(hf_config):
        raise ValueError(
            f"router replay needs a mixture of experts, and {hf_config.model_type} models have no experts: set "
            "actor.router_replay.mode=disabled and rollout.enable_rollout_routing_replay=false"
        )


def check_megatron(roles: Iterable[ModelRole], pools: Mapping[str, tuple[str, int]]) -> None:
    """Models with model-parallel training are supported, and its settings fit them.

    Args:
        pools: role -> the pool of processes that host it, and their number; other roles are not in the run.

    Raises:
        ValueError: another architecture, such as one with images; sizes that do not divide the model or the ranks, or
            differ between the models of a process; or keys of experts for a model without them.
    """
    of_pool: dict[str, tuple[str, dict[str, int]]] = {}
    for role in (role for role in roles if role.name in pools):
        name, model, section, (pool, ranks) = role.engine_key, role.model, role.engine, pools[role.name]
        if not isinstance(section, schema.MegatronConfig):
            continue
        from verl.engines.megatron import checks

        hf_config = read_config(model.path, model.override_config, model.trust_remote_code)
        checks.check_architecture(hf_config, model.path)
        checks.check_sizes(hf_config, section)
        checks.check_keys(hf_config, section, name)
        dense, experts = checks.parallel_sizes(section, ranks)
        first, expected = of_pool.setdefault(pool, (name, dense | experts))
        for key, size in (dense | experts).items():
            if size != expected[key]:
                raise ValueError(
                    f"{name}.{key}={size}, but {first}.{key}={expected[key]}: all models of a process need the same "
                    f"sizes, so remove {name}.{key}, or set placement.{name.split('.')[-2]}_devices"
                )
