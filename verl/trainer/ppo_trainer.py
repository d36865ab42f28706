"""PPOTrainer: policy optimization on any cluster."""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from verl.config import batch_summary
from verl.config.sources import Overrides
from verl.data.processor import media_tokens
from verl.dataflow import CONTROLLER, DataFlow
from verl.protocol import DataProto
from verl.rollout.request import MEDIA_COLUMNS
from verl.single_controller import WorkerSpec
from verl.single_controller.cluster import Cluster, ResourcePool
from verl.tracking.formatting import counted
from verl.tracking.runs import write_lines
from verl.tracking.trackers import Rows
from verl.tracking.tracking import setup_logging
from verl.trainer.base import Trainer
from verl.trainer.checks.agents import describe_agents
from verl.trainer.checks.preflight import INPUTS, Recipe, Settings, recipe_of, run_checks
from verl.trainer.guards.mismatch import rounding_factor
from verl.trainer.output.metrics import data_metrics, joined, numeric_columns, predictions, validation_metrics
from verl.trainer.output.samples import (
    check_sampling,
    choose_rows,
    first_prompt,
    generations,
    prompt_items,
    response_texts,
    step_record,
)
from verl.trainer.ppo.canary import Canary
from verl.trainer.ppo.distillation import distill
from verl.trainer.ppo.flow import (
    PPORunner,
    build_ppo_flow,
    build_validation_flow,
    check_writers,
    needs_critic,
    should_free_cache,
)
from verl.trainer.ppo.operators import Prompts, generate, repeat, uses_agent_loop
from verl.trainer.ppo.rollout_correction import correct_rollout
from verl.trainer.ppo.weights import RolloutWeights
from verl.trainer.startup.arguments import prepare_run
from verl.trainer.startup.inputs import given_rewards, load_inputs, prompt_source, stop_token_ids
from verl.trainer.startup.roles import placement_words, pools_of, roles_hosted_by_actor, worker_specs
from verl.trainer.state.checkpointing import describe_saving

logger = logging.getLogger("verl.trainer")


class PPOTrainer(Trainer):
    """Policy optimization by the flow of `build_flow`.

        PPOTrainer("config.yaml", overrides={"trainer.n_gpus_per_node": 2}).fit()
        PPOTrainer({"algorithm.name": "grpo", ...}, train_dataset=[{"prompt": ..., "answer": ...}], reward=score).fit()

    Args:
        config: a YAML file, a dictionary with nested or dotted keys, a Config, or None for overrides alone.
        config_path: the same as config, for a file.
        overrides: settings above those of config: "key=value" strings, or a dictionary with nested or dotted keys.
        train_dataset, val_dataset: rows (a list of dicts, or a Hugging Face dataset), a torch dataset, or paths; None:
            the files of the configuration. `ground_truth` is another name of the column `answer`. A reward receives the
            further columns of rows in extra_info.
        reward: a reward function of any form, also async, of one response or of a batch; a reward manager (one for
            public verl as well); or the name of a registered reward function. None: that of the configuration.
            `reward_fn` and `reward_manager` are the same argument.
        model: a model object of transformers that training starts from, with its tokenizer, instead of
            actor_rollout_ref.model.path. It is written to trainer.default_local_dir and is not changed.
        tokenizer: None: that of the model.
        train_sampler: a torch sampler that decides the order of the prompts; None: data.sampler, or data.shuffle.
        val_reward_fn: the same, for validation; None: the reward of training.
        cluster: where the workers run; None: chosen by trainer.backend and the number of processes.
        use_critic, use_reference_policy, use_rm: override the config keys of these names; None: not set.
    """

    saved_roles = ("actor", "critic")
    unwatched = frozenset({"buffer"})  # of asynchronous training
    #: what a subclass adds to the configuration
    recipe: ClassVar[Recipe] = Recipe()
    #: backend of the cluster that is chosen; None: trainer.backend
    backend: ClassVar[str | None] = None

    def __init__(
        self,
        config: Settings = None,
        *,
        config_path: str | Path | None = None,
        overrides: Overrides = (),
        train_dataset: Any = None,
        val_dataset: Any = None,
        reward: Any = None,
        reward_manager: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        model: Any = None,
        tokenizer: Any = None,
        train_sampler: Any = None,
        cluster: Cluster | None = None,
        use_critic: bool | None = None,
        use_reference_policy: bool | None = None,
        use_rm: bool | None = None,
    ):
        setup_logging()
        run = prepare_run(
            config,
            config_path,
            overrides,
            recipe_of(type(self)),
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            rewards={"reward": reward, "reward_manager": reward_manager, "reward_fn": reward_fn},
            model=model,
            tokenizer=tokenizer,
            settings={"use_critic": use_critic, "use_reference_policy": use_reference_policy, "use_rm": use_rm},
            cluster=cluster,
            backend=self.backend,
        )
        inputs = run.inputs = load_inputs(run, tokenizer)
        inputs.sampler = train_sampler if train_sampler is not None else inputs.sampler
        run_checks(run, INPUTS)
        self.train_dataset, self.val_dataset = inputs.train_dataset, inputs.val_dataset
        self.reward_manager = self.val_reward_manager = inputs.reward_manager
        if val_reward_fn is not None:
            self.val_reward_manager = given_rewards(run.config, inputs.tokenizer, val_reward_fn)
        self.vocab_size = inputs.limits.vocab_size
        self._warned_of_equal_scores, self._unwritten_files = False, 0
        #: input, output, score, ... of every response of the last validation
        self.validation_texts: list[dict[str, Any]] = []
        super().__init__(run, prompt_source(run.config.data, inputs))
        specs = self.worker_specs().items()
        self.specs = {role: replace(spec, imports=tuple(self.config.imports)) for role, spec in specs}
        if self.config.trainer.overlap:
            self.pipeline.processes_of = self.processes_of
        self.validation = build_validation_flow(self.config, self.roles, self.val_reward_manager).compile(
            inputs=("prompt_ids", "uid", "data_source", "reward_model")
        )
        self.validation.log_level, self.validation.label = self.operator_level, "validation: "
        self.view.pipelines.append(self.validation)

    # ---- flow and workers -------------------------------------------------------------------------------------------

    def build_flow(self) -> DataFlow:
        images = media_tokens(self.run.inputs.processor)
        prompts = Prompts(self.source, lambda: self.global_step, self.vocab_size, images)
        flow = build_ppo_flow(self.config, prompts, self.roles, self.reward_manager)
        if self.config.algorithm.filter_groups.enable:
            from verl.trainer.ppo.dynamic_sampling import sample_dynamically

            sample_dynamically(flow, self.config, self.tokenizer.pad_token_id)
        if self.config.distillation.enabled:
            distill(flow, self.config, self.roles)
        return correct_rollout(flow, self.config)

    def make_runner(self) -> PPORunner:
        rollout, model = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.model
        canary = Canary(
            self.roles,
            rollout.check_every,
            vocab_size=self.vocab_size,
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            rounding=rounding_factor(self.run.inputs.limits.hf_config, model.quantization),
        )
        self.rollout_weights = RolloutWeights(self.roles, self.config.rollout_is_separate, canary)
        if self.config.trainer.max_staleness > 0:
            from verl.trainer.asynchronous.generation import AsyncRunner

            return AsyncRunner(self.view, self.rollout_weights)
        return PPORunner(self.view, self.rollout_weights)

    def finish_flow(self, flow: DataFlow) -> DataFlow:
        check_writers(flow)
        flow.configure(self.config.algorithm.operator_kwargs, "algorithm.operator_kwargs")
        return self.runner.finish(flow)

    @property
    def pools(self) -> dict[str, list[tuple[str, ResourcePool]]]:
        """Pool name -> (role, pool) of its roles."""
        return pools_of(self.config, list(self.specs))

    def worker_specs(self) -> dict[str, WorkerSpec]:
        """Role -> worker spec. Override to add a role."""
        return worker_specs(
            self.config,
            total_steps=self.total_steps,
            tokenizer=self.tokenizer,
            stop_token_ids=stop_token_ids(self.config.actor_rollout_ref.model.path, self.tokenizer),
        )

    def init_workers(self) -> None:
        self.runner.reset()
        self.roles.update(self.cluster.start(self.pools, self.specs))
        self.roles.update(dict.fromkeys(roles_hosted_by_actor(self.config), self.roles["actor"]))

    def before_first_step(self) -> None:
        if "sync_weights" in (op.name for op in self.pipeline.operators):
            self.sync_weights()

    def sync_weights(self) -> None:
        """Push the current weights to the rollout unless it already has them. The version is the number of completed
        steps."""
        self.rollout_weights.require(self.global_step)

    def processes_of(self, on: str) -> Hashable | None:
        """The processes of a role; None for the controller process."""
        return None if on == CONTROLLER else self.roles[on].processes

    def checkpoints_to_keep(self) -> dict[str, int | None]:
        trainer = self.config.trainer
        return {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep}

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _summary(self) -> dict[str, str]:
        """Summary of the run: topic -> description."""
        config = self.config
        validation = f"{len(self.val_dataset):,} prompts" if self.val_dataset is not None else "none"
        return {
            "model": config.actor_rollout_ref.model.path,
            "algorithm": f"{self.recipe.name or config.algorithm.adv_estimator}; steps: {self.total_steps}",
            "batch": batch_summary(config, critic=needs_critic(config)),
            "data": f"{self.source.describe()}; validation: {validation}",
            **describe_agents(config),
            **({"placement": placement_words(self.pools)} if max(self.world_size, len(self.pools)) > 1 else {}),
            **self.runner.describe(),
            "flow": " -> ".join(op.name for op in self.pipeline.operators),
        }

    def announce(self) -> None:
        for topic, description in self._summary().items():
            logger.info("%s: %s", topic, description)
        if self.config.trainer.overlap and len(self.pools) == 1:
            logger.warning(
                "trainer.overlap=true: all roles share their processes, so at most the rewards overlap with other "
                "work; `placement` puts roles on separate devices"
            )

    def plan(self) -> str:
        from verl.trainer.checks.planning import describe_estimate  # imports the planner

        summary, trainer = self._summary(), self.config.trainer
        prompt = "".join(f"{line}\n" for line in first_prompt(self.run.inputs.train_dataset))
        topics = {key: summary[key] for key in summary if key not in ("model", "algorithm")}
        topics["checkpoints"] = f"{describe_saving(trainer)}, in {trainer.default_local_dir}"
        further = "".join(f"  {topic + ':':<12} {text}\n" for topic, text in topics.items())
        return (
            f"would train {counted(self.total_steps, 'step')} of "
            f"{self.recipe.name or self.config.algorithm.adv_estimator} from "
            f"{summary['model']} with {self.world_size} process{'es' * (self.world_size > 1)} on the "
            f"{self.run.backend} backend\n{further}{prompt}{describe_estimate(self.config, list(self.specs))}"
        )

    # ---- metrics ----------------------------------------------------------------------------------------------------

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        if folder := self.config.trainer.rollout_data_dir:
            samples = [{**sample, "step": self.global_step} for sample in generations(batch, self.tokenizer)]
            self._write_samples(folder, samples)
        metrics, reported = data_metrics(batch), batch.meta_info["metrics"]
        metrics |= {name: reported[name] for name in metrics.keys() & reported.keys()}  # of every sample of the step
        mismatch = reported.get("rollout/logprob_gap_max", 0.0)
        if self.config.actor_rollout_ref.rollout.deterministic and mismatch != 0:
            logger.warning(
                "step %d: log-probs of rollout and training differ by up to %g although rollout.deterministic is true: "
                "either an operator changed rollout_log_probs, or a library here is not batch-invariant",
                self.global_step,
                mismatch,
            )
        if metrics.get("reward/tied_groups") == 1.0 and not self._warned_of_equal_scores:
            self._warned_of_equal_scores = True
            least, most = (metrics[f"critic/score/{name}"] for name in ("min", "max"))
            logger.warning(
                "step %d: in every group all responses have the same score (%s), so no advantage can be computed. The "
                "task may be too hard or too easy for this model, or the reward function may be wrong",
                self.global_step,
                f"all scores are {most:g}" if least == most else f"scores are from {least:g} to {most:g}",
            )
        return metrics

    def _write_samples(self, folder: str, samples: Rows) -> None:
        """Write the samples of the step. Training goes on without a file that cannot be written."""
        path = self.run.working_dir / folder / f"{self.global_step}.jsonl"
        try:
            write_lines(path, samples)
        except OSError as error:
            self._unwritten_files += 1
            if self._unwritten_files.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                logger.warning(
                    "%s is not written, training continues: %s (%d such files)", path, error, self._unwritten_files
                )

    def draw_samples(self, batch: DataProto, count: int) -> Rows:
        rows = choose_rows(len(batch), count, self.config.trainer.seed + self.global_step)
        return generations(batch, self.tokenizer, rows)

    def step_record(self, batch: DataProto) -> Mapping[str, Any]:
        trainer = self.config.trainer
        if not trainer.log_tokens:
            return {}
        return step_record(batch, self.tokenizer, trainer.log_tokens, trainer.seed + self.global_step)

    def validation_samples(self) -> Rows:
        # the same prompts in every validation
        trainer, texts = self.config.trainer, self.validation_texts
        return [texts[i] for i in choose_rows(len(texts), trainer.log_val_generations, trainer.seed)]

    def validate(self) -> dict[str, float]:
        """Generate and score responses to every validation prompt: val-core/<source>/acc/mean@N and related metrics."""
        if self.val_dataset is None:
            return {}
        self.start()
        logger.log(self.operator_level, "validating: %s prompts", f"{len(self.val_dataset):,}")
        with self.runner.paused():
            return self._validate_now()

    def generate(self, prompts: Sequence[Any], *, n: int = 1, **sampling: Any) -> list[Any]:
        """Generate responses with the current weights. The first call starts the workers.

            trainer.generate(["2+3="], temperature=0)  # ["5"]

        Args:
            prompts: texts or chats; as in the training data, text becomes a chat if the tokenizer has a chat template.
            n: number of responses to each prompt.
            sampling: temperature, top_k, top_p, min_p, ignore_eos, seed and max_tokens, instead of those of training.

        Returns:
            One text per prompt; with n > 1 a list of n texts per prompt.

        Raises:
            ValueError: a sampling parameter is not known, or max_tokens is above data.max_response_length.
        """
        config = self.config
        check_sampling(n, sampling, config.actor_rollout_ref.rollout.response_length)
        items = prompt_items(prompts, self.tokenizer, config.data, self.run.inputs.processor)
        batch = self.run.inputs.collate(items).replace(uid=[f"generate:{i}" for i in range(len(items))])
        self.start()
        with self.runner.paused():
            self.sync_weights()
            responses = generate(self.roles, sampling, uses_agent_loop(config))(repeat(n)(batch))
            if should_free_cache(config):
                self.roles["rollout"].free_rollout_cache()
        texts = response_texts(responses, self.tokenizer)
        return texts if n == 1 else [texts[i : i + n] for i in range(0, len(texts), n)]

    def _validate_now(self) -> dict[str, float]:
        self.sync_weights()
        scored, texts = [], []
        size = self.config.data.val_batch_size or len(self.val_dataset)
        for start in range(0, len(self.val_dataset), size):
            rows = range(start, min(start + size, len(self.val_dataset)))
            items = [self.val_dataset[i] for i in rows]
            prompts = self.run.inputs.collate(items).replace(uid=[f"val:{i}" for i in rows])
            prompts.meta_info["vocab_size"] = self.vocab_size
            batch = self.validation.run(prompts)
            texts += generations(batch, self.tokenizer)
            scored.append(batch.drop([name for name in MEDIA_COLUMNS if name in batch]))  # decoded images are large
        variables = numeric_columns(scored)
        sources, uids = (joined(scored, name) for name in ("data_source", "uid"))
        if folder := self.config.trainer.validation_data_dir:
            self._write_samples(folder, texts)
        self.validation_texts = texts
        return validation_metrics(sources, uids, variables, predictions(scored))
