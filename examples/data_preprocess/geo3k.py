"""Geometry3K (Lu et al. 2021, arXiv 2105.04165) as parquet files, from a local folder or the HuggingFace hub.

python examples/data_preprocess/geo3k.py --local_dir ~/geometry3k --save_dir ~/data/geo3k  # parquet files of the hub
python examples/data_preprocess/geo3k.py --hub hiyouga/geometry3k --save_dir ~/data/geo3k  # needs `datasets`

A local folder has the columns images, problem and answer in train*.parquet and test*.parquet, also in data/. Writes
train.parquet and test.parquet with the columns data_source, prompt, images, ability, reward_model, extra_info.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.files import read_rows
from verl.data.hub import GEO3K, geo3k_row

SPLITS = ("train", "test")
IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))


def local_rows(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """Read and convert <split>*.parquet of a folder. Raises ValueError for a missing file or an invalid row."""
    files = [file for place in (folder, folder / "data") for file in sorted(place.glob(f"{split}*.parquet"))]
    if not files:
        raise ValueError(f"{folder}: expected {split}*.parquet with the columns images, problem, answer; found none")
    rows = read_rows(files)
    for index, row in enumerate(rows):
        try:
            yield geo3k_row(row, split, index)
        except ValueError as error:
            raise ValueError(f"{rows.location(index)}: {error}") from error


def hub_rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Load and convert a split from the HuggingFace hub. Images stay as they are stored."""
    import datasets

    rows = datasets.load_dataset(name, split=split)
    rows = rows.cast_column("images", datasets.Sequence(datasets.Image(decode=False)))
    return (geo3k_row(row, split, index) for index, row in enumerate(rows))


def write(rows: Iterator[Mapping[str, Any]], path: Path) -> int:
    """Write rows in groups, so that the images are not all in memory. Returns their number."""
    writer, group, count = None, [], 0
    for row in rows:
        group.append(dict(row))
        count += 1
        if len(group) == 256:
            writer = _flush(writer, group, path)
            group = []
    if group or writer is None:
        writer = _flush(writer, group, path)
    writer.close()
    return count


def _flush(writer: pq.ParquetWriter | None, group: list[dict[str, Any]], path: Path) -> pq.ParquetWriter:
    if not group:
        raise ValueError(f"{path}: expected rows, found none")
    if writer is None:
        schema = pa.Table.from_pylist(group).schema
        schema = schema.set(schema.get_field_index("images"), pa.field("images", IMAGES))
        writer = pq.ParquetWriter(path, schema)
    writer.write_table(pa.Table.from_pylist(group, writer.schema))
    return writer


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--local_dir", type=Path, help="folder with train*.parquet and test*.parquet")
    source.add_argument("--hub", default=GEO3K, help="name on the HuggingFace hub")
    parser.add_argument("--save_dir", type=Path, required=True, help="folder to write")
    args = parser.parse_args(arguments)
    args.save_dir.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        path = args.save_dir / f"{split}.parquet"
        try:
            rows = local_rows(args.local_dir.expanduser(), split) if args.local_dir else hub_rows(args.hub, split)
            count = write(rows, path)
        except ValueError as error:
            sys.exit(f"geo3k: {error}")
        except ModuleNotFoundError as error:
            sys.exit(f"geo3k: the hub needs {error.name}: pip install {error.name}, or use --local_dir")
        print(f"{path}: {count:,} rows")


if __name__ == "__main__":
    main()
