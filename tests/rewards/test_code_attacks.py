"""Programs that try to pass the tests without being correct: none passes, and none outlives its test.

The tests expect `double`, and none of these programs doubles. The attacks target the sandbox's files and processes.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.rewards.sandbox.code_tests import code_reward
from verl.rewards.sandbox.pool import Limits
from verl.rewards.sandbox.program_boot import LANDLOCK_ABI_WITH_SCOPES, landlock_abi
from verl.rewards.sandbox.programs import run_program

ASSERTS = {"test_list": ["assert double(1) == 2", "assert double(21) == 42"]}
CALLS = {"fn_name": "double", "inputs": [[1], [21]], "outputs": [2, 42]}
CHECK = {"test": "def check(candidate):\n    assert abs(candidate(21) - 42) < 0.5", "entry_point": "double"}
WRONG = "\ndef double(x):\n    return 0\n"

# A value that compares equal to everything.
YES = """
class Yes:
    def __eq__(self, other): return True
    __lt__ = __le__ = __ge__ = __ne__ = __eq__
    def __hash__(self): return 42
    def __bool__(self): return True
    def __sub__(self, other): return 0
    def __repr__(self): return "42"
"""

ATTACKS = {
    "an equal of everything": YES + "def double(x):\n    return Yes()",
    "a number that equals everything": YES
    + "class Number(Yes, int):\n    __hash__ = Yes.__hash__\ndef double(x):\n    return Number()",
    "a list of such": YES + "def double(x):\n    return [Yes()]",
    "another abs": "def abs(x):\n    return 0" + WRONG,
    "another AssertionError": "import builtins\nbuiltins.AssertionError = Warning\nAssertionError = Warning" + WRONG,
    "other builtins": "__builtins__ = {'abs': lambda x: 0, 'AssertionError': Warning}" + WRONG,
    "frames": """
import sys
frame, known = sys._getframe(), []
while frame:
    known += [str(frame.f_locals), str(frame.f_globals)]
    frame = frame.f_back
EXPECTED = any('== 42' in text or '< 0.5' in text for text in known)
def double(x):
    return 2 * x if EXPECTED else 0
""",
    "garbage collector": """
import gc
EXPECTED = any('== 42' in o or '< 0.5' in o for o in gc.get_objects() if isinstance(o, str))
EXPECTED |= any('== 42' in str(o) for o in gc.get_objects() if isinstance(o, dict))
def double(x):
    return 2 * x if EXPECTED else 0
""",
    "runner's names": """
import sys
for module in list(sys.modules.values()):
    for name in ('judge', 'serve', 'pack', 'unpack', 'raise_again', 'respond', 'OPERATIONS'):
        if name in vars(module):
            vars(module)[name] = (lambda *a, **k: True) if name != 'OPERATIONS' else {}
"""
    + WRONG,
    "files": """
import pathlib
TEXTS = [p.read_text() for p in pathlib.Path().iterdir() if p.is_file() and p.name != 'solution.py']
EXPECTED = any('double(21) == 42' in t or 'candidate(21)' in t for t in TEXTS)
def double(x):
    return 2 * x if EXPECTED else 0
""",
    "planted files": """
import pathlib
for name in ('passed', 'results', 'verdict', 'stdout', 'tests.py', 'program.py'):
    pathlib.Path(name).write_text('pass' if name.endswith('.py') else 'true\\ntrue\\n')
for name in ('json', 'decimal', 'math', 'operator', 'traceback', 'linecache', 'sitecustomize', 'random'):
    pathlib.Path(name + '.py').write_text('import os\\nos._exit(0)')
raise SystemExit
""",
    "descriptors": """
import json, os
for number in range(256):
    for line in (b'["value", 2]', b'["value", true]', b'passed', b'2'):
        try:
            os.write(number, line + b'\\n')
        except OSError:
            pass
"""
    + WRONG,
    "answers before they are asked for": """
import os
names = '["value", ["dict", [["modules", ["dict", []]], ["others", ["dict", [["double", ["object", 0]]]]]]]]'
for number in os.listdir('/proc/self/fd'):
    try:
        os.write(int(number), (names + '\\n' + '["value", 0]\\n' * 9).encode())
    except OSError:
        pass
""",
    "closed descriptors": "import os\nos.closerange(0, 256)" + WRONG,
    "atexit": "import atexit, os\natexit.register(os._exit, 0)" + WRONG,
    "exit": "import os\nos._exit(0)",
    "exit when called": "import os\ndef double(x):\n    os._exit(0)",
    "SystemExit when called": "def double(x):\n    raise SystemExit(0)",
    "stops who is above": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)" + WRONG,
    "kills who is above": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)" + WRONG,
    "kills the group": "import os, signal\nos.killpg(0, signal.SIGTERM)" + WRONG,
    "prints": "print('passed')\nprint(2)\nprint(42)" + WRONG,
    "another exec": "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a: ''" + WRONG,
}

# Memory and descriptors of the parent processes (Linux), which would reveal the expected values.
SPY = """
import os
EXPECTED, pid = False, os.getppid()
for name in ('mem', 'environ', 'maps', *(f'fd/{number}' for number in range(64))):
    try:
        open(f'/proc/{pid}/{name}', 'rb').read(1)
        EXPECTED = True
    except OSError:
        pass
def double(x):
    return 2 * x if EXPECTED else 0
"""


def response(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.mark.parametrize("tests", [CHECK, CALLS], ids=["asserts", "calls"])
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_passes(name, tests):
    assert code_reward("apps", response(ATTACKS[name]), tests, timeout=5.0)["score"] == 0.0


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
def test_the_judge_is_closed():
    assert code_reward("apps", response(SPY), ASSERTS)["score"] == 0.0


@pytest.mark.skipif(sys.platform != "linux" or landlock_abi() < LANDLOCK_ABI_WITH_SCOPES, reason="no Landlock here")
@pytest.mark.parametrize("tests", [ASSERTS, CALLS], ids=["asserts", "calls"])
def test_the_process_that_scores_is_out_of_reach(tests):
    """Signal 0 tests permission. `os.kill(-1, 9)` would end every process of this user."""
    code = f"""
import os
REACHED = False
for reach in (lambda: os.kill({os.getpid()}, 0), lambda: open('/proc/{os.getpid()}/mem', 'rb')):
    try:
        reach()
        REACHED = True
    except PermissionError:
        pass
def double(x):
    return 0 if REACHED else 2 * x
"""
    assert code_reward("apps", response(code), tests)["score"] == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone a process that left its group can be found")
@pytest.mark.parametrize("ends", ["", "while True: pass"], ids=["ends", "is stopped"])
def test_no_child_outlives_the_test(ends):
    code = f"""
import os, time
for generation in range(3):
    if os.fork() == 0:
        os.setsid()
        os.write(1, b"%d " % os.getpid())
        if generation == 2 or os.fork() == 0:
            os.write(1, b"%d " % os.getpid())
            time.sleep(60)
        os._exit(0)
time.sleep(0.3)
{ends}
"""
    finished = run_program(code, limits=Limits(2.0, cpu_seconds=2.0, memory_bytes=1 << 30, output_bytes=1 << 20))
    pids = [int(pid) for pid in finished.stdout.split()]
    assert len(pids) >= 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_programs_have_their_own_process_group():
    """A program that kills its process group does not reach the process that scores."""
    begun = time.monotonic()
    assert code_reward("apps", response("import os\nos.killpg(0, 9)"), ASSERTS)["score"] == 0.0
    assert time.monotonic() - begun < 5 and os.getpid()


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


def test_tests_with_a_syntax_error_are_refused():
    with pytest.raises(ValueError, match="code: the tests are not valid Python"):
        code_reward("apps", response(WRONG), ["assert double(1) ="])


def test_a_result_of_numpy_is_plain_data():
    numpy = "import numpy as np\ndef f(x):\n    return np.array(x).sum(), np.array(x) > 1, np.float32(0.5)"
    assert code_reward("apps", response(numpy), ["assert f([1, 2]) == (3, [False, True], 0.5)"])["score"] == 1.0


def test_the_scripts_import_nothing_of_the_package():
    """They run in isolated interpreters, which cannot import it."""
    folder = Path(__file__).resolve().parents[2] / "verl" / "rewards" / "sandbox"
    for name in ("assert_program.py", "program_boot.py"):
        run = f"runpy.run_path({str(folder / name)!r}, run_name='x')"
        code = f"import json, runpy, sys; {run}; print(json.dumps([*sys.modules]))"
        loaded = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
        assert not [module for module in json.loads(loaded.stdout) if module.split(".")[0] in ("verl", "torch")]
