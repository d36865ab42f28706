"""python -m verl.trainer.sft_trainer as a user meets it: help, settings, one's own code, and what is refused."""

import pytest

from verl.checkpoints.store import verify
from verl.config import load_config
from verl.config.schema.sft import SFTConfig
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
        (["trainer.n_gpus_per_node=5"], "24 examples are not divisible by 5 ranks: use 20 or 25"),
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
