"""Pushes into the slices that vLLM stores: what they are, with a stand-in for vLLM's model, and with vLLM the pushes.

Tests of `real` need vLLM: make test-vllm.
"""

import importlib.util
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config

from tests.engines.ranks import OPTIMIZER, make_batch, make_engine, run_on_ranks, save_model, share_of, train
from tests.rollout.test_reshard import Holder, Source, row_sharded, sync_of, together
from verl.config import schema
from verl.engines.base import MicroBatching
from verl.rollout.base import RolloutEnv, make_rollout_engine
from verl.rollout.request import Request, SamplingParams
from verl.rollout.vllm.slices import NotSliced, find_slices
from verl.rollout.vllm.weights import VllmSliceReceiver
from verl.utils.shards import Box, Chunk
from verl.weight_sync import ReplicaSync, ReshardSync, local_sync
from verl.weight_sync.reshard import chunk_table

real = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm")
CPU = torch.device("cpu")
ENV = RolloutEnv(0, 1, 0, CPU, 0, torch.float32)


# ---- what is read off the loaders -----------------------------------------------------------------------------------

VOCABULARY = 40_001  # more rows than a digit can number
ATTENTION = "model.layers.0.self_attn."
SHAPES = {"model.embed_tokens.weight": (VOCABULARY, 4), ATTENTION + "q_proj.weight": (8, 4)}
SHAPES |= {ATTENTION + "k_proj.weight": (2, 4), ATTENTION + "v_proj.weight": (2, 4), ATTENTION + "q_proj.bias": (8,)}
SHAPES |= {ATTENTION + "k_proj.bias": (2,), ATTENTION + "v_proj.bias": (2,), ATTENTION + "o_proj.weight": (4, 8)}
SHAPES |= {"model.norm.weight": (4,)}


class Layers(torch.nn.Module):
    """One of two ranks of a model as vLLM stores it: half of the vocabulary, padded to a multiple of 64, half of the 4
    heads for q, the only one for k and v, and half of the columns of o. `spoil` changes what is loaded."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, rank: int, spoil=None):
        super().__init__()
        self.rank, self.spoil = rank, spoil or (lambda model, name: None)
        sizes = {"model.embed_tokens.weight": (20_032, 4), ATTENTION + "qkv_proj.weight": (8, 4)}
        sizes |= {ATTENTION + "qkv_proj.bias": (8,), ATTENTION + "o_proj.weight": (4, 4), "model.norm.weight": (4,)}
        for name, shape in sizes.items():
            *path, kind = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(kind, torch.nn.Parameter(torch.randn(shape).bfloat16(), requires_grad=False))
        self.register_buffer("scale", torch.ones(()))

    def load_weights(self, weights) -> None:
        first = 2 * self.rank
        for name, full in weights:
            layer, _, kind = name.rpartition(".")
            if layer.endswith(("q_proj", "k_proj", "v_proj")):
                stored = self.get_parameter(f"{ATTENTION}qkv_proj.{kind}")
                rows, start, end = {"q": (full[2 * first : 2 * first + 4], 0, 4), "k": (full, 4, 6), "v": (full, 6, 8)}[
                    layer.rpartition(".")[2][0]
                ]
                stored[start:end] = rows
            elif layer.endswith("o_proj"):
                self.get_parameter(name).copy_(full[:, 4 * self.rank : 4 * self.rank + 4])
            elif layer.endswith("embed_tokens"):
                own = full[20_032 * self.rank : 20_032 * (self.rank + 1)]
                self.get_parameter(name)[: len(own)] = own
                self.get_parameter(name)[len(own) :] = 0
            else:
                self.get_parameter(name).copy_(full)
            self.spoil(self, name)


def full_shapes() -> dict[str, torch.Size]:
    return {name: torch.Size(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_slices_are_read_off_the_loaders(rank):
    found = find_slices(Layers(rank), full_shapes()).layout
    boxes = {
        "model.embed_tokens.weight": [Box(0, 20_032, 0, 4), Box(20_032, VOCABULARY, 0, 4)][rank],
        ATTENTION + "q_proj.weight": Box(4 * rank, 4 * rank + 4, 0, 4),
        ATTENTION + "q_proj.bias": Box(4 * rank, 4 * rank + 4, 0, 1),
        ATTENTION + "o_proj.weight": Box(0, 4, 4 * rank, 4 * rank + 4),
        "model.norm.weight": Box(0, 4, 0, 1),
    }
    for kind, columns in (("weight", 4), ("bias", 1)):
        boxes |= {f"{ATTENTION}{part}_proj.{kind}": Box(0, 2, 0, columns) for part in "kv"}
    assert found.keys() == SHAPES.keys() == boxes.keys()
    for name, stored in found.items():
        assert stored.chunks == (Chunk(boxes[name]),) and stored.shape == SHAPES[name]
        assert (stored.rows, stored.columns) == (boxes[name].rows, boxes[name].columns)
        assert stored.dtype == torch.bfloat16


def test_rows_in_another_order_are_slices_too():
    def swap(model, name):
        if name == ATTENTION + "q_proj.weight":
            rows = model.get_parameter(ATTENTION + "qkv_proj.weight")
            rows[:4] = rows[[2, 3, 0, 1]].clone()

    stored = find_slices(Layers(1, swap), full_shapes()).layout[ATTENTION + "q_proj.weight"]
    assert stored.chunks == (Chunk(Box(6, 8, 0, 4)), Chunk(Box(4, 6, 0, 4), row=2))


class Experts(torch.nn.Module):
    """One of two ranks of a layer with 3 experts of width 4, as vLLM's Triton kernels read it: half of the width."""

    NAMES = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, rank: int):
        super().__init__()
        self.rank, self.mlp = rank, torch.nn.Module()
        self.mlp.experts = layer = torch.nn.Module()
        layer.w13_weight = torch.nn.Parameter(torch.randn(3, 4, 6), requires_grad=False)
        layer.w2_weight = torch.nn.Parameter(torch.randn(3, 6, 2), requires_grad=False)
        layer.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name="TRITON"))

    def load_weights(self, weights) -> None:
        own, layer = slice(2 * self.rank, 2 * self.rank + 2), self.mlp.experts
        for name, full in weights:
            _, _, expert, projection, _ = name.split(".")
            if projection == "down_proj":
                layer.w2_weight[int(expert)] = full[:, own]
            else:
                start = 2 * self.NAMES.index(projection)
                layer.w13_weight[int(expert), start : start + 2] = full[own]


@pytest.mark.parametrize("rank", [0, 1])
def test_slices_of_experts(rank):
    shapes = {"mlp.experts.gate_up_proj": torch.Size([3, 8, 6]), "mlp.experts.down_proj": torch.Size([3, 6, 4])}
    found = find_slices(Experts(rank), shapes).layout
    tops = [8 * expert + half + 2 * rank for expert in range(3) for half in (0, 4)]  # gate and up of each
    assert found["mlp.experts.gate_up_proj"].chunks == tuple(
        Chunk(Box(top, top + 2, 0, 6), row=2 * index) for index, top in enumerate(tops)
    )
    assert found["mlp.experts.down_proj"].chunks == (Chunk(Box(0, 18, 2 * rank, 2 * rank + 2)),)


def on(name, change):
    """A `spoil` that changes one of vLLM's parameters after every load."""
    return lambda model, loaded: change(model.get_parameter(name))


def repeat_k(parameter):
    parameter[:2] = parameter[4:6].clone()


SPOILED = {
    "a norm that is stored as weight + 1": (on("model.norm.weight", lambda p: p.add_(1)), "model.norm.weight"),
    "a transposed matrix": (lambda model, name: (
     name.endswith("o_proj.weight") and model.get_parameter(name).copy_(model.get_parameter(name).T.clone()) ),
     "o_proj.weight does not store"),
    "rows that are not loaded": (on(ATTENTION + "qkv_proj.bias", lambda p: p[4:6].fill_(1)), "qkv_proj.bias"),
    "rows in two places": (on(ATTENTION + "qkv_proj.weight", repeat_k), r"rows of .*k_proj\.weight in several places"),
    "padding that is not zero": (on("model.embed_tokens.weight", lambda p: p[-1].fill_(2)),
     r"embed_tokens\.weight has"),
    "scaled values": (on("model.embed_tokens.weight", lambda p: p.mul_(2)), "embed_tokens.weight"),
    "a buffer that is computed": (
        lambda model, name: model.scale.copy_(model.get_parameter("model.norm.weight").float().norm() + 3),
        "compute the buffer scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_not_stored_as_rows_and_columns_is_named(case):
    spoil, message = SPOILED[case]
    with pytest.raises(NotSliced, match=message):
        find_slices(Layers(1, spoil), full_shapes())


def test_parameters_without_a_counterpart_are_named():
    shapes = full_shapes()
    with pytest.raises(NotSliced, match=r"has no parameter for other\.weight"):
        find_slices(Layers(0), shapes | {"other.weight": torch.Size([4])})
    norm = shapes.pop("model.norm.weight")
    with pytest.raises(NotSliced, match=r"no parameter of HuggingFace is loaded into vLLM's model\.norm\.weight"):
        find_slices(Layers(0), shapes)
    with pytest.raises(NotSliced, match=r"o_proj\.weight has shape \(4, 4\), and .*o_proj\.weight has \(4, 6\)"):
        find_slices(Layers(0), shapes | {"model.norm.weight": norm, ATTENTION + "o_proj.weight": torch.Size([4, 6])})
    model = Layers(0)
    model.get_parameter("model.norm.weight").data = torch.zeros(4, dtype=torch.int8)
    with pytest.raises(NotSliced, match=r"model\.norm\.weight is torch\.int8, contiguous"):
        find_slices(model, full_shapes())
    model.get_parameter("model.norm.weight").data = torch.zeros(8).bfloat16()[::2]
    with pytest.raises(NotSliced, match=r"model\.norm\.weight is torch\.bfloat16, not contiguous"):
        find_slices(model, full_shapes())


# ---- pushes into them -----------------------------------------------------------------------------------------------


def receiver_of(model: torch.nn.Module, shapes=full_shapes) -> VllmSliceReceiver:
    """A receiver whose engine is a stand-in. Its calls are in `events`."""
    events: list[str] = []

    def record(name):
        return lambda *args, **kwargs: events.append(name)

    llm = SimpleNamespace(
        collective_rpc=lambda act: [act(SimpleNamespace(get_model=lambda: model))],
        reset_prefix_cache=record("reset"),
    )
    memory = SimpleNamespace(allocate=record("wake"), drop=record("drop"))
    running = [SimpleNamespace(token_ids=[1, 2, 3], versions=[(0, 0)])]
    stepper = SimpleNamespace(exclusive=lambda what, idle=False: nullcontext([] if idle else running))
    engine = SimpleNamespace(stepper=stepper, memory=memory, llm=llm, reads_images=False)
    receiver = VllmSliceReceiver(engine, shapes, filled=False)
    receiver.events, receiver.running = events, running
    return receiver


def trained_model() -> Holder:
    torch.manual_seed(5)
    return Holder({name: torch.randn(shape) for name, shape in SHAPES.items()})


def push(receivers: list[VllmSliceReceiver], trained: Holder, versions: int = 1) -> list:
    def act(rank: int, group):
        (model,) = receivers[rank]._engine.llm.collective_rpc(lambda worker: worker.get_model())
        receivers[rank]._slices = find_slices(model, full_shapes())
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)  # as after vLLM has discarded the weights
        sync = sync_of(receivers[rank], group, 4000)
        return [sync.push(Source(trained, row_sharded, rank, 2), version) for version in range(1, versions + 1)]

    return together(2, act)


def test_a_push_stores_what_the_loaders_store():
    trained, models = trained_model(), [Layers(rank) for rank in range(2)]
    receivers = [receiver_of(model) for model in models]
    reports = push(receivers, trained, versions=2)
    for rank, (receiver, model) in enumerate(zip(receivers, models)):
        expected = Layers(rank)
        with torch.no_grad():
            expected.load_weights((name, p.bfloat16()) for name, p in trained.named_parameters())
        assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))
        assert receiver.filled and receiver.events == ["wake", "reset"] * 2
        assert receiver.running[0].versions == [(0, 0), (3, 1), (3, 2)]
        assert reports[rank][1].bytes > 0 and reports[rank][1].version == 2


def test_a_slice_that_is_not_written_is_named(monkeypatch):
    models, copy = [Layers(rank) for rank in range(2)], chunk_table.copy_chunks
    receivers = [receiver_of(model) for model in models]
    skipped = {model.get_parameter(ATTENTION + "qkv_proj.bias")[4:].data_ptr() for model in models}  # k

    def forget(targets, sources):
        kept = [i for i, target in enumerate(targets) if target.data_ptr() not in skipped]
        copy([targets[i] for i in kept], [sources[i] for i in kept])

    monkeypatch.setattr(chunk_table, "copy_chunks", forget)
    for error in push(receivers, trained_model()):
        assert isinstance(error, ValueError) and "weights of version 1 were not loaded: 2 slices differ" in str(error)
        assert f"{ATTENTION}k_proj.bias on rank 0" in str(error)
    for receiver in receivers:
        with pytest.raises(ValueError, match="has no weights"):
            receiver.check_filled()
        assert receiver.events == ["wake", "reset"]  # the engine is not left in the middle of a push


def test_a_parameter_with_other_memory_is_not_written_in_silence():
    model = Layers(0)
    slices = find_slices(model, full_shapes())
    norm = model.get_parameter("model.norm.weight")
    norm.data = norm.data.clone()
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight has other memory than before the first push: set .*replica"
    ):
        slices.writable()


@pytest.mark.parametrize("name", [ATTENTION + "k_proj.weight", ATTENTION + "q_proj.bias", "model.norm.weight"])
def test_a_parameter_that_the_loaders_skip_is_named_by_the_comparison(name):
    model, trained = Layers(0), trained_model()
    receiver, load = receiver_of(model), model.load_weights
    sync = ReplicaSync(SimpleNamespace(receiver=lambda: receiver, weight_version=None), check_every=2)
    source = SimpleNamespace(weights=trained.named_parameters)
    sync.push(source, 1)
    model.load_weights = lambda weights: load((n, tensor) for n, tensor in weights if n != name)
    with torch.no_grad():
        trained.get_parameter(name).mul_(2)
    sync.push(source, 3)  # not compared
    with pytest.raises(ValueError, match=rf"version 4 were not loaded: .*, 1 of 9 param.* first \['{name}'\]"):
        sync.push(source, 4)
    assert not receiver.filled


def test_weights_are_loaded_if_the_slices_cannot_be_found(caplog):
    receiver = receiver_of(Layers(0, on("model.norm.weight", lambda p: p.add_(1))))
    receiver.receive(trained_model().named_parameters(), 1)
    assert receiver.filled and receiver.stored("model.norm.weight") is None
    assert "pushed weights are not compared with what vLLM stores: vLLM's model.norm.weight" in caplog.text


@pytest.mark.parametrize("spoil", [None, on("model.norm.weight", lambda p: p.add_(1))])
def test_auto_chooses_reshard_where_slices_can_be_written(spoil, monkeypatch, caplog):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, own: found.__setitem__(1, own))
    receiver = receiver_of(Layers(0, spoil))
    engine = SimpleNamespace(receiver=lambda: receiver)
    with caplog.at_level(logging.WARNING, "verl.rollout"):
        sync = local_sync("auto", engine, CPU, bucket_bytes=1, has_shards=True)
    if spoil is None:
        assert type(sync) is ReshardSync and sync.bandwidth > 0 and not caplog.messages
        return
    assert type(sync) is ReplicaSync
    assert caplog.messages[0].startswith(
        "rollout.weight_sync=auto: replica instead of reshard: vLLM's model.norm.weight"
    )
    with pytest.raises(ValueError, match=r"weight_sync=reshard: .* because vLLM's model\.norm\.weight .*: use"):
        local_sync("reshard", engine, CPU, bucket_bytes=1, has_shards=True)
    receiver.events.clear()
    assert type(local_sync("replica", engine, CPU, bucket_bytes=1, has_shards=True)) is ReplicaSync
    assert not receiver.events  # nothing is loaded


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
    "phi3": (Phi3Config, dict(tie_word_embeddings=False)),  # fused in training too
    "phi3, one kv head": (Phi3Config, dict(num_key_value_heads=1, tie_word_embeddings=False)),
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


def discard(rollout) -> None:
    """As in sleep mode, which a CPU does not have: the memory is another one's afterwards."""
    from verl.rollout.vllm.weights import engine_model

    rollout.receiver().release()
    for parameter in engine_model(rollout.llm).parameters():
        parameter.data.fill_(torch.nan)


def pushes_on_rank(path: str, tp: int) -> dict:
    """For `run_on_ranks`: two updates, each pushed by `reshard` and compared with a push through vLLM's loaders."""
    engine = make_engine(path, OPTIMIZER, sharded=True)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rollout = make_rollout(path, rank, world, tp)
    sync = local_sync("auto", rollout, CPU, bucket_bytes=100_000, has_shards=True)
    assert type(sync) is ReshardSync
    replica, reports, before = ReplicaSync(rollout), [], {}
    for version in range(2):
        discard(rollout)
        reports.append(sync.push(engine, version))
        found, completions = parameters_of(rollout), greedy(rollout, rank % tp)
        replica.push(engine, version)
        expected = parameters_of(rollout)
        assert_same(found, expected)
        assert completions == greedy(rollout, rank % tp)
        assert all(not torch.equal(tensor, before[name]) for name, tensor in expected.items() if before)
        before = expected
        train(engine, share_of(engine, make_batch()), MicroBatching(), steps=1)
    stored = sum(tensor.numel() for tensor in rollout.receiver()._slices.writable().values()) * 4
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """An engine on one device, and the training engine, which is not sharded."""
    path = save_model(Qwen2Config(**SHAPE | {"tie_word_embeddings": True}), tmp_path_factory.mktemp("model"))
    config = schema.RolloutConfig(name="vllm", prompt_length=16, response_length=200, max_num_seqs=8)
    return make_rollout_engine("vllm", config, schema.ModelConfig(path=path), ENV), make_engine(path, OPTIMIZER)


@real
def test_one_device_copies_its_parameters(alone):
    rollout, engine = alone
    sync = local_sync("auto", rollout, CPU, bucket_bytes=100_000, has_shards=engine.shard_layout() is not None)
    assert type(sync) is ReshardSync
    report = sync.push(engine, 1)
    found, completions = parameters_of(rollout), greedy(rollout, 0)
    assert report.bytes == sum(tensor.nbytes for _, tensor in engine.weights()) and report.kept == 0
    assert report.bandwidth > 0
    ReplicaSync(rollout).push(engine, 1)
    assert_same(found, parameters_of(rollout))
    assert completions == greedy(rollout, 0)
