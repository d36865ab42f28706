"""python -m verl.trainer.main_generation key=value ...: answers to the prompts of a file, without training.

What is answered is kept part by part: a run that was stopped, however, goes on where it stopped when the same command
is given again, and its output is that of a run that was never stopped.
"""

import hashlib
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.config import ConfigError, Problem, check_inputs, check_supported, load_config, to_flat_dict
from verl.config.schema.offline import GenerationConfig
from verl.data.tokenization import load_tokenizer
from verl.dataflow import DataFlow
from verl.evaluation.generate import Questions, build_generation_flow, check_output, read_questions, write_output
from verl.evaluation.shards import AnswerParts, Answers
from verl.registry import import_module
from verl.rollout.base import stop_strings
from verl.single_controller import LocalWorkerGroup, WorkerGroup, WorkerSpec
from verl.trainer.command_line import USER_ERRORS, command_line, print_error
from verl.trainer.inputs import stop_token_ids
from verl.trainer.model_limits import ModelLimits
from verl.trainer.preflight import check_model_section
from verl.utils.device import resolve_device, resolve_dtype
from verl.utils.disk import DiskFullError
from verl.utils.log import setup_logging
from verl.workers.rollout import RolloutWorker

logger = logging.getLogger("verl.trainer")

HELP = """usage: python -m verl.trainer.main_generation [--config FILE.yaml] key=value ...

  python -m verl.trainer.main_generation \\
      data.path=test.parquet data.prompt_key=prompt data.n_samples=8 data.batch_size=128 \\
      data.output_path=answers.parquet \\
      model.path=/path/to/model rollout.temperature=0.6 rollout.top_p=0.95 rollout.response_length=1024

  --config FILE.yaml   settings from a file; keys on the command line win
  --print-config       show the settings that would be used, and stop
  --help               this text; all keys: python -m verl.cli.config --of generation
"""

#: settings on which the answers do not depend; the files themselves count, not where they lie
_OTHER_SETTINGS = (
    "data.path",
    "data.output_path",
    "trainer.backend",
    "trainer.device",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)


def check_generation(config: GenerationConfig) -> Iterator[Problem]:
    """For `extra_checks`: the output is named, several answers to a prompt can differ, and one host does it."""
    path = config.data.output_path
    if path is None or Path(path).suffix not in (".parquet", ".jsonl"):
        found = "missing" if path is None else f"found {path!r}"
        yield Problem("data.output_path", f"{found}, expected a file that ends with .parquet or .jsonl")
    if config.data.n_samples > 1 and config.rollout.temperature == 0:
        yield Problem(
            "data.n_samples",
            f"found {config.data.n_samples} with rollout.temperature 0, which gives the same answer "
            f"{config.data.n_samples} times: use a temperature > 0, or data.n_samples=1",
        )
    if config.trainer.backend != "local":
        yield Problem("trainer.backend", f"{config.trainer.backend} does not generate without training yet: use local")
    if config.trainer.nnodes > 1:
        yield Problem(
            "trainer.nnodes",
            f"found {config.trainer.nnodes}, but generation runs on one host: use 1, and split the file over the hosts",
        )


def _checksum(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _model_files(path: str) -> list[list[Any]]:
    """Name, size and time of change of the files of a local model: weights written anew are another model."""
    folder = Path(path)
    if not folder.is_dir():
        return []
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(folder.iterdir()) if p.is_file()]


class GenerationRun:
    """Answers to the prompts of a file, written to another.

    config: a GenerationConfig, or None to read config_path and overrides. All that can be wrong is found in the
    constructor, before a model is loaded.
    """

    def __init__(
        self,
        config: GenerationConfig | None = None,
        *,
        config_path: str | Path | None = None,
        overrides: Sequence[str] = (),
    ):
        if config is None:
            checks = [check_inputs, check_generation]
            config = load_config(config_path, overrides, schema=GenerationConfig, extra_checks=checks)
        elif problems := list(check_generation(config)):
            raise ConfigError(problems)
        check_supported(config)
        for address in config.imports:
            import_module(address)
        self.dtype = resolve_dtype(config.rollout.dtype, resolve_device(config.trainer.device))
        check_model_section(config.model, "causal_lm")
        self.config = config
        self.roles: dict[str, WorkerGroup] = {}
        self.output = Path(config.data.output_path)
        self.tokenizer = load_tokenizer(config.model)
        self.questions: Questions = read_questions(config, self.tokenizer)
        limits = ModelLimits.of(config.model)
        limits.check_vocabulary(self.tokenizer, self.questions.prompt_ids.largest)
        limits.check_engine(config.rollout.name)
        limits.check_response_length(
            self.questions.prompt_ids.longest,
            config.rollout.response_length,
            "rollout.response_length",
            "leave longer prompts out of the file",
        )
        check_output(self.questions, self.output)
        self.parts = AnswerParts(
            self.output,
            self.settings(),
            rows=len(self.questions),
            rows_per_part=config.data.batch_size,
            n=config.data.n_samples,
        )
        self.finished = self.parts.is_finished()

    def settings(self) -> dict[str, Any]:
        """All that the answers depend on, by name: the settings, the input files, the prompts, the model's files."""
        kept = {key: value for key, value in to_flat_dict(self.config).items() if key not in _OTHER_SETTINGS}
        return kept | {
            "rollout.dtype": str(self.dtype).removeprefix("torch."),
            "data.path (contents)": [_checksum(path) for path in self.config.data.path],
            "prompts (token ids)": self.questions.digest(),
            "model.path (files)": _model_files(self.config.model.path),
        }

    def build_flow(self, missing: Sequence[int]) -> DataFlow:
        """The flow that answers one part after another, those of `missing`."""
        return build_generation_flow(self.questions, self.parts, missing, self.roles, self.tokenizer)

    def init_workers(self) -> None:
        """Fill `self.roles` with the group that generates. The model is loaded here, not before."""
        config = self.config
        spec = WorkerSpec(
            RolloutWorker,
            {
                "model": config.model,
                "rollout": config.rollout,
                "imports": tuple(config.imports),
                "device": config.trainer.device,
                "pad_token_id": self.tokenizer.pad_token_id,
                "stop_token_ids": stop_token_ids(config.model.path, self.tokenizer),
                "stop": stop_strings(config.rollout.stop, self.tokenizer),
            },
        )
        self.roles["rollout"] = LocalWorkerGroup(spec, config.trainer.n_gpus_per_node, name="rollout")

    def run(self) -> Path:
        """Answer what is not answered yet and write the output. Returns its path."""
        if self.finished:
            logger.info("%s is there already, made with these settings: nothing to do", self.output)
            self.parts.delete()
            return self.output
        self.parts.open()
        missing = self.parts.missing()
        if missing:
            self._answer(missing)
        answers = self.parts.read()
        facts = _facts(answers)
        self.parts.finish(facts)
        write_output(self.questions, [answer.responses for answer in answers], self.output)
        self.parts.delete()
        logger.info(
            "wrote %s: %s prompts x %d = %s answers of %.1f tokens on average, %.1f %% of them cut at "
            "rollout.response_length=%d",
            self.output,
            f"{facts['prompts']:,}",
            self.config.data.n_samples,
            f"{facts['answers']:,}",
            facts["tokens"] / facts["answers"],
            100 * facts["cut"] / facts["answers"],
            self.config.rollout.response_length,
        )
        return self.output

    def _answer(self, missing: Sequence[int]) -> None:
        """Send the missing parts through the flow, and tell how far it is."""
        total = len(self.questions)
        done = total - sum(len(self.parts.rows_of(part)) for part in missing)
        if done:
            logger.info("going on: %s of %s prompts are answered already", f"{done:,}", f"{total:,}")
        pipeline = self.build_flow(missing).compile()
        self.init_workers()
        start, before, tokens = time.monotonic(), done, 0
        try:
            for part in missing:
                batch = pipeline.run()
                done += len(self.parts.rows_of(part))
                tokens += sum(map(len, batch.non_tensor_batch["response_ids"]))
                seconds = time.monotonic() - start
                logger.info(
                    "answered %s of %s prompts, %.0f tokens/s, %s left",
                    f"{done:,}",
                    f"{total:,}",
                    tokens / seconds,
                    _clock(seconds * (total - done) / (done - before)),
                )
        except BaseException:
            logger.warning("stopped after %s of %s prompts; the same command goes on from there", done, total)
            raise
        finally:
            self.roles["rollout"].shutdown()


def _facts(answers: Sequence[Answers]) -> dict[str, int]:
    reasons = [reason for answer in answers for reason in answer.finish_reasons]
    return {
        "prompts": len(answers),
        "answers": len(reasons),
        "tokens": sum(sum(answer.tokens) for answer in answers),
        "cut": reasons.count("length"),
    }


def _clock(seconds: float) -> str:
    """1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    setup_logging()
    return command_line(arguments, HELP, lambda *given: load_config(*given, schema=GenerationConfig), _generate)


def _generate(path: str | None, overrides: list[str]) -> int:
    try:
        run = GenerationRun(config_path=path, overrides=overrides)
    except USER_ERRORS as error:
        return print_error(error)
    try:
        run.run()
    except DiskFullError as error:
        return print_error(error)
    except KeyboardInterrupt:  # the log has said where it stands
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
