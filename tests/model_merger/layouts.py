"""Checkpoints to merge, written by torch and by this project's engines on real ranks (gloo).

A program of its own, which forks its ranks: they need not import everything again, and nothing of a test is in them.
"""

import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, DeepseekV3Config, Qwen2Config

from examples.quickstart.tiny_model import char_tokenizer
from verl.config.schema import ModelConfig, OptimConfig
from verl.engines.base import EngineSpec
from verl.engines.sharding import FSDP2
from verl.engines.torch_engine import TorchEngine
from verl.single_controller.worker import free_port

# 37 rows do not divide by 2 or 4
COMMON = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 2, "max_position_embeddings": 64}
QWEN = Qwen2Config(**COMMON, num_key_value_heads=1, tie_word_embeddings=True)
# experts, which transformers keeps in one tensor in memory; a persistent buffer (the correction of the router)
EXPERTS = {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
EXPERTS |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
EXPERTS |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 2}
DEEPSEEK = DeepseekV3Config(**COMMON, **EXPERTS, tie_word_embeddings=False)


def make_models(root: Path) -> None:
    """Folders base/, trained/, critic/ and experts/: HuggingFace models, the first three of one architecture."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(QWEN)
    base.save_pretrained(root / "base")
    with torch.no_grad():
        for p in base.parameters():
            p.add_(0.01 * torch.randn_like(p))
    base.save_pretrained(root / "trained")
    critic = AutoModelForTokenClassification.from_pretrained(root / "base", num_labels=1)
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(root / "critic")
    experts = AutoModelForCausalLM.from_config(DEEPSEEK)
    torch.nn.init.normal_(experts.model.layers[1].mlp.gate.e_score_correction_bias)
    experts.save_pretrained(root / "experts")
    for name in ("base", "trained", "critic", "experts"):
        char_tokenizer().save_pretrained(root / name)


def load(folder: Path, kind: str = "causal_lm") -> torch.nn.Module:
    auto = {"causal_lm": AutoModelForCausalLM, "value": AutoModelForTokenClassification}[kind]
    return auto.from_pretrained(folder, dtype=torch.float32)


def finish(actor: Path, model: Path, base: Path | None, world: int, fsdp_version: int | None) -> None:
    """What lies beside rank files: config (which names the base model), tokenizer, fsdp_config.json."""
    shutil.copytree(model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    if base is not None:
        config["_name_or_path"] = str(base)
    (actor / "huggingface" / "config.json").write_text(json.dumps(config))
    if fsdp_version is not None:
        (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": fsdp_version, "world_size": world}))


def save_rank(actor: Path, state: dict) -> None:
    actor.mkdir(parents=True, exist_ok=True)
    torch.save(state, actor / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")


def fsdp2(module: torch.nn.Module, *shape: int) -> dict:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh).state_dict()


class Adapted(torch.nn.Module):
    """A linear layer with LoRA matrices of rank 3, named as peft names them."""

    def __init__(self, layer: torch.nn.Linear):
        super().__init__()
        rows, columns = layer.weight.shape
        self.base_layer = layer
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(columns, 3, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(3, rows, bias=False)})


def with_adapters(module: torch.nn.Module) -> torch.nn.Module:
    """Adapters on two layers of every block, equal on all ranks, in the two modules that peft puts around a model."""
    torch.manual_seed(1)
    for block in module.model.layers:
        block.self_attn.q_proj = Adapted(block.self_attn.q_proj)
        block.mlp.down_proj = Adapted(block.mlp.down_proj)
    outer = torch.nn.Module()
    outer.base_model = torch.nn.Module()
    outer.base_model.model = module
    return outer


def fsdp2_with_adapters(module: torch.nn.Module) -> dict:
    outer = with_adapters(module)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(outer, mesh=mesh).state_dict()


def fsdp1(module: torch.nn.Module, *shape: int, kind: StateDictType = StateDictType.SHARDED_STATE_DICT) -> dict:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :]) if shape else None
    strategy = ShardingStrategy.HYBRID_SHARD if len(shape) == 2 else ShardingStrategy.FULL_SHARD
    wrapped = FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), device_mesh=mesh, sharding_strategy=strategy, use_orig_params=False
    )
    with FullyShardedDataParallel.state_dict_type(wrapped, kind):
        return wrapped.state_dict()


def on_rank(rank: int, world: int, port: int, root: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    trained = root / "trained"
    if world == 4:
        save_rank(root / "hsdp" / "actor", fsdp2(load(trained), 2, 2))
        save_rank(root / "fsdp2 of 4" / "actor", fsdp2(load(trained), 4))
        save_rank(root / "fsdp1 hybrid" / "actor", fsdp1(load(trained), 2, 2))
        dist.destroy_process_group()
        return
    save_rank(root / "fsdp2" / "actor", fsdp2(load(trained), 2))
    save_rank(root / "fsdp1" / "actor", fsdp1(load(trained), 2))
    save_rank(root / "flat" / "actor", fsdp1(load(trained), kind=StateDictType.LOCAL_STATE_DICT))
    save_rank(root / "value" / "critic", fsdp2(load(root / "critic", "value"), 2))
    save_rank(root / "moe" / "actor", fsdp2(load(root / "experts"), 2))
    save_rank(root / "lora" / "actor", fsdp2_with_adapters(load(root / "base")))
    for kind, model, folder in (("causal_lm", trained, "ours/actor"), ("value", root / "critic", "our value/critic")):
        spec = EngineSpec(kind, ModelConfig(path=str(model)))
        TorchEngine(spec, FSDP2(spec)).save(root / folder, ("model",))
    dist.destroy_process_group()


def make_checkpoints(root: Path) -> None:
    """Every layout, of the models of `make_models`, each in a folder of its name."""
    torch.set_num_threads(1)
    make_models(root)
    for world in (2, 4):
        mp.start_processes(on_rank, (world, free_port(), root), nprocs=world, start_method="fork")
    base, trained = root / "base", root / "trained"
    worlds = {"fsdp2": 2, "fsdp1": 2, "flat": 2, "hsdp": 4, "fsdp1 hybrid": 4, "fsdp2 of 4": 4}
    for name, world in worlds.items():
        finish(root / name / "actor", trained, base, world, 1 if "1" in name or name == "flat" else 2)
    # a critic whose config is still that of the language model
    finish(root / "value" / "critic", base, base, 2, 2)
    finish(root / "lora" / "actor", base, base, 2, 2)
    finish(root / "moe" / "actor", root / "experts", None, 2, 2)
    make_plain(root)
    one_device = TorchEngine(EngineSpec("causal_lm", ModelConfig(path=str(trained)), optimizer=OptimConfig(lr=1e-3)))
    one_device.save(root / "one device" / "actor", ("model", "optimizer", "extra"))
    for name in ("ours", "one device"):
        char_tokenizer().save_pretrained(root / name / "actor" / "huggingface")


def make_plain(root: Path) -> None:
    """Plain tensors: of one rank, and replicas on two."""
    state = dict(load(root / "trained").state_dict())
    for name, world in (("one rank", 1), ("replicas", 2)):
        actor = root / name / "actor"
        actor.mkdir(parents=True)
        for rank in range(world):
            torch.save(state, actor / f"model_world_size_{world}_rank_{rank}.pt")
        finish(actor, root / "trained", root / "base", world, None)


if __name__ == "__main__":
    make_checkpoints(Path(sys.argv[1]))
