"""What needs no data is refused before any is read: here neither the tokenizer nor the rows could be."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.cli.config import SCHEMAS
from verl.config import load_config
from verl.config.fields import fields_of

MODEL, RS = "actor_rollout_ref.model.", "algorithm.rollout_correction."
RM, LOSS = "reward.reward_model.", "actor_rollout_ref.actor.policy_loss.loss_mode="


@pytest.fixture(scope="module")
def rows_unreadable(tiny, tmp_path_factory) -> Path:
    """The folder `tiny` with rows that are no JSON and weights that are none."""
    folder = tmp_path_factory.mktemp("unreadable") / "tiny"
    shutil.copytree(tiny, folder)
    for name in ("train.jsonl", "test.jsonl", "model/model.safetensors"):
        (folder / name).write_text("nonsense")
    return folder


@pytest.fixture(scope="module")
def all_unreadable(rows_unreadable, tmp_path_factory) -> Path:
    """The same without a tokenizer: of the model there is config.json alone. And a file, a folder and a checkpoint."""
    folder = tmp_path_factory.mktemp("unreadable") / "tiny"
    shutil.copytree(rows_unreadable, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    (folder / "a_file").write_text("")
    (folder / "global_step_3").mkdir()
    return folder


@pytest.fixture
def complaint(refused, monkeypatch) -> Callable[..., str]:
    """What stands on stderr when a run in a folder is refused."""

    def run(tiny: Path, *overrides: str) -> str:
        monkeypatch.chdir(tiny)
        return refused(tiny, *overrides)

    return run


#: folder of the run -> overrides and the message
REFUSED = {
    "all_unreadable": [
        (["algorithm.adv_estimator=grop"], "no advantage estimator is called 'grop': did you mean 'grpo'?"),
        (["algorithm.adv_estimator=gdpo"], "gdpo needs the setting 'gdpo_reward_keys'"),
        ([LOSS + "vanila"], "no policy loss is called 'vanila': did you mean 'vanilla'?"),
        (["trainer.logger=[jsnol]"], "no tracker is called 'jsnol': did you mean 'jsonl'?"),
        (["trainer.logger=[swanlab]"], "needs the package swanlab, which is not installed"),
        ([RS + "rollout_rs=tokn_k1", RS + "rollout_rs_threshold=2"], "did you mean 'token_k1'?"),
        ([RS + "rollout_is=token", RS + "rollout_is_threshold=high"], "expected a number, or two joined by '_'"),
        (["actor_rollout_ref.rollout.stop=['']"], "found an empty string"),
        # places
        (["placement.ref_devices=[0]"], "this run has no role 'ref'"),
        (["placement.actor_devices=[0,0]"], "expected only device 0, the only one there is"),
        (["trainer.nnodes=2"], "trainer.nnodes is 2, but this trainer runs on one host: set trainer.nnodes=1"),
        ([MODEL + "use_liger=true", "trainer.device=cpu"], "Liger kernels need a GPU"),
        # files and folders
        (["trainer.rollout_data_dir=a_file/answers"], "trainer.rollout_data_dir: expected a writable folder"),
        (["trainer.validation_data_dir=a_file"], "trainer.validation_data_dir: expected a writable folder"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=global_step_3"], "has no manifest.json"),
        (["data.custom_cls.path=a.py", "data.custom_cls.name=A"], "no file 'a.py'"),
        (["data.custom_cls.path=reward.py", "data.custom_cls.name=A"], "'reward.py' defines no 'A'"),
        ([MODEL + "tokenizer_path=./nowhere"], "tokenizer_path=./nowhere'): there is no folder './nowhere'"),
        ([MODEL + "lora_adapter_path=./nowhere"], "there is no folder './nowhere'"),
        ([MODEL + "lora_adapter_path=global_step_3"], "'global_step_3' has no adapter_config.json"),
        # models, of which the config alone is read
        ([MODEL + "custom_chat_template=chat.jinja"], "'chat.jinja' (str) does not read `messages`"),
        ([MODEL + "override_config.hiden_size=1"], "did you mean 'hidden_size'?"),
        (["algorithm.adv_estimator=gae", "critic.model.override_config.hiden_size=1"], "did you mean 'hidden_size'?"),
        ([RM + "enable=true", RM + "model_path=model"], "expected a reward model, a sequence classifier"),
        ([RM + "enable=true", RM + "model_path=model", RM + "tokenizer_path=./nowhere"], "no folder './nowhere'"),
        ([MODEL + "lora_rank=2", MODEL + "target_modules=[q_prj]"], "did you mean 'q_proj'?"),
        ([MODEL + "lora_rank=2", MODEL + "exclude_modules=[q_prj]"], "did you mean 'q_proj'?"),
    ],
    "rows_unreadable": [  # a reward may read the tokenizer
        (["reward.custom_reward_function.path=nowhere.py"], "no file 'nowhere.py'"),
        (["reward.custom_reward_function.name=compute_scor"],
         "defines no 'compute_scor': did you mean 'compute_score'?"),
        (["reward.custom_reward_function.path=null", "reward.reward_function=gsm8"],
         "no reward function is called 'gsm8': did you"),
        (["reward.reward_manager.name=naiv"], "no reward manager is called 'naiv': did you mean 'naive'?"),
    ],
    "tiny": [  # found by the trial of the reward
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acuracy"], "return 'acuracy'"),
        (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[reward,acuracy]"], "return 'acuracy'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "overrides", "message"),
    [(folder, *row) for folder, rows in REFUSED.items() for row in rows],
)
def test_what_is_refused(folder, overrides, message, complaint, request):
    assert message in complaint(request.getfixturevalue(folder), *overrides)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_choice_of_words_knows_the_nearest(name):
    """One wrong letter behind each word of each key that is a choice of words."""
    choices = {key: found for key, found in fields_of(SCHEMAS[name]).items() if found.choices()}
    assert choices or name == "evaluation"
    for key, found in choices.items():
        word = found.choices()[0]
        wrong = f"[{word}q]" if found.expected().startswith("list[") else f"{word}q"
        with pytest.raises(ValueError, match="did you mean") as refused:
            load_config(overrides=[f"{key}={wrong}"], schema=SCHEMAS[name])
        assert f"{key} (override" in str(refused.value) and f"did you mean {word}?" in str(refused.value)
