"""A mismatch of the log-probs of rollout and training stops the run, and what is no mismatch does not."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from tests.trainer.runs import fit_reports
from verl.config.schema import Config
from verl.protocol import DataProto
from verl.trainer.guards.mismatch import MismatchLimit, RolloutMismatchError
from verl.trainer.view import StepReport

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
#: without the canary, which comes first
GRPO = ["algorithm.name=grpo", "trainer.total_training_steps=3", f"{ROLLOUT}.check_every=0"]
#: a separate pass for old log-probs, or none
PASSES = ("always", "auto")


def shifted(monkeypatch, shift: float, from_step: int = 1) -> None:
    """Let training compute log-probs that are lower by `shift`, as if it read other rows or rounded differently."""
    from verl.engines.torch_engine import TorchEngine

    updates = []

    def lower(call):
        def computed(self, *args):
            outputs = call(self, *args)
            return outputs | {"log_probs": outputs["log_probs"] - shift * (len(updates) >= from_step - 1)}

        return computed

    def counted(call):
        return lambda self, *args, **kwargs: (call(self, *args, **kwargs), updates.append(1))[0]

    monkeypatch.setattr(TorchEngine, "_forward", lower(TorchEngine._forward))
    monkeypatch.setattr(TorchEngine, "train_batch", counted(TorchEngine.train_batch))


@pytest.mark.fast("auto")
@pytest.mark.parametrize("old_log_prob_pass", PASSES)
def test_the_first_step_stops_a_run_with_a_mismatch(old_log_prob_pass, settings, monkeypatch, tmp_path):
    shifted(monkeypatch, 0.02)
    with pytest.raises(RolloutMismatchError) as error:
        fit_reports([*settings, *GRPO, f"{ACTOR}.old_log_prob_pass={old_log_prob_pass}"])
    message = str(error.value)
    assert "step 1: rollout/logprob_gap_mean is 0.02, expected at most 0.005 (float32, rollout.name=native)" in message
    causes = ["packing", "dtypes", "attention", "template or tokenizer", "copy of the weights", "max_mismatch"]
    assert sorted(map(message.index, causes)) == [*map(message.index, causes)]
    assert not [*(tmp_path / "run").glob("global_step_*")], "nothing is saved"


def test_later_steps_warn_and_the_limit_can_be_set_or_turned_off(settings, monkeypatch, caplog):
    shifted(monkeypatch, 0.02, from_step=2)
    once = [*settings, *GRPO, f"{ACTOR}.ppo_mini_batch_size=4", "trainer.total_training_steps=2"]
    fit_reports(once)
    warnings = [r.getMessage() for r in caplog.records if "rollout/logprob_gap_mean" in r.getMessage()]
    assert len(warnings) == 1 and warnings[0].startswith("step 2: ") and "expected at most 0.005" in warnings[0]
    for limit in ("0", "0.03"):
        caplog.clear()
        fit_reports([*once, f"{ROLLOUT}.max_mismatch={limit}", "trainer.resume_mode=disable"])
        assert "logprob_gap_mean" not in caplog.text
    with pytest.raises(RolloutMismatchError, match=r"is \S+, expected at most 1e-12"):
        fit_reports([*once, f"{ROLLOUT}.max_mismatch=1e-12", "trainer.resume_mode=disable"])


@pytest.mark.fast("0.08-0.1-more0", "0.6-0.5-more3", "0.03-0.025-more5")
@pytest.mark.parametrize(
    "shift, limit, more",
    [
        (0.08, "0.1", [f"{ACTOR}.fsdp_config.dtype=bfloat16"]),
        (0.16, "0.1", [f"{ACTOR}.fsdp_config.dtype=bfloat16"]),
        (0.4, "0.5", [f"{ACTOR}.fsdp_config.dtype=bfloat16", "actor_rollout_ref.model.quantization=fp8"]),
        (0.6, "0.5", [f"{ACTOR}.fsdp_config.dtype=bfloat16", "actor_rollout_ref.model.quantization=fp8"]),
        (0.02, "0.025", [f"{ROLLOUT}.temperature=0.2"]),
        (0.03, "0.025", [f"{ROLLOUT}.temperature=0.2"]),
    ],
)
def test_the_limit_depends_on_dtype_and_temperature(shift, limit, more, settings, monkeypatch):
    shifted(monkeypatch, shift)
    run = [*settings, *GRPO, *more, "trainer.total_training_steps=1"]
    if shift < float(limit):
        fit_reports(run)
        return
    with pytest.raises(RolloutMismatchError, match=f"expected at most {limit} "):
        fit_reports(run)


@pytest.mark.fast("filters2")
@pytest.mark.parametrize("filters", [["top_k=3"], ["top_p=0.6"], ["min_p=0.2", "temperature=0.7"]])
def test_filters_are_no_mismatch_and_do_not_hide_one(filters, settings, monkeypatch):
    """Log-probs of a filtered distribution are larger than those of the full one, which training computes."""
    run = [*settings, *GRPO, *(f"{ROLLOUT}.{filter}" for filter in filters), "trainer.total_training_steps=1"]
    assert fit_reports(run)[0].metrics["rollout/logprob_gap_max"] < 1e-5  # over the tokens that the filters keep
    run += [f"{ROLLOUT}.truncated_log_probs=false", "trainer.resume_mode=disable"]
    assert fit_reports(run)[0].metrics["rollout/logprob_gap_mean"] > 0.05
    shifted(monkeypatch, -3.0)
    with pytest.raises(RolloutMismatchError):
        fit_reports(run)


def test_responses_of_older_weights_are_no_mismatch():
    """Training has changed their log-probs; the first step whose samples are all of the current policy is checked."""
    guard = MismatchLimit(Config())
    world = SimpleNamespace(samples_policy=lambda: [True], computes_in_16_bits=lambda: [False, False])
    limits = SimpleNamespace(hf_config=LlamaConfig())
    run = SimpleNamespace(inputs=SimpleNamespace(limits=limits))
    view = SimpleNamespace(roles={"rollout": world, "actor": world}, run=run)
    for step, versions in ((1, [0, -1]), (7, [6, 5]), (8, [7, 7])):
        batch = DataProto.from_dict({"weight_version": torch.tensor(versions)})
        report = StepReport(step, 9, {"rollout/logprob_gap_mean": 1.0}, {}, batch)
        if step < 8:
            guard.after_step(view, report)
            continue
        with pytest.raises(RolloutMismatchError, match=r"step 8: .* is 1, expected at most 0.005"):
            guard.after_step(view, report)
    limits.hf_config, world.computes_in_16_bits = Qwen3MoeConfig(), lambda: [True, False]
    with pytest.raises(RolloutMismatchError, match=r"expected at most 0.2 \(16 bits"):
        MismatchLimit(Config()).after_step(view, report)


@pytest.mark.fast("bfloat16-native")
@pytest.mark.parametrize(("dtype", "engine"), [("auto", "native"), ("bfloat16", "native"), ("bfloat16", "hf")])
def test_a_run_with_bf16_weights_has_no_mismatch(dtype, engine, settings):
    """A CPU computes in float32 by default. The canary called these weights stale."""
    dtypes = [f"{ACTOR}.fsdp_config.model_dtype=bfloat16", f"{ACTOR}.fsdp_config.dtype={dtype}"]
    more = ["trainer.total_training_steps=2", f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.check_every=1"]
    reports = fit_reports([*settings, "algorithm.name=grpo", *dtypes, *more])
    bound = 0.05 if dtype == "bfloat16" else 1e-4
    for report in reports:
        assert max(report.metrics[name] for name in ("rollout/logprob_gap_max", "weight_sync/canary_mismatch")) < bound
