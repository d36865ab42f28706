"""Labelled answers per data source and category: our rules, math-verify and public verl's scorers side by side.

    python benchmarks/answers.py [FILE ...] [--public PATH/verl/utils/reward_score] [--wrong]

FILE has JSON lines with data_source, category, response, ground_truth and correct; default: the labelled rows of the
tests. A scorer is right on a row if it pays exactly when the label says correct. `paid` are wrong answers that it pays.
--public: the folder of an unpacked public verl, whose scorers are imported from there. --wrong prints the rows on which
our rules are wrong.
"""

import argparse
import importlib.util
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.rewards import resolve_reward_function

ROWS = Path(__file__).resolve().parents[1] / "tests" / "rewards" / "labelled_answers.jsonl"
FUNCTIONS = ("accuracy_reward", "gsm8k_flexible")
Row = dict[str, Any]


def ours(row: Row) -> bool:
    """By the rule of the data source, which may also be the name of a reward function."""
    source = row["data_source"]
    rule = resolve_reward_function(registered=source if source in FUNCTIONS else None).for_data_source(source)
    values = {"solution_str": row["response"], "ground_truth": row["ground_truth"], "extra_info": row.get("extra_info")}
    score = rule(data_source=source, **values)
    return (score["acc"] if isinstance(score, dict) else score) == 1.0


def math_verify(row: Row) -> bool | None:
    """None for sources that are no mathematics."""
    if row["data_source"] in ("accuracy_reward", "cais/mmlu") or row["data_source"].startswith("searchR1"):
        return None
    from math_verify import parse, verify

    reference = row["ground_truth"] if isinstance(row["ground_truth"], str) else str(row["ground_truth"])
    return verify(parse(f"\\boxed{{{reference}}}"), parse(row["response"]))


def public_scorer(folder: Path) -> Callable[[Row], bool | None]:
    """The scorers of public verl by data source, as its `default_compute_score` selects them."""

    def module(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"public_{name}", folder / f"{name}.py")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    gsm8k, maths, dapo, search = map(module, ("gsm8k", "math_reward", "math_dapo", "search_r1_like_qa_em"))

    def score(row: Row) -> bool | None:
        source, response, truth = row["data_source"], row["response"], row["ground_truth"]
        if source == "openai/gsm8k":
            return gsm8k.compute_score(response, truth) == 1.0
        if source == "math_dapo" or source.startswith("aime"):
            return dapo.compute_score(response, truth)["acc"]
        if source.startswith("searchR1"):
            return search.compute_score(response, truth) == 1.0
        if source.startswith(("lighteval", "numina")):
            return maths.compute_score(response, truth) == 1.0
        return None

    return score


def judged(scorer: Callable[[Row], bool | None], row: Row) -> bool | None:
    try:
        paid = scorer(row)
    except Exception:  # a scorer that fails pays nothing
        paid = False
    return None if paid is None else bool(paid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[ROWS])
    parser.add_argument("--public", type=Path)
    parser.add_argument("--wrong", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = [json.loads(line) for file in options.files for line in file.read_text(encoding="utf-8").splitlines()]
    scorers = {"ours": ours, "math-verify": math_verify}
    if options.public:
        scorers["public verl"] = public_scorer(options.public)
    counts: dict[tuple[str, str], dict[str, list[bool | None]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for name, scorer in scorers.items():
            paid = judged(scorer, row)
            counts[row["data_source"], row["category"]][name].append(paid)
            if options.wrong and name == "ours" and paid is not row["correct"]:
                print(json.dumps(row, ensure_ascii=False))
    labels: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for row in rows:
        labels[row["data_source"], row["category"]].append(row["correct"])
    print(f"{'data source':24}{'category':22}{'rows':>5}" + "".join(f"{name:>14} right / paid" for name in scorers))
    totals: dict[str, list[int]] = {name: [0, 0, 0] for name in scorers}
    for key in sorted(counts):
        line = f"{key[0]:24}{key[1]:22}{len(labels[key]):5}"
        for name in scorers:
            pairs = [(paid, label) for paid, label in zip(counts[key][name], labels[key]) if paid is not None]
            right = sum(paid is label for paid, label in pairs)
            wrongly = sum(paid and not label for paid, label in pairs)
            totals[name] = [a + b for a, b in zip(totals[name], (right, wrongly, len(pairs)))]
            line += f"{f'{right} / {wrongly}' if pairs else '-':>27}"
        print(line)
    for name, (right, wrongly, count) in totals.items():
        shares = f"({right / count:.1%}), {wrongly} wrong answers paid ({wrongly / count:.1%})"
        print(f"{name}: {right} of {count} right {shares}")


if __name__ == "__main__":
    main()
