"""Search over a file or a retrieval server, in the form of the results of Search-R1."""

import asyncio
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
_FUNCTION = {"name": "search", "description": "Search for documents.", "parameters": _QUERY}


class Corpus:
    """Documents, searched by BM25 (Robertson and Zaragoza 2009)."""

    def __init__(self, documents: list[str]):
        self.documents = documents
        self.counts = [Counter(_terms(text)) for text in self.documents]
        self.lines: dict[str, list[int]] = {}
        for line, count in enumerate(self.counts):
            for word in count:
                self.lines.setdefault(word, []).append(line)
        self.mean_length = sum(map(Counter.total, self.counts)) / len(self.counts)

    @classmethod
    def read(cls, path: str) -> "Corpus":
        """The lines of a file: text, or JSON objects with "contents"."""
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return cls([json.loads(line)["contents"] if path.endswith(".jsonl") else line for line in lines])

    def best(self, query: str, count: int) -> list[str]:
        """At most `count` documents, the best one first."""
        scores: Counter[int] = Counter()
        for word in set(_terms(query)):
            lines = self.lines.get(word, [])
            weight = math.log(1 + (len(self.documents) - len(lines) + 0.5) / (len(lines) + 0.5))
            for line in lines:
                count_of, length = self.counts[line][word], self.counts[line].total()
                scores[line] += weight * count_of * 2.2 / (count_of + 1.2 * (0.25 + 0.75 * length / self.mean_length))
        return [self.documents[line] for line, _ in scores.most_common(count)]


def _terms(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class SearchTool(BaseTool):
    """The best documents for a query.

    Args:
        config: `corpus`, a file for BM25, or `url`, a server that replies to {"queries": [...], "topk": k,
            "return_scores": true} with {"result": [[{"document": {"contents": ...}}]]}; and `top_k` (3).
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        corpus, self.url, self.top_k = (config.get(key) for key in ("corpus", "url", "top_k"))
        if set(config) - {"corpus", "url", "top_k"} or (corpus is None) == (self.url is None):
            raise ValueError(f"SearchTool: config: expected corpus or url, and top_k, found {config}")
        self.top_k = self.top_k or 3
        self.corpus = None if corpus is None else Corpus.read(corpus)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": _FUNCTION})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        query = parameters["query"]
        texts = self.corpus.best(query, self.top_k) if self.corpus else await asyncio.to_thread(self._ask, query)
        documents = [text.partition("\n") for text in texts]
        lines = [f"Doc {i}(Title: {a}) {b}" if b else f"Doc {i} {a}" for i, (a, _, b) in enumerate(documents, 1)]
        return ToolResponse(text="\n".join(lines) or "nothing found"), 0.0, {"documents": len(documents)}

    def _ask(self, query: str) -> list[str]:
        body = json.dumps({"queries": [query], "topk": self.top_k, "return_scores": True}).encode()
        with urlopen(Request(self.url, body, {"Content-Type": "application/json"}), timeout=60) as reply:
            (documents,) = json.load(reply)["result"]
        return [document.get("document", document)["contents"] for document in documents]
