"""PPO with strategy=megatron, end to end: actor, critic and reference with native rollout, in two CPU processes."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.engines.megatron_cpu import skip_reason

if reason := skip_reason():
    pytest.skip(reason, allow_module_level=True)

from transformers import OlmoeConfig, Qwen2MoeConfig

from examples.quickstart.make_tiny_vl_model import tiny_vl_model
from tests.trainer.conftest import run_settings
from verl import SFTTrainer
from verl.trainer import main_ppo
from verl.trainer.local_trainer import LocalPPOTrainer

ACTOR, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.ref."
SHIM = str(Path(__file__).parents[1] / "engines" / "megatron_cpu" / "shim.py")
COMPARED = ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "critic/grad_norm", "critic/vf_loss")


def steps(settings: list[str], folder: Path, *keys: str) -> list[dict]:
    """The metrics of three steps in two processes."""
    common = ["trainer.total_training_steps=3", "trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    common += [f"{ACTOR}use_kl_loss=true", f"trainer.default_local_dir={folder}"]
    LocalPPOTrainer(overrides=[*settings, *common, *keys]).fit()
    (file,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("megatron", "fsdp"),
    [("tensor_model_parallel_size=2", "tensor_parallel_size=2"), ("use_distributed_optimizer=true", "fsdp_size=-1")],
)
def test_ppo_gives_the_metrics_of_the_fsdp_engine(megatron, fsdp, settings, tmp_path):
    layout = [f"{ACTOR}fsdp_config.{fsdp}", f"{REF}fsdp_config.{fsdp}"]
    expected = steps(settings, tmp_path / "fsdp", *layout)
    keys = [f"{ACTOR}strategy=megatron", f"{ACTOR}megatron.{megatron}", f"imports=[{SHIM}]"]
    found = steps(settings, tmp_path / "megatron", *keys)
    for ours, theirs in zip(found, expected, strict=True):
        for name in COMPARED:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name
        assert ours["rollout/logprob_gap_max"] < 1e-4


@pytest.mark.parametrize(
    ("like", "keys", "message"),
    [
        ("qwen2_vl", [], "expected a model of llama, .* found .qwen2_vl."),
        ("llama", ["tensor_model_parallel_size=3"], "3 does not divide num_attention_heads"),
        ("llama", ["expert_model_parallel_size=2"], "expert_model_parallel_size=2, but llama models have no experts"),
        (
            "llama",
            ["override_transformer_config.moe_aux_loss_coeff=0.01"],
            "actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01, but llama models have no experts",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(like, keys, message, settings, tmp_path, capsys):
    if like != "llama":
        tiny_vl_model(tmp_path / "model")
        settings = [*settings, f"actor_rollout_ref.model.path={tmp_path / 'model'}"]
    overrides = [f"{ACTOR}strategy=megatron", f"imports=[{SHIM}]", *(f"{ACTOR}megatron.{key}" for key in keys)]
    ranks = 3 if "=3" in "".join(keys) else 2
    batches = ["data.train_batch_size=6", f"{ACTOR}ppo_mini_batch_size=6", f"trainer.n_gpus_per_node={ranks}"]
    assert main_ppo.main([*settings, *overrides, *batches, "--dry-run"]) == 1
    assert re.search(message, capsys.readouterr().err)


ROLLOUT, MEGATRON, MODEL = "actor_rollout_ref.rollout.", f"{ACTOR}megatron.", "actor_rollout_ref.model."


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([f"{MODEL}lora_rank=4"], "does not support LoRA adapters"),
        (["critic.model.lora_rank=4"], "does not support LoRA adapters"),
        ([f"{MODEL}use_liger=true"], "use_liger .*: true, but strategy=megatron does not support it"),
        ([f"{ROLLOUT}deterministic=true"], "deterministic .*: true, but strategy=megatron does not support it"),
        ([f"{ACTOR}optim.override_optimizer_config={{eps: 1e-5}}"],
         "override_optimizer_config.*eps.*are not supported"),
        ([f"{REF}megatron.dtype=fp16", f"{ACTOR}use_kl_loss=true"], "megatron.dtype .*fp16.* is not supported"),
        (["critic.megatron.tensor_model_parallel_size=2"],
         "critic.megatron.tensor_model_parallel_size=2, but actor_rollout_ref.actor.megatron.* "
         "set placement.critic_devices"),
        (["placement.actor_devices=[0]", "placement.rollout_devices=[1]", f"{ROLLOUT}weight_sync=reshard"],
         "use auto or collective"),
    ],
)  # fmt: skip
def test_settings_that_are_not_supported_are_refused_before_workers_start(keys, message, settings, capsys):
    settings = [*settings, f"{ACTOR}strategy=megatron", f"imports=[{SHIM}]", "trainer.n_gpus_per_node=2"]
    assert main_ppo.main([*settings, "trainer.device=cpu", *keys, "--dry-run"]) == 1
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.parametrize("config", [Qwen2MoeConfig, OlmoeConfig])
def test_other_mixtures_are_refused_before_they_are_loaded(config, tiny, tmp_path, capsys):
    """There are no weights."""
    folder = tmp_path / "model"
    shutil.copytree(tiny / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config(**sizes, num_key_value_heads=2, num_experts=4, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    settings = [*run_settings(tiny, tmp_path / "run"), f"{MODEL}path={folder}", f"imports=[{SHIM}]"]
    assert main_ppo.main([*settings, f"{ACTOR}strategy=megatron", "trainer.device=cpu", "--dry-run"]) == 1
    assert re.search(f"expected a model of llama, .* found .{config.model_type}.", capsys.readouterr().err)


@pytest.mark.parametrize("sizes", [{"tensor_model_parallel_size": 2}, {}])
def test_expert_parallel_sizes_must_divide_the_ranks(sizes, mixture, tmp_path, capsys):
    """Experts are sharded over the tensor-parallel ranks too: 2 x 2 of 2 ranks."""
    keys = [f"{MEGATRON}{name}={size}" for name, size in sizes.items()]
    keys += [f"{MEGATRON}expert_model_parallel_size=2", f"{ACTOR}strategy=megatron", f"imports=[{SHIM}]"]
    keys += ["trainer.n_gpus_per_node=2", "trainer.device=cpu", "--dry-run"]
    assert main_ppo.main([*run_settings(mixture, tmp_path / "run"), *keys]) == len(sizes)
    assert ("= 4 does not divide the 2 ranks" in capsys.readouterr().err) == bool(sizes)


@pytest.mark.slow
def test_grpo_resumes_in_another_layout_as_if_it_had_not_stopped(settings, tmp_path):
    """Four steps with t=2, and two steps with t=2, then two with p=2: samples, losses and gradient norms."""
    keys = [*settings, "algorithm.adv_estimator=grpo", f"{ACTOR}strategy=megatron", f"imports=[{SHIM}]"]
    keys += ["trainer.n_gpus_per_node=2", "trainer.device=cpu", f"{ACTOR}use_kl_loss=true", "trainer.save_freq=2"]

    def run(name: str, count: int, size: str) -> list[dict]:
        own = [f"{MEGATRON}{size}", f"trainer.total_training_steps={count}"]
        LocalPPOTrainer(overrides=[*keys, *own, f"trainer.default_local_dir={tmp_path / name}"]).fit()
        (file,) = (tmp_path / name).rglob("metrics.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines() if "actor/pg_loss" in line]

    expected = run("straight", 4, "tensor_model_parallel_size=2")
    run("resumed", 2, "tensor_model_parallel_size=2")
    found = run("resumed", 4, "pipeline_model_parallel_size=2")
    for ours, theirs in zip(found, expected, strict=True):
        for name in (
            "critic/rewards/mean",
            "response_length/mean",
            "actor/pg_loss",
            "actor/kl_loss",
            "actor/grad_norm",
        ):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize("t_g", [1, 2])
def test_reshard_gives_the_run_of_gathered_weights(t_g, settings, tmp_path):
    """GRPO; auto selects reshard, which sends half of the weights to a full copy, and nothing to a half."""
    keys = ["algorithm.adv_estimator=grpo", f"{ACTOR}strategy=megatron", f"{MEGATRON}tensor_model_parallel_size=2"]
    keys += [f"{ROLLOUT}tensor_model_parallel_size={t_g}", f"imports=[{SHIM}]", f"{ROLLOUT}check_every=1"]
    found = steps(settings, tmp_path / "auto", *keys)
    expected = steps(settings, tmp_path / "replica", *keys, f"{ROLLOUT}weight_sync=replica")
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            if name.split("/")[0] in ("actor", "critic", "rollout", "response_length") and "per_second" not in name:
                assert ours[name] == value, name
        assert ours["weight_sync/canary_mismatch"] < 1e-4
        sent, kept, full = ours["weight_sync/bytes"], ours["weight_sync/kept_bytes"], theirs["weight_sync/bytes"]
        assert sent == (full - kept if t_g == 1 else 0)
        assert full / 2 < kept < 0.51 * full  # a half of the matrices, and the norms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "sizes", "t_g"),
    [
        ("R3", ("expert_model_parallel_size=2",), 2),
        ("R3", ("tensor_model_parallel_size=2", "expert_model_parallel_size=2", "expert_tensor_parallel_size=1"), 1),
        ("R2", ("tensor_model_parallel_size=2", "expert_model_parallel_size=2", "expert_tensor_parallel_size=1"), 1),
    ],
)
def test_a_mixture_replays_its_experts_as_the_fsdp_engine_does(mode, sizes, t_g, mixture, tmp_path):
    keys = [f"{ACTOR}router_replay.mode={mode}", f"{ROLLOUT}enable_rollout_routing_replay={mode == 'R3'}"]
    keys += ["algorithm.adv_estimator=grpo", f"{ROLLOUT}tensor_model_parallel_size={t_g}", f"{ROLLOUT}check_every=1"]
    settings = run_settings(mixture, tmp_path)
    expected = steps(settings, tmp_path / "fsdp", *keys, f"{ACTOR}fsdp_config.expert_parallel_size=2")
    megatron = [f"{ACTOR}strategy=megatron", f"imports=[{SHIM}]", *(f"{MEGATRON}{size}" for size in sizes)]
    found = steps(settings, tmp_path / "megatron", *keys, *megatron)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("actor/grad_norm", "actor/pg_loss", *(name for name in theirs if name.startswith("moe/"))):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name  # losses are sums of terms of 1
        assert ours["rollout/logprob_gap_max"] < 1e-4 and ours["weight_sync/canary_mismatch"] < 1e-4
    assert {"moe/max_load", "moe/unused_experts", "moe/router_entropy", "moe/routing_mismatch"} <= found[0].keys()


@pytest.mark.slow
def test_sft_gives_the_losses_of_the_fsdp_engine_and_resumes(tiny, tmp_path):
    """Five steps in one run, and two, then three in another layout."""
    lines = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()]
    rows = [{"prompt": row["prompt"], "response": row["answer"]} for row in lines]

    def losses(name: str, steps: int, **keys: object) -> list[float]:
        config = {"model.path": str(tiny / "model"), "trainer.device": "cpu", "trainer.n_gpus_per_node": 2}
        config |= {"data.train_batch_size": 4, "data.max_length": 16}
        config |= {"trainer.logger": ["jsonl"], "trainer.default_local_dir": str(tmp_path / name), "imports": [SHIM]}
        config |= {"trainer.total_training_steps": steps, "trainer.save_freq": 2, "engine.dtype": "fp32"}
        SFTTrainer(config | keys, train_dataset=rows, val_dataset=rows[:4]).fit()
        (file,) = (tmp_path / name).rglob("metrics.jsonl")
        metrics = [json.loads(line) for line in file.read_text().splitlines()]
        return [each["train/nll"] for each in metrics if "train/nll" in each]

    expected = losses("fsdp", 5)
    assert len(set(expected)) == len(expected) == 5
    megatron = {"engine.strategy": "megatron", "engine.param_offload": True, "engine.optimizer_offload": True}
    assert losses("straight", 5, **megatron | {"engine.tensor_model_parallel_size": 2}) == pytest.approx(expected, 1e-5)
    first = losses("resumed", 2, **megatron | {"engine.tensor_model_parallel_size": 2})
    resumed = losses("resumed", 5, **megatron | {"engine.pipeline_model_parallel_size": 2})
    assert len(first) == 2 and resumed == pytest.approx(expected, 1e-5)
