"""Tiny images with shapes to count: a task for vision-language models that needs no download.

python examples/data_preprocess/count_shapes.py --save_dir data/shapes

An image of 32 x 32 pixels has 1 to 4 squares or circles of random colors, each in a cell of a grid. Writes
train.parquet and test.parquet with the columns data_source, prompt, images, response, reward_model, extra_info; the
column response is for SFT. With --control, nothing can be learned from the images:

    shuffled    every row gets the image of a random row
    blank       every image is white
"""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

SOURCE = "count_shapes"
PROMPT = "<image>How many shapes?"
CONTROLS = ("none", "shuffled", "blank")
CELLS = 4  # along each side
CELL = 8  # pixels


def draw(count: int, random: Random) -> bytes:
    """A PNG file with `count` shapes."""
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    canvas = ImageDraw.Draw(image)
    for cell in random.sample(range(CELLS * CELLS), count):
        left, top = cell % CELLS * CELL + 1, cell // CELLS * CELL + 1
        color = tuple(random.randrange(0, 160) for _ in range(3))
        shape = random.choice((canvas.rectangle, canvas.ellipse))
        shape((left, top, left + CELL - 3, top + CELL - 3), fill=color)
    return png(image)


def png(image: Image.Image) -> bytes:
    """An image as a PNG file."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def make_rows(count: int, most: int, seed: str, control: str = "none") -> list[dict[str, Any]]:
    """Rows of the task.

    Args:
        count: number of rows.
        most: most shapes of an image.
        seed: seed of the images.
        control: one of CONTROLS.
    """
    random = Random(seed)
    answers = [random.randint(1, most) for _ in range(count)]
    images = [draw(answer, random) for answer in answers]
    if control == "shuffled":
        random.shuffle(images)
    elif control == "blank":
        images = [png(Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white"))] * count
    return [
        {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": PROMPT}],
            "images": [{"bytes": image, "path": f"{index}.png"}],
            "response": str(answer),
            "reward_model": {"style": "rule", "ground_truth": str(answer)},
            "extra_info": {"index": index},
        }
        for index, (answer, image) in enumerate(zip(answers, images))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save_dir", type=Path, required=True, help="folder to write")
    parser.add_argument("--train", type=int, default=2048, help="training rows")
    parser.add_argument("--test", type=int, default=256, help="test rows")
    parser.add_argument("--most", type=int, default=4, help="most shapes of an image")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", choices=CONTROLS, default="none", help="images without information")
    args = parser.parse_args(arguments)
    if not 1 <= args.most <= min(9, CELLS**2):
        parser.error(f"--most: expected 1 to {min(9, CELLS**2)}, found {args.most}")
    args.save_dir.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.train), ("test", args.test)):
        rows = make_rows(count, args.most, f"{args.seed} {split}", args.control)
        path = args.save_dir / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows):,} rows")


if __name__ == "__main__":
    main()
