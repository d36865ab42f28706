"""verl serve MODEL: an OpenAI-compatible HTTP server over a rollout engine."""

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.processes.streams import command_output
from verl.utils.paths import expanded, read_text
from verl.utils.redaction import console_text

if TYPE_CHECKING:
    from socket import socket

    from verl.rollout.base import RolloutEngine
    from verl.server.service import ServedModel

#: longest sequence without --max-model-len, if the model has more positions
_MAX_MODEL_LEN = 8192


def serve(
    model: Annotated[str, typer.Argument(help="Hugging Face model: a folder or a Hub id.")],
    engine: Annotated[str, typer.Option(help="Rollout engine: native, hf, vllm, sglang, or a custom one.")] = "native",
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0: all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 chooses a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="VERL_API_KEY", help="Token that clients must send; default: a random one.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in the API; default: MODEL.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help=f"Longest sequence; default: the model's limit, at most {_MAX_MODEL_LEN}.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Response length of calls without max_tokens.")] = 512,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum responses generated concurrently.")] = 256,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request body in MiB.")] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="dtype of the weights: auto, bf16, fp32, ...")] = "auto",
    gpu_memory_utilization: Annotated[float, typer.Option(help="Fraction of the GPU memory for the engine.")] = 0.9,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that hold one model together.")] = 1,
    engine_kwargs: Annotated[
        str, typer.Option(help="Arguments passed to vLLM or SGLang, in JSON, such as '{\"block_size\": 32}'.")
    ] = "{}",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model.")] = False,
    chat_template: Annotated[str | None, typer.Option(help="File with a Jinja chat template.")] = None,
    tool_parser: Annotated[str, typer.Option(help="Parser of tool calls: hermes, qwen, llama.")] = "hermes",
    imports: Annotated[list[str] | None, typer.Option(help="File or module to import first; repeatable.")] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Web origin that may call; repeatable.")] = None,
    shutdown_seconds: Annotated[int, typer.Option(min=0, help="Seconds for running calls when stopped.")] = 3,
) -> None:
    """Serve MODEL over HTTP with OpenAI's API until SIGINT or SIGTERM."""
    settings = {
        "name": engine,
        "dtype": dtype,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
        "tensor_model_parallel_size": tensor_parallel_size,
    }
    lengths, options = (max_model_len, max_tokens), {"max_body": max_body_mb * 2**20, "cors_origins": cors_origin or ()}
    model_settings = {"path": model, "trust_remote_code": trust_remote_code, "template": chat_template}
    with ExitStack() as stack:
        with _one_error():
            from verl.agents.tools.parsers import TOOL_PARSERS
            from verl.config.inputs import is_local
            from verl.registry import import_module
            from verl.server.http import listen

            list(map(import_module, imports or ()))
            TOOL_PARSERS[tool_parser]  # an unknown name is an error
            if is_local(model) and not expanded(model).is_dir():
                raise ValueError(f"MODEL: there is no folder {model!r}")
            settings["engine_kwargs"] = _engine_kwargs(engine, engine_kwargs)
            sock = listen(host, port)  # before the model is loaded, so that a port in use is reported at once
            name = served_model_name or model
            made, served = stack.enter_context(load(settings, model_settings, device, lengths, name, imports or ()))
        length = f"up to {served.max_model_len} tokens per sequence"
        print(f"serving {console_text(name)} with the engine {engine}, {length}")
        _run(made, replace(served, tool_parser=tool_parser), sock, api_key, shutdown_seconds, **options)


@contextmanager
def _one_error() -> Iterator[None]:
    """End the command with one message for what a user can cause. What takes seconds is imported in it."""
    from verl.trainer.startup.command_line import user_errors
    from verl.utils.log import announce_loading

    announce_loading()

    with user_errors():
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name not in ("starlette", "uvicorn"):
                raise
            raise ImportError(f"verl serve needs {error.name}: pip install -e '.[server]' in a clone") from None


def _engine_kwargs(engine: str, text: str) -> dict:
    """`rollout.engine_kwargs` with the arguments of --engine-kwargs. Raises ValueError for anything but an object."""
    from verl.config import schema

    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--engine-kwargs: not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"--engine-kwargs: expected a JSON object, found {text}")
    if settings and engine not in schema.EngineKwargs.model_fields:
        raise ValueError(
            f"--engine-kwargs: the engine {engine} has no such arguments: remove them, or use vllm or sglang"
        )
    return {engine: settings} if settings else {}


def _run(
    engine: "RolloutEngine", served: "ServedModel", sock: "socket", api_key: str | None, seconds: int, **options: Any
) -> None:
    """Serve until a signal. seconds: for running calls; options: of `make_app`."""
    from verl.server.app import make_app
    from verl.server.http import serve_until_signal
    from verl.server.service import EngineLoop

    key, generator = api_key or secrets.token_urlsafe(24), EngineLoop(engine)
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"  OPENAI_BASE_URL=http://{host}:{port}/v1")
    print(f"  OPENAI_API_KEY={'(as given)' if api_key else key}", flush=True)
    try:
        serve_until_signal(make_app(served, key, generator=generator, **options), sock, seconds)
    finally:
        generator.close()
    print("stopped", flush=True)


@contextmanager
def load(
    settings: dict,
    model_settings: dict,
    device: str,
    lengths: tuple[int | None, int],
    name: str,
    imports: Sequence[str] = (),
) -> "Iterator[tuple[RolloutEngine, ServedModel]]":
    """Context in which the model is loaded into a rollout engine.

    Args:
        settings: values of the `rollout` section.
        model_settings: path, trust_remote_code, and template (a file).
        device: auto, cpu or cuda.
        lengths: maximum length of a sequence, or None; default length of a response.
        name: name of the model in the API.
        imports: what the other ranks of a tensor-parallel engine import first.

    Raises:
        ValueError: no such model, engine or device, or lengths or a tensor-parallel size that the model does not
            support.
    """
    from pydantic import ValidationError

    from verl.cli.tensor_parallel import ServedEngine
    from verl.config import schema
    from verl.config.inputs import check_model_path
    from verl.data.tokenization import load_tokenizer
    from verl.rollout.request import SamplingParams
    from verl.server.service import ServedModel
    from verl.trainer.checks.models import ModelLimits
    from verl.trainer.startup.inputs import stop_token_ids

    for problem in check_model_path("MODEL", model_settings["path"]):
        raise ValueError(str(problem))
    template = model_settings.pop("template")
    if template is not None:
        model_settings["custom_chat_template"] = read_text(expanded(template))
        if not model_settings["custom_chat_template"].strip():
            raise ValueError(f"--chat-template {template}: expected a Jinja chat template, found an empty file")
    model = schema.ModelConfig(**model_settings)
    tokenizer, limits = load_tokenizer(model), ModelLimits.from_config(model)
    max_model_len, max_tokens = lengths
    if max_model_len is not None and limits.positions is not None and max_model_len > limits.positions:
        raise ValueError(f"--max-model-len {max_model_len}: the model has {limits.positions} positions")
    max_model_len = max_model_len or min(limits.positions or _MAX_MODEL_LEN, _MAX_MODEL_LEN)
    max_tokens = min(max_tokens, max_model_len - 1)
    sizes = {"prompt_length": max_model_len - max_tokens, "response_length": max_tokens, "max_model_len": max_model_len}
    try:
        config = schema.RolloutEngineConfig(**settings, **sizes)
    except ValidationError as error:
        (first, *_) = error.errors()
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise ValueError(f"{option}: {first['msg']}, found {first['input']!r}") from None
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    params = SamplingParams(max_tokens, stop_token_ids(model.path, tokenizer))
    served = ServedModel(name, tokenizer, params, vocab_size=limits.vocab_size, max_model_len=max_model_len)
    with ServedEngine(config, model, device, pad, imports).serving() as made:
        yield made, replace(served, sampling_keys=made.sampling_keys)


if __name__ == "__main__":
    with command_output():
        typer.run(serve)
