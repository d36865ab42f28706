"""Numbers with units: splitting, one spelling for a unit, exact conversion."""

import re
import tomllib
from collections import Counter
from fractions import Fraction
from itertools import product
from pathlib import Path

from verl.rewards.rules.answers.constants import parse_constant
from verl.rewards.rules.answers.normalize import UNIT_SPELLINGS

WORD = re.compile(r'"(?!(?:and|or)")([^"]*)"')
_TABLES = tomllib.loads((Path(__file__).parent / "units.toml").read_text(encoding="utf-8"))
Unit = tuple[dict[str, int], Fraction]  # exponents of the dimensions, factor
UNITS: dict[str, Unit] = {}
for _scaled, (_prefix, (_long, _shift)) in product(_TABLES["scaled"], _TABLES["prefixes"].items()):
    _symbol, *_names = _scaled["names"].split()
    _unit = (_scaled["dimensions"], Fraction(10) ** (_scaled["power"] + _shift))
    UNITS |= dict.fromkeys([_prefix + _symbol, *(_long + word for word in _names)], _unit)
UNITS |= {
    name: ({dimension: 1}, Fraction(factor))
    for dimension, spellings in _TABLES["units"].items()
    for names, factor in spellings.items()
    for name in names.split()
}
_FIRST: dict[tuple[frozenset, Fraction], str] = {}  # one spelling of each unit
for _name, (_dimensions, _factor) in UNITS.items():
    _FIRST.setdefault((frozenset(_dimensions.items()), _factor), _name)
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWERS |= {"lakh": 5, "crore": 7, "万": 4, "亿": 8}
_MULTIPLIED = re.compile(rf'([-+]?[\d.,]*\d)\s*"({"|".join(_POWERS)})"(.*)', re.IGNORECASE)
_CURRENCY = re.compile(
    r'([-+]?)\s*((?:"?US"?\s*)?\\?\$|£|€|¥|₹|"?(?:USD|EUR|GBP|INR|CNY|Rs)"?\.?)\s*([-+]?)(?=[\d.])', re.IGNORECASE
)
_QUANTITY = re.compile(r'(?P<number>[^"]*?(?:[\d}!)]|\\pi|\\infty))\s*(?P<unit>\\?%|(?:\\degree|["A-Za-z¢°£€¥₹Ω]).*)')


def split_unit(text: str) -> tuple[str, str]:
    """Return the number of a quantity, and its unit as words ("" without one)."""
    unit = ""
    if match := _CURRENCY.search(text):
        unit = "dollar" if "$" in match[2] else unit_name(match[2])
        text = _CURRENCY.sub(r"\1\3", text, count=1).strip()
    if match := _MULTIPLIED.fullmatch(text):
        text = f"{match[1]}\\times10^{{{_POWERS[match[2].casefold()]}}}{match[3]}"
    match = _QUANTITY.fullmatch(text)
    if match and _is_unit(match["unit"]) and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", match["number"]):
        return match["number"].strip(), unit_name(match["unit"]) or unit
    return text, unit


_UNIT_TEXT = re.compile(r'(?:\\degree|\\cdot|"[^"]*"|[A-Za-z¢£€¥₹Ω]+|/|\^\s*\{?\s*-?\d\s*\}?|[\s.,()]|\\?%)*')
# Words after a number that change its value or deny it.
_NO_UNIT = re.compile(
    r"(?:.*[或多余以至到分半倍不对错点零一二三四五六七八九十百千].*|dozens?|factorial|hal(?:f|ves)|thirds?|quarters?|fifths?|tenths?|hundredths?|is|not|if|when|or|wrong|and|"
    r"incorrect|to|plus|minus|times|one|two|three|four|five|six|seven|eight|nine|ten)"
)


def _is_unit(text: str) -> bool:
    """Whether the text after a number is a unit: %, degrees, words, or a known abbreviation such as cm^2 or m/s."""
    quoted = [word.casefold() for word in WORD.findall(text)]
    if not _UNIT_TEXT.fullmatch(text) or len(quoted) > 5 or quoted[:1] in (["squared"], ["cubed"]):
        return False
    if any(_NO_UNIT.fullmatch(word) and word.removeprefix("平方").removeprefix("立方") not in UNITS for word in quoted):
        return False
    names = re.findall(r"[A-Za-z¢]+", WORD.sub("", re.sub(r"\\(?:degree|cdot)", "", text)))
    if not names:
        return True
    if names[0] in ("F", "C", "K"):
        return "\\degree" in text
    are_units = all(name in UNITS and not _VARIABLES.fullmatch(name) for name in names)
    return are_units and (len(names[0]) > 1 or "/" in text)


_VARIABLES = re.compile("[nuz].|c[^m]|k[sl]|m[^mglins]|[MG][A-Z]")  # rather a product of two variables than a unit


def unit_name(text: str) -> str:
    """One spelling of a unit: `"square centimeters"`, `"cm"^2` and `cm^{2}` become `cm^2`."""
    text = text.replace('"', " ")
    for pattern, replacement in UNIT_SPELLINGS:
        text = pattern.sub(replacement, text)
    names = []
    for word in re.findall(r"[^\s/^]+|[/^]", text):
        lower = word.casefold()  # but N m is no nm, and M no m
        names_of = (word,) if re.fullmatch("[A-Z]|[NMP].", word) else (word, lower, lower.removesuffix("s"))
        single = next((name for name in names_of if name in UNITS), names_of[-1])
        dimensions, factor = UNITS.get(single, ({}, None))
        names.append(_FIRST.get((frozenset(dimensions.items()), factor), single))
    return re.sub(r" ?([/^]) ?", r"\1", " ".join(names))


def read_unit(name: str) -> Unit | None:
    """The dimensions and the factor of a unit such as `kg m/s^2` as `unit_name` spells it; None if it is not known."""
    dimensions, factor, sign = Counter(), Fraction(1), 1
    for token, exponent in re.findall(r"([^\s/^]+|/)(?:\^(-?\d))?", name):
        if token != "/" and token not in UNITS:
            return None
        sign = -1 if token == "/" else sign
        exponents, scale = UNITS.get(token, ({}, Fraction(1)))
        power = sign * int(exponent or 1)
        dimensions.update({dimension: n * power for dimension, n in exponents.items()})
        factor *= scale**power
    return {dimension: n for dimension, n in dimensions.items() if n}, factor


_PART = re.compile(r'([\d.]+(?:\s*\\frac\{\d+\}\{\d+\}|\s+\d+/\d+)?)\s*("?[A-Za-z]+\.?"?)\s*(?:,|"and"|and)?\s*')


def parse_compound(text: str) -> Unit | None:
    """`3 hours 30 minutes` as (dimensions, value); None for anything else."""
    parts = list(_PART.finditer(text))
    if not parts or "".join(p[0] for p in parts) != text:
        return None
    units = [UNITS.get(unit_name(p[2])) for p in parts]
    numbers = [parse_constant(p[1]) for p in parts]
    if None in units or None in numbers or any(unit[0] != units[0][0] for unit in units):
        return None
    return units[0][0], sum(n * unit[1] for n, unit in zip(numbers, units))


_NUMBERS = {word: i for numbers in _TABLES["words"].values() for i, word in enumerate(numbers.split())}


def parse_spelled_number(text: str) -> Fraction | None:
    """The value of a whole number below 100 in words: `twelve`, `forty-two`, `zwölf`, 四十二; None for other texts."""
    value = _NUMBERS.get(re.sub(r"[\s-]+", "-", text.replace('"', "").strip()).casefold())
    return None if value is None else Fraction(value)
