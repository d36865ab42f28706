"""Speculative decoding: the tokens, log-probs and distribution of plain decoding, from fewer steps."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from tests.rollout import test_native_families as families
from tests.rollout import test_native_generic as generic
from tests.rollout.test_continuous import make_module
from tests.rollout.test_native_families import expected_log_probs
from verl.config import schema
from verl.rollout.base import RolloutEnv, check_speculation, make_rollout_engine
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.speculation import PromptLookup
from verl.rollout.request import SamplingParams, StopStrings, make_requests
from verl.utils.coroutines import gather_coroutines, run_coroutine

#: of those without fused layers: latents, sinks, a table of positions, cached values that are repeated
GENERIC = ["deepseek_v3", "gpt_oss", "smollm3", "gpt2", "diffllama"]
LOOKUP = PromptLookup(4, 3, 1)
SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 0.3},
    {"temperature": 0.5, "top_k": 3},
    {"temperature": 0.6, "top_p": 0.8, "top_logprobs": 2},
    {"temperature": 0.5, "min_p": 0.2},
]


@pytest.fixture
def always(monkeypatch):
    """Drafts are verified however few are accepted."""
    monkeypatch.setattr(PromptLookup, "pays", lambda *_: True)


def repetitive_requests(sampling: dict, count: int = 12, longest: int = 40) -> list:
    """Prompts that repeat a few tokens, some of them alike, with limits from 1 on."""
    rng = random.Random(1)
    cycles = [[rng.randrange(8, 20) for _ in range(rng.randrange(1, 6))] for _ in range(count)]
    prompts = [rng.choice(cycles) * rng.randrange(1, 5) for _ in range(count)]
    params = SamplingParams(longest, (3, 7), seed=5, **sampling)
    limits = [rng.randrange(1, longest + 1) for _ in prompts]
    return make_requests(prompts, params, rng.sample(range(1000), count), limits)


def check_same(plain: NativeRollout, speculative: NativeRollout, requests: list, tolerance: float = 3e-5) -> None:
    """The answers of two engines agree, and the second one has accepted drafts in fewer steps."""
    expected, found = plain.generate(requests), speculative.generate(requests)
    for request, a, b in zip(requests, expected, found, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), request
        assert b.log_probs == pytest.approx(a.log_probs, abs=tolerance)
        for one, two in zip(a.top_log_probs or (), b.top_log_probs or (), strict=True):
            assert dict(two) == pytest.approx(dict(one), abs=tolerance)
    stats = speculative.stats
    assert stats.tokens == plain.stats.tokens and 0 <= stats.accepted <= stats.drafts
    if speculative.module.device.type == "cpu":  # on a GPU, steps are launched in advance
        assert 0 < stats.accepted < stats.drafts and stats.steps < plain.stats.steps
    assert plain.stats.drafts == 0


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_answers_are_those_of_plain_decoding(always, sampling):
    module, requests = make_module(), repetitive_requests(sampling)
    check_same(NativeRollout(module), NativeRollout(module, lookup=LOOKUP), requests)
    check_same(NativeRollout(module, max_rows=3), NativeRollout(module, lookup=LOOKUP, max_rows=3), requests)


@pytest.mark.parametrize("case", ["qwen2-window", "qwen3-moe", "gemma3"])
def test_families_with_fused_layers(always, case):
    module = families.model(case, torch.float32)
    check_same(NativeRollout(module), NativeRollout(module, lookup=LOOKUP), repetitive_requests({"temperature": 0.2}))


@pytest.mark.parametrize("case", GENERIC)
def test_families_without_fused_layers(always, case):
    module = generic.model(case)
    check_same(NativeRollout(module), NativeRollout(module, lookup=LOOKUP), repetitive_requests({"temperature": 0.2}))


def test_models_with_states_are_refused():
    with pytest.raises(ValueError, match="ngram is not supported for Mamba2ForCausalLM, whose layers have states"):
        NativeRollout(generic.model("mamba2"), lookup=LOOKUP)


def test_greedy_answers_of_200_prompts(always):
    module, some = make_module(), repetitive_requests({"temperature": 0})
    requests = [replace(each, prompt_ids=[*each.prompt_ids, i]) for i in range(17) for each in some]
    check_same(NativeRollout(module), NativeRollout(module, lookup=LOOKUP), requests[:200])


def test_log_probs_are_those_of_a_forward_pass(always):
    module = make_module()
    engine = NativeRollout(module, lookup=LOOKUP)
    prompts = [[5, 6, 7, 5, 6], [9] * 8, [11, 12] * 4]
    for prompt, answer in zip(prompts, engine.generate(make_requests(prompts, SamplingParams(30, ())))):
        expected = expected_log_probs(module, prompt, answer.token_ids)
        assert answer.log_probs == pytest.approx(expected.tolist(), abs=1e-5)
    assert engine.stats.drafts > 20


def test_frequencies_are_the_probabilities_of_the_model(always):
    """Continuations of four tokens, two of them drafts: all 4^4 probabilities by the model itself."""
    vocabulary, rows, temperature, prompt = 4, 8000, 3.0, [1, 2, 3, 0, 1, 2, 3]
    module = make_module(vocab_size=vocabulary).double()
    continuations = list(itertools.product(range(vocabulary), repeat=4))
    ids = torch.tensor([[*prompt, *each] for each in continuations])
    with torch.no_grad():
        log_probs = (module(ids).logits / temperature).log_softmax(-1)[:, len(prompt) - 1 : -1]
    expected = log_probs.gather(2, ids[:, len(prompt) :, None]).sum((1, 2)).exp()
    assert float(expected.sum()) == pytest.approx(1)
    engine = NativeRollout(module.float(), lookup=PromptLookup(2, 3, 1), max_rows=4000)
    answers = engine.generate(make_requests([prompt] * rows, SamplingParams(4, (), temperature=temperature)))
    counts = torch.zeros([vocabulary] * 4)
    for answer in answers:
        counts[tuple(answer.token_ids)] += 1
    assert engine.stats.drafts > rows and 0.1 < engine.stats.accepted / engine.stats.drafts < 0.9
    squares = (counts.flatten() - rows * expected) ** 2 / (rows * expected)
    # chi-square: mean 255, deviation 22.6
    assert 255 - 5 * 22.6 < float(squares.sum()) < 255 + 5 * 22.6


@pytest.mark.parametrize(
    ("sequence", "length", "drafts"),
    [
        ([1, 2, 3, 4, 9, 2, 3], 7, [4, 9, 2]),
        ([1, 2, 3, 5, 2, 3, 6, 2, 3], 9, [6, 2, 3]),  # the latest
        ([1, 2, 3, 7, 9, 3, 8, 2, 3], 9, [7, 9, 3]),  # two tokens before one
        ([4, 5, 4, 5, 4, 0, 0], 5, [5, 4, 5]),  # repeats beyond its end
        ([6, 6, 0, 0], 2, [6, 6, 6]),
        ([1, 2, 3, 4], 4, None),
        ([1, 2, 3, 1, 1], 3, None),  # what follows the sequence is not a part of it
        ([1, 0], 1, None),
    ],
)
def test_drafts(sequence, length, drafts):
    found, exist = PromptLookup(3, 2, 1).propose(torch.tensor([sequence]), torch.tensor([length]))
    assert bool(exist) == (drafts is not None)
    assert drafts is None or found.tolist() == [drafts]


def test_ngrams_below_the_shortest_are_no_match():
    sequence, length = torch.tensor([[3, 4, 1, 3]]), torch.tensor([4])
    assert PromptLookup(2, 3, 1).propose(sequence, length)[1].tolist() == [True]
    assert PromptLookup(2, 3, 2).propose(sequence, length)[1].tolist() == [False]


def test_drafts_are_verified_only_where_it_pays():
    module, lookup = make_module(), PromptLookup(4, 3, 2)
    rng = random.Random(0)
    prompts = [[rng.randrange(20) for _ in range(6)] for _ in range(8)]
    engine = NativeRollout(module, lookup=lookup)
    engine.generate(make_requests(prompts, SamplingParams(40, (), temperature=2.0)))
    assert engine.stats.drafts == 0 and engine.stats.steps == 39
    # one that repeats 3.5 of 4 drafts: 4.5 tokens by a step that costs (400 + 64 * 5) / (400 + 64) of a plain one
    assert lookup.pays(3.5, 64, "cuda") and not lookup.pays(0.5, 64, "cuda")
    assert not lookup.pays(2.0, 1024, "cuda") and not lookup.pays(0.0, 1, "cuda")


def check_stop_strings(module: torch.nn.Module) -> None:
    """Concurrent requests with a stop string end where those of plain decoding do."""
    stop = StopStrings(("k",), lambda ids: "".join(chr(97 + i) for i in ids))
    requests = [
        replace(each, params=replace(each.params, stop=stop)) for each in repetitive_requests({"temperature": 0.3})
    ]

    def answers(engine: NativeRollout) -> list:
        return run_coroutine(gather_coroutines([engine.generate_one(request) for request in requests]))

    expected, found = answers(NativeRollout(module)), answers(NativeRollout(module, lookup=LOOKUP))
    assert [(a.token_ids, a.finish_reason) for a in found] == [(a.token_ids, a.finish_reason) for a in expected]
    assert {a.finish_reason for a in found} == {"stop", "length"}


def test_concurrent_requests_with_stop_strings(always):
    check_stop_strings(make_module())


def test_engines_that_verify_no_drafts():
    check_speculation("native", "ngram")
    check_speculation("vllm", None)
    for name in ("hf", "vllm", "sglang", "custom"):
        with pytest.raises(ValueError, match=f"'ngram', but rollout.name={name} verifies no drafts: use rollout.name"):
            check_speculation(name, "ngram")
    with pytest.raises(ValueError, match="prompt_lookup_min=5: expected at most prompt_lookup_max=4"):
        schema.SpeculativeConfig(prompt_lookup_min=5)


def test_the_engine_of_a_config(tmp_path):
    make_module().save_pretrained(tmp_path)
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5}
    config, model = schema.RolloutConfig(speculative=speculative), schema.ModelConfig(path=str(tmp_path))
    env = RolloutEnv(0, 1, 0, torch.device("cpu"), 0)
    assert make_rollout_engine("native", config, model, env).lookup == PromptLookup(2, 5, 2)
    with pytest.raises(ValueError, match="hf verifies no drafts"):
        make_rollout_engine("hf", config, model, env)
