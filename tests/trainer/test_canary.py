"""A rollout engine with old weights stops the run, and an intact one does not."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from tests.trainer.runs import fit_reports
from verl.engines.torch_engine import TorchEngine
from verl.rollout.request import Completion
from verl.trainer.guards.mismatch import RolloutMismatchError, rounding_factor
from verl.trainer.ppo.canary import Canary, StaleWeightsError
from verl.weight_sync import ModuleReceiver, ReplicaSync, SyncReport

ROLLOUT = "actor_rollout_ref.rollout"
GRPO = ["algorithm.name=grpo", "trainer.total_training_steps=2", f"{ROLLOUT}.check_every=1"]
LORA = ["actor_rollout_ref.model.lora_rank=4"]


def test_an_intact_push_has_no_gap_and_changes_nothing(settings):
    for more in ([], LORA):
        more = [*more, "trainer.total_training_steps=1"]  # checked before and after the step
        checked = fit_reports([*settings, *GRPO, *more])
        assert all(0 <= report.metrics["weight_sync/canary_mismatch"] < 1e-4 for report in checked)
        plain = fit_reports([*settings, *GRPO, *more, f"{ROLLOUT}.check_every=0", "trainer.resume_mode=disable"])
        for a, b in zip(checked, plain, strict=True):
            assert "weight_sync/canary_mismatch" not in b.metrics
            for name in ("responses", "rollout_log_probs", "old_log_probs", "advantages"):
                assert torch.equal(a.batch.batch[name], b.batch.batch[name]), name
            assert a.metrics["actor/grad_norm"] == b.metrics["actor/grad_norm"]


def copies_nothing(self, engine, version):
    """A push that reports success after the first time, but copies nothing."""
    if version == 0:
        return self.pushed(engine, version)
    self.rollout.weight_version = version
    return SyncReport(version, 1000, 0.1)


def test_a_push_that_copies_nothing_stops_the_run(settings, monkeypatch):
    monkeypatch.setattr(ReplicaSync, "pushed", ReplicaSync.push, raising=False)
    monkeypatch.setattr(ReplicaSync, "push", copies_nothing)
    free = [f"{ROLLOUT}.free_cache_engine=false"]
    with pytest.raises(StaleWeightsError, match=r"rollout DP rank 0 .* weights of version 0, expected version 1"):
        fit_reports([*settings, *GRPO, *LORA, *free, "actor_rollout_ref.actor.optim.lr=3e-2"])


@pytest.mark.fast("1e-4")
@pytest.mark.parametrize("lr", ["1e-2", "1e-4"])
def test_an_engine_that_copied_shared_weights_once_stops_the_run(lr, settings, monkeypatch):
    from verl.rollout.native.engine import NativeRollout

    read = NativeRollout.read

    def read_once(self):
        if self.decoder is None:
            read(self)
        return self.decoder

    monkeypatch.setattr(NativeRollout, "read", read_once)
    monkeypatch.setattr(NativeRollout, "free", lambda self: None)
    with pytest.raises(StaleWeightsError, match=r"rollout DP rank 0 .*version 1"):
        fit_reports([*settings, *GRPO, f"actor_rollout_ref.actor.optim.lr={lr}"])


class Roles:
    """Roles whose canaries are given: the policy is a table, and its log-probs change by a step in each version."""

    def __init__(
        self,
        noise: float,
        step: float,
        keeps: int | None = None,
        narrow: bool = True,
        compared: bool = False,
        tokens: int = 16,
        seed: int = 0,
    ):
        self.compared, self.tokens = compared, tokens
        self.noise, self.step, self.keeps, self.narrow, self.version = noise, step, keeps, narrow, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.world = {"rollout": self, "actor": self}

    def _log_probs(self, version: int) -> torch.Tensor:
        direction = torch.randn(self.tokens, generator=torch.Generator().manual_seed(1))
        return -1.0 + self.step * version * direction

    def canary_response(self, prompt, max_tokens):
        assert (len(prompt), max_tokens) == (16, 16)
        version = self.version if self.keeps is None else min(self.version, self.keeps)
        noise = self.noise * torch.randn(self.tokens, generator=self.generator)
        return [Completion(list(range(self.tokens)), (self._log_probs(version) + noise).tolist(), "length")]

    def canary_log_probs(self, batch):
        return [self._log_probs(self.version)[None].expand(len(batch), -1)]

    def computes_in_16_bits(self):
        return [self.narrow]

    def has_compared_weights(self):
        return [self.compared]


def outcome(roles: Roles, versions=(0, 10, 20), rounding=1.0) -> str:
    canary = Canary(roles.world, 10, vocab_size=100, prompt_length=64, response_length=64, rounding=rounding)
    for roles.version in versions:
        assert canary.is_due(roles.version)
        try:
            canary.check(roles.version)
        except RolloutMismatchError as error:
            assert isinstance(error, StaleWeightsError) == ("computes something else" not in str(error))
            return str(error)
    return "intact"


def test_noise_of_16_bits_is_no_alarm_and_old_weights_are_one():
    assert outcome(Roles(noise=0.0, step=0.0)) == "intact", "nothing is trained"
    for noise in (0.0, 0.006, 0.04):  # up to 10 times what is measured
        for step in (0.0, 1e-4, 1e-3, 1e-2):
            assert outcome(Roles(noise, step)) == "intact", (noise, step)
    # all weights are old: one update changes less than the noise, but the engine repeats itself bit by bit
    assert "still generates with the weights of version 0, expected version 10" in outcome(Roles(0.0, 1e-3, keeps=0))
    # the engine does not repeat itself, but is closer to the old weights
    assert "still generates with the weights of version 0" in outcome(Roles(0.006, 1e-2, keeps=0))
    # another model
    assert "does not generate with the weights of version 10" in outcome(Roles(0.006, 0.1, keeps=0), (10,))
    # the weights were compared in the push: the engine computes something else; but not if it did not before
    message = outcome(Roles(0.006, 0.1, keeps=0, compared=True), (10,))
    assert "has the weights of version 10, but computes something else" in message and "(1) packing" in message
    message = outcome(Roles(0.05, 0.5, keeps=0, compared=True), (0, 10))
    assert "still generates with the weights of version 0" in message
    # in float32 a single update is enough
    assert "version 10" in outcome(Roles(1e-6, 1e-4, keeps=0, narrow=False))


def test_fp8_and_experts_widen_the_limit():
    """A 7B model of random weights in FP8 has a mean of 0.28 and a maximum of 0.66 (2 x H200), and was refused."""
    factor = rounding_factor(Qwen2Config(), "fp8")
    assert (factor, rounding_factor(Qwen3MoeConfig(), None), rounding_factor(Qwen2Config(), "nf4")) == (5.0, 2.0, 1.0)
    noisy = Roles(noise=0.35, step=0.0, compared=True)
    assert "computes something else" in outcome(noisy, (0,))
    assert outcome(noisy, (0,), factor) == "intact"
    assert "expected at most 0.5 and 5 (16 bits)" in outcome(Roles(1.0, 0.0, compared=True), (0,), factor)


@pytest.mark.fast("1", "16")
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_noise_is_no_alarm_however_short_the_response(tokens):
    """The noise of a small trained model in bf16, beside changes that are smaller, as large and larger."""
    for seed in range(100):
        for step in (1e-3, 3e-3, 1e-2):
            assert outcome(Roles(0.03, step, tokens=tokens, seed=seed)) == "intact", (seed, step)
    assert "still generates with the weights of version 0" in outcome(Roles(0.0, 1e-2, keeps=0, tokens=tokens))


def test_checks_are_due_after_the_first_push_and_then_at_multiples():
    roles = Roles(0.0, 0.0)
    canary = Canary(roles.world, 10, vocab_size=100, prompt_length=64, response_length=64)
    due = []
    for roles.version in (7, 8, 10, 10, 11, 20):
        if canary.is_due(roles.version):
            due.append(roles.version)
            canary.check(roles.version)
    assert due == [7, 10, 20]
    off = Canary(roles.world, 0, vocab_size=100, prompt_length=64, response_length=64)
    assert not off.is_due(0)


class Unties(ModuleReceiver):
    """A receiver whose output layer is a copy of the embedding, which it does not update."""

    def receive(self, weights, version):
        super().receive(weights, version)
        head = self.module.lm_head
        if version == 0:
            head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


@pytest.mark.slow
def test_a_stale_tied_output_layer_stops_the_run(settings, monkeypatch, tiny, tmp_path):
    tied = shutil.copytree(tiny / "model", tmp_path / "tied")
    module = AutoModelForCausalLM.from_pretrained(tied)
    module.config.tie_word_embeddings = True
    module.tie_weights()
    module.save_pretrained(tied)
    settings = [*settings, f"actor_rollout_ref.model.path={tied}"]
    monkeypatch.setattr(TorchEngine, "shared_module", lambda self: None)  # so that the engine has a replica
    fit_reports([*settings, *GRPO])
    monkeypatch.setattr("verl.weight_sync.module_receiver.ModuleReceiver", Unties)
    free = [f"{ROLLOUT}.free_cache_engine=false", "actor_rollout_ref.actor.optim.lr=3e-2"]
    with pytest.raises(StaleWeightsError, match="rollout DP rank 0"):
        fit_reports([*settings, *GRPO, *free, "trainer.resume_mode=disable"])
