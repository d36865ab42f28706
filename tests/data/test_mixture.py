"""Mixing files with weights: counts worked out by hand, the order of each file, exact resume."""

import json
import logging

import pytest

from verl.config import ConfigError, load_config
from verl.data.collate import collate_prompts
from verl.data.mixture import Mixture, datasets_of
from verl.data.order import MixtureSampler, PromptSource
from verl.data.rlhf_dataset import RLHFDataset
from verl.trainer.local_trainer import LocalPPOTrainer


def drawn(sampler, steps):
    return [sampler.next_items() for _ in range(steps)]


def test_counts_follow_the_weights():
    """0.7 and 0.3 of batches of 4. Prompt n+1 goes to the larger of 0.7(n+1) - a and 0.3(n+1) - b:

    n+1:    1 2 3 4 | 5 6 7 8 | 9 10 11 12
    source: a b a a | a b a a | b a  a  b
    (after 8 prompts a has 6 and b 2: 6.3-6=0.3 against 2.7-2=0.7, so b; after 10 it is 7 to 3, and the cycle repeats)
    """
    sampler = MixtureSampler(["a", "b"], [100, 10], [0.7, 0.3], 4, shuffle=False)
    sources = ["".join("a" if row < 100 else "b" for _, row in batch) for batch in drawn(sampler, 3)]
    assert sources == ["abaa", "abaa", "baab"]
    assert sampler.taken == [8, 4] and sampler.shares() == {"a": 0.5, "b": 0.5}
    drawn(sampler, 22)
    assert sampler.taken == [70, 30]  # after 25 steps, 100 prompts


def test_weights_are_relative_and_exact():
    one = MixtureSampler(["a", "b", "c"], [5, 5, 5], [0.1, 0.2, 0.7], 3, seed=1)
    other = MixtureSampler(["a", "b", "c"], [5, 5, 5], [1, 2, 7], 3, seed=1)
    assert drawn(one, 10) == drawn(other, 10)
    assert one.taken == [3, 6, 21]


def test_each_file_is_read_once_per_pass_in_a_new_order():
    sampler = MixtureSampler(["a", "b"], [3, 6], [1, 1], 2, seed=5)
    assert sampler.steps_per_epoch == 4
    items = [item for batch in drawn(sampler, 12) for item in batch]
    assert len(set(items)) == 24  # (pass, row) never occurs twice
    small, large = [i for i in items if i[1] < 3], [i for i in items if i[1] >= 3]
    assert [number for number, _ in small] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [number for number, _ in large] == [0] * 6 + [1] * 6
    for start in range(0, 12, 3):
        assert {row for _, row in small[start : start + 3]} == {0, 1, 2}
    passes = [tuple(row for _, row in small[start : start + 3]) for start in range(0, 12, 3)]
    assert len(set(passes)) > 1
    other = MixtureSampler(["a", "b"], [3, 6], [1, 1], 2, seed=6)
    assert items != [item for batch in drawn(other, 12) for item in batch]


@pytest.mark.parametrize("stop", range(8))
def test_resume_at_every_position(stop):
    def new():
        return MixtureSampler(["a", "b"], [3, 7], [0.6, 0.4], 4, seed=2)

    straight = drawn(new(), 10)
    first = new()
    drawn(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = new()
    second.load_state_dict(state)
    assert drawn(second, 10 - stop) == straight[stop:]
    assert second.epoch == 10 // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [0.5, 0.5]}, r"weights is \[0.6, 0.4\], but \[0.5, 0.5\] in the checkpoint"),
        ({"sizes": [3, 8]}, r"sizes is \[3, 7\]"),
        ({"sources": ["a", "c"]}, "sources is"),
        ({"taken": [1, 2]}, "not a position of 2 datasets after step 1"),
    ],
)
def test_a_position_of_another_mixture_is_refused(change, message):
    sampler = MixtureSampler(["a", "b"], [3, 7], [0.6, 0.4], 4)
    drawn(sampler, 1)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})


def test_files_of_different_columns(write, char_tokenizer, caplog):
    truth = {"style": "rule", "ground_truth": "b"}
    verl_row = {"prompt": "a=", "data_source": "toy", "reward_model": truth, "level": 3}
    files = [write("a.parquet", [verl_row] * 4), write("b.jsonl", [{"prompt": "c=", "solution": "d"}] * 2)]
    with caplog.at_level(logging.INFO, "verl.data"):
        mixture = Mixture([RLHFDataset(file, char_tokenizer) for file in files], files)
    assert "columns dropped, because some of the files lack them: level" in caplog.text
    source = PromptSource(mixture, 4, weights=[0.5, 0.5], collate=collate_prompts)
    batch = source()
    columns = batch.non_tensor_batch
    assert sorted(columns["data_source"]) == ["b", "b", "toy", "toy"]
    truths = [(name, each["ground_truth"]) for name, each in zip(columns["data_source"], columns["reward_model"])]
    assert {*truths} == {("toy", "b"), ("b", "d")}
    assert batch.meta_info["metrics"] == {"data/share/a": 0.5, "data/share/b": 0.5}
    assert source.describe() == "6 prompts: 0.5 a (4), 0.5 b (2); 1 steps of 4 per epoch"


def test_weights_that_fit_no_files(write, char_tokenizer):
    dataset = RLHFDataset(write("a.jsonl", [{"prompt": "a=", "answer": "b"}]), char_tokenizer)
    with pytest.raises(ValueError, match="the dataset was given as an object"):
        PromptSource(dataset, 1, weights=[1.0], collate=collate_prompts)
    with pytest.raises(ValueError, match="the same file twice"):
        Mixture([dataset, dataset], ["a.jsonl", "a.jsonl"])
    for weights in ([0, 1], [-1, 2], ["a", 1]):
        with pytest.raises(ConfigError, match=r"data.train_weights .*expected list\[float\] > 0"):
            load_config(overrides={"data.train_weights": weights, "data.train_files": ["a.jsonl", "b.jsonl"]})


def test_a_run_reports_the_shares_and_resumes(tmp_path, tiny_run):
    """4 prompts per step, 0.75 and 0.25: 3 and 1 in every step."""
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"{x}=", "solution": x, "n": 1}) + "\n" for x in "abc"))
    settings, folder = tiny_run
    (train,) = [each for each in settings if each.startswith("data.train_files=")]
    mixed = [each for each in settings if each != train] + [
        f"data.train_files=[{train.partition('=')[2]},{other}]",
        "data.train_weights=[0.75,0.25]",
        "algorithm.adv_estimator=grpo",
        "trainer.save_freq=2",
        "trainer.test_freq=-1",
    ]

    def run(steps):
        trainer = LocalPPOTrainer(overrides=[*mixed, f"trainer.total_training_steps={steps}"])
        uids = []
        trainer.on_step.append(lambda report: uids.append([*trainer.source.sampler.taken]))
        trainer.fit()
        return uids, trainer

    taken, trainer = run(2)
    assert taken == [[3, 1], [6, 2]]
    resumed, trainer = run(3)
    assert resumed == [[9, 3]]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["data/share/other"] for line in lines if "data/share/other" in line] == [0.25] * 3
    assert trainer.source.describe().startswith("27 prompts: 0.75 ")


def test_the_datasets_of_a_mixture_and_of_another_dataset():
    first, second = [{"x": 1}], [{"x": 2}, {"x": 3}]
    assert datasets_of(Mixture([first, second], ["a", "b"])) == [first, second]
    assert datasets_of(first) == [first]
