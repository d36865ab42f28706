"""verl/recipe/dapo on the tiny model: its settings, its flow, and a run that was stopped and resumed."""

import shutil

import pytest

from tests.trainer.runs import metrics_of
from verl.recipe.dapo import DAPOTrainer


@pytest.fixture
def settings(settings):
    """Answers that end early: with a limit of 6 tokens the last 4 of them cost something."""
    return [*settings, "reward.reward_kwargs.overlong_buffer.len=4"]


def test_the_settings_are_those_of_the_paper(settings):
    trainer = DAPOTrainer(overrides=settings)
    actor, groups = trainer.config.actor_rollout_ref.actor, trainer.config.algorithm.filter_groups
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert actor.loss_agg_mode == "token-mean" and not actor.use_kl_loss and actor.entropy_coeff == 0
    assert (groups.enable, groups.metric, groups.max_num_gen_batches) == (True, "acc", 10)
    assert trainer.reward_manager.enabled and trainer.reward_manager.max_resp_len == 6
    names = [op.name for op in trainer.pipeline.operators]
    assert names[:6] == ["prompts", "repeat", "gen", "reward", "filter_groups", "sleep_rollout"]
    assert names[6:] == ["old_log_prob", "adv", "update_actor", "sync_weights"]


def test_a_users_own_file_stands_above_the_recipe(settings, tmp_path):
    (tmp_path / "my.yaml").write_text("algorithm: {filter_groups: {max_num_gen_batches: 3}}")
    groups = DAPOTrainer(config_path=tmp_path / "my.yaml", overrides=settings).config.algorithm.filter_groups
    assert (groups.enable, groups.metric, groups.max_num_gen_batches) == (True, "acc", 3)


@pytest.mark.slow
def test_resumed_in_the_middle_of_what_was_put_back_is_bit_equal(settings, tmp_path):
    # 4 prompts a step, asked for 3 at a time: passes are held, and prompts go back to the queue
    chosen = [*settings, "data.gen_batch_size=3", "trainer.save_freq=1"]
    DAPOTrainer(overrides=[*chosen, "trainer.total_training_steps=5"]).fit()
    straight = metrics_of(tmp_path / "run")
    assert max(step["filter_groups/passes"] for step in straight.values()) > 1
    assert sum(step["filter_groups/prompts_put_back"] for step in straight.values()) > 0
    shutil.rmtree(tmp_path / "run")
    DAPOTrainer(overrides=[*chosen, "trainer.total_training_steps=3"]).fit()
    resumed = DAPOTrainer(overrides=[*chosen, "trainer.total_training_steps=5"])
    resumed.fit()
    assert metrics_of(tmp_path / "run") == straight
    assert resumed.pipeline.state_dict()["prompts"]["waiting"] is not None
