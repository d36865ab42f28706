"""What of the tree is built: the words, the sizes and the keys that a run may use today.

The tree speaks of the whole project. A word or key that nothing implements yet is refused here, by name, before
anything is loaded. Who builds a part edits this file: adds the word to `BUILT`, or takes the key out of `NOT_BUILT`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from verl.config.errors import ConfigError, Problem, in_words
from verl.config.fields import Leaf, Tree, flatten, leaves
from verl.config.load import differences

BUILT: dict[str, set[Any]] = {
    "rollout.name": {"hf", "native"},
    "strategy": {"fsdp", "fsdp2"},
    "backend": {"local", "ray"},
    "tensor_model_parallel_size": {1},
}
"""End of a dotted key -> the words that work."""

INSTEAD: dict[str, str] = {
    "tensor_model_parallel_size": "one device holds the whole model so far: use 1",
}
"""End of a dotted key -> what to do, where the list of words does not say it."""


NOT_BUILT: dict[str, str] = {
    "actor_rollout_ref.hybrid_engine": "policy and rollout live in one process: use true",
    "data.validation_shuffle": "the order of validation rows changes no result: use false",
    "algorithm.use_pf_ppo": "use false",
    "reward.sandbox_fusion.url": "code is not run by a service: leave it null",
    "trainer.log_val_generations": "use trainer.validation_data_dir, which keeps all of them",
}
"""End of a dotted key -> what to do instead of setting it to anything but its default."""

_OTHER_ENGINES = (
    "max_num_batched_tokens",
    "max_model_len",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "engine_kwargs.vllm",
    "engine_kwargs.sglang",
    "engine_kwargs.trtllm",
)

NO_EFFECT: dict[tuple[str, str], tuple[str, ...]] = {
    ("rollout.name", "native"): _OTHER_ENGINES,
    ("rollout.name", "hf"): (
        "actor_rollout_ref.rollout.dtype",
        "gpu_memory_utilization",
        "enforce_eager",
        "free_cache_engine",
        *_OTHER_ENGINES,
    ),
    ("reward.reward_model.enable", False): (
        "reward.reward_model.model_path",
        "reward.reward_model.tokenizer_path",
        "reward.reward_model.custom_chat_template",
        "reward.reward_model.micro_batch_size_per_gpu",
    ),
    ("trainer.backend", "local"): ("ray_kwargs.ray_init", "ray_kwargs.timeline_json_file"),
    ("algorithm.use_kl_in_reward", False): (
        "algorithm.kl_penalty",
        "algorithm.kl_ctrl.type",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_ctrl.horizon",
        "algorithm.kl_ctrl.target_kl",
    ),
    ("algorithm.kl_ctrl.type", "fixed"): ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
    ("algorithm.filter_groups.enable", False): (
        "algorithm.filter_groups.metric",
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.at_limit",
    ),
    ("algorithm.filter_groups.max_num_gen_batches", 0): ("algorithm.filter_groups.at_limit",),
    ("actor.use_kl_loss", False): ("actor.kl_loss_coef", "actor.kl_loss_type"),
    **{
        ("actor.loss_agg_mode", mode): ("actor.loss_scale_factor",)
        for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
    },
    ("val_kwargs.do_sample", False): ("val_kwargs.top_k", "val_kwargs.top_p"),
    ("actor.use_dynamic_bsz", True): ("actor.ppo_micro_batch_size_per_gpu",),
    ("critic.use_dynamic_bsz", True): ("critic.ppo_micro_batch_size_per_gpu",),
    ("actor_rollout_ref.model.lora_rank", 0): ("actor_rollout_ref.model.lora_alpha",),
    ("actor.optim.lr_scheduler_type", "constant"): ("actor.optim.min_lr_ratio",),
    ("critic.optim.lr_scheduler_type", "constant"): ("critic.optim.min_lr_ratio",),
}
"""(end of a key, its value) -> ends of the keys that change nothing then; who sets one is told so.

What an estimator or a loss does not ask for is known by its signature: verl/trainer/unused_settings.py.
"""

log = logging.getLogger("verl.config")


def matches(key: str, end: str) -> bool:
    """Whether a dotted key is, or ends in, the names `end`."""
    return key == end or key.endswith("." + end)


def unavailable(config: Tree, built: Mapping[str, set[Any]] = BUILT) -> list[Problem]:
    """Every key of `config` whose value is not built yet, with what can be used instead."""
    flat = flatten(config.model_dump(), type(config))
    problems = []
    for key, leaf in leaves(type(config)).items():
        problems += _not_built(key, flat[key], leaf)
        for end, words in built.items():
            if matches(key, end):
                given = flat[key] if isinstance(flat[key], list | tuple) else [flat[key]]
                problems += [Problem(key, _not_among(word, words, end)) for word in given if word not in words]
    return problems


def check_available(config: Tree, built: Mapping[str, set[Any]] = BUILT) -> None:
    """Raise ConfigError that names every engine, backend, size or option of `config` that is not built yet.

    Settings of another engine than the chosen one change nothing; each that is set is named in the log.
    """
    problems = unavailable(config, built)
    if problems:
        raise ConfigError(problems)
    for note in without_effect(config):
        log.warning(note)


def without_effect(config: Tree) -> list[str]:
    """What is set and changes nothing beside the other settings; what merely follows another key is not named."""
    chosen, flat = differences(config), flatten(config.model_dump(), type(config))
    notes = {}
    for (choice, word), ends in NO_EFFECT.items():
        if any(matches(key, choice) and value == word for key, value in flat.items()):
            reason = f"changes nothing with {choice}: {word if isinstance(word, str) else in_words(word)}"
            unused = [key for key in chosen if any(matches(key, end) for end in ends)]
            notes |= {key: f"{key}: {in_words(flat[key])} {reason}" for key in unused}
    return list(notes.values())


def _not_among(word: Any, words: set[Any], end: str) -> str:
    instead = INSTEAD[end] if end in INSTEAD else f"use {', '.join(map(str, sorted(words)))}"
    return f"{in_words(word)} is not built yet: {instead}"


def _not_built(key: str, value: Any, leaf: Leaf) -> list[Problem]:
    if value == leaf.default:
        return []
    return [
        Problem(key, f"{in_words(value)} is not built yet: {instead}")
        for end, instead in NOT_BUILT.items()
        if matches(key, end)
    ]
