"""Models for other programs: `verl push` publishes one on the Hugging Face Hub, `verl export` writes a GGUF file."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.checkpoints.store import newest_actor
from verl.utils.paths import resolved
from verl.utils.redaction import REDACTED, console_text, redacted

if TYPE_CHECKING:  # imports numpy, which --help does not need
    from verl.tracking.runs import RecordedRun

_CURVES = "curves.png"


def push(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="global_step_N, its actor folder, or a Hugging Face model")
    ],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="repository of the Hub: NAME or OWNER/NAME")],
    run: Annotated[
        Path | None, typer.Option(help="folder of the run; default: the one that the checkpoint is in")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Only you and your organization see the model.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the model card and the files, and upload nothing.")
    ] = False,
) -> None:
    """Publish a model on the Hugging Face Hub: weights, tokenizer, and a card with data, settings, curves and figures.

    A checkpoint is merged first. Needs a token: `hf auth login`, or the variable HF_TOKEN.
    """
    from huggingface_hub.utils import validate_repo_id

    from verl.tracking.curves import save_curves
    from verl.trainer.startup.command_line import user_errors
    from verl.utils.log import setup_logging

    setup_logging()
    with user_errors():
        validate_repo_id(repo)
        source, step = open_source(checkpoint)
        record = _open_record(run, source)
        if dry_run:
            names = {path.name for path in _model_files(source)} | {"README.md"}
            names |= {_CURVES} if _has_curves(record) else set()
            typer.echo(console_text("\n".join([model_card(repo, record, step), "files:", *sorted(names)])))
            if _is_checkpoint(source):
                typer.echo("model.safetensors: merged from the checkpoint")
            return
        with tempfile.TemporaryDirectory() as folder:
            plots = []
            if _has_curves(record):
                plots.append(save_curves(record.folder / "metrics.jsonl", Path(folder) / _CURVES))
            name = _create_repo(repo, private)  # before the merge, which may take long
            with merged(source) as model:
                url = _upload(name, [*_model_files(model), *plots], model_card(name, record, step))
    typer.echo(f"published: {url}\nserve it: vllm serve {name}")


# ---- what is published ----------------------------------------------------------------------------------------------


def open_source(folder: Path) -> tuple[Path, int | None]:
    """The folder of the model or of the actor's checkpoint, and the step of the checkpoint."""
    folder = resolved(folder)
    if (folder / "actor").is_dir():
        folder /= "actor"
    if not folder.is_dir() or not (_is_checkpoint(folder) or (folder / "config.json").is_file()):
        newest = newest_actor(folder)
        raise ValueError(
            f"CHECKPOINT {folder}: expected a checkpoint ({newest.parent if newest else '.../global_step_N'}) or a "
            "Hugging Face model with config.json"
        )
    names = (part for part in folder.parts if part.startswith("global_step_"))
    number = next(names, "").removeprefix("global_step_")
    return folder, int(number) if number.isdecimal() else None


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "huggingface").is_dir()


def _open_record(run: Path | None, source: Path) -> "RecordedRun | None":
    """The record of the run: of the folder `run`, or of the nearest one above the checkpoint; None if there is none."""
    from verl.tracking.runs import open_run

    if run is not None:
        return open_run(run)
    above = (path for path in source.parents if any((path / name).is_file() for name in ("run.json", "metrics.jsonl")))
    folder = next(above, None)
    if folder is None:
        typer.echo(f"no run is recorded above {source}: the card has no figures; set --run FOLDER", err=True)
    return None if folder is None else open_run(folder)


def _has_curves(record: "RecordedRun | None") -> bool:
    from verl.tracking.curves import PANELS

    return record is not None and any(name in record.metrics for names in PANELS.values() for name in names)


def _model_files(source: Path) -> list[Path]:
    """The files to publish; not the card of the base model, nor those of git."""
    folder = source / "huggingface" if _is_checkpoint(source) else source
    return [path for path in folder.iterdir() if path.is_file() and path.name[0] != "." and path.name != "README.md"]


@contextmanager
def merged(source: Path) -> Iterator[Path]:
    """The folder of the model. A checkpoint is merged into a temporary folder on its own disk."""
    if not _is_checkpoint(source):
        yield source
        return
    from verl.model_merger.merge import MergeOptions, merge

    with tempfile.TemporaryDirectory(prefix=".push-", dir=source.parent.parent) as draft:
        yield merge(MergeOptions(source, Path(draft) / "model"))


def _create_repo(repo: str, private: bool) -> str:
    """Create the repository if it does not exist. Returns OWNER/NAME. Raises ValueError if it is public, and --private
    is set."""
    from huggingface_hub import HfApi

    api = HfApi()
    with _hub_errors(repo):
        api.whoami()  # the error of a missing token names the fix
        name = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(name).private:
            raise ValueError(f"{name} exists and is public: make it private on its page, or push without --private")
    return name


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Raises ValueError for an answer of the Hub that is an error, or none."""
    import httpx
    from huggingface_hub import constants

    try:
        yield
    except httpx.HTTPError as error:
        hint = "check the address in HF_ENDPOINT and that the token (`hf auth login`, HF_TOKEN) may write to it"
        raise ValueError(f"{repo} is not published at {constants.ENDPOINT}: {error}; {hint}") from None


def _upload(repo: str, files: list[Path], card: str) -> str:
    """Upload all files as one commit. Returns its address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    operations = [CommitOperationAdd("README.md", card.encode()), *(CommitOperationAdd(p.name, p) for p in files)]
    with _hub_errors(repo):
        return HfApi().create_commit(repo, operations, commit_message="Upload the model").commit_url


# ---- the card -------------------------------------------------------------------------------------------------------


def model_card(repo: str, record: "RecordedRun | None", step: int | None) -> str:
    """The README of a model: metadata of the Hub, figures up to `step`, data, settings without secrets, and use.
    Absolute paths are cut to their last part."""
    from huggingface_hub import ModelCardData

    metadata = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["verl"])
    sections = [f"# {repo.rpartition('/')[2]}"]
    if record is not None:
        metadata.tags.append(record.algorithm)
        if record.model_path.count("/") == 1 and not Path(record.model_path).exists():  # an id of the Hub
            metadata.base_model = record.model_path
        settings = {key: _public(value) for key, value in redacted(record.config).items()}
        steps, data = record.steps if step is None else step, settings.get("data.train_files", [])
        rows = {"algorithm": record.algorithm, "base model": record.model, "steps": steps}
        rows["training data"] = ", ".join(map(str, data if isinstance(data, list) else [data]))
        sections += [_table(("training", ""), rows), *_figures(record, steps)]
        changed = [key for key in record.about.get("changed") or settings if REDACTED not in str(settings.get(key))]
        lines = [f"{key}={settings[key]}" for key in changed if key in settings]
        sections.append("\n".join(["## Settings\n\n```", *lines, "```"]))
    sections.append(f"## Use\n\n```bash\nvllm serve {repo}\n```")
    return "\n\n".join([f"---\n{metadata.to_yaml()}\n---", *sections]) + "\n"


def _figures(record: "RecordedRun", step: int) -> list[str]:
    """The sections of curves and results: first value, and the last one that is not after `step`."""
    rows = {}
    for name in (record.reward_name, *record.validation_names):
        series = [point for point in record.metrics.get(name or "", ()) if point[0] <= step]
        if series:
            label = record.validation_label(name) if name in record.validation_names else name
            rows[label] = f"{series[0][1]:.4g} (step {series[0][0]}) | {series[-1][1]:.4g} (step {series[-1][0]})"
    curves = [f"![Learning curves]({_CURVES})"] if _has_curves(record) else []
    return ["## Results\n\n" + _table(("metric", "first", "latest"), rows), *curves] if rows else curves


def _table(heading: tuple[str, ...], rows: Mapping[str, Any]) -> str:
    lines = [" | ".join(heading), " | ".join("---" for _ in heading), *(f"{key} | {rows[key]}" for key in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _public(value: Any) -> Any:
    if isinstance(value, list):
        return [_public(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


# ---- verl export ----------------------------------------------------------------------------------------------------

export = typer.Typer(help="Write a model in the format of another program.", no_args_is_help=True)


@export.callback()
def _export() -> None:
    pass


@export.command("gguf")
def gguf(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a Hugging Face model, or a checkpoint")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write model-TYPE.gguf and Modelfile to")],
    type_name: Annotated[
        str, typer.Option("--type", help="type of the weight matrices: f32, f16, bf16 or q8_0")
    ] = "f16",
    pre_tokenizer: Annotated[
        str | None, typer.Option(help="llama.cpp's name of the pre-tokenizer; default: found by its pattern")
    ] = None,
) -> None:
    """Write a GGUF file for llama.cpp, Ollama and LM Studio, and an Ollama Modelfile."""
    from verl.trainer.startup.command_line import user_errors
    from verl.utils.log import setup_logging

    setup_logging()
    with user_errors():
        try:
            from verl.model_merger.gguf import export_gguf
        except ModuleNotFoundError as error:
            raise ImportError(f"verl export gguf needs {error.name}: pip install gguf") from None
        source, _ = open_source(model)
        with merged(source) as folder:
            path = export_gguf(folder, out, type_name, pre_tokenizer)
    size = path.stat().st_size / 1e6
    modelfile = path.parent / "Modelfile"
    typer.echo(console_text(f"wrote {path} ({size:,.1f} MB)\nrun it: ollama create NAME -f {modelfile}"))
