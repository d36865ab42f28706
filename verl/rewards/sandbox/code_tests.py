"""Code: run the program in a response against tests, isolated (see `verl.processes.isolation`)."""

import ast
import builtins
import contextlib
import json
import keyword
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from verl.processes.isolation.program import Limits, run_program
from verl.rewards.functions import register_reward
from verl.rewards.sandbox.code_forms import completed, extract_code, read_tests, with_imports

# Asserts run in a separate process from the response's code, which can see neither the tests nor the verdict.
_JUDGE = Path(__file__).with_name("assert_program.py")

# One result per line, so that results of earlier calls survive a call that fails. What the program prints is dropped.
_CALLS = """
import json, os, sys
code, name, calls = json.load(sys.stdin)
results = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
program, names = compile(code, "solution.py", "exec"), {"__name__": "solution"}
del code
exec(program, names)
function = getattr(names["Solution"](), name) if hasattr(names.get("Solution"), name) else names[name]
for arguments, keywords in calls:
    if arguments and isinstance(arguments[0], dict) and all(key.lstrip("-").isdecimal() for key in arguments[0]):
        arguments[0] = {int(key): value for key, value in arguments[0].items()}  # JSON has no other keys than text
    result = function(*arguments, **keywords)
    results.write(json.dumps(result, default=lambda value: value.tolist()) + "\\n")
    results.flush()
"""

# Runs a checker in a process without the program, with the files and arguments of open-r1's grader of Codeforces.
_CHECK = """
import json, sys
checker, *texts = json.load(sys.stdin)
sys.argv = ["checker.py", "input.txt", "correct_output.txt", "output.txt"]
for name, text in zip(sys.argv[1:], texts):
    open(name, "w").write(text)
exec(compile(checker, "checker.py", "exec"), {"__name__": "__main__"})
"""


@register_reward("code", bounded=True, needs_ground_truth=True)
def code_reward(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    timeout: float = 10.0,
    memory_limit_mb: int = 1024,
    partial: bool = False,
) -> dict[str, Any]:
    """Return 1.0 if the program in the response passes all tests, otherwise 0.0.

    The program is the last block of Python of the response (see `extract_code`). It is judged only by what it prints
    or returns (see `assert_program`), so tests can pass plain data and functions to it, but not objects.

    Args:
        ground_truth: The tests, or their JSON text, in one of the forms of docs/rewards.md.
        extra_info: May have what the ground truth lacks: fn_name, entry_point, metadata, prompt.
        timeout: Seconds per program run: for each standard input, or for all calls or asserts together.
        memory_limit_mb: Memory limit per program run in MiB (Linux only).
        partial: Score the fraction of passed tests.

    Returns:
        "score", "acc" and "passed", the fraction of passed tests. Asserts count as one test. Without `partial`, the
        tests after the first failure are not run.

    Raises:
        ValueError: If the tests have none of the forms, cannot be run, or cannot fail.
    """
    limits = Limits(timeout, memory_limit_mb << 20)
    code, tests = extract_code(solution_str), read_tests(ground_truth, extra_info)
    run = _run_source if "source" in tests else _run_calls if tests["fn_name"] else _run_inputs
    passed, count = 0, len(tests["inputs"]) if "inputs" in tests else 1
    program = with_imports(tests.get("before", "") + completed(code, *tests.get("begun", ("", ""))))
    for is_passed in run(program, tests, limits) if code.strip() else ():
        passed += is_passed
        if not is_passed and not partial:
            break
    fraction = passed / count
    return {"score": fraction if partial else float(passed == count), "acc": float(passed == count), "passed": fraction}


def _run_inputs(code: str, tests: Mapping[str, Any], limits: Limits) -> Iterator[bool]:
    for stdin, expected in zip(tests["inputs"], tests["outputs"]):
        finished = run_program(code, limits=_with_room_for(expected, limits), stdin=stdin)
        if finished.failure is not None:
            yield False
        elif tests["checker"]:
            yield _accepts([tests["checker"], stdin, expected], finished.stdout, limits)
        else:
            yield same_output(finished.stdout, expected)


def _accepts(case: list[str], output: str, limits: Limits) -> bool:
    """Whether the checker of a case (checker, input, expected output) prints 1, as open-r1 requires.

    Raises ValueError if it fails on the expected output, too: otherwise the output was at fault.
    """
    finished = run_program(_CHECK, limits=limits, stdin=json.dumps([*case, output]))
    if finished.failure is not None and output == case[2]:
        raise ValueError(
            f"code: the checker fails on the expected output: {finished.failure}: {finished.stderr[-300:]}"
        )
    return finished.stdout.strip() == "1" if finished.failure is None else _accepts(case, case[2], limits) and False


def _with_room_for(output: str, limits: Limits) -> Limits:
    return replace(limits, output_bytes=max(limits.output_bytes, 2 * len(output.encode(errors="replace"))))


def _run_source(code: str, tests: Mapping[str, Any], limits: Limits) -> Iterator[bool]:
    verdict = _verdict(code, tests, limits)
    if verdict.startswith("bad "):
        # A program can let tests find nothing to run. They are at fault if they say the same of one that does nothing.
        source = tests["source"][0].replace("__check__", "").replace("__count__", "")
        names = sorted(set(re.findall(r"(?!\d)\w+", source)) - {*vars(builtins), *keyword.kwlist})
        stubs = (f"def {name}(*values, **options):\n [v() for v in values if callable(v)]\n" for name in names)
        if _verdict("".join(stubs), tests, limits) == verdict:
            raise ValueError(f"code: the tests cannot be run: {json.loads(verdict[4:])}. Found {source!r:.300}")
    yield verdict == "passed"


def _verdict(code: str, tests: Mapping[str, Any], limits: Limits) -> str:
    """What the judge says: passed, failed, or bad and a message about the tests as JSON."""
    token = secrets.token_hex(16)
    stdin = json.dumps([token, *tests["source"], code])
    script = _JUDGE.read_text(encoding="utf-8")
    finished = run_program(script, limits=limits, stdin=stdin, arguments=["judge"], peer_arguments=["solution"])
    verdict = finished.stdout.partition(f"\n{token} ")[2].partition("\n")[0]
    return verdict if finished.failure is None or verdict.startswith("bad ") else "failed"


def _run_calls(code: str, tests: Mapping[str, Any], limits: Limits) -> Iterator[bool]:
    limits = _with_room_for(_as_json(tests["outputs"]), limits)
    finished = run_program(_CALLS, limits=limits, stdin=_as_json([code, tests["fn_name"], tests["inputs"]]))
    lines = finished.stdout.splitlines()
    for i, expected in enumerate(tests["outputs"]):
        yield i < len(lines) and _is_result(lines[i], expected)


def _as_json(value: Any) -> str:
    return json.dumps(value, default=lambda array: array.tolist())


def _is_result(line: str, expected: Any) -> bool:
    """Whether a result (a line of JSON) equals the expected value, which may be text or wrapped in a list."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):  # written by the program under test: may be anything
        return False
    accepted = [expected]
    if isinstance(expected, list) and len(expected) == 1:
        accepted.append(expected[0])
    if isinstance(expected, str):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # it is plain text
                accepted.append(read(expected))
    return any(_close(result, json.loads(_as_json(value))) for value in accepted)


def _close(value: Any, expected: Any) -> bool:
    """Equal, floats to 1e-6: relative to an expected float; absolute for an expected integer, which may be large."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_close, value, expected))
    if isinstance(value, float) or isinstance(expected, float):
        with contextlib.suppress(TypeError, OverflowError, ArithmeticError):
            if isinstance(expected, int):
                return abs(Decimal(value) - expected) <= Decimal("1e-6")
            return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
        return False
    return value == expected


def same_output(actual: str, expected: str) -> bool:
    """Whether two outputs are equal line by line, without trailing whitespace and empty last lines (see `_close`)."""
    lines, expected_lines = ([line.split() for line in text.rstrip().splitlines()] for text in (actual, expected))
    return len(lines) == len(expected_lines) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(lines, expected_lines)
    )


def _same_word(word: str, expected: str) -> bool:
    with contextlib.suppress(ValueError):
        read = int if expected.lstrip("+-").isdecimal() else float
        return word == expected or (("." in word or "." in expected) and _close(float(word), read(expected)))
    return False
