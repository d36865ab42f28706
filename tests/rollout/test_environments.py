"""Environments as interactions: the first observation is in the prompt, steps are turns, rewards become the score."""

import sys

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.quickstart.tiny_model import tiny_model
from tests.rollout.test_agent_loop_tools import Policy, rollout, run, texts
from verl.agents import make_agent_loop
from verl.agents.tools.load import load_interactions
from verl.protocol import DataProto
from verl.rollout.request import SamplingParams
from verl.workers.rollout.role import Rollout

ENVIRONMENTS = '''
import asyncio
from types import SimpleNamespace
LOG = []
class Count:
    """Text actions, gymnasium's five values; ends at the limit."""
    def __init__(self, limit=2):
        self.limit, self.steps = limit, []
    def reset(self, *, seed=None, options=None):
        return f"seed {seed} options {options}", {}
    def step(self, action):
        self.steps.append(action)
        ends = len(self.steps) == self.limit
        return f"after {self.steps}", 0.5, False, ends, {}
    def close(self):
        LOG.append("closed")
class Turn(Count):
    def step(self, action):
        return {"action": action}, 1, action == 1, {}   # four values, an observation that is no text
class Client:
    """As a client of OpenEnv: async, entered, results with observation, reward, done."""
    async def __aenter__(self):
        LOG.append("entered"); return self
    async def __aexit__(self, *error):
        LOG.append("left")
    async def reset(self):
        await asyncio.sleep(0)
        return SimpleNamespace(observation="ready", reward=None, done=False)
    async def step(self, action):
        return SimpleNamespace(observation=f"ran {action['message']}", reward=None if action["message"] != "b" else 2.0,
                               done=action["message"] == "b")
def broken():
    raise OSError("no server")
def message(text):
    return {"message": text}
'''
CONFIG = """interaction:
  - {name: count, class_name: 'envs.py:Count', config: {limit: 2}}
  - {name: turn, class_name: 'envs.py:Turn', action: [left, right]}
  - {name: client, class_name: 'envs.py:Client', action: 'envs.py:message'}
  - {name: broken, class_name: 'envs.py:broken'}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_model("qwen2", tmp_path_factory.mktemp("model")))


@pytest.fixture
def loop(tmp_path, tokenizer):
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    (tmp_path / "envs.yaml").write_text(CONFIG)
    config = rollout(f"multi_turn.interaction_config_path={tmp_path / 'envs.yaml'}")
    return make_agent_loop(config.agent.default_agent_loop, config, tokenizer)


def play(loop, tokenizer, name: str, *turns: str, uid: str = "7", messages=(), **kwargs):
    extra_info = {"interaction_kwargs": {"name": name, **kwargs}}
    return run(loop, Policy(tokenizer, *turns), uid=uid, extra_info=extra_info, raw_prompt=list(messages))


def test_samples_of_a_prompt_start_in_one_state_and_prompts_in_different_ones(loop, tokenizer):
    """Without a seed in the row, it follows from the uid, which the rollout passes on to the agent loop."""
    columns = {"prompt_ids": [[1]] * 3, "uid": ["p", "p", "q"], "sample_index": [0, 1, 0]}
    rows = DataProto(
        non_tensor_batch={name: np.array([*values, None], object)[:-1] for name, values in columns.items()}
    )
    uids = [
        prompt.columns["uid"]
        for prompt in Rollout.prompts_of(None, rows, SamplingParams(max_tokens=4, stop_token_ids=()))
    ]
    first, again, other = (
        tokenizer.decode(play(loop, tokenizer, "count", "a", "b", uid=uid).prompt_ids) for uid in uids
    )
    assert first == again != other


def test_the_first_observation_is_in_the_prompt_and_steps_are_turns(loop, tokenizer):
    trajectory = play(loop, tokenizer, "count", "a", "b", seed=5, messages=[{"role": "user", "content": "Play."}])
    prompt = tokenizer.decode(trajectory.prompt_ids)
    assert prompt == "<|im_start|>user\nPlay.\n\nseed 5 options None<|im_end|>\n<|im_start|>assistant\n"
    after = "\n<|im_start|>user\nafter ['a']<|im_end|>\n<|im_start|>assistant\n"
    assert texts(trajectory, tokenizer) == [
        ("policy", "a<|im_end|>"),
        ("user", after),
        ("policy", "b<|im_end|>"),
    ]
    assert trajectory.info["turn_scores"] == [0.5, 0.5] and trajectory.info["agent_score"] == 1.0


def test_samples_of_a_prompt_start_in_the_same_state(loop, tokenizer):
    prompts = [tokenizer.decode(play(loop, tokenizer, "count", "a", "b", uid=u).prompt_ids) for u in ("7", "7", "8")]
    assert prompts[0] == prompts[1] != prompts[2]


def test_named_actions_are_indices_and_a_turn_without_one_is_answered(loop, tokenizer):
    trajectory = play(loop, tokenizer, "turn", "up", "not left, I go LEFT", "left or right")
    roles = [text for author, text in texts(trajectory, tokenizer) if author == "user"]
    assert "expected one of the actions left, right" in roles[0]
    assert '{"action": 0}' in roles[1]
    assert trajectory.info["turn_scores"] == [0.0, 1.0, 1.0] and trajectory.turns == 3


def test_an_async_client_is_entered_and_left(loop, tokenizer):
    trajectory = play(loop, tokenizer, "client", "a", "b")
    assert "ready" in tokenizer.decode(trajectory.prompt_ids)
    assert "ran a" in texts(trajectory, tokenizer)[1][1]
    assert trajectory.info["agent_score"] == 2.0
    make = loop.runner.host.interactions["client"]._make
    assert sys.modules[make.__module__].LOG == ["entered", "left"]


def test_an_environment_that_fails_is_a_failed_sample(loop, tokenizer):
    trajectory = play(loop, tokenizer, "broken")
    assert "OSError: no server" in trajectory.info["agent_failure"]
    assert trajectory.response_mask == [0] and trajectory.turns == 0
    assert trajectory.metrics["interaction_errors"] == 1
    trajectory = play(loop, tokenizer, "count", unknown=1)
    assert "unexpected keyword argument 'unknown'" in trajectory.info["agent_failure"]


def test_a_prompt_that_is_too_long_names_its_limit(loop, tokenizer):
    with pytest.raises(ValueError, match=r"expected at most data\.max_prompt_length=512"):
        play(loop, tokenizer, "count", "a", messages=[{"role": "user", "content": "word " * 600}])


def test_a_real_environment_of_gymnasium(tmp_path, tokenizer):
    pytest.importorskip("gymnasium")
    (tmp_path / "lake.yaml").write_text(
        "interaction: [{name: lake, class_name: gymnasium.make, action: [left, down, right, up], "
        "config: {id: FrozenLake-v1, is_slippery: false, render_mode: ansi}}]"
    )
    assert list(load_interactions(str(tmp_path / "lake.yaml"))) == ["lake"]
    config = rollout(f"multi_turn.interaction_config_path={tmp_path / 'lake.yaml'}")
    loop = make_agent_loop(config.agent.default_agent_loop, config, tokenizer)
    trajectory = play(loop, tokenizer, "lake", *["down", "down", "right", "right", "down", "right"])
    assert "FHFH" in tokenizer.decode(trajectory.prompt_ids)
    assert trajectory.info["turn_scores"] == [0, 0, 0, 0, 0, 1]
