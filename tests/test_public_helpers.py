"""Helpers of public verl that recipes import: each is called as recipes call it, with the right value by hand."""

import asyncio
import dataclasses
import logging
import time
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from transformers import GenerationConfig, Qwen2Config
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, should_save_ckpt_esi
from verl.utils.config import omega_conf_to_dataclass, update_dict_with_config, validate_config
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
from verl.utils.flops_counter import FlopsCounter
from verl.utils.fs import local_mkdir_safe
from verl.utils.fsdp_utils import (
    apply_fsdp2,
    fsdp2_load_full_state_dict,
    fsdp_version,
    get_fsdp_wrap_policy,
    get_init_weight_context_manager,
    load_fsdp_model_to_gpu,
    load_fsdp_optimizer,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
)
from verl.utils.import_utils import import_external_libs, load_class_from_fqn
from verl.utils.logger import log_with_rank
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.model import get_generation_config, print_model_size, update_model_config
from verl.utils.profiler import DistProfiler, DistProfilerExtension, GPUMemoryLogger, ProfilerConfig
from verl.utils.profiler.performance import reduce_timing
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.ray_utils import get_event_loop, ray_noset_visible_devices
from verl.utils.rollout_trace import rollout_trace_attr
from verl.utils.seqlen_balancing import calculate_workload
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import get_cosine_schedule_with_warmup
from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs
from verl.workers.config import FSDPOptimizerConfig, RolloutConfig

from verl.single_controller.worker import free_port
from verl.utils.device import get_device_capability


def test_precisions():
    assert [PrecisionType.to_dtype(p) for p in ("bf16", 16, "fp32", torch.float16)] == [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float16,
    ]
    assert [PrecisionType.to_str(t) for t in (torch.bfloat16, torch.float32)] == ["bf16", "fp32"]
    assert PrecisionType.is_fp16("16") and PrecisionType.is_bf16("bfloat16") and not PrecisionType.is_fp32("bf16")
    with pytest.raises(RuntimeError, match=r"precision: .*found 'int4'"):
        PrecisionType.to_dtype("int4")


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
    values = {"n": 1, "other": 2}
    update_dict_with_config(values, OmegaConf.create({"n": 5}))
    assert values == {"n": 5, "other": 2}


# ---- checkpoints, environment, logging ------------------------------------------------------------------------------


def test_the_newest_checkpoint_of_a_folder(tmp_path):
    assert find_latest_ckpt_path(None) is None and find_latest_ckpt_path(str(tmp_path)) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    assert find_latest_ckpt_path(str(tmp_path)) is None  # its folder is gone
    (tmp_path / "global_step_20").mkdir()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_20")
    assert local_mkdir_safe(str(tmp_path / "a/b")) == str(tmp_path / "a/b") and (tmp_path / "a/b").is_dir()


@pytest.mark.parametrize(("seconds_left", "saves"), [(200, False), (150, True), (-1, False)])
def test_an_elastic_instance_saves_before_its_end(monkeypatch, seconds_left, saves):
    """A step of 100 s and a save of 60 s need 160 s."""
    assert should_save_ckpt_esi(100.0) is False
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + seconds_left))
    assert should_save_ckpt_esi(max_steps_duration=100.0) is saves


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

    async def running():
        return get_event_loop() is asyncio.get_running_loop()

    assert asyncio.run(running())
    loop = get_event_loop()
    assert loop.run_until_complete(asyncio.sleep(0, 7)) == 7
    loop.close()


class Worker(DistProfilerExtension):
    def __init__(self):
        super().__init__(DistProfiler(rank=0, config=ProfilerConfig()))

    @DistProfiler.annotate(color="blue", role="actor")
    @GPUMemoryLogger(role="actor")
    def double(self, x):
        with rollout_trace_attr(step=1):
            return 2 * x


def test_a_worker_with_profiling_that_is_off_runs_and_a_profiler_that_is_on_is_refused():
    worker = Worker()
    worker.start_profile()
    worker.stop_profile()
    assert worker.double(3) == 6
    with pytest.raises(ValueError, match="not supported"):
        ProfilerConfig(enable=True)


# ---- models ----------------------------------------------------------------------------------------------------------


def test_the_workload_of_sequences():
    assert calculate_workload(torch.tensor([0, 1, 100])).tolist() == [0, 24577, 2467600]


# ---- models that a program loads and shards itself -------------------------------------------------------------------


class TwoLayers(torch.nn.Module):
    _no_split_modules = ["Linear"]

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=False, rope=SimpleNamespace(theta=1.0))
        self.embedding, self.first, self.last = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_is_sharded_loaded_and_moved(one_rank, capsys):
    with get_init_weight_context_manager(use_meta_tensor=True)():
        model = TwoLayers()  # on rank 0, with weights
    assert fsdp_version(model) == 0 and model.first.weight.device.type == "cpu"
    full = {name: value.clone() for name, value in model.state_dict().items()}
    apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (1,))}, {})
    assert [fsdp_version(part) for part in model.modules()] == [2, 2, 2, 2]
    fsdp2_load_full_state_dict(model, {name: value + 1 for name, value in full.items()}, cpu_offload=True)
    assert all(torch.equal(value.full_tensor(), full[name] + 1) for name, value in model.state_dict().items())
    assert model.scale == 2
    optimizer = torch.optim.AdamW(model.parameters())
    offload_fsdp_model_to_cpu(model)
    load_fsdp_model_to_gpu(model)
    offload_fsdp_optimizer(optimizer)
    load_fsdp_optimizer(optimizer, "cpu")
    print_model_size(model)
    assert capsys.readouterr().out == f"{type(model).__name__} contains 45.00 parameters\n"
    update_model_config(model.config, {"tie_word_embeddings": True, "rope": {"theta": 2.0}})
    assert model.config.tie_word_embeddings and model.config.rope.theta == 2.0
    tied = TwoLayers()
    tied.config.tie_word_embeddings = True
    apply_fsdp2(
        tied, {"mesh": init_device_mesh("cpu", (1,))}, {"wrap_policy": {"transformer_layer_cls_to_wrap": "Linear"}}
    )
    assert fsdp_version(tied.embedding) == 0 and fsdp_version(tied.last) == 2


def test_learning_rates_of_a_cosine():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=10.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6, min_lr_ratio=0.1)
    rates = []
    for _ in range(7):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    # a quarter of the way: 0.1 + 0.9 (1 + cos(pi / 4)) / 2
    assert rates == pytest.approx([0, 5, 10, 8.6820, 5.5, 2.3180, 1], abs=1e-4)


def test_plain_types():
    config = OmegaConf.create({"a": [{"b": 1}], "c": "${a}"})
    plain = convert_to_regular_types({"config": config, "pair": (1, config.a)})
    assert plain == {"config": {"a": [{"b": 1}], "c": [{"b": 1}]}, "pair": [1, [{"b": 1}]]}
    assert type(plain["config"]["a"][0]) is dict and type(plain["pair"][1]) is list


def test_a_process_group_of_one(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    timings = {"gen": 2.0, "adv": 0.5}
    assert reduce_timing(timings) is timings
    assert initialize_global_process_group(60) == (0, 0, 1)
    try:
        assert reduce_timing(timings, torch.distributed.ReduceOp.SUM) == timings
    finally:
        destroy_global_process_group()
    assert not torch.distributed.is_initialized()
    destroy_global_process_group()  # there is none: nothing to do


def test_the_settings_of_a_model_folder(tmp_path):
    assert get_generation_config(str(tmp_path / "none")) is None
    config = Qwen2Config(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=2,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config.eos_token_id = 7
    config.save_pretrained(tmp_path)
    assert get_generation_config(str(tmp_path)).eos_token_id == 7
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(tmp_path)
    assert get_generation_config(str(tmp_path)).eos_token_id == [7, 8]
    # attention 4 x 8 x 8 and MLP 3 x 8 x 16 in each of 2 layers, and 10 x 8 outputs: 1,360 products for a token, and
    # 2 x 8 for a pair of tokens in a layer; 3 pairs of 2 tokens; twice the products, three times for an update
    achieved, peak = FlopsCounter(config).estimate_flops([2], 0.5)
    assert achieved == pytest.approx(3 * 2 * (2 * 1360 + 3 * 2 * 2 * 8) / 0.5 / 1e12) and peak > 0
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    policy = get_fsdp_wrap_policy(model, {"transformer_layer_cls_to_wrap": ["Tanh"]})
    assert [policy(module=part, recurse=False, nonwrapped_numel=0) for part in model] == [False, True]
    assert get_fsdp_wrap_policy(model) is get_fsdp_wrap_policy(model, {"disable": True}) is None
    large = get_fsdp_wrap_policy(model, {"min_num_params": 6})
    assert [large(module=model, recurse=False, nonwrapped_numel=count) for count in (5, 6)] == [False, True]
    with pytest.raises(ValueError, match="no module of Sequential is one of"):
        get_fsdp_wrap_policy(model, {"transformer_layer_cls_to_wrap": ["Block"]})


def test_one_rank_has_the_whole_sequence(monkeypatch):
    ids = torch.arange(5)[None]
    assert ulysses_pad_and_slice_inputs(ids, None, sp_size=1) == ulysses_pad_and_slice_inputs(ids) == (ids, None, 0)
    assert gather_outputs_and_unpad(ids, gather_dim=0) is ids
    with pytest.raises(ValueError, match="expected sp_size 1, found 2"):
        ulysses_pad_and_slice_inputs(ids, None, sp_size=2)
    aggressive_empty_cache()
    assert not ray_noset_visible_devices({"X": "1"})
    assert ray_noset_visible_devices({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
