"""python -m verl.trainer.sft_trainer as a user meets it: help, settings, one's own code, and what is refused."""

import json

import pytest

from verl.checkpoints.store import verify
from verl.config import load_config
from verl.config.schema.sft import SFTConfig
from verl.trainer import fsdp_sft_trainer
from verl.trainer.sft_trainer import main

ROWS = '''
from verl.data.sft_dataset import SFTDataset


class Shouted(SFTDataset):
    """The answers of the file, twice."""

    def __getitem__(self, i):
        item = super().__getitem__(i)
        return item | {"response_ids": item["response_ids"] * 2, "response_mask": item["response_mask"] * 2}
'''


@pytest.fixture
def command(tiny, tmp_path) -> list[str]:
    return [
        f"model.path={tiny / 'model'}",
        f"data.train_files={tiny / 'train.jsonl'}",
        "data.train_batch_size=24",
        "trainer.total_training_steps=1",
        "trainer.logger=[console,jsonl]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]


def test_help_and_settings_start_no_run(command, tmp_path, capsys):
    assert main(["--help"]) == 0
    assert "usage: python -m verl.trainer.sft_trainer" in capsys.readouterr().out
    assert main([*command, "--print-config"]) == 0
    (tmp_path / "shown.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "shown.yaml", schema=SFTConfig) == load_config(overrides=command, schema=SFTConfig)
    assert not (tmp_path / "run").exists()


def test_code_of_ones_own_is_used(command, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "mine.py").write_text("import logging\nlogging.getLogger('verl').info('my module is here')\n")
    tokens = []
    for more in ([], ["data.custom_cls.path=rows.py", "data.custom_cls.name=Shouted", "imports=[mine.py]"]):
        with caplog.at_level("INFO", "verl"):
            assert main([*command, *more, "trainer.save_freq=1", "trainer.resume_mode=disable"]) == 0
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        tokens.append(float(lines[-1].split('"train/tokens": ')[1].split(",")[0]))
    assert tokens[1] == 2 * tokens[0]
    assert "my module is here" in caplog.text
    verify(tmp_path / "run" / "global_step_1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.n_gpus_per_node=5"], "24 samples are not divisible by 5 ranks: use 20 or 25"),
        (
            ["trainer.n_gpus_per_node=3", "engine.tensor_parallel_size=2"],
            "3 ranks are not divisible by the model-parallel size 2",
        ),
        (["data.custom_cls.path=nowhere.py", "data.custom_cls.name=Rows"], "no file 'nowhere.py'"),
        (["model.override_config.hiden_size=1"], "did you mean 'hidden_size'?"),
        (["imports=[nowhere.py]"], "no file 'nowhere.py'"),
        (["model.override_config.max_position_embeddings=9"], "the longest sequence has 10 tokens, but the model"),
        (["model.use_liger=true", "trainer.device=cpu"], "Liger kernels need a GPU"),
    ],
)
def test_what_cannot_be_is_refused(command, overrides, message, capsys):
    assert main([*command, *overrides]) == 1
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown


def write_rows(path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_keys_of_older_releases_train(tiny, tmp_path):
    rows = [{"extra_info": {"question": f"{a}+{b}=", "answer": str(a + b)}} for a in range(4) for b in range(4)]
    command = [
        f"data.train_files={write_rows(tmp_path / 'train.jsonl', rows)}",
        f"data.val_files={write_rows(tmp_path / 'test.jsonl', rows[:4])}",
        *("data.prompt_key=extra_info", "+data.prompt_dict_keys=['question']"),
        *("data.response_key=extra_info", "+data.response_dict_keys=['answer']"),
        *("data.train_batch_size=8", "data.micro_batch_size=4", f"model.partial_pretrain={tiny / 'model'}"),
        *("optim.warmup_steps_ratio=0.5", "optim.lr_scheduler=cosine", "optim.lr=1e-3", "use_remove_padding=true"),
        *("trainer.default_hdfs_dir=null", "trainer.logger=['console','jsonl']", "trainer.total_epochs=2"),
        *("trainer.save_freq=after_each_epoch", "trainer.test_freq=after_each_epoch", "trainer.val_before_train=false"),
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    assert fsdp_sft_trainer.main(command) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # 16 rows in batches of 8: an epoch has 2 steps
    assert [line["step"] for line in lines if "val/loss" in line] == [2, 4]
    assert sorted(path.name for path in (tmp_path / "run").glob("global_step_*")) == ["global_step_2", "global_step_4"]
    # the tokens of the responses "0" .. "6", one each, and their eos tokens
    assert sum(line.get("train/tokens", 0) for line in lines) == 2 * 16 * 2


def test_chats_of_older_releases_train(tiny, tmp_path):
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows = write_rows(tmp_path / "train.jsonl", [{"talk": chat, "messages": "not a chat"}] * 4)
    command = [
        *(f"data.train_files={rows}", "data.multiturn.enable=true", "data.multiturn.messages_key=talk"),
        *("data.train_batch_size=4", f"model.partial_pretrain={tiny / 'model'}", "trainer.total_training_steps=1"),
        "model.custom_chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'",
        *("trainer.logger=jsonl", f"trainer.default_local_dir={tmp_path / 'run'}"),
    ]
    assert main(command) == 0
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["train/tokens"] == 4.0  # "2" of every row: the template appends no eos token
    verify(tmp_path / "run" / "global_step_1")  # saved after the last step by default


@pytest.mark.parametrize(("column", "value"), [("tools", [{"name": "search"}]), ("enable_thinking", False)])
def test_a_column_that_the_template_does_not_read_is_refused(column, value, tiny, tmp_path, capsys):
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows = write_rows(tmp_path / "train.jsonl", [{"messages": chat, column: value}])
    command = [f"data.train_files={rows}", f"model.path={tiny / 'model'}", "data.train_batch_size=1"]
    command += ["model.custom_chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"]
    assert main([*command, f"trainer.default_local_dir={tmp_path / 'run'}"]) == 1
    assert f"line 1: the chat template does not read '{column}'" in capsys.readouterr().err


def test_long_examples_are_counted_before_training(command, tmp_path, capsys):
    assert main([*command, "data.max_length=5"]) == 1
    shown = capsys.readouterr().err
    assert "samples longer than 5 tokens" in shown and "data.truncation to left or right" in shown
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_short_run_is_the_start_of_a_long_one(command, tmp_path):
    """Its rows are the same, in the same order."""
    losses = {}
    for name, steps in (("short", 1), ("long", 3)):
        folder = tmp_path / name
        further = ["data.train_batch_size=8", f"trainer.total_training_steps={steps}"]
        assert main([*command, *further, f"trainer.default_local_dir={folder}"]) == 0
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["train/nll"] for line in lines]
    assert len(losses["long"]) == 3 and losses["short"] == losses["long"][:1]
