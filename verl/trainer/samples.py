"""Prompts, answers and scores as text: what people read to see what a model does."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoints.atomic import atomic_write
from verl.protocol import DataProto


def generations(batch: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """Prompt, answer and score of every row, as text."""
    columns = batch.tensors
    width = columns["prompts"].shape[1]
    scores = columns["token_level_scores"].sum(1).tolist()
    rows = []
    for i, mask in enumerate(columns["attention_mask"].bool()):
        objects = {name: values[i] for name, values in batch.non_tensor_batch.items()}
        rows.append(
            {
                "input": tokenizer.decode(columns["prompts"][i][mask[:width]], skip_special_tokens=True),
                "output": tokenizer.decode(columns["responses"][i][mask[width:]], skip_special_tokens=True),
                "gts": (objects.get("reward_model") or {}).get("ground_truth"),
                "score": scores[i],
                "data_source": objects.get("data_source"),
                "uid": str(objects.get("uid")),
            }
        )
    return rows


def dump_generations(folder: str | Path, step: int, batch: DataProto, tokenizer: Any) -> None:
    """Write the answers of a step to <folder>/<step>.jsonl."""
    rows = [{**row, "step": step} for row in generations(batch, tokenizer)]
    write_jsonl(Path(folder) / f"{step}.jsonl", rows)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        draft.write_text("".join(lines), encoding="utf-8")
