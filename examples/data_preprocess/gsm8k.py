"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168) as parquet files, from a local folder or the HuggingFace hub.

python examples/data_preprocess/gsm8k.py --local_dir ~/gsm8k --save_dir ~/data/gsm8k      # train.jsonl, test.jsonl
python examples/data_preprocess/gsm8k.py --hub openai/gsm8k --save_dir ~/data/gsm8k       # needs `datasets`

Writes train.parquet and test.parquet with the columns data_source, prompt, ability, reward_model, extra_info.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.files import read_rows
from verl.data.hub import GSM8K, gsm8k_row

SPLITS = ("train", "test")


def local_rows(folder: Path, split: str) -> list[dict[str, Any]]:
    """Read and convert folder/<split>.jsonl. Raises ValueError with the line of an invalid row."""
    rows = read_rows(folder / f"{split}.jsonl")
    converted = []
    for index, row in enumerate(rows):
        try:
            converted.append(gsm8k_row(row, split, index))
        except ValueError as error:
            raise ValueError(f"{rows.location(index)}: {error}") from error
    return converted


def hub_rows(name: str, split: str) -> list[dict[str, Any]]:
    """Load and convert a split from the HuggingFace hub."""
    import datasets

    rows = datasets.load_dataset(name, "main", split=split)
    return [gsm8k_row(row, split, index) for index, row in enumerate(rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--local_dir", type=Path, help="folder with train.jsonl and test.jsonl")
    source.add_argument("--hub", default=GSM8K, help="name on the HuggingFace hub")
    parser.add_argument("--save_dir", type=Path, required=True, help="folder to write")
    args = parser.parse_args(arguments)
    for split in SPLITS:
        try:
            rows = local_rows(args.local_dir.expanduser(), split) if args.local_dir else hub_rows(args.hub, split)
        except ValueError as error:
            sys.exit(f"gsm8k: {error}")
        except ModuleNotFoundError as error:
            sys.exit(f"gsm8k: the hub needs {error.name}: pip install {error.name}, or use --local_dir")
        except OSError as error:
            reason = str(error).partition("\n")[0]
            sys.exit(f"gsm8k: {reason}. Use --local_dir: a folder with train.jsonl and test.jsonl needs no network")
        args.save_dir.mkdir(parents=True, exist_ok=True)
        path = args.save_dir / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows):,} rows")


if __name__ == "__main__":
    main()
