"""What an import costs: `import verl` loads nothing heavy, and no module needs an optional package to be loaded."""

import json
import subprocess
import sys
from pathlib import Path

import verl
from tests.programs import run_python

ROOT = Path(__file__).parents[1]

HEAVY = {"torch", "transformers", "tensordict", "numpy", "ray", "vllm", "sglang", "megatron", "datasets", "pandas"}
OPTIONAL = {"ray", "vllm", "sglang", "megatron", "liger_kernel", "matplotlib", "wandb", "mlflow", "swanlab", "gguf"}

#: modules that are the adapter of an optional package and nothing else
ADAPTERS = {
    "verl.single_controller.ray.cluster",
    "verl.single_controller.ray.actor_pool",
    "verl.single_controller.ray.public",
    "verl.single_controller.ray.rank_actor",
    *(f"verl.engines.megatron.{name}" for name in ("checkpoint", "convert", "engine", "experts", "memory", "model")),
    "verl.model_merger.gguf",
    # kernels for a GPU, written in Triton
    "verl.modeling.fp8_triton",
    "verl.modeling.layers_triton",
    "verl.modeling.log_probs_triton",
    "verl.modeling.batch_invariant.triton_kernels",
    "verl.rollout.native.triton_kernels",
    "verl.rollout.native.cuda_decoder",
    "verl.rollout.native.verifier",
    "verl.rollout.native.batch_invariant_cuda",
    "verl.rollout.native.generic.cuda",
    "verl.rollout.native.generic.kernels",
    "verl.rollout.native.paged_scheduler",
}


def python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_verl_is_light():
    program = "import json, sys, verl; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    assert HEAVY & set(json.loads(python(program))) == set()


def test_errors_of_the_configuration_and_missing_packages_are_printed_without_loading_torch():
    program = (
        "import json, sys; from verl.trainer.main_ppo import main;"
        "status = main(['data.train_batchsize=3', 'algorithm.name=grpo', 'actor_rollout_ref.rollout.name=vllm']);"
        "from verl.trainer import main_eval, main_generation, sft_trainer;"
        "others = [sft_trainer.main(['data.train_files=no.parquet']), main_generation.main(['data.path=no.parquet']),"
        "          main_eval.main(['data.path=no.parquet'])];"
        "print(json.dumps([status, *others, 'torch' in sys.modules]));"
        "sys.modules['torch'] = None;"  # as if it were not installed
        "from verl.trainer import fsdp_sft_trainer;"
        "fsdp_sft_trainer.main(['model.path=x', 'data.train_files=tests/golden/grpo.json'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert json.loads(done.stdout) == [1, 1, 1, 1, False]
    assert done.stderr.count("there is no file 'no.parquet'") == 3 and "data.output_path: missing" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: the package torch is not installed: pip install 'torch>=")
    assert "did you mean data.train_batch_size?" in done.stderr and "'vllm' needs vLLM, which is not" in done.stderr


def test_names_of_the_package_are_found_at_use():
    assert verl.DataFlow.__module__ == "verl.dataflow.flow" and "DataProto" in dir(verl)


def test_every_module_loads_without_the_optional_packages():
    """In a process that has imported torch and transformers, but no module of verl."""
    program = """
import importlib, json, pkgutil, sys

blocked, skipped = json.loads(sys.argv[1])
for name in list(sys.modules):
    if name.partition(".")[0] in ("verl", *blocked):
        del sys.modules[name]
for name in blocked:
    sys.modules[name] = None  # what Python takes for "not installed"
import verl
for module in pkgutil.walk_packages(verl.__path__, "verl."):
    if module.name not in skipped and not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            print(f"{module.name}: {type(error).__name__}: {error}")
"""
    done = run_python("-c", program, json.dumps([sorted(OPTIONAL), sorted(ADAPTERS)]), cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_command_says_what_it_loads_before_it_loads_it():
    program = """
import sys
from verl.trainer.startup.program import Program

class Command(Program):
    def read(self, path, overrides):
        return None

    def start(self, *arguments):
        print('torch' in sys.modules)
        return 0

command = Command('a.b', 'the help', 'Config', '')
command.main(['--help'])
print('rich' in sys.modules)
command.main(['a=1'])
sys.modules['torch'] = sys
command.main(['a=1'])
"""
    lines = python(program).splitlines()
    assert lines[:2] == ["the help", "False"] and lines[3:] == ["False", "True"]
    assert lines[2].endswith(" loading torch and transformers")
