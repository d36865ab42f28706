"""Generation without training: prompts -> repeat -> gen -> decode -> write.

Responses are saved after each batch of prompts. A run that was interrupted resumes when the same command is run again,
and its output equals that of an uninterrupted run.
"""

import hashlib
import json
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from verl.agents.loop import score_group_of
from verl.config import to_flat_dict
from verl.config.schema.offline import GenerationConfig
from verl.data.media import note_unused_media_keys
from verl.data.processor import load_processor
from verl.data.tokenization import load_tokenizer
from verl.dataflow import DataFlow, Operator
from verl.evaluation.prompts import PromptSet, Responses, SavedResponses, check_output, write_output
from verl.protocol import DataProto
from verl.rewards.responses import add_group_scores, read_samples, token_masks
from verl.rollout.request import stop_strings
from verl.single_controller import LocalWorkerGroup, WorkerGroup, WorkerSpec
from verl.tracking.formatting import format_clock
from verl.trainer.checks.agents import check_tools_in_prompts
from verl.trainer.checks.models import ModelLimits
from verl.trainer.checks.preflight import CONFIG, Recipe, Settings, open_run, run_checks
from verl.trainer.guards.interruption import Stopped
from verl.trainer.ppo.operators import GENERATED, generate, repeat
from verl.trainer.startup.command_line import print_error
from verl.trainer.startup.inputs import stop_token_ids
from verl.utils.device import resolve_device, resolve_dtype
from verl.utils.disk import DiskFullError
from verl.utils.tokenizer import decode_all
from verl.workers.rollout.worker import RolloutWorker

logger = logging.getLogger("verl.trainer")

#: settings that do not affect the responses; of the input files only the contents count
_IRRELEVANT_SETTINGS = (
    "data.path",
    "data.output_path",
    "trainer.backend",
    "trainer.device",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)
#: settings that only agent loops read
_LOOPS = ("rollout.agent.", "rollout.multi_turn.", "rollout.server.")


class GenerationRun:
    """Generates responses to the prompts of a file and writes them to another file.

    The constructor runs all checks, before a model is loaded.

    Args:
        config: a YAML file, a dictionary with nested or dotted keys, a GenerationConfig, or None for overrides alone.
        config_path: the same as config, for a file.
        overrides: `key=value` settings.

    Raises:
        ValueError: For invalid settings, files or prompts.
    """

    def __init__(
        self,
        config: Settings = None,
        *,
        config_path: str | Path | None = None,
        overrides: Sequence[str] = (),
    ):
        run = open_run(config_path if config is None else config, overrides, Recipe(schema=GenerationConfig))
        run_checks(run, CONFIG)
        self.config: GenerationConfig = run.config
        self.roles: dict[str, WorkerGroup] = {}
        self.output = Path(self.config.data.output_path)
        self._passed = run.passed
        data, rollout, model = self.config.data, self.config.rollout, self.config.model
        self.dtype = resolve_dtype(rollout.dtype, resolve_device(self.config.trainer.device))
        self.tokenizer = load_tokenizer(model)
        processor = load_processor(model, self.tokenizer)
        note_unused_media_keys(data, processor)
        self.prompts = PromptSet(self.config, self.tokenizer, processor)
        check_tools_in_prompts(self.config, self.tokenizer)
        prompt_ids, limits = self.prompts.prompt_ids, ModelLimits.from_config(model)
        limits.check_vocabulary(self.tokenizer, prompt_ids.largest)
        limits.check_engine(rollout)
        fix = "remove longer prompts from the file"
        longest = rollout.prompt_length if rollout.mode == "server" else prompt_ids.longest  # agents write their own
        limits.check_response_length(longest, rollout.response_length, "rollout.response_length", fix)
        check_output(self.prompts, self.output)
        self.saved = SavedResponses(self.output, self.settings(), prompts=len(self.prompts), n=data.n_samples)
        self.finished = self.saved.is_finished()

    def passed_checks(self) -> Sequence[str]:
        """Return the names of the checks that have passed."""
        return (*self._passed, "prompts", "model limits", "output file", "earlier output")

    def plan(self) -> str:
        """Describe what `run` would do."""
        if self.finished:
            return f"would do nothing: {self.output} already exists, generated with these settings"
        config, total = self.config, len(self.prompts)
        done = total - len(self.saved.missing())
        resumed = f", {done:,} of them already generated" if done else ""
        return (
            f"would generate {config.data.n_samples} responses to each of {total:,} prompts{resumed}, of at most "
            f"{config.rollout.response_length} tokens, with {config.model.path} in {self.dtype} and "
            f"{config.trainer.n_gpus_per_node} process{'es' * (config.trainer.n_gpus_per_node > 1)}; output: "
            f"{self.output}"
        )

    def settings(self) -> dict[str, Any]:
        """Return everything the responses depend on: settings, contents of the files, token ids, model files."""
        kept = {key: value for key, value in to_flat_dict(self.config).items() if key not in _IRRELEVANT_SETTINGS}
        loops = {key: kept.pop(key) for key in [*kept] if key.startswith(_LOOPS)}
        if self.prompts.uses_loops or self.prompts.tools:
            files = {key: path for key, path in loops.items() if key.endswith("path") and Path(str(path)).is_file()}
            kept |= loops | {f"{key} (contents)": [_checksum(path)] for key, path in files.items()}
        return kept | {
            "rollout.dtype": str(self.dtype).removeprefix("torch."),
            "data.path (contents)": [_checksum(path) for path in self.config.data.path],
            "prompts (token ids)": self.prompts.digest(),
            "model.path (files)": _model_files(self.config.model.path),
        }

    # ---- generation -------------------------------------------------------------------------------------------------

    def build_flow(self, batches: Sequence[Sequence[int]]) -> DataFlow:
        """Return a flow whose every pass generates the responses to the next of the `batches` of prompts."""
        saved, remaining, score_group = self.saved, iter(batches), score_group_of(self.config.rollout.agent)

        def prompts() -> DataProto:
            # the uid is the index of the prompt: responses depend neither on the batches nor on an interruption
            indices = next(remaining)
            return DataProto.from_dict(non_tensors=self.prompts.columns(indices), meta_info={"prompts": indices})

        def write(batch: DataProto) -> None:
            rows = list(zip(batch.batch["responses"], *token_masks(batch)))
            ids = [tokens[present].tolist() for tokens, present, _ in rows]
            sampled = [mask[present].tolist() for _, present, mask in rows]
            # without special tokens, as for reward functions in training
            values = [decode_all(self.tokenizer, ids), list(map(sum, sampled)), list(batch.column("finish_reason"))]
            if self.prompts.uses_loops:
                values.append(list(map(self._turns, ids, sampled)))
                infos = batch.column("trajectory_info")
                if all("agent_failure" in info for info in infos) and not saved.read():
                    raise ValueError("the agents of all samples failed, see the warning above: nothing was written")
                if score_group is not None:
                    samples = read_samples(batch, self.tokenizer, "data_source")
                    add_group_scores(samples, score_group)
                    infos = [i | {"agent_score": s.extra_info["agent_score"]} for i, s in zip(infos, samples)]
                values.append(list(map(reward_info_json, infos, ids)))
            groups = [slice(start, start + saved.n) for start in range(0, len(batch), saved.n)]
            saved.append(batch.meta_info["prompts"], [Responses(*(each[group] for each in values)) for group in groups])

        # sampled as in training
        gen = generate(self.roles, {}, all_columns=self.prompts.uses_loops)
        return DataFlow(
            [
                Operator("prompts", prompts, writes=("prompt_ids", "uid")),
                Operator("repeat", repeat(saved.n)),
                Operator("gen", gen, reads=("prompt_ids", "uid"), writes=GENERATED),
                Operator("write", write, reads=GENERATED),
            ]
        )

    def _turns(self, token_ids: list[int], mask: list[bool]) -> list[dict[str, Any]]:
        """The turns of a response as text: consecutive tokens that the policy sampled, or that it did not."""
        runs = [(key, [i for i, _ in run]) for key, run in groupby(zip(token_ids, mask), key=itemgetter(1))]
        texts = decode_all(self.tokenizer, [ids for _, ids in runs])
        roles = ["assistant" if is_sampled else "observation" for is_sampled, _ in runs]
        return [{"role": r, "content": text, "tokens": len(ids)} for r, text, (_, ids) in zip(roles, texts, runs)]

    def init_workers(self) -> None:
        """Start the worker group that generates, which loads the model."""
        config = self.config
        spec = WorkerSpec(
            RolloutWorker,
            {
                "model": config.model,
                "rollout": config.rollout,
                "device": config.trainer.device,
                "pad_token_id": self.tokenizer.pad_token_id,
                "stop_token_ids": stop_token_ids(config.model.path, self.tokenizer),
                "stop": stop_strings(config.rollout.stop, self.tokenizer),
                "tokenizer": self.tokenizer,  # for agent loops
            },
            imports=tuple(config.imports),
        )
        self.roles["rollout"] = LocalWorkerGroup(spec, config.trainer.n_gpus_per_node, name="rollout")

    def run(self) -> Path:
        """Generate the missing responses and write the output. Returns its path."""
        if self.finished:
            logger.info("%s already exists, generated with these settings: nothing to do", self.output)
            self.saved.path.unlink(missing_ok=True)
            return self.output
        if missing := self.saved.missing():
            self._generate(missing)
        responses = [item for _, item in sorted(self.saved.read().items())]
        reasons = [reason for item in responses for reason in item.finish_reasons]
        counts = {
            "prompts": len(responses),
            "responses": len(reasons),
            "tokens": sum(sum(item.tokens) for item in responses),
            "cut": reasons.count("length"),
        }
        self.saved.finish(counts)
        write_output(self.prompts, responses, self.output)
        self.saved.path.unlink()
        logger.info(
            "wrote %s: %s prompts x %d = %s responses, %.1f tokens on average, %.1f %% truncated at "
            "rollout.response_length=%d",
            self.output,
            f"{counts['prompts']:,}",
            self.config.data.n_samples,
            f"{counts['responses']:,}",
            counts["tokens"] / counts["responses"],
            100 * counts["cut"] / counts["responses"],
            self.config.rollout.response_length,
        )
        return self.output

    def _generate(self, missing: Sequence[int]) -> None:
        total, size = len(self.prompts), self.config.data.batch_size
        batches = [missing[start : start + size] for start in range(0, len(missing), size)]
        done = total - len(missing)
        if done:
            logger.info("resuming: %s of %s prompts are finished", f"{done:,}", f"{total:,}")
        pipeline = self.build_flow(batches).compile()
        pipeline.log_level = logging.DEBUG  # a line per batch is enough
        self.init_workers()
        start, before, tokens = time.monotonic(), done, 0
        try:
            for prompts in batches:
                batch = pipeline.run()
                done += len(prompts)
                tokens += int(batch.batch["response_mask"].sum())
                seconds = time.monotonic() - start
                logger.info(
                    "generated %s of %s prompts, %.0f tokens/s, ETA %s",
                    f"{done:,}",
                    f"{total:,}",
                    tokens / seconds,
                    format_clock(seconds * (total - done) / (done - before)),
                )
        except BaseException:
            logger.warning("stopped after %s of %s prompts; run the same command again to resume", done, total)
            raise
        finally:
            self.roles["rollout"].shutdown()


def reward_info_json(info: Mapping[str, Any], response_ids: Sequence[int]) -> str:
    """What the reward function of training gets in extra_info of a response by an agent loop."""
    try:
        return json.dumps(info | {"response_length": len(response_ids)}, default=float)  # NumPy numbers
    except TypeError as error:
        raise ValueError(f"trajectory_info of an agent loop: expected values of JSON, found {info!r:.200}") from error


def _checksum(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _model_files(path: str) -> list[list[Any]]:
    """Name, size and modification time of the files of a local model, which change if its weights are replaced."""
    folder = Path(path)
    if not folder.is_dir():
        return []
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(folder.iterdir()) if p.is_file()]


def execute(run: GenerationRun) -> int:
    """Generate for a command line. Returns the exit status."""
    try:
        run.run()
    except DiskFullError as error:
        return print_error(error)
    except KeyboardInterrupt as stop:  # the progress has been logged
        return stop.exit_status if isinstance(stop, Stopped) else 128 + signal.SIGINT
    return 0
