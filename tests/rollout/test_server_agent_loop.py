"""The calls of an agent become one trajectory, append-only; agents that fail, hang or write too much."""

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path

import openai
import pytest

import verl.agents.loop as agent_loop
from examples.quickstart.tiny_model import tiny_model
from tests.waiting import wait_until
from verl.agents import Prompt, Trajectory, make_agent_loop
from verl.config import schema
from verl.rollout.request import Completion, Request, SamplingParams
from verl.server.agents import in_thread, read_result
from verl.server.episodes import Episode, StepGenerator
from verl.server.protocol import read_call
from verl.server.service import Running, ServedModel
from verl.utils.coroutines import GENERATION_CLOCK

GUESS = Path(__file__).parents[2] / "examples/server_agent/guess_agent.py"
START = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model("qwen2", tmp_path_factory.mktemp("chat") / "model"))


class Policy:
    """Writes one character per token, which is not how the tokenizer writes text."""

    def __init__(self, tokenizer, text: str = "hello", seconds: float = 0.0):
        self.tokenizer, self.text, self.seconds = tokenizer, text, seconds
        self.requests: list[Request] = []
        self.cancelled = 0

    async def __call__(self, request: Request) -> Completion:
        self.requests.append(request)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ids = [self.tokenizer(character)["input_ids"][0] for character in self.text]
        ids = [*ids, self.tokenizer.eos_token_id]
        whole = len(ids) <= request.params.max_tokens
        ids = ids[: request.params.max_tokens]
        return Completion(ids, [-0.5] * len(ids), "stop" if whole else "length", [(0, 4)])


def say(client, messages, **others):
    return client.chat.completions.create(model="any", messages=messages, **others).choices[0]


def plain(act):
    """An agent made of `act(client, sample)`, in a thread."""

    def start(sample, base_url, api_key, model):
        def use():
            with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                return act(client, sample)

        return in_thread(use)

    return start


def run(tokenizer, policy, act=None, samples=1, max_tokens=200, agent=None, **server) -> list[Trajectory]:
    """Trajectories of an agent: `act`, or the one of the settings `agent`."""
    given = {"path": str(GUESS)} if agent is None else agent
    config = schema.RolloutConfig(
        prompt_length=64, response_length=max_tokens, server={"agent": given, "timeout": 10, **server}
    )
    loop = make_agent_loop("server_agent", config, tokenizer)
    if act is not None:
        loop.agent = plain(act)
    params = SamplingParams(max_tokens, (tokenizer.eos_token_id,))
    prompts = [Prompt([5, 6], params, i, {"extra_info": {"index": i}}) for i in range(samples)]

    async def all_samples() -> list[Trajectory]:
        return await asyncio.gather(*(loop.run(prompt, policy) for prompt in prompts))

    try:
        return asyncio.run(all_samples())
    finally:
        loop.server.close()


# ---- joining --------------------------------------------------------------------------------------------------------


def three_turns(client, sample):
    messages = list(START)
    for turn in range(3):
        choice = say(client, messages)
        messages += [choice.message, {"role": "user", "content": f"more {turn}"}]
    return 1.5


def test_tokens_are_appended_and_never_tokenized_again(tokenizer):
    policy = Policy(tokenizer)
    (trajectory,) = run(tokenizer, policy, three_turns)
    sampled = [*(tokenizer(c)["input_ids"][0] for c in "hello"), tokenizer.eos_token_id]
    text = tokenizer.apply_chat_template(START, add_generation_prompt=True, tokenize=False)
    assert trajectory.prompt_ids == tokenizer(text)["input_ids"] != trajectory.prompt.token_ids
    between = [
        tokenizer(f"\n<|im_start|>user\nmore {turn}<|im_end|>\n<|im_start|>assistant\n")["input_ids"] for turn in (0, 1)
    ]
    assert trajectory.token_ids == [*sampled, *between[0], *sampled, *between[1], *sampled]
    assert trajectory.response_mask == [
        *([1] * 6 + [0] * len(between[0])),
        *([1] * 6 + [0] * len(between[1])),
        *([1] * 6),
    ]
    assert [segment.author for segment in trajectory.segments] == ["policy", "user", "policy", "user", "policy"]
    # every request is what is trained on up to there
    whole = trajectory.prompt_ids + trajectory.token_ids
    assert all(request.prompt_ids == whole[: len(request.prompt_ids)] for request in policy.requests)
    assert len({request.sample_id for request in policy.requests}) == 3
    assert trajectory.info["agent_score"] == 1.5 and trajectory.info["num_turns"] == 6
    assert trajectory.weight_versions[0] == (0, 4) and trajectory.finish_reason == "stop"
    # rendering the conversation again gives other tokens
    rendered = tokenizer("hello")["input_ids"]
    assert tokenizer.decode(sampled[:-1]) == "hello" and rendered != sampled[:-1]


def test_stripped_replies_and_tool_calls_continue_the_trajectory(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ 'tools ' if tools else '' }}" + tokenizer.chat_template)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

    def act(client, sample):
        first = say(client, START, tools=tools)
        assert first.finish_reason == "tool_calls"
        (made,) = first.message.tool_calls
        answer = {"role": "tool", "tool_call_id": made.id, "content": "2"}
        # as a framework sends it again: without None, with its own formatting of the arguments
        function = {"name": "add", "arguments": json.dumps(json.loads(made.function.arguments), indent=1)}
        calls = [{"id": made.id, "type": "function", "function": function}]
        again = {"role": "assistant", "content": "", "tool_calls": calls}
        say(client, [*START, again, answer], tools=tools)

    (trajectory,) = run(tokenizer, Policy(tokenizer, call), act)
    assert trajectory.turns == 2 and [s.author for s in trajectory.segments] == ["policy", "tool", "policy"]
    assert trajectory.info["agent_error"] is None and trajectory.info["agent_score"] is None

    def strip(client, sample):
        content = say(client, START).message.content
        assert content == " hi "
        say(client, [*START, {"role": "assistant", "content": content.strip()}, {"role": "user", "content": "x"}])

    (trajectory,) = run(tokenizer, Policy(tokenizer, " hi "), strip)
    assert trajectory.turns == 2 and trajectory.info["agent_error"] is None


def two_conversations(client, sample):
    messages = list(START)
    for _ in range(2):
        messages += [say(client, messages).message, {"role": "user", "content": "more"}]
    say(client, [{"role": "user", "content": "something else"}])
    return 0.5


def test_a_call_that_does_not_continue_is_explained(tokenizer):
    def act(client, sample):
        message = say(client, START).message
        with pytest.raises(openai.ConflictError, match=r"messages.1 differs: .*hello.* found .*other") as error:
            say(client, [*START, {"role": "assistant", "content": "other"}, *START])
        assert error.value.code == "conversation_changed"
        with pytest.raises(openai.ConflictError, match="expected more than the 2 messages so far, found 1"):
            say(client, START)
        with pytest.raises(openai.ConflictError, match="tools differ"):
            say(client, [*START, message, *START], tools=[{"type": "function", "function": {"name": "x"}}])
        with pytest.raises(openai.BadRequestError, match="n: expected 1"):
            say(client, [*START, message, *START], n=2)
        return say(client, [*START, message, *START], max_tokens=3).finish_reason == "length"

    (trajectory,) = run(tokenizer, Policy(tokenizer), act)
    assert trajectory.turns == 2 and trajectory.info["agent_score"] == 1


@pytest.mark.parametrize(("on_new", "turns"), [("last", 1), ("longest", 2)])
def test_several_conversations(tokenizer, on_new, turns):
    policy = Policy(tokenizer)
    (trajectory,) = run(tokenizer, policy, two_conversations, on_new_conversation=on_new)
    assert trajectory.turns == turns and trajectory.info["agent_score"] == 0.5
    assert len({request.sample_id for request in policy.requests}) == 3  # no random numbers twice


def test_sampling_of_the_run_is_kept_and_stops_of_the_agent_apply(tokenizer, caplog):
    agent_loop._logged.clear()

    def act(client, sample):
        return float(say(client, START, temperature=0.1, seed=3, stop=["l"]).message.content == "he")

    policy = Policy(tokenizer)
    (trajectory,) = run(tokenizer, policy, act)
    params = policy.requests[0].params
    assert (params.temperature, params.seed, params.stop.strings) == (1.0, 0, ("l",))
    assert "temperature=0.1, which is not applied" in caplog.text and trajectory.info["agent_score"] == 1


def test_the_response_length_limits_the_trajectory(tokenizer):
    (trajectory,) = run(tokenizer, Policy(tokenizer), three_turns, max_tokens=20)
    assert trajectory.turns == 1 and trajectory.finish_reason == "length" and len(trajectory) == 6
    assert trajectory.info["agent_score"] == 0 and "have reached 20 tokens" in trajectory.info["agent_error"]
    none = {"agent_errors": 0, "agent_timeouts": 0, "agent_empty": 0, "agent_out_of_tokens": 0}
    assert trajectory.metrics == {**none, "agent_out_of_tokens": 1} and "agent_failure" not in trajectory.info
    (trajectory,) = run(tokenizer, Policy(tokenizer), three_turns, max_tokens=4)
    assert len(trajectory) == 4 and trajectory.finish_reason == "length"
    assert trajectory.metrics == {**none, "agent_out_of_tokens": 1}
    (trajectory,) = run(tokenizer, Policy(tokenizer), three_turns)
    assert trajectory.metrics == none
    long = [{"role": "user", "content": "long " * 100}]
    (trajectory,) = run(tokenizer, Policy(tokenizer), lambda client, sample: say(client, long))
    assert "data.max_prompt_length" in trajectory.info["agent_error"] and not sum(trajectory.response_mask)


# ---- agents that fail -----------------------------------------------------------------------------------------------


def test_one_agent_that_fails_does_not_stop_the_others(tokenizer):
    hang = threading.Event()

    def act(client, sample):
        index = sample["extra_info"]["index"]
        if index == 0:
            raise ValueError("no idea")
        if index == 1:
            return "a text"
        messages = list(START)
        messages += [say(client, messages).message, *START]
        if index == 2:
            raise SystemExit(3)
        if index == 3:
            hang.wait(60)
        return index

    found = run(tokenizer, Policy(tokenizer), act, samples=5, timeout=4, failure_score=-1)
    hang.set()
    assert [t.info["agent_score"] for t in found] == [-1, -1, -1, -1, 4]
    errors = [t.info["agent_error"] for t in found]
    assert "no idea" in errors[0] and "'a text'" in errors[1] and "SystemExit(3)" in errors[2]
    assert "rollout.server.timeout" in errors[3] and errors[4] is None
    assert [t.metrics["agent_timeouts"] for t in found] == [0, 0, 0, 1, 0]
    assert [t.metrics["agent_empty"] for t in found] == [1, 1, 0, 0, 0]
    assert [t.token_ids for t in found[:2]] == [[tokenizer.eos_token_id]] * 2 and found[0].response_mask == [0]
    assert all(sum(t.response_mask) == 6 for t in found[2:])


def test_a_wrong_result_counts_also_when_the_tokens_are_used_up(tokenizer):
    def act(client, sample):
        with suppress(openai.BadRequestError):
            three_turns(client, sample)
        return "a text"

    (trajectory,) = run(tokenizer, Policy(tokenizer), act, max_tokens=20)
    assert trajectory.metrics["agent_errors"] == trajectory.metrics["agent_out_of_tokens"] == 1
    assert trajectory.info["agent_failure"].startswith("after 1 call of the policy: ValueError: the agent returned 'a")


def test_a_call_that_runs_at_the_time_limit_is_cancelled(tokenizer):
    policy = Policy(tokenizer, seconds=300)
    clock = GENERATION_CLOCK.set(lambda: 100.0 * bool(policy.requests))  # the limit has passed once the call runs
    try:
        (trajectory,) = run(tokenizer, policy, lambda client, sample: say(client, START), timeout=0.3)
    finally:
        GENERATION_CLOCK.reset(clock)
    assert policy.cancelled == 1
    assert trajectory.finish_reason == "abort" and trajectory.metrics["agent_timeouts"] == 1


def test_calls_after_the_end_and_concurrent_calls_are_refused(tokenizer):
    kept, policy = [], Policy(tokenizer, seconds=2)

    def act(client, sample):
        kept.append(str(client.base_url))
        with openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as second:
            thread = threading.Thread(target=lambda: say(client, START))
            thread.start()
            wait_until(lambda: policy.requests)
            with pytest.raises(openai.ConflictError, match="another call of this episode is running"):
                say(second, START)
            thread.join()
            with pytest.raises(openai.APIStatusError, match="no running episode") as error:
                say(second.with_options(base_url=kept[0].replace("/v1", "x/v1")), START)
            assert error.value.status_code == 410
        return 1

    (trajectory,) = run(tokenizer, policy, act)
    assert trajectory.info == {"agent_score": 1, "agent_error": None, "agent_info": {}, "num_turns": 2}


def test_a_broken_agent_stops_the_run(tokenizer, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text("def run(sample, base_url, api_key, model):\n    import no_such_module\n")
    with pytest.raises(ValueError, match=r"16 agents failed before any got a response.*no_such_module"):
        run(tokenizer, Policy(tokenizer), samples=20, agent={"path": str(path)})


def test_an_error_of_the_engine_stops_the_run(tokenizer):
    """Otherwise every agent would get its failure_score, and the run would go on."""

    class Broken(Policy):
        async def __call__(self, request):
            if len(self.requests) == 1:
                raise KeyError("the engine is broken")
            return await super().__call__(request)

    with pytest.raises(KeyError, match="the engine is broken"):
        run(tokenizer, Broken(tokenizer), lambda client, sample: [say(client, START), 1.0][1], samples=3)


def test_the_end_of_a_streamed_call_leaves_the_next_one_alone(tokenizer):
    """An agent may send its next call as soon as it has read the finish_reason of a stream."""
    policy, found = Policy(tokenizer), []

    async def episode() -> None:
        generator = StepGenerator(policy, asyncio.get_running_loop())
        model = ServedModel("m", tokenizer, SamplingParams(50, ()), len(tokenizer), 200)
        one = Episode(Prompt([5], SamplingParams(50, (tokenizer.eos_token_id,)), 0), generator, model, 64, "error")
        first = Running.start(read_call(True, {"model": "m", "messages": START}), one, model)
        deltas = first.deltas()
        message = [delta async for delta in _until_last(deltas)][-1].choice.message
        again = {"model": "m", "messages": [*START, message, *START]}
        second = Running.start(read_call(True, again), one, model)
        await deltas.aclose()
        first.end()
        found.extend(await second.choices())
        assert one.close().turns == 2
        assert not generator._tasks  # it lives as long as the step

    asyncio.run(episode())
    assert found[0].message["content"] == "hello"


async def _until_last(deltas):
    async for delta in deltas:
        yield delta
        if delta.choice is not None:
            return


# ---- kinds of agents ------------------------------------------------------------------------------------------------

FILE = """
import asyncio, openai

async def run(sample, base_url, api_key, model):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        found = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "go"}])
    if sample["extra_info"]["index"] == 1:
        await asyncio.sleep(60)
    return {"score": len(found.choices[0].message.content), "note": "x"}

def plain(sample, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    return len(client.chat.completions.create(model=model, messages=[{"role": "user", "content": "go"}]).choices)

def few(sample): ...
"""


def test_async_and_plain_functions_and_their_checks(tokenizer, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(FILE)
    found = run(tokenizer, Policy(tokenizer), samples=3, agent={"path": str(path)}, timeout=2)
    assert [t.info["agent_score"] for t in found] == [5, 0, 5] and found[0].info["agent_info"] == {"note": "x"}
    assert [t.metrics["agent_timeouts"] for t in found] == [0, 1, 0]
    found = run(tokenizer, Policy(tokenizer), samples=2, agent={"path": str(path), "name": "plain"}, max_concurrency=1)
    assert [t.info["agent_score"] for t in found] == [1, 1]
    for agent, message in (
        ({"path": str(path), "name": "few"}, "expected a function of"),
        ({}, "expected rollout.server.agent.path, a Python file with the function 'run'"),
        ({"path": str(path), "name": "none"}, "defines no 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tokenizer, Policy(tokenizer), agent=agent)


@pytest.mark.parametrize("value", [float("nan"), "1", [1], {"score": "x"}])
def test_results_that_are_not_scores(value):
    with pytest.raises(ValueError, match="expected a finite number"):
        read_result(value)
    assert read_result({"a": 1}) == (None, {"a": 1}) and read_result(True) == (1.0, {})


def test_the_limit_of_agents_holds_while_another_event_loop_runs(tokenizer):
    config = schema.RolloutConfig(server={"agent": {"path": str(GUESS)}, "max_concurrency": 2})
    agents = make_agent_loop("server_agent", config, tokenizer)

    async def slot() -> asyncio.Semaphore:
        return agents._slot()

    training, validation = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        first = training.run_until_complete(slot())
        other = validation.run_until_complete(slot())
        assert first is not other and training.run_until_complete(slot()) is first
        validation.close()
        asyncio.run(slot())
        assert validation not in agents._slots and agents._slots[training] is first
    finally:
        training.close()
        agents.server.close()
