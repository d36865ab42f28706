"""Invalid settings: one table of everything that `load_config` refuses, and how the problems are reported."""

import logging
import shlex

import pytest

from verl.config import (
    ConfigError,
    check_critic,
    check_inputs,
    check_registered,
    load_config,
)
from verl.config.checks.run import REGISTERED_KINDS
from verl.config.describe import requirements_of
from verl.config.fields import fields_of
from verl.config.schema import Config, EvalConfig, GenerationConfig, SFTConfig

ARR, ACTOR, ROLLOUT = "actor_rollout_ref.", "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MODEL, MEGATRON = f"{ARR}model.", f"{ACTOR}megatron."
PATH = f"{MEGATRON}dist_checkpointing_path"
TRANSFORMER = f"+{MEGATRON}override_transformer_config."
TWO_RANKS = "data.train_batch_size=6 critic.ppo_mini_batch_size=6 trainer.n_gpus_per_node=2"
FOUR = "trainer.n_gpus_per_node=4"
SEPARATE = "trainer.n_gpus_per_node=2 placement.actor_devices=[0] placement.rollout_devices=[1]"
SHARDED = f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size"
TENSOR_PARALLEL = f"{ACTOR}fsdp_config.tensor_parallel_size"
FSDP_SIZE = f"{ACTOR}fsdp_config.fsdp_size"
TOWER = "freeze_vision_tower=true'): true, but strategy=megatron does not support vision-language models"


def problems(*overrides, path=None, **kwargs):
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides, **kwargs)
    return [str(problem) for problem in error.value.problems]


UNKNOWN_KEYS = {
    "data.train_batchsize": "data.train_batch_size",
    "data.batch_size": "data.train_batch_size",
    "trainer.total_epoch": "trainer.total_epochs",
    "actor.clip_ratio": "actor_rollout_ref.actor.clip_ratio",
    "rollout.n": "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.lr": "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.rollout.temprature": "actor_rollout_ref.rollout.temperature",
    "actor_rollout.model_name_or_pth": "actor_rollout.model_name_or_path",
    "algoritm.gamma": "algorithm.gamma",
    "actor_rollout_ref.actor.gradient_clip": "actor_rollout_ref.actor.grad_clip",
    # names of TRL, and short ones
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.learning_rate": "actor_rollout_ref.actor.optim.lr",
    "max_steps": "trainer.total_training_steps",
    "trainer.max_steps": "trainer.total_training_steps",
    "num_train_epochs": "trainer.total_epochs",
    "gradient_accumulation_steps": "data.train_batch_size",
    "epochs": "trainer.total_epochs",
    "actor_rollout_ref.rollout.tp_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "temperature": "actor_rollout_ref.rollout.temperature",
}

VALUES = {
    f"{ROLLOUT}n=eight": "found 'eight' (str), expected int >= 1",
    f"{ROLLOUT}n=0": "found 0, expected int >= 1",
    f"{ROLLOUT}n=1.5": "found 1.5, expected int >= 1",
    f"{ROLLOUT}n=true": "found true, expected int >= 1",
    f"{ROLLOUT}n=null": "found null, expected int >= 1",
    f"{ROLLOUT}n=[1]": "found [1] (list), expected int >= 1",
    f"{ROLLOUT}top_p=1.1": "found 1.1, expected float > 0 and <= 1",
    f"{ACTOR}optim.lr=.nan": "found nan, expected float >= 0",
    f"{ACTOR}use_kl_loss=maybe": "found 'maybe' (str), expected bool",
    f"{ACTOR}loss_agg_mode=mean": "expected one of token-mean, token-sum",
    "trainer.device=cud": "expected one of auto, cpu, cuda; did you mean cuda?",
    "trainer.device=tpu": "found 'tpu' (str), expected one of auto, cpu, cuda",
    f"{ACTOR}checkpoint.save_contents=[modle]": "expected list[one of model, optimizer, extra, hf_model]; did you",
    "trainer.total_training_steps=0": "found 0, expected int >= 1 or null",
    "critic.optim.betas=[0.9]": "expected list[float] of length 2",
    "algorithm.name=[a]": "found ['a'] (list), expected str or null",
    "placement.qqq=1": "unknown key (keys of placement: actor_devices, rollout_devices, ref_devices",
    "placement=3": "found 3, expected a section with the keys actor_devices, rollout_devices, ref_devices",
    "data.train_files.a=1": "unknown key: data.train_files is a value (list[str]), not a section",
    "train_batch_size": "expected key=value, such as data.train_batch_size=64",
    "=3": "expected key=value",
    "trainer.seed=0x10": "found '0x10' (str), expected int >= 0",
    "trainer.seed=1:30": "found '1:30' (str), expected int >= 0",
    "trainer.seed=1e-3": "found 0.001, expected int >= 0",
    "data.train_files=[a": "the value is not valid YAML",
    "data.seed=${trainer.sed}": "did you mean trainer.seed?",
    "trainer.project_name=${oc.env:VERL_SURELY_NOT_SET}": "VERL_SURELY_NOT_SET",
    "algorithm.name=gsp": "there is no algorithm 'gsp': did you mean 'gspo'? known: analytic_passk, cispo, ",
    "algorithm.name=dpo": "'dpo' is not an algorithm of this command: run verl dpo --online",
    # not supported
    "data.audio_key=sounds": "audio is not supported",
    f"{ARR}model.mtp.enable_train=true": "multi-token prediction is not supported",
    f"{ARR}model.lora.rank=8": "use strategy=fsdp with lora_rank, lora_alpha and target_modules of",
    "trainer.v1.trainer_mode=separate_async": "only on separate devices",
    "async_training.staleness_threshold=-1": "found -1, expected a number of at least 0",
    "async_training.trigger_parameter_sync_step=0": "found 0 updates between two weight syncs, expected at least 1",
    "trainer.async.max_staleness=1001": "found 1001, expected int >= 0 and <= 1000",  # one metric for each
    "async_training.require_batches=3": "set data.train_batch_size=768 (found 1024)",
    "async_training.staleness=1": "use the keys of trainer.async",
    "trainer.async.max_staleness=-1": "found -1, expected int >= 0",
    "actor_rollout_ref.hybrid_engine=false": "no separate devices",
    f"{ACTOR}optim.optimizer=SGD": "AdamW8bit",
    f"{ARR}ref.megatron.router_replay.mode=R3": "actor.router_replay.mode is for all roles",
    f"{ACTOR}megatron.tensor_model_paralel_size=2": "did you mean",
    f"{ROLLOUT}mtp.enable=true": "remove the key",
    f"{ROLLOUT}over_sample_rate=0.5": "0.5 is not supported: a rollout waits for every response; remove the key",
    "data.validation_shuffle=true": (
        "true is not supported: the order of validation rows does not change metrics; use false (accepted: false)"
    ),
    "algorithm.use_pf_ppo=true": (
        "true is not supported: resampling of the batch by reward is not supported; use false (accepted: false)"
    ),
    "reward.sandbox_fusion.url=http://x": (
        "'http://x' (str) is not supported: generated code does not run in a service; use null (accepted: null)"
    ),
    # in the wrong section
    "data.reward_function=a": "did you mean reward_function?",
    "foo.use_rm=true": "unknown key",
    "+algorithm.filter_group.enable=true": "unknown key; did you mean algorithm.filter_groups",
    "+data.custom_cl.path=false": "unknown key; did you mean data.custom_cls",
    "+trainer.resume_mod=false": "unknown key; did you mean trainer.resume_mode",
    "+trainer.my_flag=true": "unknown key (",
    "trainer.my_flag=false": "unknown key (",
    "atropos.port=8000": "agents of other programs are served by rollout.mode=server",
    "model.imports=[a]": "unknown key",
    "data.suffix=a": "custom function or class as data.custom_cls.kwargs.suffix=...",
    "algorithm.my_temperature=1": "as algorithm.adv_kwargs.my_temperature=...",
    f"{ACTOR}policy_loss.tau_x=1": f"as {ACTOR}policy_loss.loss_kwargs.tau_x=...",
    "optim.name=muon": f"did you mean {ACTOR}optim.name",
    # no suggestion is better than a wrong one
    **dict.fromkeys(("my_flag=1", "foo.enable=1", "trainer.foo=1", "trainer.gpus=1", "foo.lrx=1"), "unknown key ("),
    "actor.optim.foreach=true": f"unknown key (keys of {ACTOR}optim: optimizer, lr, betas, ",
    "reward.reward_model.rollout.dtype=float16": "'float16' (str) is not supported: use reward.reward_model.fsdp.dtype",
}

#: settings that are refused together, with one problem
COMBINATIONS = {
    f"data.train_batch_size=100 {ACTOR}ppo_mini_batch_size=64": (
        f"100 is not a multiple of {ACTOR}ppo_mini_batch_size=64: use a mini-batch of 50 or 100, or a batch of 64 or "
        "128"
    ),
    "data.train_batch_size=100000007": "256: use a mini-batch of 1, or a batch of 100000000 or 100000256",
    "data.train_batch_size=99999999999999999999": "use a mini-batch of 123 or 271",
    "data.train_batch_size=64 critic.ppo_mini_batch_size=48": "critic.ppo_mini_batch_size=48: use a mini-batch",
    f"{ROLLOUT}temperature=0": "found 0.0, expected float >= 1e-05",
    f"{ROLLOUT}temperature=1e-9": "found 1e-09, expected float >= 1e-05",
    f"{ROLLOUT}val_kwargs.do_sample=true {ROLLOUT}val_kwargs.temperature=1e-9": "of at least 1e-05",
    f"{ROLLOUT}val_kwargs.do_sample=true": "found 0.0 with do_sample=true",
    f"{ROLLOUT}prompt_length=9": "found 9, but data.max_prompt_length is 512: set only data.max_prompt_length",
    f"{ROLLOUT}top_k=0": "expected int >= 1, or -1 for all tokens",
    f"{SEPARATE} {ROLLOUT}weight_sync=replica": "the rollout has separate devices: use auto or collective",
    "algorithm.use_kl_in_reward=true use_reference_policy=false": "algorithm.use_kl_in_reward=true needs the ref",
    "trainer.resume_mode=resume_path": "set it to a global_step_N folder",
    f"{ACTOR}policy_loss.loss_mode=dro": "the loss dro needs it",
    "reward_function=a reward.custom_reward_function.path=b.py": "keep one",
    "reward.reward_manager.source=importlib": "must be set if, and only if",
    "data.custom_cls.path=x.py": "set both or neither",
    f"{FOUR} {SHARDED}=3": "4 ranks are not divisible by the model-parallel size 3",
    f"{FOUR} {SHARDED}=2 {TENSOR_PARALLEL}=4": "by the model-parallel size 8",
    f"{FOUR} {ARR}ref.fsdp_config.tensor_parallel_size=3": (
        "4 ranks are not divisible by the model-parallel size 3 (tensor_parallel_size=3)"
    ),
    f"{FSDP_SIZE}=0": f"{FSDP_SIZE} (override '{FSDP_SIZE}=0'): found 0, expected int >= 1, or -1 for all ranks",
    f"{FOUR} {FSDP_SIZE}=3": "=3'): 3 does not divide the 4 ranks that FSDP shards over",
    f"{FOUR} {FSDP_SIZE}=4 {TENSOR_PARALLEL}=2": "=4'): 4 does not divide the 2 ranks",
    f"{TWO_RANKS} {ACTOR}ppo_mini_batch_size=3": "3 responses are not divisible by 2 ranks: use 2 or 4 prompts",
    "trainer.worker_env.MASTER_ADDR=other": "is set for each worker from its rank",
    "trainer.worker_env.KEY='<not saved>'": "its value was not saved with the configuration",
    "trainer.experiment_name=../../elsewhere": "expected a name or a relative path without '..'",
    "trainer.project_name=/elsewhere": "found '/elsewhere', expected a name or a relative path",
    # the keys of Megatron and of its optimizer
    f"{ACTOR}optim.lr_decay_style=WSD": "expected one of constant, cosine",
    f"{ACTOR}optim.min_lr=1": f"expected a number from 0 to {ACTOR}optim.lr=1e-06",
    f"{MEGATRON}offload.param.target=disk": "expected none or cpu",
    f"{TRANSFORMER}context_parallel_size=2 {MEGATRON}context_parallel_size=4": "set twice with different values",
    f"{TRANSFORMER}attention_dropout=0.1": "dropout is not supported",
    f"{TRANSFORMER}hidden_dropout=0.1": "dropout is not supported",
    f"{TRANSFORMER}normalization=LayerNorm": "use model.path",
    f"{TRANSFORMER}fp8=hybrid": "training in fp8 is not supported",
    f"{TRANSFORMER}moe_router_load_balancing_type=seq_aux_loss": "use none or aux_loss",
    f"{TRANSFORMER}moe_expert_capacity_factor=1.0": "not supported by strategy=megatron",
    f"{TRANSFORMER}moe_router_topk=4": "use model.path",
    f"{ACTOR}router_replay.mode=R3 {ROLLOUT}enable_rollout_routing_replay=true {ROLLOUT}name=hf": (
        "rollout.name=hf does not report the experts that it chooses: use rollout.name=native, or"
    ),
    f"{MEGATRON}router_replay.mode=R3": "enable_rollout_routing_replay=true, or use R2",
    f"model_engine=megatron {ACTOR}optim.optimizer=AdamW8bit": "AdamW8bit is not supported with strategy=megatron",
    f"{FOUR} {TENSOR_PARALLEL}=2 {ACTOR}optim.optimizer=AdamW8bit": "or tensor_parallel_size > 1: use AdamW",
    f"model_engine=megatron {MODEL}lora_rank=8": "does not support LoRA adapters: use strategy=fsdp",
    f"model_engine=megatron {MEGATRON}dtype=float16": "use bf16 or fp32",
    f"model_engine=megatron +{ACTOR}optim.override_optimizer_config.weight_decay=1": (
        "are not supported by strategy=megatron"
    ),
    "critic.strategy=megatron critic.megatron.dtype=float16": "critic.megatron.dtype (",
    f"model_engine=megatron {MODEL}freeze_vision_tower=true": f"'{MODEL}{TOWER}",
    "critic.strategy=megatron critic.model.freeze_vision_tower=true": f"'critic.model.{TOWER}",
    # other keys of public verl
    f"+{ACTOR}tis_imp_ratio_cap=True": "found True, expected a number",
    f"{ROLLOUT}quantization=fp8": "the engine generates with the weights that training pushes",
    f"{ROLLOUT}single_turn_response_length=4096": "all turns share data.max_response_length",
    "data.curriculum.curriculum_class=RandomSampler": "use data.custom_cls",
    "+algorithm.rollout_correction.rollout_token_veto_threshold=1e-4": "use rollout_rs",
    f"+{ACTOR}policy_loss.cppo.cppo_w_min=0.8": "cppo is not supported",
    f"{MODEL}lora_rank=8 {MODEL}lora_alpha=0": "expected float > 0 with lora_rank=8",
}

OF_SFT = {
    "learning_rate=1": "did you mean optim.lr?",
    "trainer.resume_mode=resume_path": "set it to a global_step_N folder",
    "data.multiturn.enable=1": "found 1, expected bool",
    "model.fsdp_config.cpu_offload=yes_please": "found 'yes_please', expected bool",
    "trainer.save_freq=after_every_epoch": "expected int >= -1 or one of after_each_epoch",
    "trainer.test_freq=-2": "found -2, expected int >= -1 or one of after_each_epoch",
    "engine.fsdp_size=3 trainer.n_gpus_per_node=4": "engine.fsdp_size (override 'engine.fsdp_size=3'): 3 does not",
    "data.train_batch_size=6 trainer.n_gpus_per_node=4": "6 samples are not divisible by 4 ranks: use 4 or 8",
    "engine.tensor_parallel_size=3 trainer.n_gpus_per_node=4": "by the model-parallel size 3 (tensor_parallel_size=3)",
    "engine.strategy=megatron model.freeze_vision_tower=true": f"'model.{TOWER}",
    "engine.strategy=megatron model.lora_rank=8": "does not support LoRA",
    "engine=megatron engine.qat.enable=true": "engine.qat.enable=true'): true is not supported",
}


def test_unknown_keys_name_the_nearest():
    found = problems(*(f"{key}=1" for key in UNKNOWN_KEYS))
    assert sorted(found) == sorted(
        f"{wrong} (override '{wrong}=1'): unknown key; did you mean {nearest}?"
        for wrong, nearest in UNKNOWN_KEYS.items()
    )


@pytest.mark.parametrize("override", VALUES)
def test_values(override):
    (problem,) = problems(override)
    assert problem.startswith(override.split("=")[0].lstrip("+"))
    assert VALUES[override] in problem


@pytest.mark.parametrize("line", COMBINATIONS)
def test_combinations(line):
    (problem,) = problems(*shlex.split(line))
    assert COMBINATIONS[line] in problem


@pytest.mark.parametrize("line", OF_SFT)
def test_combinations_of_sft(line):
    (problem,) = problems(*shlex.split(line), schema=SFTConfig)
    assert OF_SFT[line] in problem


def test_one_process_is_not_sharded(caplog):
    for overrides, count in ([f"{FSDP_SIZE}=8"], 1), ([FOUR, f"{FSDP_SIZE}=2"], 0), ([f"{FSDP_SIZE}=1"], 0):
        caplog.clear()
        load_config(overrides=overrides)
        assert [f"{FSDP_SIZE}=8 has no effect with one process" in text for text in caplog.messages] == [True] * count


@pytest.mark.parametrize("value", ["{a:1,b:2}", "{X: {a:1}}"])
def test_a_missing_space_after_a_colon_is_named_in_a_file(value, tmp_path):
    (tmp_path / "c.yaml").write_text(f"reward: {{reward_kwargs: {value}}}")
    (problem,) = problems(path=tmp_path / "c.yaml")
    assert "is null: write a space after the colon" in problem


def test_combinations_that_are_valid():
    for size in (SHARDED, TENSOR_PARALLEL):
        load_config(overrides=[*TWO_RANKS.split(), f"{ACTOR}ppo_mini_batch_size=3", f"{size}=2"])
    for size in (-1, 1, 2, 4):
        load_config(overrides=[FOUR, f"{FSDP_SIZE}={size}"])
    load_config(overrides=[f"{FSDP_SIZE}=8"])  # one device is not sharded


# ------------------------------------------------------------------------------------------------ how they are reported


def test_all_problems_come_at_once(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  train_batch_sise: 3\n  truncation: cut\nreward_function: [a, {b: 1}]\n")
    found = problems("x", "trainer.nnodes=x", "trainer.v1.sampler.sync_refill_failed_groups=true", path=file)
    assert [problem.split(":")[0] for problem in found] == [
        "x (override 'x')",
        "data.train_batch_sise (run.yaml line 2)",
        "trainer.v1.sampler.sync_refill_failed_groups (override 'trainer.v1.sampler.sync_refill_failed_groups=true')",
        "data.truncation (run.yaml line 3)",
        "reward_function (run.yaml line 4, alias of reward.reward_function)",
        "trainer.nnodes (override 'trainer.nnodes=x')",
    ]


def test_the_message_has_no_traceback_of_pydantic():
    with pytest.raises(ConfigError) as error:
        load_config(overrides=["data.seed=x"])
    assert str(error.value).splitlines() == [
        "1 problem in the configuration:",
        "  1. data.seed (override 'data.seed=x'): found 'x' (str), expected int >= 0 and <= 4611686018427387904",
    ]
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None


# ------------------------------------------------------------------------------------------------- checks of the caller


def test_inputs_are_set_and_exist(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_config(overrides=["data.val_files=[nowhere.parquet,a.txt]"], extra_checks=[check_inputs])
    assert [problem.key for problem in error.value.problems] == [
        "actor_rollout_ref.model.path",
        "data.train_files",
        "data.val_files",
        "data.val_files",
    ]
    text = str(error.value)
    assert "missing: set it to a model folder or a Hugging Face Hub id" in text
    assert "there is no file 'nowhere.parquet'" in text
    assert "'a.txt': expected a file (.parquet, .jsonl, .json, .csv)" in text
    data = tmp_path / "a.jsonl"
    data.write_text("{}\n")
    good = [f"data.train_files={data}", f"actor_rollout_ref.model.path={tmp_path}"]
    assert problems(*good, extra_checks=[check_inputs])[0].endswith("expected the folder of a Hugging Face model")
    for step in (9, 10):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    assert f"such as '{tmp_path}/global_step_10/actor/hugg" in problems(*good, extra_checks=[check_inputs])[0]
    (tmp_path / "config.json").write_text("{}")
    load_config(overrides=good, extra_checks=[check_inputs])
    load_config(overrides=[good[0], "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"], extra_checks=[check_inputs])
    (message,) = problems(good[0], "actor_rollout_ref.model.path=./nowhere", extra_checks=[check_inputs])
    assert "actor_rollout_ref.model.path" in message and "there is no folder './nowhere'" in message


@pytest.mark.parametrize(
    ("schema", "keys"),
    [(SFTConfig, ["model.path", "data.train_files"]), (GenerationConfig, ["model.path", "data.path"])],
)
def test_inputs_of_the_other_schemas(schema, keys):
    found = problems(schema=schema, extra_checks=[check_inputs])
    assert [problem.partition(":")[0] for problem in found] == keys


def test_the_critic_must_match_the_estimator():
    for enable, needed in [("null", True), ("true", True), ("false", False), ("null", False)]:
        assert list(check_critic(load_config(overrides=[f"critic.enable={enable}"]), needed)) == []
    (problem,) = check_critic(load_config(overrides=["use_critic=false"]), needed=True)
    assert "false, but algorithm.adv_estimator=gae reads values" in str(problem)
    assert "such as algorithm.adv_estimator=grpo with actor_rollout_ref.rollout.n=8" in str(problem)
    (problem,) = check_critic(load_config(overrides=["use_critic=true", "algorithm.adv_estimator=grpo"]), needed=False)
    assert "true, but algorithm.adv_estimator=grpo does not read values" in str(problem)


def test_names_of_registered_objects_are_keys():
    keys = [*fields_of(Config), *fields_of(SFTConfig)]
    assert [end for end in REGISTERED_KINDS if not any(f".{key}".endswith(f".{end}") for key in keys)] == []


@pytest.mark.parametrize("schema", [Config, SFTConfig, GenerationConfig, EvalConfig])
def test_conditions_of_settings_refer_to_keys(schema):
    """`requirements_of` fails for a condition whose key is neither in the section of a setting nor above it."""
    keys = fields_of(schema)
    for key, required in requirements_of(schema).items():
        for alternatives in required:
            assert alternatives and all(condition[0] in keys and condition[0] != key for condition in alternatives)


REGISTERED = {"rollout.name": ["hf", "native"], "strategy": ["fsdp"], "rollout.agent.default_agent_loop": ["single"]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ROLLOUT}name=nativ",
         f"{ROLLOUT}name: there is no rollout engine 'nativ': did you mean 'native'? known: hf, native. Custom ones "
         "are registered in a file of `imports`"),
        (f"{ROLLOUT}name=trtllm", f"{ROLLOUT}name: 'trtllm' is not supported yet: use hf or native"),
        (f"{ACTOR}strategy=vllm", f"{ACTOR}strategy: 'vllm' is a rollout engine, and this key selects the training"),
        (f"{ROLLOUT}agent.default_agent_loop=tool",
         f"{ROLLOUT}agent.default_agent_loop: there is no agent loop 'tool'"),
    ],
)  # fmt: skip
def test_engines_that_are_not_registered(override, message):
    config = load_config(overrides=[f"{ROLLOUT}agent.default_agent_loop=single", override])
    (problem,) = check_registered(config, REGISTERED)
    assert str(problem).startswith(message)
    end = next(end for end in REGISTERED if f".{problem.key}".endswith(f".{end}"))
    name = override.partition("=")[2]
    assert check_registered(config, REGISTERED | {end: [*REGISTERED[end], name]}) == []


def test_tools_that_no_loop_calls_are_noted(caplog):
    tools = "actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py"
    with caplog.at_level(logging.WARNING, "verl.config"):
        load_config(overrides=[tools])
    assert any("no tool is called" in text and "multi_turn.enable=true" in text for text in caplog.messages)
    caplog.clear()
    load_config(overrides=[tools, "actor_rollout_ref.rollout.multi_turn.enable=true"])
    assert not any("no tool is called" in text for text in caplog.messages)


LOCAL = ["./nothing", "../nothing", "/nothing", "a/b/c", "a/", "outputs/modle"]


@pytest.mark.parametrize("path", [*LOCAL, "gpt2", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_only_hub_ids_are_looked_up_on_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    config = load_config(overrides=[f"actor_rollout_ref.model.path={path}"])
    problems = [problem.message for problem in check_inputs(config) if problem.key == "actor_rollout_ref.model.path"]
    assert problems == ([f"there is no folder {path!r}"] if path in LOCAL else [])


@pytest.mark.parametrize("override", ["9" * 5000 + "=1", "data.train_files=" + "9" * 5000], ids=["key", "value"])
def test_numbers_of_5000_digits_are_one_problem(override):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert len(caught.value.problems) == 1


def test_a_chat_template_is_read_from_a_file(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    key = "actor_rollout_ref.model.custom_chat_template"
    config = load_config(overrides=[f"{key}={tmp_path / 'chat.jinja'}"])
    assert config.actor_rollout_ref.model.custom_chat_template == "{{ messages }}"
    (problem,) = problems(f"{key}={tmp_path / 'other.jinja'}")
    assert "other.jinja' (str) does not read `messages`" in problem and "a file *.jinja that exists" in problem
