"""Helpers of public verl that recipes import: each is called as recipes call it, with the right value by hand."""

import dataclasses
import logging

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.fs import local_mkdir_safe
from verl.utils.import_utils import import_external_libs, load_class_from_fqn
from verl.utils.logger import log_with_rank
from verl.utils.seqlen_balancing import calculate_workload
from verl.workers.config import FSDPOptimizerConfig, RolloutConfig

from verl.utils.device import get_device_capability

# ---- configurations -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class RecipeConfig:
    beta: float = 0.5
    names: list[str] = dataclasses.field(default_factory=list)


def test_sections_of_a_config_become_objects():
    rollout = omega_conf_to_dataclass(OmegaConf.create({"name": "hf", "n": 4, "temperature": 0.7}), RolloutConfig)
    assert (type(rollout), rollout.n, rollout.temperature, rollout["top_p"]) == (RolloutConfig, 4, 0.7, 1.0)
    assert omega_conf_to_dataclass(rollout) is rollout  # typed already
    optim = omega_conf_to_dataclass({"_target_": "verl.workers.config.FSDPOptimizerConfig", "lr": 3e-6})
    assert isinstance(optim, FSDPOptimizerConfig) and optim.lr == 3e-6
    own = omega_conf_to_dataclass(OmegaConf.create({"names": ["a"]}), RecipeConfig)
    assert own == RecipeConfig(0.5, ["a"]) and omega_conf_to_dataclass({}, RecipeConfig) == RecipeConfig()
    with pytest.raises(AssertionError, match="_target_"):
        omega_conf_to_dataclass({"lr": 1.0})
    with pytest.raises(ValueError, match=r"rollout.top_q: unknown key"):
        omega_conf_to_dataclass({"top_q": 1}, RolloutConfig)


def test_a_config_is_checked_like_that_of_a_run():
    with pytest.raises(ValueError, match=r"actor.ppo_mini_batch_size"):
        settings = ["data.train_batch_size=8", "algorithm.name=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=3"]
        validate_config(OmegaConf.from_dotlist(settings), True, False)


# ---- checkpoints, environment, logging ------------------------------------------------------------------------------


def test_the_newest_checkpoint_of_a_folder(tmp_path):
    assert find_latest_ckpt_path(None) is None and find_latest_ckpt_path(str(tmp_path)) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    assert find_latest_ckpt_path(str(tmp_path)) is None  # its folder is gone
    (tmp_path / "global_step_20").mkdir()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_20")
    assert local_mkdir_safe(str(tmp_path / "a/b")) == str(tmp_path / "a/b") and (tmp_path / "a/b").is_dir()


def test_environment_imports_and_logging(monkeypatch, caplog):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    variables = get_ppo_ray_runtime_env()["env_vars"]
    assert variables["TOKENIZERS_PARALLELISM"] == "true" and "NCCL_DEBUG" not in variables
    import_external_libs(["json"])
    assert load_class_from_fqn("collections.Counter").__name__ == "Counter"
    with pytest.raises(AttributeError, match="Conter"):
        load_class_from_fqn("collections.Conter")
    with caplog.at_level(logging.INFO):
        log_with_rank("loaded", rank=3, logger=logging.getLogger("verl.test"))
        log_with_rank("hidden", rank=3, logger=logging.getLogger("verl.test"), log_only_rank_0=True)
    assert caplog.messages == ["[Rank 3] loaded"]
    assert get_device_capability() == (None, None) or torch.cuda.is_available()


# ---- models ----------------------------------------------------------------------------------------------------------


def test_the_workload_of_sequences():
    assert calculate_workload(torch.tensor([0, 1, 100])).tolist() == [0, 24577, 2467600]
