"""The native engine on a GPU, by paged kernels and graphs: the answers of transformers, and of each row alone."""

import gc
import random

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.rollout import test_native_families as families
from tests.rollout import test_native_generic as generic
from tests.rollout import test_speculation as speculation
from tests.rollout.test_continuous import check_abort, make_module, mixed_requests, staggered
from tests.rollout.test_native import one_by_one
from tests.rollout.test_native_families import expected_log_probs
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.model import read_decoder
from verl.rollout.request import Request, SamplingParams, StopStrings, make_requests
from verl.rollout.sampling import filter_logits

always = speculation.always
always = speculation.always
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# prompts that end before, at and after the end of a block of 64 tokens, and one twice
LONG = [[(7 * i + n) % 90 + 3 for i in range(n)] for n in (1, 63, 64, 65, 130)]
LONG.append(LONG[-1])


def model(case: str, dtype: torch.dtype) -> torch.nn.Module:
    module = families.model(case, dtype).cuda()
    module.config.max_position_embeddings = 48 if case == "phi3-longrope" else 300
    return module


@pytest.mark.parametrize("case", families.CASES)
def test_greedy_equals_transformers(case):
    prompts = families.PROMPTS if case == "phi3-longrope" else families.PROMPTS + LONG
    families.check_greedy(model(case, torch.float32), prompts)


def log_prob_gaps(
    engine: NativeRollout, module: torch.nn.Module, prompts: list[list[int]], tokens: int
) -> torch.Tensor:
    """The differences of sampled log-probs from one forward pass over each whole row."""
    answers = engine.generate(make_requests(prompts, SamplingParams(tokens, ())))
    expected = [expected_log_probs(module, prompt, answer.token_ids) for prompt, answer in zip(prompts, answers)]
    return (torch.tensor([p for answer in answers for p in answer.log_probs]) - torch.cat(expected)).abs()


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "gemma2"])
def test_bfloat16_log_probs_are_near_the_forward_pass(case):
    module = model(case, torch.bfloat16)
    gaps = log_prob_gaps(NativeRollout(module), module, families.PROMPTS + LONG, 24)
    assert gaps.mean() < 0.08, "these tiny models have steep logits; real ones are 50 times nearer"


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.7}, {"top_k": 3}], ids=str)
@pytest.mark.parametrize("case", ["qwen2", "gemma2"])
def test_the_most_probable_tokens(case, sampling):
    module, prompts = model(case, torch.float32), families.PROMPTS + LONG
    params = SamplingParams(24, (), top_logprobs=4, prompt_logprobs=2, **sampling)
    for prompt, answer in zip(prompts, NativeRollout(module).generate(make_requests(prompts, params))):
        with torch.no_grad():
            logits = module(torch.tensor([prompt + answer.token_ids], device="cuda")).logits[0].float()
        rows = filter_logits(logits[len(prompt) - 1 : -1], params).log_softmax(-1).topk(4).values.tolist()
        for row, best in zip(rows, answer.top_log_probs, strict=True):
            expected = [value for value in row if value > -torch.inf]
            assert [value for _, value in best] == pytest.approx(expected, abs=2e-3)
        for row, entries in zip(logits.log_softmax(-1), answer.prompt_log_probs[1:]):
            assert [value for _, value, _ in entries] == pytest.approx([row[i].item() for i, *_ in entries], abs=2e-3)


@pytest.fixture(scope="module")
def small() -> torch.nn.Module:
    return make_module(max_position_embeddings=400).cuda()


@pytest.mark.parametrize("case", range(4))
def test_rows_are_what_they_are_alone_whatever_the_blocks(small, case):
    rng = random.Random(case)
    distinct = [[rng.randrange(29) for _ in range(rng.choice([1, 5, 63, 64, 65, 128]))] for _ in range(6)]
    prompts = [rng.choice(distinct) for _ in range(20)]
    limits = [rng.randrange(1, 60) for _ in prompts]
    sample_ids = rng.sample(range(1000), len(prompts))
    params = SamplingParams(60, (3, 7), seed=case, temperature=1.3, top_k=5 if case == 2 else -1)
    expected = one_by_one(small, prompts, params, sample_ids, limits)
    block = 64 * read_decoder(small).cache_bytes_per_token()
    for blocks, max_rows in ((5, None), (17, None), (1000, 3), (1000, None)):
        engine = NativeRollout(small, cache_bytes=blocks * block, max_rows=max_rows)
        for _ in range(2):
            answers = engine.generate(make_requests(prompts, params, sample_ids, limits))
            assert [(a.token_ids, a.finish_reason) for a in answers] == expected, (blocks, max_rows)


def test_garbage_collection_does_not_disturb_a_capture(small, monkeypatch):
    from verl.rollout.native.cuda_decoder import CudaDecoder  # needs triton

    requests = make_requests([[1, 2, 3]] * 3, SamplingParams(8, (), temperature=0))
    threshold, step, held = gc.get_threshold(), CudaDecoder._step, []

    def step_that_leaves_garbage(decoder, *args):
        if held and torch.cuda.is_current_stream_capturing():
            held.clear()
            gc.set_threshold(1)
            [[] for _ in range(100)]  # enough for the collector to run
        return step(decoder, *args)

    monkeypatch.setattr(CudaDecoder, "_step", step_that_leaves_garbage)
    gc.collect()
    gc.set_threshold(10**9)  # what is made from here on stays in the youngest generation
    try:
        unused = NativeRollout(small)
        expected = unused.generate(requests)
        unused.itself = unused  # only the garbage collector can free its graphs
        held.append(unused)
        del unused
        assert NativeRollout(small).generate(requests) == expected
    finally:
        gc.set_threshold(*threshold)
    assert not held


def test_long_rows_alone_split_their_keys_over_programs(small):
    module = small
    module.config.max_position_embeddings = 4000
    prompt = [i % 29 for i in range(3000)]
    answer = NativeRollout(module).generate(make_requests([prompt], SamplingParams(40, ())))[0]
    expected = expected_log_probs(module, prompt, answer.token_ids)
    torch.testing.assert_close(torch.tensor(answer.log_probs).double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [29, 9001])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}], ids=str)
def test_first_tokens_have_the_models_distribution(vocabulary, options):
    torch.manual_seed(0)
    shape = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    module = Qwen2ForCausalLM(Qwen2Config(**shape, vocab_size=vocabulary)).cuda()
    with torch.no_grad():
        module.lm_head.weight.mul_(60)
    count = 20_000
    params = SamplingParams(2, (), **options)
    answers = NativeRollout(module).generate(make_requests([[1, 2]] * count, params))
    with torch.no_grad():
        logits = module(torch.tensor([[1, 2]], device="cuda")).logits[:, -1]
    exact = filter_logits(logits, params)[0].double().softmax(-1).cpu()
    found = torch.bincount(torch.tensor([a.token_ids[0] for a in answers]), minlength=vocabulary).double()
    assert (found[exact == 0] == 0).all()
    often = exact * count > 5
    degrees = int(often.sum()) - 1 + int((~often & (exact > 0)).any())
    chi_square = ((found - exact * count) ** 2 / (exact * count))[often].sum()
    chi_square += (found[~often].sum() - (rest := exact[~often].sum() * count)) ** 2 / rest.clamp_min(1e-9)
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5 + 10
    reported = torch.tensor([a.log_probs[0] for a in answers]).double()
    expected = exact.log()[torch.tensor([a.token_ids[0] for a in answers])]
    torch.testing.assert_close(reported, expected, atol=2e-5, rtol=2e-5)


def test_an_update_and_other_memory_are_seen_by_the_graphs(small):
    engine = NativeRollout(small)
    params = SamplingParams(12, (), temperature=0)
    prompts = [[1, 2, 3], [4, 5]]

    def check() -> list[list[int]]:
        answers = [a.token_ids for a in engine.generate(make_requests(prompts, params))]
        assert answers == [tokens for tokens, _ in one_by_one(small, prompts, params, [0, 1], [12, 12])]
        return answers

    before = check()
    with torch.no_grad():
        small.model.layers[0].mlp.down_proj.weight.mul_(-1)
    assert check() != before
    small.model.layers[0].self_attn.k_proj.weight.data = small.model.layers[0].self_attn.k_proj.weight.data.clone()
    check()
    engine.sleep()
    check()


def test_texts_that_end_a_row_cut_it_there(small):
    prompts = [[i % 29, 3, i % 5] for i in range(40)]
    limits = [50 - i for i in range(40)]
    stop = StopStrings(("ab", "cde", "xy"), lambda ids: "".join(chr(97 + i % 26) for i in ids))
    full = NativeRollout(small).generate(make_requests(prompts, SamplingParams(50, (5,), seed=1), limits=limits))
    expected = []
    for answer in full:
        end = stop.find(answer.token_ids)
        kept = answer.token_ids[:end]
        expected.append((kept, "stop" if end is not None else answer.finish_reason))
    assert {reason for _, reason in expected} == {"stop", "length"}
    params = SamplingParams(50, (5,), seed=1, stop=stop)
    block = 64 * read_decoder(small).cache_bytes_per_token()
    for blocks in (3, 1000):
        engine = NativeRollout(small, cache_bytes=blocks * block)
        answers = engine.generate(make_requests(prompts, params, limits=limits))
        assert [(a.token_ids, a.finish_reason) for a in answers] == expected


def test_broken_weights_name_the_row(small):
    torch.manual_seed(1)
    broken = Qwen2ForCausalLM(small.config).cuda()
    engine = NativeRollout(broken)
    with torch.no_grad():
        broken.model.embed_tokens.weight[5] = float("nan")
    for max_tokens in (1, 200):
        with pytest.raises(ValueError, match=r"row 1 \(sample id 70\).*not finite"):
            engine.generate(make_requests([[1, 2], [1, 5]], SamplingParams(max_tokens, ()), [60, 70], [1, max_tokens]))


def test_float32_masters_with_bfloat16_compute(small):
    engine = NativeRollout(small, dtype=torch.bfloat16)
    assert log_prob_gaps(engine, small, [[1, 2, 3]] * 4, 30).mean() < 0.1
    with torch.no_grad():
        small.lm_head.weight.mul_(0.5)
    assert log_prob_gaps(engine, small, [[1, 2, 3]] * 4, 30).mean() < 0.1, "the copy was not made anew"


# ---- generate_one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("most_yields", [0, 12])
@pytest.mark.parametrize("blocks", [6, 40, None])
def test_requests_that_arrive_over_time_have_the_tokens_of_a_batch(small, blocks, most_yields, graphs):
    block = 64 * read_decoder(small).cache_bytes_per_token()
    requests = mixed_requests(1, 40, lengths=(1, 5, 63, 64, 65, 128), most_tokens=60)
    engine = NativeRollout(small, cache_bytes=None if blocks is None else blocks * block, max_rows=16, graphs=graphs)
    expected = engine.generate(requests)
    assert {completion.finish_reason for completion in expected} == {"stop", "length"}
    for _ in range(2):
        found = staggered(engine, requests, 0, most_yields)
        for a, b in zip(found, expected):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-3)
    assert engine.generate(requests) == expected


def test_longer_requests_wait_for_larger_buffers(small):
    engine = NativeRollout(small, max_rows=8)
    params = SamplingParams(20, (), temperature=0)
    requests = make_requests([[1], [2] * 70, [3], [4] * 200, [5] * 10], params, limits=[5, 20, 100, 20, 60])
    expected = [
        tokens
        for tokens, _ in one_by_one(small, [r.prompt_ids for r in requests], params, range(5), [5, 20, 100, 20, 60])
    ]
    for most_yields in (0, 10):
        found = staggered(engine, requests, 0, most_yields)
        assert [completion.token_ids for completion in found] == expected


def test_abort_keeps_the_tokens_and_leaves_the_others_alone(small):
    check_abort(NativeRollout(small, max_rows=4), 200, yields=6)


def test_samples_with_seeds_of_their_own_share_a_batch(small):
    requests = [Request([1, 2], SamplingParams(12, (), seed=i % 3), i % 5) for i in range(15)]
    found = NativeRollout(small).generate(requests)
    for request, completion in zip(requests, found):
        (alone,) = NativeRollout(small).generate([request])
        assert completion.token_ids == alone.token_ids
    assert len({tuple(completion.token_ids) for completion in found}) == 15


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("sampling", speculation.SAMPLINGS, ids=str)
def test_speculative_answers_are_those_of_plain_decoding(small, always, sampling, graphs):
    requests = speculation.repetitive_requests(sampling, 40, 60)
    for rows in (None, 7):
        engine = NativeRollout(small, lookup=speculation.LOOKUP, max_rows=rows, graphs=graphs)
        for _ in range(2):
            speculation.check_same(NativeRollout(small, max_rows=rows), engine, requests, 2e-4)
            assert 0 < engine.stats.accepted < engine.stats.drafts


@pytest.mark.parametrize("case", ["qwen2-window", "qwen3-moe", "gemma2"])
def test_speculative_answers_of_families(always, case):
    module = model(case, torch.float32)
    requests = speculation.repetitive_requests({"temperature": 0.2})
    speculation.check_same(NativeRollout(module), NativeRollout(module, lookup=speculation.LOOKUP), requests, 2e-4)


@pytest.mark.parametrize("case", speculation.GENERIC)
def test_speculative_answers_without_fused_layers(always, case):
    module = generic.model(case).cuda()
    requests = speculation.repetitive_requests({"temperature": 0.2})
    speculation.check_same(NativeRollout(module), NativeRollout(module, lookup=speculation.LOOKUP), requests, 2e-4)


def test_speculative_answers_with_stop_strings(small, always):
    speculation.check_stop_strings(small)
