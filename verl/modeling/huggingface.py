"""HuggingFace configs and weights, read strictly: unknown overrides, missing and unused weights are errors."""

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from verl.registry import did_you_mean

#: attributes that have no effect as an override -> what to use
_NOT_OVERRIDDEN = {
    **dict.fromkeys(
        ("dtype", "torch_dtype"),
        "use model_dtype (weights) and dtype (computation) in the section fsdp_config; critic.fsdp for a critic, "
        "engine for SFT, rollout.dtype for a rollout engine with its own weights",
    ),
    "attn_implementation": "attention over packed sequences has its own kernels: remove the key",
    "model_type": "the architecture is that of the files: set the model path to a model of that type",
}
#: names of heads; a model of one kind may be loaded from the files of another kind, without its head
_HEADS = (
    *("lm_head", "embed_out", "score", "classifier", "qa_outputs"),
    *("v_head", "value_head", "reward_head", "regression_head"),
)
#: constants that older files have, and modules compute
_CONSTANTS = ("inv_freq", "cos_cached", "sin_cached", "position_ids", "masked_bias")


def model_source(path: str) -> str:
    """Return the source of a model or tokenizer: the path itself, or, with VERL_USE_MODELSCOPE=True and no folder of
    this name, a folder downloaded from ModelScope.

    Raises:
        ImportError: modelscope is not installed.
        ValueError: ModelScope has no such model, or cannot be reached.
    """
    is_enabled = os.environ.get("VERL_USE_MODELSCOPE", "").lower() in ("true", "1")
    return _from_modelscope(path) if is_enabled and not os.path.isdir(os.path.expanduser(path)) else path


@functools.cache
def _from_modelscope(name: str) -> str:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"VERL_USE_MODELSCOPE is set and {name!r} is not a folder, so it is loaded from ModelScope: "
            "pip install modelscope, or unset the variable"
        ) from error
    try:
        return str(snapshot_download(name))
    except Exception as error:  # errors of modelscope, of requests and of the file system
        raise ValueError(f"cannot load {name!r} from ModelScope: {type(error).__name__}: {error}") from error


def read_config(path: str, overrides: Mapping[str, Any], trust_remote_code: bool = False) -> Any:
    """The HuggingFace config of a model. path: see `model_source`. overrides: attributes to set
    (`model.override_config`).

    Raises:
        ValueError: there is no model, or its config has no attribute of an override's name or rejects its value.
    """
    from transformers import AutoConfig
    from transformers.activations import ACT2FN
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(model_source(path), trust_remote_code=trust_remote_code)
    except OSError as error:
        raise ValueError(f"no HuggingFace model at {path!r}: {error}") from error
    except ValueError as error:
        if "trust_remote_code" not in str(error) or trust_remote_code:
            raise
        raise ValueError(needs_trust(path)) from error
    except (TypeError, AttributeError, KeyError) as error:  # config.json is no object, or its values have other types
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path!r}: transformers cannot read its config.json ({reason}): expected that of a model"
        ) from error
    fields = config.to_dict() if overrides else {}
    for name, value in overrides.items():
        if isinstance(fields.get(name), str) and fields[name] in ACT2FN and value not in ACT2FN:
            raise ValueError(f"override_config.{name}: there is no activation {value!r}: {did_you_mean(value, ACT2FN)}")
        if name in _NOT_OVERRIDDEN:
            raise ValueError(f"override_config.{name}: not supported: {_NOT_OVERRIDDEN[name]}")
        if name not in fields:
            raise ValueError(
                f"override_config: the model's configuration has no {name!r}: {did_you_mean(name, fields)}"
            )
        try:
            setattr(config, name, value)
        except Exception as error:  # strict dataclasses raise a separate error type, remote code any
            reason = " ".join(str(error).split())
            raise ValueError(f"override_config.{name}: {type(config).__name__} rejects {value!r}: {reason}") from error
    if "tie_word_embeddings" not in overrides and _has_separate_head(path, config):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    return config


def needs_trust(path: str) -> str:
    """The error of a model or tokenizer that comes with Python code."""
    return (
        f"{path!r} comes with Python code, which runs only if you allow it: read the code, and set "
        "actor_rollout_ref.model.trust_remote_code=true (the key of the model section with this path)"
    )


def _has_separate_head(path: str, config: Any) -> bool:
    """Whether the files of a folder have a head that differs from the embedding: transformers does not tie it then."""
    if not getattr(config, "tie_word_embeddings", False):
        return False
    paths = sorted(Path(model_source(path)).expanduser().glob("model*.safetensors"))
    return _differ(tuple((each, each.stat().st_mtime_ns) for each in paths))


@functools.cache  # a run reads the config of a model several times
def _differ(paths: tuple[tuple[Path, int], ...]) -> bool:
    """Whether the head and the embedding in weight files differ. paths: with the time of the last change."""
    try:
        files = {name: file for file in (safe_open(each, "pt") for each, _ in paths) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:  # reported when the weights are loaded
        return False
    heads = [name for name in files if f".{name}".split(".")[-2] in _HEADS]
    if len(heads) != 1:
        return False
    shape = files[heads[0]].get_slice(heads[0]).get_shape()
    outside = [name for name in files if name not in heads and not any(part.isdigit() for part in name.split("."))]
    same = [name for name in outside if files[name].get_slice(name).get_shape() == shape]
    return len(same) == 1 and not torch.equal(*(files[name].get_tensor(name) for name in (heads[0], same[0])))


def around_embeddings(module: nn.Module) -> list[nn.Module]:
    """The modules that contain the input embeddings, from a child of the model inwards."""
    embeddings = module.get_input_embeddings()
    name = next(name for name, layer in module.named_modules() if layer is embeddings)
    parts = name.split(".")
    if len(parts) == 1:
        raise ValueError(f"{type(module).__name__} has no decoder apart from its head: it is not supported")
    return [module.get_submodule(".".join(parts[:i])) for i in range(1, len(parts))]


def trunk_of(module: nn.Module) -> nn.Module:
    """The child of a model that turns tokens into hidden states: the one with the input embeddings."""
    return around_embeddings(module)[0]


class LMHead:
    """Logits of hidden states as the forward pass of the model computes them: with its scales, softcaps and biases.

    Args:
        module: a causal language model. Its trunk is skipped: that is a child, or a decoder inside of it.
    """

    def __init__(self, module: nn.Module):
        self.module, self._skipped = module, around_embeddings(module)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(s, H) -> (s, V)."""
        output = _TrunkOutput([states[None]])
        previous = [layer.__dict__.get("forward") for layer in self._skipped]
        for layer in self._skipped:
            layer.forward = lambda *_, **__: output
        try:
            ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
            return self.module(input_ids=ids).logits.squeeze(0)
        except IndexError as error:
            raise ValueError(f"{type(self.module).__name__} computes logits from more than hidden states") from error
        finally:
            for layer, forward in zip(self._skipped, previous):
                del layer.forward
                if forward is not None:
                    layer.forward = forward


class _TrunkOutput(tuple):
    """(hidden states,), as the output of a trunk: every other output is None."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def experts_of(config: Any) -> int:
    """Experts of a layer by the config of a model; 0: the model has none."""
    settings = config.get_text_config().to_dict()
    return settings.get("num_experts") or settings.get("num_local_experts") or settings.get("n_routed_experts") or 0


def load_with_report(auto: Any, path: str | Path | None, **arguments: Any) -> tuple[nn.Module, dict[str, Any]]:
    """`auto.from_pretrained`, with its report of missing, unexpected and mismatched weights, which is not logged."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return auto.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **arguments)
    finally:
        logging.set_verbosity(verbosity)


#: names that models of transformers give the head of a value model
VALUE_HEADS = ("score", "classifier")


def value_head(module: nn.Module) -> str:
    """The name of the head of a value or reward model. Raises ValueError if it has none that reads hidden states."""
    if hasattr(module, "score"):
        return "score"
    if isinstance(getattr(module, "classifier", None), nn.Linear):
        return "classifier"
    raise ValueError(
        f"{type(module).__name__} has no head called {' or '.join(VALUE_HEADS)} that reads hidden states: it is not "
        "supported as a critic or reward model"
    )


def load_pretrained(
    auto: Any, path: str, config: Any, dtype: torch.dtype, new_prefix: str | tuple[str, ...] | None = None, **build: Any
) -> tuple[nn.Module, set[str]]:
    """A model with the weights of its files.

    Args:
        auto: the Auto class of transformers.
        new_prefix: parameters whose names start with one of them may be missing from the files.
        build: further arguments of `from_pretrained`.

    Returns:
        The module and the names of the missing parameters, which transformers has initialized at random.

    Raises:
        ValueError: other weights are missing or have another shape, or the files have weights that the module has not
            (other than the head of another kind of model).
    """
    module, report = load_with_report(auto, model_source(path), config=config, dtype=dtype, **build)
    new = {name for name in report["missing_keys"] if new_prefix is not None and name.startswith(new_prefix)}
    missing = sorted(set(report["missing_keys"]) - new)
    if missing or report["mismatched_keys"]:
        shapes = [
            f"{name} (files: {list(actual)}, model: {list(expected)})"
            for name, actual, expected in sorted(report["mismatched_keys"])
        ]
        raise ValueError(
            f"{path!r} lacks weights of {type(module).__name__}, which would stay random: missing {_first(missing)}, "
            f"with another shape {_first(shapes)}; override_config must not change shapes or add layers"
        )
    if unused := _unused(module, report["unexpected_keys"]):
        raise ValueError(
            f"{path!r} has weights that {type(module).__name__} does not use: {_first(unused)}. Remove overrides that "
            "make the model smaller, such as override_config.num_hidden_layers; if the model is not meant to have "
            "these weights, such as layers for multi-token prediction, remove them from the files"
        )
    return module, new


def _unused(module: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Weights of the files that neither the module nor another kind of the same model explains."""
    children, buffers = dict(module.named_children()), dict(module.named_buffers())

    def explained(name: str) -> bool:
        head, last = name.partition(".")[0], name.rpartition(".")[2]
        return (head in _HEADS and head not in children) or last in _CONSTANTS or name in buffers

    return sorted(name for name in unexpected if not explained(name))


def _first(names: list[str]) -> str:
    """The first five names, and how many more there are."""
    others = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"[{', '.join(names[:5])}]{others}"
