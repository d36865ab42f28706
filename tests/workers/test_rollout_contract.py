"""What a custom engine or agent loop returns is checked against the contract, with one error that says what to fix."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from verl.agents import AGENT_LOOPS, Prompt, Trajectory
from verl.config import schema
from verl.protocol import DataProto
from verl.rollout.base import ROLLOUT_ENGINES, RolloutEngine, RolloutEnv
from verl.rollout.request import Completion, Request, SamplingParams, make_requests
from verl.trainer.ppo.operators import generate
from verl.utils.coroutines import run_coroutine
from verl.workers.rollout.role import Rollout

GOOD = Completion([5, 6, 7], [-0.1, -0.2, -0.3], "stop")


class Fixed(RolloutEngine):
    """Returns `completions` for the two requests of a batch."""

    def __init__(self, completions):
        self.completions = completions

    def generate(self, requests):
        return self.completions if len(requests) > 1 else self.completions[:1]


class Group:
    """The rollout role in this process, for the operator `gen`."""

    def __init__(self, rollout: Rollout):
        self.rollout = rollout

    def generate_sequences(self, batch: DataProto) -> DataProto:
        return self.rollout.generate(batch, lambda values: values)


def make_rollout(completions, loop=None, **options) -> Rollout:
    ROLLOUT_ENGINES._entries["fixed"] = lambda config, model, env, train_engine=None: Fixed(completions)
    if loop is not None:
        AGENT_LOOPS._entries["loop"] = lambda config, tokenizer: loop
        options["agent"] = {"default_agent_loop": "loop"}
    config = schema.RolloutConfig(name="fixed", response_length=4, **options)
    env = RolloutEnv(0, 1, 0, torch.device("cpu"), pad_token_id=0)
    return Rollout(config, schema.ModelConfig(path="none"), env, stop_token_ids=(1,))


def run(completions, loop=None) -> DataProto:
    columns = {"prompt_ids": [[2, 3], [4]], "uid": ["a", "b"], "sample_index": [0, 0]}
    batch = DataProto.from_dict({}, columns, {"vocab_size": 10})
    return generate({"rollout": Group(make_rollout(completions, loop))}, "train")(batch)


def test_what_follows_the_contract_passes():
    found = run([GOOD, Completion([8], [-0.5], "length", [(0, 3)])])
    assert found.batch["responses"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert torch.equal(found.batch["rollout_log_probs"], torch.tensor([[-0.1, -0.2, -0.3], [-0.5, 0, 0]]))
    assert found.non_tensor_batch["finish_reason"].tolist() == ["stop", "length"]
    assert found.batch["weight_version"].tolist() == [0, 3]
    assert found.meta_info["metrics"]["response_length/clip_ratio"] == (1, 2)  # sum, count


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([GOOD], "returned 1 completions for 2 requests"),
        ([GOOD, GOOD, GOOD], "returned 3 completions for 2 requests"),
        ([GOOD, None], "request 1 .*expected a Completion, found NoneType"),
        # their totals are equal: the log-probs of one sample would be those of the other
        (
            [replace(GOOD, log_probs=[-0.1] * 4), replace(GOOD, log_probs=[-0.1] * 2)],
            "request 0 .*expected one log-prob per token, found 4 for 3 tokens",
        ),
        ([GOOD, replace(GOOD, finish_reason="eos")], "finish_reason stop or length or abort, found 'eos'"),
        ([GOOD, Completion([5] * 5, [-0.1] * 5, "length")], "expected at most max_tokens=4 tokens, found 5"),
        ([GOOD, Completion([], [], "stop")], "it has no tokens, but was not aborted"),
        ([GOOD, replace(GOOD, token_ids=[5, 6.5, 7])], "expected token ids that are ints, found float"),
        ([GOOD, replace(GOOD, token_ids=[5, 6, 10])], "sample 1: .*token id 10, but the model's vocabulary has 10"),
        ([GOOD, replace(GOOD, token_ids=[5, -1, 7])], "sample 1: .*token id -1"),
        ([GOOD, replace(GOOD, log_probs=[-0.1, math.nan, -0.1])], "sample 1, token 1: expected a finite log-prob"),
        ([GOOD, replace(GOOD, log_probs=[-0.1, -0.1, 0.7])], "sample 1, token 2: .* at most 0, found 0.7"),
        ([GOOD, replace(GOOD, weight_versions=[(0, -5)])], "weight versions of at least 0"),
    ],
)
def test_what_an_engine_returns_is_checked(completions, message):
    with pytest.raises(ValueError, match=message):
        run(completions)


def loop_of(act):
    """An agent loop that runs `act(prompt, generate)`."""
    return type("Loop", (), {"run": staticmethod(act)})()


async def one_turn(prompt, generate):
    trajectory = Trajectory(prompt)
    trajectory.add_completion(await generate(trajectory.next_request()))
    return trajectory


async def nothing(prompt, generate):
    return None


async def empty(prompt, generate):
    return Trajectory(prompt)


async def of_another_prompt(prompt, generate):
    return await one_turn(Prompt([9], prompt.params, 1), generate)


async def changes_the_prompt(prompt, generate):
    prompt.token_ids.append(9)
    return await one_turn(prompt, generate)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (nothing, "the agent loop Loop: expected run\\(\\) to return a Trajectory, found NoneType"),
        (empty, "the agent loop Loop: expected at least one token"),
        (of_another_prompt, "expected a Trajectory of the prompt that run\\(\\) was given"),
        (changes_the_prompt, "expected a Trajectory of the prompt that run\\(\\) was given"),
    ],
)
def test_what_an_agent_loop_returns_is_checked(act, message):
    with pytest.raises(ValueError, match=message):
        run([GOOD, GOOD], loop_of(act))


def test_a_loop_that_adds_too_many_tokens_is_truncated():
    async def act(prompt, generate):
        trajectory = await one_turn(prompt, generate)
        trajectory.add_tokens([8, 8])
        return trajectory

    found = run([GOOD, GOOD], loop_of(act))
    assert found.batch["responses"].tolist() == [[5, 6, 7, 8]] * 2
    assert found.batch["response_mask"].tolist() == [[1, 1, 1, 0]] * 2
    assert found.non_tensor_batch["finish_reason"].tolist() == ["length"] * 2
    assert found.meta_info["metrics"]["response_length/clip_ratio"] == (2, 2)


def test_a_sampling_key_that_the_engine_does_not_support_is_refused(monkeypatch):
    monkeypatch.setattr(Fixed, "sampling_keys", frozenset({"temperature"}))
    with pytest.raises(ValueError, match=r"rollout\.top_k=3: the rollout engine 'fixed' does not support it"):
        make_rollout([GOOD], top_k=3)
    make_rollout([GOOD], temperature=0.5)


def test_every_sampling_key_reaches_the_engine():
    """A key that is declared in the schema is a field of the requests' parameters, with its value."""
    values = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "ignore_eos": True}
    other = {"response_length", "stop"}  # max_tokens, and stop strings with their tokenizer
    assert values.keys() | other == schema.rollout.SamplingConfig.model_fields.keys()
    params = SamplingParams.from_config(schema.RolloutConfig(seed=7, **values), stop_token_ids=(1,))
    assert {name: getattr(params, name) for name in values} == values and params.seed == 7
    assert Request([1], params, 0).params.filters


# ---- what a custom engine may define --------------------------------------------------------------------------------


async def async_generate(requests):
    return [GOOD for _ in requests]


@pytest.mark.parametrize(
    "generate, error, message",
    [
        (async_generate, ValueError, r"Custom.generate\(\) returned a coroutine: .* must not be `async`"),
        (lambda requests: [GOOD] * (len(requests) - 1), ValueError, "returned 2 completions for 3 requests"),
        (lambda requests: [GOOD] * (len(requests) + 1), ValueError, "returned 4 completions for 3 requests"),
        (lambda requests: None, ValueError, "returned a NoneType: expected a list with one Completion per request"),
        (lambda requests: ["text"] * len(requests), ValueError, "expected a Completion, found str"),
        (lambda requests: next(iter(())), RuntimeError, "raised StopIteration"),
        (lambda requests: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
    ids=["async", "too few", "too many", "None", "no completions", "StopIteration", "error"],
)
def test_what_a_custom_generate_does_wrong_reaches_every_coroutine(generate, error, message):
    engine = type("Custom", (RolloutEngine,), {"generate": lambda self, requests: generate(requests)})()
    for found in run_coroutine(outcomes(engine)):
        with pytest.raises(error, match=message):
            raise found


def test_a_custom_generate_may_be_a_generator():
    engine = type("Custom", (RolloutEngine,), {"generate": lambda self, requests: (GOOD for _ in requests)})()
    assert run_coroutine(outcomes(engine)) == [GOOD] * 3


async def outcomes(engine: RolloutEngine) -> list:
    requests = make_requests([[1], [2], [3]], SamplingParams(8, (0,)))
    return await asyncio.gather(*(engine.generate_one(request) for request in requests), return_exceptions=True)


class OneByOne(RolloutEngine):
    """A user's engine that defines generate_one alone."""

    async def generate_one(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        return Completion(request.prompt_ids[: request.params.max_tokens], [0.0], "length")


def test_an_engine_defines_one_of_the_two():
    requests = make_requests([[1], [2]], SamplingParams(1, ()))
    assert [c.token_ids for c in OneByOne().generate(requests)] == [[1], [2]]

    async def inside_a_loop() -> list[Completion]:
        return OneByOne().generate(requests)  # as in a notebook cell

    assert len(run_coroutine(inside_a_loop())) == 2
    with pytest.raises(TypeError, match="neither generate"):
        type("Nothing", (RolloutEngine,), {})
