"""Reward functions as users write them, good and bad: loaded by path, also in worker processes."""

import asyncio
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

LOGGER = logging.getLogger("sample rewards")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


def plugin(sampled_response, reference_answer):
    return sampled_response == reference_answer


def with_extras(data_source, solution_str, ground_truth, extra_info):
    right = solution_str == ground_truth
    return {"score": 2.0 * right - 1.0, "acc": right, "length": len(solution_str)}


def weighted(data_source, solution_str, ground_truth, extra_info=None, *, weight, **kwargs):
    return weight * float(solution_str == ground_truth)


def keywords(data_source, solution_str, ground_truth, **others):
    return {"score": 1.0, "names": sorted(others)}


def raises_on_b(data_source, solution_str, ground_truth, extra_info=None):
    if "b" in solution_str:
        raise KeyError("no such thing as b")
    return 1.0


def fails_or_minus_one(data_source, solution_str, ground_truth):
    if "b" in solution_str:
        raise KeyError("b")
    return -1.0


def gives(data_source, solution_str, ground_truth, extra_info):
    """Returns whatever the row carries."""
    return extra_info["gives"]


def hangs_on_b(data_source, solution_str, ground_truth, extra_info=None):
    if "b" in solution_str:
        time.sleep(1000)
    return 1.0


def swallows_everything(data_source, solution_str, ground_truth):
    try:
        while "b" in solution_str:
            time.sleep(1000)
    except:  # noqa: E722 (that is the point)
        return 0.5
    return 1.0


def backtracks(data_source, solution_str, ground_truth):
    return float(re.fullmatch(r"(a*)*c", "a" * 40) is not None)


def dies_on_b(data_source, solution_str, ground_truth):
    if "b" in solution_str:
        os._exit(7)
    return 1.0


async def slow_judge(data_source, solution_str, ground_truth):
    await asyncio.sleep(0.2)
    return float(solution_str == ground_truth)


async def bad_judge(data_source, solution_str, ground_truth):
    if "b" in solution_str:
        await asyncio.sleep(1000)
    if "d" in solution_str:
        time.sleep(1000)  # never gives the loop back
    await asyncio.sleep(0.01)
    return 1.0


def batch(data_sources, solution_strs, ground_truths, extra_infos):
    longest = max(map(len, solution_strs))
    return [{"score": float(s == g), "share": len(s) / longest} for s, g in zip(solution_strs, ground_truths)]


def batch_too_short(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0]


def batch_number(data_sources, solution_strs, ground_truths, extra_infos):
    return 1.0


def which_process(x):
    return os.getpid(), threading.current_thread() is threading.main_thread()


def spin(x):
    while True:
        pass


def fill_memory(x):
    return len(bytearray(1 << 31))


def chatter(x):
    print("a" * 100)


def sleep(x):
    time.sleep(1000)


def inverse(x):
    return 1 / x


def exits_on_b(data_source, solution_str, ground_truth, extra_info=None):
    """As a function does that was written as a script."""
    if "b" in solution_str:
        raise SystemExit(3)
    return 1.0


async def exits_on_b_async(data_source, solution_str, ground_truth, extra_info=None):
    return exits_on_b(data_source, solution_str, ground_truth)


def forks(x):
    """Return in the parent and end somehow in the child."""
    child = os.fork()
    if child == 0:
        if x == 1:
            sys.exit(0)
        if x == 2:
            time.sleep(60)
        return -1
    if x == 2:
        os._exit(3)
    os.waitpid(child, 0)
    return x


class HasNoMessage(Exception):
    def __str__(self):
        raise RuntimeError("this exception has no message")


def raises_without_message(x):
    raise HasNoMessage


async def raises_any(data_source, solution_str, ground_truth):
    """Raise what the response names; a name with a + raises it in a task of its own."""
    kinds = {"cancel": asyncio.CancelledError, "ctrl-c": KeyboardInterrupt, "exit": SystemExit, "str": HasNoMessage}
    if solution_str.startswith("+"):
        return await asyncio.create_task(raises_any(data_source, solution_str[1:], ground_truth))
    await asyncio.sleep(0)
    if solution_str in kinds:
        raise kinds[solution_str]
    return 1.0


def acts(x, log):
    """Append x to a file and do what it names."""
    with open(log, "a") as file:
        file.write(f"{x}\n")
    print("output of", x)
    if x == "exit":
        os._exit(7)
    if x == "segfault":
        ctypes.string_at(0)
    if x == "hang":
        time.sleep(1000)
    if x == "raise":
        raise KeyError(x)
    if x == "slow":
        time.sleep(0.3)
    if x == "fork" and os.fork() == 0:
        return "fork"
    return x


def naps(x):
    time.sleep(0.1)
    return os.getpid()


def logs(x):
    """Write in all ways, with a handler that is created at the first call."""
    if not LOGGER.handlers:
        LOGGER.addHandler(logging.StreamHandler())
    LOGGER.warning("logged %s", x)
    sys.stdout.buffer.write(b"bytes %d\n" % x)
    subprocess.run(["true"], stdout=sys.stdout, check=True)
    return sys.stdout.encoding


def stop_itself(x):
    os.kill(os.getpid(), signal.SIGSTOP)
