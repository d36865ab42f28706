"""Calls in processes that can be killed: each limit ends the call that exceeds it, and no other."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl.registry import import_module
from verl.rewards.functions import ScoreFunction
from verl.rewards.outcome import Sample
from verl.rewards.sandbox import pool as pool_module
from verl.rewards.sandbox.calls import DeadlineExceeded, alarm, call_samples
from verl.rewards.sandbox.pool import Call, Limits, ProcessPool, _Worker, address_of

SAMPLES = import_module(str(Path(__file__).with_name("sample_rewards.py")))


@pytest.fixture(scope="module")
def pool():
    pool = ProcessPool(2)
    yield pool
    pool.close()


def call(name, x=0):
    return Call(address_of(vars(SAMPLES)[name]), {"x": x})


def test_a_call_runs_in_another_process_in_its_main_thread(pool):
    pid, in_main_thread = pool.run(call("which_process"), Limits()).value
    assert pid != os.getpid() and in_main_thread


@pytest.mark.parametrize(
    "name, limits, failure",
    [
        ("sleep", Limits(wall_seconds=0.3), "did not end within 0.3 s"),
        ("spin", Limits(wall_seconds=0.3), "did not end within 0.3 s"),
        ("spin", Limits(cpu_seconds=0.1), "used more than 0.1 s of processor time"),
        ("fill_memory", Limits(memory_bytes=1 << 28), "used more than 256 MiB of memory"),
    ],
)
def test_each_limit_ends_the_call(pool, name, limits, failure):
    begun = time.monotonic()
    outcome = pool.run(call(name), limits)
    assert failure in outcome.failure and outcome.over_limit
    assert time.monotonic() - begun < 30
    assert pool.run(call("inverse", 4), Limits(wall_seconds=60)).value == 0.25


def test_output_is_shown_here_up_to_its_limit(pool, capsys):
    pool.run(call("chatter"), Limits(output_bytes=30))
    shown = capsys.readouterr().out
    assert shown.count("a") < 40 and "71 more characters of output were dropped" in shown


def test_a_log_handler_writes_to_the_output_of_each_call(capsys):
    pool = ProcessPool(1)
    for x in (1, 2):
        assert pool.run(call("logs", x), Limits()).value == "utf-8"
        assert capsys.readouterr().out == f"logged {x}\nbytes {x}\n"
    pool.close()


def test_an_exception_comes_back_with_its_traceback(pool):
    outcome = pool.run(call("inverse", 0), Limits())
    assert outcome.failure == "raised ZeroDivisionError: division by zero" and not outcome.over_limit
    assert "return 1 / x" in str(outcome.cause) and "sample_rewards.py" in str(outcome.cause)


@pytest.mark.parametrize("x", [0, 1])
def test_the_fork_of_a_worker_does_not_reply(pool, x):
    calls = [call("forks", x), call("inverse", 2), call("inverse", 4), call("inverse", 8)]
    assert [pool.run(one, Limits(wall_seconds=10)).value for one in calls] == [x, 0.5, 0.25, 0.125]


def test_the_exit_of_a_worker_is_noticed_while_a_fork_of_it_lives(pool):
    begun = time.monotonic()
    outcome = pool.run(call("forks", 2), Limits(wall_seconds=30))
    assert outcome.failure == "ended its process, which exited with status 3" and outcome.over_limit
    assert time.monotonic() - begun < 10


def test_a_reply_to_another_call_fails_this_call_and_ends_the_worker():
    pool = ProcessPool(1)
    before = pool.run(call("which_process"), Limits()).value[0]
    worker = pool._slots.get()
    send = worker.send
    worker.send = lambda message: (send(message), setattr(worker, "_number", worker._number + 1))
    pool._slots.put(worker)
    assert "another call" in pool.run(call("inverse", 2), Limits(wall_seconds=10)).failure
    assert not _alive(before)
    assert pool.run(call("inverse", 4), Limits()).value == 0.25
    pool.close()


def test_an_exception_whose_str_fails_is_described_by_its_type(pool):
    outcome = pool.run(call("raises_without_message"), Limits(wall_seconds=10))
    assert outcome.failure == "raised HasNoMessage (its __str__ fails)" and not outcome.over_limit


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_whatever_an_async_function_raises_is_the_outcome_of_its_sample(timeout):
    names = {"cancel": "CancelledError", "ctrl-c": "KeyboardInterrupt", "exit": "SystemExit", "str": "HasNoMessage"}
    texts = ["a", *names, *(f"+{name}" for name in names), "b"]
    samples = [Sample("", text, "", {}, number, len(texts)) for number, text in enumerate(texts)]
    function = ScoreFunction(SAMPLES.raises_any)
    begun = time.monotonic()
    found = dict(call_samples(function, samples, timeout, None, concurrency=4))
    assert found.pop(0).value == found.pop(len(texts) - 1).value == 1.0
    for index, name in enumerate([*names.values(), *names.values()], start=1):
        assert found[index].failure.startswith(f"raised {name}"), texts[index]
    assert time.monotonic() - begun < 10


def test_calls_that_share_a_message_have_their_own_limits_and_failures(tmp_path, monkeypatch, capsys):
    """400 calls in a few messages. Each call runs once, whatever the others of its message do."""
    names = [str(x) for x in range(400)]
    failures = {30: ("exit", "ended its process, which exited with status 7")}
    failures |= {31: ("segfault", "ended its process, which was killed by SIGSEGV")}
    failures |= {60: ("hang", "did not end within 0.8 s"), 200: ("raise", "raised KeyError: 'raise'")}
    for position, (name, _) in failures.items():
        names[position] = name
    names[100], names[300:305] = "fork", ["slow"] * 5  # 1.5 s together
    messages, start = [], _Worker.start_calls
    monkeypatch.setattr(
        _Worker, "start_calls", lambda worker, *given: (messages.append(len(given[0])), start(worker, *given))
    )
    pool, log = ProcessPool(1), tmp_path / "log"
    calls = [Call(address_of(SAMPLES.acts), {"x": name, "log": str(log)}) for name in names]
    found = dict(pool.map(calls, Limits(wall_seconds=0.8)))
    pool.close()
    assert sorted(found) == list(range(400))
    for position, name in enumerate(names):
        failure = failures.get(position, (None, None))[1]
        if failure is None:
            assert found[position].value == name
        else:
            assert failure in found[position].failure
            assert found[position].over_limit == (position != 200)
    assert log.read_text().split() == names
    kept = [name for name in names if name not in ("exit", "segfault", "hang")]
    assert capsys.readouterr().out.splitlines() == [f"output of {name}" for name in kept]
    assert len(messages) < 100 and sum(messages) > 400


def test_slow_calls_are_spread_over_the_workers(pool):
    list(pool.map([call("naps")] * 2, Limits()))  # starts both workers
    pids = [outcome.value for _, outcome in pool.map([call("naps")] * 12, Limits())]
    assert min(pids.count(pid) for pid in set(pids)) >= 5 and len(set(pids)) == 2


def test_a_worker_that_was_ended_while_idle_is_replaced():
    pool = ProcessPool(1)
    worker = pool.run(call("which_process"), Limits()).value[0]
    os.kill(worker, signal.SIGKILL)
    time.sleep(0.2)
    assert pool.run(call("inverse", 2), Limits()).value == 0.5
    pool.close()


def test_closing_the_iterator_kills_what_is_busy(pool):
    begun = time.monotonic()
    outcomes = pool.map([call("sleep"), call("inverse", 1), call("sleep")], Limits(wall_seconds=60))
    assert next(outcomes)[0] == 1
    outcomes.close()
    assert [o.value for _, o in pool.map([call("inverse", 1)] * 2, Limits())] == [1.0, 1.0]
    assert time.monotonic() - begun < 10


def test_several_threads_share_the_workers(pool):
    found = {}

    def work(k):
        found[k] = [o.value for _, o in sorted(pool.map([call("inverse", k + 1)] * 20, Limits()), key=lambda p: p[0])]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {k: [1 / (k + 1)] * 20 for k in range(4)}


def test_unpicklable_arguments_are_named(pool):
    outcome = pool.run(Call(address_of(SAMPLES.inverse), {"x": lambda: 1}), Limits())
    assert "arguments that cannot be sent" in outcome.failure


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(pool_module, "STOPPED_SECONDS", 1.0)
    pool = ProcessPool(1)
    yield pool
    pool.close()


def test_a_stopped_process_that_had_not_begun_its_call_is_replaced(impatient, caplog):
    pid, _ = impatient.run(call("which_process"), Limits(wall_seconds=5)).value
    os.kill(pid, signal.SIGSTOP)
    results = dict(impatient.map([call("which_process")] * 3, Limits(wall_seconds=5)))
    assert sorted(results) == [0, 1, 2]
    assert all(outcome.failure is None and outcome.value[0] != pid for outcome in results.values())
    assert f"process {pid} of a reward function is stopped (SIGSTOP): it is killed" in caplog.text


def test_the_call_of_a_stopped_process_has_failed(impatient):
    """Also without a limit of its time."""
    results = dict(impatient.map([call("stop_itself"), call("which_process")], Limits()))
    assert "was stopped by SIGSTOP" in results[0].failure and results[0].over_limit
    assert results[1].failure is None


@pytest.mark.parametrize("func", [lambda x: x, (lambda: lambda x: x)(), print, Path.exists])
def test_functions_without_an_address_raise(func):
    with pytest.raises(ValueError, match="cannot be called in another process"):
        address_of(func)


def test_the_alarm_interrupts_and_leaves_no_trace():
    def handler(*_):
        raise AssertionError("the alarm of the test rang")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 50.0)
    try:
        with alarm() as interrupt:
            with pytest.raises(DeadlineExceeded):
                interrupt(0.2, lambda: time.sleep(1000))
            assert interrupt(5.0, lambda: 7) == 7
        assert 45 < signal.getitimer(signal.ITIMER_REAL)[0] < 50
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_worker_does_not_outlive_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, threading, time\n"
        "from verl.registry import import_module\n"
        "from verl.rewards.sandbox.pool import *\n"
        f"samples = import_module({SAMPLES.__file__!r})\n"
        "pool = ProcessPool(1)\n"
        "print(pool.run(Call(address_of(samples.which_process), {'x': 0}), Limits()).value[0], flush=True)\n"
        "threading.Thread(target=pool.run, args=(Call(address_of(samples.sleep), {'x': 0}), Limits())).start()\n"
        "time.sleep(0.5)\n"
        "os._exit(0)\n"
    )
    worker = int(subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60).stdout)
    for _ in range(50):
        if not _alive(worker):
            return
        time.sleep(0.1)
    raise AssertionError("the worker outlives its parent")


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that ended stays in the table as a zombie until its parent waits for it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
