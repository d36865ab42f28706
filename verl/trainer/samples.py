"""Prompts, responses and scores as text, for inspection."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoints.atomic import atomic_write
from verl.protocol import DataProto


def generations(batch: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """Return prompt, response and score of every sample, as text."""
    columns = batch.tensors
    width = columns["prompts"].shape[1]
    scores = columns["token_level_scores"].sum(1).tolist()
    samples = []
    for i, mask in enumerate(columns["attention_mask"].bool()):
        objects = {name: values[i] for name, values in batch.non_tensor_batch.items()}
        samples.append(
            {
                "input": tokenizer.decode(columns["prompts"][i][mask[:width]], skip_special_tokens=True),
                "output": tokenizer.decode(columns["responses"][i][mask[width:]], skip_special_tokens=True),
                "gts": (objects.get("reward_model") or {}).get("ground_truth"),
                "score": scores[i],
                "data_source": objects.get("data_source"),
                "uid": str(objects.get("uid")),
            }
        )
    return samples


def dump_generations(folder: str | Path, step: int, batch: DataProto, tokenizer: Any) -> None:
    """Write the samples of a step to <folder>/<step>.jsonl."""
    samples = [{**sample, "step": step} for sample in generations(batch, tokenizer)]
    write_jsonl(Path(folder) / f"{step}.jsonl", samples)


def write_jsonl(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        lines = (json.dumps(item, ensure_ascii=False, default=str) + "\n" for item in items)
        draft.write_text("".join(lines), encoding="utf-8")
