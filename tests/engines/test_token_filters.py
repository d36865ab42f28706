"""Log-probs over the tokens that top-k, top-p and min-p keep: sampling and training compute the same distribution."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from tests.engines.ranks import make_engine, qwen2, run_on_ranks, save_model
from verl.config import load_config
from verl.config.errors import ConfigError
from verl.config.schema import OptimConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching, Objective
from verl.modeling.token_filter import NO_TOKEN, TokenFilter, kept_statistics
from verl.protocol import DataProto
from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout
from verl.rollout.request import SamplingParams, make_requests

FILTERS = [TokenFilter(top_k=3), TokenFilter(top_p=0.7), TokenFilter(min_p=0.6), TokenFilter(20, 0.95, 0.01)]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13], [1, 2, 3]]
NAMES = ("log_probs", "entropys", "sum_pi_squared")
MODELS = {"fused": qwen2(), "generic": GPT2Config(vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=4)}
ENGINES = [(HFRollout, "fused"), (NativeRollout, "fused"), (NativeRollout, "generic")]
MICRO = MicroBatching(rows=2)  # micro-batches that keep different numbers of tokens


@pytest.fixture(scope="module", params=FILTERS, ids=str)
def token_filter(request):
    return request.param


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {name: save_model(config, tmp_path_factory.mktemp(name)) for name, config in MODELS.items()}


def sampled(rollout, token_filter: TokenFilter, temperature: float) -> tuple[DataProto, torch.Tensor]:
    """A batch of responses, and their log-probs (B, T) as the rollout engine reports them."""
    params = SamplingParams(9, (0,), seed=3, temperature=temperature, **vars(token_filter))
    completions = rollout.generate(make_requests(PROMPTS, params))
    batch = DataProto.from_dict(build_sequences(PROMPTS, [c.token_ids for c in completions], pad_token_id=0))
    log_probs = torch.zeros(batch.batch["responses"].shape)
    for row, completion in zip(log_probs, completions):
        row[: len(completion.log_probs)] = torch.tensor(completion.log_probs)
    return batch, log_probs


def in_training(engine, batch: DataProto, temperature: float) -> torch.Tensor:
    """The log-probs of an update, which then moves the weights."""
    seen = torch.zeros(batch.batch["responses"].shape)

    def loss(outputs, columns):
        seen[columns["row"]] = outputs["log_probs"].detach().float()
        return outputs["log_probs"].sum(), {}

    rows = DataProto.from_dict({**batch.tensors, "row": torch.arange(len(batch))})
    engine.train_batch(rows, Objective(loss), MICRO, temperature)
    return seen


@pytest.mark.fast(
    "*top_k=3,*1.0-*HFRollout*",
    "*top_p=0.7,*1.0-*NativeRollout*-fused",
    "*min_p=0.6*0.6-*NativeRollout*-generic",
    "*top_k=20,*-0.6-*NativeRollout*-fused",
    "*top_k=20,*-1.0-*NativeRollout*-generic",
    "*top_p=0.7,*-0.6-*HFRollout*",
)
@pytest.mark.parametrize("rollout, model", ENGINES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_ratio_of_equal_policies_is_1(rollout, model, token_filter, temperature, paths):
    engine = make_engine(paths[model], OptimConfig(lr=1.0))
    kwargs = {"pad_token_id": 0} if rollout is HFRollout else {}
    batch, reported = sampled(rollout(engine.module, **kwargs), token_filter, temperature)
    mask = batch.batch["response_mask"].bool()
    old = engine.infer(batch, NAMES, MICRO, temperature, token_filter)
    assert (reported - old["log_probs"])[mask].exp().sub(1).abs().max() < 2e-5
    full = engine.infer(batch, NAMES, MICRO, temperature)["log_probs"]
    assert (full - old["log_probs"])[mask].min() < -0.03  # what the ratio would be over all tokens
    recorded = DataProto.from_dict(
        {**batch.tensors, **{name: old.pop(name) for name in ("kept_tokens", "kept_counts")}}
    )
    for name, values in engine.infer(recorded, NAMES, MICRO, temperature).items():
        torch.testing.assert_close(values, old[name], atol=2e-6, rtol=0)
    ratio = (in_training(engine, recorded, temperature) - old["log_probs"])[mask].exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-6, rtol=0)
    # after a step that large, the filter would drop tokens that were sampled; the recorded set has them
    before = recorded.tensors
    dropped = sampled_outside(engine, recorded, token_filter, temperature)
    after = engine.infer(recorded, NAMES, MICRO, temperature)
    assert dropped.any() and after["log_probs"][mask].isfinite().all() and (after["log_probs"] <= 0).all()
    torch.testing.assert_close(after["log_probs"].double(), by_hand(engine, before, temperature), atol=1e-4, rtol=1e-4)


def logits_of(engine, row: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
    """(n, V) float64 logits that predict the response tokens of one row."""
    ids = row["input_ids"][row["attention_mask"].bool()]
    count = int(row["response_mask"].sum())
    model = AutoModelForCausalLM.from_pretrained(engine.spec.model.path, attn_implementation="eager").double()
    model.load_state_dict(engine.module.state_dict())
    with torch.no_grad():
        return model(ids[None], use_cache=False).logits[0, -count - 1 : -1] / temperature


def sampled_outside(engine, batch: DataProto, token_filter: TokenFilter, temperature: float) -> torch.Tensor:
    """Whether each sampled token is not among those that the filter of the current policy keeps."""
    outside = []
    for i in range(len(batch)):
        row = {name: values[i] for name, values in batch.tensors.items()}
        kept = token_filter.apply(logits_of(engine, row, temperature))
        outside.append(kept.gather(1, row["responses"][: len(kept), None]).isneginf()[:, 0])
    return torch.cat(outside)


def by_hand(engine, columns: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
    """Log-probs (B, T) over the recorded tokens, one position after another."""
    result = torch.zeros(columns["responses"].shape, dtype=torch.float64)
    for i in range(len(result)):
        row, start = {name: values[i] for name, values in columns.items()}, 0
        for t, logits in enumerate(logits_of(engine, row, temperature)):
            ids = row["kept_tokens"][start : start + row["kept_counts"][t]].tolist()
            start += len(ids)
            assert ids[0] == row["responses"][t] and len(set(ids)) == len(ids)
            result[i, t] = logits[ids[0]] - logits[ids].logsumexp(0)
        assert (row["kept_tokens"][start:] == NO_TOKEN).all()
    return result


def test_the_gradient_is_that_of_the_kept_tokens_by_hand():
    """x = [2, 1, 0, -1, 3] at temperature 0.5, top-k 3 keeps {4, 0, 1}; d log p_y / dx_i = (1[i = y] - p_i) / 0.5."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]] * 2, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 2])  # the filter drops the second one, which counts as kept
    log_probs, entropys, squares, kept = kept_statistics(logits, targets, TokenFilter(top_k=3), 0.5)
    assert kept.tolist() == [[0, 4, 1, NO_TOKEN], [2, 4, 0, 1]]
    e = torch.tensor([4.0, 2.0, 0.0, -2.0, 6.0], dtype=torch.float64).exp()
    p = [e * torch.tensor([1, 1, 0, 0, 1]), e * torch.tensor([1, 1, 1, 0, 1])]
    p = torch.stack([row / row.sum() for row in p])
    torch.testing.assert_close(log_probs, p[[0, 1], targets].log())
    torch.testing.assert_close(entropys, torch.special.entr(p).sum(1))
    torch.testing.assert_close(squares, (p * p).sum(1))
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient, (torch.nn.functional.one_hot(targets, 5) - p) / 0.5)
    (gradient,) = torch.autograd.grad(entropys.sum(), logits)
    log_p = torch.where(p > 0, p, 1).log()
    torch.testing.assert_close(gradient, -p * (log_p + torch.special.entr(p).sum(1, keepdim=True)) / 0.5)


def recorded_on_rank(path: str, batch: DataProto, token_filter: TokenFilter, **keys) -> dict[str, torch.Tensor]:
    engine = make_engine(path, OptimConfig(lr=1e-2), sharded=True, **keys)
    old = engine.infer(batch, ("log_probs",), MICRO, 1.0, token_filter)
    recorded = DataProto.from_dict({**batch.tensors, **old})
    return old | {"again": engine.infer(recorded, ("log_probs",), MICRO)["log_probs"]}


def test_ranks_that_split_a_sequence_record_the_same_tokens(paths):
    batch, _ = sampled(NativeRollout(make_engine(paths["fused"]).module), FILTERS[1], 1.0)
    expected = make_engine(paths["fused"]).infer(batch, ("log_probs",), MICRO, 1.0, FILTERS[1])
    for found in run_on_ranks(2, recorded_on_rank, paths["fused"], batch, FILTERS[1], ulysses_sequence_parallel_size=2):
        for name in ("kept_tokens", "kept_counts"):
            assert torch.equal(found[name], expected[name])
        for name in ("log_probs", "again"):
            torch.testing.assert_close(found[name], expected["log_probs"], atol=2e-6, rtol=1e-5)


def test_an_engine_that_has_no_filters_is_refused_with_the_key():
    keys = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.rollout.top_p=0.9"]
    with pytest.raises(ConfigError, match=r"truncated_log_probs: true, but strategy=megatron computes log-probs over"):
        load_config(overrides=keys)
    load_config(overrides=[*keys, "actor_rollout_ref.rollout.truncated_log_probs=false"])
