"""How fast each algorithm learns a small task, and how well. One JSON line per run, and one per algorithm.

    python benchmarks/learning.py --task reverse --algorithm grpo dapo --seeds 1 2 3 --out outputs/learning

benchmarks/learning_pool.py runs many of them in parallel.

All runs of a task start from the same tiny model after an SFT warm-up (examples/quickstart). A seed determines the
prompts, their order and the sampling, and is shared by all algorithms. 64 prompts x 8 responses per step, lr 3e-4, two
updates per step (one for methods without a clip, as noted), reward 1 if correct, otherwise 0, no KL. `reward` is the
mean reward of all responses of a step; `responses` counts all responses generated for training, including filtered
ones and greedy baselines; `accuracy` is greedy, on 500 held-out prompts, every 10 steps; `sampled`, every 100 steps,
samples 8 responses to each of them: the fraction of correct responses, and of prompts with at least one (pass@8).
`entropy` is that of the policy before the update, if the flow computes it. The threshold is reached if the mean reward
of ten steps is. `cpu_seconds` do not depend on the load of the machine, `seconds` do.

--shuffle-rewards is the control: rewards are shuffled, so the policy should not improve. OUT/runs.jsonl collects the
lines of all runs, and runs listed there are skipped; OUT/<task>-<algorithm>[-shuffled].png shows the curves.
"""

import argparse
import json
import logging
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.quickstart.run import CRITIC, MODEL_SIZE, SCORER, WARM_UP_STEPS, warm_up
from examples.quickstart.tasks import TASKS, write_task
from examples.quickstart.tiny_model import tiny_model
from verl.config.presets import PRESETS
from verl.dataflow import Operator, Pipeline
from verl.recipe.dapo import DAPOTrainer
from verl.recipe.dpo import DPOTrainer
from verl.recipe.prime import PRIMETrainer
from verl.tracking.curves import WINDOW, moving_mean
from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo.dynamic_sampling import PromptQueue
from verl.trainer.ppo.flow import build_validation_flow
from verl.trainer.ppo.operators import generate, repeat
from verl.trainer.ppo_trainer import PPOTrainer

TEST_FREQ, SAMPLED_FREQ = 10, 100
PROMPTS, RESPONSES = 64, 8
START_SEED = 1
#: threshold of the mean reward, and steps of a run
THRESHOLD = {"reverse": 0.85, "sort": 0.6, "countdown3": 0.55, "digit": 0.6}
STEPS = {"reverse": 100, "sort": 100, "countdown3": 300, "digit": 100}


@dataclass(frozen=True)
class Method:
    """The trainer of a method, and its settings in addition to the common ones."""

    trainer: type[PPOTrainer] = LocalPPOTrainer
    settings: tuple[str, ...] = ()


_GRPO, _CORRECTION = "algorithm.adv_estimator=grpo", "algorithm.rollout_correction"
_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
#: strictly on-policy methods: they have no clip for a second update
_ONE_UPDATE = f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}"
#: a task that has been learned is not an error here
_GO_ON = "algorithm.filter_groups.at_limit=fill"
_FILTER_ACC = "algorithm.filter_groups.metric=acc"
_SPPO = ("algorithm.adv_estimator=sppo", f"{_LOSS}=sppo")
_PRIME = ("prime.optim.lr=3e-4", "prime.ppo_mini_batch_size=32", f"actor_rollout_ref.rollout.n={RESPONSES}")
_ALL = "prime.filter.enable=false"
_LESS = "algorithm.reward_dpo_coef=1"
RECIPES: dict[str, Method] = {
    "dapo": Method(DAPOTrainer, ("reward.reward_kwargs.overlong_buffer.enable=false", _GO_ON)),
    "prime": Method(PRIMETrainer, (*_PRIME, _ALL, _LESS)),
    "prime_equal_weights": Method(PRIMETrainer, (*_PRIME, _ALL)),
    "prime_outcome_only": Method(PRIMETrainer, (*_PRIME, _ALL, "algorithm.reward_dpo_coef=0")),
    "prime_filtered": Method(PRIMETrainer, (*_PRIME, _LESS)),
    "online_dpo": Method(DPOTrainer, (_ONE_UPDATE, "algorithm.filter_groups.enable=true", _FILTER_ACC)),
    "online_dpo_with_ties": Method(DPOTrainer, (_ONE_UPDATE,)),
    "sppo": Method(settings=_SPPO),
    # one idea on top of grpo
    "clip_higher": Method(settings=(_GRPO, "actor_rollout_ref.actor.clip_ratio_high=0.28")),
    "entropy_bonus": Method(settings=(_GRPO, "actor_rollout_ref.actor.entropy_coeff=0.01")),
    # losses without a preset
    "reinforce": Method(settings=(_GRPO, f"{_LOSS}=reinforce", _ONE_UPDATE)),
    "dro": Method(settings=(_GRPO, f"{_LOSS}=dro", "actor_rollout_ref.actor.policy_loss.dro_beta=0.3")),
    "bypass_mode": Method(settings=(_GRPO, f"{_LOSS}=bypass_mode", f"{_CORRECTION}.bypass_mode=true")),
}
#: required settings of presets
FURTHER: dict[str, tuple[str, ...]] = {
    "ppo": tuple(CRITIC),
    "gpg": (_ONE_UPDATE,),
    "drgrpo": ("actor_rollout_ref.actor.loss_scale_factor=8",),
    "gdpo": ("algorithm.gdpo_reward_keys=[acc]",),
}
#: the mean score of all responses before filtering; otherwise critic/score/mean
BEFORE_CHOICE = ("filter_groups/acc_mean", "prime/acc_mean")


def method_of(name: str) -> Method:
    """A recipe, or the trainer under the preset of that name."""
    return RECIPES.get(name) or Method(settings=(f"algorithm.name={name}", *FURTHER.get(name, ())))


@dataclass
class Curve:
    """One run. reward, responses, entropy: after each step; accuracy: [step, share]; sampled: [step, mean, pass@8].

    See the top of this file.
    """

    task: str
    algorithm: str
    seed: int
    shuffled: bool = False
    reward: list[float] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    entropy: list[float] = field(default_factory=list)
    sampled: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, int, bool]:
        """The key that identifies the run."""
        return self.task, self.algorithm, self.seed, self.shuffled

    @property
    def title(self) -> str:
        """<task>-<algorithm>[-shuffled]"""
        return f"{self.task}-{self.algorithm}" + ("-shuffled" if self.shuffled else "")

    def responses_to(self, threshold: float) -> int | None:
        """Responses until the mean reward of ten steps reached the threshold; None if it never did."""
        means = zip(self.responses[WINDOW - 1 :], moving_mean(self.reward, WINDOW)[WINDOW - 1 :])
        return next((responses for responses, mean in means if mean >= threshold), None)


def overrides(task: str, model: Path, data: Path, out: Path, steps: int, seed: int) -> list[str]:
    """The common settings."""
    return [
        "algorithm.use_kl_in_reward=false",
        "actor_rollout_ref.actor.use_kl_loss=false",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=16",
        "data.max_response_length=" + ("8" if task != "digit" else "12"),
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.rollout.n={RESPONSES}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=false",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.optim.weight_decay=0.01",
        f"reward.custom_reward_function.path={SCORER}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={TEST_FREQ}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={out}",
        "trainer.logger=[jsonl]",
        "trainer.resume_mode=disable",
    ]


def learn(method: Method, curve: Curve, settings: list[str]) -> None:
    """Train; fills the curve. settings: all of them, the method's too."""
    start, cpu_start = time.perf_counter(), time.process_time()
    trainer = method.trainer(overrides=settings)
    operators = {op.name: op for op in trainer.pipeline.operators}
    source = operators["prompts"].func
    requested = source.size if isinstance(source, PromptQueue) else PROMPTS
    per_prompt = trainer.config.actor_rollout_ref.rollout.n + ("reward_baseline" in operators)

    sampling = sampled_validation(trainer)

    def record(report: StepReport) -> None:
        metrics = report.metrics
        prompts = int(metrics.get("filter_groups/prompts", requested))
        curve.responses.append(prompts * per_prompt + (curve.responses[-1] if curve.responses else 0))
        means = [metrics[name] for name in BEFORE_CHOICE if name in metrics]
        curve.reward.append(round(means[0] if means else metrics["critic/score/mean"], 4))
        if report.step % TEST_FREQ == 0 or report.step == report.total_steps:
            curve.accuracy.append((report.step, metrics[f"val-core/{curve.task}/acc/mean@1"]))
        if "actor/entropy" in metrics:
            curve.entropy.append(round(metrics["actor/entropy"], 4))
        if report.step % SAMPLED_FREQ == 0 or report.step == report.total_steps:
            greedy, trainer.validation = trainer.validation, sampling
            scores = trainer.validate()
            trainer.validation = greedy
            mean, best = (scores[f"val-core/{curve.task}/acc/{kind}@{RESPONSES}"] for kind in ("mean", "best"))
            curve.sampled.append((report.step, round(mean, 4), round(best, 4)))

    trainer.on_step.append(record)
    trainer.fit()
    curve.seconds = round(time.perf_counter() - start, 1)
    curve.cpu_seconds = round(time.process_time() - cpu_start, 1)


def sampled_validation(trainer: PPOTrainer) -> Pipeline:
    """The validation flow with 8 responses per prompt, sampled as in training."""
    flow = build_validation_flow(trainer.config, trainer.roles, trainer.reward_manager)
    gen = flow["gen"]
    flow.replace("repeat", Operator("repeat", repeat(RESPONSES), reads=("uid",)))
    flow.replace("gen", Operator("gen", generate(trainer.roles, "train"), reads=gen.reads, writes=gen.writes))
    return flow.compile(inputs=("prompt_ids", "uid", "data_source", "reward_model"))


def start_model(task: str, out: Path) -> Path:
    """The start model of all runs of a task: random weights after an SFT warm-up; created once."""
    folder, imitation = out / f"{task}-start", WARM_UP_STEPS[task]
    if not (folder / "warm").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        model = tiny_model("llama", folder / "model", seed=START_SEED, size=MODEL_SIZE[task])
        write_task(task, folder / "data", rows=PROMPTS * STEPS[task], sft_rows=64 * imitation, seed=START_SEED)
        shutil.copytree(warm_up(model, folder / "data", folder / "sft", imitation, START_SEED), folder / "making")
        (folder / "making").rename(folder / "warm")
    return folder / "warm"


def spread(curves: list[Curve], measure: Callable[[Curve], float | None]) -> list[float | None]:
    """Median, minimum and maximum over the seeds. None means never, and is above every number."""
    values = [math.inf if (value := measure(curve)) is None else value for curve in curves]
    bounds = (statistics.median(values), min(values), max(values))
    return [None if value == math.inf else round(value, 4) for value in bounds]


def summary(curves: list[Curve], threshold: float) -> dict[str, object]:
    """[median, minimum, maximum] over the seeds; null if a run never reached the threshold."""
    return {
        "task": curves[0].task,
        "algorithm": curves[0].algorithm,
        "shuffled": curves[0].shuffled,
        "seeds": sorted(curve.seed for curve in curves),
        "first_reward": spread(curves, lambda c: statistics.mean(c.reward[:WINDOW])),
        "last_reward": spread(curves, lambda c: statistics.mean(c.reward[-WINDOW:])),
        "accuracy": spread(curves, lambda c: c.accuracy[-1][1]),
        f"responses_to_{threshold}": spread(curves, lambda c: c.responses_to(threshold)),
        "seconds": spread(curves, lambda c: c.seconds),
        "cpu_seconds": spread(curves, lambda c: c.cpu_seconds),
    }


def draw(curves: list[Curve], path: Path) -> None:
    """Plot reward over responses and greedy accuracy over steps: a line per seed, gray for the control."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for curve in curves:
        look = {"color": "0.6", "linestyle": "--"} if curve.shuffled else {}
        label = "shuffled rewards" if curve.shuffled else f"seed {curve.seed}"
        left.plot(curve.responses, moving_mean(curve.reward), label=label, **look)
        right.plot(*zip(*curve.accuracy), marker="o", markersize=3, **look)
    name = f"{curves[0].algorithm} on {curves[0].task}"
    left.set(title=f"{name}: reward, mean of {WINDOW} steps", xlabel="responses generated", ylim=(0, 1))
    right.set(title="greedy accuracy, 500 unseen prompts", xlabel="step", ylim=(0, 1))
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.title.set_size(10)
    left.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=80)


def read_runs(path: Path) -> list[Curve]:
    """Read the runs of a JSON lines file; none if there is no file."""
    return (
        [Curve(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    )


def run(curve: Curve, method: Method, out: Path, steps: int, overrides_of_run: Sequence[str]) -> None:
    """Run from the start model of the task; fills the curve and appends it to OUT/runs.jsonl."""
    folder = out / f"{curve.title}-seed{curve.seed}"
    model = start_model(curve.task, out)
    data = write_task(curve.task, folder / "data", rows=PROMPTS * steps, seed=curve.seed)
    settings = overrides(curve.task, model, data, folder, steps, curve.seed)
    settings.append(f"algorithm.shuffle_rewards={str(curve.shuffled).lower()}")
    learn(method, curve, [*settings, *method.settings, *overrides_of_run])
    with (out / "runs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(curve)) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), default="reverse")
    parser.add_argument("--algorithm", nargs="+", default=["grpo"], choices=sorted({*PRESETS, *RECIPES}))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--threshold", type=float, help=f"threshold of the mean reward; default: {THRESHOLD}")
    parser.add_argument("--out", type=Path, default=Path("outputs/learning"))
    parser.add_argument("--shuffle-rewards", action="store_true", help="control: shuffle the rewards")
    parser.add_argument("--override", nargs="*", default=[], metavar="key=value", help="any config key")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.basicConfig()  # to stderr: stdout has only the JSON lines
    logging.getLogger("verl").setLevel(logging.ERROR)
    steps = args.steps or STEPS[args.task]
    for name in args.algorithm:
        curves = []
        for seed in args.seeds:
            curve = Curve(args.task, name, seed, args.shuffle_rewards)
            finished = {record.key: record for record in read_runs(args.out / "runs.jsonl")}
            if curve.key not in finished:
                run(curve, method_of(name), args.out, steps, args.override)
                print(json.dumps(asdict(curve)), flush=True)
            curves.append(finished.get(curve.key, curve))
        print(json.dumps(summary(curves, args.threshold or THRESHOLD[args.task])), flush=True)
        draw(curves, args.out / f"{curves[0].title}.png")


if __name__ == "__main__":
    main()
