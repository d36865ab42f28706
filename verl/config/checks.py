"""Values that are each allowed but not together: what is compared before anything is loaded.

A check is a function of the typed tree that gives problems; `load_config(extra_checks=[...])` takes further ones.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from verl.config.errors import Problem
from verl.config.node import Tree
from verl.config.tree import Config

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."


def check_tree(config: Tree) -> list[Problem]:
    """Everything that does not fit together in a configuration, whatever is in it."""
    return [*_batches(config), *_sampling(config), *_kl(config), *_rest(config)] if isinstance(config, Config) else []


def notes_of(config: Tree) -> list[str]:
    """What is allowed and may surprise: said once in the log."""
    if not isinstance(config, Config):
        return []
    notes, val = [], config.actor_rollout_ref.rollout.val_kwargs
    if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        notes.append(f"the KL to the reference counts twice: algorithm.use_kl_in_reward and {_ACTOR}use_kl_loss are on")
    if val.temperature > 0 and not val.do_sample:
        notes.append(f"{_ROLLOUT}val_kwargs.temperature {val.temperature} changes nothing while do_sample is false")
    return notes


def _batches(config: Config) -> Iterator[Problem]:
    batch = config.data.train_batch_size
    updates = {_ACTOR: config.actor_rollout_ref.actor, "critic.": config.critic}
    seen = set()
    for prefix, update in updates.items():
        mini = update.ppo_mini_batch_size
        if batch % mini and mini not in seen:
            seen.add(mini)
            below, above = batch // mini * mini, (batch // mini + 1) * mini
            batches = " or ".join(str(size) for size in (below, above) if size)
            yield Problem(
                "data.train_batch_size",
                f"{batch} is not a multiple of {prefix}ppo_mini_batch_size {mini}: use a mini-batch of "
                f"{_divisors_near(batch, mini)}, or a batch of {batches}",
            )


def _divisors_near(number: int, wanted: int) -> str:
    """The divisors of a number next to a wanted one, smaller and larger."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(str(d) for d in (*below, *above))


def _sampling(config: Config) -> Iterator[Problem]:
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    if rollout.temperature <= 0:
        yield Problem(
            _ROLLOUT + "temperature",
            f"found {rollout.temperature}, expected a number > 0: without chance in sampling there is nothing to learn "
            f"from (for greedy validation use {_ROLLOUT}val_kwargs.do_sample=false)",
        )
    if val.do_sample and val.temperature <= 0:
        yield Problem(
            _ROLLOUT + "val_kwargs.temperature",
            f"found {val.temperature} with do_sample true: use a temperature > 0, or do_sample false",
        )
    if val.n > 1 and not val.do_sample:
        yield Problem(
            _ROLLOUT + "val_kwargs.n",
            f"found {val.n} with do_sample false, which gives the same answer {val.n} times: use do_sample true with a "
            "temperature > 0, or n 1",
        )
    lengths = {
        "prompt": (rollout.prompt_length, config.data.max_prompt_length),
        "response": (rollout.response_length, config.data.max_response_length),
    }
    for name, (here, there) in lengths.items():
        if here != there:
            what = f"found {here}, but data.max_{name}_length is {there}: set data.max_{name}_length alone"
            yield Problem(f"{_ROLLOUT}{name}_length", what)


def _kl(config: Config) -> Iterator[Problem]:
    use = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    if use and config.actor_rollout_ref.ref.enable is False:
        asked = "algorithm.use_kl_in_reward" if config.algorithm.use_kl_in_reward else _ACTOR + "use_kl_loss"
        yield Problem("actor_rollout_ref.ref.enable", f"false, but {asked} is true and needs the reference: change one")


def _rest(config: Config) -> Iterator[Problem]:
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield Problem("trainer.resume_from_path", "null, but trainer.resume_mode is resume_path: name a folder")
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        yield Problem(
            "trainer.resume_from_path",
            f"given, but trainer.resume_mode is {trainer.resume_mode}: use trainer.resume_mode=resume_path",
        )
    if actor.policy_loss.loss_mode == "dro" and actor.policy_loss.dro_beta is None:
        yield Problem(_ACTOR + "policy_loss.dro_beta", "null, but the loss dro needs it: use a number > 0")
    lo, hi = actor.policy_loss.clip_cov_lb, actor.policy_loss.clip_cov_ub
    if lo >= hi:
        yield Problem(_ACTOR + "policy_loss.clip_cov_lb", f"found {lo}, expected less than clip_cov_ub {hi}")
    custom, registered = config.reward.custom_reward_function.path, config.reward.reward_function
    if custom and registered:
        what = f"{registered!r}, but reward.custom_reward_function.path {custom!r} says what scores as well: keep one"
        yield Problem("reward.reward_function", what)
    manager = config.reward.reward_manager
    if (manager.source == "importlib") != (manager.module.path is not None):
        yield Problem("reward.reward_manager.module.path", "goes together with reward.reward_manager.source=importlib")
    cls = config.data.custom_cls
    if (cls.path is None) != (cls.name is None):
        yield Problem("data.custom_cls.name", f"path {cls.path!r} and name {cls.name!r}: give both or neither")


def check_inputs(config: Config) -> Iterator[Problem]:
    """For `extra_checks` of a run that reads its own model and data: they are named, and local files are there."""
    model = "actor_rollout_ref.model.path"
    paths = {model: config.actor_rollout_ref.model.path, "critic.model.path": config.critic.model.path}
    if paths[model] is None:
        yield Problem(model, "missing: give the folder or the HuggingFace id of the model to train")
    for path in dict.fromkeys(paths.values()):
        yield from _folder(next(key for key in paths if paths[key] == path), path)
    if not config.data.train_files:
        yield Problem("data.train_files", "missing: give one or more .parquet, .json or .jsonl files")
    yield from _files("data.train_files", config.data.train_files)
    yield from _files("data.val_files", config.data.val_files)


def _folder(key: str, path: str | None) -> Iterator[Problem]:
    """A model that is written like a local path must be there; another name is an id of a hub."""
    if path and path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        yield Problem(key, f"there is no folder {path!r}")


def _files(key: str, paths: Iterable[str]) -> Iterator[Problem]:
    for path in paths:
        file = Path(path).expanduser()
        if file.suffix not in (".parquet", ".json", ".jsonl"):
            yield Problem(key, f"{path!r}: expected a .parquet, .json or .jsonl file")
        elif not file.is_file():
            yield Problem(key, f"there is no file {path!r} (looked at {file.resolve()})")
