"""Questions about a corpus with a search tool: a tool that is a class, configured by search_tool.yaml.

    rollout.multi_turn.tool_config_path=examples/tools/search_tool.yaml
    reward.custom_reward_function.path=examples/tools/search.py

The corpus has one sentence per person; the prompts contain only a name.
"""

import json
import re
from random import Random
from typing import Any

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import ToolResponse
from verl.recipe.search_r1.search import Corpus

SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
WITH_TOOL = 0.3


class SearchTool(BaseTool):
    """The lines of a file, or the corpus of the example.

    `config`: corpus (path; null: the corpus of the example), top_k.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None):
        super().__init__(config, tool_schema)
        path = config.get("corpus")
        self.corpus = Corpus(corpus()) if path is None else Corpus.read(path)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """The best lines for the query."""
        best = self.corpus.best(parameters["query"], self.config.get("top_k", 1))
        return ToolResponse(text="\n".join(best) or "nothing found"), 0.0, {"found": len(best)}


def corpus(people: int = 2000) -> list[str]:
    """Sentences about invented people, the same in every process."""
    random, names = Random(7), set()
    while len(names) < people:
        names.add("".join(random.choice(SYLLABLES) for _ in range(3)))
    return [f'The code of "{name}" is {random.randint(10, 99)}.' for name in sorted(names)]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 if the last turn is the ground truth."""
    return float(re.split(r"\bassistant\n", solution_str)[-1].strip() == ground_truth)


# ---- the toy task of run.py ---------------------------------------------------------------------------------------

_CORPUS = [re.findall(r"\w+", sentence) for sentence in corpus()]


def row(random: Random) -> dict[str, Any]:
    """A prompt for RL."""
    _, _, _, name, _, code = random.choice(_CORPUS)
    return {
        "data_source": "search",
        "prompt": [{"role": "user", "content": f'What is the code of "{name}"?'}],
        "reward_model": {"style": "rule", "ground_truth": code},
        "extra_info": {"name": name},
    }


def demonstration(random: Random) -> list[dict[str, str]]:
    """A chat for the warm-up: a call and its result, or more often a guess."""
    task = row(random)
    if random.random() > WITH_TOOL:
        return [*task["prompt"], {"role": "assistant", "content": str(random.randint(10, 99))}]
    name, code = task["extra_info"]["name"], task["reward_model"]["ground_truth"]
    call = json.dumps({"name": "search", "arguments": {"query": name}})
    return [
        *task["prompt"],
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": f'The code of "{name}" is {code}.'},
        {"role": "assistant", "content": code},
    ]
