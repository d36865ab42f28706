"""Requests to SGLang's engine, with a stand-in that counts."""

import asyncio
import os
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from tests.waiting import wait_until
from verl.config import schema
from verl.rollout.base import RolloutEnv
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.request import Completion, Request, SamplingParams, StopStrings
from verl.rollout.sglang import settings, weights
from verl.rollout.sglang.engine import SglangRollout, arguments_of
from verl.rollout.sglang.service import FailureHandler, Job, ProcessFailed, Service, shares_of_cores, start_engine

ENV = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32)


class Counting:
    """Stands in for sglang.Engine: tokens are the prompt's last one + 1, 2, 3 ...; every 8 tokens are one output."""

    def __init__(self):
        self.tokenizer_manager = self
        self.aborted: set[str] = set()
        self.running = 0
        self.held = False  # no tokens are generated
        self.eos: int | None = None
        self.version = "default"

    def abort_request(self, rid):
        self.aborted.add(rid)

    async def async_generate(self, **arguments):
        found = self._outputs(**arguments)
        if arguments["stream"]:
            return found
        *_, last = [output async for output in found]
        return last

    async def _outputs(self, input_ids, sampling_params, rid, **rest):
        self.running += 1
        pairs = []
        try:
            while True:
                await asyncio.sleep(0)
                if self.held:
                    continue
                log_prob = float("nan") if input_ids[0] == 9 else -0.5
                pairs.append((log_prob, input_ids[-1] + 1 + len(pairs), None))
                reason = self._reason(pairs, sampling_params, rid)
                if reason or len(pairs) % 8 == 0:
                    meta = {"finish_reason": reason, "weight_version": self.version}
                    yield {"meta_info": meta | {"output_token_logprobs": list(pairs)}}
                if reason:
                    return
        finally:
            self.running -= 1

    def _reason(self, pairs, params, rid):
        token = pairs[-1][1]
        if rid in self.aborted:
            return {"type": "abort"}
        if not params["ignore_eos"] and token in (*(params["stop_token_ids"] or ()), self.eos):
            return {"type": "stop", "matched": token}
        return {"type": "length"} if len(pairs) == params["max_new_tokens"] else None


@pytest.fixture
def engine():
    return Counting()


@pytest.fixture
def service(engine):
    return Service(engine, settings.Capabilities(update_sessions=False), arguments_of)


def run(service, *prompts: int, **keys) -> list[Completion]:
    params = SamplingParams(keys.pop("max_tokens", 20), keys.pop("stop_token_ids", ()), **keys)
    return [f.result(10) for f in [service.submit(Request([first], params, first, str(first))) for first in prompts]]


def test_a_failed_process_ends_running_and_later_calls(service):
    handler = FailureHandler()
    with pytest.raises(ProcessFailed):
        handler(3, None)  # while the engine starts
    handler.service = service
    with service.exclusive("push"):
        waiting = service.submit(Request([100], SamplingParams(5, ()), 0, "a"))
        handler(3, None)
        with pytest.raises(ProcessFailed, match="its error is in the log"):
            waiting.result(10)
        with pytest.raises(ProcessFailed):
            service.submit(Request([100], SamplingParams(5, ()), 0, "b")).result(10)
        service.thread.error = None


def test_an_abort_right_after_the_submission_is_not_lost(service, engine):
    """Nor is one that SGLang ignores, because it has not registered the request yet."""
    ignored, accept = [], engine.tokenizer_manager.abort_request

    def abort_request(rid):
        ignored.append(rid)
        if len(ignored) > 2:
            accept(rid=rid)

    engine.tokenizer_manager.abort_request = abort_request
    for first in range(100, 110):
        waiting = service.submit(Request([first], SamplingParams(10**6, ()), 0, "a"))
        service.abort(lambda request: True)
        assert waiting.result(10).finish_reason == "abort"
    waiting = service.submit(Request([100], SamplingParams(10**6, ()), 0, "a"))
    wait_until(lambda: engine.running)
    service.abort(lambda request: True)
    assert waiting.result(10).finish_reason == "abort" and len(ignored) > 2


def test_tokens_and_log_probs_of_concurrent_requests(service):
    found = run(service, 100, 200, max_tokens=3)
    assert [(c.token_ids, c.log_probs, c.finish_reason) for c in found] == [
        ([101, 102, 103], [-0.5] * 3, "length"),
        ([201, 202, 203], [-0.5] * 3, "length"),
    ]


def test_only_the_end_tokens_of_the_request_end_it(service, engine):
    engine.eos = 103  # of the model: the request goes on after it
    (found,) = run(service, 100, stop_token_ids=(107,))
    assert (found.token_ids, found.finish_reason) == (list(range(101, 108)), "stop")
    (limited,) = run(service, 100, stop_token_ids=(107,), max_tokens=3)
    assert (limited.token_ids, limited.finish_reason) == ([101, 102, 103], "length")


def test_the_token_that_completes_a_stop_string_is_the_last(service, engine):
    stop = StopStrings(("110 111",), lambda ids: " ".join(map(str, ids)))
    (found,) = run(service, 100, max_tokens=10**6, stop=stop)
    assert (found.token_ids, found.finish_reason) == (list(range(101, 112)), "stop")
    assert len(found.log_probs) == 11 and len(engine.aborted) == 1


def test_abort_returns_the_tokens_so_far(service, engine):
    long = service.submit(Request([1], SamplingParams(10**9, ()), 0, "a"))
    run(service, 50)
    service.abort(lambda request: request.request_id == "a")
    found = long.result(10)
    assert found.finish_reason == "abort" and found.token_ids[:3] == [2, 3, 4]
    assert len(found.log_probs) == len(found.token_ids)


def test_a_cancelled_request_is_aborted(service, engine):
    future = service.submit(Request([1], SamplingParams(10**9, ()), 0))
    run(service, 50)
    future.cancel()
    run(service, 50, max_tokens=50)
    assert len(engine.aborted) == 1 and not engine.running


def test_logits_that_are_not_finite_fail_their_request_only(service):
    with pytest.raises(ValueError, match="sample id 9, token 0: its logits are not finite"):
        run(service, 9)
    assert len(run(service, 10)[0].token_ids) == 20


def test_an_end_that_nobody_asked_for_is_an_error(service, engine, monkeypatch):
    monkeypatch.setattr(engine, "_reason", lambda *args: {"type": "abort", "message": "KV cache is full"})
    with pytest.raises(ValueError, match=r"SGLang ended the request after 1 of 20 tokens: .*KV cache is full"):
        run(service, 1)


def test_a_response_of_other_weights_is_an_error(service, engine):
    service.version = "3"
    engine.version = "2"
    with pytest.raises(ValueError, match="weights of version 2, expected version 3: the engine's weights are stale"):
        run(service, 1)


def test_an_exclusive_call_waits_for_running_requests_and_holds_back_new_ones(service, engine):
    engine.held = True
    long = service.submit(Request([1], SamplingParams(3000, ()), 0, "a"))
    wait_until(lambda: engine.running)
    with pytest.raises(ValueError, match=r"sleep\(\) was called while requests are running"):
        service.exclusive("sleep()", idle=True).__enter__()
    engine.held = False
    with service.exclusive("a weight push"):
        assert long.done() and not engine.running
        waiting = service.submit(Request([1], SamplingParams(2, ()), 0, "b"))
        threading.Event().wait(0.05)
        assert not waiting.done() and not engine.running
    assert waiting.result(10).token_ids == [2, 3]


def test_event_loops_share_the_engine(service):
    memory = SimpleNamespace(allocate=lambda *tags: None)
    receiver = SimpleNamespace(check_filled=lambda: None)
    copy = EngineCopy(
        schema.RolloutConfig(name="sglang", max_model_len=100), None, LlamaConfig(vocab_size=10**6), None, True
    )
    rollout = SglangRollout(copy, service, memory, receiver)

    async def ask():
        return await asyncio.gather(*(rollout.generate_one(Request([i], SamplingParams(4, ()), i)) for i in range(8)))

    assert [c.token_ids[0] for c in asyncio.run(ask())] == [c.token_ids[0] for c in asyncio.run(ask())]
    assert rollout.generate([Request([5], SamplingParams(2, ()), 0)])[0].token_ids == [6, 7]
    assert rollout.stats.tokens == 2
    with pytest.raises(ValueError, match="prompt 0 has no tokens"):
        rollout.generate([Request([], SamplingParams(2, ()), 0)])


def test_a_greedy_request_has_no_filters():
    job = Job(Request([1], SamplingParams(4, (2,), temperature=0.0, top_p=0.5), 0))
    assert "custom_logit_processor" not in arguments_of(job)
    sampling = arguments_of(job)["sampling_params"]
    assert sampling["temperature"] == 0 and sampling["stop_token_ids"] == [2] and not sampling["ignore_eos"]


def test_memory_is_freed_and_allocated_once(service, engine, monkeypatch):
    calls = []
    monkeypatch.setattr(engine, "release_memory_occupation", lambda tags: calls.append(("free", *tags)), raising=False)
    monkeypatch.setattr(engine, "resume_memory_occupation", lambda tags: calls.append(("get", *tags)), raising=False)
    memory = weights.SglangMemory(service, saves=True)
    memory.sleep()
    memory.drop()
    memory.allocate("kv_cache")
    memory.allocate("kv_cache", "weights")
    assert calls == [("free", "kv_cache"), ("free", "weights"), ("get", "kv_cache"), ("get", "weights")]
    weights.SglangMemory(service, saves=False).sleep()
    assert len(calls) == 4


# ---- start ----------------------------------------------------------------------------------------------------------


def test_ranks_on_a_cpu_share_the_cores(monkeypatch):
    for cores, shares in (({0, 1, 2, 3}, "0,1|2,3"), ({2, 5, 9}, "2|5,9"), ({7}, "7|7")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: cores)
        assert shares_of_cores(2) == shares


@pytest.mark.parametrize(("size", "given", "found"), [(1, None, None), (2, None, "0|1"), (2, "4|5", "4|5")])
def test_sglang_is_told_the_cores_while_it_starts(size, given, found, monkeypatch):
    """Its default is a NUMA node for each rank, of which most hosts have too few."""
    name, told = "SGLANG_CPU_OMP_THREADS_BIND", []
    fake = ModuleType("sglang.srt.entrypoints.engine")
    fake.Engine = lambda **arguments: told.append(os.environ.get(name))
    for package in ("sglang", "sglang.srt", "sglang.srt.entrypoints"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    start_engine({"device": "cpu", "tp_size": size}, FailureHandler())
    assert told == [found] and os.environ.get(name) == given
