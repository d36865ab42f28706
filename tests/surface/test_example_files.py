"""The configurations and reward functions under examples/ do what their heads say."""

from pathlib import Path

import pytest

from verl.config import load_config
from verl.registry import load_object
from verl.rewards.functions import REWARD_FUNCTION_REGISTRY
from verl.trainer.local_trainer import LocalPPOTrainer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("path", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_loads_and_can_run(path, monkeypatch):
    config = load_config(path)
    assert config.data.train_files and config.actor_rollout_ref.model.path == "./models/policy"
    monkeypatch.setenv("MODEL", "/models/m")
    changed = load_config(path).actor_rollout_ref.model.path
    assert changed == ("/models/m" if "MODEL" in path.read_text() else "./models/policy")


def test_the_short_forms_mean_what_they_say():
    config = load_config(EXAMPLES / "configs" / "cli_ppo.yaml")
    assert config.actor_rollout_ref.actor.clip_ratio == config.actor_rollout_ref.actor.clip_ratio_low == 0.2
    assert (config.critic.value_loss_coef, config.data.train_batch_size) == (0.5, 16)
    assert config.reward.reward_function == "accuracy_reward" and config.algorithm.adv_estimator == "gae"


def test_gsm8k_with_format():
    score = load_object(str(EXAMPLES / "reward_fn" / "gsm8k_with_format.py"), "compute_score")
    cases = {"so\n#### 1,234": 1.0, "#### 5 then #### 1234.0": 1.0, "#### 7": 0.1, "1234": 0.0, "#### ,": 0.0, "": 0.0}
    for answer, expected in cases.items():
        found = score("openai/gsm8k", answer, "1234")
        assert found["score"] == expected, answer
        assert found["acc"] == (expected == 1.0)
    assert score("openai/gsm8k", "#### -3", "-3", {})["pred"] == "-3"


def test_similarity():
    similarity = load_object(str(EXAMPLES / "reward_fn" / "similarity.py"), "similarity")
    assert REWARD_FUNCTION_REGISTRY["similarity"] is similarity
    assert similarity("abcd", "abcd") == 1.0 and similarity("", "abcd") == 0.0
    assert similarity("abxx", "abcd") == 0.5  # 2 x 2 letters that agree / (4 + 4)


def test_the_example_reward_file(settings):
    own = [setting for setting in settings if "custom_reward_function" not in setting]
    flags = ["--custom_reward_function.path=./examples/reward_fn/custom_reward_fn.py"]
    flags += ["--custom_reward_function.name=compute_score", "--reward_model.reward_manager=naive"]
    trainer = LocalPPOTrainer(overrides=[*own, *(flag.removeprefix("--") for flag in flags)])
    function = trainer.reward_manager.compute_score
    texts = {"#### 72": 1.0, "so 1,072 and 72.0": 1.0, "71": 0.0, "none": 0.0}
    for text, score in texts.items():
        for truth in ("72", "48/2 = 24\n#### 72"):
            assert function.func("openai/gsm8k", text, truth, None) == score
