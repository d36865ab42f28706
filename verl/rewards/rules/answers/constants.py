"""Exact values of written numbers."""

import re
from fractions import Fraction

_DECIMAL = re.compile(r"([-+]?)\s*(\d*)(?:\.(\d*))?")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\{(\d+)\}|\\(?:bar|dot)\s*(\d)|\((\d+)\))")
# Sign, whole number (never in a fraction), numerator and denominator in two spellings.
_FRACTION = re.compile(r"([-+]?)()\s*(?:\\frac\{\s*(-?\d+)\s*\}\{\s*(-?\d+)\s*\}|(\d+)\s*/\s*(-?\d+))")
_MIXED = re.compile(
    r"([-+]?)\s*(\d+)(?:\s*|(?<![-+\s]\d)\s*\+\s*|\s+\"?and\"?\s+)(?:\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}|(?<=[\s+])(\d+)/(\d+))"
)
_SCIENTIFIC = re.compile(
    r"(.+?)\s*(?:(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*([-+]?\d{1,3})\s*\}?|[eE]([-+]?\d{1,3}))"
)


def parse_constant(text: str) -> Fraction | None:
    r"""Return the exact value of a written number: 1234, 0.\overline{3}, \frac{3}{4}, 3/4, 1 3/4, 1.5e3; or None."""
    text = text.strip()
    if len(text) > 200 or not any(c.isdigit() for c in text):
        return None
    if match := _DECIMAL.fullmatch(text) or _REPEATING.fullmatch(text):
        sign, whole, decimals, *periods = match.groups(default="")
        shift = 10 ** len(decimals)
        value = int(whole or 0) + Fraction(int(decimals or 0), shift)
        if period := "".join(periods):
            value += Fraction(int(period), (10 ** len(period) - 1) * shift)
        return -value if sign == "-" else value
    if match := _FRACTION.fullmatch(text) or _MIXED.fullmatch(text):
        top, bottom = int(match[3] or match[5]), int(match[4] or match[6])
        return None if bottom == 0 else (int(match[2] or 0) + Fraction(top, bottom)) * (-1 if match[1] == "-" else 1)
    if match := _SCIENTIFIC.fullmatch(text):
        mantissa = parse_constant(match[1])
        return None if mantissa is None else mantissa * Fraction(10) ** int(match[2] or match[3])
    power = re.fullmatch(r"\+?10\s*\^\s*\{?\s*([-+]?\d{1,3})\s*\}?", text)
    return Fraction(10) ** int(power[1]) if power else None
