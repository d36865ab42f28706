"""Datasets of the Hugging Face Hub whose rows are converted: question and solution -> prompt and ground truth.

`data.train_files=openai/gsm8k` and examples/data_preprocess/gsm8k.py return the same rows.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl.utils.boxed import last_boxed

GSM8K = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Reason step by step. End with a line of "####" followed by the final number alone.'
GEO3K = "hiyouga/geometry3k"
GEO3K_INSTRUCTION = "Reason step by step between <think> and </think>. After that, put the final answer in \\boxed{}."
MATH = "DigitalLearningGmbH/MATH-lighteval"
MATH_500 = "HuggingFaceH4/MATH-500"
MATH_INSTRUCTION = "Reason step by step. Put the final answer in \\boxed{}."


def final_number(solution: str) -> str:
    """The number after the last "####" of a worked solution, without thousands commas. Raises ValueError if none."""
    _, mark, number = solution.rpartition("####")
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise ValueError(f"expected a solution that ends with '#### <number>', found {solution[-60:]!r}")
    return number


def _texts(row: Mapping[str, Any], prompt_key: str, solution_key: str) -> tuple[str, str]:
    missing = [key for key in (prompt_key, solution_key) if not isinstance(row.get(key), str)]
    if missing:
        raise ValueError(f"expected strings under {prompt_key!r} and {solution_key!r}, missing: {missing}")
    return row[prompt_key], row[solution_key]


def _row(source: str, prompt: str, instruction: str, truth: str, info: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{prompt}\n{instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": info,
    }


def gsm8k_row(row: Mapping[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a question of GSM8K (Cobbe et al. 2021, arXiv 2110.14168)."""
    prompt, solution = _texts(row, "question", "answer")
    info = {"split": split, "index": index, "question": prompt, "answer": solution}
    return _row(GSM8K, prompt, GSM8K_INSTRUCTION, final_number(solution), info)


def _math_row(source: str, row: Mapping[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a problem of MATH (Hendrycks et al. 2021, arXiv 2103.03874): the answer is the last box."""
    problem, solution = _texts(row, "problem", "solution")
    truth = last_boxed(solution)
    if truth is None:
        raise ValueError(f"expected a solution with \\boxed{{...}}, found {solution[-60:]!r}")
    return _row(source, problem, MATH_INSTRUCTION, truth, {"split": split, "index": index})


def geo3k_row(row: Mapping[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a problem of Geometry3K (Lu et al. 2021, arXiv 2105.04165), which has `<image>` in its text.

    Raises:
        ValueError: another number of images than of `<image>`.
    """
    problem, truth = _texts(row, "problem", "answer")
    images = row.get("images")
    if not isinstance(images, list) or problem.count("<image>") != len(images):
        count = len(images) if isinstance(images, list) else repr(images)[:60]
        raise ValueError(f"expected one of images for each <image> of the problem, found {count}: {problem[:60]!r}")
    info = {"split": split, "index": index, "question": problem, "answer": truth}
    return _row(GEO3K, problem, GEO3K_INSTRUCTION, truth, info) | {"images": images}


KNOWN: dict[str, Callable[[Mapping[str, Any], str, int], dict[str, Any]]] = {
    GSM8K: gsm8k_row,
    GEO3K: geo3k_row,
    MATH: partial(_math_row, MATH),
    MATH_500: partial(_math_row, MATH_500),
}
"""Name on the hub -> (row, split, index) -> a row with prompt, data_source, ability, reward_model and extra_info.

Raises ValueError for a row that has another form. Other datasets are read as they are.
"""
CONFIGS = {GSM8K: "main"}
"""Name on the hub -> the configuration that is loaded if none is given."""
