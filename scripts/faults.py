"""Small faults of Python source: what `scripts/mutants.py` puts into a file, one at a time.

mutants_of("verl/algorithms/kl.py", source)   # every fault of the file
"""

import ast
import copy
import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

COMPARE = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_PAIRS = "mean sum,min max,amin amax,argmin argmax,any all,zeros ones,zeros_like ones_like,floor ceil,minimum maximum,\
startswith endswith,masked_mean masked_sum,log exp,append extend,eq ne,lt le,gt ge"
NAMES = {a: b for pair in _PAIRS.split(",") for a, b in (pair.split(), pair.split()[::-1])}
#: the order of two arguments changes no result
SYMMETRIC = {"min", "max", "minimum", "maximum", "transpose", "transpose_", "swapaxes", "equal", "allclose", "isclose"}
#: keywords that change nothing on a CPU
GPU_ONLY = {"device", "non_blocking", "pin_memory"}
#: their calls change no result
SILENT = {"log", "logger", "logging", "warnings", "print", "gc"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault: the bytes start:end of a file are replaced by a text."""

    path: str
    line: int
    function: str
    fault: str
    start: int
    end: int
    text: str

    def source(self, original: str) -> str:
        data = original.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def diff(self, original: str) -> str:
        lines = difflib.unified_diff(original.splitlines(), self.source(original).splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def changed(node: ast.AST, **fields: Any) -> str:
    """The source of an expression with other fields, in parentheses."""
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return f"({ast.unparse(node)})" if isinstance(node, ast.expr) else ast.unparse(node)


def expression_faults(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, source) of the faults of an expression."""
    match node:
        case ast.Compare(ops=[op, *rest]):
            for other in COMPARE[type(op)]:
                yield "comparison", changed(node, ops=[other(), *rest])
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield "operator", changed(node, op=OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield "and/or", changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            if not isinstance(operand, ast.Constant):
                yield "sign", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", str(value + 1)
            yield "constant", f"({value - 1})"
        case ast.Constant(value=float(value)):
            yield "constant", str(value + 1.0)
        case ast.IfExp(test=test):
            yield "condition", changed(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Call(args=args, keywords=keywords):
            if len(args) > 1 and not any(isinstance(a, ast.Starred) for a in args):
                if ast.unparse(node.func).rpartition(".")[2] not in SYMMETRIC:
                    yield "argument", changed(node, args=[args[1], args[0], *args[2:]])
                yield "argument", changed(node, args=args[:-1])
            for i, keyword in enumerate(keywords):
                if keyword.arg and keyword.arg not in GPU_ONLY:
                    yield "argument", changed(node, keywords=keywords[:i] + keywords[i + 1 :])
        case ast.Attribute(attr=name) if name in NAMES:
            yield "function", changed(node, attr=NAMES[name])
        case ast.Name(id=name) if name in NAMES and isinstance(node.ctx, ast.Load):
            yield "function", NAMES[name]


def statement_faults(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, source) of the faults of a statement."""
    match node:
        case ast.Return(value=ast.expr() as value):
            if not (isinstance(value, ast.Constant) and value.value is None):
                yield "return", "return None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Continue() | ast.Break():
            yield "statement", "pass"
        case ast.Return():
            yield "statement", "pass"
        case ast.AugAssign(op=op):
            yield "statement", "pass"
            if type(op) in OPERATORS:
                yield "operator", changed(node, op=OPERATORS[type(op)]())
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", "pass"


def spans(lines: list[int], node: ast.AST) -> tuple[int, int]:
    return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset


def silent(node: ast.AST) -> bool:
    """Whether faults in it would change no result: docstrings, messages, log lines, type checks."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        while isinstance(function, ast.Attribute):
            function = function.value
        return isinstance(function, ast.Name) and function.id.lstrip("_").lower() in SILENT
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All faults of one file."""
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    mutants = []

    def visit(node: ast.AST, scope: str, function: str) -> None:
        """scope: what the name of a function begins with here. function: the enclosing one, "" if there is none."""
        if silent(node):
            return
        if isinstance(node, ast.ClassDef):
            scope, function = f"{scope}{node.name}.", ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = scope + node.name
            scope = f"{function}.<locals>."
        faults = list(statement_faults(node)) + list(expression_faults(node))
        place = spans(offsets, node) if faults else ()
        if isinstance(node, ast.If | ast.While):
            faults, place = [("condition", f"not ({ast.unparse(node.test)})")], spans(offsets, node.test)
        mutants.extend(Mutant(path, node.lineno, function, fault, *place, text) for fault, text in faults)
        if isinstance(node, ast.Raise):  # the message
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, scope, function)

    visit(ast.parse(source), "", "")
    return mutants
