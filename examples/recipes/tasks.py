"""The data and the reward of the recipes of SmolLM2-135M-Instruct: sort, countdown, format and search.

    python examples/recipes/tasks.py sort --out data/sort

writes train.jsonl, test.jsonl (no question of it is in the training data), and for SFT and preferences sft.jsonl,
pairs.jsonl and test_pairs.jsonl. Their reward: reward.custom_reward_function.path=examples/recipes/tasks.py
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from anywhere, installed or not

TRAIN, TEST, TEST_SEED = 8192, 200, 1000
Row = dict[str, Any]


def _row(task: str, prompt: str | list[dict[str, str]], answer: str) -> Row:
    return {"data_source": task, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": answer}}


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0].strip()


# ---- sort: five numbers below 100 -----------------------------------------------------------------------------------

SORT_EXAMPLE = "Numbers: 38 7 91 24 60\nSorted: 7 24 38 60 91\n"


def sort_row(random: Random) -> Row:
    """A prompt that shows one sorted list, and its answer."""
    numbers = random.sample(range(1, 100), 5)
    text = " ".join(map(str, numbers))
    return _row("sort", f"{SORT_EXAMPLE}Numbers: {text}\nSorted:", " ".join(map(str, sorted(numbers))))


def sort_score(response: str, answer: str) -> dict[str, float]:
    """1 for the sorted list. Other lists of as many numbers: up to 0.4 for the numbers, 0.3 for their places."""
    found, right = _first_line(response).split(), answer.split()
    kept = sum((Counter(found) & Counter(right)).values()) / len(right)
    placed = sum(a == b for a, b in zip(found, right)) / len(right)
    if len(found) != len(right) or not all(word.isdigit() for word in found):
        return {"score": 0.0, "acc": 0.0}
    return {"score": 1.0 if placed == 1 else 0.4 * kept + 0.3 * placed, "acc": float(placed == 1)}


# ---- countdown: a target from three numbers with + and - ------------------------------------------------------------

COUNTDOWN_EXAMPLES = "Numbers: 3 8 2. Target: 9. Answer: 3 + 8 - 2\nNumbers: 20 6 11. Target: 3. Answer: 20 - 6 - 11\n"


def countdown_row(random: Random) -> Row:
    """A prompt that shows two solved examples; the answer is `numbers = target`."""
    while True:
        numbers = random.sample(range(1, 31), 3)
        signs = [random.choice((1, -1)) for _ in range(2)]
        target = numbers[0] + signs[0] * numbers[1] + signs[1] * numbers[2]
        if target > 0:
            break
    random.shuffle(numbers)
    text = " ".join(map(str, numbers))
    return _row("countdown", f"{COUNTDOWN_EXAMPLES}Numbers: {text}. Target: {target}. Answer:", f"{text} = {target}")


def countdown_score(response: str, answer: str) -> dict[str, float]:
    """1 for the target from all numbers, each once. Other sums of three numbers: up to 0.3 for those of the prompt."""
    numbers, target = answer.split(" = ")
    line = _first_line(response)
    if not re.fullmatch(r"\d+ [+-] \d+ [+-] \d+", line):
        return {"score": 0.0, "acc": 0.0}
    kept = sum((Counter(re.findall(r"\d+", line)) & Counter(numbers.split())).values())
    value = sum(int(part) for part in re.findall(r"[+-]?\d+", line.replace(" ", "")))
    right = kept == 3 and value == int(target)
    return {"score": 1.0 if right else 0.1 * kept, "acc": float(right)}


# ---- format: rules that a text has to keep --------------------------------------------------------------------------

_TOPICS = (
    "cats dogs horses whales bees ants owls penguins sharks frogs apples bread cheese rice coffee tea honey salt "
    "soup pizza rain snow wind storms clouds rivers lakes oceans deserts forests mountains volcanoes islands caves "
    "trains bicycles ships airplanes cars bridges roads castles houses schools libraries hospitals music painting "
    "dancing football chess swimming cooking reading gardens flowers trees grass stars planets rockets computers "
    "robots clocks paper glass gold iron"
)
TOPICS = _TOPICS.split()
FORMAT_RULES = (
    'Rules: begin each line with "- "; only lower-case letters; at most eight words in a line; the last line is "end".'
)
FORMAT_EXAMPLE = "- the sun is a star\n- the sun gives us light\nend"


def format_row(random: Random) -> Row:
    """A chat that asks for two to four facts about a topic, with rules; test.jsonl has the last 16 topics."""
    topic, count = random.choice(TOPICS[:-16]), random.randint(2, 4)
    return _format_row(topic, count)


def _format_row(topic: str, count: int) -> Row:
    question = "Write {} facts about {}. " + FORMAT_RULES
    shown = [("user", question.format(2, "the sun")), ("assistant", FORMAT_EXAMPLE)]
    chat = [*shown, ("user", question.format(count, topic))]
    return _row("format", [{"role": role, "content": text} for role, text in chat], str(count))


def format_score(response: str, answer: str) -> dict[str, float]:
    """The mean of five rules: number of facts, form of their lines, short lines, lower case, the end. acc: all."""
    *facts, last = [line.strip() for line in response.strip().split("\n") if line.strip()] or [""]
    marked = [fact for fact in facts if re.match(r"- \w", fact)]
    rules = (
        len(facts) == int(answer),
        bool(facts) and len(marked) == len(facts) == len(set(facts)),
        bool(facts) and all(3 <= len(fact.removeprefix("- ").split()) <= 8 for fact in facts),
        response == response.lower(),
        last == "end",
    )
    return {"score": sum(rules) / len(rules), "acc": float(all(rules))}


# ---- search: a question that needs a look into a corpus -------------------------------------------------------------

SEARCH_SYSTEM = (
    "Find the code with the search tool: write one call, such as "
    '<tool_call>{"name": "search", "arguments": {"query": "bagede"}}</tool_call>, and wait for its result. '
    "Then answer with the number only."
)
#: of the demonstrations: the others guess
SEARCHED = 0.3


def search_row(random: Random) -> Row:
    """The question of examples/tools/search.py, with a system message that describes the tool."""
    from examples.tools import search

    row = search.row(random)
    return row | {"prompt": [{"role": "system", "content": SEARCH_SYSTEM}, *row["prompt"]]}


def search_chat(random: Random) -> Row:
    """A chat for the warm-up: a search and the answer, or more often a guess."""
    row = search_row(random)
    name, code = row["extra_info"]["name"], row["reward_model"]["ground_truth"]
    call = json.dumps({"name": "search", "arguments": {"query": name}})
    texts = [
        ("assistant", f"<tool_call>{call}</tool_call>"),
        ("tool", f'The code of "{name}" is {code}.'),
        ("assistant", code),
    ]
    if random.random() > SEARCHED:
        texts = [("assistant", str(random.randint(10, 99)))]
    return {"messages": [*row["prompt"], *({"role": role, "content": text} for role, text in texts)]}


# ---- files ----------------------------------------------------------------------------------------------------------

ROWS = {"sort": sort_row, "countdown": countdown_row, "format": format_row, "search": search_row}
SCORES = {"sort": sort_score, "countdown": countdown_score, "format": format_score}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    """The reward of the task that `data_source` names."""
    if data_source == "search":
        from examples.tools import search

        return search.compute_score(data_source, solution_str, ground_truth, extra_info)
    return SCORES[data_source](solution_str, ground_truth)


def _different(make: Any, random: Random, count: int, but: set[str] = frozenset()) -> list[Row]:
    """`count` rows whose prompts are not in `but`."""
    rows: list[Row] = []
    while len(rows) < count:
        row = make(random)
        if json.dumps(row["prompt"]) not in but:
            rows.append(row)
    return rows


def _pair(row: Row, random: Random) -> Row:
    """The sorted list, and one in which two neighbors are exchanged."""
    numbers = row["reward_model"]["ground_truth"].split()
    place = random.randrange(len(numbers) - 1)
    numbers[place : place + 2] = reversed(numbers[place : place + 2])
    chosen = f" {row['reward_model']['ground_truth']}\n"
    return {"prompt": row["prompt"], "chosen": chosen, "rejected": f" {' '.join(numbers)}\n"}


def files(task: str, seed: int, train: int = TRAIN) -> dict[str, list[Row]]:
    """The files of a task, name -> rows."""
    make = ROWS[task]
    if task == "format":
        test = [_format_row(topic, count) for topic in TOPICS[-16:] for count in (2, 3, 4)]
    else:
        test = _different(make, Random(TEST_SEED), TEST)
    rows = _different(make, Random(seed), train, {json.dumps(row["prompt"]) for row in test})
    written = {"train": rows, "test": test}
    if task == "search":
        random = Random(seed + 1)
        written["sft"] = [search_chat(random) for _ in range(512)]
    if task == "sort":
        random = Random(seed + 1)
        written["sft"] = [
            {"prompt": row["prompt"], "response": f" {row['reward_model']['ground_truth']}\n"} for row in rows
        ]
        written["pairs"] = [_pair(row, random) for row in rows]
        written["test_pairs"] = [_pair(row, random) for row in test]
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=ROWS)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in files(args.task, args.seed).items():
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
