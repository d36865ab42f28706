"""Datasets of the Hugging Face Hub, and folders that the `datasets` library reads.

An entry of `data.train_files` is NAME, NAME@CONFIG, NAME:SPLIT or NAME@CONFIG:SPLIT, where NAME is OWNER/NAME on the
hub or a folder: one that `save_to_disk` wrote, or one with data files. The split is `train` if none is given (`test`
for `data.val_files`). Rows of the datasets in `KNOWN` are converted: question and solution -> prompt and ground truth.
`data.train_files=openai/gsm8k` and examples/data_preprocess/gsm8k.py return the same rows.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.data.readers import RowTable
from verl.utils.boxed import last_boxed
from verl.utils.data_names import DataName, source_name
from verl.utils.paths import expanded, resolved

logger = logging.getLogger("verl.data")

_TIMEOUT = 10.0  # seconds to wait for a reply of the hub
_SAVED = ("dataset_dict.json", "state.json")  # files of a folder that `save_to_disk` wrote


class _Converted(Sequence):
    """Rows of a known dataset, converted when they are read."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], convert: Callable[..., dict[str, Any]], name: DataName):
        self._rows, self._convert, self._name = rows, convert, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self._convert(self._rows[index], self._name.split, index)
        except ValueError as error:
            raise ValueError(f"{self._name}, row {index} (the first is 0): {error}") from error


def open_dataset(entry: str | Path) -> RowTable:
    """Load a hub dataset or a folder. The rows are memory-mapped by `datasets`.

    Args:
        entry: see the module docstring.

    Raises:
        ValueError: the library is not installed, the hub is not reachable, or there is no such dataset, configuration
            or split.
    """
    requested = DataName.parse(entry)
    config = requested.config or CONFIGS.get(requested.path)
    name = DataName(requested.path, config, requested.split or "train")
    meaning = "a folder" if name.is_folder else "no file, and read as the name of a hub dataset"
    library = _library(f"{name.path} is {meaning}")
    if not name.is_folder:
        check_hub("dataset", name.path)
    logger.info("loading %s", name)
    try:
        rows = _load(library, name)
    except (OSError, ValueError, KeyError, library.exceptions.DatasetsError) as error:
        hint = f" (read from the folder {resolved(name.path)}, not from the hub)" if name.is_folder else ""
        raise ValueError(f"{name}: the dataset cannot be loaded{hint}: {type(error).__name__}: {error}") from error
    rows = _with_stored_images(library, rows)
    if convert := KNOWN.get(name.path):
        logger.info("%s: prompt and ground truth as examples/data_preprocess makes them", name)
        rows = _Converted(rows, convert, name)
    return RowTable(rows, name=str(name), source=source_name(entry))


def map_parquet(path: Path) -> RowTable:
    """A parquet file whose rows stay on disk: `datasets` memory-maps a copy in its cache. Raises ValueError."""
    import datasets

    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{path}: not a valid parquet file: {error.__cause__ or error}") from error
    return RowTable(_with_stored_images(datasets, rows), name=str(path), source=source_name(path))


def _library(problem: str) -> ModuleType:
    try:
        import datasets
    except ModuleNotFoundError as error:
        fix = "pip install datasets, or give a .parquet, .jsonl, .json or .csv file"
        raise ValueError(f"{problem}, which needs the package {error.name}: {fix}") from error
    return datasets


def _load(library: ModuleType, name: DataName) -> Any:
    path = expanded(name.path)
    if not (name.is_folder and any((path / file).is_file() for file in _SAVED)):
        return library.load_dataset(str(path) if name.is_folder else name.path, name.config, split=name.split)
    dataset = library.load_from_disk(str(path))
    if not isinstance(dataset, Mapping):  # one split, which has no name
        return dataset
    if name.split not in dataset:
        raise ValueError(f"expected one of the splits {', '.join(dataset)}, found {name.split!r}")
    return dataset[name.split]


def _with_stored_images(library: ModuleType, rows: Any) -> Any:
    """The rows with images as bytes or paths: `datasets` would decode them whenever a row is read."""
    if not isinstance(rows, library.Dataset):
        return rows
    for name, feature in rows.features.items():
        stored = library.Image(decode=False)
        if isinstance(feature, library.Image):
            rows = rows.cast_column(name, stored)
        elif isinstance(getattr(feature, "feature", None), library.Image):  # a list of images
            rows = rows.cast_column(name, type(feature)(stored))
    return rows


def check_hub(kind: str, name: str) -> None:
    """Check that the hub has a model or dataset. Without this, the retries of the libraries take minutes.

    Args:
        kind: "model" or "dataset".

    Raises:
        ValueError: it has none of this name, or does not answer.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_TIMEOUT)
    except Exception as error:
        problem = (
            f"{constants.ENDPOINT} is not reachable ({type(error).__name__}: {error}). HF_HUB_OFFLINE=1 reads a copy "
            "that is in the cache; a file or folder needs no network"
        )
        if isinstance(error, RepositoryNotFoundError):
            problem = f"no {kind} at {constants.ENDPOINT} (of a private one: log in with `hf auth login`)"
        raise ValueError(f"{name}: no file or folder of this name, and {problem}") from error


# ---- known datasets --------------------------------------------------------------------------------------------------

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
    """Convert a problem of Geometry3K (Lu et al. 2021, arXiv 2105.04165), which has `<image>` in its text. Raises
    ValueError for another number of images than of `<image>`."""
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
