"""The sharded engine on real processes (gloo): the numbers of one device, on 1, 2 and 4 ranks."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching, OptimizerConfig
from verl.engines.fsdp import FSDPEngine, ShardingConfig
from verl.engines.hf import HFEngine
from verl.engines.model import ModelConfig
from verl.protocol import DataProto
from verl.single_controller.worker import free_port
from verl.workers.objectives import aggregation, policy_objective

CONFIG = Qwen2Config(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
ROWS = 8
SETTINGS = {
    "clip_ratio": 0.2,
    "entropy_coeff": 0.01,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "low_var_kl",
}


def make_batch() -> DataProto:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (ROWS, 2), generator=generator).tolist()
    ids = [[torch.randint(1, 32, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    columns = build_sequences([p for p, _ in ids], [r for _, r in ids], pad_token_id=0)
    shape = columns["responses"].shape
    noise = {name: torch.randn(shape, generator=generator) for name in ("old_log_probs", "advantages", "ref_log_prob")}
    return DataProto.from_dict(columns | {k: v * 0.1 - 3.4 if "log" in k else v for k, v in noise.items()})


def train(engine: HFEngine, batch: DataProto, micro: MicroBatching, steps: int = 2) -> dict[str, float]:
    metrics = {}
    for _ in range(steps):
        agg = aggregation("token-mean", batch.batch["response_mask"], engine, None)
        metrics = engine.train_batch(batch, policy_objective("vanilla", SETTINGS, agg), micro)
        engine.lr_step()
    return metrics


OPTIMIZER = OptimizerConfig(lr=1e-2, lr_scheduler_type="cosine", total_training_steps=9)


def on_rank(
    rank: int, world: int, port: int, path: str, out: str, sharding: ShardingConfig, resume: str | None
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    engine = FSDPEngine(ModelConfig(path), OPTIMIZER, sharding)
    if resume:
        engine.load(Path(resume), ("model", "optimizer", "extra"))
    batch = make_batch()[rank * (ROWS // world) : (rank + 1) * (ROWS // world)]
    # budgets that cut the ranks into different numbers of micro-batches
    metrics = train(engine, batch, MicroBatching(tokens=18))
    log_probs = engine.infer(batch, ("log_probs",), MicroBatching(tokens=18))["log_probs"]
    engine.save(Path(out) / "ckpt", ("model", "optimizer", "extra", "hf_model"))
    weights = dict(engine.weights())
    torch.save({"weights": weights, "metrics": metrics, "log_probs": log_probs}, Path(out) / f"rank{rank}.pt")
    dist.destroy_process_group()


def run_ranks(world: int, path: str, out: Path, sharding: ShardingConfig, resume: str | None = None) -> list[dict]:
    out.mkdir()
    mp.spawn(on_rank, (world, free_port(), path, str(out), sharding, resume), nprocs=world)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("world", "sharding"),
    [
        (2, ShardingConfig()),
        (4, ShardingConfig(fsdp_size=2, reshard_after_forward=False)),
    ],
)
def test_ranks_give_the_numbers_of_one_device(world, sharding, path, tmp_path):
    alone = HFEngine(ModelConfig(path), OPTIMIZER)
    batch = make_batch()
    expected = train(alone, batch, MicroBatching())
    expected_log_probs = alone.infer(batch, ("log_probs",), MicroBatching())["log_probs"]
    ranks = run_ranks(world, path, tmp_path / "out", sharding)
    for rank in ranks:
        for name, value in alone.weights():
            assert torch.allclose(rank["weights"][name], value, rtol=1e-5, atol=2e-5), name
        assert rank["metrics"]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    total, count = (sum(r["metrics"]["actor/ppo_kl"][i] for r in ranks) for i in (0, 1))
    assert total / count == pytest.approx(expected["actor/ppo_kl"][0] / expected["actor/ppo_kl"][1], rel=1e-4)
    found = torch.cat([r["log_probs"] for r in ranks])
    assert torch.allclose(found, expected_log_probs, atol=1e-4)


def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_is_a_huggingface_model(path, tmp_path):
    run_ranks(2, path, tmp_path / "two", ShardingConfig())
    resumed = run_ranks(1, path, tmp_path / "one", ShardingConfig(), resume=str(tmp_path / "two" / "ckpt"))[0]
    straight = HFEngine(ModelConfig(path), OPTIMIZER)
    train(straight, make_batch(), MicroBatching(), steps=4)
    for name, value in straight.weights():
        assert torch.allclose(resumed["weights"][name], value, rtol=1e-5, atol=5e-5), name
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "ckpt" / "huggingface")
    for name, value in exported.named_parameters():
        assert torch.equal(value, resumed["weights"][name]), name
