"""Checks of the models of a run, before they are built, and of the devices that compute them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config import schema
from verl.engines import loading
from verl.engines.base import check_device
from verl.engines.loading import check_kernels
from verl.engines.quantization import check_quantization
from verl.modeling.huggingface import read_config
from verl.trainer.checks.model_limits import check_megatron, check_moe
from verl.trainer.checks.preflight import Run
from verl.trainer.startup.roles import pools_of, roles_of
from verl.utils.device import resolve_device
from verl.utils.paths import expanded

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "num_key_value_heads", "head_dim")


def check_models(run: Run) -> None:
    """The config of each model exists and accepts the overrides; LoRA finds its modules."""
    config = run.config
    if not isinstance(config, schema.Config):
        check_model(config.model, "causal_lm")
        if isinstance(config, schema.SFTConfig):
            ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
            check_quantization(config.model, ranks)
            check_megatron([("engine.megatron", config.model, config.engine.selected, "", ranks)])
        return
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward.reward_model
    check_model(policy.model, "causal_lm")
    sends_adapters = policy.rollout.lora_sync == "adapters" and policy.model.has_adapters
    if sends_adapters and loading.adapter_config(policy.model) is None:
        raise ValueError(
            "rollout.lora_sync=adapters: adapters of experts, and of layers with transposed weights, are pushed "
            "merged: use merged"
        )
    check_moe(config)
    sections = {
        "actor": ("actor_rollout_ref.actor", policy.model, policy.actor),
        "ref": ("actor_rollout_ref.ref", policy.model, policy.ref),
        "critic": ("critic", critic.model, critic),
    }
    pools = {role: pool for placed in pools_of(config, roles_of(config)).values() for role, pool in placed}
    check_megatron(
        (f"{name}.megatron", model, section.engine, pools[role].name, pools[role].world_size)
        for role, (name, model, section) in sections.items()
        if role in pools
    )
    check_quantization(policy.model, pools["actor"].world_size)
    if "critic" in pools:
        check_model(critic.model, "value")
        check_quantization(critic.model, pools["critic"].world_size)
    if reward.enable:
        section = schema.ModelConfig(path=reward.model_path, trust_remote_code=reward.trust_remote_code)
        check_model(section, "reward")


def check_devices(run: Run) -> None:
    """The training engines and the chosen kernels run on the device."""
    config = run.config
    if run.backend == "ray":  # the nodes may differ from this host: the workers check
        return
    device = resolve_device(config.trainer.device)
    if isinstance(config, schema.SFTConfig):
        check_device(config.engine.strategy, device)
        check_kernels(config.model, device)
        return
    policy, roles = config.actor_rollout_ref, roles_of(config)
    check_device(policy.actor.strategy, device)
    check_kernels(policy.model, device)
    if "ref" in roles:
        check_device(policy.ref.strategy, device)
    if "critic" in roles:
        check_device(config.critic.strategy, device)
        check_kernels(config.critic.model, device)


# ---- one model ------------------------------------------------------------------------------------------------------


def check_model(model: schema.ModelConfig, kind: str) -> None:
    """The config of a model can be read, accepts its overrides, and fits its use (`verl.engines.loading.check_model`).

    Raises:
        ValueError: it does not.
    """
    readable_config(model.path, model.override_config, model.trust_remote_code)
    loading.check_model(model, kind)


def readable_config(path: str, overrides: Mapping[str, Any], trust_remote_code: bool = False) -> Any:
    """`read_config`, with a ValueError also for sizes that no model has, and for what else transformers refuses."""
    if path:
        _check_folder(path)
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


def _check_folder(path: str) -> None:
    folder = expanded(path)  # os.path: methods of Path raise OSError for a name that is too long
    if os.path.isdir(folder) and not os.path.isfile(folder / "config.json"):
        raise ValueError(f"{path!r} has no config.json: expected the folder of a Hugging Face model")
    if (Path(path).is_absolute() or path.startswith((".", "~"))) and not os.path.exists(folder):
        raise ValueError(f"there is no folder {path!r}")
