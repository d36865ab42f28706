"""verl/recipe/prime: the filter of prompts by hand, both update orders, a reward model that learns, and resumption."""

import pytest
import torch

from tests.recipe.checks import assert_resumes
from tests.trainer.conftest import make_tiny, run_settings
from tests.trainer.runs import fit
from verl.config import load_config
from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.recipe.prime import PRIMETrainer
from verl.recipe.prime.flow import PromptFilter
from verl.recipe.prime.worker import ImplicitPRMWorker, PrimeConfig, PromptFilterConfig


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str) % 2)\n"
    )
    return folder


@pytest.fixture
def settings(tiny, tmp_path):
    return [*run_settings(tiny, tmp_path / "run"), "prime.optim.lr=1e-3", "prime.filter.oversample_factor=2"]


class Queue:
    """Remembers what is put back."""

    def __init__(self):
        self.back: list[str] = []

    def put_back(self, rows: DataProto) -> None:
        self.back += rows.non_tensor_batch["uid"].tolist()


def test_the_filter_by_hand():
    # prompt: verdicts of its 2 answers, tokens of its answers; 9 ends an answer, 4 tokens are the limit
    prompts = {
        "all wrong": ([0, 0], [[1, 9], [1, 9]]),
        "one right": ([1, 0], [[1, 9], [1, 2, 3, 9]]),  # at the limit, but ended
        "cut off": ([1, 0], [[1, 2, 3, 4], [1, 9]]),
        "all right": ([1, 1], [[1, 9], [9]]),
        "another": ([0, 1], [[9], [9]]),
        "a third": ([0, 1], [[9], [9]]),
    }
    uids = [name for name in prompts for _ in range(2)]
    answers = [answer for _, both in prompts.values() for answer in both]
    verdicts = [float(v) for right, _ in prompts.values() for v in right]
    batch = DataProto(build_sequences([[5]] * 12, answers, 0), {"uid": uids, "reward_acc": verdicts})

    def chosen(num_prompts: int, **config: object) -> tuple[list[str], list[str], dict]:
        queue = Queue()
        given = batch.copy()
        found = PromptFilter(PromptFilterConfig(**config), queue, num_prompts, 4, (9,))(given)
        return found.non_tensor_batch["uid"].tolist()[::2], queue.back, given.meta_info["metrics"]

    assert chosen(2)[:2] == (["one right", "another"], ["a third"])
    taken, back, metrics = chosen(4)  # three are preferred; the first of the others fills up
    assert (taken, back) == (["all wrong", "one right", "another", "a third"], [])
    assert metrics == {
        "prime/acc_mean": 6 / 12,
        "prime/preferred_share": 3 / 6,
        "prime/others_taken": 1,
        "prime/prompts_put_back": 0,
    }
    assert chosen(2, filter_truncate=False)[:2] == (["one right", "cut off"], ["another", "a third"])
    assert chosen(1, accuracy_lower_bound=0, accuracy_upper_bound=0.3)[0] == ["all wrong"]


FLOW = (
    "prompts repeat gen sleep_rollout reward filter_prompts old_log_prob ref outcome {} {} kl adv update_actor "
    "sync_weights"
)


@pytest.mark.fast("before*")
@pytest.mark.parametrize(
    ("order", "first", "second"), [("before", "update_prm", "prm"), ("after", "prm", "update_prm")]
)
def test_both_update_orders(order, first, second, settings):
    trainer, reports = fit([*settings, f"prime.update={order}", "trainer.total_training_steps=2"], PRIMETrainer)
    assert [op.name for op in trainer.pipeline.operators] == FLOW.format(first, second).split()
    scores = [report.batch.batch["rm_scores"].abs().max().item() for report in reports]
    # phi starts as the reference: before its first update it rewards nothing
    assert (scores[0] > 0) == (order == "before") and scores[1] > 0
    assert all(len(report.batch) == 8 for report in reports)
    assert all(report.metrics["prm/grad_norm"] > 0 for report in reports)
    # ln 2: it cannot tell right from wrong yet
    assert reports[0].metrics["prm/loss"] == pytest.approx(0.6931, abs=1e-3)


def test_the_reward_model_learns_to_tell_right_from_wrong(tiny):
    config = load_config(
        overrides=[f"actor_rollout_ref.model.path={tiny / 'model'}", "prime.optim.lr=3e-3", "prime.beta=0.5"],
        schema=PrimeConfig,
    )
    worker = ImplicitPRMWorker(config.prime, config.actor_rollout_ref, device="cpu", total_training_steps=10)
    answers = [[4 + i, 5, 6, 2] if i % 2 else [4 + i, 6, 5, 2] for i in range(8)]
    batch = DataProto(build_sequences([[7, 8]] * 8, answers, 0))
    reference = worker.compute_prm_log_prob(batch).batch["prm_log_prob"]
    batch = batch.replace(ref_log_prob=reference, acc=torch.tensor([0.0, 1.0] * 4))
    batch.meta_info |= {"mini_batch_rows": 8, "last_pass": True}
    for _ in range(10):
        total, count = worker.update_prm(batch)["prm/acc"]
    assert total / count == 1
    rewards = 0.5 * (worker.compute_prm_log_prob(batch).batch["prm_log_prob"] - reference).sum(1)
    assert rewards[1::2].min() > 0 > rewards[::2].max()


@pytest.mark.slow
def test_resumed_is_bit_equal_to_uninterrupted(settings):
    assert_resumes(settings, PRIMETrainer, steps=2)
