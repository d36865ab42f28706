"""Traits of rollout engines: known without importing an engine, and declared by a custom engine in its own file."""

import subprocess
import sys

import pytest

from verl.config import ConfigError, load_config, settings_without_effect
from verl.registry import import_module
from verl.rollout.base import ROLLOUT_ENGINES
from verl.rollout.external import import_checked
from verl.rollout.traits import EngineTraits, built_in_engines, engine_traits

ROLLOUT = "actor_rollout_ref.rollout."
CUSTOM = """
from verl.rollout import EngineTraits, register_rollout_engine


@register_rollout_engine("stone", traits=EngineTraits(cuda_graphs=False, tensor_parallel=False, own_memory_share=True))
def make_stone(config, model, env, train_engine=None):
    raise AssertionError


@register_rollout_engine("sand")
def make_sand(config, model, env, train_engine=None):
    raise AssertionError
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "custom_engines.py"
    path.write_text(CUSTOM)
    import_module(str(path))
    yield
    for name in ("stone", "sand"):
        del ROLLOUT_ENGINES[name]


def settings(*overrides):
    return load_config(overrides=[f"{ROLLOUT}{override}" for override in overrides])


def test_traits_are_read_without_importing_torch_or_an_engine():
    program = (
        "import sys; from verl.rollout.traits import built_in_engines; from verl.engines.traits import "
        "built_in_strategies; print(*built_in_engines(), *built_in_strategies());"
        "assert not {'torch', 'transformers', 'verl.rollout.base'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hf", "native", "sglang", "vllm", "fsdp", "fsdp2", "megatron"]


def test_every_built_in_engine_is_registered_under_the_name_of_its_folder():
    for name, traits in built_in_engines().items():
        assert traits.name == name and name in ROLLOUT_ENGINES


def test_a_custom_engine_declares_its_traits(custom):
    assert engine_traits("stone") == EngineTraits(
        "stone", cuda_graphs=False, tensor_parallel=False, own_memory_share=True
    )
    assert settings_without_effect(settings("name=stone", "enforce_eager=true", "gpu_memory_utilization=0.3")) == [
        f"{ROLLOUT}enforce_eager: true has no effect with {ROLLOUT}name=stone"
    ]
    with pytest.raises(ConfigError, match=r"2 is not supported by .*name=stone"):
        settings("name=stone", "tensor_model_parallel_size=2", "nnodes=0", "n=2")


def test_of_an_engine_without_traits_nothing_is_assumed(custom):
    assert engine_traits("sand") == EngineTraits("sand")
    config = settings("name=sand", "enforce_eager=true", "max_model_len=9", "engine_kwargs.vllm.x=1", "dtype=fp32")
    assert settings_without_effect(config) == []


def test_arguments_have_an_effect_with_the_engine_of_their_name():
    for name in ("native", "vllm", "sglang", "hf"):
        notes = settings_without_effect(settings(f"name={name}", "engine_kwargs.vllm.x=1"))
        assert notes == ([] if name == "vllm" else [
            f"{ROLLOUT}engine_kwargs.vllm: {{'x': 1}} (dict) has no effect with {ROLLOUT}name={name}"
        ])  # fmt: skip


def test_a_package_that_does_not_import_is_named(monkeypatch):
    """Of another version of torch, say."""
    monkeypatch.setattr(EngineTraits, "missing_package", lambda self: None)
    with pytest.raises(ImportError, match=r"rollout\.name=vllm: vLLM .* does not import: No module named 'no_engine'"):
        import_checked(built_in_engines()["vllm"], "no_engine")
