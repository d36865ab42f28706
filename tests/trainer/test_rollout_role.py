"""Rollout as a role: custom engines and agent loops by name, devices of its own, weights pushed once per step."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.conftest import run_settings
from tests.trainer.runs import RAY, fit_reports
from verl.config import ConfigError
from verl.single_controller.worker_group import Future
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo.weights import RolloutWeights
from verl.weight_sync import SyncReport
from verl.workers.reward_model import RewardModelWorker
from verl.workers.rollout.role import Rollout

ROOT = Path(__file__).parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ECHO = [f"imports=[{ROOT}/examples/custom_rollout_engine/echo_engine.py]", f"{ROLLOUT}.name=echo"]
CALCULATOR = [
    f"imports=[{ROOT}/examples/custom_agent_loop/calculator_loop.py]",
    f"{ROLLOUT}.agent.default_agent_loop=calculator",
    "data.max_response_length=40",
]
GRPO = ["algorithm.name=grpo", "trainer.total_training_steps=2"]
EXECUTORS = {
    "one process": [],
    "two processes": ["trainer.n_gpus_per_node=2"],
    "ray": ["trainer.n_gpus_per_node=2", *RAY],
}
slow = pytest.mark.slow
#: every executor; `make test` has one process only
EVERYWHERE = [pytest.param(name, marks=() if name == "one process" else slow) for name in EXECUTORS]
#: Adam divides by the size of a gradient: with its own eps a rounding error becomes a whole step where that is 0
SMOOTH = [f"{ACTOR}.optim.override_optimizer_config.eps=1e-3"]
SAVED = ["trainer.save_freq=2", f"{ACTOR}.checkpoint.save_contents=[hf_model]"]


@pytest.mark.parametrize("executor", EVERYWHERE)
def test_a_custom_engine_generates(executor, settings):
    reports = fit_reports([*settings, *GRPO, *ECHO, *EXECUTORS[executor]])
    assert len(reports) == 2
    for step, report in enumerate(reports):
        batch = report.batch.batch
        for row in range(len(report.batch)):
            prompt = batch["prompts"][row][batch["attention_mask"][row, : batch["prompts"].shape[1]].bool()]
            response = batch["responses"][row][batch["response_mask"][row].bool()]
            assert response[: len(prompt)].tolist() == prompt[: len(response)].tolist()
        assert batch["weight_version"].tolist() == [step] * len(report.batch)
        assert report.metrics["weight_sync/version"] == step + 1 and report.metrics["weight_sync/bytes"] == 0


@pytest.mark.parametrize("executor", EVERYWHERE)
def test_a_custom_agent_loop_uses_its_tool(executor, settings):
    reports = fit_reports([*settings, *GRPO, *CALCULATOR, *EXECUTORS[executor]])
    tool_tokens = 0
    for report in reports:
        batch = report.batch.batch
        real = batch["attention_mask"][:, batch["prompts"].shape[1] :].bool()
        by_tool = real & ~batch["response_mask"].bool()
        tool_tokens += int(by_tool.sum())
        assert (batch["rollout_log_probs"][by_tool] == 0).all()
        assert (batch["rollout_log_probs"][batch["response_mask"].bool()] <= 0).all()
        assert report.metrics["rollout/turns"] >= 1 and report.metrics["actor/grad_norm"] > 0
        # what the policy sampled in any turn, the trainer finds as probable
        assert report.metrics["rollout/logprob_gap_max"] < 1e-3
    assert tool_tokens > 0, "the tool was never used: choose another seed"


def test_a_loop_of_one_turn_over_generate_one_gives_the_batch_of_generate(settings, tmp_path):
    loop = tmp_path / "loop.py"
    loop.write_text(
        "from verl.agents import SingleTurn, register_agent_loop\n"
        'register_agent_loop("again")(type("Again", (SingleTurn,), {}))\n'
    )
    one = [*settings, *GRPO, "trainer.resume_mode=disable"]
    again = [*one, f"imports=[{loop}]", f"{ROLLOUT}.agent.default_agent_loop=again"]
    for a, b in zip(fit_reports(one), fit_reports(again)):
        for name in ("responses", "rollout_log_probs", "advantages", "weight_version"):
            assert torch.equal(a.batch.batch[name], b.batch.batch[name]), name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ROLLOUT}.name=natve", r"did you mean 'native'\?.*hf, native"),
        (f"{ROLLOUT}.agent.default_agent_loop=singel_turn", r"did you mean 'single_turn'\?"),
        (f"{ACTOR}.strategy=fdsp", r"did you mean 'fsdp'\?"),
    ],
)
def test_a_misspelt_name_lists_the_registered_ones(override, message, settings):
    with pytest.raises(ConfigError, match=message):
        LocalPPOTrainer(overrides=[*settings, *GRPO, override])


# ---- devices of its own -----------------------------------------------------------------------------------------

TWO = ["trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.rollout_devices=[1]"]
THREE = ["trainer.n_gpus_per_node=3", "placement.actor_devices=[0,1]", "placement.rollout_devices=[2]"]
FOUR = ["trainer.n_gpus_per_node=4", "placement.actor_devices=[0,1]", "placement.rollout_devices=[2,3]"]
TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size=2"
LORA = ["actor_rollout_ref.model.lora_rank=4"]
SEPARATE = {
    "one device": (TWO, []),
    "fsdp": (THREE, []),
    "tensor parallel": (FOUR, [f"{ACTOR}.fsdp_config.tensor_parallel_size=2"]),
    "tensor-parallel rollout": (FOUR, [TENSOR_PARALLEL]),
    "lora": (TWO, LORA),
    "ray": ([*TWO, *RAY], []),
    "overlap": ([*TWO, "trainer.overlap=true"], []),
    "transformers": (TWO, [f"{ROLLOUT}.name=hf"]),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name == "fsdp" else slow) for name in SEPARATE])
def test_a_rollout_on_devices_of_its_own_gives_the_numbers_of_one_process(case, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    placement, more = SEPARATE[case]
    algorithm = ["algorithm.name=grpo", f"{ACTOR}.use_kl_loss=true", "trainer.total_training_steps=2", *SMOOTH, *SAVED]
    same = [name for name in more if "parallel_size" not in name]
    runs = {
        "one": fit_reports([*run_settings(tiny, tmp_path / "one"), *algorithm, *same]),
        "own": fit_reports([*run_settings(tiny, tmp_path / "own"), *algorithm, *more, *placement]),
    }
    for step, (a, b) in enumerate(zip(*runs.values(), strict=True)):
        for name in ("responses", "rollout_log_probs", "old_log_probs", "advantages", "weight_version"):
            torch.testing.assert_close(a.batch.batch[name], b.batch.batch[name], rtol=1e-5, atol=1e-5, msg=name)
        assert b.metrics["weight_sync/bytes"] > 0 and b.metrics["weight_sync/version"] == step + 1
    one, own = (load_file(tmp_path / run / "global_step_2/actor/huggingface/model.safetensors") for run in runs)
    for name, weight in one.items():
        torch.testing.assert_close(own[name], weight, rtol=1e-5, atol=1e-5, msg=name)


@slow
@pytest.mark.parametrize("case", ["batch", "agent loop", "lora", "ray", "stride"])
def test_a_tensor_parallel_rollout_in_the_actors_processes_gives_the_numbers_of_whole_models(case, tiny, tmp_path):
    more = {"batch": [], "agent loop": CALCULATOR, "lora": LORA, "ray": RAY, "stride": []}[case]
    ranks = 4 if case == "stride" else 2  # of which the first and the third are a group
    algorithm = [*GRPO, *SMOOTH, f"trainer.n_gpus_per_node={ranks}", *more]
    whole, split = (
        fit_reports([*run_settings(tiny, tmp_path / name), *algorithm, *keys])
        for name, keys in (("whole", []), ("split", [TENSOR_PARALLEL]))
    )
    for step, (a, b) in enumerate(zip(whole, split, strict=True)):
        for name in ("responses", "rollout_log_probs", "old_log_probs", "advantages", "weight_version"):
            torch.testing.assert_close(b.batch.batch[name], a.batch.batch[name], rtol=1e-5, atol=1e-5, msg=name)
        assert b.metrics["rollout/logprob_gap_max"] < 1e-3 and b.metrics["weight_sync/version"] == step + 1
        assert 0 < b.metrics["weight_sync/bytes"] < 0.6 * a.metrics["weight_sync/bytes"]
        assert "weight_sync/kept_bytes" in b.metrics and "weight_sync/kept_bytes" not in a.metrics


@slow
def test_an_engine_that_takes_no_weights_cannot_have_devices_of_its_own(settings):
    with pytest.raises(Exception, match=r"rollout\.name=echo has no receiver"):
        fit_reports([*settings, *GRPO, *ECHO, *TWO])


# ---- phases -----------------------------------------------------------------------------------------------------


class Phases:
    """Counts what the colocated rollout is told to do."""

    def __init__(self, monkeypatch):
        self.calls: list[str] = []
        for name in ("sync_weights", "sleep", "free_cache", "generate"):
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch, name: str) -> None:
        original = vars(Rollout)[name]

        def watched(rollout, *args):
            if name != "free_cache" or self.calls[-1:] != ["sleep"]:
                self.calls.append(name if name != "generate" else args[0].meta_info["sampling"])
            return original(rollout, *args)

        monkeypatch.setattr(Rollout, name, watched)


@pytest.mark.fast("remax")
@pytest.mark.parametrize("algorithm", ["grpo", "remax"])
def test_weights_are_pushed_once_per_step_and_validation_uses_them(algorithm, settings, monkeypatch):
    phases = Phases(monkeypatch)
    overrides = [f"algorithm.name={algorithm}", "trainer.total_training_steps=2"]
    fit_reports([*settings, *overrides, "trainer.test_freq=1", "trainer.val_before_train=true"])
    generating = ["train", "greedy"] if algorithm == "remax" else ["train"]
    validation = ["validate", "free_cache"]
    step = [*generating, "sleep", "sync_weights", *validation]
    assert phases.calls == ["sync_weights", *validation, *step, *step]


def test_nothing_sleeps_where_nothing_shares_the_device(settings):
    flow = LocalPPOTrainer(overrides=[*settings, *GRPO, *TWO]).pipeline.operators
    assert [op.name for op in flow][-2:] == ["update_actor", "sync_weights"]
    assert not [op.name for op in flow if "sleep" in op.name]
    kept = LocalPPOTrainer(overrides=[*settings, *GRPO, f"{ROLLOUT}.free_cache_engine=false"]).pipeline.operators
    assert not [op.name for op in kept if "sleep" in op.name]


def test_dynamic_sampling_sleeps_after_its_last_pass(settings):
    dapo = [*settings, "algorithm.name=dapo", "trainer.total_training_steps=1"]
    names = [op.name for op in LocalPPOTrainer(overrides=dapo).pipeline.operators]
    assert names.index("sleep_rollout") == names.index("filter_groups") + 1


@pytest.mark.slow
def test_the_rollout_sleeps_while_a_reward_model_computes_between_two_passes(settings, tmp_path, monkeypatch):
    judge = tiny_model("qwen2", tmp_path / "judge", seed=1)
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1).save_pretrained(judge)
    scored = [s for s in settings if "custom_reward_function" not in s]
    scored += ["use_rm=true", f"reward.reward_model.model_path={judge}", "algorithm.name=dapo"]
    # two passes: a step trains on 4 prompts
    passes = ["data.gen_batch_size=2", "algorithm.filter_groups.metric=reward"]
    phases = Phases(monkeypatch)
    score = RewardModelWorker.compute_rm_score

    @functools.wraps(score)  # with its dispatch mode
    def watched(*args):
        phases.calls.append("score")
        return score(*args)

    monkeypatch.setattr(RewardModelWorker, "compute_rm_score", watched)
    reports = fit_reports([*scored, *passes, "trainer.total_training_steps=2"])
    one_pass = ["sync_weights", "train", "sleep", "score"]
    # the first pass of a step has the weights that were pushed after the step before
    assert phases.calls == [*one_pass * 2, *one_pass * 2, "sync_weights"]
    for step, report in enumerate(reports):
        assert report.batch.batch["weight_version"].tolist() == [step] * len(report.batch)


class Group:
    """Stands for a role whose calls are recorded. `RolloutWeights` asks it how to connect, and submits calls."""

    world_size = 2

    def __init__(self):
        self.calls: list[str] = []

    def check_receiver(self) -> None: ...

    def transfer_address(self) -> str:
        return "tcp://host:1"

    def submit(self, name: str, *args) -> Future:
        self.calls.append(name)
        return Future.completed([SyncReport(args[0], 8, 1.0)] if name in ("push_weights", "receive_weights") else None)


def test_training_and_separate_rollout_connect_once_and_again_after_a_restart():
    actor, rollout = Group(), Group()
    weights = RolloutWeights({"actor": actor, "rollout": rollout}, separate=True)
    for version in (1, 2):
        assert weights.push(version)["weight_sync/version"] == version
    assert actor.calls == ["connect_to_rollout", "push_weights", "push_weights"]
    assert rollout.calls == ["connect_to_actor", "receive_weights", "receive_weights"]
    weights.reset()
    weights.push(3)
    assert actor.calls[3:] == ["connect_to_rollout", "push_weights"]


@pytest.mark.slow
def test_versions_continue_after_a_resume(settings):
    fit_reports([*settings, "algorithm.name=grpo", "trainer.total_training_steps=2", "trainer.save_freq=1"])
    (report,) = fit_reports([*settings, "algorithm.name=grpo", "trainer.total_training_steps=3"])
    assert report.batch.batch["weight_version"].tolist() == [2] * len(report.batch)
    assert report.metrics["weight_sync/version"] == 3
