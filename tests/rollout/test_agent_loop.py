"""Trajectories: who wrote which token, and requests that continue after all of them."""

import asyncio

import pytest

from verl.agents import AGENT_LOOPS, Prompt, SingleTurn, Trajectory
from verl.config import load_config
from verl.registry import import_module
from verl.rollout.request import Completion, Request, SamplingParams

EXAMPLE = "examples/custom_agent_loop/calculator_loop.py"
LETTERS = "abcdefghij0123456789=,:+-*()?./ "


class Tokenizer:
    """One token per character."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(LETTERS[i] for i in token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [LETTERS.index(c) for c in text]


def prompt(text: str = "ab", max_tokens: int = 20) -> Prompt:
    return Prompt(Tokenizer().encode(text), SamplingParams(max_tokens, (0,)), 17, {"data_source": "x"})


def test_segments_keep_author_mask_and_log_probs():
    trajectory = Trajectory(prompt(max_tokens=8))
    assert trajectory.next_request() == Request([0, 1], prompt(max_tokens=8).params, 17, "17:0")
    trajectory.add_completion(Completion([5, 6], [-0.5, -0.25], "stop", [(0, 3)]))
    trajectory.add_tokens([9, 9, 9], author="calculator")
    second = trajectory.next_request()
    assert second.prompt_ids == [0, 1, 5, 6, 9, 9, 9] and second.params.max_tokens == 3
    assert second.sample_id != 17 and second.request_id == "17:1" and second.continued == 5
    trajectory.add_completion(Completion([7, 8, 7], [-1.0, -2.0, -3.0], "length", [(0, 3), (1, 4)]))
    assert trajectory.next_request() is None
    assert trajectory.token_ids == [5, 6, 9, 9, 9, 7, 8, 7] and len(trajectory) == 8
    assert trajectory.response_mask == [1, 1, 0, 0, 0, 1, 1, 1]
    assert trajectory.log_probs == [-0.5, -0.25, 0, 0, 0, -1.0, -2.0, -3.0]
    assert trajectory.weight_versions == [(0, 3), (5, 3), (6, 4)]
    assert [segment.author for segment in trajectory.segments] == ["policy", "calculator", "policy"]
    assert trajectory.finish_reason == "length" and trajectory.turns == 2
    with pytest.raises(ValueError, match="tokens of other authors"):
        trajectory.add_tokens([1], author="policy")


def test_single_turn_is_one_completion():
    async def generate(request: Request) -> Completion:
        return Completion(request.prompt_ids, [0.0] * 2, "stop")

    trajectory = asyncio.run(SingleTurn().run(prompt(), generate))
    assert trajectory.token_ids == [0, 1] and trajectory.turns == 1
    assert AGENT_LOOPS["single_turn"] is AGENT_LOOPS["single_turn_agent"] is SingleTurn


def calculator():
    import_module(EXAMPLE)
    return AGENT_LOOPS["calculator"](load_config().actor_rollout_ref.rollout, Tokenizer())


def run_calculator(*turns: str, max_tokens: int = 20) -> Trajectory:
    """The loop with a policy that writes these turns."""
    left = iter(turns)

    async def generate(request: Request) -> Completion:
        text = next(left)[: request.params.max_tokens]
        ids = Tokenizer().encode(text)
        stopped = request.params.stop.find(ids) == len(ids)
        return Completion(ids, [-1.0] * len(ids), "stop" if stopped else "length")

    return asyncio.run(calculator().run(prompt(max_tokens=max_tokens), generate))


def test_the_calculator_returns_a_result_and_the_policy_continues():
    trajectory = run_calculator("a2*(3+4)=", "b1/0=", "c=", "j")
    assert Tokenizer().decode(trajectory.token_ids) == "a2*(3+4)=14b1/0=?c=?j"[:20]
    assert [s.author for s in trajectory.segments][:4] == ["policy", "calculator", "policy", "calculator"]
    assert trajectory.response_mask[9:11] == [0, 0]


def test_the_calculator_stops_at_the_limit():
    assert len(run_calculator("1+1=", "2*2*2=", max_tokens=7).token_ids) == 7


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1+2*3", "7"), ("-(4)", "-4"), ("7/2", "3.5"), ("1/0", "?"), ("__import__('os')", "?"), ("2**9", "?"), ("", "?")],
)
def test_calculate(expression, value):
    assert import_module(EXAMPLE).calculate(expression) == value
