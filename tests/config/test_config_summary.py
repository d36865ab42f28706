"""The batch summary, warnings, and variables of the workers."""

import logging

import pytest

from verl.config import batch_summary, load_config, settings_without_effect
from verl.config.describe import requirements_of
from verl.config.schema import Config
from verl.config.schema.model import EngineConfig
from verl.config.schema.offline import GenerationConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def load(*overrides):
    return load_config(overrides=overrides)


def test_kl_in_reward_and_in_loss_is_valid_and_noted(caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        load("algorithm.use_kl_in_reward=true", f"{ACTOR}use_kl_loss=true")
    assert "the KL to the reference is applied twice" in caplog.text


def test_a_setting_that_the_engine_does_not_have_is_without_effect():
    assert settings_without_effect(load(f"{ROLLOUT}name=hf", f"{ROLLOUT}gpu_memory_utilization=0.4")) == [
        f"{ROLLOUT}gpu_memory_utilization: 0.4 has no effect with {ROLLOUT}name=hf"
    ]


def test_a_condition_holds_for_its_own_section_only():
    given = ["data.path=x", "rollout.temperature=0", "rollout.top_p=0.9"]
    assert settings_without_effect(load_config(overrides=given, schema=GenerationConfig)) == [
        "rollout.top_p: 0.9 has no effect with rollout.temperature=0.0"
    ]
    batches = [f"{ACTOR}use_dynamic_bsz=true", f"{ACTOR}ppo_micro_batch_size_per_gpu=2", "critic.use_dynamic_bsz=false"]
    batches += ["critic.ppo_micro_batch_size_per_gpu=4", "critic.ppo_max_token_len_per_gpu=99"]
    assert settings_without_effect(load(*batches)) == [
        f"{ACTOR}ppo_micro_batch_size_per_gpu: 2 has no effect with {ACTOR}use_dynamic_bsz=true",
        "critic.ppo_max_token_len_per_gpu: 99 has no effect with critic.ppo_micro_batch_size_per_gpu=4 and "
        "critic.use_dynamic_bsz=false",
    ]


def test_all_settings_of_the_engine_that_is_not_selected_are_without_effect():
    key = f"{ACTOR}fsdp_config.expert_parallel_size"
    assert settings_without_effect(load(f"{ACTOR}strategy=megatron", f"{key}=2")) == [
        f"{key}: 2 has no effect with {ACTOR}strategy=megatron"
    ]
    required = requirements_of(Config)
    for name in EngineConfig.model_fields:
        assert required[f"{ACTOR}fsdp_config.{name}"][0][0][0] == f"{ACTOR}strategy"


def test_settings_of_turns_have_an_effect_for_rows_with_an_agent():
    (note,) = settings_without_effect(load_config(overrides=[f"{ROLLOUT}multi_turn.max_assistant_turns=3"]))
    assert note.endswith("agent.default_agent_loop=single_turn_agent, except for rows with the column agent_name")


def test_environment_variables_of_the_workers_are_strings():
    config = load("trainer.worker_env.NCCL_IB_DISABLE=1", "trainer.worker_env.NCCL_SOCKET_IFNAME=^lo,docker")
    assert config.trainer.worker_env == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "^lo,docker"}


BATCH = ["data.train_batch_size=64", f"{ROLLOUT}n=8", f"{ACTOR}ppo_mini_batch_size=32"]
BATCH += [f"{ACTOR}ppo_micro_batch_size_per_gpu=32"]


STEP = "64 prompts x 8 samples = 512 responses per step; "
TOKENS = f"{ACTOR}ppo_epochs=2 {ACTOR}ppo_micro_batch_size_per_gpu=30 critic.use_dynamic_bsz=true"
SUMMARIES = [
    ("", {}, STEP + "2 updates of 256 responses; micro-batches of 32 (8 per update)"),
    (  # 2 epochs over 64 prompts in mini-batches of 32: 4 updates. 256 = 8 x 30 + 16.
        TOKENS,
        {},
        STEP + "4 updates of 256 responses (2 epochs); micro-batches of 30 (9 per update, the last of 16); "
        "critic: 4 updates of 256 responses (2 epochs); micro-batches sized by free memory",
    ),
    (TOKENS, {"critic": False},
     STEP + "4 updates of 256 responses (2 epochs); micro-batches of 30 (9 per update, the last of 16)"),
    (  # a micro-batch is never larger than its mini-batch
        f"data.train_batch_size=4 {ACTOR}ppo_mini_batch_size=4 {ROLLOUT}n=1 {ACTOR}ppo_micro_batch_size_per_gpu=64",
        {},
        "4 prompts x 1 sample = 4 responses per step; 1 update of 4 responses; micro-batches of 4 (1 per update)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "options", "expected"), SUMMARIES)
def test_the_summary_of_a_batch(changes, options, expected):
    assert batch_summary(load(*BATCH, *changes.split()), **options) == expected
