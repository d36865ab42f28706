"""The prompts of search.py in the form of Search-R1: the policy reasons, searches and answers between tags.

    actor_rollout_ref.rollout.agent.agent_loop_config_path=recipe/search_r1/agent.yaml

The reward is that of Search-R1, an exact match of the last <answer>.
"""

import os
from pathlib import Path
from random import Random
from typing import Any

from examples.tools import search


def prepare(out: Path) -> None:
    """Write the corpus, whose path recipe/search_r1/tools.yaml reads from the environment."""
    path = out / "corpus.txt"
    path.write_text("\n".join(search.corpus()), encoding="utf-8")
    os.environ["CORPUS"] = str(path)


def row(random: Random) -> dict[str, Any]:
    """A prompt for RL."""
    task = search.row(random)
    answers = {"target": [task["reward_model"]["ground_truth"]]}
    return {**task, "data_source": "searchR1_nq", "reward_model": {"style": "rule", "ground_truth": answers}}


def demonstration(random: Random) -> list[dict[str, str]]:
    """A chat for the warm-up: a search and the answer in its result, or more often a guess."""
    task = search.row(random)
    name, code = task["extra_info"]["name"], task["reward_model"]["ground_truth"]
    if random.random() > search.WITH_TOOL:
        text = f"<think>I know it.</think>\n<answer>{random.randint(10, 99)}</answer>"
    else:
        text = (
            f"<think>I do not know it.</think>\n<search>{name}</search>\n\n"
            f'<information>Doc 1 The code of "{name}" is {code}.</information>\n\n<answer>{code}</answer>'
        )
    return [*task["prompt"], {"role": "assistant", "content": text}]
