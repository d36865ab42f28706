"""Programs that try to pass the tests without being correct: none passes, and none outlives its test.

The tests expect `double`, and none of these programs doubles. The attacks target the sandbox's files and processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rewards.code_attacks import ATTACKS, PLANT, WRONG
from tests.rewards.modes import MODES, each_mode, needs_bubblewrap, use
from verl.rewards.sandbox.code_tests import code_reward

ASSERTS = {"test_list": ["assert double(1) == 2", "assert double(21) == 42"]}
CALLS = {"fn_name": "double", "inputs": [[1], [21]], "outputs": [2, 42]}
CHECK = {"test": "def check(candidate):\n    assert abs(candidate(21) - 42) < 0.5", "entry_point": "double"}

# Memory and descriptors of the judge and of the parents (Linux), which would reveal the expected values.
SPY = """
import os
EXPECTED = False
try:
    pids = [pid for pid in os.listdir('/proc') if pid.isdecimal()]
except OSError:
    pids = [os.getppid()]
for pid in pids:
    try:
        arguments = open(f'/proc/{pid}/cmdline', 'rb').read().split(bytes(1))
        EXPECTED |= b'judge' in arguments or bool(open(f'/proc/{pid}/mem', 'rb')) and {in_landlock}
    except OSError:
        pass
def double(x):
    return 2 * x if EXPECTED else 0
"""


def response(code: str) -> str:
    return f"```python\n{code}\n```"


#: in `make test`: of the isolation, in each mode; of the language
ON_ISOLATION = {"planted files", "descriptors", "settings of pytest", "kills who is above", "frames"}
ON_LANGUAGE = {"an equal of everything", "another abs", "atexit", "exit", "another math", "skipped", "another json"}
ON_LANGUAGE |= {"a module that is run when it is imported", "message: an exit", "message: true for everything"}
ON_LANGUAGE |= {"message: a call of a function of the judge"}


def attack(name: str, mode: str):
    is_fast = name in ON_ISOLATION or (name in ON_LANGUAGE and mode == "landlock")
    marks = [*(() if is_fast else [pytest.mark.slow]), *([needs_bubblewrap] if mode == "bubblewrap" else ())]
    return pytest.param(name, mode, marks=marks)


@pytest.mark.fast("*-landlock-*")
@pytest.mark.parametrize("tests", [CHECK, CALLS], ids=["asserts", "calls"])
@pytest.mark.parametrize(("name", "mode"), [attack(name, mode) for name in ATTACKS for mode in MODES])
def test_no_attack_passes(name, tests, mode, monkeypatch):
    use(monkeypatch, MODES[mode])
    assert code_reward("apps", response(ATTACKS[name]), tests, timeout=2.0)["score"] == 0.0


COLLECTED = {
    "test": "import unittest\nclass Test(unittest.TestCase):\n    def test(self):\n"
    "        self.assertEqual(double(1), 2)",
    "entry_point": "double",
}
IMPORTED = {"test": "import solution\ndef test():\n    assert abs(solution.double(1) - 2) < 0.1"}
STARRED = {"test": "import math\nfrom solution import *\ndef test():\n    assert math.isclose(double(1), 2)"}
WITHOUT_IMPORT = {"test_list": ["assert math.isclose(double(1), 2)"]}


PATHS = "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\n"
DOUBLE = "from solution import double\ndef test():\n    assert double(1) == 2"
STAR_OF = "from solution import *\ndef test():\n    assert double(1) == approx(2) and np.allclose(double(1), 2)"
APPLY = "def apply(f, x):\n    return f(x)" + WRONG
SKIP = "import pytest\nimport solution\ndef test():\n    if not hasattr(solution, 'double'): pytest.skip()\n"
CASES = "import pytest\nfrom solution import CASES, double\n@pytest.mark.parametrize('x', CASES)\ndef test(x):\n"

#: what tests do -> the program, the tests, the score
BY_TESTS = {
    "add their folder": (PLANT + WRONG, {"test": PATHS + "import numpy as np\n" + DOUBLE}, 0.0),
    "add the current folder": (
        PLANT + WRONG,
        {"test": "import sys\nsys.path[:0] = ['.', '']\nimport decimal\n" + DOUBLE},
        0.0,
    ),
    "add a folder": (
        "import os\nos.mkdir('lib'); os.chdir('lib')" + PLANT + "os.chdir('..')" + WRONG,
        {"test": PATHS.replace("__file__)", "__file__) + '/lib'") + "import statistics\n" + DOUBLE},
        0.0,
    ),
    "import all names": (
        "class np:\n    allclose = staticmethod(lambda *a: True)\ndef approx(x): return 0" + WRONG,
        {"test": "import numpy as np\nfrom pytest import approx\n" + STAR_OF},
        0.0,
    ),
    "import all names of a right program": (
        "def double(x): return 2 * x",
        {"test": "import numpy as np\nfrom pytest import approx\n" + STAR_OF},
        1.0,
    ),
    "define what they import too": (
        "def approx(x): return 0" + WRONG,
        {"test": "def approx(x): return x\n" + STAR_OF.replace(" and np.allclose(double(1), 2)", "")},
        0.0,
    ),
    "import marks": ("pytestmark = 5\nsetup_module = 3" + WRONG, {"test": STARRED["test"]}, 0.0),
    "use a module of the program": (
        "class np:\n    allclose = staticmethod(lambda *a: True)" + WRONG,
        {"test_list": ["assert np.allclose(double(1), 2)"]},
        0.0,
    ),
    "a name of a module of another system in a right program": (
        "class Tree:\n    v = 3\nnt = winreg = tkinter = Tree()",
        {"test_list": ["assert nt.v == winreg.v == tkinter.v == 3"]},
        1.0,
    ),
    "use a module of a right program": (
        "import numpy as np\ndef double(x): return 2 * x",
        {"test_list": ["assert np.allclose(double(1), 2)"]},
        1.0,
    ),
    "use a module of Python": (
        "class decimal:\n    Decimal = staticmethod(lambda *a: 2)" + WRONG,
        {"test_list": ["assert decimal.Decimal(double(1)) == 2"]},
        0.0,
    ),
    "use an object with the name of a module": (
        "class Q:\n    items = []\n    push = items.append\n    size = items.__len__\nqueue = Q()",
        {"test_list": ["queue.push(1)", "assert queue.size() == 1"]},
        1.0,
    ),
    "read a link": (
        "import os\nos.symlink('/proc/self/fd/0', 'x')\ndef seen(text): return 'assert' in text",
        {"test_list": ["assert seen(open('x').read())"]},
        0.0,
    ),
    "give a class": (APPLY, {"test_list": ["assert apply(iter, [1]) == 2", "assert double(1) == 2"]}, 0.0),
    "give a function": (APPLY, {"test_list": ["assert apply(lambda x: map(str, x), [1]) == 2"]}, 0.0),
    "skip": ("x = print(1)", {"test": SKIP + "    assert solution.double(1) == 2"}, 0.0),
    "have the cases of the program": ("CASES = []" + WRONG, {"test": CASES + "    assert double(x) == 2 * x"}, 0.0),
    "have no cases": ("CASES = 5" + WRONG, {"test": CASES + "    assert double(x) == 2 * x"}, 0.0),
    "expect an error": (
        "def f(data): return data.decode()",
        {
            "test": "import pytest\nfrom solution import f\ndef test():\n"
            "    with pytest.raises(UnicodeDecodeError, match='invalid'): f(b'\\xff')"
        },
        1.0,
    ),
}


@each_mode
@pytest.mark.parametrize("name", BY_TESTS)
@pytest.mark.slow
def test_no_attack_uses_what_the_tests_do(name, mode, monkeypatch):
    use(monkeypatch, MODES[mode])
    code, tests, expected = BY_TESTS[name]
    assert code_reward("apps", response(code), tests, timeout=5.0)["score"] == expected


slow = [pytest.param(name, marks=pytest.mark.slow) for name in ("another math", "another unittest", "skipped")]


@pytest.mark.fast("another abs*", "skipped by pytest-tests[03]", "right-tests[03]")
@pytest.mark.parametrize("tests", [COLLECTED, IMPORTED, STARRED, WITHOUT_IMPORT])
@pytest.mark.parametrize("name", ["right", "another abs", "skipped by pytest", *slow])
def test_no_attack_passes_tests_of_other_forms(name, tests):
    code = ATTACKS.get(name, "import math\ndef double(x):\n    return 2 * x")
    assert code_reward("apps", response(code), tests, timeout=5.0)["score"] == float(name == "right")


BY_LOOP = {"test": "def check(candidate):\n    assert all(map(candidate, [1, 2]))", "entry_point": "double"}
BY_NUMPY = [
    "import numpy as np\nx = np.array([2.0])\nassert np.allclose(double(1), x) and np.array_equal(double(1), x)"
]
INTERFACE = """
class Array:
    def __init__(self, dtype=None, copy=None): pass
    __array__ = __float__ = lambda self, *a, **k: 2.0
    __array_interface__ = {"version": 3, "shape": (1,), "typestr": "<f8", "data": bytes(8)}
    __array_priority__ = 1e9
    def __array_ufunc__(self, *a, **k): return True
    def __array_function__(self, *a, **k): return True
def double(x):
    return Array()
"""


@pytest.mark.parametrize("code, tests", [("def double(x):\n    raise StopIteration", BY_LOOP), (INTERFACE, BY_NUMPY)])
def test_what_tests_are_written_with_does_not_help(code, tests):
    assert code_reward("apps", response(code), tests)["score"] == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@each_mode
def test_the_judge_is_closed(mode, monkeypatch):
    use(monkeypatch, MODES[mode])
    code = SPY.replace("{in_landlock}", str(mode == "landlock"))  # the only others are those of bubblewrap otherwise
    assert code_reward("apps", response(code), ASSERTS, timeout=5.0)["score"] == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux isolates programs")
@each_mode
@pytest.mark.parametrize("tests", [ASSERTS, CALLS], ids=["asserts", "calls"])
def test_the_process_that_scores_is_out_of_reach(tests, mode, monkeypatch):
    """Signal 0 tests permission. `os.kill(-1, 9)` would end every process of this user."""
    use(monkeypatch, MODES[mode])
    code = f"""
import os
REACHED = False
for reach in (lambda: os.kill({os.getpid()}, 0), lambda: open('/proc/{os.getpid()}/mem', 'rb')):
    try:
        reach()
        REACHED = True
    except OSError:
        pass
def double(x):
    return 0 if REACHED else 2 * x
"""
    assert code_reward("apps", response(code), tests)["score"] == 1.0


@each_mode
def test_a_program_that_kills_everything_ends_its_own_processes_only(mode, monkeypatch):
    use(monkeypatch, MODES[mode])
    for kill in ("os.killpg(0, 9)", "os.kill(-1, 9)"):
        assert code_reward("apps", response(f"import os\n{kill}"), ASSERTS)["score"] == 0.0


@each_mode
def test_tests_give_files_to_a_program(mode, monkeypatch):
    """They share a folder for data."""
    use(monkeypatch, MODES[mode])
    tests = ["open('a', 'w').write('7')", "assert content('a') == '7' and open('b').read() == 'x'"]
    code = "def content(path):\n    open('b', 'w').write('x')\n    return open(path).read()"
    assert code_reward("apps", response(code), tests)["score"] == 1.0


# ---- what tests may do with a program's names -----------------------------------------------------------------------

SHAPES = """
import math, collections
from decimal import Decimal
class Point:
    def __init__(self, x, y=0):
        self.x, self.y = x, y
    def __eq__(self, other):
        return (self.x, self.y) == (other.x, other.y)
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return (self.x, self.y)[i]
    def moved(self, by):
        return Point(self.x + by, self.y)
class TooFar(ValueError):
    pass
def counted(text):
    return collections.Counter(text)
def upto(n):
    if n > 9:
        raise TooFar(n)
    yield_ = (i for i in range(n))
    return yield_
def values():
    return {"a": (1, 2.5, None), b"c": {3, True}, 1j: [float("inf")], "d": Decimal("0.1"), "e": frozenset("x")}
LIMIT = 9
def sum(a, b):
    return a * b
"""


@pytest.mark.parametrize(
    "test",
    [
        "p = Point(1, y=2); assert p.x == 1 and p[1] == 2 and len(p) == 2 and p.moved(2).x == 3",
        "assert Point(1) == Point(1) and Point(1) != Point(2) and isinstance(Point(1), Point)",
        "p = Point(1); p.x = 5; assert p.moved(1).x == 6",
        "assert counted('aab') == {'a': 2, 'b': 1}",
        "assert list(upto(3)) == [0, 1, 2] and sorted(upto(3), reverse=True) == [2, 1, 0]",
        "assert values() == {'a': (1, 2.5, None), b'c': {3, True}, 1j: [float('inf')], 'd': Decimal('0.1'), "
        "'e': frozenset('x')}",
        "assert type(values()['a']) is tuple and math.isclose(values()['a'][1], 2.5)",
        "assert LIMIT == 9",
        "assert sum(3, 4) == 12",  # the program's, for the test means no other name of it
        "assert LIMIT + sum([1, 2]) == 12",  # Python's
        "try:\n    upto(10)\n    assert False\nexcept ValueError as error:\n    assert str(error) == '10'",
        "def check(f):\n    assert [*map(f, [1])] == [Point(1)]\ncheck(Point)",
    ],
)
def test_what_tests_may_do(test):
    tests = "from decimal import Decimal\n" + test
    assert code_reward("apps", response(SHAPES), tests)["score"] == 1.0


def test_a_result_of_numpy_is_plain_data():
    numpy = "import numpy as np\ndef f(x):\n    return np.array(x).sum(), np.array(x) > 1, np.float32(0.5)"
    assert code_reward("apps", response(numpy), ["assert f([1, 2]) == (3, [False, True], 0.5)"])["score"] == 1.0


def test_the_scripts_import_nothing_of_the_package():
    """They run in isolated interpreters, which cannot import it."""
    folder = Path(__file__).resolve().parents[2] / "verl"
    for name in ("rewards/sandbox/assert_program.py", "processes/isolation/boot.py"):
        run = f"runpy.run_path({str(folder / name)!r}, run_name='x')"
        code = f"import json, runpy, sys; {run}; print(json.dumps([*sys.modules]))"
        loaded = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
        assert not [module for module in json.loads(loaded.stdout) if module.split(".")[0] in ("verl", "torch")]
