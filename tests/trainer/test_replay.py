"""A bad step is dumped, and its replay on a CPU names the sample, the operator and the line."""

import math
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from verl import SFTTrainer
from verl.cli.app import app
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.state.replay import FirstBadOperator, replay

LOSS = """
from verl.algorithms.masked import agg_loss
from verl.algorithms.policy_losses import register_policy_loss

@register_policy_loss("breaks_low_scores")
def breaks_low_scores(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode):
    loss = -log_prob * advantages
    worst = (advantages < -0.3).float()
    loss = loss + (log_prob - log_prob.detach() + 1 - worst).sqrt()  # line 9: at 0 with an infinite slope
    return agg_loss(loss, response_mask, loss_agg_mode), {}
"""
CHOSEN = ["algorithm.name=grpo", "trainer.total_training_steps=1"]


@pytest.fixture
def dump(settings, tmp_path):
    """The dump of a step of 8 samples, of which some have a gradient that is not finite; and these samples."""
    (tmp_path / "loss.py").write_text(LOSS)
    overrides = [f"imports=[{tmp_path / 'loss.py'}]", "actor_rollout_ref.actor.policy_loss.loss_mode=breaks_low_scores"]
    trainer = LocalPPOTrainer(overrides=[*settings, *CHOSEN, *overrides])
    trainer.fit()
    assert trainer.batch.meta_info["metrics"]["actor/grad_skipped"] == 1  # both updates
    return tmp_path / "run/bad_steps/step_1", trainer.batch


def test_the_samples_the_operator_and_the_line_are_named(dump):
    folder, batch = dump
    worst = [row for row, values in enumerate(batch.batch["advantages"]) if values.min() < -0.3]
    assert worst and len(worst) < len(batch)
    found = replay(folder)
    assert found.has_cause and not found.columns and found.bad == {"actor/grad_skipped": 1.0}
    assert [sample.row for sample in found.samples["actor"]] == worst
    assert {sample.line for sample in found.samples["actor"]} == {"loss.py:9 in breaks_low_scores"}
    assert all(sample.operator.startswith("SqrtBackward0") for sample in found.samples["actor"])
    assert [sample.uid for sample in found.samples["actor"]] == [batch.non_tensor_batch["uid"][row] for row in worst]
    assert found.notes == ["log-probs of the replay and of the run differ by at most 0"]


def test_operators_return_their_results_and_a_backward_pass_without_a_trace_has_no_line():
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    with FirstBadOperator() as trace:
        assert x.log().tolist() == pytest.approx([-math.inf, math.log(4)])
    assert trace.operator == "aten.log.default" and trace.line.startswith("test_replay.py:")
    with FirstBadOperator() as trace:
        x.sqrt().sum().backward()
    assert trace.operator.startswith("SqrtBackward0") and trace.line == ""
    assert x.grad.tolist() == [math.inf, 0.25]


def test_weights_that_are_gone_are_a_note(dump):
    folder, _ = dump
    shutil.rmtree(folder / "actor")
    found = replay(folder)
    assert not found.samples and not found.has_cause
    assert re.fullmatch("the update of the actor is not replayed .*step_1/actor has no weights .*", *found.notes)


def test_a_checkpoint_is_found_after_the_run_has_moved(settings, tmp_path):
    """Weights that are broken are not dumped: the replay reads those of the newest checkpoint."""
    chosen = [*settings, "algorithm.name=grpo", "trainer.save_freq=1"]
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=1"]).fit()
    diverging = [*chosen, "trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=1e9"]
    with pytest.raises(FloatingPointError):
        LocalPPOTrainer(overrides=[*diverging, "actor_rollout_ref.actor.optim.weight_decay=0"]).fit()
    (tmp_path / "run").rename(tmp_path / "moved")
    found = replay(tmp_path / "moved/bad_steps/step_2")
    assert found.notes[-1] == "log-probs of the replay and of the run differ by at most 0"


def test_relative_imports_start_where_the_run_was_started(settings, tmp_path, monkeypatch):
    (tmp_path / "loss.py").write_text(LOSS.replace("breaks_low_scores", "breaks_relative").replace("-0.3", "9"))
    chosen = ["imports=[loss.py]", "actor_rollout_ref.actor.policy_loss.loss_mode=breaks_relative"]
    with monkeypatch.context() as context:
        context.chdir(tmp_path)
        LocalPPOTrainer(overrides=[*settings, *CHOSEN, *chosen]).fit()
    assert len(replay(tmp_path / "run/bad_steps/step_1").samples["actor"]) == 8


def test_a_bad_column_is_named_with_its_writer(settings, tmp_path):
    (tmp_path / "bad.py").write_text(
        "from verl.algorithms.advantages import register_adv_est\n"
        "@register_adv_est('bad_advantage')\n"
        "def bad_advantage(token_level_rewards, response_mask):\n"
        "    advantages = 1.0 * response_mask\n"
        "    advantages[5, 0] = float('inf')\n"
        "    return advantages, advantages\n"
    )
    chosen = [f"imports=[{tmp_path / 'bad.py'}]", "algorithm.adv_estimator=bad_advantage"]
    LocalPPOTrainer(overrides=[*settings, *CHOSEN[1:], *chosen]).fit()
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "run/bad_steps/step_1")])
    assert result.exit_code == 0, result.output
    assert "column 'advantages', written by the operator 'adv': inf at row 5, token 0\n" in result.output
    assert CliRunner().invoke(app, ["replay", str(tmp_path)]).exit_code == 1


def test_dumps_are_bounded(settings, tmp_path):
    (tmp_path / "loss.py").write_text(LOSS.replace("breaks_low_scores", "breaks_all").replace("-0.3", "9"))
    chosen = [f"imports=[{tmp_path / 'loss.py'}]", "actor_rollout_ref.actor.policy_loss.loss_mode=breaks_all"]
    limits = ["trainer.max_skipped_steps=0", "trainer.max_step_dumps=1", "trainer.total_training_steps=2"]
    LocalPPOTrainer(overrides=[*settings, *CHOSEN, *chosen, *limits]).fit()
    assert [path.name for path in (tmp_path / "run/bad_steps").iterdir()] == ["step_1"]


def test_a_bad_step_of_sft_is_searched_but_not_replayed(tiny, tmp_path, monkeypatch):
    (tmp_path / "sft.jsonl").write_text('{"prompt": "a=", "response": "ab"}\n' * 8)
    paths = {"data.train_files": str(tmp_path / "sft.jsonl"), "model.path": str(tiny / "model")}
    paths |= {"trainer.default_local_dir": str(tmp_path / "run"), "trainer.logger": ["jsonl"]}
    sizes = {"data.train_batch_size": 4, "data.max_length": 16, "trainer.total_training_steps": 1}
    skipped = torch.tensor(float("nan"))
    monkeypatch.setattr("torch.nn.utils.get_total_norm", lambda *args, **kwargs: skipped)
    SFTTrainer(paths | sizes).fit()
    found = replay(tmp_path / "run/bad_steps/step_1")
    assert "train/grad_skipped" in found.bad and not found.samples
    assert found.notes == ["the update of the actor is not replayed: only its columns were searched"]
