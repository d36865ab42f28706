"""`verl serve --tensor-parallel-size`: two ranks serve what one does, and the server ends if one of them fails."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest

from examples.quickstart.tiny_model import tiny_model

vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm")
ENGINES = ["native", pytest.param("vllm", marks=vllm)]
TWO = ("--tensor-parallel-size", "2")
START = "import sys; from verl.cli.app import app; app(sys.argv[1:])"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("served") / "model", seed=0, size="small")


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen, openai.OpenAI]]:
    """A server in another process, and a client of it."""
    command = ["serve", str(folder), "--port", "0", "--device", "cpu", "--max-model-len", "256"]
    command += ["--served-model-name", "tiny", *options]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        values: dict[str, str] = {}
        while "OPENAI_API_KEY" not in values:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            if "=" in line:
                values.update([line.strip().split("=", 1)])
        base = values["OPENAI_BASE_URL"]
        with openai.OpenAI(base_url=base, api_key=values["OPENAI_API_KEY"], max_retries=0) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def ask(client: openai.OpenAI, prompt: str, stream: bool = False) -> Sequence:
    options = {"max_tokens": 12, "temperature": 0, "extra_body": {"return_token_ids": True}, "stream": stream}
    found = client.completions.create(model="tiny", prompt=prompt, logprobs=None if stream else 0, **options)
    return list(found) if stream else [found.choices[0].token_ids, found.choices[0].logprobs.token_logprobs]


def answers(client: openai.OpenAI) -> list[Sequence]:
    """To concurrent requests."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda text: ask(client, text), ["a", "hello", "one two three", "b"] * 4))


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_serve_what_one_does(engine, folder):
    with serving(folder, "--engine", engine) as (_, client):
        expected = answers(client)
    more = ["--engine-kwargs", '{"block_size": 32}'] if engine == "vllm" else []
    with serving(folder, "--engine", engine, *TWO, *more) as (process, client):
        found = answers(client)
        chunks = ask(client, "hello", stream=True)
        others = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, process.stderr.read()
        psutil.wait_procs(others, timeout=30)
        assert others and all(ended(other) for other in others)
    assert len(chunks) > 1
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == expected[1][0]
    for (tokens, log_probs), (tokens_of_one, log_probs_of_one) in zip(found, expected, strict=True):
        assert tokens == tokens_of_one and log_probs == pytest.approx(log_probs_of_one, abs=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_ends_the_server(folder):
    with serving(folder, *TWO) as (process, client):
        ask(client, "hello")
        others = [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() != "sh"]
        (rank,) = [p for p in others if not {*p.children()} & {*others}]  # its parent is the fork server
        os.kill(rank.pid, signal.SIGKILL)
        assert process.wait(60) == 1
        error = process.stderr.read()
        assert f"error: tensor-parallel rank 1 has failed: process {rank.pid} was killed by SIGKILL" in error


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_ranks_end_with_a_server_that_is_killed(folder):
    with serving(folder, *TWO) as (process, client):
        ask(client, "hello")
        others = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        psutil.wait_procs(others, timeout=30)
        assert others and all(ended(other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "hf", *TWO], "tensor_model_parallel_size=2: the rollout engine 'hf' does not support it"),
        (["--tensor-parallel-size", "99999"], "--tensor-parallel-size 99999: expected at most "),
        (["--tensor-parallel-size", "3"], "does not divide the model's num_attention_heads=4: use 1 or 2"),
    ],
)
def test_a_size_that_is_not_supported_is_one_error(options, message, folder):
    command = [sys.executable, "-c", START, "serve", str(folder), "--port", "0", "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("error: ") == 1 and message in done.stderr, done.stderr
