"""Divergence: hits on series that diverge, none on recorded healthy runs, and one line per event."""

import json
from pathlib import Path

from verl.trainer.output import divergence
from verl.trainer.output.divergence import (
    REWARD,
    DivergenceWatch,
    entropy_collapse,
    kl_blow_up,
    never_correct,
    reward_collapse,
    worse_validation,
)

RUNS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "learning.jsonl"


def series(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values, 1))


def test_a_run_with_a_learning_rate_of_0_05():
    """The rewards and KL of the quickstart task with actor.optim.lr=0.05, first ten steps."""
    watch = DivergenceWatch(prompts=500)
    kl = [0.0, 5.481, 5.905, 6.043, 6.422, 6.288, 6.4, 6.488, 6.117, 6.144]
    said = watch.update(0, {"val-core/reverse/acc/mean@1": 0.906})
    for step in range(1, 11):
        reward = 0.641 if step == 1 else 0.0
        said += watch.update(step, {"critic/score/mean": reward, "actor/ref_kl": kl[step - 1], "actor/lr": 0.05})
    said += watch.update(10, {"val-core/reverse/acc/mean@1": 0.0})
    assert said == [
        "step 5: the policy is far from the reference: KL 0 (step 1) -> 6.42 (step 5), median of 5 steps 5.91 "
        "nats per token. Lower actor.optim.lr (0.05) first; then a KL penalty (actor.use_kl_loss, actor.kl_loss_coef)",
        "step 6: the reward collapsed: 0.641 (step 1) -> 0 (mean of 5 steps). Lower actor.optim.lr (0.05) first; then "
        "rollout.n (more samples per prompt) and actor.clip_ratio",
        "step 10: validation got worse: reverse/acc/mean@1 0.906 (step 0) -> 0.000 (step 10). Lower actor.optim.lr "
        "(0.05) first; trainer.save_best keeps the best checkpoint",
    ]


def test_validation_of_a_run_with_a_learning_rate_of_2e_4():
    history = {"val-core/x/acc/mean@1": [(10, 0.907), (12, 0.693)], "actor/lr": [(1, 2e-4)]}
    line = worse_validation(history, prompts=150)
    assert line.startswith("validation got worse: x/acc/mean@1 0.907 (step 10) -> 0.693 (step 12)")
    # 20 prompts: 3 * sqrt((0.907 * 0.093 + 0.693 * 0.307) / 20) = 0.366, more than the difference of 0.214
    assert worse_validation(history, prompts=20) is None
    assert worse_validation({"val-core/x/acc/mean@1": [(10, 0.9), (12, 0.8)]}, prompts=1000) is None  # 11 %
    twice = {"val-core/x/acc/mean@1": [(10, 0.9), (12, 0.75), (14, 0.76)]}  # 17 % and 16 %
    assert "0.760 (step 14)" in worse_validation(twice, prompts=1000)
    assert worse_validation({"val-core/x/acc/maj@8": [(10, 0.9), (12, 0.1)]}) is None


def test_overfitting_of_sft():
    assert "loss 1.000 (step 2) -> 1.060 (step 3)" in worse_validation({"val/loss": series(2.0, 1.0, 1.06)})
    assert worse_validation({"val/loss": series(2.0, 1.0, 1.04)}) is None


def test_the_noise_of_small_batches_is_no_collapse():
    noisy = series(*[0.75, 0.25, 0.5, 0.75, 0.25, 0.0, 0.25, 0.25, 0.0, 0.5])  # four samples per step
    assert reward_collapse({"critic/score/mean": noisy}) is None
    assert reward_collapse({"critic/score/mean": series(*[0.5] * 20, *[0.2] * 5)}) is not None
    assert reward_collapse({"critic/score/mean": series(*[0.5] * 20, *[0.3] * 5)}) is None
    assert reward_collapse({"critic/score/mean": series(*[-1.0] * 10, *[-2.0] * 5)}) is not None  # negative rewards


def test_kl_has_outliers():
    assert kl_blow_up({"actor/ref_kl": series(0.1, 0.1, 30.0, 0.1, 20.0)}) is None
    assert kl_blow_up({"actor/ref_kl": series(0.1, 0.1, 3.0, 1.1, 1.2)}) is not None


def test_entropy_may_fall_while_the_reward_rises():
    entropy = [1.0] * 5 + [0.4] * 5 + [0.05] * 5
    flat = {"actor/entropy": series(*entropy), "critic/score/mean": series(*[0.3] * 15)}
    rising = flat | {"critic/score/mean": series(*[0.3] * 10, *[0.9] * 5)}
    line = entropy_collapse(flat)
    assert (
        line.startswith("the entropy collapsed: 1 (step 1) -> 0.05 (step 15), mean of 5 steps 0.05,")
        and "actor.entropy_coeff" in line
    )
    assert entropy_collapse(rising) is None


def test_an_event_is_reported_once_until_it_is_over():
    watch = DivergenceWatch()
    values = [0.1] * 5 + [2.0] * 5 + [0.8] * 5 + [2.0] * 5 + [0.1] * 5 + [2.0] * 5
    said = [line for step, kl in enumerate(values, 1) for line in watch.update(step, {"actor/ref_kl": kl})]
    # 0.8 is below the threshold of 1, but not below half of it
    assert [line.split(":")[0] for line in said] == ["step 8", "step 28"]
    assert not watch.update(31, {"actor/ref_kl": float("nan")})


def test_no_false_alarm_on_recorded_runs():
    """Runs that learn, of every algorithm, task and seed; those with shuffled rewards unlearn."""
    healthy, shuffled = 0, []
    alarms: dict[str, set[tuple]] = {"the reward collapsed": set(), "validation got worse": set()}
    for record in map(json.loads, RUNS.read_text().splitlines()):
        watch, accuracy, said = DivergenceWatch(prompts=500), dict(record["accuracy"]), []
        for step, reward in enumerate(record["reward"], 1):
            entropy = {"actor/entropy": record["entropy"][step - 1]} if record["entropy"] else {}
            said += watch.update(step, {"critic/score/mean": reward} | entropy)
            if step in accuracy:
                said += watch.update(step, {"val-core/x/acc/mean@1": accuracy[step]})
        hits = [words for words in alarms if any(words in line for line in said)]
        if record["shuffled"]:
            shuffled.append(hits)
            continue
        healthy += 1
        assert not any("entropy" in line.partition(". ")[0] for line in said)
        for words in hits:
            alarms[words].add((record["task"], record["algorithm"], record["seed"]))
    assert healthy >= 213 and all(sum(words in hits for hits in shuffled) > 0.6 * len(shuffled) for words in alarms)
    collapsed = {("reverse", "prime_equal_weights", 3)}  # 0.53 -> 0.26
    fell = {"clip_cov": (3,), "grpo_passk": (1, 3), "ppo": (1,), "rloo": (3,)}  # the accuracy, by 15 to 28 %
    fell = {("countdown3", algorithm, seed) for algorithm, seeds in fell.items() for seed in seeds}
    assert alarms["the reward collapsed"] <= collapsed and alarms["validation got worse"] <= collapsed | fell


def test_the_time_of_a_step_does_not_grow_with_the_run(monkeypatch):
    calls = []

    def counting(history, scale=1.0):
        calls.append(len(history[REWARD[0]]))

    monkeypatch.setattr(divergence, "DETECTORS", {"counting": counting})
    watch = DivergenceWatch()
    for step in range(1, 10_001):
        watch.update(step, {REWARD[0]: 0.5})
    assert calls[:499] == list(range(1, 500))  # every step of a short run
    assert sum(calls) < 10_000 * 600  # values read; every step: 50 million
    before = len(calls)
    watch.update(10_001, {"val-core/d/acc/mean@1": 0.5})
    assert len(calls) == before + 1  # and every validation


def test_no_response_of_the_first_steps_was_correct():
    watch, said = DivergenceWatch(), []
    for step in range(1, 9):
        said += watch.update(step, {"reward/acc": 0.0, "critic/score/min": -1.0, "critic/score/max": -1.0})
    (line,) = said
    assert line.startswith("step 5: no response of the first 5 steps was correct: warm up with SFT (docs/sft.md)")
    zero, some = series(0, 0, 0, 0, 0, 0), series(0, 0, 0, 0, 0.1)
    assert never_correct({"reward/acc": some, "critic/score/min": zero, "critic/score/max": zero}) is None
    assert never_correct({"critic/score/min": zero, "critic/score/max": zero})
    assert never_correct({"critic/score/min": zero, "critic/score/max": some}) is None
    assert never_correct({"critic/score/min": series(-1, 0, 0, 0, 0), "critic/score/max": zero}) is None
    assert never_correct({"reward/acc": series(0, 0, 0, 0)}) is None  # four steps
    assert never_correct({"reward/acc": [(step + 40, 0.0) for step in range(1, 9)]}) is None  # resumed
    assert never_correct({}) is None
