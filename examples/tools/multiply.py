"""A tool agent to start from: a tool, its reward, and prompts that need the tool.

    python examples/tools/multiply.py --out agent

writes agent/train.jsonl and agent/test.jsonl, the prompts of RL; agent/sft.jsonl, chats of which half call the tool
and half guess; and agent/texts.txt, from which a tokenizer can be trained. No product of one file is in another.
run_multiply.sh trains a model on them.
"""

import argparse
import json
from pathlib import Path
from random import Random

from verl.agents.tools.function_tool import function_tool

SFT_ROWS, TRAIN_ROWS, TEST_ROWS = 1000, 2800, 200


@function_tool
def multiply(a: int, b: int) -> str:
    """Multiply two integers.

    Args:
        a: the first integer.
        b: the second integer.
    """
    return str(a * b)


def compute_score(response: str, answer: str) -> float:
    """1 if the last turn is the answer and nothing else."""
    return float(response.split("assistant\n")[-1].strip() == answer)


def demonstration(a: int, b: int, guess: int | None = None) -> list[dict[str, str]]:
    """A chat of the warm-up: the call, what the tool returns, the answer; or an answer that is guessed."""
    if guess is not None:
        return [{"role": "user", "content": f"{a} x {b}?"}, {"role": "assistant", "content": str(guess)}]
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
    turns = [
        ("user", f"{a} x {b}?"),
        ("assistant", f"<tool_call>{call}</tool_call>"),
        ("tool", multiply(a, b)),
        ("assistant", multiply(a, b)),
    ]
    return [{"role": role, "content": text} for role, text in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random = Random(args.seed)
    pairs = random.sample(pairs, SFT_ROWS + TRAIN_ROWS + TEST_ROWS)
    guesses = [random.randint(100, 9801) if i % 2 else None for i in range(SFT_ROWS)]
    chats = [demonstration(a, b, guess) for (a, b), guess in zip(pairs[:SFT_ROWS], guesses)]
    prompts = [{"prompt": f"{a} x {b}?", "answer": multiply(a, b)} for a, b in pairs[SFT_ROWS:]]
    for name, rows in (
        ("sft", [{"messages": chat} for chat in chats]),
        ("train", prompts[:TRAIN_ROWS]),
        ("test", prompts[TRAIN_ROWS:]),
    ):
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [turn["content"] for chat in chats for turn in chat]
    (args.out / "texts.txt").write_text("\n".join(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
