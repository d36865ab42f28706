"""Code: the program in a response, and the forms of tests that data sets have."""

import ast
import base64
import builtins
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import pickletools
import re
import sys
import textwrap
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.rules.answers.extract import visible_text
from verl.rewards.sandbox.assert_program import USUAL_MODULES

_FENCE = re.compile(
    r"(?<![`~])(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]{0,200})\n(?P<code>.*?)"
    r"(?:^[ \t]*(?:(?P=fence)[`~]*[ \t]*$|(?=(?P=fence)[ \t]*[\w{]))|(?<=\S)(?P=fence)[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_LONG_NAME = re.compile(r"(?:\.[\s\\]*\w+[\s\\]*){99}")  # `import a.a.a`: the parser needs the square of its memory
_PYTHON = ("py", "py3", "python", "python3", "pypy", "pypy3", "ipython")
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_MOST_BYTES = 1 << 29  # of compressed tests
_RECURSION = "__import__('sys').setrecursionlimit(600_000)"  # as the graders of PRIME and LiveCodeBench

# The compiler warns of what programs of responses have, such as "\d": not in the log of the run.
warnings.filterwarnings("ignore", module="a program of a response")

#: names by which tests import the program
PROGRAM_MODULES = {"solution", "main", "program", "submission", "candidate", "your_module"}

_NESTED = (
    *("public_test_cases", "private_test_cases", "public_tests", "private_tests", "generated_tests", "official_tests"),
    *("test_cases", "tests", "unit_tests", "input_output", "verification_info", "ground_truth"),
)
# Type of a test -> whether it is a call. Without a type, it is one if the function has a name.
_KINDS = {None: None, "stdin": False, "stdin_stdout": False, "functional": True, "function_call": True}
_FORMS = (
    "ground truth: expected {inputs, outputs} of equal length (with fn_name for calls), a list of {input, output}, "
    "{test_list}, or {test} with entry_point if it defines check(candidate)"
)


# ---- the program ----------------------------------------------------------------------------------------------------


def extract_code(text: str) -> str:
    """Return the program of a response: the last block that is marked as Python and does something, closed or not.

    Without one, it is the last unmarked block that is a program, or the text before the first block (the whole text
    without blocks) if that is one. Thoughts are not searched.
    """
    text = visible_text(text.replace("\r\n", "\n"))
    blocks = list(_FENCE.finditer(text))
    marked, plain = [], [text[: blocks[0].start()] if blocks else text]
    for block in blocks:
        language = re.match(r"[{.\s]*([\w+#-]*)", block["info"])[1].lower()
        if language in _PYTHON or not language:
            (marked if language else plain).append(textwrap.dedent(block["code"]))
    programs = [code for code in marked if _is_program(code, if_invalid=not code.lstrip().startswith(">>>"))]
    programs = programs or [code for code in plain if _is_program(code, if_invalid=False)]
    return (programs or marked or plain)[-1]


def _is_program(code: str, if_invalid: bool) -> bool:
    """Whether code does something: `3` and `[1, 2]`, which are outputs, do nothing."""
    if (module := _parse(code)) is None:
        return if_invalid
    return any(not isinstance(s, ast.Expr) or any(isinstance(n, ast.Call) for n in ast.walk(s)) for s in module.body)


@functools.cache
def _usual_imports() -> dict[str, str]:
    """Name -> the line that imports it."""
    lines = {}
    for name in USUAL_MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        lines |= {n: f"from {name} import {n}" for n in public}
    return lines | {name: f"import {name}" for name in USUAL_MODULES}


def with_imports(code: str) -> str:
    """Return a program with the usual imports of names that it uses and does not define."""
    if (module := _parse(code)) is None:
        return code
    used, defined = _names(module)
    imports = [line for name, line in _usual_imports().items() if name in used - defined - set(vars(builtins))]
    return "\n".join([*_FUTURE.findall(code), *imports, _RECURSION, _FUTURE.sub("", code)])


def _parse(code: str) -> ast.Module | None:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return None if _LONG_NAME.search(code) else ast.parse(code, "a program of a response")
    return None


def _names(module: ast.Module) -> tuple[set[str], set[str]]:
    """The names that code reads, and those that it defines anywhere."""
    used, defined = set(), set()
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.alias(name=name, asname=alias):
                defined.add((alias or name).partition(".")[0])
    return used, defined


# ---- the tests ------------------------------------------------------------------------------------------------------


def read_tests(ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Return tests of any form as {"fn_name", "inputs", "outputs", "checker"} or {"source", "before"}.

    "inputs" are texts, or [arguments, keywords] of the function. "checker" is a program that judges an output, "" for
    none. "source" is what `judge` of assert_program takes, "before" is code that comes before the program. Values that
    the ground truth lacks, such as the name of the function, are taken from `extra_info`.

    Raises:
        ValueError: If the tests have none of the forms, or cannot fail.
    """
    try:
        extra = _decode(extra_info)
        return _read(_decode(ground_truth), extra if isinstance(extra, Mapping) else {})
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"code: {error}. Found {ground_truth!r:.300}") from error


def _decode(value: Any) -> Any:
    """The data of a value, which may be JSON text, an array, or the private tests of LiveCodeBench."""
    value = value.tolist() if type(value).__module__ == "numpy" else value
    return _decode_text(value) if isinstance(value, str) else value


@functools.lru_cache(maxsize=16)
def _decode_text(text: str) -> Any:
    try:
        return _decode(json.loads(text))
    except ValueError:
        pass
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except (ValueError, zlib.error):
        return text
    if not (unpacker.eof or unpacker.unconsumed_tail):
        return text
    # The published data are pickled text. Nothing is unpickled: a pickle of ten bytes can take all memory.
    is_json = data[:1] in (b"[", b"{")
    texts = [data.decode()] if is_json else [each for _, each, _ in pickletools.genops(data) if isinstance(each, str)]
    if len(texts) != 1 or unpacker.unconsumed_tail:
        raise ValueError(f"expected one JSON text of at most {_MOST_BYTES >> 20} MiB in the compressed tests")
    return _decode(texts[0])


def _read(tests: Any, context: Mapping[str, Any]) -> dict[str, Any]:
    """Read decoded tests. context: values of outer levels."""
    if isinstance(tests, Sequence) and tests and all(isinstance(test, Mapping) for test in tests):
        tests = _one_type(tests)
    elif isinstance(tests, str | list):
        tests = {"test" if isinstance(tests, str) else "test_list": tests}
    if not isinstance(tests, Mapping):
        raise ValueError(_FORMS)
    tests = {key: value for key, value in tests.items() if value is not None}
    for values in (context, tests):
        metadata = _decode(values.get("metadata"))
        context = {**context, **values, **(metadata if isinstance(metadata, Mapping) else {})}
    if tests.get("test_list") or "test" in tests:
        return _read_source(tests, context)
    if {"inputs", "outputs"} <= set(tests) or {"input", "output"} <= set(tests):
        return _read_pairs(tests, context)
    groups = [_decode(tests.get(key)) for key in _NESTED]
    groups = [None if group == {"input": [], "output": []} else group for group in groups]
    nested = [_read(group, context) for group in groups if group and not isinstance(group, int)]
    if not nested or any(group.get("fn_name", group) != nested[0].get("fn_name") for group in nested[1:]):
        raise ValueError(_FORMS)
    return {
        key: [*itertools.chain(*(group[key] for group in nested))] if key.endswith("puts") else value
        for key, value in nested[0].items()
    }


def _one_type(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{inputs, outputs} of a list of tests, which have all the same type and function."""
    shared = [{key: _decode(case.get(key)) for key in ("testtype", "type", "fn_name", "metadata")} for case in cases]
    if any(each != shared[0] for each in shared):
        raise ValueError(f"expected tests of one type and function, found {shared[0]} and others")
    return {**shared[0], **{f"{n}s": [case.get(n, case.get(f"{n}s")) for case in cases] for n in ("input", "output")}}


def _checker(context: Mapping[str, Any]) -> str:
    """The program of a row that judges outputs, as of Codeforces. Raises ValueError for a row that needs more."""
    checker, mode = context.get("generated_checker") or context.get("checker") or "", context.get("input_mode")
    mode = f"file {context['input_file']}" if context.get("input_file") else mode
    if not isinstance(checker, str) or _parse(checker) is None:
        raise ValueError(f"the row has a checker that is not Python, which is not supported: {checker!r:.80}")
    if context.get("interaction_format") or mode not in (None, "stdio"):
        interactive = f"input_mode {mode!r}" if mode not in (None, "stdio") else "interaction_format"
        raise ValueError(f"programs with {interactive} are not supported: expected standard input and output")
    return checker


def _read_pairs(tests: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
    inputs, outputs = (_as_list(tests.get(f"{n}s", tests.get(n)), f"{n}s" in tests) for n in ("input", "output"))
    kind = tests.get("testtype", tests.get("type"))
    if not inputs or len(inputs) != len(outputs) or kind not in _KINDS:
        raise ValueError(f"{_FORMS}, with a type in {list(_KINDS)}")
    if str(context.get("language") or "python").lower() not in _PYTHON:
        raise ValueError(f"expected tests of Python programs, found language {context['language']!r}")
    name = next((context[key] for key in ("fn_name", "func_name", "function_name") if context.get(key)), None)
    are_values = any(not isinstance(v, str) for case in inputs if isinstance(case, list | dict) for v in _as_list(case))
    if name is None and (_KINDS[kind] or (kind is None and (are_values or context.get("entry_point")))):
        names = re.findall(r"def (\w+)", context.get("starter_code") or "") or [context.get("entry_point")]
        if not (name := (names[-1] or "").rpartition(".")[2]):
            raise ValueError("expected the name of the function as fn_name, or as func_name in metadata, found none")
    if name and _KINDS[kind] is not False:
        if all(each in (None, [None]) for each in map(_decode, outputs)):
            raise ValueError("the expected results are all null: a function that does nothing would pass")
        return {"fn_name": name, "inputs": [_arguments(case) for case in inputs], "outputs": outputs}
    if any(text is None or isinstance(text, Mapping) for text in (*inputs, *outputs)):
        raise ValueError("expected text for standard input and output of each test")
    inputs, outputs = (["\n".join(map(str, _as_list(text))) for text in texts] for texts in (inputs, outputs))
    checker = _checker(context)
    if not checker and not any(map(str.strip, outputs)):
        raise ValueError("the expected outputs are all empty: a program that does nothing would pass")
    return {"fn_name": None, "inputs": inputs, "outputs": outputs, "checker": checker}


def _as_list(value: Any, may_be_json: bool = False) -> list[Any]:
    """The items of a list; [value] for anything else."""
    items = _decode(value) if may_be_json or not isinstance(value, str) else value
    return list(items) if isinstance(items, list | tuple) else [value]


def _arguments(case: Any) -> list[Any]:
    """[arguments, keywords] of one call, given as a list, keywords, or text with one JSON value per line."""
    if isinstance(case, str):
        return [[json.loads(line) for line in case.splitlines() if line.strip()], {}]
    if isinstance(case, Mapping):
        return [[], dict(case)]
    if not isinstance(_decode(case), list | tuple):
        raise ValueError(f"expected a list of arguments as input of each call, found {case!r:.80}")
    return [list(_decode(case)), {}]


def _read_source(tests: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """Tests that are code: lines of asserts, a module, or `check(candidate)` with the name of the function."""
    source, before, entry, begun = tests.get("test"), "", context.get("entry_point"), ""
    if "test_list" in tests:
        blocks = [_as_list(tests.get(key, []), True) for key in ("test_imports", "test_setup_code", "test_list")]
        source = "\n".join(itertools.chain(*blocks))
    elif entry:
        if isinstance(context.get("prompt"), str) and (prompt := _parse(context["prompt"])):
            kept = [node for node in prompt.body if getattr(node, "name", None) not in re.findall(r"\w+", entry)]
            before = ast.unparse(ast.Module(kept, [])) + "\n"
            begun = context["prompt"] if entry in _names(prompt)[1] else ""
        has_check = re.search(r"^def check\(", source, re.MULTILINE)
        source = f"{source}\ncheck({entry})\n" if has_check else f"candidate = {entry}\n{source}"
        source = source if "class " in before else before + source  # objects of the tests cannot be given to programs
    try:
        module = ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are not valid Python: {error}") from error
    imported, to_collect, checks = _imported_modules(module), _collected(module), _Checks()
    _check_source(module, imported, to_collect)
    source = ast.unparse(ast.fix_missing_locations(checks.visit(module)))
    lists = {"collected": to_collect, "imports": imported & PROGRAM_MODULES, "bound": _bound(module)}
    lists = {name: sorted(names) for name, names in {**lists, "owners": _owners(module)}.items()}
    return {"source": [source, checks.known > 0, lists], "before": before, "begun": [begun, entry]}


def completed(code: str, begun: str, name: str) -> str:
    """Return a program; one that is only the body of the function that the prompt begins (`begun`), with its head."""
    if not begun or ((module := _parse(code)) and name in _names(module)[1]):
        return code
    bodies = [code] * code[:1].isspace() + [textwrap.indent(textwrap.dedent(code), "    "), f"    {code.lstrip()}"]
    return next((text for body in bodies if _parse(text := f"{begun.rstrip()}\n{body}")), code)


def _check_source(module: ast.Module, imported: set[str], to_collect: set[str]) -> None:
    """Raise ValueError for tests that no program can fail, or that no program can pass."""
    nodes = list(ast.walk(module))
    used, defined = _names(module)
    if not to_collect and not any(map(_acts, module.body)):
        raise ValueError(
            "the tests call nothing: expected asserts, functions or classes of pytest or unittest, or entry_point "
            "if they define check(candidate)"
        )
    if not any(map(_is_check, nodes)):
        raise ValueError("the tests check nothing: expected an assert")
    if not used - defined and not imported & PROGRAM_MODULES:
        raise ValueError("the tests use nothing of the program")
    for name in (imported | ({"pytest"} if to_collect else set())) - PROGRAM_MODULES - {""}:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"the tests need the package {name}, which is not installed: pip install {name}")
    used |= imported | {node.arg for node in nodes if isinstance(node, ast.arg)}
    if unsupported := used & {"monkeypatch", "mocker", "capfd", "asyncio"}:
        raise ValueError(f"tests with {unsupported} are not supported: the program runs in another process")
    if any(isinstance(node, ast.AsyncFunctionDef) for node in nodes):
        raise ValueError("async tests are not supported: the program runs in another process")


def _called_name(node: ast.AST) -> str:
    """The last name of what a call calls: "assertEqual" for `self.assertEqual(1, 2)`; "" for other code."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_check(node: ast.AST) -> bool:
    """Whether code can fail a test."""
    name = _called_name(node).lower().lstrip("_")
    is_call = name.startswith(("assert", "raises")) and name != "assertionerror"
    return is_call or isinstance(node, ast.Assert | ast.Raise)


class _Checks(ast.NodeTransformer):
    """Rewrites tests so that `assert_program.Checks` counts their checks."""

    def __init__(self) -> None:
        self.known, self._expected = 0, False

    def _call(self, name: str, node: ast.expr) -> ast.expr:
        self.known += 1
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [node], []), node)

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self.generic_visit(node)
        node.test = self._call("__count__" if self._expected else "__check__", node.test)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        node.func = self._call("__count__", node.func) if _is_check(node) else node.func
        return node

    def visit_With(self, node: ast.With | ast.FunctionDef) -> ast.AST:
        heads = node.items if isinstance(node, ast.With) else node.decorator_list
        before, text = self._expected, " ".join(map(ast.unparse, heads)).lower()
        self._expected |= any(word in text for word in ("raises", "xfail"))
        self.generic_visit(node)
        self._expected = before
        return node

    visit_FunctionDef = visit_With

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        node.module, node.level = (node.module or "solution") if node.level else node.module, 0
        return node


def _bound(module: ast.Module) -> set[str]:
    """The names that code imports and defines, outside of its functions and classes."""
    aliases = [alias for node in module.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    names = {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
    return names | {node.name for node in module.body if hasattr(node, "name")}


def _owners(module: ast.Module) -> set[tuple[str, str, str]]:
    """(name, module, attribute) of modules that code uses as `decimal.Decimal` or `np.array`, and does not import."""
    modules = {**{name: name for name in sys.stdlib_module_names}, "np": "numpy", "numpy": "numpy"}
    free, nodes = modules.keys() - _names(module)[1], [n for n in ast.walk(module) if isinstance(n, ast.Attribute)]
    return {(n.value.id, modules[n.value.id], n.attr) for n in nodes if getattr(n.value, "id", "") in free}


def _imported_modules(module: ast.AST) -> set[str]:
    """The top-level modules that code imports."""
    nodes = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", alias.name) or "" for node in nodes for alias in node.names]
    return {name.partition(".")[0] for name in names}


def _collected(module: ast.Module) -> set[str]:
    """The functions and classes that pytest collects, without functions that the tests call with arguments."""
    called = {_called_name(n) for n in ast.walk(module) if isinstance(n, ast.Call) and (n.args or n.keywords)}

    def is_test(node: ast.AST) -> bool:
        return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")

    functions = {node.name for node in module.body if is_test(node)} - called
    return functions | {n.name for n in module.body if isinstance(n, ast.ClassDef) and any(map(is_test, n.body))}


def _acts(statement: ast.AST) -> bool:
    """Whether a statement, which may have others inside, checks or calls something when a module is run."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Lambda):
        return False
    is_call = isinstance(statement, ast.Call) and _called_name(statement) not in ("main", "print", "exit", "append")
    return is_call or isinstance(statement, ast.Assert) or any(map(_acts, ast.iter_child_nodes(statement)))
