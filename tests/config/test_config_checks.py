"""Values that are each allowed but not together; inputs; what is not built yet; the words for batches."""

import logging

import pytest

from verl.config import ConfigError, batch_words, check_available, check_critic, check_inputs, load_config
from verl.config.fields import leaves
from verl.config.schema.offline import GenerationConfig
from verl.config.schema.ppo import Config
from verl.config.schema.sft import SFTConfig
from verl.config.supported import BUILT, INSTEAD, NO_EFFECT, NOT_BUILT, matches

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def load(*overrides, **kwargs):
    return load_config(overrides=overrides, **kwargs)


def problem_of(*overrides, **kwargs):
    with pytest.raises(ConfigError) as error:
        load(*overrides, **kwargs)
    (problem,) = error.value.problems
    return str(problem)


def test_a_mini_batch_must_divide_the_batch():
    assert problem_of("data.train_batch_size=100", f"{ACTOR}ppo_mini_batch_size=64") == (
        "data.train_batch_size (override 'data.train_batch_size=100'): 100 is not a multiple of "
        "actor_rollout_ref.actor.ppo_mini_batch_size 64: use a mini-batch of 50 or 100, or a batch of 64 or 128"
    )


def test_a_mini_batch_larger_than_the_batch():
    message = problem_of("data.train_batch_size=7", f"{ACTOR}ppo_mini_batch_size=8")
    assert message.endswith("use a mini-batch of 7, or a batch of 8")


def test_the_mini_batch_of_the_critic_too():
    message = problem_of("data.train_batch_size=64", "critic.ppo_mini_batch_size=48")
    assert "critic.ppo_mini_batch_size 48: use a mini-batch of 32 or 64, or a batch of 48 or 96" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ROLLOUT}temperature=0"], "found 0.0, expected a number > 0"),
        ([f"{ROLLOUT}val_kwargs.do_sample=true"], "found 0.0 with do_sample true"),
        ([f"{ROLLOUT}val_kwargs.n=4"], "gives the same answer 4 times"),
        ([f"{ROLLOUT}prompt_length=9"], "found 9, but data.max_prompt_length is 512: set data.max_prompt_length alone"),
        (
            ["algorithm.use_kl_in_reward=true", "use_reference_policy=false"],
            "false, but algorithm.use_kl_in_reward is true and needs the reference",
        ),
        (["trainer.resume_mode=resume_path"], "name a global_step_N folder"),
        (["trainer.resume_from_path=x"], "use trainer.resume_mode=resume_path"),
        ([f"{ACTOR}policy_loss.loss_mode=dro"], "the loss dro needs it"),
        (["reward_function=a", "reward.custom_reward_function.path=b.py"], "keep one"),
        (["reward.reward_manager.source=importlib"], "goes together with"),
        (["data.custom_cls.path=x.py"], "give both or neither"),
    ],
)
def test_what_does_not_fit_together(overrides, message):
    assert message in problem_of(*overrides)


def test_kl_in_reward_and_in_loss_is_allowed_and_noted(caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        load("algorithm.use_kl_in_reward=true", f"{ACTOR}use_kl_loss=true")
    assert "the KL to the reference counts twice" in caplog.text


def test_inputs_are_named_and_there(tmp_path):
    with pytest.raises(ConfigError) as error:
        load("data.val_files=[nowhere.parquet,a.csv]", extra_checks=[check_inputs])
    assert [problem.key for problem in error.value.problems] == [
        "actor_rollout_ref.model.path",
        "data.train_files",
        "data.val_files",
        "data.val_files",
    ]
    text = str(error.value)
    assert "missing: give the folder or the HuggingFace id of the model" in text
    assert "there is no file 'nowhere.parquet'" in text
    assert "'a.csv': expected a .parquet, .json or .jsonl file" in text
    data = tmp_path / "a.jsonl"
    data.write_text("{}\n")
    good = [f"data.train_files={data}", f"actor_rollout_ref.model.path={tmp_path}"]
    assert "has no config.json" in problem_of(*good, extra_checks=[check_inputs])
    (tmp_path / "config.json").write_text("{}")
    load(*good, extra_checks=[check_inputs])
    load(good[0], "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B", extra_checks=[check_inputs])
    message = problem_of(good[0], "actor_rollout_ref.model.path=./nowhere", extra_checks=[check_inputs])
    assert "actor_rollout_ref.model.path" in message
    assert "there is no folder './nowhere'" in message


def test_the_switch_of_the_critic_must_fit_the_estimator():
    for enable, needed in [("null", True), ("true", True), ("false", False), ("null", False)]:
        assert list(check_critic(load(f"critic.enable={enable}"), needed)) == []
    (problem,) = check_critic(load("use_critic=false"), needed=True)
    assert "false, but algorithm.adv_estimator=gae reads values" in str(problem)
    (problem,) = check_critic(load("use_critic=true", "algorithm.adv_estimator=grpo"), needed=False)
    assert "true, but algorithm.adv_estimator=grpo reads no values" in str(problem)


@pytest.mark.parametrize(
    ("tree", "keys"), [(SFTConfig, ["model.path", "data.train_files"]), (GenerationConfig, ["model.path", "data.path"])]
)
def test_inputs_of_the_other_trees(tree, keys):
    with pytest.raises(ConfigError) as error:
        load(tree=tree, extra_checks=[check_inputs])
    assert [problem.key for problem in error.value.problems] == keys


def test_ranks_that_share_sequences_must_divide_the_ranks_and_share_rows():
    sharing = f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size"
    assert "3 ranks are to share the same rows" in problem_of(f"{sharing}=3", "trainer.n_gpus_per_node=4")
    both = (f"{sharing}=2", f"{ACTOR}fsdp_config.tensor_parallel_size=4", "trainer.n_gpus_per_node=4")
    assert "8 ranks are to share the same rows" in problem_of(*both)
    reference = "actor_rollout_ref.ref.fsdp_config.tensor_parallel_size=3"
    assert "which does not divide the 4 ranks" in problem_of(reference, "trainer.n_gpus_per_node=4")
    odd = ("data.train_batch_size=6", f"{ACTOR}ppo_mini_batch_size=3", "trainer.n_gpus_per_node=2")
    even = "critic.ppo_mini_batch_size=6"
    assert "3 responses, which do not divide over 2 ranks" in problem_of(*odd, even)
    load(*odd, even, f"{sharing}=2")
    load(*odd, even, f"{ACTOR}fsdp_config.tensor_parallel_size=2")


def test_variables_of_the_workers_are_text_and_not_those_of_their_place():
    config = load("trainer.worker_env.NCCL_IB_DISABLE=1", "trainer.worker_env.NCCL_SOCKET_IFNAME=^lo,docker")
    assert config.trainer.worker_env == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "^lo,docker"}
    assert "is set for each worker by its place" in problem_of("trainer.worker_env.MASTER_ADDR=other")


def test_resuming_a_fine_tuning():
    assert "trainer.resume_mode=resume_path" in problem_of("trainer.resume_from_path=x", tree=SFTConfig)


def test_what_is_not_built_is_refused_by_name():
    config = load(f"{ROLLOUT}name=vllm", f"{ROLLOUT}tensor_model_parallel_size=2", "algorithm.use_pf_ppo=true")
    built = {"rollout.name": {"hf", "native"}, "tensor_model_parallel_size": {1}}
    with pytest.raises(ConfigError) as error:
        check_available(config, built)
    assert [str(problem) for problem in error.value.problems] == [
        "actor_rollout_ref.rollout.name: 'vllm' (text) is not built yet: use hf, native",
        "actor_rollout_ref.rollout.tensor_model_parallel_size: 2 is not built yet: "
        + INSTEAD["tensor_model_parallel_size"],
        "algorithm.use_pf_ppo: true is not built yet: " + NOT_BUILT["algorithm.use_pf_ppo"],
    ]
    check_available(load())
    check_available(load(tree=SFTConfig))


def test_every_row_of_what_is_built_speaks_of_a_key():
    keys = [*leaves(Config), *leaves(SFTConfig)]
    ends = [*BUILT, *NOT_BUILT, *(end for (choice, _), ends in NO_EFFECT.items() for end in (choice, *ends))]
    for end in ends:
        assert any(matches(key, end) for key in keys), end


def test_settings_of_another_engine_are_named_in_the_log(caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        check_available(load(f"{ROLLOUT}name=hf", f"{ROLLOUT}gpu_memory_utilization=0.4"))
    assert "actor_rollout_ref.rollout.gpu_memory_utilization: 0.4 changes nothing with rollout.name: hf" in caplog.text


BATCH = [
    "data.train_batch_size=64",
    f"{ROLLOUT}n=8",
    f"{ACTOR}ppo_mini_batch_size=32",
    f"{ACTOR}ppo_micro_batch_size_per_gpu=32",
]


def test_the_words_for_batches():
    words = (
        "64 prompts x 8 samples = 512 responses a step; 2 updates of 256 responses; micro-batches of 32 (8 per update)"
    )
    assert batch_words(load(*BATCH)) == words


def test_the_words_for_batches_on_several_ranks():
    assert batch_words(load(*BATCH), world_size=4) == (
        "64 prompts x 8 samples = 512 responses a step; 128 on each of 4 ranks; "
        "2 updates of 256 responses; micro-batches of 32 per rank (2 per update)"
    )
    with pytest.raises(ValueError, match="512 responses, which do not divide by 3 ranks"):
        batch_words(load(*BATCH), world_size=3)


def test_the_words_for_epochs_tokens_and_a_critic_that_differs():
    # 2 passes over 64 prompts in mini-batches of 32: 4 updates. 256 = 8 x 30 + 16.
    config = load(
        *BATCH, f"{ACTOR}ppo_epochs=2", f"{ACTOR}ppo_micro_batch_size_per_gpu=30", "critic.use_dynamic_bsz=true"
    )
    assert batch_words(config) == (
        "64 prompts x 8 samples = 512 responses a step; "
        "4 updates of 256 responses (2 passes); micro-batches of 30 (9 per update, the last of 16); "
        "the critic: 4 updates of 256 responses (2 passes); micro-batches as memory allows"
    )


def test_no_words_for_a_critic_that_is_not_there():
    config = load(*BATCH, "critic.use_dynamic_bsz=true")
    assert "critic" in batch_words(config)
    assert "critic" not in batch_words(config, critic=False)


def test_a_micro_batch_is_never_larger_than_its_mini_batch():
    words = batch_words(load("data.train_batch_size=4", f"{ACTOR}ppo_micro_batch_size_per_gpu=64"))
    assert (
        words == "4 prompts x 1 sample = 4 responses a step; 1 update of 4 responses; micro-batches of 4 (1 per update)"
    )
