"""Keys of public verl: those used most, every key of its default configuration, and those not supported here."""

import logging

import pytest
import yaml

from verl.config import ConfigError, load_config, settings_without_effect, to_flat_dict
from verl.config.fields import fields_of, unflatten
from verl.config.public.aliases import RL
from verl.config.public.upstream import ignored_key, upstream_defaults, upstream_key
from verl.config.schema import Config, GenerationConfig, SFTConfig

UPSTREAM = upstream_defaults()


def test_every_upstream_key_is_a_field_an_alias_or_listed_as_unsupported():
    fields, missing = fields_of(Config), []
    mappings = [key for key, found in fields.items() if found.is_mapping]
    for key in UPSTREAM:
        meant = RL.resolve(key)
        below = any(meant.startswith(section + ".") for section in mappings)
        if not (meant in fields or below or key in RL.computed or upstream_key(meant, "ppo")):
            missing.append(key)
    assert len(UPSTREAM) > 700
    assert missing == []


def test_no_field_is_listed_as_unsupported():
    assert [key for key in fields_of(Config) if upstream_key(key, "ppo")] == []
    assert [key for key in fields_of(SFTConfig) if upstream_key(key, "sft")] == []


ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
FSDP = (f"{ACTOR}fsdp_config.", "actor_rollout_ref.ref.fsdp_config.", "critic.fsdp.")
OURS = {
    # null: the published value of the chosen loss
    *(f"{ACTOR}{name}" for name in ("clip_ratio", "clip_ratio_high", "clip_ratio_low", "loss_agg_mode")),
    *(f"{ACTOR}policy_loss.ppo_kl_coef", "critic.loss_agg_mode"),
    # auto: bf16 on a GPU
    *(f"{section}{name}" for section in FSDP for name in ("dtype", "model_dtype")),
    *(f"{role}.megatron.dtype" for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")),
    f"{ROLLOUT}dtype",
    # null: 16384 where they fit
    *(f"{ACTOR}ppo_max_token_len_per_gpu", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"),
    f"{ROLLOUT}log_prob_max_token_len_per_gpu",
    *("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    # auto: where memory asks for it
    *(f"{model}.enable_gradient_checkpointing" for model in ("actor_rollout_ref.model", "critic.model")),
    *("actor_rollout_ref.model.path", "critic.model.path", "data.train_files", "data.val_files"),
    f"{ROLLOUT}n_gpus_per_node",  # null: trainer.n_gpus_per_node
    "actor_rollout_ref.nccl_timeout",  # null: the controller ends what hangs, and shows where
    *(f"{ROLLOUT}max_num_seqs", f"{ROLLOUT}tensor_model_parallel_size"),
    "distillation.teacher_models",  # none, instead of one without a model
    "data.dataloader_num_workers",  # null: threads for images only
    *("reward.reward_manager.module.name", "trainer.device", "trainer.logger", "trainer.n_gpus_per_node"),
    *("trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir"),  # from data and algorithm
}


def test_defaults_are_upstreams_except_these():
    ours, theirs = to_flat_dict(load_config()), to_flat_dict(load_config(base=UPSTREAM))
    same_meaning = {"ray_kwargs.ray_init"}
    assert {key for key in ours if ours[key] != theirs[key]} - same_meaning == OURS


@pytest.mark.parametrize("n", [1, 16])
def test_a_saved_configuration_takes_overrides(n):
    """`critic.rollout_n: ${actor_rollout_ref.rollout.n}` and its siblings refer to their own field."""
    config = load_config(UPSTREAM, [f"actor_rollout_ref.rollout.n={n}"])
    assert config.actor_rollout_ref.rollout.n == n


def test_a_reference_to_a_section_is_its_values(tmp_path):
    """As the saved Megatron configurations have it for the reference policy."""
    (tmp_path / "saved.yaml").write_text("""
actor_rollout_ref:
  actor:
    strategy: megatron
    megatron:
      override_transformer_config: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 2}
  ref:
    strategy: megatron
    megatron:
      override_transformer_config: '${oc.select:actor_rollout_ref.actor.megatron.override_transformer_config,{}}'
critic:
  strategy: megatron
  nccl_timeout: 600
  optim: {use_precision_aware_optimizer: false, main_params_dtype: fp32, exp_avg_dtype: fp32}
""")
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers"
    for overrides, layers in (([], 2), ([f"{key}=3"], 3)):
        reference = load_config(tmp_path / "saved.yaml", overrides).actor_rollout_ref.ref.megatron
        settings = reference.override_transformer_config
        assert (settings.recompute_granularity, settings.recompute_num_layers) == ("full", layers)


EARLIER_KEYS = {
    "trainer.remove_previous_ckpt_in_save=true": ("trainer.max_actor_ckpt_to_keep", 1),
    "trainer.remove_previous_ckpt_in_save=false": ("trainer.max_actor_ckpt_to_keep", None),
    "trainer.test_freq=False": ("trainer.test_freq", -1),
    "trainer.save_freq=False": ("trainer.save_freq", -1),
    "reward_model.param_offload=true": ("reward.reward_model.fsdp.param_offload", True),
    "actor_rollout_ref.ref.param_offload=true": ("actor_rollout_ref.ref.fsdp_config.param_offload", True),
    "actor_rollout_ref.rollout.multi_turn.max_turns=3": ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", 3),
    "critic.checkpoint.contents=[model]": ("critic.checkpoint.save_contents", ["model"]),
    "model.reward_function=gsm8k": ("reward.reward_function", "gsm8k"),
    "ray_init.num_cpus=4": ("ray_kwargs.ray_init", {"num_cpus": 4}),
    "actor_rollout_ref.rollout.use_fire_sampling=False": ("actor_rollout_ref.rollout.n", 1),
    "actor_rollout_ref.rollout.multi_turn.completion_callback=null": ("actor_rollout_ref.rollout.n", 1),
    "actor_rollout_ref.actor.checkpoint.mbridge_config={}": ("actor_rollout_ref.rollout.n", 1),
    "reward_model.model.fsdp_config.min_num_params=0": ("reward.reward_model.enable", False),
    "trainer.default_hdfs_dir=hdfs://x": ("trainer.default_local_dir", None),
}


@pytest.mark.parametrize("override", EARLIER_KEYS)
def test_keys_of_older_releases(override):
    key, value = EARLIER_KEYS[override]
    loaded = to_flat_dict(load_config(overrides=[override]))[key]
    assert loaded == value or key == "trainer.default_local_dir"


OF_RECIPES = {
    "trainer.spo.enable=true": "single-stream policy optimization is not supported",
    "trainer.debug=true": "use trainer.log_level=debug",
    "trainer.gen_cache.use_gen_cache=true": "replaying cached responses is not supported",
    "+teacher.temperature=0.5": "use distillation.teacher_models.NAME.server_url",
    "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.b.C": "register an agent loop of your own",
    "+actor_rollout_ref.actor.megatron.override_transformer_config.mtp_num_layers=1": "multi-token prediction",
}


@pytest.mark.parametrize("override", OF_RECIPES)
def test_a_feature_of_a_recipe_is_refused_by_name(override):
    with pytest.raises(ConfigError) as error:
        load_config(overrides=["trainer.device=auto", override])
    (problem,) = error.value.problems
    assert problem.key == override.lstrip("+").partition("=")[0] and OF_RECIPES[override] in problem.message


def test_generation_with_the_sections_of_training():
    """As the scripts of main_generation_server write it."""
    policy, rollout = "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
    keys = ["data.train_files=gsm8k.parquet", "+data.output_path=o.parquet", f"{policy}path=org/model", f"{rollout}n=3"]
    keys += [
        f"{rollout}temperature=0.5",
        f"{rollout}top_k=50",
        f"{rollout}response_length=1024",
        f"{rollout}name=native",
    ]
    config = load_config(overrides=[*keys, f"{rollout}prompt_length=2048"], schema=GenerationConfig)
    assert (config.data.path, config.data.n_samples, config.model.path) == (["gsm8k.parquet"], 3, "org/model")
    assert (config.rollout.temperature, config.rollout.top_k, config.rollout.response_length) == (0.5, 50, 1024)


def test_one_frequency_of_validation_under_two_names():
    """Scripts of the fully asynchronous trainer set both; validation is every 5 weight syncs, of 4 steps each."""
    synced = ["async_training.trigger_parameter_sync_step=4", "rollout.test_freq=5", "placement=auto"]
    synced += ["trainer.n_gpus_per_node=2"]
    assert load_config(overrides=[*synced, "trainer.test_freq=5"]).trainer.test_freq == 20
    with pytest.raises(ConfigError, match="set twice with different values"):
        load_config(overrides=[*synced, "trainer.test_freq=7"])


def test_no_processes_is_one_problem():
    """A script that counts GPUs on a host without any."""
    overrides = ["trainer.n_gpus_per_node=0", "actor_rollout_ref.rollout.log_prob_micro_batch_size=8"]
    with pytest.raises(ConfigError) as error:
        load_config(overrides=overrides)
    assert [problem.key for problem in error.value.problems] == ["trainer.n_gpus_per_node"]


def test_the_complete_configuration_of_upstream_loads_from_a_file(tmp_path, caplog):
    """With the type annotation `_target_` in every section, and interpolations unresolved."""
    nested = unflatten(UPSTREAM)
    sections = {key.rpartition(".")[0] for key in UPSTREAM if "." in key}
    for section in sorted(sections):
        inner = nested
        for name in section.split("."):
            inner = inner[name]
            if not isinstance(inner, dict):
                break  # a section that upstream fills by an interpolation, such as rollout.mtp
        else:
            inner["_target_"] = "some.package.Config"
    file = tmp_path / "full.yaml"
    file.write_text(yaml.safe_dump(nested, sort_keys=False))
    assert len(UPSTREAM) > 900 and file.read_text().count("_target_") > 60
    with caplog.at_level(logging.WARNING, "verl.config"):
        config = load_config(file)
    notes = [note for note in caplog.messages if "ignored" in note]
    assert len(notes) == 1 and notes[0].startswith("ignored: ") and "_target_ (" in notes[0]
    assert "without effect here: _target_" in notes[0]  # nothing else is ignored: all other values are defaults
    assert config.critic.optim.lr == 1e-5


OLDER = """
actor_rollout_ref:
  model: {external_lib: null}
  ref: {model: null}
  rollout: {load_format: dummy_dtensor, skip_rollout: false, multi_turn: {interaction_config_path: null}}
critic:
  optim: {min_lr_ratio: null, warmup_style: constant}
  model:
    external_lib: "${oc.select:actor_rollout_ref.model.external_lib,null}"
    tokenizer_path: "${oc.select:actor_rollout_ref.model.path,'~/models/x'}"
    fsdp_config: {wrap_policy: {min_num_params: 0}, param_offload: true}
data: {sampler: {class_path: null, class_name: null}, datagen: {path: null, name: null}}
reward_model:
  enable: false
  strategy: fsdp
  model:
    input_tokenizer: "${actor_rollout_ref.model.path}"
    external_lib: "${actor_rollout_ref.model.external_lib}"
    use_shm: false
    fsdp_config: {_target_: a.B, wrap_policy: {min_num_params: 0}, param_offload: false, forward_prefetch: false}
  micro_batch_size: null
  max_length: null
  use_dynamic_bsz: "${critic.use_dynamic_bsz}"
  forward_max_token_len_per_gpu: "${critic.forward_max_token_len_per_gpu}"
  launch_reward_fn_async: false
  profiler: {tool_config: "${oc.select:actor_rollout_ref.actor.profiler.tool_config,null}"}
  ulysses_sequence_parallel_size: 1
algorithm: {filter_groups: {metric: null}}
trainer: {use_legacy_worker_impl: auto}
"""


def test_sections_of_older_releases_at_their_defaults(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text(OLDER)
    config = load_config(file)
    assert config.critic.fsdp.param_offload is True
    assert config.algorithm.filter_groups.metric == "reward"
    assert config.imports == []


IGNORED = """
    actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.disable_log_stats=false
    actor_rollout_ref.rollout.agent.num_workers=4 actor_rollout_ref.rollout.prometheus.enable=true
    actor_rollout_ref.rollout.trace.backend=mlflow actor_rollout_ref.rollout.data_parallel_size=2
    actor_rollout_ref.model.use_shm=true actor_rollout_ref.model.enable_activation_offload=true
    actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2
    actor_rollout_ref.actor.profiler.enable=true actor_rollout_ref.actor.megatron.use_mbridge=false
    actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params=1000
    actor_rollout_ref.actor.fsdp_config.forward_prefetch=true actor_rollout_ref.actor._target_=some.Config
    critic.model.use_shm=true data.filter_overlong_prompts_workers=64 global_profiler.tool=nsys
    global_profiler.steps=[1,2] reward.num_workers=32 reward.reward_model.rollout.name=vllm
    reward.reward_model.rollout.tensor_model_parallel_size=4 trainer.use_legacy_worker_impl=disable
    trainer.use_v1=false transfer_queue.enable=true hydra.run.dir=outputs/${now:%Y}
"""


def test_keys_without_effect_are_accepted_with_one_note(caplog):
    overrides = IGNORED.split()
    with caplog.at_level(logging.WARNING, "verl.config"):
        config = load_config(overrides=overrides)
    assert config == load_config()
    note, *reasoned = caplog.messages
    assert note.startswith("ignored: ") and " keys without effect here: actor_rollout_ref.rollout." in note
    assert sum(int(each.split()[1]) for each in caplog.messages) == len(overrides)
    assert all(each.count(": ") == 3 for each in reasoned)  # key and reason
    assert "global_profiler.tool, global_profiler.steps" in note


PROFILER = ["tool=torch", "enable=true", "all_ranks=true", "ranks=[0]"]


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (
            [f"critic.profiler.{key}" for key in PROFILER],  # more than three of a section are counted
            ["ignored: 4 keys without effect here: critic.profiler.* (4 keys)"],
        ),
        (
            ["data.use_shm=false", "global_profiler.save_path=outputs/profile", "trainer.use_v1=true"],
            [],
        ),  # the defaults
    ],
)
def test_the_note_on_ignored_keys(overrides, notes, caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        load_config(overrides=overrides)
    assert caplog.messages == notes


def test_every_ignored_key_has_a_reason():
    ignored = {key: found for key in UPSTREAM if (found := ignored_key(key, "ppo", has_field=False))}
    assert len(ignored) > 300
    assert all(len(found.instead) > 10 for found in ignored.values())


def test_what_upstream_accepts_and_results_do_not_depend_on(caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        config = load_config(
            overrides=["actor_rollout_ref.rollout.val_kwargs.n=4", "trainer.resume_from_path=/nowhere"]
        )
    assert "val_kwargs.n=4 with do_sample=false generates 4 equal responses per prompt" in caplog.text
    assert settings_without_effect(config) == [
        "trainer.resume_from_path: /nowhere has no effect with trainer.resume_mode=auto"
    ]


def test_false_is_not_zero():
    known = upstream_key("trainer.v1.sampler.sync_refill_failed_groups", "ppo")
    assert known.accepts(False)
    assert not known.accepts(0)


def test_sections_with_the_same_keys():
    assert upstream_key("engine.seed", "sft") == upstream_key("actor_rollout_ref.actor.fsdp_config.seed", "ppo")
    assert upstream_key("model.mtp.enable", "generation") == upstream_key("actor_rollout_ref.model.mtp.enable", "ppo")
    assert upstream_key("engine.seed", "evaluation") is None


FSDP1 = {
    "wrap_policy.min_num_params": (1000, None, ""),
    "wrap_policy.transformer_layer_cls_to_wrap": ("[LlamaDecoderLayer]", None, ""),
    "wrap_policy.disable": ("true", None, ""),
    "sharding_strategy": ("FULL_SHARD", "HYBRID_SHARD", "fsdp_size"),
    "mixed_precision.reduce_dtype": ("bf16", None, ""),
    "mixed_precision.buffer_dtype": ("float32", "bf16", "buffers keep"),
    "grad_offload": ("true", None, ""),
    "cpu_offload": ("false", "true", "offload_policy"),
    "use_orig_params": ("true", None, ""),
    "forward_prefetch": ("true", None, ""),
}


@pytest.mark.parametrize("section", ["actor_rollout_ref.actor.fsdp_config", "critic.fsdp"])
def test_keys_of_fsdp1_are_accepted_at_their_defaults_and_refused_otherwise(section):
    load_config(overrides=[f"{section}.{name}={accepted}" for name, (accepted, _, _) in FSDP1.items()])
    refused = {name: (value, advice) for name, (_, value, advice) in FSDP1.items() if value is not None}
    with pytest.raises(ConfigError) as error:
        load_config(overrides=[f"{section}.{name}={value}" for name, (value, _) in refused.items()])
    told = {problem.key: problem.message for problem in error.value.problems}
    assert told.keys() == {f"{section}.{name}" for name in refused}
    assert all(advice in told[f"{section}.{name}"] for name, (_, advice) in refused.items())
