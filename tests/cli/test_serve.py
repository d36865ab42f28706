"""The command `verl` and `verl serve`: help without torch, errors before a model is loaded."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from examples.quickstart.tiny_model import tiny_model
from verl.cli.app import app


def call(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(arguments))
    return found.exit_code, found.output


def test_help_loads_nothing_heavy():
    status, text = call("serve", "--help")
    assert status == 0 and "--max-model-len" in text
    program = "import sys, verl.cli.app; print({'torch', 'transformers', 'starlette'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model("qwen2", tmp_path_factory.mktemp("cli") / "model"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "nativ"], "did you mean 'native'"),
        (["--tool-parser", "herms"], "did you mean 'hermes'"),
        (["--max-model-len", "100000"], "the model has 4096 positions"),
        (["--dtype", "int8"], "--dtype"),
        (["--imports", "nowhere.py"], "nowhere.py"),
        (["--engine-kwargs", "{"], "--engine-kwargs: not JSON"),
        (["--engine-kwargs", "[1]"], "expected a JSON object, found [1]"),
        (["--engine-kwargs", '{"block_size": 32}'], "the engine native has no such arguments"),
    ],
)
def test_wrong_options_are_one_error(folder, options, message, capfd):
    status, text = call("serve", folder, "--port", "0", "--device", "cpu", *options)
    assert status == 1 and message in text + capfd.readouterr().err


def test_a_folder_without_a_model_is_one_error(folder, tmp_path, capfd):
    def complaint(path) -> str:
        status, text = call("serve", str(path), "--port", "0", "--device", "cpu")
        assert status == 1
        return text + capfd.readouterr().err

    empty = complaint(tmp_path)
    assert f"error: MODEL: '{tmp_path}' has no config.json: expected the folder of a Hugging Face model" in empty
    assert "error: MODEL: there is no folder './nowhere'" in complaint("./nowhere")
    ignored = shutil.ignore_patterns("*.safetensors")
    without = complaint(shutil.copytree(folder, tmp_path / "model", ignore=ignored))
    assert "no file named model.safetensors" in without and "Traceback" not in without


def test_a_port_in_use_is_reported_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, text = call("serve", "no_such_model", "--port", str(taken.getsockname()[1]))
    assert status == 1 and "cannot listen on 127.0.0.1" in text and "--port" in text


def test_serve_prints_its_address_and_a_random_token_and_stops(folder, capfd):
    import httpx

    texts: list[str] = []
    answers: list[httpx.Response] = []

    def use() -> None:
        while "OPENAI_API_KEY=" not in "".join(texts):
            texts.append(capfd.readouterr().out)
            time.sleep(0.05)
        values = dict(line.split("=", 1) for line in "".join(texts).split() if "=" in line)
        headers = {"Authorization": f"Bearer {values['OPENAI_API_KEY']}"}
        answers.append(httpx.get(f"{values['OPENAI_BASE_URL']}/models", headers=headers))
        os.kill(os.getpid(), signal.SIGTERM)

    user = threading.Thread(target=use)
    user.start()
    from verl.cli.serve import serve

    serve(folder, port=0, device="cpu", served_model_name="tiny")
    user.join()
    assert answers[0].json()["data"][0]["id"] == "tiny" and "127.0.0.1" in texts[-1]
    assert len("".join(texts).partition("OPENAI_API_KEY=")[2].split()[0]) >= 32
