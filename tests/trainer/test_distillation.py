"""Runs with teachers: in the workers, on a server, several by data source; and what is refused."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.runs import fit
from verl.cli.serve import load
from verl.config import load_config
from verl.recipe.dpo import DPOTrainer
from verl.server.app import make_app
from verl.server.http import ServerThread
from verl.server.service import EngineLoop
from verl.trainer.local_trainer import LocalPPOTrainer

LOSS = "distillation.distillation_loss."
TOP = [f"{LOSS}loss_mode=forward_kl_topk", f"{LOSS}topk=4"]
COMPARED = ("distillation/loss", "distillation/reverse_kl", "distillation/abs_loss", "actor/grad_norm")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Another model with the tokenizer of the policy."""
    return tiny_model("llama", tmp_path_factory.mktemp("teacher"), seed=7)


@pytest.fixture
def distilled(settings, teacher):
    """The settings of a run of two steps with one teacher."""
    return [
        *settings,
        "algorithm.name=grpo",
        "trainer.total_training_steps=2",
        "distillation.enabled=true",
        f"distillation.teacher_models.teacher.model_path={teacher}",
        "trainer.resume_mode=disable",
    ]


def log_probs_of(path, batch):
    """(B, T, V) of the responses, row by row, by the model's own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    columns, width = batch.batch, batch.batch["responses"].shape[1]
    result = torch.zeros(len(batch), width, model.config.vocab_size, dtype=torch.float64)
    for row, (ids, mask) in enumerate(zip(columns["input_ids"], columns["attention_mask"].bool())):
        length = int(mask[-width:].sum())
        with torch.no_grad():
            result[row, :length] = model(ids[mask][None]).logits[0, -length - 1 : -1].log_softmax(-1)
    return result


def test_the_columns_are_those_of_the_teacher(distilled, teacher, caplog):
    trainer, reports = fit([*distilled, *TOP, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3"])
    assert "log_prob_micro_batch_size_per_gpu" not in caplog.text  # the settings of the reference are those of teachers
    names = [op.name for op in trainer.pipeline.operators]
    assert names[names.index("teacher") + 1] == "adv"
    batch = reports[0].batch
    expected, mask = log_probs_of(teacher, batch), batch.batch["response_mask"].bool()
    sampled = expected.gather(-1, batch.batch["responses"][..., None])[..., 0]
    assert torch.allclose(batch.batch["teacher_log_probs"].double()[mask], sampled[mask], atol=1e-5)
    values, ids = expected.topk(4)
    assert torch.equal(batch.batch["candidate_ids"][mask], ids[mask])
    assert torch.allclose(batch.batch["teacher_candidate_log_probs"].double()[mask], values[mask], atol=1e-5)
    assert "actor/pg_loss" in reports[0].metrics  # with the rewards of the task
    mass = values.exp().sum(-1)[mask].mean().item()
    assert reports[0].metrics["distillation/teacher_mass"] == pytest.approx(mass, rel=1e-5)


@pytest.mark.fast("forward_kl_topk")
@pytest.mark.parametrize(
    "loss",
    [
        [*TOP, f"{LOSS}topk=32"],
        [f"{LOSS}loss_mode=k1", f"{LOSS}use_policy_gradient=true"],
        pytest.param([f"{LOSS}loss_mode=k2"], marks=pytest.mark.slow),
    ],
    ids=["forward_kl_topk", "k1", "k2"],
)
def test_the_policy_approaches_the_teacher(distilled, loss):
    more = [f"{LOSS}use_task_rewards=false", "trainer.total_training_steps=12", "actor_rollout_ref.rollout.n=8"]
    _, reports = fit([*distilled, *loss, *more, "actor_rollout_ref.actor.optim.lr=3e-3"])
    divergence = [report.metrics["distillation/reverse_kl"] for report in reports]
    assert divergence[-1] < 0.6 * divergence[0]
    assert "actor/pg_loss" not in reports[0].metrics


class WithoutLogProbs(BaseHTTPRequestHandler):
    def do_POST(self):
        self.answer(200, {"choices": [{"text": ""}]})

    def answer(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_):
        pass


class Refusing(WithoutLogProbs):
    def do_POST(self):
        self.answer(400, {"error": "prompt_logprobs: at most 20"})


@pytest.fixture
def serve():
    """Start a server with a handler; returns its URL."""
    servers = []

    def start(handler):
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def served_teacher(teacher):
    """The URL of the teacher, served as by `verl serve --served-model-name served --api-key secret`."""
    with load({"name": "native"}, {"path": str(teacher), "template": None}, "cpu", (64, 8), "served") as loaded:
        generator = EngineLoop(loaded[0])
        with ServerThread(make_app(loaded[1], "secret", generator=generator)) as server:
            yield f"{server.url}/v1"
        generator.close()


def on_server(distilled, url):
    named = "distillation.teacher_models.teacher."
    return [
        *(s for s in distilled if not s.startswith(named)), f"{named}server_url={url}", f"{named}model_path=served"
    ]  # fmt: skip


@pytest.mark.fast("forward_kl_topk")
@pytest.mark.parametrize("loss", [[], TOP], ids=["k3", "forward_kl_topk"])
def test_a_server_gives_the_same_run(distilled, served_teacher, loss):
    _, local = fit([*distilled, *loss])
    server = [*on_server(distilled, served_teacher), "distillation.teacher_models.teacher.api_key=secret"]
    trainer, remote = fit([*server, *loss])
    assert "teacher" not in trainer.specs
    columns = ["teacher_log_probs", *(["candidate_ids", "teacher_candidate_log_probs"] if loss else [])]
    for a, b in zip(local, remote, strict=True):
        for name in COMPARED:
            assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-3, abs=1e-5), name
        padding = ~b.batch.batch["response_mask"].bool()
        assert padding.any() and not any(b.batch.batch[name][padding].any() for name in columns)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (WithoutLogProbs, "expected prompt_logprobs for .* tokens, found none"),
        (Refusing, "HTTP Error 400: .*at most"),
    ],
)
def test_a_server_that_cannot_is_named(distilled, serve, handler, message):
    with pytest.raises(ValueError, match=message):
        fit(on_server(distilled, serve(handler)))


def test_a_server_that_is_not_there(distilled):
    with pytest.raises(ValueError, match=r"teacher http://127\.0\.0\.1:1/v1/completions: .*start the server"):
        fit(on_server(distilled, "http://127.0.0.1:1/v1"))


def with_sources(distilled, tiny, tmp_path, sources):
    """The training rows with a data_source each, by turns."""
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"data_source": sources[i % len(sources)]}) for i, row in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    return [*distilled, f"data.train_files={tmp_path / 'train.jsonl'}"]


def test_the_data_source_selects_the_teacher(distilled, teacher, tiny, tmp_path):
    second = ["distillation.teacher_models.teacher.key=math"]
    second += [f"distillation.teacher_models.code.model_path={tiny / 'model'}"]
    _, reports = fit([*with_sources(distilled, tiny, tmp_path, ["math", "code"]), *second])
    batch = reports[0].batch
    for source, path in (("math", teacher), ("code", tiny / "model")):
        rows = (batch.non_tensor_batch["data_source"] == source).nonzero()[0].tolist()
        assert rows
        expected = log_probs_of(path, batch[rows]).gather(-1, batch[rows].batch["responses"][..., None])[..., 0]
        mask = batch[rows].batch["response_mask"].bool()
        assert torch.allclose(batch[rows].batch["teacher_log_probs"].double()[mask], expected[mask], atol=1e-5)


def test_a_prompt_without_a_teacher(distilled, tiny, tmp_path):
    second = [f"distillation.teacher_models.code.model_path={tiny / 'model'}"]
    with pytest.raises(ValueError, match=r"no teacher for prompts with data_source='math': .* teacher, code"):
        fit([*with_sources(distilled, tiny, tmp_path, ["math"]), *second])


@pytest.mark.slow
def test_own_devices_give_the_same_run(distilled):
    placed = ["trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.teacher_devices=[1]"]
    for a, b in zip(fit(distilled)[1], fit([*distilled, *placed])[1], strict=True):
        for name in COMPARED:
            assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-5), name


@pytest.mark.slow
def test_it_trains_asynchronously(distilled):
    placed = ["trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.rollout_devices=[1]"]
    _, reports = fit([*distilled, *placed, "trainer.async.max_staleness=1"])
    assert all(report.metrics["distillation/loss"] > 0 for report in reports)  # k3 is never negative


def test_a_teacher_with_another_tokenizer_is_refused(settings, tmp_path, forbid_workers):
    other = tiny_model("qwen2", tmp_path / "other", seed=1)
    overrides = ["distillation.enabled=true", f"distillation.teacher_models.teacher.model_path={other}"]
    with pytest.raises(ValueError, match="the teacher has another tokenizer than the policy"):
        LocalPPOTrainer(overrides=[*settings, "algorithm.name=grpo", *overrides])


GRADIENT = [f"{LOSS}loss_mode=k1", f"{LOSS}use_policy_gradient=true", f"{LOSS}policy_loss_mode="]


@pytest.mark.parametrize(
    ("trainer", "overrides", "message"),
    [
        (LocalPPOTrainer, [*GRADIENT[:2], GRADIENT[2] + "vanila"], "did you mean 'vanilla'"),
        (LocalPPOTrainer, [*GRADIENT[:2], GRADIENT[2] + "dro"], "needs the setting 'dro_beta'"),
        (LocalPPOTrainer, [*TOP, f"{LOSS}topk=64"], "topk: found 64, but the vocabulary of .* has 32 tokens"),
        (DPOTrainer, [], "the update of this recipe does not learn from teachers"),
    ],
)
def test_what_cannot_run_is_refused_before_workers_start(trainer, overrides, message, distilled, forbid_workers):
    settings = [s for s in distilled if trainer is LocalPPOTrainer or s != "algorithm.name=grpo"]
    with pytest.raises(ValueError, match=message):
        trainer(overrides=[*settings, *overrides])


REFUSED = {
    "no teacher: set": ["distillation.teacher_models={}"],
    "its gradient does not depend on the teacher": [f"{LOSS}loss_mode=k1"],
    "two teachers have the same key": [
        "distillation.teacher_models.a={key: x, model_path: m}",
        "distillation.teacher_models.b={key: x, model_path: m}",
    ],
    "missing: set it to a model folder": ["distillation.teacher_models.a.key=x"],
    r"unknown key \(keys: key, model_path": ["distillation.teacher_models.a.model=x"],
    r"a.api_key .*: no effect on a local model": ["distillation.teacher_models.a={model_path: m, api_key: k}"],
    r"a.trust_remote_code .*: no effect on a server": [
        "distillation.teacher_models.a={model_path: m, server_url: 'http://a/v1', trust_remote_code: true}"
    ],
    "computes log-probs at temperature 1": [
        "distillation.teacher_models.a={model_path: m, server_url: 'http://a/v1'}",
        "actor_rollout_ref.rollout.temperature=0.7",
    ],
    "megatron does not support the loss forward_kl_topk": [*TOP, "actor_rollout_ref.actor.strategy=megatron"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_do_not_fit(message):
    with pytest.raises(ValueError, match=message):
        load_config(overrides=["distillation.enabled=true", *REFUSED[message]])


def test_the_keys_of_another_placement_are_named(caplog):
    load_config(
        overrides=["distillation.enabled=true", "distillation.teacher_models.a={model_path: m}"]
        + ["distillation.teacher_models.a.inference.name=vllm", "distillation.teacher_models.a.num_replicas=2"]
    )
    assert "2 keys without effect here: distillation.teacher_models.a.inference.name" in caplog.text
