"""Which models generate with their own modules. Decided from the class and the config, before weights are loaded."""

import inspect
import sys
from typing import Any

import transformers

from verl.rollout.native.decoder import position_limit

_INSTEAD = "Use rollout.name=hf"
NO_INTERFACE = "its attention does not use transformers' AttentionInterface"
OWN_STATES = "its layers keep their states themselves"
#: names of the argument of a forward method that takes the cache, newest first
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


def unsupported(name: str, reason: str) -> ValueError:
    """The error for a model that cannot run."""
    return ValueError(f"rollout.name=native does not support {name}: {reason}. {_INSTEAD}")


def check_modules(model_class: type, config: Any) -> None:
    """Raise ValueError if the engine cannot run the modules of a model.

    Args:
        model_class: its class in transformers.
        config: its HuggingFace config.
    """
    name, text = model_class.__name__, config.get_text_config()
    if (reason := _reason(model_class, text)) is not None:
        raise unsupported(name, reason)
    position_limit(text)


def _reason(model_class: type, config: Any) -> str | None:
    """Why the engine cannot run a model; None if it can, as far as its class and config show."""
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionCacheLayerMixin,
    )
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    homes = [sys.modules[each.__module__] for each in (model_class, MODEL_MAPPING.get(type(config), None)) if each]
    arguments = inspect.signature(model_class.forward).parameters
    if not set(CACHE_ARGUMENTS) & set(arguments):
        return "its forward method takes no cache"
    caches = [each.__name__ for home in homes for each in vars(home).values() if _is_own(each, Cache, home)]
    if caches:
        return f"it has a separate cache ({caches[0]})"
    layers = DynamicCache(config=config).layers
    with_keys = [layer for layer in layers if isinstance(layer, CacheLayerMixin)]
    with_states = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    plain = DynamicLayer, DynamicSlidingWindowLayer
    unknown = [type(each).__name__ for each in with_keys if type(each) not in plain and each not in with_states]
    if unknown:
        return f"its layers cache more than keys and values ({unknown[0]})"
    if model_class._is_stateful and not with_states:
        return OWN_STATES
    if with_states and not hasattr(with_states[0], "number_of_states"):
        return f"transformers {transformers.__version__} caches states of layers in another form than 5.17"
    if with_keys and not any(hasattr(home, "ALL_ATTENTION_FUNCTIONS") for home in homes):
        return NO_INTERFACE
    if with_keys and "position_ids" not in arguments:
        return "its forward method takes no position_ids"
    settings = config.to_dict()
    is_encoder = hasattr(homes[0], "create_bidirectional_mask") and settings.get("is_decoder") is False
    if is_encoder or settings.get("use_bidirectional_attention") in (True, "all") or settings.get("is_causal") is False:
        return "its attention is bidirectional, so it does not generate token by token"
    return None


def _is_own(value: Any, base: type, home: Any) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value.__module__ == home.__name__
