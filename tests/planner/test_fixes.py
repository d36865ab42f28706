"""A run that does not fit into a real memory limit is refused with a change, dies without it, and runs with it.

The limit is `ulimit -d` (RLIMIT_DATA), which counts what a process allocates. A limit of the address space
(`ulimit -v`) would also count the libraries that torch maps.
"""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tests.trainer.conftest import make_tiny, run_settings

LIMIT = int(1.4 * 2**30)
ACTOR = "actor_rollout_ref.actor."
#: trains with a limit that is set after the checks, which would refuse the run
UNCHECKED = """
import json, resource, sys
from verl.trainer.ppo_trainer import PPOTrainer
trainer = PPOTrainer(overrides=json.loads(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]), int(sys.argv[2])))
trainer.fit()
"""


def limit_memory() -> None:
    """In a process that starts: limit what it allocates."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


def run(*arguments: str, limited: bool = True) -> subprocess.CompletedProcess:
    """A Python process, with one thread."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=limit_memory if limited else None,
    )


@pytest.fixture
def too_large(tmp_path) -> list[str]:
    """The overrides of a step with 128 sequences of 128 tokens in one micro-batch: 1.5 GiB of activations."""
    make_tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "max_position_embeddings": 256}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(vocab_size=len(tokenizer), **sizes, **ends)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    chosen = ["algorithm.adv_estimator=grpo", "data.train_batch_size=16", "data.max_response_length=120"]
    chosen += ["actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.ignore_eos=true", "trainer.device=cpu"]
    chosen += [f"{ACTOR}ppo_mini_batch_size=16", f"{ACTOR}use_dynamic_bsz=true"]
    chosen += [
        f"{ACTOR}ppo_max_token_len_per_gpu=65536",
        "trainer.total_training_steps=1",
        "trainer.resume_mode=disable",
    ]
    return [*run_settings(tmp_path, tmp_path / "run"), *chosen]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts all private memory only on Linux")
def test_a_run_that_dies_of_a_real_limit_is_refused_and_its_fix_runs(too_large, tmp_path):
    planned = run("-m", "verl.cli.app", "plan", *too_large)
    assert planned.returncode == 1
    (needed, there, words) = re.search(
        r"update of the actor needs about ([\d.]+) GiB per device, but there are ([\d.]+) GiB.*"
        r"smallest change that fits \([\d.]+ GiB\): set (.*?); `verl plan`",
        " ".join((planned.stdout + planned.stderr).split()),
    ).groups()
    assert float(there) == 1.4 and float(needed) > 1.1 * 1.4
    assert f"{ACTOR}ppo_max_token_len_per_gpu=" in words
    died = run("-c", UNCHECKED, json.dumps(too_large), str(LIMIT), limited=False)
    assert died.returncode != 0 and "can't allocate memory" in died.stderr and "actor.update_actor()" in died.stderr
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not _steps(metrics)
    fixed = run("-m", "verl.cli.app", "train", *too_large, *words.split())
    assert fixed.returncode == 0, fixed.stderr[-2000:]
    assert _steps(metrics) == [1]


def _steps(path: Path) -> list[int]:
    """The steps in a file of metrics."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line["step"] for line in map(json.loads, lines) if "timing_s/step" in line]
