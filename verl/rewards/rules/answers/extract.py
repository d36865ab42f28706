r"""Extraction of the final answer of a response: which span of the text is the answer, and why.

Each extractor takes the text that a reader sees (thoughts removed, see `visible_text`) and returns an `Answer`, or None
if the text has no answer of its form. An `Answer` whose text is None says that there is no final answer: an open box,
for example, ends the search.

- `box`: the last `\boxed{...}`; several boxes that are listed together are one answer: `\boxed{1} and \boxed{2}`
- `answer_line`: what follows the last "Answer:" on its line
- `tag`: the content of the last `<answer>...</answer>`
- `statement`: what follows the last "answer is", "answer:" or "####", or a box after that
- `alone`: a response that is nothing but the answer
- `conclusion`: a last sentence that ends in a value: `Therefore x = 5.`
"""

import re
from dataclasses import dataclass

from verl.utils.boxed import find_boxes

_TAIL = 10_000  # characters at the end of a response that are searched


@dataclass(frozen=True)
class Answer:
    """The final answer of a response."""

    text: str | None  # the answer as written; None if the response has none
    source: str  # where it stands ("box", "answer line", ...), or why there is none


# ---- thoughts -------------------------------------------------------------------------------------------------------

_TAGS = r"(?:think(?:ing)?|thoughts?|reasoning|analysis|scratchpad|seed:think)"
# Begins with a set of characters, which the search finds much faster than alternatives.
_THOUGHT = re.compile(
    rf"[<\[◁](?:(?P<open>(?<=<)\s*{_TAGS}\s*>|(?<=\[)THINK\]|(?<=<)\|(?:begin_of_thought|thinking)\|>|(?<=◁)think▷"
    rf"|(?<=<)\|channel\|>analysis<\|message\|>)"
    rf"|(?P<close>(?<=<)/\s*{_TAGS}\s*>|(?<=\[)/THINK\]|(?<=<)\|(?:end_of_thought|/thinking|end)\|>|(?<=◁)/think▷))",
    re.IGNORECASE,
)


def visible_text(text: str) -> str:
    """Return the text without thoughts. One that the prompt opened ends at its closing tag, an open one at the end."""
    if "<" not in text and "[" not in text and "◁" not in text:
        return text
    kept, begin, depth = [], 0, 0
    for mark in _THOUGHT.finditer(text):
        if mark["open"]:
            if depth == 0:
                kept.append(text[begin : mark.start()])
            depth += 1
        else:
            if depth == 0:
                kept = []
            depth, begin = max(0, depth - 1), mark.end()
    if depth == 0:
        kept.append(text[begin:])
    return "".join(kept)


# ---- boxes ----------------------------------------------------------------------------------------------------------

# Between boxes of one answer: "\boxed{1} and $x = \boxed{2}$".
_LISTED = re.compile(
    r"(?:[\s$,;&]|\\[(),;\[\] ]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|and|or|else|even|either|maybe|possibly|perhaps"
    r"|if [^.,\n]{1,40},|\(?[a-z\d]\)|(?<=\n)\d\.|(?:option|case|part|answer)\s*\w?\s*:|[A-Za-z](?:_\w)?\s*=)*",
    re.IGNORECASE,
)
# Directly before a box: its sentence denies or supposes it; directly after: it asks.
_DENIED_BOX = re.compile(
    r"(?:not|\bnever|n't)(?:\s+(?:be|equal|the|to))*[\s$*(\\\[]*$"
    r"|^\s*(?:let us |we )?(?:suppose|assume|assuming|is it)\b[^,]*$",
    re.IGNORECASE,
)
# After an answer: it is taken back.
_RETRACTED = re.compile(
    r"(?:^|[.!?\n,]\s*)(?:wait|no|but|actually|however|hmm|sorry|correction)\b[^.?!\n]{0,80}?"
    r"(?:\b(?:wrong|incorrect|mistaken?|should be|answer is|disagree|instead)\b|\bit'?s (?!right|correct|ok)[^ ]+$)",
    re.IGNORECASE,
)


def box(text: str) -> Answer | None:
    r"""The last box. Without a closing brace: no answer."""
    boxes = find_boxes(text[-_TAIL:])
    if not boxes:
        return None
    if boxes[-1][0] is None:
        return Answer(None, "the last box does not close")
    contents, begin = [boxes[-1][0]], boxes[-1][1]
    before, after = last_sentence(text[-_TAIL:][:begin], ""), text[-_TAIL:][boxes[-1][2] :]
    if _DENIED_BOX.search(before) or re.match(r"[$\\)\]\s]{0,4}\?", after) or _RETRACTED.search(after):
        return Answer(None, "the last box is denied, supposed, asked for or taken back")
    for content, start, end in boxes[-2::-1]:
        if content is None or not _LISTED.fullmatch(text[-_TAIL:], end, begin):
            break
        contents.append(content)
        begin = start
    return Answer(", ".join(dict.fromkeys(reversed(contents))), "box" if len(contents) == 1 else "boxes")


# ---- statements -----------------------------------------------------------------------------------------------------

_MARKS = r"[*_`\s]{0,6}"
_FOREIGN = r"(?:antwort|réponse|respuesta|risposta|resposta)(?:\s+(?:correct[ae]|corretta|finale?))?"
_HEADING = rf"答案{_MARKS}(?:是|为)?{_MARKS}[:：]?|^[ \t]*#{{1,6}}\s*(?:final\s+)?answer\s*$"
_ANSWER_LINE = re.compile(
    rf"(?:\b(?:answer|{_FOREIGN}){_MARKS}[:：]|{_HEADING}){_MARKS}",
    re.IGNORECASE | re.MULTILINE,
)
_STATED = re.compile(
    rf"(?:\banswer{_MARKS}(?:(?:is|isn't|can(?:not|'t) be|was|(?:would|should|must|will) be|comes to|equals)\b|[:：=])"
    rf"|####|\b{_FOREIGN}{_MARKS}(?:(?:ist|est|n'est|no\s+es|es|non\s+è|è|não\s+é|é)\b|[:：])|{_HEADING}){_MARKS}:?",
    re.IGNORECASE | re.MULTILINE,
)
# Every match of the two has one of these in it. Begins with a few characters, as `_THOUGHT` does.
_MENTION = re.compile(
    r"[AaRr](?i:n(?:swer|twort)|éponse|[ei]sp[ou]\w)|答案|##{0,5}\s*(?:(?i:final)\s+)?(?i:answer)|####"
)
_SENTENCES = re.compile(r".*[.!?;\n]\s", re.DOTALL)
# Before a statement: it says what the answer is not, or supposes one.
_DENIED = re.compile(
    r"\b(?:not|cannot|incorrect|wrong|false|doubt|if|suppose|assum(?:e|ing)|unlikely|my first|is the)\b|n't\b"
    r"|\b(?:n'est|no\s+es|non\s+è|não\s+é)\b",
    re.IGNORECASE,
)
_TAG = re.compile(r"<(?i:answer)>((?:(?!</?(?i:answer)>).)*)</(?i:answer)>", re.DOTALL)
_CLAUSE = re.compile(
    r"[.!?](?=\s|$|\*|\")|\n|[,\s]\s*(?:because|since|so that|which|where|given|not|but|rather than|"
    r"instead of|as (?=[a-z])|so(?=\s+\w))\b|,?\s+(?:hence|therefore|thus)\b|\s+—|\s-\s(?=[a-z])",
    re.IGNORECASE,
)
_AFTER_NUMBER = re.compile(
    r"(?<=[\d%}$])(?:\s+[A-Za-z/%]+){0,3}?,?\s+(?:for|out of|of the|at|in(?! base)|on|with|after|from|each)\s.*"
)
_NEGATED = re.compile(
    r"not\s+.+?[,\s]+but\s+(?:rather\s+)?(?P<right>.+)|(?:not|n't|nicht|pas)\b.*|i don'?t know.*|unknown.*", re.I
)
_ENDING = re.compile(
    r"(?:\b(?:is|are|equals)|(?<![<>!:])=|[→⇒]|\\(?:Right|right)arrow)\s*(?P<value>[^=:→⇒]+?)\s*[.!]?\s*$"
)
_VALUE = re.compile(r"[-+$\\(\[{|]*(?:\d|\\|[a-zA-Z](?![a-zA-Z]))(?:(?![A-Za-z]{3,}\s+[A-Za-z]{2,}).)*")


def last_match(pattern: re.Pattern, text: str, *begin_and_end: int) -> re.Match | None:
    matches = list(pattern.finditer(text, *begin_and_end))
    return matches[-1] if matches else None


def _last_mention(pattern: re.Pattern, text: str) -> re.Match | None:
    """The last match of `_ANSWER_LINE` or `_STATED`."""
    mention = _MENTION.search(text)
    # only blanks before a heading belong to a match, too
    return last_match(pattern, text, len(text[: mention.start()].rstrip(" \t"))) if mention else None


def tag(text: str) -> Answer | None:
    """The content of the last `<answer>...</answer>`."""
    match = last_match(_TAG, text[-_TAIL:])
    if match is None:
        return None
    inside = match[1].strip()
    return box(inside) or statement(inside) or Answer(inside, "<answer>")


def answer_line(text: str) -> Answer | None:
    """What follows the last "Answer:" (答案：, or a heading "Answer") on its line, or on the next line with text."""
    mark = _last_mention(_ANSWER_LINE, text)
    if mark is None:
        return None
    line, _, rest = text[mark.end() : mark.end() + _TAIL].strip().partition("\n")
    if _RETRACTED.search(rest):
        return Answer(None, "the answer line is taken back")
    return box(line) or Answer(stated_value(line), "answer line")


def statement(text: str, ends_sentence: bool = False) -> Answer | None:
    r"""The last of: a box, what follows "answer is" or "answer:", what follows "####".

    Args:
        ends_sentence: Whether only an answer that ends its sentence counts: "The answer is 12.", not "The answer is 12
            so we check it".
    """
    text = text[-_TAIL:]
    mark = _last_mention(_STATED, text)
    rest = text[mark.end() :] if mark else text
    boxed = box(rest)
    if boxed is not None or mark is None:
        return boxed
    sentences = _SENTENCES.match(text, 0, mark.start())
    before = text[sentences.end() if sentences else 0 : mark.end()]
    if _DENIED.search(before) or re.match(r"[^.!\n]{0,60}\?", rest):
        return Answer(None, "the last statement denies, supposes or asks for an answer")
    value = stated_value(rest.strip().partition("\n")[0])
    if _RETRACTED.search(rest.strip().partition("\n")[2]):
        return Answer(None, "the last statement is taken back")
    if value and re.match(_FOREIGN, mark[0], re.IGNORECASE):  # a decimal comma
        value = re.sub(r"(?<=\d),(?=\d)", ".", value)
    if mark[0].startswith("####"):
        return Answer(value, "####")
    if ends_sentence and value is not None:
        sentence = re.split(r"[.!?](?=\s|$)|\n", rest.strip(), maxsplit=1)[0].strip().strip("*_`\"'").strip()
        if value != sentence:
            return Answer(None, "the sentence with the answer goes on after it")
    return Answer(value, "statement")


def whole_statement(text: str) -> Answer | None:
    return statement(text, ends_sentence=True)


def last_sentence(text: str, strip: str | None = None) -> str:
    sentences = [part for part in re.split(r"(?<=[.!?])\s+|\n", text.strip(strip)) if part.strip()]
    return sentences[-1] if sentences else ""


def conclusion(text: str) -> Answer | None:
    """The value at the end of the last sentence: `Therefore x = 5.`; nothing else may follow it."""
    sentence = last_sentence(text.strip()[-500:])
    ending = _ENDING.search(sentence)
    if ending is None or not _VALUE.fullmatch(ending["value"]) or is_hedged(sentence) or _CONDITIONAL.search(sentence):
        return None
    return Answer(ending["value"], "conclusion")


def alone(text: str) -> Answer | None:
    """A response that is nothing but the answer: one word, a formula, or a number with its unit."""
    text = text.strip()
    short = re.fullmatch(r"\S{1,60}|\$[^$\n]{1,60}\$|[-+]?[\d.,/]+ \S{1,15}", text)
    return Answer(text, "the whole response") if short and not is_hedged(text) else None


_HEDGE = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|might|could be|either|not|unsure|guess|suppose|let|assume|doubt)\b"
    r"|\b(?:oder|ou|nicht|pas)\b|n't\b|[≠≤≥?]|\\(?:neq?|leq?|geq?)(?![a-z])|[<>!]=",
    re.IGNORECASE,
)
_CONDITIONAL = re.compile(r"\b(?:if|where|need)\b", re.IGNORECASE)


def is_hedged(sentence: str) -> bool:
    """Whether a sentence leaves open what the answer is, or denies one."""
    return _HEDGE.search(sentence) is not None


# What follows a value and takes it back: "12? No, 13", "12. No wait", "12, therefore 13".
_REVOKED = re.compile(
    r"[.,\s]*(?:(?:no|wait|actually|hmm|sorry|or)\b|(?:hence|therefore|thus|so)\b.*\d)", re.IGNORECASE
)
_LIMITED = re.compile(
    r"\((?:no|wrong|incorrect|(?:but|or|maybe) [^()]*)\)|\bat (?:most|least)\b|\bif\b|\bfor (?:even|odd)\b", re.I
)


def stated_value(line: str) -> str | None:
    r"""Return the value at the beginning of a statement, without the clauses that follow it.

    `12, not 15.` is 12; `12 out of 20` is 12; `**34** (mod 100)` is 34; `not A but C` is C; `not 12` is none.
    """
    line = " ".join(line[:500].split()).strip("*_` ")
    if negated := _NEGATED.match(line):
        line = negated["right"] or ""
    clause = _CLAUSE.search(line, 1)
    if clause and (clause[0].startswith("?") or _REVOKED.match(line, clause.start())):
        return None
    line = line[: clause.start()] if clause else line
    if _LIMITED.search(line):
        return None
    line = _AFTER_NUMBER.sub("", line)
    line = re.sub(r"(?<=\S)\s+\((?!\d+\s*,|[A-Z]\))[^()]*\)\s*$", "", line)
    return line.strip("*_`\"' ") or None
