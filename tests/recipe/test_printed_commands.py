"""The commands that users have for generation and evaluation, letter by letter, on a tiny model and two processes."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.quickstart.tiny_model import tiny_model

ROOT = Path(__file__).resolve().parents[2]
GENERATION = (
    "python -m verl.trainer.main_generation data.path=prompts.parquet data.prompt_key=prompt data.n_samples=8 "
    "data.batch_size=1024 data.output_path=out.parquet model.path=model rollout.temperature=0.6 rollout.top_p=0.95 "
    "trainer.nnodes=1 trainer.n_gpus_per_node=2"
)
EVALUATION = (
    "python -m recipe.r1.main_eval data.path=out.parquet data.prompt_key=prompt data.response_key=responses "
    "custom_reward_function.path=./recipe/r1/reward_score.py custom_reward_function.name=reward_func"
)


def run(command: str, folder: Path) -> str:
    arguments = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_generation_and_evaluation(tmp_path):
    tiny_model("llama", tmp_path / "model")
    (tmp_path / "recipe").symlink_to(ROOT / "recipe")
    truth = {"reward_model": {"style": "rule", "ground_truth": "2"}}
    rows = [{"data_source": "openai/gsm8k", "prompt": f"{letter}=", **truth} for letter in "abc"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    assert "3 prompts x 8 = 24 responses" in run(GENERATION, tmp_path)
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["prompt"] for row in table] == ["a=", "b=", "c="] and all(len(row["responses"]) == 8 for row in table)
    printed = run(EVALUATION, tmp_path)
    for figure in ("openai/gsm8k", "accuracy", "pass@8", "95% interval"):
        assert figure in printed
    assert "already exists" in run(GENERATION, tmp_path)  # nothing is done twice
