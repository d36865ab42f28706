"""Tools in worker processes: whatever a tool does, its call ends in time and other calls are not affected."""

import asyncio
import os
import signal

import pytest

from verl.agents.tools.host import Observation, Rewards, ToolFailure, ToolSettings
from verl.agents.tools.processes import ToolProcesses
from verl.processes.child import describe_exit

TOOLS = """
import asyncio, os, sys, time
from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.function_tool import function_tool

def tool(func):
    schema = {"type": "function", "function": {"name": func.__name__, "parameters": {"properties": {}}}}
    return function_tool(schema=schema)(func)

@tool
def add(a, b): return a + b
@tool
async def nap(length): await asyncio.sleep(length); return os.getpid()
arrived, all_are_here = [], asyncio.Event()
@tool
async def meet(count):
    arrived.append(count)
    if len(arrived) == count:
        all_are_here.set()
    await all_are_here.wait()
    return os.getpid()
@tool
def hang():
    while True: time.sleep(1)
@tool
async def block():
    while True: pass
@tool
def fail(): raise KeyError("x")
@tool
def leave(): sys.exit(3)
@tool
def crash(): os._exit(3)
@tool
def flood():
    os.write(1, b"x" * 10_000_000); print("x" * 10_000_000); return "done"
@tool
def flood_for_ever():
    while True: print("x" * 1000)
class Text(str):
    def __reduce__(self): return eval, ("1/0",)
@tool
def subclass(): return Text("text")
@tool
def surrogate(): return "a\\ud800"
@tool
def interrupt(): raise KeyboardInterrupt
@tool
def fork(): return str(os.fork() > 0)
@tool
def kill(): os.kill(os.getpid(), 9)
@tool
def leave_child(file):
    if not (child := os.fork()):
        time.sleep(600)
        os._exit(0)
    with open(file, "a") as f: print(child, file=f)
    os.kill(os.getpid(), 9)
@tool
def stop(): os.kill(os.getpid(), 19)
@tool
def message_exits():
    class Error(Exception):
        def __str__(self): sys.exit(1)
    raise Error
@tool
async def cancel_all():
    for task in asyncio.all_tasks(): task.cancel()
    await asyncio.sleep(0)
@tool
def escape(): print("\\x1b[2J\\ud800"); return "\\x1b[2J"
@tool
async def unreadable():
    from verl.agents.tools import host
    host.Observation.__reduce__ = lambda self: (eval, ("1/0",))
@tool
def big(): return "y" * 10_000_000

class Counter(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.counts = {}
    async def create(self, instance_id=None, start=0):
        self.counts[instance_id] = start
        return instance_id
    async def execute(self, instance_id, parameters):
        self.counts[instance_id] += 1
        return str(self.counts[instance_id])
    async def calc_reward(self, instance_id):
        return self.counts[instance_id] / 10
"""
CONFIG = "tools: [{class_name: 'tools.py:Counter', tool_schema: {type: function, function: {name: count}}}]"


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    (folder / "tools.py").write_text(TOOLS)
    (folder / "tools.yaml").write_text(CONFIG)
    found = ToolProcesses(ToolSettings(str(folder / "tools.yaml"), str(folder / "tools.py"), None, 20), size=1)
    yield found
    found.close()


async def outcome(tools: ToolProcesses, name: str, seconds: float | None = 60.0, trajectory: str = "t", **parameters):
    """The observation of a call, or the message of its failure."""
    arguments = {"name": name, "parameters": parameters, "kwargs": {}}
    try:
        return await tools.call(trajectory, "execute", arguments, seconds)
    except ToolFailure as error:
        return str(error)


def test_calls_of_one_process_run_concurrently(tools):
    async def run() -> None:
        assert await outcome(tools, "add", a=1, b=2) == Observation("3")  # starts the process
        met = await asyncio.gather(*(outcome(tools, "meet", trajectory=f"n{i}", count=10) for i in range(10)))
        assert len({each.text for each in met}) == 1  # a process id; calls that wait for each other end in time

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hang", "timed out after 0.5 s"),
        ("block", "timed out after 0.5 s"),
        ("nap", "timed out after 0.5 s"),
        ("crash", "the process exited with status 3"),
        ("fail", Observation("error: KeyError: 'x'", failed=True)),
        ("leave", Observation("error: SystemExit: 3", failed=True)),
        ("flood", Observation("done")),
        pytest.param("flood_for_ever", "timed out after 0.5 s", marks=pytest.mark.slow),
        ("subclass", Observation("text")),
        ("surrogate", Observation("a\ud800")),  # `ChatContinuation.next_tokens` replaces it
        ("interrupt", Observation("error: Key...(truncated)...nterrupt: ", failed=True)),
        ("fork", Observation("True")),
        pytest.param("kill", f"the process {describe_exit(-9)}", marks=pytest.mark.slow),
        pytest.param("stop", "timed out after 0.5 s", marks=pytest.mark.slow),
        ("message_exits", Observation("error: Error", failed=True)),
        ("escape", Observation("\x1b[2J")),
        ("unreadable", "the process sent a result that cannot be read: ZeroDivisionError: division by zero"),
        ("big", Observation("yyyyyyyyyy...(truncated)...yyyyyyyyyy")),
    ],
)
def test_a_failing_tool_affects_no_other_call(name, expected, tools, capfd):
    async def run() -> None:
        parameters = {"length": 60} if name == "nap" else {}
        seconds = 0.5 if "0.5 s" in str(expected) else 60.0
        calls = [outcome(tools, name, seconds, **parameters), outcome(tools, "add", a=1, b=1)]
        found, other = await asyncio.gather(*calls)
        assert found == expected and other == Observation("2")

    asyncio.run(run())
    printed = capfd.readouterr()
    assert len(printed.out) + len(printed.err) < 1 << 18 and "\x1b" not in printed.err


def test_the_end_of_a_process_is_seen_although_its_child_lives(tools, tmp_path):
    """The child holds the connection open."""
    call = outcome(tools, "leave_child", None, file=str(tmp_path / "children"))
    try:
        said = asyncio.run(asyncio.wait_for(call, 30))
    finally:
        for child in (tmp_path / "children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    assert said == f"the process {describe_exit(-9)}"


def test_a_tool_that_cancels_all_calls_leaves_none_waiting(tools):
    async def run() -> list:
        return await asyncio.gather(*(outcome(tools, "cancel_all", 30, f"c{i}") for i in range(3)))

    assert all("CancelledError" in str(found) for found in asyncio.run(run()))  # and not a timeout


def test_state_stays_with_its_trajectory_and_its_loss_is_told(tools):
    async def run() -> None:
        count = {"name": "count", "parameters": {}, "kwargs": {"create_kwargs": {"start": 4}}}
        assert (await tools.call("a", "execute", count, 60)).text == "5"
        assert (await outcome(tools, "count", trajectory="b")).text == "1"
        assert (await tools.call("a", "execute", count, 60)).text == "6"
        assert await tools.call("a", "rewards", {"kwargs": {}}, 60) == Rewards({"count": 0.6}, {})
        assert await outcome(tools, "crash", trajectory="c") == "the process exited with status 3"
        lost = await outcome(tools, "count", trajectory="b")
        assert "the state of this trajectory is lost" in lost
        assert (await outcome(tools, "count", trajectory="b")).text == "1"
        for trajectory in "abct":
            tools.forget(trajectory)
        assert not {*"abct"} & {*tools._home, *tools._state}

    asyncio.run(run())


def test_a_file_that_only_fails_in_the_worker_is_an_error(tmp_path):
    fails = "\nif 'verl.agents.tools.worker' in getattr(sys.modules['__main__'].__spec__, 'name', ''): 1 / 0"
    (tmp_path / "once.py").write_text(TOOLS + fails)
    tools = ToolProcesses(ToolSettings(function_tool_path=str(tmp_path / "once.py")), size=1)
    with pytest.raises(ValueError, match=r"loaded in a worker process: function_tool_path: .*ZeroDivisionError"):
        asyncio.run(outcome(tools, "add", a=1, b=1))
    tools.close()
