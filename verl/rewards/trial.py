"""A trial of a reward function: right, wrong and empty responses to a row, and what their scores say about it."""

import inspect
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.functions import ScoreFunction
from verl.rewards.rules.accuracy import final_answer
from verl.rewards.rules.answers.rule import AnswerRule, read_references

_THOUGHT = "<think>\nStep by step.\n</think>\n"
_FORMS = ("{}", _THOUGHT + "The answer is \\boxed{{{}}}.\n#### {}\nAnswer: {}", _THOUGHT + "<answer>{}</answer>")
_WRONG = "987654321"
_TESTS = re.compile(r"\n|\bassert\b|\bdef \b|\bimport \b")  # a reference that is no answer, but tests a program


def trial_responses(ground_truth: Any, solution: Any = None) -> dict[str, list[str]]:
    """Return right, wrong and empty responses. There may be no right one: tests of a program tell none.

    A ground truth that is a JSON object may be the response that is asked for, or an argument of the reward function:
    it is tried as "truth", and its score is no evidence.

    Args:
        ground_truth: That of a row.
        solution: A worked solution or a program, if the row has one.
    """
    truths = []
    try:
        reference = final_answer(read_references(ground_truth, "trial")[0])
    except ValueError:
        reference = ""
        text = json.dumps(ground_truth, default=str) if isinstance(ground_truth, Mapping) else str(ground_truth or "")
        truths = [text] if text.startswith("{") and len(text) <= 200 else []
    references = [] if len(reference) > 200 or _TESTS.search(reference) or not reference else [reference]
    if len(reference) == 1 and reference.isdecimal():  # it may be the index of a choice
        references.append(string.ascii_uppercase[int(reference)])
    right = [form.format(text, text, text) for text in references for form in _FORMS]
    if isinstance(solution, str) and solution.strip():
        right += [solution, f"```python\n{solution}\n```"]
    return {
        "truth": truths,
        "right": right,
        "wrong": [*(form.format(*[_WRONG] * 3) for form in _FORMS), " ".join([_WRONG] * 20)],
        "empty": [""],
    }


def describe_fault(scores: Mapping[str, Sequence[float]]) -> str | None:
    """What is wrong with a reward that pays the responses of `trial_responses` like this; None if it can be right."""
    best = {kind: max(values) for kind, values in scores.items() if values and kind != "truth"}
    values = {value for kind in scores.values() for value in kind}
    unpaid, empty = max(best["wrong"], best["empty"]), scores["empty"][0]
    short, long = scores["wrong"][0], scores["wrong"][-1]
    trend = "grows" if empty < short < long else "falls" if empty > short > long else ""
    if len(values) == 1 and ("right" in best or unpaid > 0):
        fault = "pays nothing for a right response" if unpaid <= 0 else "pays every response the same"
    elif trend == "grows" and (scores.get("right") or [long])[0] <= long < best.get("right", long):
        fault = "pays a long wrong response as much as a short right one, or more"  # and a long right one most
    elif unpaid < best.get("right", float("inf")):
        return None
    else:
        kind = "a wrong" if best["wrong"] == unpaid else "an empty"
        fault = f"pays {kind} response as much as a right one, or more"
    fault += f"; its score {trend} with the length of the response" if trend else ""
    return f"{fault} (best scores: {', '.join(f'{kind} {value:g}' for kind, value in best.items())})"


def explain(function: ScoreFunction, response: str, extra: Mapping[str, Any]) -> str:
    """What a rule takes as the final answer of a response, and where it has found it; "" if that is not known."""
    used = inspect.getclosurevars(function.func).globals if inspect.isfunction(function.func) else {}
    rule = next((value for value in used.values() if isinstance(value, AnswerRule)), None)
    if rule is None:
        return f"answer {extra['pred']!r}" if "pred" in extra else ""
    final = rule.extract(response)
    return f"answer {final.text!r} ({final.source})"
