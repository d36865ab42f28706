"""Learning curves of distillation and of the recipes on tiny models, each with its control. One JSON line per method.

    python benchmarks/recipes.py distillation --seeds 1 2 3 --out outputs/recipes

All runs of an experiment start from the same tiny model after an SFT warm-up (`start_model` in benchmarks/learning.py).
A seed determines prompts and sampling, and is shared by the methods. OUT/<experiment>.json has the curves of every run
(a value per step) and a summary: median, minimum and maximum over the seeds of the mean of the last ten steps;
OUT/<experiment>.png shows them. Runs that are in the file are not repeated.
"""

import argparse
import importlib
import json
import logging
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning import Curve, Method, learn, overrides, start_model
from examples.quickstart.tasks import write_task
from examples.tools import run as tools
from verl.recipe.entropy import EntropyTrainer
from verl.recipe.flowrl import FlowRLTrainer
from verl.recipe.gkd import GKDTrainer
from verl.recipe.rep_exp import RepExpTrainer
from verl.recipe.safe_rlhf import SafeRLHFTrainer
from verl.recipe.spin import SPINTrainer
from verl.tracking.curves import WINDOW, moving_mean
from verl.trainer.base import StepReport
from verl.trainer.ppo_trainer import PPOTrainer

PROMPTS, TEACHER_STEPS = 64, 100
_WHEN = ((0, "before"), (-1, "after"))
HERE = Path(__file__)


@dataclass(frozen=True)
class Experiment:
    """Methods that are compared.

    Attributes:
        metrics: name in the results -> metric of a step.
        methods: name -> trainer and settings; {start} and {teacher} are the start model and the same after GRPO.
        common: settings of all methods.
        task, steps: of benchmarks/learning.py, and the steps of a run.
        limit: a horizontal line in the picture of the first metric.
        tools: whether `task` is one of examples/tools/run.py, with its trainer.
    """

    metrics: dict[str, str]
    methods: dict[str, Method]
    common: tuple[str, ...] = ()
    task: str = "reverse"
    steps: int = 40
    limit: float | None = None
    tools: bool = False


_LOSS, _ACTOR = "distillation.distillation_loss.", "actor_rollout_ref.actor."
_TEACHER = ("distillation.enabled=true", "distillation.teacher_models.teacher.model_path={teacher}")
_TOP = (f"{_LOSS}loss_mode=forward_kl_topk", f"{_LOSS}topk=8")
_ALONE = f"{_LOSS}use_task_rewards=false"
_ACCURACY = {"accuracy": "critic/score/mean"}
_GRPO = "algorithm.name=grpo"
_ONE_UPDATE = f"{_ACTOR}ppo_mini_batch_size={PROMPTS}"
_COST = f"reward.custom_reward_function.path={HERE}"
_SAFE = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=false", "critic.optim.lr=1e-3", _COST)


def _distilled(*settings: str) -> Method:
    return Method(PPOTrainer, (_GRPO, *_TEACHER, *settings))


def _tools(task: str, steps: int, reward: str) -> Experiment:
    """A recipe with tools, and its controls."""
    shuffled, alone = "algorithm.shuffle_rewards=true", f"{tools.ROLLOUT}.agent.default_agent_loop=single_turn_agent"
    methods = {task: (), "control: shuffled rewards": (shuffled,), "control: no tool": (alone,)}
    return Experiment(
        {reward: "critic/score/mean", "tool calls": "rollout/tool_calls"},
        {name: Method(settings=settings) for name, settings in methods.items()},
        task=task,
        steps=steps,
        tools=True,
    )


EXPERIMENTS = {
    "distillation": Experiment(
        _ACCURACY | {"reverse_kl": "distillation/reverse_kl"},
        {
            "rewards": Method(PPOTrainer, (_GRPO,)),
            "forward_kl_topk": _distilled(*_TOP, _ALONE),
            "k1_policy_gradient": _distilled(f"{_LOSS}loss_mode=k1", f"{_LOSS}use_policy_gradient=true", _ALONE),
            "k2": _distilled(f"{_LOSS}loss_mode=k2", _ALONE),
            "k3": _distilled(f"{_LOSS}loss_mode=k3", _ALONE),
            "abs": _distilled(f"{_LOSS}loss_mode=abs", _ALONE),
            "rewards_and_forward_kl_topk": _distilled(*_TOP),
            "control: teacher = start": Method(
                PPOTrainer,
                (_GRPO, *_TOP, _ALONE, _TEACHER[0], "distillation.teacher_models.teacher.model_path={start}"),
            ),
        },
        ("actor_rollout_ref.rollout.n=4",),
    ),
    "safe_rlhf": Experiment(
        {"cost": "safe_rlhf/cost_mean", "reward": "critic/score/mean", "lambda": "safe_rlhf/lambda"},
        {
            "safe_rlhf": Method(SafeRLHFTrainer, (*_SAFE, "safe_rlhf.lambda_gain=8")),
            "control: no multiplier": Method(
                SafeRLHFTrainer, (*_SAFE, "safe_rlhf.lambda_init=1e-9", "safe_rlhf.lambda_lr=0")
            ),
        },
        ("safe_rlhf.cost_limit=0.3", "actor_rollout_ref.rollout.n=4", f"{_ACTOR}optim.lr=1e-4"),
        steps=60,
        limit=0.3,
    ),
    "entropy": Experiment(
        {"entropy": "actor/entropy", "accuracy": "critic/score/mean"},
        {
            "kl_cov": Method(
                EntropyTrainer,
                (f"{_ACTOR}policy_loss.loss_mode=kl_cov", f"{_ACTOR}policy_loss.kl_cov_ratio=0.02"),
            ),
            "kl_cov_strong": Method(
                EntropyTrainer,
                (
                    *(f"{_ACTOR}policy_loss.loss_mode=kl_cov", f"{_ACTOR}policy_loss.kl_cov_ratio=0.2"),
                    f"{_ACTOR}policy_loss.ppo_kl_coef=20",
                ),
            ),
            "clip_cov": Method(
                EntropyTrainer,
                (
                    *(f"{_ACTOR}policy_loss.loss_mode=clip_cov", f"{_ACTOR}policy_loss.clip_cov_ratio=0.02"),
                    *(f"{_ACTOR}policy_loss.clip_cov_lb=0.1", f"{_ACTOR}policy_loss.clip_cov_ub=100"),
                ),
            ),
            "control: vanilla": Method(EntropyTrainer, (f"{_ACTOR}policy_loss.loss_mode=vanilla",)),
        },
        (
            *("reward.reward_kwargs.overlong_buffer.enable=false", "algorithm.filter_groups.enable=false"),
            f"{_ACTOR}ppo_mini_batch_size=16",
        ),
        steps=60,
    ),
    "flowrl": Experiment(
        {"entropy": "actor/entropy", "accuracy": "critic/score/mean"},
        {
            "flowrl": Method(FlowRLTrainer, (f"{_ACTOR}policy_loss.loss_kwargs.flowrl_beta=1",)),
            "control: grpo": Method(PPOTrainer, (_GRPO,)),
        },
        steps=60,
    ),
    "gkd": Experiment(
        {"greedy accuracy": "val-core/reverse/acc/mean@1", "reverse_kl": "distillation/reverse_kl"},
        {
            "gkd": Method(GKDTrainer, _TEACHER[1:]),
            "control: teacher = start": Method(GKDTrainer, ("distillation.teacher_models.teacher.model_path={start}",)),
        },
        (f"{_LOSS}topk=8", "actor_rollout_ref.rollout.n=4", _ONE_UPDATE),
    ),
    "spin": Experiment(
        {"greedy accuracy": "val-core/reverse/acc/mean@1", "dpo_accuracy": "dpo/accuracy"},
        {
            "spin": Method(SPINTrainer, ("trainer.ref_update_freq=20",)),
            "reference not updated": Method(SPINTrainer, ("trainer.ref_update_freq=-1",)),
            "control: responses to other prompts": Method(SPINTrainer, ("spin.response_key=shuffled",)),
        },
        (_ONE_UPDATE, "actor_rollout_ref.rollout.n=1"),
        steps=60,
    ),
    "rep_exp": Experiment(
        {"entropy": "actor/entropy", "accuracy": "critic/score/mean", "bonus": "rep_exp/bonus_mean"},
        {
            "rep_exp": Method(RepExpTrainer, ("rep_exp.beta=0.5",)),
            "control: no bonus": Method(RepExpTrainer, ("rep_exp.beta=0",)),
        },
    ),
    "search_r1": _tools("search_r1", 15, "accuracy"),
    "retool": _tools("retool", 15, "reward"),
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> dict:
    """The reward of `safe_rlhf`: for letters, most for the first ones from a to e, each of which costs 1/6."""
    unsafe, safe = (sum(letter in letters for letter in solution_str) / 6 for letters in ("abcde", "fghij"))
    return {"score": 2 * unsafe - unsafe**2 + 0.5 * safe, "cost": unsafe}


def train_teacher(out: Path, task: str, start: Path) -> Path:
    """The start model after GRPO, in the Hugging Face format; trained once."""
    folder = out / f"{task}-teacher"
    model = folder / f"global_step_{TEACHER_STEPS}" / "actor" / "huggingface"
    if not model.is_dir():
        data = write_task(task, folder / "data", rows=PROMPTS * TEACHER_STEPS, seed=100)
        settings = overrides(task, start, data, folder, TEACHER_STEPS, seed=100)
        saving = ["trainer.save_freq=1000", f"{_ACTOR}checkpoint.save_contents=[model,hf_model]"]
        learn(Method(), Curve(task, "teacher", 100), [*settings, _GRPO, *saving])
    return model


def run(experiment: Experiment, name: str, seed: int, out: Path) -> dict[str, object]:
    """One run of a method: its curves, and the greedy accuracy on 500 unseen prompts after the last step."""
    if experiment.tools:
        return run_tools(experiment, name, seed, out)
    task, steps, method = experiment.task, experiment.steps, experiment.methods[name]
    start, folder = start_model(task, out), out / f"{name.replace(': ', '-').replace(' ', '_')}-seed{seed}"
    own = "\n".join((*experiment.common, *method.settings))
    teacher = train_teacher(out, task, start) if "{teacher}" in own else start
    own = own.replace("{teacher}", str(teacher)).replace("{start}", str(start)).split("\n")
    data = write_task(task, folder / "data", rows=PROMPTS * steps, seed=seed)
    add_responses(data / "train.parquet")
    trainer = method.trainer(overrides=[*overrides(task, start, data, folder, steps, seed), *own])
    curves: dict[str, list[float]] = {}

    def record(report: StepReport) -> None:
        for curve, metric in experiment.metrics.items():
            seen = curves.get(curve, [])
            if metric in report.metrics:
                curves[curve] = [*seen, round(report.metrics[metric], 5)]
            elif seen:  # of a validation: the last one
                curves[curve] = [*seen, seen[-1]]

    trainer.on_step.append(record)
    last = trainer.fit()
    greedy = [value for metric, value in last.items() if metric.startswith("val-core/")][:1]
    return {"method": name, "seed": seed, "greedy_accuracy": greedy[0] if greedy else None, **curves}


def run_tools(experiment: Experiment, name: str, seed: int, out: Path) -> dict[str, object]:
    """As `run`, of a task with tools. held_out: mean reward of 200 unseen prompts, sampled, before and after."""
    task = importlib.import_module(f"examples.tools.{experiment.task}")
    start, folder = out / f"{experiment.task}-start", out / f"{experiment.task}-{name.replace(': ', '-')}-seed{seed}"
    if not start.is_dir():
        (out / "warm").mkdir(parents=True)
        shutil.copytree(tools.warm_up(task, experiment.task, out / "warm", seed=1), start)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    args = argparse.Namespace(task=experiment.task, steps=experiment.steps, test_freq=experiment.steps, seed=seed)
    vars(args).update(out=folder, shuffle_rewards=False, override=experiment.methods[name].settings)
    steps = tools.learn(args, task, start)
    curves = {curve: [round(step[metric], 4) for step in steps] for curve, metric in experiment.metrics.items()}
    return {"method": name, "seed": seed, "held_out": [value for _, value in tools.validation(folder)], **curves}


def add_responses(path: Path) -> None:
    """Add the columns `response`, correct responses, and `shuffled`, those to other prompts."""
    table = pq.read_table(path)
    responses = [row["ground_truth"] for row in table["reward_model"].to_pylist()]
    table = table.append_column("response", pa.array(responses))
    pq.write_table(table.append_column("shuffled", pa.array(responses[7:] + responses[:7])), path)


def spread(values: list[float]) -> list[float]:
    return [round(f(values), 4) for f in (statistics.median, min, max)]


def summary(experiment: Experiment, runs: list[dict]) -> dict[str, object]:
    """Median, minimum and maximum over the seeds of the first step, and of the mean of the last ten."""
    curves = [curve for curve in experiment.metrics if curve in runs[0]]
    first = {f"{curve}_first": spread([run[curve][0] for run in runs])[0] for curve in curves}
    last = {f"{curve}_last": spread([statistics.mean(run[curve][-WINDOW:]) for run in runs]) for curve in curves}
    greedy = {}
    if "held_out" in runs[0]:
        greedy = {f"held_out_{when}": spread([run["held_out"][i] for run in runs]) for i, when in _WHEN}
    elif "accuracy" in curves:
        greedy = {"greedy_accuracy": spread([run["greedy_accuracy"] for run in runs])}
    return {"method": runs[0]["method"], "seeds": [run["seed"] for run in runs], **first, **last, **greedy}


def draw(experiment: Experiment, runs: list[dict], path: Path) -> None:
    """A panel for each of the first two metrics: the median of the seeds and their range, gray for the control."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    for axis, curve in zip(figure.subplots(1, 2), [*experiment.metrics][:2] * 2):
        for i, name in enumerate(experiment.methods):
            rows = [moving_mean(run[curve], WINDOW) for run in runs if run["method"] == name and curve in run]
            if not rows:
                continue
            columns = list(zip(*rows))
            steps = range(experiment.steps - len(columns) + 1, experiment.steps + 1)
            look = {"color": "0.5", "linestyle": "--"} if name.startswith("control") else {"color": f"C{i}"}
            (line,) = axis.plot(steps, [statistics.median(c) for c in columns], label=name, **look)
            bounds = [min(c) for c in columns], [max(c) for c in columns]
            axis.fill_between(steps, *bounds, alpha=0.15, color=line.get_color())
        axis.set(title=f"{curve}, mean of {WINDOW} steps", xlabel="step")
        axis.grid(alpha=0.25)
    first = figure.axes[0]
    if experiment.limit is not None:
        first.axhline(experiment.limit, color="red", linewidth=1)
    first.legend(fontsize=7)
    figure.savefig(path, dpi=80)


def record_runs(name: str, seeds: list[int], methods: list[str] | None, out: Path) -> None:
    """Run what is missing, and write OUT/<name>.json and OUT/<name>.png after every run."""
    experiment, results = EXPERIMENTS[name], out / f"{name}.json"
    runs = json.loads(results.read_text(encoding="utf-8"))["runs"] if results.is_file() else []
    for method in methods or experiment.methods:
        for seed in seeds:
            if (method, seed) in {(finished["method"], finished["seed"]) for finished in runs}:
                continue
            runs.append(run(experiment, method, seed, out))
            groups = [[each for each in runs if each["method"] == other] for other in experiment.methods]
            content = {"summary": [summary(experiment, group) for group in groups if group], "runs": runs}
            results.write_text(json.dumps(content).replace('{"method"', '\n{"method"') + "\n", encoding="utf-8")
        print(json.dumps(summary(experiment, [each for each in runs if each["method"] == method])), flush=True)
    draw(experiment, runs, out / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=sorted(EXPERIMENTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", help="default: all of the experiment")
    parser.add_argument("--out", type=Path, default=Path("outputs/recipes"))
    args = parser.parse_args()
    logging.basicConfig()
    logging.getLogger("verl").setLevel(logging.ERROR)
    record_runs(args.experiment, args.seeds, args.methods, args.out)


if __name__ == "__main__":
    main()
