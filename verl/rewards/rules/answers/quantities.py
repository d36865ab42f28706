"""Numbers with units: splitting, one spelling for a unit, exact conversion."""

import re
from fractions import Fraction

from verl.rewards.rules.answers.constants import parse_constant

WORD = re.compile(r'"(?!(?:and|or)")([^"]*)"')
#: unit -> (dimension, factor). Two units of one dimension convert exactly.
UNITS: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(factor))
    for dimension, names in {
        "money": {"dollar usd buck": "1", "cent ¢ penny pennies": "0.01"},
        "pounds sterling": {"£ gbp": "1"},
        "euro": {"€ euro eur": "1"},
        "yen": {"¥ yen yuan": "1"},
        "rupee": {"₹ rupee rs": "1"},
        "length": {
            "m meter metre": "1",
            "cm centimeter centimetre": "0.01",
            "mm millimeter millimetre": "0.001",
            "km kilometer kilometre": "1000",
            "in inch inche": "0.0254",
            "ft foot feet": "0.3048",
            "yd yard": "0.9144",
            "mi mile": "1609.344",
        },
        "time": {
            "s sec second": "1",
            "min minute": "60",
            "h hr hour": "3600",
            "day d": "86400",
            "week wk": "604800",
        },
        "years": {"year yr": "12", "month mo": "1"},
        "mass": {"g gram": "1", "kg kilogram": "1000", "mg milligram": "0.001"},
        "weight": {"lb pound": "16", "oz ounce": "1"},
        "volume": {"l liter litre": "1", "ml milliliter millilitre": "0.001"},
        "angle": {"degree deg °": "1"},
        "plane angle": {"radian rad": "1"},
    }.items()
    for spellings, factor in names.items()
    for name in spellings.split()
}
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLIED = re.compile(rf'([-+]?[\d.,]*\d)\s*"({"|".join(_POWERS)})"(.*)', re.IGNORECASE)
_CURRENCY = re.compile(r"([-+]?)\s*(\\?\$|£|€|¥|₹)\s*([-+]?)(?=[\d.])")
_QUANTITY = re.compile(r'(?P<number>[^"]*?(?:[\d}!)]|\\pi|\\infty))\s*(?P<unit>\\?%|(?:\\degree|["A-Za-z¢°£€¥₹]).*)')


def split_unit(text: str) -> tuple[str, str]:
    """Return the number of a quantity, and its unit as words ("" without one)."""
    unit = ""
    if match := _CURRENCY.search(text):
        unit = {"\\$": "dollar", "$": "dollar"}.get(match[2], match[2])
        text = _CURRENCY.sub(r"\1\3", text, count=1).strip()
    if match := _MULTIPLIED.fullmatch(text):
        text = f"{match[1]}\\times10^{{{_POWERS[match[2].casefold()]}}}{match[3]}"
    match = _QUANTITY.fullmatch(text)
    if match and _is_unit(match["unit"]) and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", match["number"]):
        return match["number"].strip(), unit_name(match["unit"]) or unit
    return text, unit


_UNIT_TEXT = re.compile(r'(?:\\degree|"[^"]*"|[A-Za-z¢]+|/|\^\s*\{?\s*-?\d\s*\}?|[\s.,()]|\\?%)*')
# Words after a number that change its value or deny it.
_NO_UNIT = re.compile(
    r"(?:dozens?|squared|cubed|factorial|hal(?:f|ves)|thirds?|quarters?|fifths?|tenths?|hundredths?|is|not|if|when|or|wrong|and|"
    r"incorrect|to|plus|minus|times|one|two|three|four|five|six|seven|eight|nine|ten)"
)


def _is_unit(text: str) -> bool:
    """Whether the text after a number is a unit: %, degrees, words, or a known abbreviation such as cm^2 or m/s."""
    quoted = [word.casefold() for word in WORD.findall(text)]
    if not _UNIT_TEXT.fullmatch(text) or len(quoted) > 5 or any(map(_NO_UNIT.fullmatch, quoted)):
        return False
    names = re.findall(r"[A-Za-z¢]+", WORD.sub("", text).replace("\\degree", ""))
    if not names:
        return True
    if names[0] in ("F", "C", "K"):
        return "\\degree" in text
    return all(name in UNITS for name in names) and (len(names[0]) > 1 or "/" in text)


def unit_name(text: str) -> str:
    """One spelling of a unit: `"square centimeters"`, `"cm"^2` and `cm^{2}` become `cm^2`."""
    text = text.replace('"', " ").replace("\\degree", " degree ").replace("\\%", "%").replace("\\", "").casefold()
    text = re.sub(r"[{}.,]", "", text)
    text = re.sub(r"\bper\b", "/", text).replace("mph", "mi/h").replace("kph", "km/h").replace("kmh", "km/h")
    text = re.sub(r"\bpercent\b", "%", text)
    if " " in text.strip():
        text = re.sub(r"\b(?:of|the|a|an|in total|total|each|old|exactly|long|away)\b", " ", text)
    text = re.sub(r"\b(square|sq|cubic|cu)\s+(\S+)", lambda m: f"{m[2]}^{2 if m[1][0] == 's' else 3}", text)
    names = []
    for word in re.findall(r"[^\s/^]+|[/^]", text):
        single = word if word in UNITS else word.removesuffix("s")
        names.append(next((n for n in UNITS if UNITS[n] == UNITS[single]), single) if single in UNITS else single)
    return re.sub(r" ?([/^]) ?", r"\1", " ".join(names))


_PART = re.compile(r'([\d.]+(?:\s*\\frac\{\d+\}\{\d+\}|\s+\d+/\d+)?)\s*("?[A-Za-z]+\.?"?)\s*(?:,|"and"|and)?\s*')


def parse_compound(text: str) -> tuple[str, Fraction] | None:
    """`3 hours 30 minutes` as (dimension, value); None for anything else."""
    parts = list(_PART.finditer(text))
    if not parts or "".join(p[0] for p in parts) != text:
        return None
    units = [UNITS.get(unit_name(p[2])) for p in parts]
    numbers = [parse_constant(p[1]) for p in parts]
    if None in units or None in numbers or len({unit[0] for unit in units}) != 1:
        return None
    return units[0][0], sum(n * unit[1] for n, unit in zip(numbers, units))
