"""Module paths of public verl and of earlier versions are the modules here; names are found, or the error helps."""

import importlib
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.compat.hook import ANY, BELOW, MOVED, published

NEEDS_PACKAGES = ("_triton", "triton_kernels", "cuda", "paged", "megatron.memory", ".ray.")


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_is_the_new_module(old):
    new = MOVED[old]
    if any(word in new for word in NEEDS_PACKAGES):
        assert Path(importlib.util.find_spec(new).origin).is_file()
        return
    assert importlib.import_module(old) is importlib.import_module(new)
    assert importlib.import_module(new).__spec__.name == new


def test_an_old_path_hides_no_name_of_its_package():
    """The import of a submodule sets an attribute of its package: that name would be the module from then on."""
    for old in MOVED:
        package, _, name = old.rpartition(".")
        if ".ray" not in package:
            assert name not in getattr(importlib.import_module(package), "__all__", ()), old


def test_recipe_is_verl_recipe():
    """The checkout's folder `recipe` forwards: its modules are the same objects, not second copies."""
    import recipe.dpo.online
    import verl.recipe.dpo.online
    from recipe.dpo import DPOTrainer
    from verl.recipe.dpo.main_dpo import DPOTrainer as same

    assert recipe.dpo.online is verl.recipe.dpo.online and DPOTrainer is same
    assert importlib.import_module("recipe.dpo.trainer") is importlib.import_module("verl.recipe.dpo.online")
    assert importlib.import_module("recipe.r1.main_eval") is importlib.import_module("verl.trainer.main_eval")
    spec = importlib.util.find_spec("recipe.dpo.main_dpo")  # what `python -m` runs
    assert spec.origin.endswith("verl/recipe/dpo/main_dpo.py") and spec.loader.get_code(spec.name) is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("recipe.nothing")


def test_an_unknown_path_is_still_an_import_error():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.tools.nothing")


def test_the_hook_imports_nothing_itself():
    code = (
        "import sys, verl; print([m for m in sys.modules if m.startswith('verl.') and not m.startswith('verl.compat')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "['verl.utils', 'verl.utils.lazy']"  # of `verl` itself


# ---- names of public verl -------------------------------------------------------------------------------------------

NEEDS_RAY = ".ray."


@pytest.mark.parametrize("module", published())
def test_every_published_name_is_found_or_explained(module):
    for name, target in published()[module].items():
        wanted = "anything" if name in (ANY, BELOW) else name
        code = f"from {module} import {wanted} as found"
        if " " in target:
            with pytest.raises(
                ImportError, match=rf"^{module}\.{wanted} of public verl does not exist here: "
            ) as error:
                exec(code, {})
            assert str(error.value).endswith(target)
        elif NEEDS_RAY not in target:
            scope = {}
            exec(code, scope)
            assert scope["found"] is not None
            home, _, attribute = target.partition(":")
            assert home.startswith(("verl.", "torch.", "transformers", "pkgutil"))
            assert not attribute or scope["found"] == _get(home, attribute)


ADVICE = {text for names in published().values() for text in names.values() if " " in text}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bverl(?:\.\w+)+", " ".join(ADVICE)))))
def test_a_name_in_advice_can_be_imported(name):
    assert pkgutil.resolve_name(name) is not None


def test_modules_below_a_package_without_a_counterpart_say_what_replaces_them():
    with pytest.raises(ImportError, match=r"vllm_rollout.deep.inside.Anything of public verl does not.*RolloutEngine"):
        exec("from verl.workers.rollout.vllm_rollout.deep.inside import Anything", {})


def _get(home: str, attribute: str):
    found = importlib.import_module(home)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


#: what public recipes and examples import most often, as they write it
PUBLIC_IMPORTS = """
from verl import DataProto
from verl.protocol import DataProtoItem, DataProtoConfig, pad_dataproto_to_divisor, unpad_dataproto, collate_fn
from verl.trainer.ppo.core_algos import agg_loss, AdvantageEstimator, register_adv_est, register_policy_loss
from verl.trainer.ppo.core_algos import kl_penalty, compute_policy_loss, compute_policy_loss_vanilla
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.metric_utils import reduce_metrics
from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_reward_model
from verl.trainer.ppo.reward import load_reward_manager, compute_reward
from verl.utils.reward_score import default_compute_score, gsm8k, math_dapo
from verl.utils.reward_score.math import compute_score, last_boxed_only_string, remove_boxed
from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role
from verl.trainer.ppo.utils import Role, WorkerType, need_critic
from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler, run_ppo
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.workers.fsdp_workers import ActorRolloutRefWorker, AsyncActorRolloutRefWorker, CriticWorker
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, should_save_ckpt_esi
from verl.utils.profiler import DistProfiler, DistProfilerExtension, GPUMemoryLogger, ProfilerConfig
from verl.utils.profiler.performance import simple_timer, log_gpu_memory_usage
from verl.utils.fsdp_utils import CPUOffloadPolicy, MixedPrecisionPolicy, fsdp2_clip_grad_norm_
from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.workers.reward_manager import register, get_reward_manager_cls, NaiveRewardManager, DAPORewardManager
from verl.workers.reward_manager import BatchRewardManager, PrimeRewardManager, AbstractRewardManager
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.dataset.sft_dataset import SFTDataset
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils import hf_tokenizer, hf_processor
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.fs import copy_to_local, copy_local_path_from_hdfs
from verl.utils.hdfs_io import copy, makedirs, exists
from verl.utils.metric import reduce_metrics
from verl.utils import torch_functional as verl_F
import verl.utils.torch_functional as verl_F
from verl.utils.torch_functional import masked_mean, masked_whiten, masked_sum, logprobs_from_logits, postprocess_data
from verl.utils.torch_functional import entropy_from_logits, pad_sequence_to_length, get_response_mask
from verl.utils.device import get_device_name, get_device_id, is_cuda_available, is_npu_available, get_torch_device
from verl.utils.tracking import Tracking
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance, karmarkar_karp
from verl.utils.model import compute_position_id_with_mask
from verl.utils.py_functional import append_to_dict
from verl.utils.debug import marked_timer
from verl.utils.profiler import marked_timer
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.ray_trainer import _timer
from verl.tools.utils.tool_registry import initialize_tools_from_config
from verl.utils.rollout_trace import rollout_trace_op
from verl.utils.py_functional import timeout_limit, union_two_dict
from verl.protocol import union_two_dict, list_of_dict_to_dict_of_list
from verl.workers.config.actor import FSDPActorConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import register, Dispatch, Execute
from verl.trainer.ppo.ray_trainer import Dataset, Sampler, calculate_workload
from verl.trainer.ppo.metric_utils import _compute_response_info
from verl.utils.reward_score.search_r1_like_qa_em import compute_score, em_check, extract_solution
from verl.utils.torch_functional import get_eos_mask, tokenize_and_postprocess_data
from verl.utils.dataset.vision_utils import process_image
from verl.experimental.reward.reward_loop.registry import register
from recipe.dapo.main_dapo import TaskRunner
"""


@pytest.mark.parametrize("line", PUBLIC_IMPORTS.strip().splitlines())
def test_imports_of_public_scripts(line):
    exec(line, {})


def test_functions_under_public_names(tmp_path):
    from types import SimpleNamespace

    import torch
    from PIL import Image
    from verl.trainer.ppo.metric_utils import _compute_response_info
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.dataset.vision_utils import process_image
    from verl.utils.py_functional import timeout_limit
    from verl.utils.reward_score import search_r1_like_qa_em as em
    from verl.utils.seqlen_balancing import roundup_divisible

    from verl import DataProto
    from verl.utils import torch_functional as verl_F

    truth = {"target": ["Paris", "Lutetia"]}
    texts = ["<answer>x</answer> <answer> the paris. </answer>", "<answer>London</answer>", "Paris"]
    assert [em.compute_score(text, truth, format_score=0.1) for text in texts] == [1.0, 0.1, 0.0]
    assert [em.extract_solution(text) for text in texts] == ["the paris.", "London", None]
    assert [em.em_check("Lutetia!", truth["target"]), em.em_check("Rome", "Paris")] == [1, 0]
    entropy = verl_F.entropy_from_logits_with_chunking(torch.zeros(3, 8), chunk_size=2)
    assert torch.allclose(entropy, torch.full((3,), 2.0794415))  # log 8
    assert verl_F.get_eos_mask(torch.tensor([[5, 2, 2]]), eos_token=2).tolist() == [[1, 1, 0]]
    assert [roundup_divisible(9, 4), roundup_divisible(8, 4)] == [12, 8]
    image = process_image({"image": Image.new("RGBA", (40, 20)), "max_pixels": 200})
    assert (image.mode, image.size) == ("RGB", (20, 10))
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    info = _compute_response_info(DataProto.from_dict({"responses": torch.ones(2, 3), "attention_mask": mask}))
    assert (info["prompt_length"].tolist(), info["response_length"].tolist()) == ([1.0, 2.0], [2.0, 3.0])

    (tmp_path / "reward.py").write_text("def f(a, b=0):\n    return a + b\n")
    settings = SimpleNamespace(path=str(tmp_path / "reward.py"), name="f", reward_kwargs={"b": 2})
    assert get_custom_reward_fn(SimpleNamespace(custom_reward_function=settings))(1) == 3
    settings.path = None
    assert get_custom_reward_fn(SimpleNamespace(custom_reward_function=settings)) is None
    assert timeout_limit(seconds=60)(lambda x: x + 1)(1) == 2
    with pytest.raises(TimeoutError, match=r"sleep took longer than 0\.01 s"):
        timeout_limit(seconds=0.01)(time.sleep)(0.5)


def test_a_name_that_public_verl_does_not_have_is_an_ordinary_import_error():
    with pytest.raises(ImportError, match=r"cannot import name 'nothing' from 'verl\.utils\.metric'"):
        exec("from verl.utils.metric import nothing", {})
    with pytest.raises(ImportError, match=r"cannot import name 'nothing' from 'verl\.protocol'"):
        exec("from verl.protocol import nothing", {})
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.utils.metric.nothing")
