"""`verl export`: write a model in the format of another program."""

from pathlib import Path
from typing import Annotated

import typer

from verl.cli.push import merged, open_source
from verl.utils.redaction import console_text

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
