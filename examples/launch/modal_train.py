"""One host of 8 GPUs on Modal: modal run examples/launch/modal_train.py --overrides "trainer.total_training_steps=100"

Run it in a clone of this repository. The volume `verl-runs` keeps the checkpoints, so that the same command resumes.
"""

import subprocess
from pathlib import Path

import modal

GPUS = 8
CONFIG = "examples/recipes/qwen2_5_7b_math/config.yaml"
COMMAND = f"verl train --config {CONFIG} trainer.n_gpus_per_node={GPUS} trainer.default_local_dir=/runs/grpo"
ROOT = Path(__file__).resolve().parents[2]

image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("build-essential")  # Triton compiles
    .add_local_dir(str(ROOT), "/verl", copy=True, ignore=[".git", ".venv*", "outputs", "checkpoints"])
    .workdir("/verl")
    .run_commands("pip install -e '.[hub,track]'")
)
runs = modal.Volume.from_name("verl-runs", create_if_missing=True)
app = modal.App("verl")


@app.function(image=image, gpu=f"H100:{GPUS}", volumes={"/runs": runs}, timeout=24 * 3600)
def train(overrides: str = "") -> None:
    """Train, and keep what was saved also after an error."""
    try:
        subprocess.run([*COMMAND.split(), *overrides.split()], check=True)
    finally:
        runs.commit()


@app.local_entrypoint()
def main(overrides: str = "") -> None:
    train.remote(overrides)
