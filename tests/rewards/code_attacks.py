"""Programs that try to pass tests of `double` without doubling."""

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

#: Writes a line to every descriptor, as a response to the judge.
WRITE = """
import os
for number in os.listdir('/proc/self/fd'):
    try:
        os.write(int(number), {line!r}.encode())
    except OSError:
        pass
"""
NAMES = '["", "value", ["list", ["double"]]]\n'

#: What the program writes to the judge in place of the results of its calls.
MESSAGES = {
    "a judge's verdict": "\nx passed\n",
    "true for everything": NAMES + '["", "value", true]\n' * 9,
    "not a number": NAMES + '["", "value", NaN]\n' * 9,
    "infinity": NAMES + '["", "value", Infinity]\n' * 9,
    "a JSON object": NAMES + '["", "value", {"__eq__": true}]\n' * 9,
    "an unknown type": NAMES + '["", "value", ["eval", "2"]]\n' * 9,
    "an exit": NAMES + '["", "raised", ["SystemExit"], "0"]\n' * 9,
    "an exit without bases": '["", "raised", ["SystemExit"], "0"]\n' * 9,
    "an exception of the judge": '["", "raised", ["BadTests", "Exception"], ""]\n' * 9,
    "a skipped test": '["", "raised", ["SkipTest", "Exception"], ""]\n' * 9,
    "no exception": '["", "raised", [], ""]\n' * 9,
    "a keyboard interrupt": '["", "raised", ["KeyboardInterrupt"], ""]\n' * 9,
    "a call of a function of the judge": '["", "callback", -1, ["tuple", []], ["dict", []]]\n' * 9,
    "a call of the last function": '["", "callback", 99, ["tuple", []], ["dict", []]]\n' * 9,
    "names of the judge": '["", "value", ["list", ["__check__", "__count__", "judge", "Checks", "double"]]]\n' * 9,
    "names that are no text": '["", "value", ["list", [1, null, ["list", []]]]]\n' * 9,
    "a printed verdict": '["\\nx passed\\n", "value", ["list", []]]\n' * 9,
    "deep nesting": "[" * 100_000 + "\n",
    "a long line": "[" + "0," * (1 << 18),
    "no JSON": "passed\n" * 9,
    "no text": "\x00\xff\n" * 9,
    "an empty line": "\n" * 9,
    "a later call of a function": NAMES + '["", "callback", 1e308, ["tuple", []], ["dict", []]]\n' * 9,
    "other operands": NAMES + '["", "value", 2, ["list", []], ["tuple", [42]]]\n' * 9,
    "nothing printed": '[null, "value", ["list", ["double"]]]\n' * 9,
    "a status that is a list": '["", ["value"], 2]\n' * 9,
    "an object of nobody": NAMES + '["", "value", ["object", 0.5]]\n' * 9,
    "an exception without a name": NAMES + '["", "value", ["exception", []]]\n' * 9,
    "a failed assert": NAMES + '["", "raised", ["AssertionError"], ""]\n' * 9,
    "a warning": NAMES + '["", "raised", ["Warning"], "x"]\n' * 9,
    "names as a dictionary": '["", "value", ["dict", [["double", 1]]]]\n' * 9,
    "names as a text": '["", "value", "double"]\n' * 9,
    "a huge fraction": NAMES + '["", "value", ["Fraction", "1e99999999"]]\n' * 9,
    "a path of a descriptor": NAMES + '["", "value", ["Path", "/proc/self/fd/0"]]\n' * 9,
}

#: Writes modules that pass every test when they are imported, or when a file is read as one.
PLANT = """
BODY = '''
import os, sys
frame, token = sys._getframe(), ""
while frame:
    token = frame.f_locals.get("token", token)
    frame = frame.f_back
os.write(1, f"\\\\n{token} passed\\\\n".encode())
os._exit(0)
'''
import os
for name in ("numpy", "decimal", "helper", "random", "statistics", "solution", "fractions", "pytest", "conftest"):
    os.makedirs(f"{name}_") if os.path.exists(name) else open(f"{name}.py", "w").write(BODY)
"""

ATTACKS = {
    **{f"message: {name}": WRITE.format(line=line) + WRONG for name, line in MESSAGES.items()},
    "a module that is run when it is imported": """
import types
open("test_x.py", "w").write("import os\\nos._exit(0)\\n")
double = types.ModuleType("unittest.__main__")
""",
    "the same as an import": "open('test_x.py', 'w').write('import os; os._exit(0)')\n"
    "import unittest.__main__ as double",
    "a function that is a module": "import this as double",
    "settings of pytest": """
import pathlib
for name in ('conftest.py', 'test_x.py', 'pytest.py', 'unittest.py', 'ast.py', 'decimal.py', 'usercustomize.py'):
    pathlib.Path(name).write_text('import os\\nos.write(1, b"passed")\\nos._exit(0)')
for name in ('pytest.ini', 'tox.ini', 'setup.cfg', '.coveragerc', 'x.pth', 'pyvenv.cfg'):
    pathlib.Path(name).write_text('[pytest]\\naddopts = --collect-only\\nimport os; os._exit(0)')
"""
    + WRONG,
    "links in the shared folder": """
import os
for name in ('tests.py', 'program.py', 'out', 'json.py'):
    for target in ('/proc/self/fd/1', '/proc/1/fd/1', '/dev/shm/x'):
        try:
            os.symlink(target, name)
        except OSError:
            pass
"""
    + WRONG,
    "folders with names of modules": "import os\nfor n in ('json', 'math', 'pytest', 'numpy'): os.mkdir(n)" + WRONG,
    "another import": "import builtins\nbuiltins.__import__ = lambda *a, **k: None" + WRONG,
    "another print": "import builtins\nbuiltins.print = builtins.isinstance = lambda *a, **k: True" + WRONG,
    "other modules": "import sys\nfor n in list(sys.modules): sys.modules[n] = type('M', (), {'__eq__': all})()"
    + WRONG,
    "another json": 'import json\njson.dumps = lambda *a, **k: \'["", "value", 2]\'' + WRONG,
    "another unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None" + WRONG,
    "another math": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\nmath.fabs = lambda x: 0" + WRONG,
    "another operator": "import operator\noperator.eq = lambda a, b: True" + WRONG,
    "another standard output": "import sys\nsys.stdout = sys.stderr = sys.__stdout__ = open('out', 'w')" + WRONG,
    "a name of the tests": "check = candidate = tests = lambda *a, **k: True" + WRONG,
    "a trace function": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)" + WRONG,
    "an audit hook": "import sys, os\nsys.addaudithook(lambda *a: None)" + WRONG,
    "an exception hook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\nraise ValueError",
    "a finalizer": "import os, weakref\nclass A: pass\nweakref.finalize(A(), os._exit, 0)" + WRONG,
    "a thread that exits": "import os, threading\nthreading.Timer(0.05, os._exit, [0]).start()" + WRONG,
    "a fork that responds": "import os\nif os.fork() == 0: os.setpgid(0, 0)" + WRONG,
    "another program": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(2)'])",
    "a signal to itself": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "an alarm": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.alarm(1)" + WRONG,
    "an unreadable result": "class A:\n    def __reduce__(self): return exec, ('1',)\ndef double(x): return A()",
    "a class of numpy": "class A:\n    def tolist(self): return self\n    __eq__ = lambda *a: True\n"
    "A.__module__ = 'numpy'\ndef double(x): return A()",
    "a number that is a text": "class T(str):\n    __eq__ = lambda *a: True\n    __hash__ = str.__hash__\n"
    "def double(x): return T('42')",
    "not a number": "def double(x): return float('nan')",
    "a decimal": "import decimal\ndef double(x): return decimal.Decimal('NaN')",
    "an exception as a result": "def double(x): return AssertionError",
    "a generator": "def double(x):\n    while True: yield 42",
    "a coroutine": "async def double(x): return 2 * x",
    "skipped": "import unittest\ndef double(x): raise unittest.SkipTest",
    "skipped by pytest": "import pytest\ndef double(x): pytest.skip()",
    "an exit of pytest": "import pytest\ndef double(x): pytest.exit('', returncode=0)",
    "an exit by an exception": "def double(x): raise GeneratorExit",
    "a keyboard interrupt": "def double(x): raise KeyboardInterrupt",
    "no memory": "def double(x): raise MemoryError",
    "recursion": "def double(x): return double(x)",
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
    "names of the judge": "__check__ = __count__ = lambda value: True" + WRONG,
    "a class that any value is of": "class M(type):\n    __instancecheck__ = __eq__ = lambda *a: True\n"
    "    __hash__ = None\nclass double(int, metaclass=M): pass",
    "a value of another class": "class A:\n    __class__ = int\n    __int__ = __index__ = lambda s: 7\n"
    "    __eq__ = lambda *a: True\ndef double(x): return A()",
    "an instance made of anything": YES + "class double:\n    __new__ = lambda *a: Yes()",
    "a class with every name": "class Solution:\n    __getattr__ = lambda s, n: lambda *a: 0",
    "a dictionary that lies": "class D(dict):\n    items = keys = lambda s: [(42, 42)]\n    __eq__ = lambda *a: True\n"
    "def double(x): return D(a=1)",
    "a float that prints 42": "class F(float):\n    __repr__ = __str__ = lambda s: '42'\ndef double(x): return F(0)",
    "bytes that decode to 42": "class B(bytes):\n    decode = lambda *a: 42\ndef double(x): return B(b'x')",
    "an error that says 42": "class E(Exception):\n    __str__ = lambda s: '42'\ndef double(x): raise E",
    "an error that cannot be shown": "class E(Exception):\n    __str__ = None\ndef double(x): raise E",
    "an error without a class": "class M(type):\n    __name__ = None\nclass E(Exception, metaclass=M): pass\n"
    "def double(x): raise E",
    "a group of errors": "def double(x): raise BaseExceptionGroup('x', [KeyboardInterrupt()])",
    "an exit as an error of a group": "def double(x): raise BaseExceptionGroup('x', [SystemExit(0)])",
    "a huge number": "def double(x): return 10 ** 100_000",
    "infinity": "def double(x): return float('inf')",
    "a deep list": "def double(x):\n    a = []\n    for _ in range(100_000): a = [a]\n    return a",
    "a list in itself": "def double(x):\n    a = []\n    a.append(a)\n    return a",
    "half of a surrogate pair": "def double(x): return '\\ud800'",
    "a text with a verdict": "def double(x): return '\\nx passed\\n'",
    "a property": "class A:\n    double = property(lambda s: 42)\ndouble = A()",
    "a partial function": "import functools, operator\ndouble = functools.partial(operator.mul, 0)",
    "an argument that is changed": "def double(x):\n    globals()['x'] = 42\n    return x",
    "a callback of the garbage collector": "import gc, os\ngc.callbacks.append(lambda *a: os._exit(0))\ngc.collect()"
    + WRONG,
    "the end of threads": "import os, threading\nthreading._shutdown = lambda: os._exit(0)" + WRONG,
    "a trace of threads": "import sys, threading\nthreading.settrace(print); sys.setprofile(lambda *a: None)" + WRONG,
    "another os.write": "import os\nos.write = os.dup2 = os.fdopen = lambda *a, **k: 0" + WRONG,
    "another reader": "import io\nio.open = io.StringIO = io.BytesIO = None" + WRONG,
    "another encoder": "import json.encoder as e\ne.c_make_encoder = None\ne.JSONEncoder.encode = lambda *a: '42'\n"
    "e.JSONEncoder.iterencode = lambda *a, **k: ['42']\ndef double(x): return Ellipsis",
    "another decoder": "import json\njson.loads = json.load = lambda *a: ['eq', 0, 0]" + WRONG,
    "another codec": "import codecs\ncodecs.register_error('strict', lambda e: ('42', e.end))\n"
    "codecs.register_error('replace', lambda e: ('42', e.end))" + WRONG,
    "another import system": "import sys\nsys.meta_path.clear(); sys.path_hooks.clear(); sys.path[:] = ['.']" + WRONG,
    "little recursion": "import sys\nsys.setrecursionlimit(60)" + WRONG,
    "short numbers": "import sys\nsys.set_int_max_str_digits(640)\ndef double(x): return 10 ** 1000",
    "its input again": "import os\ntry:\n    TEXT = os.pread(0, 1 << 20, 0)\nexcept OSError:\n    TEXT = b''\n"
    "EXPECTED = b'[2, 42' + b']' in TEXT or b'42) ' + b'<' in TEXT\ndef double(x): return 2 * x if EXPECTED else 0",
    "its output again": "import os\ntry:\n    os.dup2(os.open('/proc/self/fd/1', os.O_RDONLY), 0)\nexcept OSError: pass"
    + WRONG,
    "the folder above": "import glob\nTEXTS = [open(p, errors='replace').read() for p in glob.glob('../*/*.py') + "
    "glob.glob('/tmp/*/*.py')]\ndef double(x): return 2 * x if any('candidate(21)' in t for t in TEXTS) else 0",
    "its environment": "import os, sys\nTEXT = str(dict(os.environ)) + str(sys.argv) + str(sys.orig_argv)\n"
    "def double(x): return 2 * x if 'candidate(21' + ')' in TEXT else 0",
    "streams closed by the call": "import os\ndef double(x):\n    os.closerange(0, 99)\n    return 0",
    "half of a message": WRITE.format(line='["", "value", 4') + "os._exit(0)",
    "replies for later calls": "def double(x):\n"
    + "".join(f"    {line}\n" for line in WRITE.format(line='["", "value", true]\n' * 5).splitlines())
    + "    return 0",
    "two processes that reply": "import os\ndef double(x):\n    os.fork()\n    return 0",
    "a signal in each call": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)" + WRONG,
    "stops the group": "import os, signal\nos.kill(0, signal.SIGSTOP)" + WRONG,
    "modules beside those of the tests": PLANT + WRONG,
    "plugins of pytest": "pytest_plugins = ['this']; collect_ignore_glob = ['*']; pytestmark = [1]" + WRONG,
    "names of test frameworks": "setUp = setup_module = load_tests = assertEqual = lambda *a: []" + WRONG,
    "dunder names": "__test__ = False; __unittest_skip__ = True; __loader__ = __spec__ = None" + WRONG,
    "a callable object": "class D:\n    __call__ = lambda *a: NotImplemented\ndouble = D()",
    "a number that does not end": "import itertools\ndef double(x): return itertools.count()",
    "limits of who is above": "import os, resource\nfor limit in range(16):\n    try:\n"
    "        resource.prlimit(os.getppid(), limit, (0, 0))\n    except (OSError, ValueError): pass" + WRONG,
    "pipes with names of files": "import os\nfor n in ('tests.py', 'conftest.py', 'out'): os.mkfifo(n)" + WRONG,
    "a closed folder": "import os\nos.chmod('.', 0)" + WRONG,
    "its runner's frame": "import sys\nVALUES = str(sys._getframe(1).f_locals)\n"
    "def double(x): return 2 * x if 'expected' in VALUES else 0",
    "another exec": "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a: ''" + WRONG,
}
