r"""Normalization of written answers: one spelling for what LaTeX, Unicode and plain text write in several ways.

    >>> normalize(r"\left( \dfrac12 ,\ 1{,}000 \right)")
    '( \\frac{1}{2} , 1000 )'

Words keep their place but are marked: `\text{cm}` becomes `"cm"`, so that a later step tells them from variables.
"""

import re
import unicodedata

# Applied in this order. Each entry is (pattern, replacement).
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # Delimiters of formulas, emphasis and layout.
        (r"(?<!\\)\\[()\[\]](?![a-z])|\*\*(?!\d|[a-z(\[{])|`", " "),
        (r"\\(?:left|right|big|Big|bigg|Bigg)(?:l|r|m)?(?=[^a-zA-Z]|\\)\.?", ""),
        (r"(?<!\\)\\(?:displaystyle|textstyle|limits|nolimits|,|;|:|>|quad|qquad| |$)|~|(?<!\\)\\\n", " "),
        (r",\\!\s*(?=\d{3})", ""),
        (r"\\!|\\(?:no)?break\b|\\phantom\{[^{}]*\}|\\hspace\{[^{}]*\}", ""),
        (r"\\(?:textcolor|color)\s*\{[^{}]*\}|\\(?:tiny|small|normalsize|large|Large|LARGE|huge)(?![a-z])", ""),
        (r"\\(?:d|t|c)frac", r"\\frac"),
        (r"\\(?:d|t)binom", r"\\binom"),
        (r"\\(?:rm|bf|it|sf|tt|mathrm|mathbf)\s+([A-Za-z]+)", r"\\text{\1}"),
        (r"\\(?:rm|bf|it|sf|tt)(?![a-z])", ""),
        # Operators and symbols with several names.
        (r"\\(?:lt|textless)(?![a-z])", "<"),
        (r"\\(?:gt|textgreater)(?![a-z])", ">"),
        (r"\\leq?(?:slant)?(?![a-zA-Z])|≤|⩽|<=|=<", r"\\le "),
        (r"\\geq?(?:slant)?(?![a-zA-Z])|≥|⩾|>=|=>", r"\\ge "),
        (r"\\neq?(?![a-zA-Z])|\\not\s*=|≠|!=", r"\\ne "),
        (r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])|≈|≃", r"\\approx "),
        (r"×", r"\\times "),
        (r"·|⋅|∙", r"\\cdot "),
        (r"÷", r"\\div "),
        (r"±|\+/-|\+-", r"\\pm "),
        (r'"?\b(?:negative|minus)"?\s+"?infinity\b"?', r"-\\infty "),
        (r'"?(?<![\\A-Za-z])(?:positive"?\s+"?)?infinity\b"?', r"\\infty "),
        (r"∞|\\infin(?![a-z])", r"\\infty "),
        (r"∪", r"\\cup "),
        (r"∩", r"\\cap "),
        (r"∈|\\isin(?![a-z])", r"\\in "),
        (r"∅|\\varnothing|\\emptyset|\\\{\s*\\\}", r"\\emptyset "),
        (r"ℝ|\\(?:mathbb|mathbf|mathcal|Bbb)\s*\{?\s*R\s*\}?|\\reals?(?![a-z])", r"\\R "),
        (r"π", r"\\pi "),
        (r"√\s*\(", r"\\sqrt("),
        (r"√\s*(\d+|[a-z])", r"\\sqrt{\1}"),
        (r"\\degree(?:s)?(?![a-z])|\^\s*\{?\s*\\circ\s*\}?|°", r"\\degree "),
        (r"\\(?:var)?epsilon", r"\\epsilon"),
        (r"\\(?:l|r)vert(?![a-z])|\\mid(?![a-z])|\\vert(?![a-z])", "|"),
        (r"\\langle|⟨", r"("),
        (r"\\rangle|⟩", r")"),
        (r"\\lbrace", r"\\{"),
        (r"\\rbrace", r"\\}"),
        (r"\\lbrack", "["),
        (r"\\rbrack", "]"),
        # Open intervals as ]0,1[, and half-open ones.
        (r"\]([^\]\[(){},;]+[,;][^\]\[(){},;]+)(?=[\]\[])", r"(\1"),
        (r"(?<=[(\[])([^\]\[(){},;]+[,;][^\]\[(){},;]+)\[", r"\1)"),
        (r"\\[lcd]dots|\\dots|\.{3,}|…", r" \\dots "),
        (r"\^\s*\{?\s*\"?(st|nd|rd|th)\"?\s*\}?", r'"\1"'),
        (r"\{\s*:\s*\}", ":"),
        (r"\\colon", ":"),
        (r"\*\*", "^"),
        # Arguments without braces.
        (r"\\frac\s*(\d|[a-zA-Z]|\\pi)\s*(\d|[a-zA-Z]|\\pi)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d|[a-zA-Z]|\\pi)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d|[a-zA-Z]|\\pi)", r"\\frac\1{\2}"),
        (r"\\frac\s+\{", r"\\frac{"),
        (r"\\sqrt\s*(\d|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"(?<!\\)((?:\\\\)*)\\?\bsqrt\s*\(([^()]*)\)", r"\1\\sqrt{\2}"),  # after \\, a row begins
        (r"\^\s*(-?\d{2,})", r"^{\1}"),
        (r"\{?\s*([\dA-Za-z]+)\s*\\choose\s*([\dA-Za-z]+)\s*\}?", r"\\binom{\1}{\2}"),
        # Thousands grouped by spaces, or by a comma in braces. A plain comma may also separate: see `join_thousands`.
        (r"(?<=\d)\{,\}(?=\d{3})", ""),
        (r"(?<![\d.,}])(?<![\d,] )([1-9]\d{0,2}(?: \d{3})+)(?![\d,]| \d)", lambda match: match[1].replace(" ", "")),
    ]
]
_CJK = str.maketrans("、。", ",.")
_DOLLAR = re.compile(r"(?<!\\)\$")
_SUPERSCRIPT = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)")
_VULGAR = re.compile("([0-9]?)[ ]?([¼-¾⅐-⅞])")
_QUOTED = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|emph|operatorname|hbox|underline|textsc)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_UNIT_LETTERS = "mgshLNJWVAKFCT"
_QUOTABLE = re.compile(r"[A-Za-z][A-Za-z'-]*(?:[.][A-Za-z][.]?)*")
_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc log ln exp lim max min gcd lcm det mod"
_FUNCTION_WORD = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS.split())})(?![A-Za-z])")
_WORD = re.compile(r"(?<![\\A-Za-z\"])(?<!begin\{)(?<!end\{)[A-Za-z]{3,}(?![A-Za-z\"])")


def normalize(text: str) -> str:
    """Return an answer in one spelling (see the module docstring)."""
    text = _VULGAR.sub(_vulgar_fraction, text.replace("º", "°").translate(_CJK))  # NFKC makes a letter o of º
    text = _SUPERSCRIPT.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match[1]) + "}", text)
    text = unicodedata.normalize("NFKC", text).replace("−", "-").replace("–", "-").replace("⁄", "/").replace("’", "'")
    text = text.strip().replace("...", "…")
    if len(_DOLLAR.findall(text)) % 2 == 0:  # delimiters of formulas; an odd number has a currency sign
        text = _DOLLAR.sub(" ", text)
    for pattern, replacement in _REWRITES[:5]:
        text = pattern.sub(replacement, text)
    for _ in range(3):  # \text inside \textbf
        text = _QUOTED.sub(_quote, text)
    for pattern, replacement in _REWRITES[5:]:
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
