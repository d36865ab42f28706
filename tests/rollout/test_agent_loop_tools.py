"""The multi-turn loop: tokens between turns, limits, rewards, interactions, and loops of public verl."""

import asyncio
import copy
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import verl.agents.loop as agent_loop
from examples.quickstart.tiny_model import tiny_model
from verl.agents import AGENT_LOOPS, MultiTurnLoop, Prompt, Trajectory, make_agent_loop
from verl.agents.chat import ChatContinuation
from verl.agents.public import ServerManager
from verl.agents.tags import TagLoop
from verl.config import load_config
from verl.data.chat import encode_conversations
from verl.registry import import_module
from verl.rollout.request import Completion, Request, SamplingParams

CALCULATOR = Path(__file__).parents[2] / "examples/tools/calculator.py"
ROLLOUT = "actor_rollout_ref.rollout."
TOOLS = '''
import asyncio
from verl.agents.tools.function_tool import function_tool
from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.base_tool import BaseInteraction
from verl.agents.tools.schemas import ToolResponse

@function_tool
def add(a: int, b: int) -> tuple:
    """Add.

    Args:
        a: one.
        b: two.
    """
    return ToolResponse(text=str(a + b)), 0.25
@function_tool
async def nap() -> str:
    """Sleep."""
    await asyncio.sleep(60)

class Counter(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "counted", 0.5, {}
    async def calc_reward(self, instance_id, **kwargs):
        return 2.0

class Echo(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        self.left = {**getattr(self, "left", {}), instance_id: kwargs["replies"]}
    async def generate_response(self, instance_id, messages, **kwargs):
        self.left[instance_id] -= 1
        if messages[-1]["content"] == "fail":
            raise ValueError("no")
        return self.left[instance_id] < 0, f"you said {messages[-1]['content']}", 0.5, {}
    async def finalize_interaction(self, instance_id, **kwargs):
        del self.left[instance_id]
'''
CONFIG = "tools: [{class_name: 'tools.py:Counter', tool_schema: {type: function, function: {name: count}}}]"
TALK = "interaction: [{name: echo, class_name: 'tools.py:Echo', config: {}}]"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_model("qwen2", tmp_path_factory.mktemp("model")))


@pytest.fixture
def files(tmp_path):
    for name, text in (("tools.py", TOOLS), ("tools.yaml", CONFIG), ("talk.yaml", TALK)):
        (tmp_path / name).write_text(text)
    return tmp_path


def rollout(*overrides: str):
    keys = [ROLLOUT + text for text in ("multi_turn.enable=true", "multi_turn.tool_isolation=none", *overrides)]
    return load_config(overrides=keys).actor_rollout_ref.rollout


def tool_loop(files, tokenizer, *overrides: str) -> MultiTurnLoop:
    config = rollout(f"multi_turn.function_tool_path={files / 'tools.py'}", *overrides)
    return make_agent_loop(config.agent.default_agent_loop, config, tokenizer)


class Policy:
    """Writes given turns, each with the end token, and records what it was asked."""

    def __init__(self, tokenizer, *turns: str):
        self.tokenizer, self.turns, self.requests = tokenizer, list(turns), []

    async def __call__(self, request: Request) -> Completion:
        self.requests.append(request)
        ids, stop = self.tokenizer.encode(self.turns.pop(0)), request.params.stop
        ids += [] if stop and stop.find(ids) else [self.tokenizer.eos_token_id]
        kept = ids[: request.params.max_tokens]
        return Completion(kept, [-1.0] * len(kept), "stop" if kept == ids else "length")


def run(loop, policy: Policy, max_tokens: int = 1000, **columns) -> Trajectory:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = policy.tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(max_tokens, (policy.tokenizer.eos_token_id,))
    prompt = Prompt(ids, params, 3, columns)
    trajectory = asyncio.run(loop.run(prompt, policy))
    assert trajectory.prompt is prompt  # the rollout refuses another one
    return trajectory


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def texts(trajectory: Trajectory, tokenizer) -> list[tuple[str, str]]:
    return [(segment.author, tokenizer.decode(segment.token_ids)) for segment in trajectory.segments]


def test_a_call_its_observation_and_the_answer(files, tokenizer):
    policy = Policy(tokenizer, call("add", a=1, b="2"), "3")
    trajectory = run(tool_loop(files, tokenizer), policy)
    assert texts(trajectory, tokenizer) == [
        ("policy", call("add", a=1, b="2") + "<|im_end|>"),
        ("tool", "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"),
        ("policy", "3<|im_end|>"),
    ]
    assert policy.requests[1].prompt_ids == trajectory.prompt.token_ids + trajectory.token_ids[:-2]
    assert trajectory.turns == 2 and trajectory.finish_reason == "stop"
    assert trajectory.metrics == {"tool_calls": 1, "tool_errors": 0, "tool_timeouts": 0}
    assert trajectory.extra_info["tool_rewards"] == [0.25] and trajectory.extra_info["num_turns"] == 4


_DOC = "<information>Doc 1(Title: Ada) Ada has the code 42.</information>"


@pytest.mark.parametrize(("sampled", "breaks"), [("", "\n\n"), ("\n", "\n"), ("\n\n", "")])
@pytest.mark.parametrize(
    ("recipe", "turn", "result"),
    [
        ("search_r1", "<think>Who?</think> <search> code of Ada </search>", _DOC),
        ("search_r1", "<search>Bob</search>", "<information>nothing found</information>"),
        ("retool", "<code>```python\nx = 6\nx * 7\n```</code>", "<interpreter>42\n</interpreter>"),
        ("retool", "<code>for i in (1, 2): print(i)</code>", "<interpreter>1\n2\n</interpreter>"),
    ],
)
def test_a_call_between_tags_is_answered_in_the_same_turn(
    recipe, turn, result, sampled, breaks, tokenizer, tmp_path, monkeypatch
):
    """The last token of a call may end with line breaks, which the policy has sampled."""
    turn += sampled
    lines = ({"contents": "Ada\nAda has the code 42."}, {"contents": "Eve\nEve has none."})
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("CORPUS", str(tmp_path / "corpus.jsonl"))
    path = Path(__file__).parents[2] / "verl/recipe" / recipe
    overrides = [f"{ROLLOUT}agent.agent_loop_config_path={path / 'agent.yaml'}"]
    config = load_config(path / f"{recipe}.yaml", [*overrides, ROLLOUT + "multi_turn.tool_isolation=none"])
    loop = make_agent_loop(recipe, config.actor_rollout_ref.rollout, tokenizer)
    policy = Policy(tokenizer, turn, "<answer>42</answer>")
    trajectory = run(loop, policy)
    assert texts(trajectory, tokenizer) == [
        ("policy", turn),
        ("tool", f"{breaks}{result}\n\n"),
        ("policy", "<answer>42</answer><|im_end|>"),
    ]
    counts = [len(segment.token_ids) for segment in trajectory.segments]
    assert trajectory.response_mask == [1] * counts[0] + [0] * counts[1] + [1] * counts[2]
    assert trajectory.metrics == {"tool_calls": 1, "tool_errors": 0, "tool_timeouts": 0}
    assert trajectory.extra_info["num_turns"] == 4


def test_a_loop_with_tags_needs_one_tool_with_one_argument(files, tokenizer):
    with pytest.raises(ValueError, match=r"expected one tool with one required argument.*found 1 tools with 0"):
        TagLoop(rollout(), tokenizer, tools=str(files / "tools.yaml"), call_tag="a", result_tag="b")


def test_sft_on_a_chat_with_a_call_trains_on_the_tokens_of_the_rollout(tokenizer):
    """A chat whose messages are those of the trajectory: the same tokens, and the same of them in the loss."""
    turn = call("calculator", expression="12*34+5")
    config = rollout(f"multi_turn.function_tool_path={CALCULATOR}")
    loop = make_agent_loop(config.agent.default_agent_loop, config, tokenizer)
    trajectory = run(loop, Policy(tokenizer, turn, "413"))
    roles = ("user", "assistant", "tool", "assistant")
    chat = [{"role": role, "content": text} for role, text in zip(roles, ("hi", turn, "413", "413"))]
    ((ids, mask),) = encode_conversations(tokenizer, [chat])
    assert ids == trajectory.prompt.token_ids + trajectory.token_ids
    assert mask == [0] * len(trajectory.prompt.token_ids) + trajectory.response_mask
    assert trajectory.metrics["tool_errors"] == 0


def test_a_template_that_drops_observations_is_refused(tokenizer):
    dropping = copy.deepcopy(tokenizer)
    dropping.chat_template = tokenizer.chat_template.replace(
        "in messages -%}", "in messages if message.role != 'tool' -%}"
    )
    ChatContinuation(dropping)
    with pytest.raises(ValueError, match="the chat template does not show a tool message after an assistant message"):
        ChatContinuation(dropping, [{"type": "function", "function": {"name": "add"}}])


@pytest.mark.parametrize(
    ("text", "observation", "errors"),
    [
        ("<tool_call>{</tool_call>", "error: the tool call is not JSON", 1),
        (call("sub", a=1), "error: ValueError: there is no tool 'sub': known: add, nap", 1),
        (call("add", a=1), "error: TypeError: missing a required argument: 'b'", 1),
        (call("add", a=[], b="x"), "error: ValueError: argument 'a': expected integer, found []", 1),
        (call("nap"), "error: timed out after 0.1 s", 1),
        (call("add", a=1, b=1) + call("add", a=2, b=2), "2", 1),
    ],
)
def test_a_failing_call_is_an_observation(text, observation, errors, files, tokenizer):
    trajectory = run(tool_loop(files, tokenizer, "multi_turn.tool_timeout=0.1"), Policy(tokenizer, text, "ok"))
    found = texts(trajectory, tokenizer)
    assert found[1][1].startswith(f"\n<|im_start|>tool\n{observation}") and found[2][1] == "ok<|im_end|>"
    assert trajectory.metrics["tool_errors"] == errors
    assert trajectory.metrics["tool_timeouts"] == ("timed out" in observation)


def test_parallel_calls_keep_their_order_and_more_of_them_are_refused(files, tokenizer):
    turn = call("add", a=1, b=1) + call("add", a=2, b=2) + call("add", a=3, b=3)
    trajectory = run(tool_loop(files, tokenizer, "multi_turn.max_parallel_calls=2"), Policy(tokenizer, turn, "ok"))
    assert texts(trajectory, tokenizer)[1][1] == (
        "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>tool\n"
        "error: at most 2 tool calls per turn are run, and this is one more<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trajectory.metrics["tool_calls"] == 3 and trajectory.metrics["tool_errors"] == 1


def test_limits_of_turns_and_tokens(files, tokenizer, caplog):
    turn = call("add", a=1, b=1)
    limited = tool_loop(files, tokenizer, "multi_turn.max_assistant_turns=2")
    trajectory = run(limited, Policy(tokenizer, turn, turn, "never"))
    assert (trajectory.turns, trajectory.metrics["tool_calls"], trajectory.segments[-1].author) == (2, 1, "policy")
    limited = tool_loop(files, tokenizer, "multi_turn.max_user_turns=1")
    assert run(limited, Policy(tokenizer, turn, turn, "never")).turns == 2
    tokens = len(tokenizer.encode(turn)) + 1
    short = run(limited, Policy(tokenizer, turn, "never"), max_tokens=tokens + 5)  # no place for the observation
    assert len(short) == tokens and short.finish_reason == "length"
    run(limited, Policy(tokenizer, "done"), extra_info={"interaction_kwargs": {"name": "echo"}})  # data for both
    assert "interaction_kwargs of samples have no effect" in caplog.text
    cut = run(limited, Policy(tokenizer, turn), max_tokens=tokens - 1)
    assert cut.finish_reason == "length" and cut.metrics["tool_calls"] == 0


def test_rewards_of_classes(files, tokenizer, caplog):
    loop = tool_loop(files, tokenizer, f"multi_turn.tool_config_path={files / 'tools.yaml'}")
    facts = run(loop, Policy(tokenizer, call("count"), "done"), extra_info={}).info
    assert facts["tool_rewards"] == [0.5] and facts["rollout_reward_scores"] == {"count": 2.0}
    used = {"need_tools_kwargs": True, "tools_kwargs": {"count": {"create_kwargs": {"x": 1}}, "add": None}}
    assert run(loop, Policy(tokenizer, "done"), extra_info=used).info["rollout_reward_scores"] == {"count": 2.0}
    assert run(loop, Policy(tokenizer, "done")).info["rollout_reward_scores"] == {}
    with pytest.raises(ValueError, match="need_tools_kwargs is true, but the sample has no tools_kwargs"):
        run(loop, Policy(tokenizer, "done"), extra_info={"need_tools_kwargs": True})
    for wrong, what in (("count", "tools_kwargs"), ({"count": [1]}, r"tools_kwargs\['count'\]")):
        with pytest.raises(ValueError, match=f"{what} of the sample: expected a mapping, found"):
            run(loop, Policy(tokenizer, "done"), extra_info={"tools_kwargs": wrong})
    for _ in range(2):
        run(loop, Policy(tokenizer, "done"), extra_info={"tools_kwargs": {"coumt": {}}})
    assert caplog.text.count("there is no tool 'coumt': did you mean 'count'") == 1


def test_a_tool_whose_reward_fails_counts_and_others_keep_theirs(files, tokenizer, caplog):
    (files / "tools.py").write_text(TOOLS + "\nclass Broken(Counter):\n    calc_reward = None\n")
    entry = CONFIG.removeprefix("tools: [").removesuffix("]")
    broken = entry.replace("Counter", "Broken").replace("count}", "broken}")
    (files / "tools.yaml").write_text(f"tools: [{broken}, {entry}]")
    loop = tool_loop(files, tokenizer, f"multi_turn.tool_config_path={files / 'tools.yaml'}")
    found = run(loop, Policy(tokenizer, "done"), extra_info={"tools_kwargs": {"broken": {}, "count": {}}})
    assert found.info["rollout_reward_scores"] == {"count": 2.0}
    assert (found.metrics["tool_errors"], found.metrics["tool_timeouts"]) == (1, 0)
    assert "calc_reward or release of the tool broken: TypeError" in caplog.text and not loop.runner.host._instances


# ---- interactions -------------------------------------------------------------------------------------------------


def test_instances_are_released_after_an_error(files, tokenizer):
    loop = tool_loop(files, tokenizer, f"multi_turn.tool_config_path={files / 'tools.yaml'}")
    policy, released = Policy(tokenizer, call("count")), []
    loop.runner.host.tools["count"].release = lambda instance, **kwargs: _noted(released, instance)
    with pytest.raises(IndexError):  # the policy has no second turn
        run(loop, policy)
    assert len(released) == 1 and not loop.runner.host._instances


async def _noted(released: list, instance: str) -> None:
    released.append(instance)


def interaction_loop(files, tokenizer, *overrides: str) -> MultiTurnLoop:
    config = rollout(f"multi_turn.interaction_config_path={files / 'talk.yaml'}", *overrides)
    return make_agent_loop("interaction", config, tokenizer)


def test_a_user_replies_until_the_interaction_ends(files, tokenizer):
    loop, columns = interaction_loop(files, tokenizer), {"extra_info": {"interaction_kwargs": {"replies": 2}}}
    trajectory = run(loop, Policy(tokenizer, "a", "b", "c"), **columns, raw_prompt=[{"role": "user", "content": "hi"}])
    assert texts(trajectory, tokenizer) == [
        ("policy", "a<|im_end|>"),
        ("user", "\n<|im_start|>user\nyou said a<|im_end|>\n<|im_start|>assistant\n"),
        ("policy", "b<|im_end|>"),
        ("user", "\n<|im_start|>user\nyou said b<|im_end|>\n<|im_start|>assistant\n"),
        ("policy", "c<|im_end|>"),
    ]
    assert trajectory.info["turn_scores"] == [0.5, 0.5, 0.5] and trajectory.turns == 3
    assert loop.runner.host.interactions["echo"].left == {}
    for raw in (np.array([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], dtype=object), "u"):
        assert run(loop, Policy(tokenizer, "a", "b", "c"), **columns, raw_prompt=raw).turns == 3


def test_interactions_that_fail_and_samples_without_arguments(files, tokenizer):
    loop = interaction_loop(files, tokenizer, "multi_turn.max_user_turns=1")
    columns = {"extra_info": {"interaction_kwargs": {"name": "echo", "replies": 9}}}
    failed = run(loop, Policy(tokenizer, "fail", "never"), **columns)
    assert failed.turns == 1 and failed.metrics["tool_errors"] == failed.metrics["interaction_errors"] == 1
    assert failed.info["agent_failure"] == "interaction echo: ValueError: no"
    worked = run(loop, Policy(tokenizer, "a", "b", "never"), **columns)
    assert worked.turns == 2 and worked.metrics["interaction_errors"] == 0 and "agent_failure" not in worked.info
    without = run(loop, Policy(tokenizer, "a"))
    assert without.metrics["interaction_errors"] == 1 and without.turns == 1
    hint = "interaction echo: KeyError: 'replies' (the sample has no extra_info.interaction_kwargs)"
    assert without.info["agent_failure"] == hint
    with pytest.raises(ValueError, match="found 'ecko': did you mean 'echo'"):
        run(loop, Policy(tokenizer), extra_info={"interaction_kwargs": {"name": "ecko"}})


# ---- tokens between turns -----------------------------------------------------------------------------------------


def test_what_is_trained_on_was_sampled_where_rendering_again_would_differ(files, tokenizer):
    """The policy samples an unusual tokenization of its call: each character by itself."""
    turn = call("add", a=1, b=2)
    sampled = [token for c in turn for token in tokenizer.encode(c)] + [tokenizer.eos_token_id]

    async def generate(request: Request) -> Completion:
        ids = sampled if len(request.prompt_ids) < 40 else [*tokenizer.encode("3"), tokenizer.eos_token_id]
        return Completion(ids, [-1.0] * len(ids), "stop")

    loop = tool_loop(files, tokenizer)
    prompt = [{"role": "user", "content": "hi"}]
    ids = tokenizer(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))["input_ids"]
    params = SamplingParams(1000, (tokenizer.eos_token_id,))
    trajectory = asyncio.run(loop.run(Prompt(ids, params, 0), generate))
    assert trajectory.segments[0].token_ids == sampled
    trained = [token for token, mask in zip(trajectory.token_ids, trajectory.response_mask) if mask]
    assert trained == sampled + [*tokenizer.encode("3"), tokenizer.eos_token_id]
    chat = [*prompt, {"role": "assistant", "content": turn}, {"role": "tool", "content": "3"}]
    chat.append({"role": "assistant", "content": "3"})
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode(ids + trajectory.token_ids) + "\n" == rendered  # the same text ...
    # ... in other tokens
    assert tokenizer(rendered)["input_ids"][: len(ids) + len(trajectory)] != ids + trajectory.token_ids


def test_a_template_that_rewrites_earlier_turns_changes_nothing_that_was_sampled(tokenizer):
    """Templates of reasoning models drop the thoughts of earlier turns."""
    strip = "{% set text = m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] %}"
    template = (
        "{% for m in messages %}" + strip + "<|im_start|>{{ m['role'] }}\n{{ text }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not think %}<think></think>{% endif %}{% endif %}"
    )
    old, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        chat = ChatContinuation(tokenizer, template_kwargs={"think": False})
        end = tokenizer.eos_token_id
        sampled = [*tokenizer.encode("<think>x</think>y"), end]
        found = chat.next_tokens(sampled, (end,), [{"role": "user", "content": "z"}])
    finally:
        tokenizer.chat_template = old
    expected = "\n<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n<think></think>"
    assert tokenizer.decode(found) == expected


def test_text_that_is_not_valid_unicode(tokenizer):
    """Tools can return lone surrogates, as of json.loads or file names. A tokenizer refuses them."""
    chat = ChatContinuation(tokenizer)
    found, expected = (chat.next_tokens([], [], [{"role": "tool", "content": text}]) for text in ("a\ud83db", "a?b"))
    assert found == expected


def test_the_end_of_a_turn(tokenizer):
    chat, end = ChatContinuation(tokenizer), tokenizer.eos_token_id
    messages = [{"role": "user", "content": "z"}]
    rest = "\n<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(chat.next_tokens([5, end], (end,), messages)) == rest
    # a turn that ended with a stop string, or with another stop token than the template's
    assert tokenizer.decode(chat.next_tokens([5, 6], (end,), messages)) == "<|im_end|>" + rest
    assert tokenizer.decode(chat.next_tokens([5, 6], (end, 6), messages)) == rest
    tokenizer_without = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer_without.chat_template = None
    with pytest.raises(ValueError, match="needs a chat template"):
        ChatContinuation(tokenizer_without)
    refuse = "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer_without.chat_template = "{% for m in messages %}" + refuse + "{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"does not support messages of \['tool'\].*no"):
        ChatContinuation(tokenizer_without).between([{"role": "tool", "content": "x"}])


# ---- selection, and loops of public verl --------------------------------------------------------------------------

PUBLIC = """
from typing import Any
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

@register("twice")
class TwiceLoop(AgentLoopBase):
    def __init__(self, *args, repeat=2, spoil=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.repeat, self.spoil = repeat, spoil

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        ids, mask = [], []
        for turn in range(self.repeat):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids + ids, sampling_params=sampling_params
            )
            ids, mask = ids + output.token_ids, mask + [1] * len(output.token_ids)
            if turn + 1 < self.repeat:
                more = await self.apply_chat_template([{"role": "user", "content": "again"}], remove_system_prompt=True)
                ids, mask = ids + more, mask + [0] * len(more)
        if self.spoil:
            ids[0] += 2
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=ids, response_mask=mask, num_turns=4, metrics={})
"""


def test_a_loop_of_public_verl(tmp_path, tokenizer):
    (tmp_path / "twice.py").write_text(PUBLIC)
    import_module(str(tmp_path / "twice.py"))
    loop, columns = AGENT_LOOPS["twice"](rollout(), tokenizer), {"raw_prompt": [{"role": "user", "content": "hi"}]}
    trajectory = run(loop, Policy(tokenizer, "a", "b"), **columns)
    assert tokenizer.decode(trajectory.token_ids) == (
        "a<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    assert sum(trajectory.response_mask) == 4 and trajectory.log_probs[0] == -1.0 and trajectory.turns == 2
    assert trajectory.info == {"num_turns": 4}


def test_a_loop_of_public_verl_refuses_images_that_it_would_not_send(tokenizer):
    prompt = Prompt([5], SamplingParams(20, (7,)), 0, {"multi_modal_inputs": {"pixel_values": 1}})
    server = ServerManager(prompt, Policy(tokenizer, "a"), tokenizer)
    with pytest.raises(ValueError, match=r"expected prompts without images, found images: .*tool_agent"):
        asyncio.run(server.generate("r", prompt_ids=[5], sampling_params={}))


def test_sampling_of_the_run_is_kept_in_a_loop_of_public_verl(tokenizer, caplog):
    agent_loop._logged.clear()
    policy = Policy(tokenizer, "a", "b")
    params = SamplingParams(20, (7,), temperature=0.8, top_p=0.9)
    server = ServerManager(Prompt([5], params, 0), policy, tokenizer)
    given = {"temperature": 0.1, "top_p": 0.9, "n": 4, "seed": None, "stop": "x", "stop_token_ids": [9], "logprobs": 1}
    given["repetition_penalty"] = 1.0  # no penalty, as in every run
    for _ in range(2):
        asyncio.run(server.generate("r", prompt_ids=[5], sampling_params=given | {"max_tokens": 3}))
    for request in policy.requests:
        used = request.params
        assert (used.temperature, used.top_p, used.max_tokens, used.stop_token_ids) == (0.8, 0.9, 3, (7, 9))
        assert used.stop.strings == ("x",)
    noted = [record.getMessage() for record in caplog.records]
    assert noted == [
        f"the agent sets {name}, which is not applied: the run is configured with {used}"
        for name, used in (("temperature=0.1", "temperature=0.8"), ("n=4", "n=1"))
    ]
    with pytest.raises(ValueError, match=r"sampling_params: \['best_of'\] not supported"):
        asyncio.run(server.generate("r", prompt_ids=[5], sampling_params={"best_of": 2}))


def test_loops_of_a_file(tmp_path, tokenizer):
    (tmp_path / "twice.py").write_text(PUBLIC)
    (tmp_path / "loops.yaml").write_text(
        "- {name: thrice, _target_: 'twice.py:TwiceLoop', repeat: 3}\n"
        "- {name: spoilt, _target_: 'twice.py:TwiceLoop', spoil: true}\n"
    )
    config = rollout(f"agent.agent_loop_config_path={tmp_path / 'loops.yaml'}")
    columns = {"raw_prompt": [{"role": "user", "content": "hi"}]}
    assert run(make_agent_loop("thrice", config, tokenizer), Policy(tokenizer, "a", "b", "c"), **columns).turns == 3
    with pytest.raises(ValueError, match="token 0 of the response has mask 1, but the engine did not sample it"):
        run(make_agent_loop("spoilt", config, tokenizer), Policy(tokenizer, "a", "b"), **columns)
    for other, message in (
        ("uuid4", "expected a class"),
        ("AgentLoopOutput", "class with `async def run`, found Agent"),
    ):
        (tmp_path / "loops.yaml").write_text(f"- {{name: x, _target_: 'twice.py:{other}'}}\n")
        with pytest.raises(ValueError, match=message):
            make_agent_loop("x", config, tokenizer)


def test_enable_selects_the_loop(files, tokenizer):
    assert load_config().actor_rollout_ref.rollout.agent.default_agent_loop == "single_turn_agent"
    assert rollout().agent.default_agent_loop == "tool_agent"
    assert rollout("agent.default_agent_loop=single_turn").agent.default_agent_loop == "single_turn"
    assert {"tool_agent", "tool_agent_loop", "interaction"} <= set(AGENT_LOOPS)
    for name in ("tool_agent", "tool_agent_loop", "interaction"):
        with pytest.raises(ValueError, match="no tools and no interactions"):
            make_agent_loop(name, rollout(), tokenizer)
