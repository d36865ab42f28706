r"""Normalization of written answers: one spelling for what LaTeX, Unicode and plain text write in several ways.

    >>> normalize(r"\left( \dfrac12 ,\ 1{,}000 \right)")
    '( \\frac{1}{2} , 1000 )'

Words keep their place but are marked: `\text{cm}` becomes `"cm"`, so that a later step tells them from variables.
"""

import re
import tomllib
import unicodedata
from pathlib import Path

_REPLACEMENTS = {
    "join digits": lambda match: re.sub("[., ]", "", match[0]),
    "join decimal": lambda match: re.sub("[. ]", "", match[1]) + "." + match[2],
}
_REWRITES = {
    name: [(re.compile(pattern), _REPLACEMENTS.get(replacement, replacement)) for pattern, replacement in rows]
    for name, rows in tomllib.loads((Path(__file__).parent / "spellings.toml").read_text(encoding="utf-8")).items()
}
PHRASES, UNIT_SPELLINGS = _REWRITES["phrases"], _REWRITES["units"]
_CJK = str.maketrans("、。∶", ",.:", "\u200b\u200c\u200d\u2060\ufeff")
_DOLLAR = re.compile(r"(?<!\\)\$")
_SUPERSCRIPT = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)")
_VULGAR = re.compile("([0-9]?)[ ]?([¼-¾⅐-⅞])")
_QUOTED = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|emph|operatorname|hbox|underline|textsc)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_UNIT_LETTERS = "mgshLNJWVAKFCT"
_QUOTABLE = re.compile(r"(?<![\\A-Za-z])[^\W\d_][^\W\d_'-]*(?:[.][A-Za-z][.]?)*")
_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc log ln exp lim max min gcd lcm det mod"
_FUNCTION_WORD = re.compile(rf"(?<![\\A-Za-z\"])({'|'.join(_FUNCTIONS.split())})(?![A-Za-z])")
_WORD = re.compile(r"(?<![\\A-Za-z\"])(?<!begin\{)(?<!end\{)[A-Za-z]{3,}(?![A-Za-z\"])")


def normalize(text: str) -> str:
    """Return an answer in one spelling (see the module docstring)."""
    text = _VULGAR.sub(_vulgar_fraction, text.replace("º", "°").translate(_CJK))  # NFKC makes a letter o of º
    text = _SUPERSCRIPT.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match[1]) + "}", text)
    text = unicodedata.normalize("NFKC", text).replace("−", "-").replace("–", "-").replace("⁄", "/").replace("’", "'")
    text = text.strip().replace("...", "…")
    if len(_DOLLAR.findall(text)) % 2 == 0:  # delimiters of formulas; an odd number has a currency sign
        text = _DOLLAR.sub(" ", text)
    for pattern, replacement in _REWRITES["before"]:
        text = pattern.sub(replacement, text)
    for _ in range(3):  # \text inside \textbf
        text = _QUOTED.sub(_quote, text)
    for pattern, replacement in _REWRITES["after"]:
        text = pattern.sub(replacement, text)
    return " ".join(text.split()).rstrip(" .,;:").strip()


def _vulgar_fraction(match: re.Match) -> str:
    fraction = unicodedata.normalize("NFKC", match[2]).replace("⁄", "/")
    return f"{match[1]} {fraction}" if match[1] else fraction


def _quote(match: re.Match) -> str:
    r"""Mark the words of `\text{...}`; numbers, variables and formulas in it stay."""
    content = match[1].replace('"', "")
    if len(content.strip()) <= 1 and not (content.strip().isupper() and match[0].startswith("\\text")):
        is_unit = content.strip() in _UNIT_LETTERS and re.search(r"[\d}]\s*$", match.string[: match.start()])
        return f' "{content.strip()}" ' if is_unit else content
    return " " + _QUOTABLE.sub(r'"\g<0>"', content) + " "


def quote_names(text: str) -> str:
    """Quote the words of three or more letters that stand outside of `\\text`: `12 inches` becomes `12 "inches"`."""
    text = _FUNCTION_WORD.sub(r"\\\1 ", text)
    return _WORD.sub(r'"\g<0>"', text)


_GROUPED = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?![\d,])")


def join_thousands(text: str) -> str:
    """Join thousands grouped by commas (1,234), except in brackets, where a comma separates: (1,234)."""

    def join(match: re.Match) -> str:
        before = text[: match.start()]
        inside = any(before.count(opening) > before.count(closing) for opening, closing in ("()", "[]", ("\\{", "\\}")))
        return match[1] if inside else match[1].replace(",", "")

    return _GROUPED.sub(join, text)
