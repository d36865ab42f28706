"""Sets of real numbers: unions of intervals, inequalities, complements."""

import re
from typing import Any

from verl.rewards.rules.answers.structure import BRACKETED, split_elements, split_top
from verl.rewards.rules.answers.symbolic import parse

SET_SIGN = re.compile(r"\\(?:cup|cap|setminus|backslash|le|ge|ne|R|emptyset|infty)(?![a-z])|[<>]")
_BOUND = r"((?:(?!\\le|\\ge|<|>|=|\\ne).)+?)"
_SIGN = r"(<|>|\\le|\\ge)"
_CHAIN = re.compile(rf"{_BOUND}\s*{_SIGN}\s*([A-Za-z])\s*{_SIGN}\s*{_BOUND}")
_HALF = re.compile(rf"([A-Za-z])\s*(<|>|\\le|\\ge|\\ne)\s*{_BOUND}|{_BOUND}\s*(<|>|\\le|\\ge|\\ne)\s*([A-Za-z])")
_MIRROR = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}


def to_set(text: str) -> Any | None:
    r"""Return the set of numbers that a text describes: `[1,2) \cup (3,\infty)`, `x \ne 3`, `1 < x \le 2`, `\R`.

    None if it describes none. Raises exceptions of all types: see `none_if_unreadable`.
    """
    import sympy

    text = re.sub(r"^[A-Za-z]\s*\\in\s*", "", text.strip())
    for operator, combine in _SET_OPERATORS:
        operands = split_top(text, operator)
        if len(operands) > 1:
            sets = [to_set(operand) for operand in operands]
            return None if None in sets else getattr(sympy, combine)(*sets)
    if text in ("\\R", "\\emptyset"):
        return sympy.S.Reals if text == "\\R" else sympy.S.EmptySet
    if match := re.fullmatch(r"\\\{\s*[A-Za-z](?:\s*\\in\s*\\R)?\s*[|:](.*)\\\}", text):
        return to_set(match[1])
    if match := BRACKETED.fullmatch(text):
        elements = [_constant(element) for element in split_elements(match[2])]
        if match[1] == "\\{":
            return sympy.FiniteSet(*elements)
        return sympy.Interval(*elements, match[1] == "(", match[3] == ")") if len(elements) == 2 else None
    if match := _CHAIN.fullmatch(text):
        low, sign_low, _, sign_high, high = match.groups()
        return _half_line(_MIRROR[sign_low], low) & _half_line(sign_high, high)
    if match := _HALF.fullmatch(text):
        return _half_line(match[2], match[3]) if match[1] else _half_line(_MIRROR[match[5]], match[4])
    relation = parse(text)
    if relation.is_Relational and len(relation.free_symbols) == 1 and not relation.is_Equality:
        return relation.subs(relation.free_symbols.pop(), sympy.Symbol("x", real=True)).as_set()
    return None


_SET_OPERATORS = [
    (re.compile(r'\\cup(?![a-z])|"or"|\bor\b'), "Union"),
    (re.compile(r'\\cap(?![a-z])|"and"|\band\b|,(?=\s*[A-Za-z]\s*(?:<|>|\\(?:le|ge|ne)(?![a-z])))'), "Intersection"),
    (re.compile(r"\\setminus|\\backslash"), "Complement"),
]


def _constant(text: str) -> Any:
    value = parse(text)
    if value.free_symbols:
        raise ValueError(f"not a constant: {text!r}")
    return value


def _half_line(sign: str, bound: str) -> Any:
    """The real numbers x with `x sign bound`."""
    import sympy

    value = _constant(bound)
    if sign == "\\ne":
        return sympy.S.Reals - sympy.FiniteSet(value)
    if sign in ("<", "\\le"):
        return sympy.Interval(-sympy.oo, value, True, sign == "<")
    return sympy.Interval(value, sympy.oo, sign == ">", True)
