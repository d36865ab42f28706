"""A GRPO step over tool calls: what is trained on is what the engine sampled."""

import importlib.util
import json
from collections import defaultdict
from itertools import pairwise

import pytest

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.conftest import run_settings
from tests.trainer.runs import fit
from verl.agents.tools.parsers import FunctionCall, ToolParser, register_tool_parser
from verl.registry import load_object

ROLLOUT = "actor_rollout_ref.rollout"
TOOLS = '''
from verl.agents.tools.function_tool import function_tool

@function_tool
def count(text: str) -> tuple:
    """Count characters.

    Args:
        text: any text.
    """
    return f"{len(text)} characters", 0.5
'''
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(extra_info["tool_rewards"]) + len(solution_str) % 3, "tools": len(extra_info["tool_rewards"])}
"""


vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm")
#: engine -> its class, and the size of a model that it supports
ENGINES = {
    "native": ("verl.rollout.native.engine", "NativeRollout", "tiny"),
    "hf": ("verl.rollout.hf", "HFRollout", "tiny"),
    "vllm": ("verl.rollout.vllm.engine", "VllmRollout", "small"),
}


class EveryTurn(ToolParser):
    """Every turn that ends with a stop string is a call: a random policy writes no other."""

    def parse(self, text):
        return "", [FunctionCall("count", json.dumps({"text": text}))]


@pytest.fixture
def settings(tmp_path):
    tiny_model("qwen2", tmp_path / "model", size="tiny")
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": f"Go {i}."}], "data_source": "x", "answer": "1"} for i in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = ("enable=true", "format=every_turn", "tool_isolation=none", f"function_tool_path={tmp_path / 'tools.py'}")
    sizes = ("data.train_batch_size=12", "data.max_prompt_length=64", "data.max_response_length=160", f"{ROLLOUT}.n=8")
    chosen = ["algorithm.name=grpo", "trainer.total_training_steps=1", "data.val_files=[]", f"{ROLLOUT}.stop=[z,x,Q]"]
    chosen += [*sizes, "actor_rollout_ref.actor.ppo_mini_batch_size=12", "actor_rollout_ref.actor.optim.lr=1e-6"]
    return [
        *run_settings(tmp_path, tmp_path / "run"),
        *chosen,
        *(f"{ROLLOUT}.multi_turn.{setting}" for setting in turns),
    ]


@pytest.mark.parametrize(
    "name", ["native", pytest.param("hf", marks=pytest.mark.slow), pytest.param("vllm", marks=vllm)]
)
def test_tokens_trained_on_are_those_sampled(name, settings, tmp_path, monkeypatch):
    register_tool_parser("every_turn")(EveryTurn)
    module, kind, size = ENGINES[name]
    tiny_model("qwen2", tmp_path / "model", size=size)
    engine, sampled = load_object(module, kind), defaultdict(list)
    generate_one = engine.generate_one

    async def recorded(self, request):
        completion = await generate_one(self, request)
        sampled[request.request_id.split(":")[0]].append((request.prompt_ids, list(completion.token_ids)))
        return completion

    monkeypatch.setattr(engine, "generate_one", recorded)
    trainer, (report,) = fit([*settings, f"{ROLLOUT}.name={name}"])
    batch, metrics = report.batch, report.metrics
    columns = batch.batch
    real = columns["attention_mask"].bool()
    width, trained, retokenized, found = columns["prompts"].shape[1], 0, 0, []
    for row in range(len(batch)):
        prompt = columns["prompts"][row][real[row, :width]].tolist()
        response = columns["responses"][row][real[row, width:]].tolist()
        mask = columns["response_mask"][row][real[row, width:]].bool().tolist()
        found.append((prompt, response, [token for token, m in zip(response, mask) if m]))
        text = trainer.tokenizer.decode(response)
        retokenized += trainer.tokenizer.encode(text, add_special_tokens=False) != response
    expected = []
    for turns in sampled.values():
        # each request continues after all tokens of the one before
        for (before, tokens), (after, _) in pairwise(turns):
            assert after[: len(before) + len(tokens)] == before + tokens
        last_prompt, last = turns[-1]
        expected.append((last_prompt + last, [token for _, tokens in turns for token in tokens]))
    for prompt, response, own in found:
        (tokens,) = [own_tokens for whole, own_tokens in expected if whole == (prompt + response)[: len(whole)]]
        assert own == tokens
        trained += len(own)
    assert trained == int(columns["response_mask"].sum()) > 10_000
    assert retokenized > len(batch) // 2  # rendering the text again would have trained on other tokens
    assert metrics["rollout/turns"] > 2 and metrics["rollout/tool_calls"] > 1 and metrics["rollout/tool_errors"] == 0
    assert metrics["rollout/logprob_gap_max"] < 1e-3 and metrics["actor/grad_norm"] > 0
    assert metrics["reward/tools"] == metrics["rollout/tool_calls"]  # the reward function has read them


def test_a_column_selects_the_loop(settings, tmp_path, monkeypatch):
    register_tool_parser("every_turn")(EveryTurn)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    names = ["tool_agent", "single_turn_agent", None]
    lines = [json.dumps({**row, "agent_name": names[i % 3]}) + "\n" for i, row in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    small = [f"{ROLLOUT}.n=2", "data.max_response_length=48", f"{ROLLOUT}.multi_turn.enable=false"]
    _, (report,) = fit([*settings, *small])
    columns = report.batch.non_tensor_batch
    for name, info in zip(columns["agent_name"], columns["trajectory_info"]):
        assert info["num_turns"] == 2 or name == "tool_agent"
    assert any(info["tool_rewards"] for info in columns["trajectory_info"])


LOOP = """
import json
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.tools.schemas import ToolResponse

@register("stops_early")
class StopsEarly(ToolAgentLoop):
    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        state = await super()._handle_processing_tools_state(agent_data)
        return AgentState.TERMINATED if agent_data.user_turns == 2 else state

@register("own_call")
class OwnCall(ToolAgentLoop):
    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        text = json.loads(tool_call.arguments)["text"]
        return ToolResponse(text=f"{len(text)} letters"), 0.25, {}

@register("own_score")
class OwnScore(ToolAgentLoop):
    async def run(self, sampling_params, **kwargs):
        messages = [{"role": "system", "content": "Be brief."}, *kwargs.pop("raw_prompt")]
        output = await super().run(sampling_params, raw_prompt=messages, **kwargs)
        output.reward_score = float(len(output.response_ids) % 2)
        output.extra_fields["reward_extra_info"] = {"calls": len(output.extra_fields["tool_rewards"])}
        return output

@register("one_turn")
class OneTurn(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.reward_score = 0.5 * len(output.response_ids)
        return output
"""


@pytest.mark.parametrize("name", ["own_score", *(pytest.param(name, marks=pytest.mark.slow) for name in
                                                 ("stops_early", "own_call", "one_turn"))])  # fmt: skip
def test_a_step_with_a_loop_of_public_verl(name, settings, tmp_path):
    register_tool_parser("every_turn")(EveryTurn)
    (tmp_path / "loop.py").write_text(LOOP)
    chosen = [f"imports=[{tmp_path / 'loop.py'}]", f"{ROLLOUT}.agent.default_agent_loop={name}", f"{ROLLOUT}.n=2"]
    scores = name in ("own_score", "one_turn")
    if scores:  # no reward function: the data source is unknown
        chosen += ["reward.custom_reward_function.path=null"]
    _, (report,) = fit([*settings, *chosen])
    columns, metrics = report.batch.batch, report.metrics
    infos, rewards = report.batch.non_tensor_batch["trajectory_info"], columns["token_level_scores"].sum(1)
    lengths = columns["attention_mask"][:, columns["prompts"].shape[1] :].sum(1)
    assert metrics["rollout/logprob_gap_max"] < 1e-3 and metrics["actor/grad_norm"] > 0
    if scores:
        assert rewards.tolist() == ((lengths % 2).float() if name == "own_score" else 0.5 * lengths).tolist()
        assert [info["reward_score"] for info in infos] == rewards.tolist()
    if name == "own_score":
        calls = [len(info["tool_rewards"]) for info in infos]
        assert metrics["reward/calls"] == pytest.approx(sum(calls) / len(calls)) and sum(calls) > 0
    if name == "stops_early":
        assert max(info["num_turns"] for info in infos) == 5
        ends = columns["response_mask"][range(len(lengths)), lengths - 1]
        assert [end for end, info in zip(ends.tolist(), infos) if info["num_turns"] == 5] == [0] * len(
            [info for info in infos if info["num_turns"] == 5]
        )
    if name == "own_call":
        assert {reward for info in infos for reward in info["tool_rewards"]} == {0.25}
