"""Code: run the program in a response against tests, in a process that can be killed (see `programs`)."""

import ast
import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.sandbox.pool import Limits
from verl.rewards.sandbox.programs import run_program

_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:[\w+-]*)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)

# Asserts run in a separate process from the response's code, which can see neither the tests nor the verdict.
_ASSERTS = Path(__file__).with_name("assert_program.py")

# One result per line, so that results of earlier calls survive a call that fails.
_CALLS = """
import json, sys
calls, name = json.load(open("calls.json")), sys.argv[1]
names = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), names)
function = names[name] if name in names else getattr(names["Solution"](), name)
with open("results", "w") as results:
    for arguments in calls:
        results.write(json.dumps(function(*arguments)) + "\\n")
        results.flush()
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

    The program is the last fenced code block of the response, or the whole response without one. It is judged only by
    what it prints or returns (see `assert_program`), so tests can pass plain data to it, but not objects.

    Args:
        ground_truth: The tests, or their JSON text, in one of these forms:

            - {"inputs": [...], "outputs": [...]}: texts for standard input, and the expected output
            - {"fn_name": "f", "inputs": [[arguments], ...], "outputs": [...]}: calls, and their return values
            - {"test_list": ["assert f(1) == 2", ...]}, a list of such lines, or {"test": code, "entry_point": "f"},
              where the code defines `check(candidate)`
        timeout: Seconds per program run: for each standard input, or for all calls or asserts together.
        memory_limit_mb: Memory limit per program run in MiB (Linux only).
        partial: Score the fraction of passed tests.

    Returns:
        "score", "acc" and "passed", the fraction of passed tests. Asserts count as one test. Without `partial`, the
        tests after the first failure are not run.

    Raises:
        ValueError: If the tests have none of these forms.
    """
    limits = Limits(timeout, cpu_seconds=timeout, memory_bytes=memory_limit_mb << 20, output_bytes=1 << 20)
    code = extract_code(solution_str)
    count, results = _start(code, _read_tests(ground_truth), limits)
    passed = 0
    for is_passed in results:
        passed += is_passed
        if not is_passed and not partial:
            break
    fraction = passed / count
    return {"score": fraction if partial else float(passed == count), "acc": float(passed == count), "passed": fraction}


def extract_code(text: str) -> str:
    """Return the last fenced code block of a text, even if it is not closed; the whole text if there is none."""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def _read_tests(ground_truth: Any) -> dict[str, Any]:
    tests = ground_truth
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError:
            tests = [tests]
    if isinstance(tests, Sequence) and not isinstance(tests, str):
        tests = {"test_list": list(tests)}
    if isinstance(tests, Mapping):
        keys = {k for k, v in tests.items() if v is not None and len(v)}
        pairs = {"inputs", "outputs"} <= keys and len(tests["inputs"]) == len(tests["outputs"])
        if pairs or "test_list" in keys or {"test", "entry_point"} <= keys:
            return dict(tests)
    raise ValueError(
        "code: ground truth: expected {inputs, outputs} of equal length (with fn_name for calls), {test_list} or "
        f"{{test, entry_point}}, none of them empty, found {ground_truth!r:.300}"
    )


def _start(code: str, tests: Mapping[str, Any], limits: Limits) -> tuple[int, Iterator[bool]]:
    """Return the number of tests and an iterator that runs them and yields whether each one passes."""
    if tests.get("fn_name"):
        return len(tests["inputs"]), _run_calls(code, tests, limits)
    if tests.get("inputs"):
        return len(tests["inputs"]), _run_inputs(code, tests, limits)
    if tests.get("test_list"):
        return 1, _run_asserts(code, "\n".join(tests["test_list"]), limits)
    return 1, _run_asserts(code, f"{tests['test']}\ncheck({tests['entry_point']})\n", limits)


def _run_inputs(code: str, tests: Mapping[str, Any], limits: Limits) -> Iterator[bool]:
    for case, expected in zip(tests["inputs"], tests["outputs"]):
        stdin = "\n".join(map(str, case)) if isinstance(case, list) else str(case)
        expected_text = "\n".join(map(str, expected)) if isinstance(expected, list) else str(expected)
        case_limits = replace(
            limits, output_bytes=max(limits.output_bytes, 2 * len(expected_text.encode(errors="replace")))
        )
        finished, _ = run_program(code, limits=case_limits, stdin=stdin)
        yield finished.failure is None and same_output(finished.stdout, expected_text)


def _run_asserts(code: str, tests: str, limits: Limits) -> Iterator[bool]:
    try:
        ast.parse(tests)
    except SyntaxError as error:
        raise ValueError(f"code: the tests are not valid Python: {error}: {tests!r:.300}") from error
    files = {"solution.py": code, "tests.py": tests}
    finished, _ = run_program(_ASSERTS.read_text(encoding="utf-8"), limits=limits, files=files)
    yield finished.failure is None


def _run_calls(code: str, tests: Mapping[str, Any], limits: Limits) -> Iterator[bool]:
    calls = [_arguments(case) for case in tests["inputs"]]
    files = {"solution.py": code, "calls.json": json.dumps(calls), "results": ""}
    _, files = run_program(_CALLS, limits=limits, files=files, arguments=(tests["fn_name"],))
    lines = files["results"].splitlines()
    for i, expected in enumerate(tests["outputs"]):
        yield i < len(lines) and _is_result(lines[i], expected)


def _arguments(case: Any) -> list:
    """Return the arguments of one call, given as a list or as text with one JSON value per line."""
    return [json.loads(line) for line in case.splitlines() if line.strip()] if isinstance(case, str) else list(case)


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
        with contextlib.suppress(ValueError, SyntaxError):  # otherwise it is plain text
            accepted.append(ast.literal_eval(expected))
    return any(_close(result, json.loads(json.dumps(value))) for value in accepted)


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) or isinstance(b, float):
        with contextlib.suppress(TypeError, OverflowError):
            return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
        return False
    return a == b


def same_output(actual: str, expected: str) -> bool:
    """Whether two outputs are equal line by line, ignoring trailing whitespace and empty last lines; floats to 1e-6."""
    lines, expected_lines = ([line.split() for line in text.rstrip().splitlines()] for text in (actual, expected))
    return len(lines) == len(expected_lines) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(lines, expected_lines)
    )


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    if not ("." in a or "." in b):
        return False
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False
