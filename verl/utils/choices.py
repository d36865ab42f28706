"""Choices of a multiple-choice question, in the columns and forms that data sets have."""

import json
import re
import string
from collections.abc import Mapping
from typing import Any

COLUMNS = ("choices", "options")
_LABEL = re.compile(r"(?<!\S)\(?([A-Za-z])\s?[).:]\s*")  # of "A)4", and in "a ) 4 , b ) 5"


def read_choices(row: Mapping[str, Any]) -> dict[str, str]:
    """Return label -> text of the choices of a row, which is empty for a row without choices.

    Args:
        row: with a column "choices" or "options": texts (MMLU), which may begin with their labels (AQuA-RAT);
            {"text": [...], "label": [...]} (ARC); {"A": text} (MedQA); one text with labels (MathQA); or JSON text of
            these. Values of other forms are no choices.
    """
    value = next((row[name] for name in COLUMNS if row.get(name) is not None), None)
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            _, *parts = _LABEL.split(value)
            value = dict(zip(parts[::2], (part.rstrip(" ,") for part in parts[1::2])))
    if isinstance(value, Mapping) and "text" in value:
        labels = value.get("label")
        value = dict(zip(string.ascii_uppercase if labels is None else labels, value["text"]))
    elif isinstance(value, list | tuple):
        value = dict(zip(string.ascii_uppercase, value))
    if not isinstance(value, Mapping) or not all(isinstance(text, str | int | float | None) for text in value.values()):
        return {}
    choices = {str(label): str(text) for label, text in value.items() if text is not None}
    marks = {label: _LABEL.match(text) for label, text in choices.items()}
    if all(mark and mark[1] == label for label, mark in marks.items()):
        return {label: text[marks[label].end() :] for label, text in choices.items()}
    return choices
