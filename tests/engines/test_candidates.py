"""Log-probs of several tokens per position: the most probable ones, and those of a column, with their gradient."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.ranks import FLOAT64, VOCABULARY, make_engine, qwen2, run_on_ranks, save_model
from verl.config.schema import OptimConfig
from verl.data.sequences import build_sequences
from verl.engines.base import NUM_CANDIDATES, MicroBatching, Objective
from verl.modeling import log_probs
from verl.protocol import DataProto

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13]]
RESPONSES = [[3, 4, 5, 6], [7], [8, 9, 10, 11, 12, 13], [14, 15]]
K, TEMPERATURE = 5, 0.7


def make_batch(**meta_info) -> DataProto:
    return DataProto.from_dict(build_sequences(PROMPTS, RESPONSES, pad_token_id=0), meta_info=meta_info)


def logits_by_row(model: torch.nn.Module) -> list[torch.Tensor]:
    """(tokens, V) of each response, row by row with the model's own forward pass."""
    rows = []
    for prompt, response in zip(PROMPTS, RESPONSES):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        rows.append((logits / TEMPERATURE).log_softmax(-1))
    return rows


def top_on_rank(path: str) -> dict[str, torch.Tensor]:
    engine = make_engine(path, sharded=True)
    batch = make_batch(**{NUM_CANDIDATES: K})
    return engine.infer(batch, ("candidate_log_probs", "candidate_ids"), MicroBatching(rows=2), TEMPERATURE)


def check_top(outputs: dict[str, torch.Tensor], path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    for row, expected in enumerate(logits_by_row(model)):
        values, ids = expected.detach().topk(K)
        assert torch.equal(outputs["candidate_ids"][row, : len(ids)], ids)
        assert torch.allclose(outputs["candidate_log_probs"][row, : len(ids)].double(), values, atol=2e-5)
        assert not outputs["candidate_log_probs"][row, len(ids) :].any()  # padding


@pytest.mark.parametrize("packed", [True, False])
def test_the_most_probable_tokens_equal_the_model_row_by_row(packed, tmp_path, monkeypatch):
    path = save_model(qwen2(), tmp_path)
    engine, names = make_engine(path, use_remove_padding=packed), ("log_probs", "candidate_log_probs", "candidate_ids")
    for chunk in (2**24, 3 * VOCABULARY):
        monkeypatch.setitem(log_probs.CHUNK_ELEMENTS, "cpu", chunk)
        for micro in (MicroBatching(), MicroBatching(rows=1), MicroBatching(tokens=9)):
            check_top(engine.infer(make_batch(**{NUM_CANDIDATES: K}), names, micro, TEMPERATURE), path)


@pytest.mark.slow
def test_so_do_those_of_two_ranks(tmp_path):
    path = save_model(qwen2(), tmp_path)
    for outputs in run_on_ranks(2, top_on_rank, path):
        check_top(outputs, path)


@pytest.mark.parametrize("chunk", [2**24, 3 * VOCABULARY], ids=["one chunk", "recomputed chunks"])
def test_the_gradient_is_that_of_the_model(chunk, tmp_path, monkeypatch):
    """Of a weighted sum of log-probs of any tokens, one of them the sampled one, in float64."""
    path = save_model(qwen2(), tmp_path)
    generator = torch.Generator().manual_seed(0)
    batch = make_batch()
    shape = (*batch.batch["responses"].shape, K)
    ids = torch.randint(VOCABULARY, shape, generator=generator)
    ids[..., 0] = batch.batch["responses"]
    weights = torch.randn(shape, generator=generator).double()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    rows = enumerate(logits_by_row(model))
    picked = [(x.gather(-1, ids[row, : len(x)]) * weights[row, : len(x)]).sum() for row, x in rows]
    sum(picked).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    monkeypatch.setitem(log_probs.CHUNK_ELEMENTS, "cpu", chunk)
    monkeypatch.setattr(log_probs, "KEPT_BYTES", 0)

    def loss(outputs, columns):
        return (outputs["candidate_log_probs"] * columns["weights"]).sum(), {}

    for micro in (MicroBatching(), MicroBatching(rows=1)):
        engine = make_engine(path, OptimConfig(clip_grad=1e9), **FLOAT64)
        engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
        before = copy.deepcopy(dict(engine.module.named_parameters()))
        columns = batch.replace(candidate_ids=ids, weights=weights)
        engine.train_batch(columns, Objective(loss, ("candidate_log_probs",)), micro, TEMPERATURE)
        for name, p in engine.module.named_parameters():
            torch.testing.assert_close(before[name] - p, expected[name], rtol=1e-4, atol=1e-6)  # rotary in float32


def test_without_candidates_they_are_no_output():
    states, targets = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="expected outputs out of log_probs, entropys, sum_pi_squared, found"):
        log_probs.token_statistics(states, targets, lambda x: x, 3, ("candidate_log_probs",))
