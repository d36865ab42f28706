"""Write the table of docs/memory.md from `verl plan --gpus`: python scripts/memory_page.py"""

import contextlib
import io
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

from verl.cli import plan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
START, END = "<!-- table -->\n", "<!-- end of table -->\n"

MODELS = ("0.5B", "1.5B", "3B", "7B", "14B", "32B")
GPUS = {"RTX-4090": "24 GB", "A100-40GB": "40 GB", "H100": "80 GB", "H200": "141 GB"}
COUNTS = (1, 2, 4, 8)
LORA = ("actor_rollout_ref.model.lora_rank=32",)
#: what is trained -> settings, and the numbers of GPUs that support it
METHODS = {
    "all weights": ((), COUNTS),
    "AdamW8bit": (("actor_rollout_ref.actor.optim.optimizer=AdamW8bit",), COUNTS),
    "LoRA": (LORA, COUNTS),
    "QLoRA": ((*LORA, "actor_rollout_ref.model.quantization=nf4"), (1,)),
}
RUN = (
    "algorithm.name=grpo",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.rollout.n=8",
    "data.max_prompt_length=1024",
    "data.max_response_length=2048",
)
PEAK = re.compile(r"peak ([\d.]+) GiB per device: fits")


def peak(model: str, gpu: str, count: int, settings: tuple[str, ...]) -> float | None:
    """Predicted GiB per GPU; None if the run does not fit."""
    output, errors = io.StringIO(), io.StringIO()
    arguments = ["--gpus", str(count), "--gpu", gpu, "--model", model, *RUN, *settings]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            plan.main(arguments)
        except SystemExit:
            if "no placement" not in errors.getvalue():
                raise
            return None
    fits = PEAK.search(output.getvalue())
    return float(fits[1]) if fits else None


def cell(model: str, gpu: str, method: str) -> str:
    """`2 x 21`: the smallest number of GPUs, and the GiB of each."""
    settings, counts = METHODS[method]
    for count in counts:
        if (size := peak(model, gpu, count, settings)) is not None:
            return f"{count} x {size:.0f}"
    return "-"


def table() -> str:
    """The table of the page."""
    head = [f"{gpu} ({size})" for gpu, size in GPUS.items()]
    lines = ["| model | trained | " + " | ".join(head) + " |", "|---|---|" + "---|" * len(GPUS)]
    for model in MODELS:
        for method in METHODS:
            cells = " | ".join(cell(model, gpu, method) for gpu in GPUS)
            lines.append(f"| {model} | {method} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    above, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(above + START + table() + END + rest.partition(END)[2], encoding="utf-8")
