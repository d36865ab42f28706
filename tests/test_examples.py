"""Scripts of examples/ and verl/recipe/: bash reads the command line, the configuration is loaded, the flow compiled.

Those of reinforcement learning also train: one step of a tiny model.
"""

import importlib
import logging
import os
import subprocess
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.data_preprocess import count_shapes
from examples.quickstart.make_tiny_vl_model import tiny_vl_model
from examples.quickstart.tiny_model import tiny_model
from tests.trainer.conftest import REWARD
from verl.trainer.base import Trainer
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sft_trainer import SFTTrainer
from verl.trainer.startup.command_line import split_arguments

ROOT = Path(__file__).parents[1]
#: scripts that need other models or columns, tested in tests/recipe; and of launchers
OF_RECIPES = {ROOT / f"verl/recipe/{name}/run_local.sh" for name in ("safe_rlhf", "spin")}
OF_RECIPES.add(ROOT / "verl/recipe/flowrl/run_gsm8k_local.sh")  # its loss is registered once
OF_RECIPES.add(ROOT / "examples/launch/torchrun.sh")  # in tests/test_launch_examples.py
OF_RECIPES |= {*(ROOT / "examples/recipes").rglob("*.sh")}  # of SmolLM2, in tests/test_recipes.py
SCRIPTS = sorted(
    {path for folder in ("examples", "verl/recipe") for path in (ROOT / folder).rglob("*.sh")} - OF_RECIPES
)
#: scripts of several commands, tested in tests/recipe/test_r1_eval.py and tests/trainer/test_vision_run.py
TRAINS_NOTHING = {ROOT / "verl/recipe/r1/run_r1.sh", ROOT / "examples/grpo_trainer/run_tiny_vl_local.sh"}
#: all but those that make their model and data
NEEDS_MODEL = [path for path in SCRIPTS if path.name not in ("run_tiny_vl_local.sh", "run_multiply.sh")]
FINE_TUNING = [path for path in SCRIPTS if "sft" in path.parts]
TRAINING = [path for path in SCRIPTS if path not in TRAINS_NOTHING and "sft" not in path.parts]
#: what makes a run small
SMALL = ["data.train_batch_size=4", "data.max_response_length=6", "data.train_max_samples=8"]
SMALL += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"]
SMALL += ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_at_end=false"]
SMALL += ["trainer.total_training_steps=1"]


def trainer_class(module: str) -> type[Trainer]:
    """The trainer that a command builds on this host."""
    if module == "verl.trainer.sft_trainer":
        return SFTTrainer
    if module == "verl.trainer.main_ppo":
        return PPOTrainer
    recipe, loaded = module.split(".")[2], importlib.import_module(module)
    names = (f"{recipe.upper()}Trainer", *(name for name in vars(loaded) if name.lower() == f"{recipe}trainer"))
    return next(getattr(loaded, name) for name in names if hasattr(loaded, name))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """What the scripts ask for: a model, and rows as examples/data_preprocess writes them."""
    home = tmp_path_factory.mktemp("home")
    tiny_model("llama", home / "model", seed=0)
    tiny_model("mixtral", home / "mixture", seed=0)
    template = "{{ tools or '' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for name in ("model", "mixture"):
        (home / name / "chat_template.jinja").write_text(template)
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+1="}], "ability": "math"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "2"}}
    row |= {"extra_info": {"index": 0, "question": "1+1=", "answer": "2"}}
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row] * 512), home / f"{name}.parquet")
    tiny_vl_model(home / "vl")
    count_shapes.main(["--save_dir", str(home / "shapes"), "--train", "512", "--test", "8"])
    (home / "reward.py").write_text(REWARD)
    (home / "print_arguments").write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    (home / "print_arguments").chmod(0o755)
    return home


def run_to(folder: Path) -> list[str]:
    return [f"trainer.default_local_dir={folder}", "trainer.logger=[jsonl]"]


def command_of(script: Path, home: Path, *further: str, **env: str) -> tuple[str, list[str]]:
    """The module that a script runs, and the arguments that it gives to it. WARM: the model of the last of several.

    A script of a vision-language model gets such a model and images.
    """
    if script.name == "run_qwen_05_sp2_liger.sh":
        further = (*further, "model.use_liger=false")  # its kernels need a GPU
    has_images = "_vl-" in script.name
    model, data = (str(home / "vl"), str(home / "shapes")) if has_images else (str(home / "model"), str(home))
    if script.name == "run_tiny_moe_local.sh":  # its tasks are not GSM8K
        further, model = (f"reward.custom_reward_function.path={home / 'reward.py'}", *further), str(home / "mixture")
    places = {
        "MODEL": model,
        "WARM": model,
        "TEACHER": model,
        "DATA": data,
        "PYTHON": str(home / "print_arguments"),
        **env,
    }
    done = subprocess.run(
        ["bash", str(script), *further], env=os.environ | places, capture_output=True, text=True, check=True
    )
    dash_m, module, *arguments = done.stdout.rstrip("\0").split("\0")
    assert dash_m == "-m"
    return module, [word for word in arguments if word != "--online"]  # which selects the trainer of verl dpo


@pytest.mark.fast(
    "examples/grpo_trainer/run_gsm8k*",
    "*tiny_moe*",
    "*drgrpo*",
    "*entropy*",
    "*reinforce*",
    "*rloo*",
    "*seq_balance*",
    "examples/sft*",
    "verl/recipe/prime*",
    "verl/recipe/gkd*",
    "*sppo*",
    "*remax*",
    "verl/recipe/dpo*",
)
@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path not in TRAINS_NOTHING], ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_script_builds_a_trainer(script, home, tmp_path, monkeypatch, caplog):
    assert os.access(script, os.X_OK)
    reward = ["reward.reward_function=accuracy_reward"] if "_vl-" in script.name else []
    module, arguments = command_of(script, home, *run_to(tmp_path), *reward)
    path, overrides, flags = split_arguments(arguments)
    assert not flags
    monkeypatch.chdir(tmp_path)  # what a script names must not depend on the folder it is started in
    with caplog.at_level(logging.WARNING, "verl"):
        trainer = trainer_class(module)(config_path=path, overrides=overrides)
    for words in ("changes nothing", "has no effect"):  # every key that a script sets is used
        assert words not in caplog.text
    assert trainer.pipeline.operators and trainer.roles == {}
    assert trainer.config.trainer.default_local_dir == str(tmp_path)  # the end of the command line counts


# a step of the algorithms of the other scripts is in tests/recipe and tests/golden
@pytest.mark.fast(
    "*dapo*", "*run_calculator*", "examples/grpo_trainer/run_qwen2_5_vl-7b.sh", "examples/ppo_trainer/run_gsm8k*"
)
@pytest.mark.parametrize("script", TRAINING, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_script_trains(script, home, tmp_path):
    further = [*run_to(tmp_path), *SMALL]
    if script == ROOT / "verl/recipe/dapo/run_gsm8k_local.sh":
        further.append("reward.reward_kwargs.overlong_buffer.len=2")
    reward = f"reward.custom_reward_function.path={home / 'reward.py'}"
    module, arguments = command_of(script, home, reward, *further, N_GPUS="1")
    path, overrides, _ = split_arguments(arguments)
    trainer = trainer_class(module)(config_path=path, overrides=overrides)
    assert trainer.fit()["training/global_step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", FINE_TUNING, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_script_fine_tunes(script, home, tmp_path):
    small = ["data.train_batch_size=4", "data.train_max_samples=8", "data.val_max_samples=4"]
    module, arguments = command_of(script, home, *run_to(tmp_path), *small, "trainer.total_training_steps=1")
    path, overrides, _ = split_arguments(arguments)
    metrics = trainer_class(module)(config_path=path, overrides=overrides).fit()
    assert metrics["training/global_step"] == 1 and metrics["val/loss"] > 0


def test_the_install_script_installs_what_the_project_can_use(home):
    script = ROOT / "scripts/install_vllm_sglang_mcore.sh"
    env = os.environ | {"PYTHON": str(home / "print_arguments"), "USE_MEGATRON": "0"}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=True)
    packages, check = done.stdout.split("-m\0")[1:]
    assert packages.startswith("pip\0install\0") and check == "verl.utils.env_check\0"
    extras = packages.split("[")[1].split("]")[0].split(",")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"ray", "lora"} <= set(extras) <= wanted.keys()
    assert "megatron" not in extras
    chosen = subprocess.run(["bash", str(script)], env=env | {"USE_MEGATRON": "1"}, capture_output=True, text=True)
    assert chosen.returncode == 0 and ",megatron" in chosen.stdout


@pytest.mark.parametrize("script", NEEDS_MODEL, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_script_says_what_it_needs(script):
    bare = {key: value for key, value in os.environ.items() if key not in ("MODEL", "DATA")}
    done = subprocess.run(["bash", str(script)], env=bare, capture_output=True, text=True)
    assert done.returncode != 0 and "set MODEL to" in done.stderr
