"""`score_group` of an agent loop: scores that compare the responses to one prompt, in a run."""

import pytest

from tests.trainer.runs import fit_reports
from verl.agents.loop import SingleTurn, register_agent_loop
from verl.trainer.local_trainer import LocalPPOTrainer

GRPO = ["algorithm.name=grpo", "trainer.total_training_steps=1", "actor_rollout_ref.rollout.n=3"]
NO_FUNCTION = "reward.custom_reward_function.path=null"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop="


@register_agent_loop("ranked_responses")
class Ranked(SingleTurn):
    """The rank of a response among those of its prompt, by length and text."""

    @staticmethod
    def score_group(samples):
        order = sorted(range(len(samples)), key=lambda i: (samples[i].extra_info["response_length"], i))
        return [order.index(i) for i in range(len(samples))]


@register_agent_loop("one_score")
class OneScore(SingleTurn):
    @staticmethod
    def score_group(samples):
        return [1.0]


def test_the_scores_of_a_group_are_its_rewards(settings):
    (report,) = fit_reports([*settings, *GRPO, NO_FUNCTION, LOOP + "ranked_responses"], LocalPPOTrainer)
    batch, groups = report.batch, {}
    for uid, score in zip(batch.non_tensor_batch["uid"], batch.batch["token_level_scores"].sum(1).tolist()):
        groups.setdefault(uid, []).append(score)
    assert len(groups) > 1 and all(sorted(scores) == [0, 1, 2] for scores in groups.values())


def test_a_wrong_number_of_scores_is_an_error(settings):
    with pytest.raises(ValueError, match=r"score_group: expected \d scores, one per sample, found 1"):
        fit_reports([*settings, *GRPO, NO_FUNCTION, LOOP + "one_score"], LocalPPOTrainer)
