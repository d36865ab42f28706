"""`score_group` of an agent loop: scores that compare the responses to one prompt, in a run."""

import pytest

from tests.trainer.runs import fit_reports
from verl.agents.loop import AGENT_LOOPS, SingleTurn
from verl.trainer.local_trainer import LocalPPOTrainer

GRPO = ["algorithm.name=grpo", "trainer.total_training_steps=1", "reward.custom_reward_function.path=null"]
GRPO += ["actor_rollout_ref.rollout.n=3"]
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=ranked"


class Ranked(SingleTurn):
    """The rank of a response among those of its prompt, by length and text."""

    @staticmethod
    def score_group(samples):
        order = sorted(range(len(samples)), key=lambda i: (samples[i].extra_info["response_length"], i))
        return [order.index(i) for i in range(len(samples))]


class Wrong(SingleTurn):
    @staticmethod
    def score_group(samples):
        return [1.0]


@pytest.fixture
def ranked(monkeypatch):
    monkeypatch.setitem(AGENT_LOOPS, "ranked", Ranked)


def test_the_scores_of_a_group_are_its_rewards(ranked, settings):
    (report,) = fit_reports([*settings, *GRPO, LOOP], LocalPPOTrainer)
    batch = report.batch
    rows = zip(batch.non_tensor_batch["uid"], batch.batch["token_level_scores"].sum(1).tolist())
    groups = {}
    for uid, score in rows:
        groups.setdefault(uid, []).append(score)
    assert len(groups) > 1 and all(sorted(scores) == [0, 1, 2] for scores in groups.values())


def test_a_wrong_number_of_scores_or_a_manager_without_groups_is_an_error(monkeypatch, settings):
    monkeypatch.setitem(AGENT_LOOPS, "ranked", Wrong)
    with pytest.raises(ValueError, match="score_group: expected 3 scores, one per sample, found 1"):
        fit_reports([*settings, *GRPO, LOOP], LocalPPOTrainer)
    with pytest.raises(ValueError, match=r"score_group of the agent loop needs reward_manager\.name=naive or dapo"):
        LocalPPOTrainer(overrides=[*settings, *GRPO, LOOP, "reward.reward_manager.name=batch"])
