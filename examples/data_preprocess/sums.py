"""Sums of two numbers below 20 as JSONL: a data set that needs no download.

python examples/data_preprocess/sums.py --save_dir data/sums

Writes sft.jsonl (prompt, response), train.jsonl and test.jsonl (prompt, answer): `7+12=` and `19`. The test set has 80
of the 400 sums; the others are in both training files. Their reward function is `accuracy_reward`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

BELOW, TEST_ROWS = 20, 80


def write_sums(folder: Path, seed: int = 1) -> list[tuple[Path, int]]:
    """Write the three files. Returns their paths and numbers of rows."""
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(BELOW) for b in range(BELOW)]
    Random(seed).shuffle(sums)
    test, train = sums[:TEST_ROWS], sums[TEST_ROWS:]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows, key in (("sft", train, "response"), ("train", train, "answer"), ("test", test, "answer")):
        path = folder / f"{name}.jsonl"
        lines = (json.dumps({"prompt": prompt, key: text}) + "\n" for prompt, text in rows)
        path.write_text("".join(lines), encoding="utf-8")
        written.append((path, len(rows)))
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save_dir", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the rows, and of the test set")
    args = parser.parse_args(arguments)
    try:
        written = write_sums(args.save_dir, args.seed)
    except OSError as error:
        sys.exit(f"sums: {error.filename}: {error.strerror}: choose another --save_dir")
    for path, rows in written:
        print(f"{path}: {rows} rows")


if __name__ == "__main__":
    main()
