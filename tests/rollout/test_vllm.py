"""The vLLM adapter: its loop with a stand-in for vLLM's engine, its settings, and with vLLM its weights and training.

Tests of `real` need vLLM: make test-vllm.
"""

import asyncio
import importlib.util
import json
import os
import pickle
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from tests.rollout.asynchronous_runs import grpo_reports, model_folder
from tests.rollout.canary_check import check_canary
from tests.trainer.conftest import run_settings
from tests.waiting import wait_until
from verl.config import schema
from verl.rollout.base import RolloutEnv, make_rollout_engine
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.request import Request, SamplingParams, StopStrings
from verl.rollout.vllm import settings
from verl.rollout.vllm.stepping import Job, Stepper
from verl.trainer.ppo.canary import StaleWeightsError

real = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm")
ROLLOUT = "actor_rollout_ref.rollout"
ENV = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32)


# ---- the loop, with an engine that counts ---------------------------------------------------------------------------


class Counting:
    """Stands in for vLLM's LLMEngine: tokens are 100 * prompt + 0, 1, 2 ...; log-probs of prompt 9 are not finite."""

    def __init__(self):
        self.running: dict[str, SimpleNamespace] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def add_request(self, key, prompt, params):
        request, streams = params
        self.running[key] = SimpleNamespace(
            first=prompt["prompt_token_ids"][0], request=request, streams=streams, done=[]
        )

    def has_unfinished_requests(self):
        return bool(self.running)

    def abort_request(self, keys):
        for key in keys:
            self.running.pop(key, None)

    def step(self):
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        outputs = []
        for key, row in list(self.running.items()):
            row.done.append(100 * row.first + len(row.done))
            finished = len(row.done) == row.request.params.max_tokens
            if row.streams or finished:
                tokens = row.done[-1:] if row.streams else row.done
                values = [float("nan") if row.first == 9 else -0.5] * len(tokens)
                found = SimpleNamespace(token_ids=tokens, logprobs=SimpleNamespace(logprobs=values))
                found.finish_reason = "length" if finished else None
                outputs.append(SimpleNamespace(request_id=key, outputs=[found], finished=finished))
            if finished:
                del self.running[key]
        return outputs


@pytest.fixture
def engine():
    return Counting()


@pytest.fixture
def stepper(engine):
    return Stepper(engine, lambda request, streams: (request, streams), lambda: None, lambda: 7)


def job(first: int, tokens: int, streams: bool = True, stop: StopStrings | None = None) -> Job:
    return Job(Request([first], SamplingParams(tokens, (), stop=stop), first, str(first)), streams)


def test_requests_of_all_kinds_share_the_steps(stepper, engine):
    jobs = [job(first, tokens, streams) for first, tokens, streams in ((1, 3, True), (2, 1, False), (3, 5, False))]
    engine.gate.clear()
    stepper.submit(jobs[:1])
    stepper.submit(jobs[1:])
    engine.gate.set()
    found = [each.future.result(10) for each in jobs]
    assert [c.token_ids for c in found] == [[100, 101, 102], [200], [300, 301, 302, 303, 304]]
    assert {c.finish_reason for c in found} == {"length"} and found[2].log_probs == [-0.5] * 5
    assert 5 <= stepper.steps <= 6 and not engine.running


def test_a_stop_string_ends_the_request_in_the_engine_too(stepper, engine):
    stop = StopStrings(("102 103",), lambda ids: " ".join(map(str, ids)))
    ended, other = job(1, 50, stop=stop), job(2, 20)
    stepper.submit([ended, other])
    completion = ended.future.result(10)
    assert (completion.token_ids, completion.finish_reason) == ([100, 101, 102, 103], "stop")
    assert len(other.future.result(10).token_ids) == 20
    wait_until(lambda: not stepper.is_busy())
    assert not engine.running


def test_tokens_are_handed_out_as_they_come(stepper, engine):
    chunks: dict[int, list] = {1: [], 2: []}

    jobs = [job(1, 20), job(2, 20, stop=StopStrings(("210 211",), lambda ids: " ".join(map(str, ids))))]
    for each, found in zip(jobs, chunks.values()):
        each.request = replace(each.request, on_tokens=lambda *new, found=found: found.append(new))
    stepper.submit(jobs)
    whole, stopped = (each.future.result(10) for each in jobs)
    # the last token comes with the completion
    assert chunks[1] == [([token], [-0.5]) for token in range(100, 119)] and whole.token_ids == [*range(100, 120)]
    # with stop strings, only tokens that were searched for one
    assert chunks[2] == [([*range(200, 208)], [-0.5] * 8)] and stopped.token_ids == [*range(200, 212)]


def test_abort_and_cancel_end_requests_with_their_tokens(stepper, engine):
    long, cancelled, other = job(1, 10**9), job(2, 10**9), job(3, 20)
    stepper.submit([long, cancelled, other])
    other.future.result(10)
    cancelled.future.cancel()
    stepper.abort(lambda request: request.request_id == "1")
    completion = long.future.result(10)
    assert completion.finish_reason == "abort" and completion.token_ids[:3] == [100, 101, 102]
    assert len(completion.log_probs) == len(completion.token_ids) >= 20
    wait_until(lambda: not stepper.is_busy())
    assert not engine.running


def test_logits_that_are_not_finite_fail_their_request_only(stepper):
    good, bad = job(1, 3), job(9, 3)
    stepper.submit([good, bad])
    assert good.future.result(10).token_ids == [100, 101, 102]
    with pytest.raises(ValueError, match="sample id 9, token 0: its logits are not finite"):
        bad.future.result(10)


def test_an_error_of_the_engine_reaches_every_request_and_the_next_ones_run(stepper, engine):
    engine.error = RuntimeError("out of memory")
    jobs = [job(1, 3), job(2, 3, streams=False)]
    stepper.submit(jobs)
    for each in jobs:
        with pytest.raises(RuntimeError, match="out of memory"):
            each.future.result(10)
    wait_until(lambda: not engine.running)
    engine.error = None
    again = job(3, 2)
    stepper.submit([again])
    assert again.future.result(10).token_ids == [300, 301]


def test_what_runs_between_steps_sees_the_running_requests(stepper, engine):
    long = job(1, 10**9)
    stepper.submit([long])
    wait_until(lambda: long.token_ids)
    with stepper.exclusive("a push") as running:
        before = len(long.token_ids)
        assert running == [long] and not threading.Event().wait(0.05) and len(long.token_ids) == before
    with (
        pytest.raises(ValueError, match=r"sleep\(\) was called while requests are running"),
        stepper.exclusive("sleep()", idle=True),
    ):
        pass
    wait_until(lambda: len(long.token_ids) != before)
    stepper.abort(lambda request: True)
    assert long.future.result(10).finish_reason == "abort"


def test_the_other_ranks_take_the_steps_of_the_first():
    ranks = [Counting(), Counting()]
    messages, sent = [], threading.Condition()

    class Channel:
        def send(self, message):
            with sent:
                messages.append(pickle.loads(pickle.dumps(message)))
                sent.notify_all()

        def receive(self):
            with sent:
                sent.wait_for(lambda: messages)
                return messages.pop(0)

    leader, other = (
        Stepper(engine, lambda request, streams: (request, streams), lambda: None, lambda: 0, Channel())
        for engine in ranks
    )
    follower = threading.Thread(target=other.follow)
    follower.start()

    async def run():
        jobs = [job(first, first + 3) for first in range(8)]
        jobs[0].request = replace(jobs[0].request, on_tokens=lambda ids, log_probs: None)  # of this process
        for each in jobs:
            leader.submit([each])
            await asyncio.sleep(0.001)
        return await asyncio.gather(*(asyncio.wrap_future(each.future) for each in jobs))

    with leader.leading():
        found = asyncio.run(run())
        leader.submit([job(9, 10**9)])  # is aborted at the end
    follower.join(10)
    assert [len(c.token_ids) for c in found] == list(range(3, 11))
    assert other.steps == leader.steps and not any(engine.running for engine in ranks)


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"pass_config": {"fuse_allreduce_rms": False}}),
        ({"compilation_config": 1}, {"mode": 1, "pass_config": {"fuse_allreduce_rms": False}}),
        ({"compilation_config": {"mode": 3, "pass_config": {"enable_sp": True}}},
         {"mode": 3, "pass_config": {"enable_sp": True, "fuse_allreduce_rms": False}}),
        ({"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}},
         {"pass_config": {"fuse_allreduce_rms": True}}),
    ],
)  # fmt: skip
def test_all_reduces_of_tensor_parallelism_are_those_of_nccl(given, expected, monkeypatch):
    hf_config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)
    kwargs = schema.EngineKwargs(vllm=given)
    found = {}
    for size in (1, 2):
        env = RolloutEnv(0, size, 0, torch.device("cpu"), 0, tp_size=size)
        config = schema.RolloutConfig(tensor_model_parallel_size=size, engine_kwargs=kwargs)
        pushed = EngineCopy(config, schema.ModelConfig(path="m"), hf_config, torch.float32, is_trained=True)
        found[size] = settings.engine_args(pushed, env)
    assert found[2]["compilation_config"] == expected
    assert found[1].get("compilation_config") == given.get("compilation_config")
    assert found[2]["disable_custom_all_reduce"] and found[2]["async_scheduling"] is False
    assert not {"disable_custom_all_reduce", "async_scheduling"} & found[1].keys()
    for name in ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    settings.set_environment()
    assert os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] == os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"


# ---- with vLLM ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of heads that vLLM accepts, with rows."""
    return model_folder(tmp_path_factory.mktemp("tiny"), model=("llama", "small"), tied=("qwen2", None))


@pytest.fixture(scope="module")
def pushed(tiny):
    """An engine of a model with a tied head, and the source of its weights."""
    from transformers import AutoModelForCausalLM

    config = schema.RolloutConfig(name="vllm", prompt_length=16, response_length=16, max_num_seqs=8)
    rollout = make_rollout_engine("vllm", config, schema.ModelConfig(path=str(tiny / "tied")), ENV)
    module = AutoModelForCausalLM.from_pretrained(tiny / "tied", dtype=torch.float32)
    rollout.receiver().receive(module.named_parameters(), 1)
    return rollout, module


@real
def test_vllm_streams_tokens(pushed):
    chunks: list[list[int]] = []
    params = SamplingParams(12, (), temperature=0)
    request = Request([5, 6, 7], params, 0, on_tokens=lambda ids, log_probs: chunks.append(ids))
    completion = asyncio.run(pushed[0].generate_one(request))
    sent = [token for ids in chunks for token in ids]
    assert len(chunks) >= 6 and sent == completion.token_ids[: len(sent)]


@real
def test_a_head_that_computes_with_a_stale_copy_is_found_by_the_canary(pushed, monkeypatch):
    from verl.rollout.vllm.weights import engine_model

    rollout, module = pushed
    head = engine_model(rollout.llm).lm_head
    stale = head.weight.detach().clone() * 0.9
    monkeypatch.setattr(head.quant_method, "apply", lambda layer, x, bias=None: x @ stale.T)
    rollout.receiver().receive(module.named_parameters(), 2)
    with pytest.raises(StaleWeightsError, match="does not generate with the weights of version 2"):
        check_canary(rollout, module, 2)
    monkeypatch.undo()
    check_canary(rollout, module, 2)


@real
def test_packed_weights_of_a_cpu_are_not_stale_in_silence(tiny, monkeypatch):
    """vLLM's oneDNN kernels compute with packed copies; the factory turns them off."""
    from contextlib import nullcontext

    from transformers import AutoModelForCausalLM
    from vllm import _custom_ops

    from verl.rollout.vllm import factory

    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    monkeypatch.setattr(factory, "_cpu_kernels", nullcontext)
    config = schema.RolloutConfig(name="vllm", prompt_length=16, response_length=16, max_num_seqs=8)
    rollout = make_rollout_engine("vllm", config, schema.ModelConfig(path=str(tiny / "tied")), ENV)
    module = AutoModelForCausalLM.from_pretrained(tiny / "tied", dtype=torch.float32)
    with pytest.raises((ValueError, AttributeError, StaleWeightsError)):
        rollout.receiver().receive(module.named_parameters(), 1)
        check_canary(rollout, module, 1)


@real
def test_two_steps_of_grpo(tiny, tmp_path):
    from verl.trainer.local_trainer import LocalPPOTrainer

    file = tmp_path / "config.yaml"
    file.write_text("engine: {actor_type: vllm}")
    steps = ["algorithm.name=grpo", "trainer.total_training_steps=2", "trainer.resume_mode=disable"]
    found = []
    trainer = LocalPPOTrainer(config_path=file, overrides=[*run_settings(tiny, tmp_path / "run"), *steps])
    trainer.on_step.append(found.append)
    trainer.fit()
    for step, report in enumerate(found):
        assert report.metrics["rollout/logprob_gap_max"] < 2e-5
        assert report.batch.batch["weight_version"].tolist() == [step] * len(report.batch)
        assert report.metrics["weight_sync/bytes"] > 0
    assert len(found) == 2


TENSOR_PARALLEL = [
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.check_every=1",  # canary responses
    "trainer.val_before_train=true",
    "trainer.test_freq=1",
]


def steps_over_ranks(tiny, run, steps: int, *more: str) -> list:
    """The reports of a run whose engine has two ranks."""
    total = f"trainer.total_training_steps={steps}"
    found = grpo_reports(*run_settings(tiny, run), *TENSOR_PARALLEL, total, *more)
    for report in found:
        assert report.metrics["rollout/logprob_gap_max"] < 2e-5 and report.metrics["weight_sync/bytes"] > 0
    return found


@real
@pytest.mark.timeout(600)
def test_sharded_training_shares_its_processes_with_two_ranks(tiny, tmp_path):
    """FSDP2 on 2 -> tensor parallelism of 2; then the run is resumed."""
    two = ("trainer.n_gpus_per_node=2", "trainer.save_freq=1")
    first = steps_over_ranks(tiny, tmp_path / "run", 1, *two)
    second = steps_over_ranks(tiny, tmp_path / "run", 2, *two)
    versions = [report.batch.batch["weight_version"].unique().tolist() for report in (*first, *second)]
    assert versions == [[0], [1]]


@real
@pytest.mark.timeout(600)
def test_agent_loops_of_two_ranks_on_devices_of_their_own(tiny, tmp_path):
    loop = ("imports=[examples/custom_agent_loop/calculator_loop.py]", f"{ROLLOUT}.agent.default_agent_loop=calculator")
    own = ("trainer.n_gpus_per_node=3", "placement.actor_devices=[0]", "placement.rollout_devices=[1,2]")
    found = steps_over_ranks(tiny, tmp_path / "run", 2, *loop, *own, "data.max_response_length=24")
    assert [report.metrics["rollout/turns"] >= 1 for report in found] == [True, True]


@real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shuffled", [False, True])
def test_it_learns_to_reverse(shuffled, tmp_path_factory, tmp_path, monkeypatch, pytestconfig):
    from benchmarks import learning
    from examples.quickstart.tasks import write_task

    steps = 50
    monkeypatch.setitem(learning.MODEL_SIZE, "reverse", "small")  # heads of 32
    folder = tmp_path_factory.getbasetemp() / "start"
    folder.mkdir(exist_ok=True)
    model = learning.start_model("reverse", folder)
    data = write_task("reverse", tmp_path / "data", rows=64 * steps, seed=1)
    curve, method = learning.Curve("reverse", "grpo", 1, shuffled), learning.method_of("grpo")
    chosen = [*learning.overrides("reverse", model, data, tmp_path / "run", steps, seed=1), f"{ROLLOUT}.name=vllm"]
    learning.learn(method, curve, [*chosen, f"algorithm.shuffle_rewards={json.dumps(shuffled)}", *method.settings])
    gain = sum(curve.reward[-10:]) / 10 - sum(curve.reward[:10]) / 10
    print(f"reward {curve.reward[0]} -> {curve.reward[-1]}, gain {gain:.3f}, {curve.seconds} s")
    assert gain < 0.05 if shuffled else gain > 0.1
