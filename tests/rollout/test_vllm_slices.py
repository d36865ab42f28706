"""Pushes into the slices that vLLM stores: what they are, with a stand-in for vLLM's model, and with vLLM the pushes.

Tests of `real` need vLLM: make test-vllm.
"""

import importlib.util
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from tests.engines.ranks import OPTIMIZER, make_batch, make_engine, run_on_ranks, save_model, share_of, train
from verl.config import schema
from verl.engines.base import MicroBatching
from verl.rollout.base import Request, RolloutEnv, SamplingParams, make_rollout_engine
from verl.rollout.vllm.slices import NotSliced, find_slices
from verl.rollout.weight_sync import ReplicaSync, ReshardSync, local_sync

real = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm")
CPU = torch.device("cpu")


# ---- without vLLM ---------------------------------------------------------------------------------------------------

SHAPES = {
    "embed.weight": torch.Size((10, 8)),
    "layer.q_proj.weight": torch.Size((8, 8)),
    "layer.k_proj.weight": torch.Size((4, 8)),
    "layer.v_proj.weight": torch.Size((4, 8)),
    "layer.down_proj.weight": torch.Size((8, 12)),
    "norm.weight": torch.Size((8,)),
}


class Stored(nn.Module):
    """Has slices of SHAPES as vLLM has them: of a padded vocabulary, of q, k and v in one matrix, and of columns."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32, fault: str = ""):
        super().__init__()
        self.rank, self.fault = rank, fault
        shapes = {"embed": (6, 8), "layer.qkv_proj": (8, 8), "layer.down_proj": (8, 6), "norm": (8,)}
        shapes |= {"scale": (2,)} if fault == "another parameter" else {}
        self.layer = nn.Module()
        for name, shape in shapes.items():
            path, _, kind = name.rpartition(".")
            child = nn.Module()
            child.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            self.get_submodule(path).add_module(kind, child)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            kind, r = name.split(".")[-2], self.rank
            if kind == "embed":
                rows = tensor[6 * r : 6 * r + 6]
                self.embed.weight[: len(rows)] = rows
                if self.fault != "padding is kept":
                    self.embed.weight[len(rows) :] = 0
            elif kind == "down_proj":
                own = tensor[:, 6 * r : 6 * r + 6]
                self.layer.down_proj.weight.copy_(own.flip(1) if self.fault == "columns in another order" else own)
            elif kind == "norm":
                self.norm.weight.copy_(tensor + 1 if self.fault == "a sum" else tensor)
            else:
                start, rows = {"q_proj": (0, 4), "k_proj": (4, 2), "v_proj": (6, 2)}[kind]
                own = tensor[rows * r : rows * r + rows]
                if self.fault == "rows in another order":
                    own = own.flip(0)
                self.layer.qkv_proj.weight[start : start + rows] = own


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fault", ["", "rows in another order"])
def test_what_is_written_into_slices_is_what_the_loaders_store(fault, dtype, rank):
    full = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    loaded, written = Stored(rank, dtype, fault), Stored(rank, dtype, fault)
    loaded.load_weights(full.items())
    slices = find_slices(written, SHAPES)
    for parameter in written.parameters():
        parameter.fill_(7)
    for name, tensor in slices.open().items():
        for chunk in slices.layout[name].chunks:
            box, matrix = chunk.box, full[name].view(len(full[name]), -1)
            tensor[chunk.row : chunk.row + box.rows] = matrix[box.top : box.bottom, box.left : box.right]
    for (name, found), expected in zip(written.named_parameters(), loaded.parameters()):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("another parameter", "no parameter of HuggingFace is loaded into vLLM's scale.weight"),
        ("columns in another order", "vLLM's layer.down_proj.weight does not store layer.down_proj.weight as rows"),
        ("padding is kept", "vLLM's embed.weight has rows from 4 that are not loaded"),
        ("a sum", "vLLM's norm.weight"),
    ],
)
def test_models_that_are_not_stored_as_rows_and_columns_are_named(fault, message):
    with pytest.raises(NotSliced, match=message):
        find_slices(Stored(1, fault=fault), SHAPES)


def test_a_parameter_with_other_memory_is_an_error():
    model = Stored(0)
    slices = find_slices(model, SHAPES)
    model.norm.weight = nn.Parameter(torch.zeros(8), requires_grad=False)
    with pytest.raises(ValueError, match=r"vLLM's parameter norm\.weight has other memory than before"):
        slices.open()


# ---- with vLLM ------------------------------------------------------------------------------------------------------

SHAPE = dict(
    vocab_size=97,  # vLLM pads it to a multiple of 64
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
MODELS = {
    "qwen2, tied": (Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen2, one kv head": (Qwen2Config, dict(num_key_value_heads=1, tie_word_embeddings=False)),
    "llama": (LlamaConfig, dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)),
    "qwen3": (Qwen3Config, dict(head_dim=64, tie_word_embeddings=True)),
}


def make_rollout(path: str, rank: int, world: int, tp: int):
    env = RolloutEnv(rank, world, rank, CPU, 0, torch.float32, rank % tp, tp)
    config = schema.RolloutConfig(
        name="vllm", prompt_length=16, response_length=16, max_num_seqs=8, tensor_model_parallel_size=tp
    )
    return make_rollout_engine("vllm", config, schema.ModelConfig(path=path), env)


def parameters_of(rollout) -> dict[str, torch.Tensor]:
    from verl.rollout.vllm.weights import engine_model

    return {name: p.detach().clone() for name, p in engine_model(rollout.llm).named_parameters()}


def greedy(rollout, tp_rank: int) -> list:
    """Tokens and log-probs; empty on the ranks that follow."""
    params = SamplingParams(8, (), temperature=0)
    if tp_rank > 0:
        rollout.follow()
        return []
    with rollout.leading():
        found = rollout.generate([Request(prompt, params, i) for i, prompt in enumerate(([3, 4, 5], [6], [7, 8]))])
    return [(completion.token_ids, completion.log_probs) for completion in found]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not wrong, wrong


def pushes_on_rank(path: str, tp: int) -> dict:
    """For `run_on_ranks`: two updates, each pushed by `reshard` and compared with a push through vLLM's loaders."""
    engine = make_engine(path, OPTIMIZER, sharded=True)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rollout = make_rollout(path, rank, world, tp)
    sync = local_sync("auto", rollout, CPU, bucket_bytes=100_000, has_shards=True)
    assert type(sync) is ReshardSync
    replica, reports, before = ReplicaSync(rollout), [], {}
    for version in range(2):
        reports.append(sync.push(engine, version))
        found, completions = parameters_of(rollout), greedy(rollout, rank % tp)
        replica.push(engine, version)
        expected = parameters_of(rollout)
        assert_same(found, expected)
        assert completions == greedy(rollout, rank % tp)
        assert all(not torch.equal(tensor, before[name]) for name, tensor in expected.items() if before)
        before = expected
        train(engine, share_of(engine, make_batch()), MicroBatching(), steps=1)
    rollout.receiver().release()
    with pytest.raises(ValueError, match="has no weights"):
        rollout.receiver().check_filled()
    stored = sum(tensor.numel() for tensor in rollout.receiver()._slices.open().values()) * 4
    assert all(report.bytes + report.kept == stored for report in reports)
    return {"checksums": [report.checksum for report in reports], "bytes": reports[1].bytes, "stored": stored}


@real
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_slices_are_those_of_a_push_through_the_loaders(model, tp, tmp_path):
    config, keys = MODELS[model]
    path = save_model(config(**SHAPE | keys), tmp_path)
    found = run_on_ranks(2, pushes_on_rank, path, tp)
    assert found[0]["checksums"] == found[1]["checksums"]
