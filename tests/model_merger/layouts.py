"""Checkpoints to merge, written by this project's engines, on one device and on real ranks (gloo).

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


def on_rank(rank: int, world: int, port: int, root: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    models = {"ours/actor": ("causal_lm", "trained"), "our value/critic": ("value", "critic")}
    for folder, (kind, model) in models.items():
        spec = EngineSpec(kind, ModelConfig(path=str(root / model)))
        TorchEngine(spec, FSDP2(spec)).save(root / folder, ("model",))
    dist.destroy_process_group()


def make_checkpoints(root: Path) -> None:
    """Every layout, of the models of `make_models`, each in a folder of its name."""
    torch.set_num_threads(1)
    make_models(root)
    mp.start_processes(on_rank, (2, free_port(), root), nprocs=2, start_method="fork")
    one_device = TorchEngine(
        EngineSpec("causal_lm", ModelConfig(path=str(root / "trained")), optimizer=OptimConfig(lr=1e-3))
    )
    one_device.save(root / "one device" / "actor", ("model", "optimizer", "extra"))
    for name in ("ours", "one device"):
        char_tokenizer().save_pretrained(root / name / "actor" / "huggingface")
        config = root / name / "actor" / "huggingface" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"_name_or_path": str(root / "base")}))
    shutil.copytree(root / "experts", root / "moe" / "actor" / "huggingface")


if __name__ == "__main__":
    make_checkpoints(Path(sys.argv[1]))
