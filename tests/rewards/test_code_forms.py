"""Every form of tests with a right, a wrong and an empty program; tests that cannot fail; the program of a response."""

import base64
import json
import pickle
import re
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from verl.rewards import default_compute_score
from verl.rewards.sandbox import code_forms
from verl.rewards.sandbox.code_forms import extract_code, read_tests, with_imports
from verl.rewards.sandbox.code_tests import code_reward

slow = pytest.mark.slow
PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"


def score(code: str, tests, extra_info=None) -> float:
    return code_reward("apps", f"Here:\n```python\n{code}\n```\n", tests, extra_info)["score"]


def compressed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def published(tests) -> str:
    """As the private tests of LiveCodeBench are published."""
    return compressed(pickle.dumps(json.dumps(tests)))


# ---- forms ----------------------------------------------------------------------------------------------------------

PRINTS, PRINTS_0 = "print(int(input()) + 1)", "input()\nprint(0)"
F, F_0 = "def f(x):\n    return x + 1", "def f(x):\n    return 0"
METHOD, METHOD_0 = (f"class Solution:\n    def f(self, x: Optional[int]):\n        return {r}" for r in ("x + 1", "0"))
ON_STDIN = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "5", "output": "6", "testtype": "stdin"}]
FUNCTIONAL, NAMED = [{"input": "1", "output": "2", "testtype": "functional"}], {"metadata": '{"func_name": "f"}'}
HUMANEVAL = {
    "prompt": "from typing import List\nimport math\n\ndef first(xs: List[int]):\n    return xs[0]\n\n"
    'def g(xs: List[int]) -> int:\n    """The first one and one more."""\n',
    "test": "METADATA = {}\ndef check(candidate):\n    assert math.isclose(candidate([first([1])]), 2)\n",
    "entry_point": "g",
}
G, G_0 = "def g(xs: List[int]):\n    return first(xs) + 1", "def first(xs):\n    return 0\ndef g(xs):\n    return 0"
KOD = "from solution import f\nimport pytest\n"
UNITTEST = "import unittest\nclass Adds(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)\n"

#: data set in the table of docs/rewards.md -> (right program, wrong program, tests[, extra_info])
#: accepts any number above the input; of `1` and the output `0`, which both are numbers, it refuses
LARGER = """
import sys
def read(path):
    with open(path) as file:
        return int(file.read())
start, _, output = map(read, sys.argv[1:])
print(1 if output > start else 0)
"""
FORMS = {
    "APPS, TACO, PRIME (Eurus-2-RL), CodeContests": [
        (PRINTS, PRINTS_0, {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6\n"]}),
        (PRINTS, PRINTS_0, json.dumps({"inputs": ["1\n"], "outputs": ["2\n"], "fn_name": None})),
        (PRINTS, PRINTS_0, {"input": ["1"], "output": ["2"]}),
        (PRINTS, PRINTS_0, {"inputs": np.array(["1", "5"]), "outputs": np.array(["2", "6"])}),
        ("print(input())", PRINTS_0, {"inputs": ["[1, 2]"], "outputs": ["[1, 2]"]}),
        ("print(input())", PRINTS_0, {"input": "[1.50]", "output": "[1.50]"}),
        ("print(input() + input())", PRINTS_0, {"inputs": [["a", "b"]], "outputs": [["ab"]]}),
        ("print(123456789.0)", "print(123456788.5)", {"inputs": ["1"], "outputs": ["123456789"]}),
    ],
    "APPS and TACO calls": [
        (F, F_0, {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, [3]]}),
        (METHOD, METHOD_0, {"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}),
        (METHOD, METHOD_0, {"starter_code": METHOD_0, "inputs": "[[1]]", "outputs": "[2]"}),
        (F, F_0, {"fn_name": "f", "inputs": [{"x": 1}], "outputs": [2]}),
        ("def f(d):\n    return {k + 1: [True] for k in d}", F_0, {"fn_name": "f", "inputs": [[{"1": 0}]],
                                                                "outputs": ['{"2": [true]}']}),
        ("import numpy as np\ndef f(x):\n    return np.array(x) + 1", F_0, {"fn_name": "f", "inputs": [[[1]]],
                                                                           "outputs": [[2]]}),
    ],
    "LiveCodeBench": [
        (PRINTS, PRINTS_0, ON_STDIN),
        (PRINTS, PRINTS_0, json.dumps(ON_STDIN)),
        (PRINTS, PRINTS_0, published(ON_STDIN)),
        (METHOD, METHOD_0, FUNCTIONAL, NAMED),
        (F, F_0, [{**FUNCTIONAL[0], "metadata": {"func_name": "f"}}]),
    ],
    "LiveCodeBench rows": [
        (METHOD, METHOD_0, {"public_test_cases": json.dumps(FUNCTIONAL), "private_test_cases": published(FUNCTIONAL),
                            **NAMED}),
        (PRINTS, "print(2)", {"public_test_cases": json.dumps(ON_STDIN[:1]),
                              "private_test_cases": published(ON_STDIN[1:]), "metadata": "{}"}),
    ],
    "CodeContests rows": [
        (PRINTS, "print(2)", {"public_tests": {"input": ["1"], "output": ["2"]},
                              "private_tests": {"input": ["5"], "output": ["6"]},
                              "generated_tests": {"input": [], "output": []}}),
    ],
    "Codeforces": [
        (PRINTS, PRINTS_0, {"official_tests": [{"input": "1", "output": "2"}]}),
        (PRINTS, PRINTS_0, {"official_tests": [{"input": "1", "output": "5"}], "generated_checker": LARGER}),
        (PRINTS, PRINTS_0, [{"input": "1", "output": "5"}], {"generated_checker": LARGER, "generated_tests": 3,
                                                             "input_mode": "stdio", "interaction_format": None}),
    ],
    "verifiable coding problems, SYNTHETIC-1": [
        (PRINTS, PRINTS_0, json.dumps({"language": "python", "test_cases": [
            {"fn_name": None, "input": "1\n", "output": "2\n", "type": "stdin_stdout"}]})),
        (F, F_0, {"test_cases": [{"fn_name": "f", "input": [1], "output": [2], "type": "function_call"}]}),
    ],
    "MBPP": [
        (F, F_0, {"test_list": ["assert f(1) == 2"], "test_setup_code": "ONE = 1", "test_imports": ["import math"]}),
        (F, F_0, ["assert f(1) == 2", "assert math.isclose(f(2), 3)"]),
        (F, F_0, "assert f(1) == 2"),
    ],
    "HumanEval": [
        (G, G_0, HUMANEVAL),
        (G, G_0, HUMANEVAL["test"], {key: HUMANEVAL[key] for key in ("prompt", "entry_point")}),
        (F, F_0, {"test": "assert candidate(1) == 2", "entry_point": "f"}),
        ("    return first(xs) + 1\n\n\ndef other():\n    pass", "    return first(xs)", HUMANEVAL),
        ("x = first(xs)\nreturn x + 1", "return first(xs)", HUMANEVAL),
    ],
    "LeetCodeDataset": [
        (METHOD, METHOD_0, {"test": "def check(candidate):\n    assert candidate(x = 1) == 2",
                            "entry_point": "Solution().f"}),
        (METHOD, METHOD_0, ["assert f(1) == 2"]),
    ],
    "KodCode, functions and classes of pytest": [
        (F, F_0, "def test_f():\n    assert f(1) == 2\n"),
        (F, F_0, {"test": KOD + "def test_f():\n    assert f(1) == 2\n"}),
        (F, F_0, KOD + "@pytest.mark.parametrize('a, b', [(1, 2), (3, 4)])\ndef test_f(a, b):\n    assert f(a) == b\n"),
        (F, F_0, KOD + "@pytest.fixture\ndef one():\n    return 1\nclass TestF:\n    def test_f(self, one):\n"
         "        assert f(one) == pytest.approx(2)\n"),
        (F, F_0, "import solution\ndef test(tmp_path):\n    assert solution.f(1) == 2\nif __name__ == '__main__':\n"
         "    import pytest, sys\n    sys.exit(pytest.main([__file__]))\n"),
        (F, F_0, "from .solution import *\ndef test():\n    assert f(1) == 2\n"),
        ("def f(x):\n    print(x + 1)", "def f(x):\n    print(0)",
         KOD + "def test_f(capsys):\n    f(1)\n    assert capsys.readouterr().out == '2\\n'\n"),
        ("class Bad(ValueError): pass\ndef f(x):\n    raise Bad('no')", "class Bad(ValueError): pass\n" + F_0,
         "from solution import f, Bad\nimport pytest\ndef test():\n"
         "    with pytest.raises(Bad, match='no'):\n        f(1)\n"),
        ("import sys\ndef f(x):\n    sys.exit(2)", "def f(x):\n    raise ValueError", KOD + "def test():\n"
         "    with pytest.raises(SystemExit) as exited:\n        f(1)\n    assert exited.value.code == 2\n"),
    ],
    "unittest": [
        (F, F_0, UNITTEST),
        (F, F_0, UNITTEST + "if __name__ == '__main__':\n    unittest.main()\n"),
        (F, F_0, UNITTEST + "unittest.main(argv=[''], exit=False)\n"),
        (F, F_0, UNITTEST + "unittest.TextTestRunner().run(unittest.TestSuite([Adds('test')]))\n"),
        (F, F_0, "from unittest import TestCase, main\nfrom solution import f\n" + UNITTEST.replace("unittest.T", "T")),
    ],
}  # fmt: skip


FIRST = [(name, *forms[0]) for name, forms in FORMS.items()]
OTHERS = [(name, *form) for name, forms in FORMS.items() for form in forms[1:]]
SLOW = ("unittest.main(argv", "TextTestRunner", "import TestCase, main")


def mark(form) -> object:
    return pytest.param(form, marks=[slow] if any(text in str(form[3]) for text in SLOW) else [])


@pytest.mark.fast("KodCode*[036]", "unittest0", "[ACv]*", "Live*", "[HLM]*0")
@pytest.mark.parametrize("form", map(mark, [*FIRST, *OTHERS]), ids=lambda f: f[0])
def test_a_right_program_passes_and_a_wrong_one_does_not(form):
    _, right, wrong, *tests = form
    assert [score(code, *tests) for code in (right, wrong)] == [1.0, 0.0]


@pytest.mark.fast("KodCode*", "HumanEval0", "MBPP0", "Code*", "LiveCodeBench*", "APPS*", "verifiable*")
@pytest.mark.parametrize("form", [*FIRST, *(pytest.param(f, marks=slow) for f in OTHERS)], ids=lambda f: f[0])
def test_a_program_that_does_nothing_does_not_pass(form):
    _, _, _, *tests = form
    assert [score(code, *tests) for code in ("", "x = 1", "x = (", "exit(0)")] == [0.0] * 4


def test_the_page_lists_the_forms():
    table = PAGE.read_text().partition("| data set | ground truth |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (?!-)([^|]*?) \|", table, re.MULTILINE) == list(FORMS)


# ---- rows that no program can fail, or pass -------------------------------------------------------------------------

CODEFORCES, FIXTURE = {"official_tests": [{"input": "1", "output": "2"}]}, "def test_f(nope):\n    assert f(1) == 2\n"
BAD_ROWS = {
    "empty": ("", "call nothing"),
    "a comment": ("# f(1) is 2", "call nothing"),
    "imports": ("from solution import f\nimport math", "call nothing"),
    "check without entry_point": ("def check(candidate):\n    assert candidate(1) == 2", "call nothing"),
    "a class that nothing collects": ("class Cases:\n    def run(self):\n        assert f(1) == 2", "call nothing"),
    "only a main guard": ("import unittest\nif __name__ == '__main__':\n    unittest.main()", "call nothing"),
    "prints": ("print(f(1) == 2)", "check nothing"),
    "uses its own": ("def f(x):\n    return x\nassert f(1) == 1", "nothing of the program"),
    "a constant": ("assert True", "nothing of the program"),
    "no case": ("for x in []:\n    assert f(x) == 1", "run no assert"),
    "exits first": ("import sys\nsys.exit(0)\nassert f(1) == 2", "run no assert"),
    "skipped": (KOD + "@pytest.mark.skip\ndef test_f():\n    assert f(1) == 2\n", "no test has been run"),
    "an unknown fixture": (FIXTURE, "fixture 'nope' not found"),
    "an unknown parameter": (KOD + "@pytest.mark.parametrize('y', [1])\n" + FIXTURE, "uses no argument 'y'"),
    "a missing package": ("import no_such_package\nassert f(1) == 2", "pip install no_such_package"),
    "an object as argument": ("class A: pass\nassert f(A()) == 2", "object of type A"),
    "monkeypatch": ("def test_f(monkeypatch):\n    assert f(1) == 2", "monkeypatch"),
    "async": ("import asyncio\nassert asyncio.run(f(1)) == 2", "asyncio"),
    "not Python": ("assert f(1) =", "not valid Python"),
    "empty outputs": ({"inputs": ["1"], "outputs": [" \n"]}, "all empty"),
    "no name": (FUNCTIONAL, "name of the function"),
    "arguments without a name": ({"inputs": [[1]], "outputs": [2]}, "name of the function"),
    "null results": ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [None, [None]]}, "all null"),
    "another language": ({"language": "cpp", "test_cases": [{"input": "1", "output": "2"}]}, "language 'cpp'"),
    "named files": ({"public_tests": {"input": ["1"], "output": ["2"]}, "input_file": "a.in"}, "file a.in"),
    "two types": ([*ON_STDIN, *FUNCTIONAL], "one type"),
    "an unknown type": ([{**FUNCTIONAL[0], "testtype": "images"}], "images"),
    "arguments that are no list": ({"fn_name": "f", "inputs": [1], "outputs": [2]}, "list of arguments"),
    "a number": (5, "expected"),
    "no tests": ({"tests": []}, "expected"),
    "a checker in C++": ({**CODEFORCES, "checker": "int main() {}"}, "checker that is not Python"),
    "an interactive problem": ({**CODEFORCES, "interaction_format": "Print a guess."}, "interaction_format"),
    "files": ({**CODEFORCES, "input_mode": "file"}, "input_mode 'file'"),
    "lengths": ({"inputs": ["1", "2"], "outputs": ["1"]}, "equal length"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_cannot_be_scored_is_refused(name):
    tests, reason = BAD_ROWS[name]
    with pytest.raises(ValueError, match=f"(?s)^code: .*{reason}"):
        score("def f(x):\n    return 2\ndef unused():\n    pass", tests)


PICKLED = pickle.dumps(json.dumps({"inputs": ["1"], "outputs": ["2"]}))


@pytest.mark.parametrize(
    "data",
    [
        *(pickle.dumps(Path.touch), pickle.dumps([1, 2]), PICKLED[:-5], b"", b"no pickle", b"[" * 100_000),
        b"K\x01r\x00\x00\x00\x40.",  # fills a memo of 2**31 entries, if it is unpickled
        b"\x8e" + (1 << 62).to_bytes(8, "little"),  # a text of 2**62 bytes
        b"[" + b" " * (1 << 20) + b"]",  # more than the limit
    ],
    ids=range(9),
)
def test_compressed_tests_are_one_text_and_nothing_is_unpickled(data, monkeypatch):
    monkeypatch.setattr(code_forms, "_MOST_BYTES", 1 << 20)
    with pytest.raises(ValueError, match=r"^code: "):
        read_tests(compressed(data))
    assert read_tests(compressed(PICKLED)) == read_tests(compressed(pickle.loads(PICKLED).encode()))


def test_by_data_source():
    """The reproduction of the report: it paid 1.0."""
    assert (
        default_compute_score("apps", f"```python\n{F_0}\n```", "def test_f():\n    assert f(1) == 2\n")["score"] == 0
    )


# ---- wrong programs and what tests do with the verdict --------------------------------------------------------------

CAUGHT = "try:\n    assert f(1) == 2\n    print('passed')\nexcept AssertionError:\n    print('failed')\n"
SHADOWED = "def test():\n    assert abs(f(1) - 2) < 0.5\n"
PATH = "import sys\nsys.path.insert(0, '.')\n"
EXITS = "import os, sys\ndef f(x):\n    {}"
CODE_ON_DISK = """
for name in ("solution", "helper", "conftest", "pytest", "_pytest", "json", "colorsys"):
    open(name + ".py", "w").write("import os\\nos._exit(0)")
open("pytest.ini", "w").write("[pytest]\\naddopts = --collect-only")
def f(x):
    return 0
"""


@pytest.mark.fast("assert*", "try*os._exit(0)", "def*os._exit(0)", "tests2-sys*")
@pytest.mark.parametrize(
    "ends",
    ["sys.exit(0)", "os._exit(0)", *(pytest.param(e, marks=slow) for e in ("raise SystemExit", "os.kill(0, 9)"))],
)
@pytest.mark.parametrize("tests", ["assert f(1) == 2", "def test():\n    assert f(1) == 2", UNITTEST, CAUGHT])
def test_an_exit_is_no_pass(ends, tests):
    assert score(EXITS.format(ends), tests) == score(f"import os, sys\n{ends}", tests) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        CAUGHT,
        "import sys\nassert f(1) == 2\nsys.exit(0)",
        "import os\nif f(1) != 2:\n    os._exit(0)\nassert f(1) == 2",
        "def run():\n    assert f(1) == 2\ntry:\n    run()\nexcept Exception as error:\n    print(error)",
        "def test_f(x, y):\n    assert f(x) == y\ntest_f(1, 2)",
        "import pytest\nassert f(1) == 2\nwith pytest.raises(AssertionError):\n    assert f(1) == 3",
        "import numpy as np\nnp.testing.assert_allclose(f(1), 2)",
        "if f(1) != 2:\n    raise ValueError",
        "for x in [1, 2]:\n    assert f(x) == x + 1",
        "if (y := f(1)) != 2:\n    raise AssertionError(y)",
        KOD + "def test():\n    assert f(1) == 2\n@pytest.mark.xfail\ndef test_no():\n    assert f(1) == 3\n",
        pytest.param(
            "from hypothesis import given, strategies\n@given(strategies.integers(1, 9))\n"
            "def test(x):\n    assert f(x) == x + 1",
            marks=slow,
        ),
    ],
)
def test_the_ways_in_which_tests_check(tests):
    assert (score(F, tests), score(F_0, tests)) == (1.0, 0.0)


@pytest.mark.fast("from solution import [*]*")
@pytest.mark.parametrize("begins", ["from solution import f\n", "from solution import *\n", ""])
def test_no_program_replaces_a_builtin_of_the_tests(begins):
    abs_0 = "def abs(x):\n    return 0\n"
    assert (score(abs_0 + F, begins + SHADOWED), score(abs_0 + F_0, begins + SHADOWED)) == (1.0, 0.0)


@pytest.mark.fast("*from solution*")
@pytest.mark.parametrize("begins", ["", PATH + "from solution import f\n", PATH + "import colorsys\n"])
def test_the_judge_runs_no_file_of_the_program(begins):
    tests = begins + "def test():\n    assert f(1) == 2\n"
    assert (score(F, tests), score(CODE_ON_DISK, tests)) == (1.0, 0.0)


def test_a_verdict_cannot_be_printed():
    prints = "import os\nfor word in ('passed', 'bad \"x\"'):\n    for number in (0, 1, 2):\n        try:\n"
    prints += (
        "            os.write(number, b'\\n' + word.encode() + b'\\n')\n        except OSError:\n            pass\n"
    )
    assert score(prints + F_0, "assert f(1) == 2") == 0.0


@pytest.mark.parametrize(
    "code, test",
    [
        ("from datetime import *\ndef f(d):\n    return d + timedelta(1)",
         "from datetime import date\nassert f(date(2020, 1, 1)) == date(2020, 1, 2)"),
        ("def f(x):\n    while True:\n        x += 1\n        yield x",
         "import itertools\ng = f(1)\nassert next(g) == 2 and next(g) == 3\n"
         "assert [*itertools.islice(f(1), 3)] == [2, 3, 4]"),
        ("from collections import deque\ndef f(r):\n    return deque(r)",
         "from collections import deque\nassert f(range(3)) == deque([0, 1, 2])"),
        ("class V:\n    def __init__(self, x):\n        self.x = x\n    def __add__(self, o):\n"
         "        return V(self.x + o.x)\n"
         "    def __lt__(self, o):\n        return self.x < o.x\n"
         "    def __repr__(self):\n        return f'V({self.x})'",
         "assert repr(V(1) + V(2)) == 'V(3)' and V(1) < V(2)"),
        ("def f(grid, *, more):\n    grid[0].reverse()\n    more.clear()",
         "grid, more = [[1, 2], [3]], {1: 2}\nf(grid, more=more)\nassert (grid, more) == ([[2, 1], [3]], {})"),
        ("def f(path):\n    return path.read_text()",
         "def test(tmp_path):\n    (tmp_path / 'a').write_text('b')\n    assert f(tmp_path / 'a') == 'b'"),
        ("class C:\n    def __enter__(self):\n        return 1\n"
         "    def __exit__(self, *error):\n        self.left = True",
         "c = C()\nwith c as value:\n    assert value == 1\nassert c.left"),
        ("class Solution:\n    def __init__(self, x):\n        self.x = x",
         "from solution import *\nassert Solution(1).x == 1"),
    ],
)  # fmt: skip
def test_what_right_programs_return(code, test):
    assert score(code, test) == 1.0


# ---- the program of a response --------------------------------------------------------------------------------------

BLOCK = f"```python\n{F}\n```\n"


@pytest.mark.parametrize(
    "text",
    [
        BLOCK,
        f"```python\n{F_0}\n```\nBetter:\n{BLOCK}",
        BLOCK + "Output:\n```\n3\n```\n",
        BLOCK + "Output:\n```python\n3\n```\n",
        BLOCK + "```python\n>>> f(1)\n2\n```\n",
        BLOCK + "Run it:\n```bash\npython a.py\n```\nor\n```text\nx = 1\n```\n",
        BLOCK + "```\nx = 1\n```\n",
        f"~~~python\n{F}\n~~~\n",
        f"````py\n{F}\n````\n",
        f'```python title="a.py"\n{F}\n```\n',
        f"```{{.python}}\n{F}\n```\n",
        f"```Python3\n{F}\n```\n",
        f"Code:```python\n{F}```\nDone.",
        f"```python\n{F}",
        f"```\n{F}\n```\nIt prints\n```\n[1, 2]\n```\n",
        f"```python\n{F_0}\n\nNo:\n```python\n{F}\n```\n",
        "1. So:\n" + "".join(f"   {line}\n" for line in BLOCK.splitlines()),
        BLOCK.replace("\n", "\r\n"),
        F,
        f"{F}\n```\nThis is it.",
        f"<think>\n```python\n{F_0}\n```\n</think>\n{BLOCK}",
        f"A draft:\n```python\n{F_0}\n```\n``` and so on.\nNow:\n{BLOCK}",
    ],
)
def test_the_program_is_the_last_block_of_python(text):
    assert extract_code(text).strip() == F


@pytest.mark.parametrize(
    "text",
    [
        f"{BLOCK}No, this:\n```python\n{F_0}\n```\n",
        f"{BLOCK}No, this:\n```python\ndef f(x):\n    return (",
        f"<think>{BLOCK}",
        f"```cpp\n{F}\n```",
        "I do not know.",
        "",
    ],
)
def test_another_program_is_not_taken(text):
    assert code_reward("apps", text, "assert f(1) == 2")["score"] == 0.0


def test_usual_imports():
    code = "from __future__ import annotations\ndef f(x: List[int]):\n    return deque(x), gcd(4, 6), math.pi, sys.argv"
    lines = with_imports(code).splitlines()
    assert lines[0] == "from __future__ import annotations"
    assert sorted(lines[1:5]) == [
        "from collections import deque", "from math import gcd", "from typing import List", "import math",
    ]  # fmt: skip
    own = "from fractions import gcd\nfrom collections import deque\ndef f(count):\n    return deque, gcd, count, open"
    assert "import" not in with_imports(own).replace(own, "").replace("__import__", "")
    deep = "def f(n):\n    return n if n == 0 else f(n - 1)\nprint(f(20_000), heappop([1]))"
    assert score(deep, {"inputs": [""], "outputs": ["0 1"]}) == 1.0


REPEATED = ["`", "```", "```\n", "```python\n", "~~~ \n", " ", "\n```py", "(", "<think>", "x\n", "~~~a", "~~~ "]


@pytest.mark.parametrize("repeated", [*REPEATED, ".a"])
def test_no_response_takes_long(repeated):
    """`~~~a` and the name took 7 s and more of the trainer, and the name 2.7 GiB."""
    text = repeated * (100_000 // len(repeated))
    begun = time.thread_time()
    with_imports(extract_code(f"```python\nimport a{text}\n```" if repeated == ".a" else text))
    assert time.thread_time() - begun < 2.0


CALLS = """
def apply(function, *values):
    return [function(value) for value in values]
def compose(*functions):
    def composed(x):
        for function in functions:
            x = function(x)
        return x
    return composed
def attempt(function):
    try:
        return function()
    except ValueError as error:
        return str(error)
class Button:
    def __init__(self):
        self.listeners = []
    def on_click(self, listener):
        self.listeners.append(listener)
    def click(self, **event):
        for listener in self.listeners:
            listener(self, **event)
def same(function):
    return function
"""
CALLBACKS = [
    "assert apply(lambda x: x + 1, 1, 2) == [2, 3]",
    "def double(x):\n    return 2 * x\nassert compose(double, lambda x: x + 1, str)(3) == '7'",
    "def fails():\n    raise ValueError('no')\nassert attempt(fails) == 'no'",
    "calls = []\nb = Button()\nb.on_click(lambda button, x: calls.append((button is not None, x)))\nb.click(x=3)\n"
     "assert calls == [(True, 3)]",
    "assert apply(lambda f: f(4), compose(lambda x: x * x)) == [16]",  # calls the program, which calls back
    "assert apply(len, 'ab', [1]) == [2, 1]",
    "def f(x):\n    return x\nassert same(f) is f",
]  # fmt: skip


@pytest.mark.parametrize("tests", CALLBACKS)
def test_functions_of_the_tests_are_called_by_the_program(tests):
    assert score(CALLS, tests) == 1.0
    never = re.sub(r"(?m)^( +)(?=return|for|try)", r"\1return 0\n\1", CALLS)
    assert score(never, tests) == 0.0


@pytest.mark.parametrize("tests", [CALLBACKS[0], CALLBACKS[4]])
def test_a_program_that_does_not_call_the_functions_of_the_tests_fails(tests):
    # what a program returns instead of calling, and functions of the judge that it makes up
    for wrong in ("raise KeyError", "return call_back(-9)", "import os; os.write(4, b'[]')"):
        names = ["apply", "compose", "attempt", "same", "on_click", "click", "Button"]
        program = "".join(f"def {name}(*a, **k):\n    {wrong}\n" for name in names)
        assert score(program, tests) == 0.0, wrong


def test_a_checker_that_fails_on_the_expected_output_is_a_bad_row():
    """One that fails on other outputs refuses them: `x` is no number."""
    tests = {"official_tests": [{"input": "1", "output": "5"}], "generated_checker": LARGER}
    assert score("print('x')", tests) == 0.0
    with pytest.raises(ValueError, match="the checker fails on the expected output"):
        score("print('x')", {**tests, "official_tests": [{"input": "1", "output": "five"}]})
    cheats = (
        "import sys\nopen('correct_output.txt', 'w').write('9')\nopen('checker.py', 'w').write('print(1)')\nprint(0)"
    )
    assert score(cheats, tests) == 0.0
