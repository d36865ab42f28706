r"""Equality of expressions, with math-verify's LaTeX parser and exact or 50-digit arithmetic of sympy.

Two constants are equal if they agree to 40 digits (rational ones exactly), so neither a tiny nor a huge value is taken
for another. Two expressions in variables are equal if they agree at several points. What does not parse equals nothing.
"""

import random
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from verl.rewards.rules.answers.constants import parse_constant
from verl.rewards.rules.answers.structure import bracket_depths

_DIGITS = 50
_TOLERANCE = 40  # digits that must agree
_DEPTH = 15  # brackets in brackets


def equal_expressions(answer: str, reference: str) -> bool:
    """Whether two normalized LaTeX expressions, relations or matrices are equal. May take long: see `compare.equal`."""
    if not (_is_balanced(answer) and _is_balanced(reference)):
        return False
    return bool(none_if_unreadable(lambda: _equal(parse(answer), parse(reference))))


def none_if_unreadable(read: Callable[..., Any], *texts: str) -> Any:
    """Return read(*texts); None for what the parser or sympy does not understand: they raise all types."""
    try:
        return read(*texts)
    except MemoryError:
        raise
    except Exception:
        return None


def _is_balanced(text: str) -> bool:
    """Whether every bracket closes, and they nest at most `_DEPTH` deep: the time to parse grows fast with it."""
    depths = [0, *bracket_depths(text)]
    return depths[-1] == 0 and min(depths) == 0 and max(depths) <= _DEPTH


@lru_cache(maxsize=4096)
def parse(text: str) -> Any:
    """Return the sympy object of a normalized LaTeX expression, with exact decimals and `i` as the imaginary unit."""
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig

    parsed = latex2sympy(
        _to_expression(text),
        normalization_config=NormalizationConfig(boxed="none"),
        conversion_config=ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False),
    )
    if not isinstance(parsed, (sympy.Basic, sympy.MatrixBase)):
        raise ValueError(f"not an expression: {text!r}")
    replacements = {number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float)}
    replacements |= {s: sympy.I for s in parsed.free_symbols if s.name == "i"}
    parsed = parsed.xreplace(replacements) if replacements else parsed
    if parsed.has(sympy.Sum, sympy.Integral, sympy.Product, sympy.Limit, sympy.Derivative, sympy.MatMul, sympy.MatAdd):
        parsed = parsed.doit()
    if isinstance(parsed, sympy.MatrixExpr):
        parsed = sympy.Matrix(parsed.doit().as_explicit())
    return parsed


def _equal(left: Any, right: Any) -> bool:
    import sympy
    from sympy.core.relational import Relational

    are_matrices = [isinstance(value, sympy.MatrixBase) for value in (left, right)]
    if any(are_matrices):
        return all(are_matrices) and left.shape == right.shape and all(map(_equal, left, right))
    infinite = (sympy.oo, sympy.zoo, sympy.nan)
    if left.has(*infinite) or right.has(*infinite):
        return left.doit() == right.doit() and not left.has(sympy.nan)
    if isinstance(left, Relational) or isinstance(right, Relational):
        return isinstance(left, Relational) and isinstance(right, Relational) and _equal_relations(left, right)
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return left == right
    pairs = _at_points(left, right)
    if len(pairs) > 1 and not (left.has(sympy.I) or right.has(sympy.I)):  # where both are real, if they are somewhere
        pairs = [pair for pair in pairs if not all(side.is_real is False for side in pair)] or pairs
    values = [_same_value(a, b) for a, b in pairs]
    compared = [value for value in values if value is not None]
    return (bool(compared) and all(compared)) or (not compared and sympy.expand(left - right) == 0)


def _equal_relations(left: Any, right: Any) -> bool:
    """Whether one relation is a multiple of the other: `y = 2x + 1` and `4x - 2y + 2 = 0`; `x > 1` and `1 < x`."""
    import sympy

    left, right = (r.reversed if isinstance(r, (sympy.StrictLessThan, sympy.LessThan)) else r for r in (left, right))
    if type(left) is not type(right):
        return False
    pairs = _at_points(left.lhs - left.rhs, right.lhs - right.rhs)
    ratios = [a / b for a, b in pairs if a.is_number and b.is_number and a != 0 and b != 0]
    if not ratios or not all(_same_value(ratio, ratios[0]) for ratio in ratios):
        return False
    has_direction = isinstance(left, (sympy.StrictGreaterThan, sympy.GreaterThan))
    return not has_direction or bool(sympy.N(ratios[0]) > 0)


def _at_points(left: Any, right: Any) -> list[tuple[Any, Any]]:
    """The values of two expressions at several points; the expressions alone if they have no variables."""
    import sympy

    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if not symbols:
        return [(left, right)]
    draw = random.Random(0)
    points = [
        {s: sympy.Rational(sign * draw.randint(100, 999), draw.randint(101, 331)) for s in symbols}
        for sign in (1, 1, -1, 1)
    ]
    points.append({s: sympy.Integer(draw.randint(2, 99)) for s in symbols})  # where floor(x) + 1 is not ceil(x)
    return [(left.xreplace(point), right.xreplace(point)) for point in points]


def _same_value(left: Any, right: Any) -> bool | None:
    """Whether two constants agree to 40 digits; None if one of them has no value."""
    import sympy

    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    a, b = sympy.N(left, _DIGITS), sympy.N(right, _DIGITS)
    if not all(part.is_Float or part.is_Rational for value in (a, b) for part in value.as_real_imag()):
        return None
    if a == 0 or b == 0:
        return (a == 0 and b == 0) or bool((left - right).equals(0))
    if abs(a - b) > abs(a) * sympy.Float(10, _DIGITS) ** -_TOLERANCE:
        return False
    left, right = left.doit(), right.doit()
    return not (left.is_Rational and right.is_Rational) or left == right


_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\\degree")


def _to_expression(text: str) -> str:
    """Write what the parser reads otherwise: mixed numbers, products of brackets, repeating decimals, degrees, primes.

    Raises:
        ValueError: If two numbers stand beside each other, which the parser multiplies, or a number has a prime.
    """
    text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
    text = re.sub(r"\d*\.\d*(?:\\(?:overline|bar|dot)\{\d+\})", _fraction, text)
    text = re.sub(r"(?<![\d.}_^])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"([A-Za-z])('+)", lambda m: f"{m[1]}_{{{'p' * len(m[2])}}}", text)
    if re.search(r"(?<![_\d.])[\d.]+\s+[\d.]|\\dots|\d'", text):
        raise ValueError(f"not an expression: {text!r}")
    return re.sub(r"\)\s*(?=\()", r")\\cdot ", text).replace("\\R", "\\mathbb{R}")


def _fraction(match: re.Match) -> str:
    value = parse_constant(match[0])
    return f"(\\frac{{{value.numerator}}}{{{value.denominator}}})"
