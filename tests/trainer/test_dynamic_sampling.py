"""Dynamic sampling: which groups are held and released, worked by hand; no prompt is lost; state; errors."""

import io
import os
import signal
from random import Random

import numpy as np
import pytest
import torch

from tests.trainer.runs import fit, metrics_of
from verl.config import load_config, settings_without_effect
from verl.data.sequences import build_sequences
from verl.dataflow import HOLD, DataFlow, Operator
from verl.protocol import DataProto
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo.dynamic_sampling import sample_dynamically
from verl.trainer.ppo.operators import GENERATED, Prompts, repeat
from verl.trainer.startup.launch import run as launch


class Numbers:
    """A source of the prompts 0, 1, 2 ..., `size` at a time, as `PromptSource` is one."""

    def __init__(self, size: int):
        self.size, self.next = size, 0

    def __call__(self) -> DataProto:
        numbers = list(range(self.next, self.next + self.size))
        self.next += self.size
        return DataProto(None, {"uid": [f"0:{i}" for i in numbers], "prompt_ids": [[1] * (i % 3 + 1) for i in numbers]})

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def numbers_of(batch: DataProto) -> list[int]:
    return [int(uid.split(":")[1]) for uid in batch.non_tensor_batch["uid"]]


class Scripted:
    """A flow whose prompt i scores 0 on every answer, but 1 on the second one where `differs(i)`. Widths vary."""

    def __init__(self, differs, groups=3, size=4, limit=0, metric="acc", n=2, at_limit="error", empty=20):
        overrides = [f"data.train_batch_size={groups}", f"data.gen_batch_size={size}"]
        overrides += [f"actor_rollout_ref.rollout.n={n}", "algorithm.filter_groups.enable=true"]
        overrides += [f"algorithm.filter_groups.metric={metric}"]
        overrides += [f"algorithm.filter_groups.max_num_gen_batches={limit}"]
        overrides += [f"algorithm.filter_groups.max_empty_gen_batches={empty}"]
        overrides += [f"algorithm.filter_groups.at_limit={at_limit}"]
        self.differs = differs
        self.asked: list[list[int]] = []
        self.source = Numbers(groups)
        prompts = Prompts(self.source, lambda: 7, vocab_size=100)
        flow = DataFlow(
            [
                Operator("prompts", prompts, writes=("prompt_ids", "uid")),
                Operator("repeat", repeat(n)),
                Operator("gen", self.gen, writes=GENERATED[:6]),
                Operator("reward", self.reward, writes=("token_level_rewards",)),
                Operator("out", lambda batch: None),
            ]
        )
        self.pipeline = sample_dynamically(flow, load_config(overrides=overrides), pad_token_id=9).compile()

    def gen(self, batch):
        found = numbers_of(batch)
        self.asked.append(list(dict.fromkeys(found)))
        answers = [[i + 1] * (1 + i % 4) for i in found]
        return build_sequences(list(batch.non_tensor_batch["prompt_ids"]), answers, 9)

    def reward(self, batch):
        right = [float(self.differs(i) and k == 1) for i, k in zip(numbers_of(batch), batch.column("sample_index"))]
        rewards = torch.zeros(batch.batch["responses"].shape)
        rewards[:, 0] = torch.tensor(right) * 2
        return DataProto({"token_level_rewards": rewards}, {"reward_acc": right})

    def step(self) -> DataProto:
        batch = HOLD
        while batch is HOLD:
            batch = self.pipeline.run()
        return batch


def test_the_right_groups_are_held_and_released():
    run = Scripted({1, 4, 5, 7, 8, 9, 10, 11, 14, 15}.__contains__)
    assert run.pipeline.run() is HOLD  # 0 1 2 3: only 1 differs
    first = run.pipeline.run()  # 4 5 6 7: enough, with 7 to spare
    assert numbers_of(first) == [1, 1, 4, 4, 5, 5]
    assert first.column("sample_index").tolist() == [0, 1] * 3
    assert first.meta_info["global_step"] == 7
    assert first.meta_info["metrics"] == {
        "filter_groups/passes": 2,
        "filter_groups/prompts": 8,
        "filter_groups/kept_share": 4 / 8,
        "filter_groups/prompts_put_back": 1,
        "filter_groups/acc_mean": 4 / 16,
        "filter_groups/response_length_mean": pytest.approx(5 / 3),  # 2, 1 and 2 tokens
    }
    assert numbers_of(run.step()) == [7, 7, 8, 8, 9, 9]  # 7 goes out again, before 8 9 10
    assert numbers_of(run.step()) == [10, 10, 11, 11, 14, 14]
    # the third step kept 2 of 4 and missed 1: 2 prompts more were expected to do, and 15 is put back
    assert run.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [7, 8, 9, 10], [10, 11, 12, 13], [14, 15]]


def test_rows_of_several_passes_are_padded_alike():
    run = Scripted({1, 6, 7}.__contains__)
    batch = run.step()
    prompts = [[1] * (i % 3 + 1) for i in numbers_of(batch)]
    answers = [[i + 1] * (1 + i % 4) for i in numbers_of(batch)]
    expected = build_sequences(prompts, answers, 9, prompt_width=3, response_width=4)
    for name, column in expected.items():
        assert torch.equal(batch.batch[name], column), name
    assert batch.batch["token_level_rewards"].sum(1).tolist() == [0, 2] * 3


@pytest.mark.parametrize("seed", range(30))
def test_no_prompt_is_lost(seed):
    draw = Random(seed)
    differs = {i for i in range(3000) if draw.random() < draw.choice([0.2, 0.5, 0.9])}
    groups, size = draw.randint(1, 6), draw.randint(1, 8)
    run = Scripted(differs.__contains__, groups=groups, size=size, n=draw.choice([2, 3]))
    trained = []
    for _ in range(8):
        found = numbers_of(run.step())
        assert len(set(found)) == groups
        trained += dict.fromkeys(found)
        assert max(map(len, run.asked)) <= size
    assert len(trained) == len(set(trained)) and set(trained) <= differs
    queue = run.pipeline.operators[0].func
    waiting = numbers_of(queue.waiting)
    dropped = set(range(run.source.next)) - set(trained) - set(waiting)
    assert not dropped & differs  # what is neither trained on nor waiting had answers that were all alike
    assert not set(waiting) & set(trained) and len(waiting) == len(set(waiting))


def test_state_in_the_middle_of_held_groups():
    differs = {1, 6, 9, 10, 13, 17, 18, 20}.__contains__
    straight = Scripted(differs)
    assert straight.pipeline.run() is HOLD
    file = io.BytesIO()
    torch.save(straight.pipeline.state_dict(), file)
    file.seek(0)
    resumed = Scripted(differs)
    resumed.pipeline.load_state_dict(torch.load(file, weights_only=False))
    for _ in range(2):
        a, b = straight.step(), resumed.step()
        assert a.columns == b.columns and a.meta_info["metrics"] == b.meta_info["metrics"]
        for name in a.columns:
            assert np.array_equal(np.asarray(a.column(name)), np.asarray(b.column(name))), name
    assert straight.asked[1:] == resumed.asked


@pytest.mark.parametrize("metric", ["reward", "score", "seq_reward", "seq_final_reward"])
def test_reward_as_the_metric(metric):
    run = Scripted({0, 2, 3}.__contains__, metric=metric)
    batch = run.step()
    assert numbers_of(batch) == [0, 0, 2, 2, 3, 3]
    assert batch.meta_info["metrics"][f"filter_groups/{metric}_mean"] == 2 * 3 / 8


def test_giving_up_says_what_was_found_and_what_to_do():
    run = Scripted({5}.__contains__, limit=3)
    assert run.pipeline.run() is HOLD
    assert run.pipeline.run() is HOLD
    message = (
        r"only 1 of 3 groups .* after 12 prompts \(3 generations of 4; mean acc 0.0417\).*max_num_gen_batches"
        r".*algorithm\.filter_groups\.at_limit=fill"
    )
    with pytest.raises(ValueError, match=message):
        run.pipeline.run()


def test_generations_without_a_group_are_counted_and_end_the_run(caplog):
    run = Scripted({24}.__contains__, empty=7)  # in the 7th generation of 4
    for _ in range(13):
        assert run.pipeline.run() is HOLD  # the first 6 and the 6 after the 7th are empty
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(". Check")[0] for line in warned] == [
        f"dynamic sampling: expected groups with responses that differ in 'acc', found none among the last 20 prompts "
        f"(5 generations of 4 in a row; mean acc of this step {mean})"
        for mean in ("0", "0.0104")  # 1 of 96 responses: 12 generations of 4 prompts with 2 responses
    ]
    message = r"the last 28 prompts \(7 generations .*max_empty_gen_batches=7 sets the limit \(0: no limit"
    with pytest.raises(ValueError, match=message):
        run.pipeline.run()


@pytest.mark.parametrize("limits", [{"empty": 0}, {"empty": 2, "limit": 100}])
def test_generations_without_a_group_only_warn_where_the_run_shall_go_on(limits, caplog):
    run = Scripted({200, 201, 202}.__contains__, **limits)
    assert numbers_of(run.step()) == [200, 200, 201, 201, 202, 202]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition("the last ")[2].split()[0] for line in warned] == [str(20 * i) for i in range(1, 11)]


def test_a_step_is_filled_where_the_run_shall_go_on():
    run = Scripted({5, 13, 14, 15, 16}.__contains__, limit=3, at_limit="fill")
    batch = run.step()
    assert numbers_of(batch) == [5, 5, 0, 0, 1, 1]  # the one that differs, and the first that do not
    assert batch.batch["token_level_rewards"].sum(1).tolist() == [0, 2, 0, 0, 0, 0]
    metrics = batch.meta_info["metrics"]
    assert (metrics["filter_groups/filled"], metrics["filter_groups/prompts_put_back"]) == (2, 0)
    assert metrics["filter_groups/kept_share"] == 1 / 12 and metrics["filter_groups/acc_mean"] == 1 / 24
    after = run.step()
    assert numbers_of(after) == [13, 13, 14, 14, 15, 15]  # of what comes next, and nothing of the step before
    assert after.meta_info["metrics"]["filter_groups/filled"] == 0


def test_the_limit_counts_prompts_so_that_small_passes_do_not_use_it_up():
    run = Scripted({0, 1, 40}.__contains__, size=8, limit=6)
    assert numbers_of(run.step())[-1] == 40
    assert [len(asked) for asked in run.asked] == [8, 4, 6, 8, 8, 8]  # of 48 prompts


def test_a_metric_that_is_not_there():
    with pytest.raises(ValueError, match=r"metric=accc.*acc"):
        Scripted({1}.__contains__, metric="accc").pipeline.run()


GROUPS = "algorithm.filter_groups."
ENABLED = [f"{GROUPS}enable=true", "actor_rollout_ref.rollout.n=2", "data.train_batch_size=8"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.rollout.n=1"], r"rollout\.n.*found 1"),
        ([f"{GROUPS}metric=seq_final_reward", "algorithm.use_kl_in_reward=true"],
         r"found seq_final_reward, .* after the KL penalty, .*: use seq_reward"),
        (["data.gen_batch_size=3", f"{GROUPS}max_num_gen_batches=2"],
         r"max_num_gen_batches.*found 2.*6 prompts.*train_batch_size=8"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(overrides=[*ENABLED, *overrides])


def test_settings_without_effect(caplog):
    load_config(overrides=["data.gen_batch_size=12"])
    assert "data.gen_batch_size has no effect without algorithm.filter_groups.enable=true" in caplog.text
    limit = f"{GROUPS}max_empty_gen_batches"
    assert not settings_without_effect(load_config(overrides=[*ENABLED, f"{limit}=5"]))
    both = load_config(overrides=[*ENABLED, f"{limit}=5", f"{GROUPS}max_num_gen_batches=9"])
    assert settings_without_effect(both) == [f"{limit}: 5 has no effect with {GROUPS}max_num_gen_batches=9"]


def test_metrics_of_a_step_are_those_of_every_sample_that_was_generated(settings, paid_by):
    score = "{'score': len(set(solution_str)), 'chars': len(solution_str)}"
    reward = paid_by(f"return {score} if sum(map(ord, solution_str)) % 4 else {{}}['a']")
    chosen = [*settings, "algorithm.name=dapo", "reward.reward_manager.name=naive", "data.gen_batch_size=2"]
    chosen += [reward, "trainer.total_training_steps=1"]
    chosen += ["algorithm.filter_groups.metric=reward", "reward.on_error=count", "reward.max_failure_rate=1"]
    trainer, generated, reports = LocalPPOTrainer(overrides=chosen), [], []
    trainer.pipeline.observer = lambda name, _, batch: generated.append(batch) if name == "reward" else None
    trainer.on_step.append(reports.append)
    trainer.fit()
    (report,) = reports
    passes = int(report.metrics["filter_groups/passes"])
    assert passes == len(generated) > 1
    lengths, chars, failed, cut = [], [], 0, 0
    for batch in generated:
        mask = batch.batch["response_mask"]
        lengths += mask.sum(1).tolist()
        cut += int((batch.batch["responses"] != trainer.tokenizer.eos_token_id).logical_and(mask.bool()).all(1).sum())
        values = batch.non_tensor_batch["reward_chars"].tolist()
        chars += [value for value in values if value is not None]
        failed += values.count(None)
    found = report.metrics
    assert found["response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert (found["response_length/max"], found["response_length/min"]) == (max(lengths), min(lengths))
    assert found["response_length/clip_ratio"] == pytest.approx(cut / len(lengths))
    assert found["reward/chars"] == pytest.approx(sum(chars) / len(chars))
    assert found["reward/failed_rows"] == failed > 0
    kept = report.batch.batch["response_mask"].sum(1).float().mean().item()
    assert found["filter_groups/response_length_mean"] == pytest.approx(kept)


def test_greedy_baselines_of_the_groups_that_are_kept(settings):
    remax = ["algorithm.name=remax", "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"]
    _, (report,) = fit([*settings, *remax, "trainer.total_training_steps=1"])
    baselines = report.batch.batch["reward_baselines"].view(4, 2)
    assert torch.equal(baselines[:, 0], baselines[:, 1])
    scores = report.batch.batch["token_level_scores"].sum(1).view(4, 2)
    assert (scores[:, 0] != scores[:, 1]).all()


# ---- signals --------------------------------------------------------------------------------------------------------


def signalled_after(trainer: LocalPPOTrainer, step: int) -> list[int]:
    """Let a trainer receive SIGTERM when `gen` of a step has ended. Returns the steps of its generations, as a list."""
    steps: list[int] = []

    def observe(name: str, seconds: float, batch: DataProto) -> None:
        if name == "gen":
            steps.append(trainer.global_step)
            if trainer.global_step == step and steps.count(step) == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.pipeline.observer = observe
    return steps


@pytest.fixture
def filtered(settings, paid_by) -> list[str]:
    """Settings of 4 steps with random rewards, so that about a third of the groups is kept."""
    chosen = [*settings, "trainer.save_at_end=true", paid_by("return float(random.random() < 0.2)")]
    return [*chosen, "algorithm.name=grpo", "algorithm.filter_groups.enable=true", "trainer.total_training_steps=4"]


@pytest.mark.slow
def test_after_a_signal_a_step_that_needs_further_generations_is_undone(filtered, tmp_path, capsys, caplog):
    """The run is resumed by the same command, and its metrics are those of an uninterrupted run."""
    run, trainer = tmp_path / "run", LocalPPOTrainer(overrides=filtered)
    steps = signalled_after(trainer, 3)
    assert launch(lambda: trainer) == 143
    assert steps.count(3) == 1, "the step is not finished after the generation in flight"
    assert "step 3 is not finished, because it needs further samples" in caplog.text
    message = f"stopped by SIGTERM after step 2 of 4; the same command resumes from {run}/global_step_2"
    assert capsys.readouterr().err.splitlines()[-1] == message
    LocalPPOTrainer(overrides=filtered).fit()
    straight, uninterrupted = tmp_path / "straight", []
    trainer = LocalPPOTrainer(overrides=[*filtered, f"trainer.default_local_dir={straight}"])
    trainer.pipeline.observer = lambda name, *_: uninterrupted.append(trainer.global_step) if name == "gen" else None
    trainer.fit()
    assert uninterrupted.count(3) > 1
    assert metrics_of(run) == metrics_of(straight) and len(metrics_of(run)) == 4


def test_a_signal_in_the_first_step_ends_a_run_whose_rewards_are_all_equal(filtered, paid_by, capsys):
    paid_by("return 0.0")
    trainer = LocalPPOTrainer(overrides=[*filtered, "algorithm.filter_groups.max_empty_gen_batches=0"])
    steps = signalled_after(trainer, 1)
    assert launch(lambda: trainer) == 143
    assert steps == [1]
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("stopped by SIGTERM before the first step; no checkpoint was saved")
