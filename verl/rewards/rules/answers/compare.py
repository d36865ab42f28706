r"""Comparison of a final answer with the ground truth.

`equal(answer, reference)` goes through `_COMPARISONS` in order. Each comparison reads both texts as one kind of answer
(a choice, a time, a quantity, words, a collection, an expression) and returns whether they are equal, or None if one of
them is not of that kind. The first that returns decides; what no comparison understands is unequal:

- numbers are compared exactly; a decimal is no approximation: 0.33 is not 1/3. A reference that begins with `\approx`
  states its tolerance: half a unit of its last digit
- p% equals p and p/100; a number with a unit equals the number alone; two units must be the same, or convert exactly
- comma lists and sets are unordered; tuples and intervals are ordered and keep their ends
- words are compared as words, without case and punctuation, never as products of letters
- other expressions are compared by `symbolic.equal_expressions`
"""

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import chain, product
from typing import Any

from verl.rewards.rules.answers.constants import parse_constant
from verl.rewards.rules.answers.normalize import PHRASES, join_thousands, normalize, quote_names
from verl.rewards.rules.answers.quantities import WORD, parse_compound, parse_spelled_number, read_unit, split_unit
from verl.rewards.rules.answers.sets import SET_SIGN, to_set
from verl.rewards.rules.answers.structure import parse_collection, parse_rows, split_elements, split_top
from verl.rewards.rules.answers.symbolic import equal_expressions, none_if_unreadable, parse

_LONGEST = 1000  # characters of an answer; a longer one equals nothing


def equal(answer: str, reference: str) -> bool:
    """Whether two written answers are equal (see the module docstring). May take long for hostile expressions."""
    if max(len(answer), len(reference)) > _LONGEST:
        return answer == reference
    answer, reference = normalize(answer), normalize(reference)
    if re.search(r"[+]\s*C$", reference):  # the constant of integration has any name
        answer = re.sub(r"(?<=[+])\s*[ck]$", " C", answer)
    tolerance = re.match(r"(?:\\approx|\\sim|\"?about\"?|\"?approximately\"?)\s*", reference)
    if tolerance:
        return _within_digits(answer, reference[tolerance.end() :])
    answer = re.sub(r"^(?:\\approx|\\sim)\s*", "", answer)
    return any(_equal(a, r) for a, r in product(_readings(answer), _readings(reference)))


_GROUPED_NUMBER = re.compile(r"[-+]?(?:\\?\$\s*)?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,]).*", re.DOTALL)
_POINT = re.compile(r"\(\s*([a-z](?:\s*,\s*[a-z])+)\s*\)\s*=\s*\(([^()]*)\)")
_COORDINATES = re.compile(r"\(\s*([a-z](?:\s*,\s*[a-z])+)\s*\)\s*(?:=|\\in(?![a-z]))")
_UNIT_VECTOR = re.compile(r"\s*([-+]?)\s*((?:(?!\\unit).)*?)\s*\\unit([ijk])")


def _readings(text: str) -> list[str]:
    """A text without a preface; with commas that may group thousands, also the text without them."""
    text = _PREFACE.sub("", quote_names(text)).strip()
    for pattern, replacement in PHRASES:
        text = pattern.sub(replacement, text)
    if point := _POINT.fullmatch(text):  # (x,y) = (1,2)
        text = f"({', '.join(value for _, value in sorted(zip(*map(split_elements, point.groups()))))})"
    else:
        text = _COORDINATES.sub(lambda m: "" if (names := split_elements(m[1])) == sorted(names) else m[0], text)
    if vector := _as_tuple(text):
        return vector
    text = _strip_delimiters(text.replace("\\unit", "").strip())
    joined = join_thousands(text)
    return [joined] if joined == text or _GROUPED_NUMBER.fullmatch(text) else [joined, text]


def _as_tuple(text: str) -> list[str]:
    r"""The tuples that a sum of unit vectors may be: `\mathbf{i}+2\mathbf{j}` is (1, 2) and (1, 2, 0)."""
    terms = _UNIT_VECTOR.findall(text)
    is_sum = any(len(split_top(value, re.compile("[-+]"))) > 1 for _, value, _ in terms)  # 3 + 2i is a number
    if not terms or is_sum or _UNIT_VECTOR.sub("", text).strip():
        return []
    entries = {name: f"{sign}{value or 1}".removeprefix("+") for sign, value, name in terms}
    tuples = [", ".join(entries.get(name, "0") for name in names) for names in ("ij", "ijk")]
    return [f"({text})" for text in tuples["k" in entries :]]


_PREFACE = re.compile(
    r'^\s*(?:"(?:so|thus|hence|therefore|the|final|correct|answer|is|equals|result|value|option|choice|are|approximately|about|exactly)"\s*|'
    r'"?\bis\b"?\s*|[:=]\s*)+(?=.*[\dA-Z\\"])',
    re.IGNORECASE,
)


def _strip_delimiters(text: str) -> str:
    """Remove emphasis, quotes, and brackets around one number: `(5)` is 5, `[34]` is 34."""
    text = text.strip("*_` ")
    single = re.fullmatch(r"\(\s*(.*?)\s*\)|\[\s*(.*?)\s*\]|\{\s*(.*?)\s*\}|\\\{\s*(.*?)\s*\\\}", text)
    inside = single[single.lastindex] if single else ""
    return inside if re.fullmatch(r"-?[\d.]+|\"[^\"]*\"|[A-Z]", inside) else text


def _equal(answer: str, reference: str) -> bool:
    if _squeeze(answer) == _squeeze(reference):
        return bool(answer)
    for comparison in _COMPARISONS:
        result = comparison(answer, reference)
        if result is not None:
            return result
    return False


def _squeeze(text: str) -> str:
    """Remove quotes, and spaces except between letters and digits: `1 2` is not 12."""
    return re.sub(r"(?<![\w.,])\s+|\s+(?!\w)", "", text.replace('"', "")).strip()


# ---- choices --------------------------------------------------------------------------------------------------------

# A letter alone, `(C)`, `C.`, `Option C`; or with the text of the choice: `(C) 8`, `C) Paris`.
_CHOICE = re.compile(
    r'(?:"?(?:[Oo]ption|[Cc]hoice|[Aa]nswer)"?\s*)?(?:\(\s*"?(?P<a>[A-Z])"?\s*\)|"?(?P<b>[A-Z])"?(?:[).:]|\s*$))'
    r'(?P<rest>\s*|\s*[:.]?\s*["\d\\$-].*)'
)
_OTHER_CHOICE = re.compile(r'(?<![A-Za-z\\])"?[A-Z]"?\)|\("?[A-Z]"?\)')


def _as_choice(answer: str, reference: str) -> bool | None:
    """A reference that is a letter, `(C)` or `Option C`, against the letter with which the answer begins."""
    expected = _read_choice(reference)
    if expected is None:
        return None
    first = _read_choice(answer)
    return expected == first if first is not None else (False if WORD.search(answer) else None)


def _read_choice(text: str) -> str | None:
    """The letter with which a text chooses; None if it is no choice, or names another letter, too."""
    match = _CHOICE.fullmatch(text)
    return None if match is None or _OTHER_CHOICE.search(match["rest"]) else match["a"] or match["b"]


def _as_choices(answer: str, reference: str) -> bool | None:
    """Several letters of choices: `ABD` is `A, B, D`, if one of the two is a list."""
    left, right = (re.sub(r'\b(?:and|or)\b|[\s",;.()]+', " ", text).split() for text in (answer, reference))
    letters = ["".join(sorted(parts)) for parts in (left, right)]
    if not all(re.fullmatch("[A-H]{2,8}", text) for text in letters) or {len(left), len(right)} == {1}:
        return None
    is_unsorted = any(len(parts) == 1 and parts != [text] for parts, text in zip((left, right), letters))
    return None if is_unsorted else letters[0] == letters[1] and not re.search(r"\bor\b", answer)


# ---- times ----------------------------------------------------------------------------------------------------------

_TIME = re.compile(r'(\d{1,2})\s*(?::\s*(\d\d)(?::(\d\d))?|(?="?[ap]))\s*(?:"?([ap])\.?\s?m\.?"?\.?)?', re.IGNORECASE)
_RATIO = re.compile(r'(\d+(?:\.\d+)?)\s*(?::|"?\bto\b"?)\s*(\d+(?:\.\d+)?)(?:\s*(?::|"?\bto\b"?)\s*(\d+(?:\.\d+)?))?')


def _as_time(answer: str, reference: str) -> bool | None:
    left, right = _TIME.fullmatch(answer), _TIME.fullmatch(reference)
    if left and right:
        half = {(m[4] or "").lower() for m in (left, right)} - {""}
        numbers = [[int(g or 0) for g in m.groups()[:3]] for m in (left, right)]
        hours = [
            n[0] % 12 + 12 * (half == {"p"}) if half and n[0] <= 12 else n[0] for n in numbers
        ]  # 22:30 is 10:30 p.m.
        return len(half) < 2 and hours[0] == hours[1] and numbers[0][1:] == numbers[1][1:]
    return False if (left and left[4]) or (right and right[4]) else None


def _read_date(text: str) -> list[int] | None:
    """Dates, versions and telephone numbers (2020-06-05, 5/6/2020, 1.2.3) are no calculations: equal by groups."""
    is_date = re.fullmatch(r"\d+(?:([-/.])\d+)(?:\1\d+)+", text)
    return [int(group) for group in re.findall(r"\d+", text)] if is_date else None


def _as_ratio(answer: str, reference: str) -> bool | None:
    left, right = _RATIO.fullmatch(answer), _RATIO.fullmatch(reference)
    if not (left or right):
        return None
    terms = [[Fraction(g) for g in m.groups() if g] for m in (left, right) if m]
    if any(0 in numbers for numbers in terms):
        return False
    if left and right:
        a, b = terms
        return len(a) == len(b) and all(x * b[0] == y * a[0] for x, y in zip(a, b))
    value = parse_constant(reference if left else answer)
    is_time = _TIME.fullmatch(answer if left else reference)
    return value is not None and not is_time and len(terms[0]) == 2 and value == Fraction(*terms[0])


# ---- numbers --------------------------------------------------------------------------------------------------------

_BASED = re.compile(r'((?=[A-F]*[0-9])[0-9A-F]+)\s*_\s*\{?\s*(\d{1,2}|"?[a-z]{3,5}"?)\s*\}?')


def _as_number_in_base(answer: str, reference: str) -> bool | None:
    r"""`1010_2`: the same digits and the same base; digits alone, as ground truths of MATH have them, are equal."""
    answer, reference = answer.replace('"', ""), reference.replace('"', "")
    left, right = _BASED.fullmatch(answer), _BASED.fullmatch(reference)
    if not (left or right):
        return None
    base = {str(parse_spelled_number(m[2]) or m[2]) for m in (left, right) if m}
    digits = [m[1].upper() if m else text.upper() for m, text in ((left, answer), (right, reference))]
    if right is None and base != {"10"}:
        return False  # the reference is a decimal number
    return len(base) == 1 and digits[0] == digits[1]


# ---- quantities -----------------------------------------------------------------------------------------------------


def _as_quantity(answer: str, reference: str) -> bool | None:
    (a, unit_a), (b, unit_b) = split_unit(answer), split_unit(reference)
    if not (unit_a or unit_b):
        return _equal(a, b) if (a, b) != (answer, reference) else None
    x, y = parse_constant(a), parse_constant(b)
    if "%" in (unit_a, unit_b):
        return _equal_percent(a, unit_a, b, unit_b, x, y)
    units = {unit_a, unit_b}
    if units == {"degree", "radian"} or (units == {"degree", ""} and "\\pi" in (b if unit_a == "degree" else a)):
        degrees, radians = (a, b) if unit_a == "degree" else (b, a)
        return equal_expressions(f"\\frac{{({degrees})\\pi}}{{180}}", radians)
    if unit_a and unit_b and unit_a != unit_b:
        known_a, known_b = read_unit(unit_a), read_unit(unit_b)
        if known_a and known_b and known_a[0] == known_b[0]:
            if x is not None and y is not None:
                return x * known_a[1] == y * known_b[1]
            ratio = known_a[1] / known_b[1]
            return equal_expressions(f"\\frac{{{ratio.numerator}}}{{{ratio.denominator}}}({a})", b)
        if known_a or known_b or not _same_noun(unit_a, unit_b):
            return False
    if any('"' in text for text in (a, b)):
        return None
    return _equal(a, b)


def _same_noun(left: str, right: str) -> bool:
    """Whether one unknown unit continues the other: "clip" and "clip in may"."""
    left, right = left.split(), right.split()
    shorter = min(len(left), len(right))
    return left[:shorter] == right[:shorter] or left[-shorter:] == right[-shorter:]


def _equal_percent(a: str, unit_a: str, b: str, unit_b: str, x: Fraction | None, y: Fraction | None) -> bool:
    if {unit_a, unit_b} - {"", "%"}:
        return False
    is_equal = _equal(a, b)
    if is_equal or (unit_a and unit_b):
        return is_equal
    if x is not None and y is not None:
        return x / 100 == y if unit_a else x == y / 100
    hundredth = "\\frac{{{}}}{{100}}"
    return _equal(hundredth.format(a), b) if unit_a else _equal(a, hundredth.format(b))


def _within_digits(answer: str, reference: str) -> bool:
    """Whether an answer rounds to a reference that states an approximation."""
    (a, unit_a), (b, unit_b) = (split_unit(_readings(text)[0]) for text in (answer, reference))
    a = re.sub(r"^\\approx\s*", "", a)
    value = parse_constant(b) if re.fullmatch(r"[-+]?\d*\.?\d+", b) else None
    if value is None or (unit_a and unit_b and unit_a != unit_b):
        return _equal(a, b)
    value_a = parse_constant(a)
    if value_a is None:
        import sympy

        try:
            value_a = Fraction(str(sympy.N(parse(a), 30)))
        except Exception:  # not an expression, or not a real constant
            return False
    digits = len(b.partition(".")[2])
    return abs(value_a - value) <= Fraction(1, 2 * 10**digits)


# ---- texts ----------------------------------------------------------------------------------------------------------

_MONTH = re.compile("january|february|march|april|may|june|july|august|september|october|november|december")
_ORDINAL = re.compile(r"^0*(\d+)(?:st|nd|rd|th)?$")


def _as_text(answer: str, reference: str) -> bool | None:
    """Texts with words: equal word for word. A letter or a word of an answer is never taken for a product."""
    without_words = [text for text in (answer, reference) if not WORD.search(text)]
    are_lists = len(split_elements(answer)) > 1 and len(split_elements(reference)) > 1  # compared by their elements
    if len(without_words) == 2 or are_lists:
        return None
    if without_words and not re.fullmatch(r"[A-Za-z]{1,2}", without_words[0]):
        return False
    left, right = _tokens(answer), _tokens(reference)
    months = [[word for word in tokens if _MONTH.fullmatch(word)] for tokens in (left, right)]
    if len(months[0]) == 1 and months[0] == months[1]:  # a date, in any order: "June 5th" and "5 June"
        left, right = (sorted(_ORDINAL.sub(r"\1", word) for word in tokens) for tokens in (left, right))
    return left == right


_ARTICLE = re.compile(r'"?(?:[Tt]he|[Aa]n|a)\b|"?A"?\s+"?[a-z]')


def _tokens(text: str) -> list[str]:
    original = text
    text = re.sub(r'(?<=\d)\s*"(st|nd|rd|th)"', r"\1", text).replace('"', " ").casefold()
    text = re.sub(r"\\degree|\bof\b", " ", text)
    tokens = re.findall(r"[^\W_]+(?:'[a-z]+)?|[-+<>=/*^]", text)
    return tokens[1:] if len(tokens) > 1 and _ARTICLE.match(original) else tokens


def _as_names(answer: str, reference: str) -> bool | None:
    r"""Angles, triangles and lines (`\angle ABC`) are names of points: equal letter for letter."""
    if "\\angle" in reference or "\\triangle" in reference:
        return re.sub(r"[{}]", "", _squeeze(answer)) == re.sub(r"[{}]", "", _squeeze(reference))
    return None


# ---- collections ----------------------------------------------------------------------------------------------------


def _as_collection(answer: str, reference: str) -> bool | None:
    if SET_SIGN.search(answer) or SET_SIGN.search(reference):
        left, right = (none_if_unreadable(to_set, text) for text in (answer, reference))
        if left is not None and right is not None:
            return left == right
    (kind_a, a), (kind_b, b) = parse_collection(answer), parse_collection(reference)
    if kind_a == kind_b == "single":
        return _equal(a[0], b[0]) if (a[0], b[0]) != (answer, reference) else None
    if kind_a == kind_b == "assignments":
        return _equal_unordered(split_elements(answer), split_elements(reference))
    unordered = {"list", "set", "single", "assignments"}
    if kind_a in unordered and kind_b in unordered:
        return _equal_unordered(a, b)
    if {kind_a, kind_b} <= {"()", "list", "assignments"} or kind_a == kind_b:
        return len(a) == len(b) and all(map(_equal, a, b))
    return False


def _equal_unordered(left: list[str], right: list[str]) -> bool:
    left, right = ({_squeeze(element): element for element in elements} for elements in (left, right))
    if len(left) != len(right):
        return False
    for element in left.values():
        match = next((key for key, other in right.items() if _equal(element, other)), None)
        if match is None:
            return False
        del right[match]
    return True


# ---- expressions ----------------------------------------------------------------------------------------------------

_APPROXIMATION = re.compile(r"\s*\\approx.*$")


def _as_matrix(answer: str, reference: str) -> bool | None:
    """Matrices entry by entry; a column or a row equals the tuple of its entries."""
    left, right = parse_rows(answer), parse_rows(reference)
    if left and right:
        return list(map(len, left)) == list(map(len, right)) and all(map(_equal, chain(*left), chain(*right)))
    rows = left or right
    if rows is None or 1 not in (len(rows), len(rows[0])):
        return None
    kind, other = parse_collection(reference if left else answer)
    entries = list(chain(*rows))
    return len(entries) == len(other) and all(map(_equal, entries, other)) if kind == "()" else None


# The left side of a definition: x, x_1, AB, |AB|, (x,y), f(x), f^{-1}(x), [ABC], \angle A, \text{Area}.
_NAME = re.compile(
    r"(?!.*\\(?:frac|sqrt|binom))[^=<>+*/\d]{1,40}|[A-Za-z]+_\{?\w+\}?|[A-Za-z]\s*\^\s*\{?-1\}?\s*\([^()]*\)"
)


def _as_equation(answer: str, reference: str) -> bool | None:
    """`x = 5` equals `5`, `6/8 = 3/4` equals `3/4`, `1/2 \\approx 0.5` equals `1/2`; two equations are expressions."""
    shortened = [_APPROXIMATION.sub("", text) for text in (answer, reference)]
    if shortened != [answer, reference] and all(shortened):
        return _equal(*shortened)
    sides = [split_top(text, re.compile(r"=|\\in(?![a-z])")) for text in (answer, reference)]
    for side in sides:
        if len(side) == 2 and re.fullmatch("[a-df-hj-zA-Z]", side[1]):  # 3 = x
            side.reverse()
    if len(sides[0]) == len(sides[1]) == 1 or max(len(split_elements(text)) for text in (answer, reference)) > 1:
        return None
    if len(sides[0]) > 1 and len(sides[1]) > 1:
        same_left = _squeeze(sides[0][0]) == _squeeze(sides[1][0]) and _NAME.fullmatch(sides[0][0])
        return _equal(sides[0][-1], sides[1][-1]) if same_left else None
    parts, other = (sides[0], reference) if len(sides[0]) > 1 else (sides[1], answer)
    name = parts[0].replace('"', "").strip()
    is_name = _NAME.fullmatch(name) and not re.search(rf"(?<![A-Za-z\\]){re.escape(name)}(?![A-Za-z])", parts[-1])
    if is_name or all(_equal(part, parts[-1]) for part in parts[:-1]):
        return _equal(parts[-1], other) if len(sides[0]) > 1 else _equal(other, parts[-1])
    return False


def _by_value(read: Callable[[str], Any]) -> Callable[[str, str], bool | None]:
    """The comparison of what `read` returns for both texts."""

    def compare(answer: str, reference: str) -> bool | None:
        left, right = read(answer), read(reference)
        return None if left is None or right is None else left == right

    return compare


_COMPARISONS: list[Callable[[str, str], bool | None]] = [
    _by_value(lambda text: parse_spelled_number(text) if (value := parse_constant(text)) is None else value),
    _as_time,
    _by_value(_read_date),
    _as_ratio,
    _as_number_in_base,
    _as_choices,
    _as_choice,
    _as_matrix,
    _by_value(parse_compound),
    _as_quantity,
    _as_equation,
    _as_names,
    _as_text,
    _as_collection,
    equal_expressions,
]
