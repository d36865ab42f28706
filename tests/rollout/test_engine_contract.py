"""The contract of `RolloutEngine`, for every registered engine on the same tiny model.

Bounds of log-probs in float32: 2e-5 on a CPU (2e-4 for the model of VERL_CONTRACT_MODEL); 2e-2 on a GPU, where
attention kernels of vLLM round to TF32. In another dtype every engine is compared with the model in float32 with the
same weights, which that dtype represents exactly; the bound is twice the largest error of transformers' own model in
that dtype, over many positions and the whole vocabulary (`rounding`), since engines round in another order.

Environment: VERL_CONTRACT_DEVICE=cuda runs on a GPU; VERL_CONTRACT_DTYPE=bf16 runs in bfloat16;
VERL_CONTRACT_ENGINES=vllm,native only those engines; VERL_CONTRACT_MODEL=folder uses that model (such as SmolLM2-135M)
instead of the tiny ones; VERL_CONTRACT_KWARGS are the `engine_kwargs` of the engines with a package of their own, in
JSON.
"""

import asyncio
import copy
import importlib.util
import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tests.engines.ranks import make_engine
from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.protocol import DataProto
from verl.rollout.base import (
    ROLLOUT_ENGINES,
    Completion,
    Request,
    RolloutEngine,
    RolloutEnv,
    SamplingParams,
    make_requests,
    make_rollout_engine,
)
from verl.rollout.sampling import draw
from verl.rollout.stop_strings import StopStrings
from verl.rollout.weight_sync import ModuleReceiver
from verl.utils.device import resolve_device, resolve_dtype

DEVICE = os.environ.get("VERL_CONTRACT_DEVICE", "cpu")
DTYPE = resolve_dtype(os.environ.get("VERL_CONTRACT_DTYPE", "fp32"), torch.device("cpu"))
IS_FLOAT32 = DTYPE.itemsize == 4
CHOSEN = os.environ.get("VERL_CONTRACT_ENGINES")
MODEL = os.environ.get("VERL_CONTRACT_MODEL")
KWARGS = json.loads(os.environ.get("VERL_CONTRACT_KWARGS", "{}"))
#: SGLang: whether tokens depend on the seed and the sample id only; GPUs only
IS_SEEDED = "enable_deterministic_inference" in KWARGS
#: whether a token may depend on the batch that it is sampled in: two logits are often equal up to rounding
IS_ROUNDED = not IS_FLOAT32 and not IS_SEEDED
BOUND = 2e-5 if DEVICE == "cpu" and not MODEL else 2e-4 if DEVICE == "cpu" else 2e-2
#: of the weights in another push; a deep model amplifies rounding; a power of two is exact in every dtype, and
#: below 1 errors do not grow
SCALE = 1.05 if MODEL else 1.5
if not IS_FLOAT32:
    SCALE = 0.5
#: engines with a package of their own
PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
NAMES = ["fake", *sorted(ROLLOUT_ENGINES)]
STEPPING = ("native", "vllm", "sglang")  # engines that admit and abort requests between steps
PUSHED_BETWEEN_STEPS = ("vllm", "sglang")  # engines that receive weights while requests are running
VOCAB = 53
#: heads of 64 and rows of multiples of 16 bytes, which fused kernels of GPUs need
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
#: of the model's folder: no engine may read it, the request says how it is sampled
DEFAULTS = {
    "do_sample": True,
    "repetition_penalty": 3.0,
    "temperature": 0.3,
    "top_k": 2,
    "top_p": 0.5,
    "eos_token_id": [*range(0, VOCAB, 4)],
    "max_new_tokens": 3,
}
FAMILIES = {"qwen2": (Qwen2Config, True), "llama": (LlamaConfig, False)}  # config, tied head
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13], [1, 2, 3]]


class Naive(RolloutEngine):
    """A whole forward pass per token, one request after another."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self._receiver = ModuleReceiver(module)

    @torch.no_grad()
    def generate(self, requests):
        self._receiver.check_filled()
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Completion:
        params, ids, log_probs = request.params, [], []
        while len(ids) < params.max_tokens:
            logits = self.module(torch.tensor([[*request.prompt_ids, *ids]], device=DEVICE)).logits[:, -1]
            sample_id = torch.tensor([request.sample_id], device=DEVICE)
            token, log_prob = draw(logits, params, sample_id, len(ids))
            ids.append(int(token))
            log_probs.append(float(log_prob))
            if ids[-1] in params.active_stop_ids or (params.stop is not None and params.stop.find(ids) is not None):
                return Completion(ids, log_probs, "stop")
        return Completion(ids, log_probs, "length")

    def receiver(self):
        return self._receiver


class Sharded:
    """A training engine that no rollout engine can share a module with."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def shared_module(self):
        return None

    def model_forward(self):
        return None

    def buffers(self):
        return self.module.named_buffers()

    def weights(self, scale: float = 1.0):
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach() * scale


class Shared(Sharded):
    """A training engine whose module a rollout engine in its process generates with."""

    def shared_module(self):
        return self.module


@torch.no_grad()
def rounding(module: torch.nn.Module, scale: float = 1.0) -> float:
    """Bound of log-probs computed in DTYPE, from those of `module`, which is in float32, with weights times `scale`."""
    if IS_FLOAT32:
        return BOUND if scale == 1 else 5 * BOUND
    exact = copy.deepcopy(module)
    for p in exact.parameters():
        p.mul_(scale)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.config.vocab_size, (16, 32), generator=generator).to(DEVICE)
    expected = exact(ids).logits.log_softmax(-1)
    return 2 * float((exact.to(DTYPE)(ids).logits.float().log_softmax(-1) - expected).abs().max())


class Setup:
    """A rollout engine, and the trainer of the same model. Weights have been pushed."""

    def __init__(self, name: str, folder: str):
        self.name = name
        self.trainer = make_engine(folder, device=DEVICE, dtype="fp32", model_dtype="fp32")
        self.source = Sharded(self.trainer.module)
        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
        self.bound = rounding(self.module)
        model = schema.ModelConfig(path=folder)
        limits = dict(max_num_seqs=128, gpu_memory_utilization=0.2, enforce_eager=True)
        kwargs = schema.EngineKwargs(**{name: KWARGS}) if name in PACKAGES else schema.EngineKwargs()
        config = schema.RolloutConfig(name=name, prompt_length=64, response_length=448, engine_kwargs=kwargs, **limits)
        env = RolloutEnv(0, 1, 0, resolve_device(DEVICE), 0, DTYPE)
        self.make = partial(make_rollout_engine, name, config, model, env)
        self.engine = Naive(copy.deepcopy(self.module).to(DTYPE)) if name == "fake" else self.make(self.source)
        with pytest.raises(ValueError, match="has no weights: push them first"):
            self.engine.generate(make_requests(PROMPTS[:1], SamplingParams(2, ())))
        self.push()

    def push(self, scale: float = 1.0) -> None:
        self.engine.receiver().receive(self.source.weights(scale), 1)

    def repeated(self, seed: int) -> dict:
        """Sampling parameters with which the engine repeats its tokens, up to `check_same`."""
        return {"temperature": 0.0} if IS_ROUNDED or (self.name == "sglang" and not IS_SEEDED) else {"seed": seed}

    def check_same(self, prompt: list[int], found: Completion, expected: Completion) -> None:
        """Two responses with `repeated` parameters, of which one may have ended earlier, are the same. If tokens depend
        on rounding: up to a token where both have one of the most likely."""
        pairs = list(zip(found.token_ids, expected.token_ids))
        at = next((t for t, (one, other) in enumerate(pairs) if one != other), None)
        if at is None:
            return
        assert IS_ROUNDED, f"token {at} differs"
        logits = self.logits(prompt, replace(found, token_ids=found.token_ids[: at + 1]))[-1]
        assert logits.max() - logits[list(pairs[at])].min() <= self.bound, f"token {at} differs"

    def check_all_same(self, found: list[Completion], expected: list[Completion]) -> None:
        for prompt, one, other in zip(PROMPTS, found, expected, strict=True):
            self.check_same(prompt, one, other)
            assert len(one.token_ids) == len(other.token_ids)

    def answers(self, **keys) -> list[Completion]:
        params = SamplingParams(keys.pop("max_tokens", 24), keys.pop("stop_token_ids", ()), **keys)
        return self.engine.generate(make_requests(PROMPTS, params))

    def trainers(self, answers: list[Completion], temperature: float = 1.0) -> list[list[float]]:
        """The trainer's log-probs of the sampled tokens."""
        columns = build_sequences(PROMPTS, [a.token_ids for a in answers], pad_token_id=0)
        found = self.trainer.infer(DataProto.from_dict(columns), ("log_probs",), MicroBatching(), temperature)
        return [row[: len(a.token_ids)].tolist() for row, a in zip(found["log_probs"], answers)]

    @contextmanager
    def scaled(self) -> Iterator[float]:
        """The trainer has the weights of `push(SCALE)`. Yields the bound of their log-probs."""
        module = self.trainer.module
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(SCALE)
            try:
                yield rounding(self.module, SCALE)
            finally:
                for p in module.parameters():
                    p.div_(SCALE)

    @torch.no_grad()
    def logits(self, prompt: list[int], answer: Completion) -> torch.Tensor:
        """(T, V): before each token of the answer."""
        ids = torch.tensor([[*prompt, *answer.token_ids]], device=DEVICE)
        return self.module(ids).logits[0, len(prompt) - 1 : -1].double().cpu()


def save_model(family: str, folder) -> str:
    config, tied = FAMILIES[family]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config(**SHAPE, tie_word_embeddings=tied))
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.2)
            p.copy_(p.to(DTYPE))  # represented exactly
    module.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return str(folder)


def cases() -> list:
    """Engine and family. Engines in this package are tested with many models elsewhere: here with one."""
    families = ["real"] if MODEL else [*FAMILIES]
    return [f"{name}-{f}" for name in NAMES for f in (families if name in PACKAGES else families[:1])]


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


def kept(logits: torch.Tensor, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> dict[int, float]:
    """Token -> probability before the filters, for (V,) logits; computed token by token."""
    ranked = sorted(enumerate(logits.softmax(-1).tolist()), key=lambda pair: -pair[1])
    found, mass = {}, 0.0
    for rank, (token, probability) in enumerate(ranked):
        if (0 < top_k <= rank) or mass >= top_p or probability < min_p * ranked[0][1]:
            break
        found[token] = probability
        mass += probability
    return found


def looser(logits: torch.Tensor, bound: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> dict:
    """The filters with all tokens that pass them when log-probs have errors up to `bound`; below 0: with fewest."""
    if top_k > 0 and bound > 0:
        ranked = logits.sort(descending=True).values
        top_k = int((ranked >= ranked[top_k - 1] - 2 * bound).sum())
    return {"top_k": top_k, "top_p": top_p + bound * (top_p < 1), "min_p": min_p * math.exp(-2 * bound)}


@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_filtered_distribution(made, filters, temperature):
    answers = made.answers(temperature=temperature, **filters, max_tokens=12)
    for prompt, answer in zip(PROMPTS, answers):
        for logits, token, log_prob in zip(made.logits(prompt, answer), answer.token_ids, answer.log_probs):
            scaled = logits / temperature
            most, least = (kept(scaled, **looser(scaled, sign * made.bound, **filters)) for sign in (1, -1))
            assert token in most, "a token outside of the filter"
            low, high = (math.log(most[token] / sum(tokens.values())) for tokens in (most, least))
            assert low - made.bound <= log_prob <= high + made.bound


def test_random_numbers_depend_on_seed_and_sample_id_only(made):
    if made.name == "sglang" and not IS_SEEDED:
        pytest.skip("needs enable_deterministic_inference, which SGLang has on GPUs only")
    if IS_ROUNDED:
        pytest.skip("tokens depend on rounding")
    params = SamplingParams(16, (), seed=5)
    ids = [10, 11, 12, 13, 14]
    together = made.engine.generate(make_requests(PROMPTS, params, sample_ids=ids))
    alone = [made.engine.generate(make_requests([p], params, sample_ids=[i]))[0] for p, i in zip(PROMPTS, ids)]
    assert [a.token_ids for a in alone] == [a.token_ids for a in together]
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
    count = 1000 if made.name in STEPPING and not MODEL else 10
    params = SamplingParams(4, (), **made.repeated(9))
    requests = [Request(PROMPTS[i % 5], params, sample_id=i // 5) for i in range(count)]

    async def run():
        return await asyncio.gather(*(made.engine.generate_one(request) for request in requests))

    found = asyncio.run(run())
    expected = made.engine.generate(requests[:10])
    for i, answer in enumerate(expected):
        made.check_same(PROMPTS[i % 5], found[i], answer)
    assert len(found) == count and all(len(a.token_ids) == 4 for a in found)


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
    "missing": (lambda weights: weights[1:], "1 are missing"),
    "unknown": (lambda weights: [*weights, ("model.layers.9.mlp.up_proj.weight", weights[0][1])], "is unknown"),
    "twice": (lambda weights: [*weights, weights[-1]], "sent twice"),
    "shape": (lambda weights: [(weights[0][0], weights[0][1][:-1]), *weights[1:]], "has shape"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_push_is_an_error(restored, how):
    change, message = BROKEN[how]
    with pytest.raises(ValueError, match=message):
        restored.engine.receiver().receive(change(list(restored.source.weights())), 2)
    with pytest.raises(ValueError, match="has no weights: push them first"):
        restored.answers()


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


def test_a_push_between_steps_is_a_span(restored):
    if restored.name not in PUSHED_BETWEEN_STEPS:
        pytest.skip("does not receive weights while requests are running")
    if restored.name == "sglang" and not restored.engine.service.capabilities.update_sessions:
        pytest.skip("this SGLang finishes running requests before a push")
    params = SamplingParams(400, (), temperature=0.0)

    async def run():
        restored.engine.weight_version = 1
        task = asyncio.create_task(restored.engine.generate_one(Request([1, 2], params, 0, "a")))
        await restored.engine.generate_one(Request([3], replace(params, max_tokens=8), 1, "b"))
        restored.engine.receiver().receive(restored.source.weights(SCALE), 2)
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
