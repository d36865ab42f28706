"""The contract of `RolloutEngine`, for every registered engine on the same tiny model.

Bounds of log-probs in float32: 2e-5 on a CPU (2e-4 for the model of VERL_CONTRACT_MODEL); 2e-2 on a GPU, where
attention kernels of vLLM round to TF32. Twice as much after top-k, top-p and min-p (`test_filter_bounds.py`), and
with a real model more where float32 itself is less exact (`Setup.bounds`). In another dtype every engine is compared
with the model in float32 with the same weights, which that dtype represents exactly; the bound is twice the largest
error of transformers' own model in that dtype, over many positions and the whole vocabulary (`rounding`), since engines
round in another order.

Environment: VERL_CONTRACT_DEVICE=cuda runs on a GPU; VERL_CONTRACT_DTYPE=bf16 runs in bfloat16;
VERL_CONTRACT_ENGINES=vllm,native only those engines; VERL_CONTRACT_MODEL=folder uses that model (such as SmolLM2-135M)
instead of the tiny ones; VERL_CONTRACT_KWARGS are the `engine_kwargs` of the engines with a package of their own, in
JSON.
"""

import asyncio
import copy
import importlib.util
import math
import threading
from dataclasses import replace

import pytest
import torch

from benchmarks import faults
from tests.rollout.contract import (
    CHOSEN,
    DEFAULTS,
    DEVICE,
    FAMILIES,
    IS_FLOAT32,
    IS_ROUNDED,
    IS_SEEDED,
    MODEL,
    NAMES,
    PACKAGES,
    PROMPTS,
    PUSHED_BETWEEN_STEPS,
    SCALE,
    STEPPING,
    Run,
    Setup,
    Shared,
    kept,
    save_model,
)
from verl.rollout.request import Completion, Request, SamplingParams, StopStrings, make_requests
from verl.trainer.ppo.canary import StaleWeightsError
from verl.weight_sync import SlicedWeights


def cases() -> list:
    """Engine and family. Engines in this package are tested with many models elsewhere: here with one."""
    families = ["real"] if MODEL else [*FAMILIES]
    # experts first: vLLM makes the group of expert parallelism for its first engine of a process, or not at all
    found = [f"{name}-{f}" for name in NAMES for f in (families[::-1] if name in PACKAGES else families[:1])]
    # "fake" is the reference that shows that the tests can pass: no code of the package
    return [pytest.param(case, marks=pytest.mark.slow) if case.startswith("fake-") else case for case in found]


@pytest.fixture(scope="module", params=cases())
def made(request, tmp_path_factory) -> Setup:
    name, family = request.param.split("-")
    if CHOSEN is not None and name not in CHOSEN.split(","):
        pytest.skip("not in VERL_CONTRACT_ENGINES")
    if name == "sglang" and CHOSEN is None:
        pytest.skip("opt-in: VERL_CONTRACT_ENGINES=sglang")
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{name} is not installed: make test-{name}")
    return Setup(name, MODEL or save_model(family, tmp_path_factory.mktemp("model")))


# ---- tokens and log-probs -------------------------------------------------------------------------------------------


def test_greedy_tokens_are_the_most_likely_ones(made):
    for prompt, answer in zip(PROMPTS, made.answers(temperature=0.0)):
        logits = made.logits(prompt, answer)
        best = logits.max(-1).values
        chosen = logits[range(len(answer.token_ids)), answer.token_ids]
        assert (best - chosen).max() <= made.bound, "a token less likely than another"
        if DEVICE == "cpu" and IS_FLOAT32:
            assert answer.token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7, 1.6])
def test_log_probs_are_the_trainers(made, temperature):
    answers = made.answers(temperature=temperature, seed=3)
    for answer, expected in zip(answers, made.trainers(answers, temperature or 1.0)):
        assert answer.log_probs == pytest.approx(expected, abs=made.bound)
        assert len(answer.token_ids) == 24 and answer.finish_reason == "length"


def test_the_models_own_settings_are_not_read(made):
    """`DEFAULTS`, by an engine with the trainer's module, which has read them; every other test has them in a file."""
    if made.name not in ("hf", "native") or MODEL:
        pytest.skip("has a copy of the weights")
    assert made.module.generation_config.repetition_penalty == DEFAULTS["repetition_penalty"]
    engine = made.make(Shared(made.module))
    answers = engine.generate(make_requests(PROMPTS, SamplingParams(24, (), seed=3)))
    for answer, expected in zip(answers, made.trainers(answers)):
        assert answer.log_probs == pytest.approx(expected, abs=made.bound)
        assert len(answer.token_ids) == 24 and answer.finish_reason == "length"


@pytest.mark.parametrize("wrong", ["temperature", "weights"])
def test_the_bound_is_exceeded_by(made, wrong):
    """Log-probs of another temperature and of the weights before a push."""
    answers = made.answers(temperature=1.0, seed=3)
    right = torch.tensor(made.trainers(answers))
    if wrong == "temperature":
        other = torch.tensor(made.trainers(answers, 0.7))
    else:
        with made.scaled():
            other = torch.tensor(made.trainers(answers))
    assert ((right - other).abs() > 2 * made.bound).float().mean() > 0.1


@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_filtered_distribution(made, filters, temperature):
    """Within twice the bound: errors of the token and of the mass of the kept tokens add up. Which tokens at the edge
    of the filter are kept depends on rounding, so the mass is between that of the fewest and of the most tokens."""
    answers = made.answers(temperature=temperature, **filters, max_tokens=12)
    for prompt, answer in zip(PROMPTS, answers):
        bounds = made.bounds(prompt, answer, temperature)
        rows = zip(made.logits(prompt, answer), answer.token_ids, answer.log_probs, bounds, strict=True)
        for logits, token, log_prob, bound in rows:
            most, least = (kept(logits / temperature, sign * bound, **filters) for sign in (1, -1))
            assert token in most, "a token outside of the filter"
            low, high = (math.log(most[token] / sum(tokens.values())) for tokens in (most, least))
            assert low - 2 * bound <= log_prob <= high + 2 * bound


def test_random_numbers_depend_on_seed_and_sample_id_only(made):
    if made.name == "sglang" and not IS_SEEDED:
        pytest.skip("needs enable_deterministic_inference, which SGLang has on GPUs only")
    if IS_ROUNDED:
        pytest.skip("tokens depend on rounding")
    params = SamplingParams(16, (), seed=5)
    ids = [10, 11, 12, 13, 14]
    together = made.engine.generate(make_requests(PROMPTS, params, sample_ids=ids))
    alone = [made.engine.generate(make_requests([p], params, sample_ids=[i]))[0] for p, i in zip(PROMPTS, ids)]
    for prompt, one, other, sample_id in zip(PROMPTS, alone, together, ids, strict=True):
        made.check_same_draws(prompt, one, other, params, sample_id)
    assert together[0].token_ids != together[4].token_ids, "one prompt, two samples"
    other = made.engine.generate(make_requests(PROMPTS, replace(params, seed=6), sample_ids=ids))
    assert [a.token_ids for a in other] != [a.token_ids for a in together]


# ---- the end of a response ------------------------------------------------------------------------------------------


def test_stop_tokens_are_part_of_the_response(made):
    free = made.answers(**made.repeated(1))
    stop = free[0].token_ids[5]
    for prompt, answer, long in zip(PROMPTS, made.answers(**made.repeated(1), stop_token_ids=(stop,)), free):
        made.check_same(prompt, answer, long)
        ids = answer.token_ids
        assert stop not in ids[:-1]
        assert answer.finish_reason == ("stop" if ids[-1] == stop else "length")
        assert len(answer.log_probs) == len(ids) == (len(ids) if ids[-1] == stop else 24)
        if ids == long.token_ids[: len(ids)]:
            assert answer.log_probs == pytest.approx(long.log_probs[: len(ids)], abs=made.bound)
    ignoring = made.answers(**made.repeated(1), stop_token_ids=(stop,), ignore_eos=True)
    made.check_all_same(ignoring, free)


def test_the_token_that_completes_a_stop_string_is_the_last(made):
    def decode(ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    free = made.answers(**made.repeated(2), max_tokens=40)
    strings = (decode(free[0].token_ids[9:11]), decode(free[1].token_ids[20:23]))
    stopped = made.answers(**made.repeated(2), max_tokens=40, stop=StopStrings(strings, decode))
    for prompt, answer, long in zip(PROMPTS, stopped, free):
        made.check_same(prompt, answer, long)
        text = decode(answer.token_ids)
        ends = [text.find(s) + len(s) for s in strings if s in text]
        assert len(answer.log_probs) == len(text) == min(ends, default=40)
        assert answer.finish_reason == ("stop" if ends else "length")
    assert IS_ROUNDED or stopped[0].finish_reason == stopped[1].finish_reason == "stop"
    assert "stop" in [answer.finish_reason for answer in stopped]


def test_each_request_has_a_limit_of_its_own(made):
    limits = [1, 2, 9, 16, 17]
    found = made.engine.generate(make_requests(PROMPTS, SamplingParams(40, ()), limits=limits))
    assert [len(answer.token_ids) for answer in found] == limits


@pytest.mark.parametrize(("prompt", "message"), [([], "no tokens"), ([1, 10**6], "outside the vocabulary")])
def test_an_invalid_request_is_named(made, prompt, message):
    if made.name == "fake":
        pytest.skip("checks nothing")
    with pytest.raises(ValueError, match=message):
        made.engine.generate(make_requests([[1], prompt], SamplingParams(2, ())))


# ---- many requests --------------------------------------------------------------------------------------------------


def test_a_thousand_concurrent_requests(made):
    count = 10 if MODEL else 1000
    length = 1 if made.name == "fake" else 4  # which computes one request after another
    params = SamplingParams(length, (), **made.repeated(9))
    requests = [Request(PROMPTS[i % 5], params, sample_id=i // 5) for i in range(count)]

    async def run():
        return await asyncio.gather(*(made.engine.generate_one(request) for request in requests))

    found = asyncio.run(run())
    chosen = range(0, count, 1 if MODEL else 19)  # every prompt
    for i, answer in zip(chosen, made.engine.generate([requests[i] for i in chosen]), strict=True):
        made.check_same(PROMPTS[i % 5], found[i], answer)
    assert len(found) == count and all(len(a.token_ids) == len(a.log_probs) == length for a in found)


def test_abort_ends_the_named_request(made):
    params = SamplingParams(400, (), temperature=0.0)

    async def run():
        tasks = [asyncio.create_task(made.engine.generate_one(Request([1, 2], params, 0, "a")))]
        tasks += [asyncio.create_task(made.engine.generate_one(Request([3], replace(params, max_tokens=8), 1, "b")))]
        await asyncio.sleep(0)
        made.engine.abort(["a"])
        return await asyncio.gather(*tasks)

    a, b = asyncio.run(run())
    assert a.finish_reason == "abort" and len(a.token_ids) == len(a.log_probs) < 400
    assert b.finish_reason == "length" and len(b.token_ids) == 8


def test_an_aborted_request_returns_its_tokens_so_far(made):
    if made.name not in STEPPING:
        pytest.skip("aborts requests that have not started only")
    params = SamplingParams(400, (), temperature=0.0)

    async def run():
        long = asyncio.create_task(made.engine.generate_one(Request([1, 2], params, 0, "a")))
        await made.engine.generate_one(Request([3], replace(params, max_tokens=8), 1, "b"))
        made.engine.abort()
        return await long

    aborted = asyncio.run(run())
    (whole,) = made.engine.generate(make_requests([[1, 2]], replace(params, max_tokens=len(aborted.token_ids))))
    assert aborted.finish_reason == "abort" and len(aborted.token_ids) > 0
    if DEVICE == "cpu" or IS_ROUNDED:
        made.check_same([1, 2], whole, aborted)
    assert len(whole.token_ids) == len(aborted.token_ids)
    assert len(aborted.log_probs) == len(aborted.token_ids)


# ---- weights --------------------------------------------------------------------------------------------------------


def test_sleep_keeps_the_weights(made):
    before = made.answers(temperature=0.0)
    made.engine.sleep()
    made.engine.wake()
    made.check_all_same(made.answers(temperature=0.0), before)


@pytest.fixture
def restored(made):
    yield made
    made.push()


def test_a_push_changes_what_is_generated(restored):
    before = restored.answers(temperature=0.0)
    restored.push(SCALE)
    after = restored.answers(temperature=0.0)
    assert [a.token_ids for a in after] != [a.token_ids for a in before]
    with restored.scaled() as bound:
        for answer, expected in zip(after, restored.trainers(after)):
            assert answer.log_probs == pytest.approx(expected, abs=bound)
    restored.engine.receiver().release()
    with pytest.raises(ValueError, match="has no weights: push them first"):
        restored.answers()
    restored.push()
    restored.check_all_same(restored.answers(temperature=0.0), before)


BROKEN = {
    "missing": (lambda weights: weights[1:], r"1 are missing, first \['model\."),
    "unknown": (lambda weights: [*weights, ("model.layers.9.mlp.up_proj.weight", weights[0][1])],
     "parameter 'model.layers.9.mlp.up_proj.weight' is unknown or was sent twice"),
    "twice": (lambda weights: [*weights, weights[-1]], r"parameter '\S+' is unknown or was sent twice"),
    "shape": (lambda weights: [(weights[0][0], weights[0][1][:-1]), *weights[1:]],
     r"model\..* has shape \(.*\), expected \("),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_push_is_an_error(restored, how):
    change, message = BROKEN[how]
    with pytest.raises(ValueError, match=f"weights of version 2: {message}"):
        restored.engine.receiver().receive(change(list(restored.source.weights())), 2)
    with pytest.raises(ValueError, match="has no weights: push them first"):
        restored.answers()


# ---- stale weights: pushes that are broken on purpose --------------------------------------------------------------

STALE = "still generates with the weights of version 0, expected version 1"
#: a large and a small update; 16 bits round the small one away
UPDATES = [SCALE, pytest.param(1.001, marks=pytest.mark.skipif(not IS_FLOAT32, reason="rounded to no change"))]


def run_with(made: Setup, method: str) -> Run:
    """A run whose weights are pushed by a method."""
    receiver = made.engine.receiver()
    if method == "reshard" and not isinstance(receiver, SlicedWeights):
        pytest.skip("receives whole parameters")
    return Run(made, made.engine, method)


@pytest.mark.parametrize("method", ["replica", "reshard"])
def test_a_push_that_loses_a_parameter_stops_the_run(restored, method):
    """By the comparison of what the engine stores, or by the canary. The push before, which is not broken, passes."""
    run = run_with(restored, method)
    run.weights.push(0)
    with restored.scaled() as bound:
        assert run.weights.push(1)["weight_sync/canary_mismatch"] <= bound
    with pytest.MonkeyPatch.context() as patch:
        error, message = run.lose_a_parameter(patch)
        with pytest.raises(error, match=message):
            run.weights.push(2)
    if error is StaleWeightsError:
        return
    assert run.weights.version == restored.engine.weight_version == 1
    with pytest.raises(ValueError, match="has no weights: push them first"):
        restored.answers()


@pytest.mark.parametrize("update", UPDATES)
def test_a_push_that_copies_nothing_stops_the_run(restored, update):
    """The canary, after a push that reports success. A push that is not broken passes, before and after."""
    run = Run(restored, restored.engine)
    run.weights.push(0)
    with restored.scaled(update) as bound:
        faults.arm("stale-weights")
        try:
            with pytest.raises(StaleWeightsError, match=STALE):
                run.weights.push(1)
        finally:
            faults.disarm()
        assert run.weights.push(2)["weight_sync/canary_mismatch"] <= bound


@pytest.mark.parametrize("update", UPDATES)
def test_an_engine_with_the_trainers_parameters_has_no_stale_ones(made, update):
    """A push copies nothing, so it cannot be broken. What can be is the sharing: an engine whose factory has copied the
    parameters stops the run."""
    if made.name not in ("hf", "native"):
        pytest.skip("has a copy of the weights")
    for shares in (True, False):
        module = made.trainer.module
        engine = made.make(Shared(module if shares else copy.deepcopy(module)))
        run = Run(made, engine)
        assert engine.receiver() is None and run.weights.push(0)["weight_sync/bytes"] == 0
        with made.scaled(update) as bound:
            if shares:
                assert run.weights.push(1)["weight_sync/canary_mismatch"] <= bound
                continue
            with pytest.raises(StaleWeightsError, match=STALE):
                run.weights.push(1)


# ---- engines that step: threads, and pushes in between --------------------------------------------------------------


def test_requests_of_two_event_loops_and_of_generate_share_the_engine(made):
    if made.name not in PUSHED_BETWEEN_STEPS:
        pytest.skip("one event loop per engine")
    params = SamplingParams(12, (), **made.repeated(4))
    expected = made.engine.generate(make_requests(PROMPTS, params))
    found: dict[int, list[Completion]] = {}

    def serve(thread: int) -> None:
        async def run():
            requests = [Request(prompt, params, i) for i, prompt in enumerate(PROMPTS)]
            return await asyncio.gather(*(made.engine.generate_one(request) for request in requests))

        found[thread] = asyncio.run(run())

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    found[2] = made.engine.generate(make_requests(PROMPTS, params))
    for thread in threads:
        thread.join()
    for answers in found.values():
        made.check_all_same(answers, expected)


@pytest.mark.parametrize("method", ["replica", "reshard"])
def test_a_push_between_steps_is_a_span(restored, method):
    if restored.name not in PUSHED_BETWEEN_STEPS:
        pytest.skip("does not receive weights while requests are running")
    if restored.name == "sglang" and not restored.engine.service.capabilities.update_sessions:
        pytest.skip("this SGLang finishes running requests before a push")
    params, pushes = SamplingParams(400, (), temperature=0.0), run_with(restored, method).rollout
    pushes.sync_weights(1)

    async def run():
        task = asyncio.create_task(restored.engine.generate_one(Request([1, 2], params, 0, "a")))
        await restored.engine.generate_one(Request([3], replace(params, max_tokens=8), 1, "b"))
        with restored.scaled():
            pushes.sync_weights(2)
        await restored.engine.generate_one(Request([3], replace(params, max_tokens=8), 1, "b"))
        restored.engine.abort()
        return await task

    answer = asyncio.run(run())
    (first, one), (start, two) = answer.weight_versions
    assert (first, one, two) == (0, 1, 2) and 0 < start < len(answer.token_ids)
    # the tokens from `start` on are those of the new weights after that prefix
    rest = Request([1, 2, *answer.token_ids[:start]], replace(params, max_tokens=len(answer.token_ids) - start), 0)
    (again,) = restored.engine.generate([rest])
    rest_ids = answer.token_ids[start:]
    same = next((t for t, (one, other) in enumerate(zip(again.token_ids, rest_ids)) if one != other), len(rest_ids))
    assert IS_ROUNDED or same == len(rest_ids)
    with restored.scaled() as bound:
        assert again.log_probs[:same] == pytest.approx(answer.log_probs[start:][:same], abs=bound)
