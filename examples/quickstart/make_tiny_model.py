"""Write a tiny random HuggingFace model and its tokenizer to a folder.

python examples/quickstart/make_tiny_model.py --like qwen2 --out /tmp/tiny-qwen2
"""

import argparse
import logging
import sys
from pathlib import Path

from tiny_model import ARCHITECTURES, CHARACTERS, SIZES, tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    family = "the model family (make_tiny_vl_model.py writes a Qwen2-VL)"
    parser.add_argument("--like", choices=sorted(ARCHITECTURES), default="llama", help=family)
    parser.add_argument("--size", choices=sorted(SIZES), help="default: the size of the family")
    tokenizer = f"default: that of the family; char knows only the characters {CHARACTERS}"
    parser.add_argument("--tokenizer", choices=["char", "bpe"], help=tokenizer)
    parser.add_argument("--text", type=Path, help="text file to train the bpe tokenizer on, one text per line")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        texts = args.text.read_text(encoding="utf-8").splitlines() if args.text else None
        tiny_model(args.like, args.out, args.seed, size=args.size, tokenizer=args.tokenizer, texts=texts)
    except (ValueError, OSError) as error:
        sys.exit(f"make_tiny_model: {error}")


if __name__ == "__main__":
    main()
