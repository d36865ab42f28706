"""`verl push` against a small server that answers the calls of huggingface_hub and keeps what is uploaded."""

import base64
import json

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from verl.cli.app import app
from verl.server.http import ServerThread


class Hub:
    """repositories: name -> {"private": bool, "files": {path: bytes}}; only the token "hf_writer" may write."""

    def __init__(self):
        self.repositories = {}
        routes = [
            Route("/api/whoami-v2", self.whoami),
            Route("/api/repos/create", self.create, methods=["POST"]),
            Route("/api/models/{owner}/{name}", self.info),
            Route("/api/models/{owner}/{name}/preupload/main", self.preupload, methods=["POST"]),
            Route("/api/models/{owner}/{name}/commit/main", self.commit, methods=["POST"]),
            Route("/api/validate-yaml", self.validate, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    @staticmethod
    def may_write(request) -> bool:
        return request.headers.get("authorization") == "Bearer hf_writer"

    async def whoami(self, request):
        if not self.may_write(request):
            return JSONResponse({"error": "Invalid token"}, status_code=401)
        return JSONResponse({"name": "ada", "type": "user"})

    async def create(self, request):
        body = await request.json()
        name = f"{body.get('organization') or 'ada'}/{body['name']}"
        if name in self.repositories:
            return JSONResponse({"url": f"{request.base_url}{name}"}, status_code=409)
        self.repositories[name] = {"private": body.get("visibility") == "private", "files": {}}
        return JSONResponse({"url": f"{request.base_url}{name}"})

    def name(self, request) -> str:
        return "{owner}/{name}".format(**request.path_params)

    async def info(self, request):
        name = self.name(request)
        return JSONResponse({"id": name, "private": self.repositories[name]["private"], "tags": [], "siblings": []})

    async def preupload(self, request):
        files = (await request.json())["files"]
        modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
        return JSONResponse({"files": modes})

    async def commit(self, request):
        for line in (await request.body()).splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                files = self.repositories[self.name(request)]["files"]
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
        return JSONResponse({"commitUrl": f"{request.base_url}{self.name(request)}/commit/1", "commitOid": "1"})

    async def validate(self, request):
        return JSONResponse({"errors": [], "warnings": []})


@pytest.fixture(scope="module")
def hub():
    hub = Hub()
    with ServerThread(hub.app) as server:
        hub.address = server.url
        yield hub


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with a checkpoint of step 2, whose figures end at step 4."""
    folder = tmp_path_factory.mktemp("runs") / "sums"
    model = folder / "global_step_2" / "actor" / "huggingface"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)).save_pretrained(model)
    (model / "tokenizer_config.json").write_text("{}")
    (model / "README.md").write_text("the card of the base model")
    config = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "data.train_files": ["/data/ada/secret_project/train.parquet"],
        "actor_rollout_ref.actor.optim.lr": 1e-5,
        "trainer.worker_env": {"WANDB_API_KEY": "0123456789abcdef"},
        "trainer.seed": 42,
    }
    changed = {key: value for key, value in config.items() if key != "trainer.seed"}
    (folder / "run.json").write_text(json.dumps({"config": config, "changed": changed}))
    scores = [0.125, 0.25, 0.5, 0.75]
    lines = [{"step": step, "critic/score/mean": score} for step, score in enumerate(scores, 1)]
    lines[1]["val-core/sums/reward/mean@1"], lines[3]["val-core/sums/reward/mean@1"] = 0.375, 0.875
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


@pytest.fixture
def push(hub, monkeypatch):
    """Runs the command; returns its exit status and output."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")

    def command(*arguments: object, token: str = "hf_writer") -> tuple[int, str]:
        monkeypatch.setenv("HF_TOKEN", token)
        done = CliRunner().invoke(app, ["push", *map(str, arguments)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    return command


def test_a_checkpoint_is_merged_and_published_with_its_card(push, hub, run):
    status, output = push(run / "global_step_2", "ada/sums", "--private")
    assert status == 0, output
    assert "vllm serve ada/sums" in output and "/ada/sums/commit/1" in output
    repository = hub.repositories["ada/sums"]
    files = repository["files"]
    names = {"README.md", "config.json", "curves.png", "generation_config.json", "model.safetensors"}
    assert repository["private"] and {*files} == {*names, "tokenizer_config.json"}
    source = run / "global_step_2" / "actor" / "huggingface"
    (run / "copy.safetensors").write_bytes(files["model.safetensors"])
    published, trained = load_file(run / "copy.safetensors"), load_file(source / "model.safetensors")
    (run / "copy.safetensors").unlink()
    assert published.keys() == trained.keys() and all(torch.equal(published[key], trained[key]) for key in trained)
    assert files["curves.png"].startswith(b"\x89PNG")
    assert not [path for path in run.rglob(".push-*")]


def test_the_card(push, hub, run):
    status, output = push(run / "global_step_2", "ada/other", "--dry-run")
    assert status == 0 and "ada/other" not in hub.repositories
    card, _, files = output.partition("files:\n")
    _, metadata, text = card.split("---\n", 2)
    expected = {"library_name": "transformers", "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    assert yaml.safe_load(metadata).items() >= expected.items() and yaml.safe_load(metadata)["tags"] == ["verl", "grpo"]
    assert "| critic/score/mean | 0.125 (step 1) | 0.25 (step 2) |" in text  # not of steps after the checkpoint
    assert "0.375 (step 2) | 0.375 (step 2)" in text and "0.875" not in text
    assert "actor_rollout_ref.actor.optim.lr=1e-05" in text and "trainer.seed" not in text
    assert "0123456789abcdef" not in output and "/data/ada" not in output and "train.parquet" in text
    assert files.split()[:2] == ["README.md", "config.json"] and "merged from the checkpoint" in files


def test_refusals(push, hub, run):
    hub.repositories["ada/open"] = {"private": False, "files": {}}
    for arguments, token, message in (
        ((run / "global_step_2", "ada/open", "--private"), "hf_writer", "ada/open exists and is public"),
        ((run / "global_step_2", "ada/sums"), "hf_reader", "HF_TOKEN"),
        ((run / "global_step_2", "ada/sums"), "", "no token found"),
        ((run / "global_step_3", "ada/sums"), "hf_writer", "expected a checkpoint (.../global_step_N)"),
        ((run, "ada/sums"), "hf_writer", "/global_step_2)"),
        ((run / "global_step_2", "a/b/c"), "hf_writer", "a/b/c"),
    ):
        status, output = push(*arguments, token=token)
        assert status == 1 and message in output, output
    assert hub.repositories["ada/open"]["files"] == {}
