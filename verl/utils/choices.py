"""Choices of a multiple-choice question, in the columns and forms that data sets have."""

import ast
import contextlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CHOICES = ("choices", "options")
_LABEL = re.compile(r"(?<!\S)\(?([A-Za-z])\s?[).:]\s*")  # of "A)4", and in "a ) 4 , b ) 5"


def read_text(text: str) -> Any:
    """The value of JSON text, or of the text of a Python value (as pandas writes it to CSV); None for other texts."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    return None


def read_choices(row: Mapping[str, Any]) -> dict[str, str]:
    """Return label -> text of the choices of a row, which is empty for a row without choices.

    Args:
        row: with a column "choices" or "options": texts (MMLU), which may begin with their labels (AQuA-RAT);
            {"text": [...], "label": [...]} (ARC); {"A": text} (MedQA); one text with labels (MathQA); or the text of
            these as JSON or Python. Values of other forms are no choices.
    """
    value = next((row[name] for name in CHOICES if row.get(name) is not None), None)
    if isinstance(value, str):
        if (decoded := read_text(value)) is None:
            _, *parts = _LABEL.split(value)
            decoded = dict(zip(parts[::2], (part.rstrip(" ,") for part in parts[1::2])))
        value = decoded
    labels = string.ascii_uppercase
    if isinstance(value, Mapping) and "text" in value:
        labels, value = labels if value.get("label") is None else value["label"], value["text"]
    if isinstance(value, Sequence | np.ndarray) and isinstance(labels, Sequence | np.ndarray):
        value = dict(zip(labels, value))
    # a mapping with other keys, such as the settings of an environment, has no choices
    if not isinstance(value, Mapping) or not all(
        len(str(label)) <= 2 and isinstance(text, str | int | float | None) for label, text in value.items()
    ):
        return {}
    choices = {str(label): str(text) for label, text in value.items() if text is not None}
    marks = {label: _LABEL.match(text) for label, text in choices.items()}
    if all(mark and mark[1] == label for label, mark in marks.items()):
        return {label: text[marks[label].end() :] for label, text in choices.items()}
    return choices
