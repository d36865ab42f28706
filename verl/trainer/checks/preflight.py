"""Preflight: all checks before the first step, in one ordered list.

    run = prepare_run(...)             # SETTINGS: all problems at once; then CONFIG, one by one
    run.inputs = load_inputs(...)
    run_checks(run, INPUTS)            # of tokenizer, datasets and rewards
    run_checks(run, FLOW)              # after the trainer has compiled its flow

No weights are loaded before the last check has passed. `--dry-run` on any command runs the list and stops. A new check
is one function of a `Run` and one line in `CHECKS`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from verl.agents.tools.parsers import TOOL_PARSERS
from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import parameter_names
from verl.algorithms.policy_losses import get_policy_loss_fn
from verl.checkpoints.atomic import check_folder
from verl.config import (
    ConfigError,
    Problem,
    check_code,
    check_critic,
    check_data,
    check_models,
    check_registered,
    load_config,
    schema,
    settings_without_effect,
)
from verl.config.checks.settings import check_combinations
from verl.config.fields import Schema
from verl.config.inputs import check_code_file
from verl.config.presets import PRESETS
from verl.config.schema.offline import EvalConfig, GenerationConfig
from verl.config.sources import Overrides
from verl.data.collate import check_dataset
from verl.data.mixture import datasets_of
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.engines.base import ENGINES, check_device
from verl.engines.loading import check_kernels
from verl.registry import did_you_mean, import_module, location_of
from verl.rollout.base import ROLLOUT_ENGINES
from verl.server.agents import TRIAL_INFO
from verl.single_controller.cluster import CLUSTERS, Cluster, make_cluster
from verl.single_controller.local.cluster import ProcessCluster
from verl.tracking.run_record import collected
from verl.tracking.tracking import check_trackers
from verl.trainer.checks import planning
from verl.trainer.checks.agents import agent_loop_names, check_agent, check_tools_in_prompts
from verl.trainer.checks.algorithm import group_size, micro_batch_losses, required_settings, unused_settings
from verl.trainer.checks.model_limits import MegatronRole, check_megatron, check_moe, check_reads_tokens_of
from verl.trainer.checks.models import check_model
from verl.trainer.guards.faults import check_faults
from verl.trainer.ppo.dynamic_sampling import SUMMED_REWARD
from verl.trainer.ppo.flow import needs_critic
from verl.trainer.ppo.rollout_correction import check_correction
from verl.trainer.startup.inputs import Inputs, base_settings, dataset_class, try_rewards
from verl.trainer.startup.launch import Recipe
from verl.trainer.startup.roles import idle_warning, pools_of, roles_of
from verl.trainer.startup.torchrun import check_launcher
from verl.utils.device import resolve_device
from verl.utils.log import setup_logging

logger = logging.getLogger("verl.trainer")

SETTINGS, CONFIG, INPUTS, FLOW = "settings", "config", "inputs", "flow"
"""When a check runs: while settings are read; with settings and imported modules; with inputs; with the flow."""

_TRAINING = (schema.Config, schema.SFTConfig)
_OUTPUT_FOLDERS = ("default_local_dir", "rollout_data_dir", "validation_data_dir")


@dataclass
class Run:
    """A run before its first step. Later stages fill later attributes.

    Attributes:
        config: the settings.
        recipe: additions of a recipe.
        rows_given: the training dataset was given as an object, so no file has to exist.
        reward_given: the reward was given as an object.
        own_reward: a reward that was given as an object, or registered by custom code.
        backend: "local" or "ray".
        cluster: set from stage CONFIG on; None for commands without workers.
        inputs: set from stage INPUTS on.
        reward_values: names of the values that the reward function returned in its trial call.
        columns: columns that the operators write; set from stage FLOW on.
        passed: names of the checks that have passed.
        warnings: what the checks have logged as warnings.
        is_recorded: whether its folder has results of this run, rather than none or those of an earlier run.
        working_dir: where the run started; relative paths refer to it, also if user code changes the directory.
    """

    config: Schema
    recipe: Recipe = field(default_factory=Recipe)
    rows_given: bool = False
    reward_given: bool = False
    own_reward: Any = None
    backend: str = "local"
    cluster: Cluster | None = None
    inputs: Inputs | None = None
    reward_values: set[str] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)
    passed: list[str] = field(default_factory=list)
    warnings: list[logging.LogRecord] = field(default_factory=list)
    is_recorded: bool = False
    working_dir: Path = field(default_factory=Path.cwd)

    def check_other(self, config: Schema) -> None:
        """Raise ValueError if the run could not continue with other settings."""
        run = replace(self, config=config, passed=[], warnings=[])
        for stage in (SETTINGS, CONFIG):
            run_checks(run, stage)


@dataclass(frozen=True)
class Check:
    """One check of a run.

    Attributes:
        name: printed by `--dry-run`.
        stage: SETTINGS, CONFIG, INPUTS or FLOW.
        run: raises ValueError, or returns problems.
        of: schemas that it applies to.
    """

    name: str
    stage: str
    run: Callable[[Run], Iterable[Problem] | None]
    of: type[Schema] | tuple[type[Schema], ...] = _TRAINING

    def applies_to(self, config: Schema) -> bool:
        return isinstance(config, self.of)


def prepare_run(
    config: Schema | None,
    config_path: str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides = (),
    *,
    recipe: Recipe | None = None,
    train_dataset: Dataset | None = None,
    val_dataset: Dataset | None = None,
    cluster: Cluster | None = None,
    backend: str | None = None,
) -> Run:
    """Read the settings unless a config is given, choose the cluster, and run the checks of SETTINGS and CONFIG.

    Args:
        config: the settings, or None to read config_path (a file or a dictionary) and overrides.
        recipe: its schema and its settings are used.
        train_dataset, val_dataset: dataset objects, or None to load them from files.
        cluster: where the workers run; None: `make_cluster` chooses.
        backend: of that cluster; None: `trainer.backend`.
    """
    recipe = recipe or Recipe()
    rows_given = train_dataset is not None
    if config is None:
        base = base_settings(recipe, train_dataset, val_dataset)
        checks = [_reader_check(check, recipe, rows_given) for check in CHECKS[1:] if check.stage == SETTINGS]
        config = load_config(
            config_path, overrides, base=base, presets=PRESETS, schema=recipe.schema, extra_checks=checks
        )
        config = planning.apply_auto_placement(config, roles_of)
        run = Run(config, recipe, rows_given)
        run.passed += [check.name for check in CHECKS if check.stage == SETTINGS and check.applies_to(config)]
    else:
        config = planning.apply_auto_placement(config, roles_of)
        run = Run(config, recipe, rows_given)
        run_checks(run, SETTINGS)
    if isinstance(config, _TRAINING):
        if config.trainer.log_level is not None:
            setup_logging(config.trainer.log_level)
        run.backend = backend or config.trainer.backend
        if run.backend not in CLUSTERS:
            raise ValueError(f"no backend is called {run.backend!r}: {did_you_mean(run.backend, CLUSTERS)}")
        run.cluster = cluster or make_cluster(config, run.backend)
    run_checks(run, CONFIG)
    return run


def _reader_check(check: Check, recipe: Recipe, rows_given: bool) -> Callable[[Schema], Iterable[Problem]]:
    """Adapt a check to `load_config`, which runs the first check of the list itself."""

    def problems(config: Schema) -> Iterable[Problem]:
        return (check.run(Run(config, recipe, rows_given)) or ()) if check.applies_to(config) else ()

    return problems


def run_checks(run: Run, stage: str) -> None:
    """Run the checks of a stage in order.

    Raises:
        ConfigError: all problems of the SETTINGS stage, or those of the first check that found some.
        ValueError: the error of a check, or of a module, file or package that it loads.
    """
    problems: list[Problem] = []
    for check in CHECKS:
        if check.stage == stage and check.applies_to(run.config):
            with collected(run.warnings):
                problems += check.run(run) or ()
            if problems and stage != SETTINGS:
                break
            run.passed.append(check.name)
    if problems:
        raise ConfigError(problems)


# ---- the settings alone ---------------------------------------------------------------------------------------------


def files(run: Run) -> Iterator[Problem]:
    """Models, checkpoints and data files are configured and exist."""
    if not isinstance(run.config, EvalConfig):
        yield from check_models(run.config)
    yield from check_code(run.config)
    if not run.rows_given:
        yield from check_data(run.config)


def recipe_settings(run: Run) -> Iterable[Problem]:
    """The settings are valid for the recipe."""
    return run.recipe.check(run.config) if run.recipe.check is not None else ()


# ---- the settings, and the modules that they import -----------------------------------------------------------------


def imports(run: Run) -> None:
    """Import the user's files and modules, which register losses, estimators and rewards."""
    for address in run.config.imports:
        if not [*check_code_file("imports", address)]:  # a missing one is a problem of `files`
            import_module(address)


def output_folders(run: Run) -> None:
    """All output folders are writable, also that of weight_sync=disk."""
    folders = {f"trainer.{name}": run.config.trainer.get(name) for name in _OUTPUT_FOLDERS}
    if isinstance(run.config, schema.Config):
        folders["actor_rollout_ref.rollout.weight_sync_dir"] = run.config.actor_rollout_ref.rollout.weight_sync_dir
    for key, path in folders.items():
        if path:
            check_folder(key, Path(path))


def reward_model(run: Run) -> Iterator[Problem]:
    """An enabled reward model has a path."""
    key, section = "reward.reward_model", run.config.reward.reward_model
    if section.enable and not section.model_path:
        yield Problem(f"{key}.model_path", f"null, but {key}.enable is true: set it to the reward model")


def registered_engines(run: Run) -> list[Problem]:
    """Engines, agent loops and tool parsers are registered under the configured names."""
    names = {"rollout.name": ROLLOUT_ENGINES, "strategy": ENGINES, "rollout.multi_turn.format": TOOL_PARSERS}
    if isinstance(run.config, schema.Config):
        names["rollout.agent.default_agent_loop"] = agent_loop_names(run.config.actor_rollout_ref.rollout)
    return check_registered(run.config, names)


def worker_code(run: Run) -> None:
    """The loss is defined where workers in other processes can import it."""
    name = run.config.actor_rollout_ref.actor.policy_loss.loss_mode
    loss = get_policy_loss_fn(name)
    if loss.__module__ == "__main__" and (run.backend == "ray" or isinstance(run.cluster, ProcessCluster)):
        raise ValueError(
            f"policy_loss.loss_mode={name}: {location_of(loss)} is defined in the main script or a notebook, which the "
            "worker processes do not run: move it to a file, and set imports=[file.py]. (With one process, "
            "trainer.n_gpus_per_node=1, it can stay. Estimators, rewards, operators and datasets can stay anyway: they "
            "run in this process)"
        )


def placement(run: Run) -> None:
    """Roles are placed on existing devices, and share all devices with another role or none. Warn of idle devices."""
    if words := idle_warning(run.config):
        logger.warning(words)


def custom_dataset(run: Run) -> None:
    """The class of `data.custom_cls` can be imported."""
    dataset_class(run.config, RLHFDataset)


def model_configs(run: Run) -> None:
    """The config of each model exists and accepts the overrides; LoRA finds its modules."""
    config = run.config
    if not isinstance(config, schema.Config):
        check_model(config.model, "causal_lm")
        if isinstance(config.engine.selected, schema.MegatronConfig):
            ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
            role = MegatronRole(config.model, config.engine.selected, "", ranks)
            check_megatron({"engine.megatron": role})
        return
    policy, critic, reward = config.actor_rollout_ref.model, config.critic.model, config.reward.reward_model
    check_model(policy, "causal_lm")
    check_moe(config)
    check_megatron(_of_megatron(config))
    if "critic" in roles_of(config):
        check_model(critic, "value")
    if reward.enable:
        section = schema.ModelConfig(path=reward.model_path, trust_remote_code=reward.trust_remote_code)
        check_model(section, "reward")


def _of_megatron(config: schema.Config) -> dict[str, MegatronRole]:
    """Name of the `megatron` section -> role, of the roles that have one."""
    policy, critic, roles = config.actor_rollout_ref, config.critic, roles_of(config)
    sections = {
        "actor": ("actor_rollout_ref.actor", policy.model, policy.actor),
        "ref": ("actor_rollout_ref.ref", policy.model, policy.ref),
        "critic": ("critic", critic.model, critic),
    }
    pools = {role: pool for placed in pools_of(config, roles).values() for role, pool in placed}
    return {
        f"{name}.megatron": MegatronRole(model, section.engine, pools[role].name, pools[role].world_size)
        for role, (name, model, section) in sections.items()
        if isinstance(section.engine, schema.MegatronConfig) and role in roles
    }


def devices(run: Run) -> None:
    """The training engines and the chosen kernels run on the device."""
    config = run.config
    if run.backend == "ray":  # the nodes may differ from this host: the workers check
        return
    device = resolve_device(config.trainer.device)
    if isinstance(config, schema.SFTConfig):
        check_device(config.engine.strategy, device)
        check_kernels(config.model, device)
        return
    policy, roles = config.actor_rollout_ref, roles_of(config)
    check_device(policy.actor.strategy, device)
    check_kernels(policy.model, device)
    if "ref" in roles:
        check_device(policy.ref.strategy, device)
    if "critic" in roles:
        check_device(config.critic.strategy, device)
        check_kernels(config.critic.model, device)


def saved(run: Run) -> None:
    """save_best and early stopping have validations. Warn if the run saves nothing."""
    trainer = run.config.trainer
    wanted = {"save_best": trainer.save_best, "early_stopping.patience": trainer.early_stopping.patience}
    for name, value in wanted.items():
        if value and trainer.test_freq in (-1, 0):
            raise ValueError(
                f"trainer.{name} is set, but trainer.test_freq is {trainer.test_freq}: set trainer.test_freq"
            )
    if trainer.save_freq in (-1, 0) and not (trainer.save_at_end or trainer.save_best or trainer.val_only):
        logger.warning("the trained model will not be saved, because trainer.save_at_end is false")


def unused(run: Run) -> None:
    """Warn once of each setting without effect."""
    notes = settings_without_effect(run.config)
    if isinstance(run.config, schema.Config):
        notes += unused_settings(run.config)
    for note in notes:
        logger.warning(note)


# ---- what is loaded -------------------------------------------------------------------------------------------------


def items(run: Run) -> None:
    """The first item of each dataset has the required keys."""
    for dataset in (run.inputs.train_dataset, run.inputs.val_dataset):
        if dataset is not None:
            check_dataset(dataset, run.inputs.collate)


def validation_data(run: Run) -> None:
    """If validation is requested, there is validation data."""
    trainer = run.config.trainer
    setting = "trainer.val_only=true" if trainer.val_only else f"trainer.test_freq={trainer.test_freq}"
    if run.inputs.val_dataset is None and (trainer.val_only or trainer.test_freq not in (-1, 0)):
        raise ValueError(f"{setting} requests validation, but data.val_files is empty: set it, or remove {setting}")


def model_fits(run: Run) -> None:
    """Token ids, lengths and the rollout engine fit the model. Of a custom dataset, only the first item is checked."""
    config, inputs, limits = run.config, run.inputs, run.inputs.limits
    dataset = inputs.train_dataset
    if isinstance(config, schema.SFTConfig):
        if isinstance(dataset, SFTDataset):
            limits.check_vocabulary(inputs.tokenizer, dataset.largest_token_id)
            limits.check_sequence_length(dataset.longest_row, "data.max_length")
        return
    parts = datasets_of(dataset)
    if all(isinstance(part, RLHFDataset) and part.is_tokenized for part in parts):
        largest, longest = max(part.largest_token_id for part in parts), max(part.longest_prompt for part in parts)
    else:
        prompt = inputs.collate([dataset[0]]).non_tensor_batch["prompt_ids"][0]
        largest, longest = max(prompt), len(prompt)
    limits.check_vocabulary(inputs.tokenizer, largest)
    if "critic" in roles_of(config):
        check_reads_tokens_of(limits.path, inputs.tokenizer, config.critic.model, "critic", largest)
    if config.actor_rollout_ref.rollout.mode == "server":  # agents write their own prompts
        longest = max(longest, config.actor_rollout_ref.rollout.prompt_length)
    limits.check_engine(config.actor_rollout_ref.rollout)
    limits.check_response_length(
        longest,
        config.actor_rollout_ref.rollout.response_length,
        "data.max_response_length",
        "filter longer prompts (data.max_prompt_length with data.filter_overlong_prompts=true)",
    )


def reward_function(run: Run) -> None:
    """The data has what the reward function needs, and the function scores two trial responses to the first prompt."""
    facts = TRIAL_INFO if run.config.actor_rollout_ref.rollout.mode == "server" else None
    run.reward_values = try_rewards(run.inputs, run.config.reward.reward_model.enable, facts)


def tools_in_prompts(run: Run) -> None:
    """The chat template supports the turns of the agent loop; warn if it does not describe the tools."""
    check_tools_in_prompts(run.config, run.inputs.tokenizer)


def recipe_inputs(run: Run) -> None:
    """The loaded data is valid for the recipe."""
    if run.recipe.check_inputs is not None:
        run.recipe.check_inputs(run.config, run.inputs)


# ---- the compiled flow ----------------------------------------------------------------------------------------------


def reward_names(run: Run) -> None:
    """Reward values that settings refer to are returned by the reward function or written by an operator."""
    algorithm = run.config.algorithm
    named: dict[str, list[str]] = {}
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric not in SUMMED_REWARD:
        named["algorithm.filter_groups.metric"] = [algorithm.filter_groups.metric]
    if "gdpo_reward_keys" in parameter_names(get_adv_estimator_fn(algorithm.adv_estimator)):
        named["algorithm.gdpo_reward_keys"] = algorithm.gdpo_reward_keys or []
    known = {"reward", *run.reward_values}
    for key, names in named.items():
        for name in names:
            if name not in known and not {name, f"reward_{name}"} & run.columns:
                raise ValueError(f"{key}: the reward function does not return {name!r}: {did_you_mean(name, known)}")


CHECKS: tuple[Check, ...] = (
    Check("settings fit together", SETTINGS, lambda run: check_combinations(run.config), Schema),
    Check("files exist", SETTINGS, files, Schema),
    Check("recipe settings", SETTINGS, recipe_settings, Schema),
    Check("imports", SETTINGS, imports, Schema),
    Check("registered engines", SETTINGS, registered_engines, Schema),
    Check("launcher", CONFIG, lambda run: check_launcher(run.config.trainer)),
    Check("trackers", CONFIG, lambda run: check_trackers(run.config.trainer.logger)),
    Check("output folders", CONFIG, output_folders),
    Check("critic", CONFIG, lambda run: check_critic(run.config, needs_critic(run.config)), schema.Config),
    Check("faults", CONFIG, lambda run: check_faults(run.config), schema.Config),
    Check("reward model", CONFIG, reward_model, schema.Config),
    Check("agent loop", CONFIG, lambda run: check_agent(run.config.actor_rollout_ref.rollout), schema.Config),
    Check("estimator and loss", CONFIG, lambda run: required_settings(run.config), schema.Config),
    Check("code of the workers", CONFIG, worker_code, schema.Config),
    Check("group size", CONFIG, lambda run: group_size(run.config), schema.Config),
    Check("rollout correction", CONFIG, lambda run: check_correction(run.config), schema.Config),
    Check("placement", CONFIG, placement, schema.Config),
    Check("dataset class", CONFIG, custom_dataset),
    Check("model configs", CONFIG, model_configs, (*_TRAINING, GenerationConfig)),
    Check("cluster", CONFIG, lambda run: run.cluster.check(run.config)),
    Check("devices", CONFIG, devices),
    Check(
        "memory",
        CONFIG,
        lambda run: planning.check_memory(run.config, roles_of(run.config), run.backend),
        schema.Config,
    ),
    Check("micro-batch losses", CONFIG, lambda run: micro_batch_losses(run.config), schema.Config),
    Check("unused settings", CONFIG, unused),
    Check("checkpoints", CONFIG, saved),
    Check("dataset items", INPUTS, items, schema.Config),
    Check("validation data", INPUTS, validation_data),
    Check("tools in prompts", INPUTS, tools_in_prompts, schema.Config),
    Check("model limits", INPUTS, model_fits),
    Check("recipe data", INPUTS, recipe_inputs),
    Check("reward function", INPUTS, reward_function, schema.Config),
    Check("reward names", FLOW, reward_names, schema.Config),
)
"""Every check, in the order in which they run."""
