"""`rollout.deterministic`: the log-probs of sampling are those of training, to the last bit, in every step of a run."""

import pytest

from tests.trainer.runs import fit
from verl import Operator
from verl.config import ConfigError, load_config
from verl.trainer.local_trainer import LocalPPOTrainer

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ON = f"{ROLLOUT}.deterministic=true"
RUN = [
    ON,
    "algorithm.name=grpo",
    f"{ROLLOUT}.n=3",
    f"{ROLLOUT}.max_num_seqs=5",  # of 12 rows: the others take the places of those that end
    f"{ROLLOUT}.temperature=0.8",
    "trainer.total_training_steps=3",
]
BF16 = [f"{ACTOR}.fsdp_config.dtype=bf16", "actor_rollout_ref.ref.fsdp_config.dtype=bf16"]
KL = [f"{ACTOR}.use_kl_loss=true"]
BY_TOKENS = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=17"]
ONE_PASS = [f"{ACTOR}.ppo_mini_batch_size=4"]  # log-probs come from the first update's forward pass
TWO_RANKS = ["trainer.n_gpus_per_node=2", f"{ACTOR}.ppo_mini_batch_size=4"]


@pytest.mark.fast("by tokens")
@pytest.mark.parametrize(
    "overrides",
    [
        BY_TOKENS,
        pytest.param(BF16, marks=pytest.mark.slow),
        [*ONE_PASS, *BY_TOKENS, *BF16, *KL],
        pytest.param([*TWO_RANKS, *BY_TOKENS, *BF16], marks=pytest.mark.slow),
    ],
    ids=["by tokens", "bf16", "one pass", "two ranks"],
)
def test_no_step_has_a_mismatch(overrides, settings):
    _, steps = fit([*settings, *RUN, *overrides])
    assert len(steps) == 3
    assert [step["rollout/logprob_gap_max"] for step in steps] == [0.0] * 3
    assert all(step["actor/grad_norm"] > 0 for step in steps)  # the weights do change between them
    if KL[0] in overrides:
        assert steps[0]["actor/kl_loss"] == 0.0  # the reference starts as the same model, by the same operations


class Changed(LocalPPOTrainer):
    """Something in the flow that changes the sampled log-probs."""

    def build_flow(self):
        def change(batch) -> None:
            batch.batch["rollout_log_probs"] -= 2.0**-20

        return super().build_flow().insert_before("reward", Operator("change", change))


def test_a_mismatch_is_logged(settings, caplog):
    metrics = Changed(overrides=[*settings, *RUN, "trainer.total_training_steps=1"]).fit()
    assert metrics["rollout/logprob_gap_max"] > 0
    assert "although rollout.deterministic is true" in caplog.text


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"{ROLLOUT}.name=hf", "needs 'native'"),
        (f"{ROLLOUT}.dtype=bf16", "dtype of training"),
        (f"{ROLLOUT}.top_p=0.9", "full distribution"),
        ("actor_rollout_ref.model.use_liger=true", "needs false"),
        ("actor_rollout_ref.model.use_remove_padding=false", "needs true"),
        ("actor_rollout_ref.model.lora_rank=4", "adapters"),
        (f"{ACTOR}.fsdp_config.tensor_parallel_size=2", "over ranks"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2", "over ranks"),
        (f"{ACTOR}.fsdp_config.dtype=fp64", "float32"),
    ],
)
def test_what_cannot_be_equal_is_refused_by_name(override, says):
    with pytest.raises(ConfigError, match=says) as error:
        load_config(overrides=[ON, "trainer.n_gpus_per_node=2", override])
    assert "rollout.deterministic" in str(error.value)
    assert override.partition("=")[0] in str(error.value)
