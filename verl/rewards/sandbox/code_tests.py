"""Code: does the program in the answer pass the tests? It runs in a process that can be killed (see programs)."""

import ast
import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.sandbox.pool import Limits
from verl.rewards.sandbox.programs import run_program

_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:[\w+-]*)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)

# Asserts are run in another process than the answer's code, which knows neither them nor the verdict.
_ASSERTS = Path(__file__).with_name("assert_program.py")

# One result per line, so that a call that fails does not take the ones before it along.
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


@register_reward("code", bounded=True)
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
    """1.0 where the answer's program passes all tests, else 0.0 (`partial`: the share that it passes).

    The program is the last fenced block of the answer, or the whole answer without one. ground_truth is one of these,
    or the JSON text of one:

    - {"inputs": [...], "outputs": [...]}: texts for standard input, and what is to be printed
    - {"fn_name": "f", "inputs": [[arguments], ...], "outputs": [...]}: calls, and what they return
    - {"test_list": ["assert f(1) == 2", ...]}, a list of such lines, or {"test": code, "entry_point": "f"}, where the
      code defines `check(candidate)`

    An answer cannot pass but by what it prints or returns: see `assert_program`. So tests can hand it plain data alone.

    timeout: seconds for one program run: each standard input, or all calls or asserts together. Returns score, acc and
    `passed`, the share of tests that are passed (asserts count as one test; without `partial` the tests after the first
    failed one are not run). Raises ValueError for tests in no known form.
    """
    limits = Limits(timeout, cpu_seconds=timeout, memory_bytes=memory_limit_mb << 20, output_bytes=1 << 20)
    code = extract_code(solution_str)
    count, results = _start(code, _read_tests(ground_truth), limits)
    passed = 0
    for right in results:
        passed += right
        if not right and not partial:
            break
    share = passed / count
    return {"score": share if partial else float(passed == count), "acc": float(passed == count), "passed": share}


def extract_code(text: str) -> str:
    """The last fenced block of a text, also where its end was cut off; the whole text where there is none."""
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
        "code: the ground truth must be {inputs, outputs} of one length (with fn_name for calls), {test_list} or "
        f"{{test, entry_point}}, none of them empty, found {ground_truth!r:.300}"
    )


def _start(code: str, tests: Mapping[str, Any], limits: Limits) -> tuple[int, Iterator[bool]]:
    """The number of tests, and whether each is passed (run when asked for)."""
    if tests.get("fn_name"):
        return len(tests["inputs"]), _run_calls(code, tests, limits)
    if tests.get("inputs"):
        return len(tests["inputs"]), _run_inputs(code, tests, limits)
    if tests.get("test_list"):
        return 1, _run_asserts(code, "\n".join(tests["test_list"]), limits)
    return 1, _run_asserts(code, f"{tests['test']}\ncheck({tests['entry_point']})\n", limits)


def _run_inputs(code: str, tests: Mapping[str, Any], limits: Limits) -> Iterator[bool]:
    for given, expected in zip(tests["inputs"], tests["outputs"]):
        stdin = "\n".join(map(str, given)) if isinstance(given, list) else str(given)
        wanted = "\n".join(map(str, expected)) if isinstance(expected, list) else str(expected)
        finished, _ = run_program(code, limits=limits, stdin=stdin)
        yield finished.failure is None and same_output(finished.stdout, wanted)


def _run_asserts(code: str, tests: str, limits: Limits) -> Iterator[bool]:
    try:
        ast.parse(tests)
    except SyntaxError as error:
        raise ValueError(f"code: the tests are no Python: {error}: {tests!r:.300}") from error
    files = {"solution.py": code, "tests.py": tests}
    finished, _ = run_program(_ASSERTS.read_text(), limits=limits, files=files)
    yield finished.failure is None


def _run_calls(code: str, tests: Mapping[str, Any], limits: Limits) -> Iterator[bool]:
    calls = [_arguments(given) for given in tests["inputs"]]
    files = {"solution.py": code, "calls.json": json.dumps(calls), "results": ""}
    _, files = run_program(_CALLS, limits=limits, files=files, arguments=(tests["fn_name"],))
    lines = files["results"].splitlines()
    for i, expected in enumerate(tests["outputs"]):
        yield i < len(lines) and _returned(lines[i], expected)


def _arguments(given: Any) -> list:
    """The arguments of one call: a list, or a text with one JSON value per line."""
    return [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)


def _returned(line: str, expected: Any) -> bool:
    """Whether a result (a line of JSON) is the expected value, which may be its JSON text, or be wrapped in a list."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # the answer's program wrote it: anything may be there
        return False
    wanted = [expected]
    if isinstance(expected, list) and len(expected) == 1:
        wanted.append(expected[0])
    if isinstance(expected, str):
        with contextlib.suppress(ValueError, SyntaxError):  # else it is a plain text
            wanted.append(ast.literal_eval(expected))
    return any(_close(found, json.loads(json.dumps(value))) for value in wanted)


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) or isinstance(b, float):
        with contextlib.suppress(TypeError, OverflowError):
            return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
        return False
    return a == b


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are the same line by line, spaces at the ends and empty last lines aside, floats to 1e-6."""
    rows = [[line.split() for line in text.rstrip().splitlines()] for text in (found, expected)]
    return len(rows[0]) == len(rows[1]) and all(len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(*rows))


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    if not ("." in a or "." in b):
        return False
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False
