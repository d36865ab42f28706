"""python -m verl.trainer.main_ppo with the long keys that scripts have."""

import pytest

from verl.trainer.main_ppo import main
from verl.trainer.startup.program import Program

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    """A reward of the signature that scripts have, with a further argument."""
    return {"score": bonus, "acc": data_source == "no name", "rows": extra_info.get("index", -1)}
'''


def long_keys(settings: list[str]) -> list[str]:
    """The settings as scripts often have them; the reward of the fixture is left out."""
    return [f"--{setting}" for setting in settings if not setting.startswith("reward.custom_reward_function")]


def test_long_keys_several_files_and_a_custom_reward(tiny, settings, steps, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    files = [tiny / "train.jsonl", tiny / "test.jsonl"]  # 24 + 6 rows
    keys = [f"data.train_files=[{files[0]},{files[1]}]", "data.train_batch_size=30", "trainer.n_gpus_per_node=1"]
    keys += [f"actor_rollout_ref.actor.{key}" for key in ("ppo_mini_batch_size=15", "clip_ratio=0.2")]
    keys += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "actor_rollout_ref.rollout.temperature=0.9"]
    keys += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", "algorithm.norm_adv_by_std_in_grpo=True"]
    keys += [f"custom_reward_function.path={tmp_path / 'reward.py'}", "custom_reward_function.name=compute_score"]
    keys += ["reward_model.reward_manager=naive", "trainer.nnodes=1"]
    bonus = "+custom_reward_function.reward_kwargs.bonus=0.25"
    (step,) = steps(*long_keys([*settings, *keys]), bonus, "trainer.total_training_steps=1")
    assert step["critic/score/mean"] == step["critic/score/min"] == 0.25
    assert step["reward/acc"] == 0.0


def test_the_help_names_the_program_that_was_asked(capsys):
    assert main(["--help"], program="verl.recipe.dapo.main_dapo") == 0
    shown = capsys.readouterr().out
    assert shown.count("python -m verl.recipe.dapo.main_dapo ") == 2 and "main_ppo" not in shown


def test_a_missing_package_is_named_with_the_command_that_installs_it(capsys):
    def run_without(package: str) -> int:
        class Missing(Program):
            def read(self, path, overrides):
                return None

            def start(self, *arguments):
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

        return Missing("a.b", "", "Config", "").main([])

    assert run_without("omegaconf.errors") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: the package omegaconf is not installed: pip install 'omegaconf>=2.3'")
    assert shown.count("\n") == 1
    with pytest.raises(ModuleNotFoundError):  # a module of the user's own keeps its traceback
        run_without("my_rewards")
