"""`enable_gradient_checkpointing=auto` with strategy=megatron: what fits is kept, what does not is recomputed."""

import copy
from types import SimpleNamespace

import pytest
from torch.autograd.graph import saved_tensors_hooks

from tests.engines.megatron_cpu import skip_reason

if reason := skip_reason():
    pytest.skip(reason, allow_module_level=True)

from tests.engines.megatron_cpu.ranks import MODELS, TWO_ROWS, megatron_engine
from tests.engines.ranks import make_batch, run_on_ranks, save_model, train
from verl.engines.megatron import memory
from verl.engines.megatron.memory import AutoRecompute
from verl.engines.token_budget import SHARE


def saved(model, folder, vocabulary=101) -> str:
    """The path of a model whose vocabulary is no other width of it: logits are recognized by theirs."""
    config = copy.deepcopy(MODELS[model])
    config.vocab_size = vocabulary
    return save_model(config, folder)


def saved_bytes(auto: AutoRecompute, tokens: int) -> int:
    """Bytes behind the tensors that autograd saves in a forward pass of a stage, without parameters and logits."""
    (chunk,) = auto.chunks
    known = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    found: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.shape[-1] != chunk.vocab_size // auto.ranks.t_size:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        alive = auto.probe_forward(chunk, tokens)
    del alive
    return sum(found.values())


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_the_bytes_of_a_token_and_the_tokens_that_fit(model, tmp_path):
    engine = megatron_engine(saved(model, tmp_path))
    auto = AutoRecompute(engine.chunks, engine.ranks, None)
    assert not auto.is_needed(tokens=100, micro_batches=3, free=2**40)
    kept = saved_bytes(auto, 800) - saved_bytes(auto, 400)
    assert 400 * auto.per_token == pytest.approx(kept, rel=0.02)
    layers = len(engine.chunks[0].decoder.layers)
    for tokens in (100, 5000):  # of one micro-batch, and twice a layer for its backward pass
        free = tokens * auto.per_token * (1 + 2 / layers) / SHARE
        assert not auto.is_needed(tokens, micro_batches=3, free=int(1.001 * free))
        assert auto.is_needed(tokens, micro_batches=3, free=int(0.999 * free))
    auto.set(True)
    assert saved_bytes(auto, 800) - saved_bytes(auto, 400) < kept / layers
    auto.set(False)
    assert saved_bytes(auto, 800) - saved_bytes(auto, 400) == kept


def kept_on_rank(path, **keys):
    """Bytes of a token, and whether 1, 2 and 8 micro-batches of 1,000 tokens need more than 2.5 times those of one."""
    engine = megatron_engine(path, **keys)
    auto = AutoRecompute(engine.chunks, engine.ranks, engine._sequence_ranks)
    auto.is_needed(1000, 1, 2**40)
    free = int(2.5 * 1000 * auto.per_token / SHARE)
    return auto.per_token, [auto.is_needed(1000, micro_batches, free) for micro_batches in (1, 2, 8)]


def test_stages_keep_the_micro_batches_that_are_ahead(tmp_path):
    """The first stage keeps two micro-batches, the last one; a layer in its backward pass needs as much as one."""
    path = saved("deep", tmp_path)
    (first, needed), (second, needed_of_second) = run_on_ranks(2, kept_on_rank, path, p=2)
    (whole, _), *_ = run_on_ranks(1, kept_on_rank, path)
    # the last stage also keeps what the final norm and the output layer need
    assert first < second and first + second == pytest.approx(whole, rel=0.05)
    assert needed == [False, True, True] and needed_of_second == [False, False, False]


@pytest.mark.parametrize(
    ("stage", "stages", "chunks", "expected"),
    # of 4 stages with two chunks each, the first runs 2 x 3 + 4 chunks before a backward pass, and one more with it
    [(0, 4, 1, 4), (3, 4, 1, 1), (0, 4, 2, 5.5), (3, 4, 2, 2.5), (0, 1, 1, 1)],
)
def test_micro_batches_in_flight(stage, stages, chunks, expected):
    auto = AutoRecompute(
        [SimpleNamespace(config=SimpleNamespace())] * chunks, SimpleNamespace(p=stage, p_size=stages), None
    )
    assert auto._in_flight() == expected


def test_tensor_parallel_ranks_keep_half(tmp_path):
    """With sequence parallelism, all but the inputs of the output layer and the rotary embedding is split."""
    path = saved("llama", tmp_path, vocabulary=2001)  # one rank has an entry less
    (whole, _), *_ = run_on_ranks(1, kept_on_rank, path)
    for bytes_of_token, _ in run_on_ranks(2, kept_on_rank, path, t=2):
        assert 0.5 * whole <= bytes_of_token < 0.58 * whole


def test_the_choice_of_each_update_is_logged_when_it_changes(tmp_path, caplog, monkeypatch):
    engine = megatron_engine(saved("llama", tmp_path))
    auto = AutoRecompute(engine.chunks, engine.ranks, None)
    free = iter([2**40, 2**40, 2**10])
    monkeypatch.setattr(memory, "free_bytes", lambda device: next(free))
    monkeypatch.setattr(memory, "bytes_beside_activations", lambda *_: 0)
    chosen = []
    with caplog.at_level("INFO", "verl.engines"):
        for _ in range(3):
            auto.choose([100, 90], engine.optimizer, engine.max_over_ranks)
            chosen.append(engine.config.recompute_granularity)
    assert chosen == [None, None, "full"]
    kept, recomputed = (record.getMessage() for record in caplog.records)
    assert kept == "activations are kept in an update" and recomputed == "activations are recomputed in an update"


@pytest.mark.parametrize("sharded", [True, False])
def test_moments_are_counted_until_the_first_step_allocates_them(sharded, tmp_path):
    path = save_model(MODELS["llama"], tmp_path, "value")
    engine = megatron_engine(path, kind="value", use_distributed_optimizer=sharded)  # no logits
    parameters = sum(p.numel() for chunk in engine.chunks for p in chunk.parameters())
    assert memory.bytes_beside_activations(engine.chunks, engine.optimizer, engine.device) == 2 * 4 * parameters
    train(engine, make_batch(), TWO_ROWS, steps=1)
    assert memory.bytes_beside_activations(engine.chunks, engine.optimizer, engine.device) == 0
