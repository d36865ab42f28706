"""The small tasks: generators against the definitions, scorers against answers judged by hand."""

import pytest

from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset

ALL = ["reverse", "sort", "countdown3", "digit"]


@pytest.mark.parametrize("name", ALL)
def test_the_right_answer_scores_one_and_another_less(tasks, name):
    for example in tasks.train_examples(name, 300, seed=1):
        assert tasks.compute_score(name, example.response, example.ground_truth, {}) == 1.0
        for wrong in ("", example.response + "a", "a" + example.response):
            assert tasks.compute_score(name, wrong, example.ground_truth, {}) < 1.0


@pytest.mark.parametrize("name", ALL)
def test_test_examples_are_500_of_seed_0_and_never_trained_on(tasks, name):
    held_out = tasks.held_out_examples(name)
    assert len(held_out) == 500 and held_out == tasks.held_out_examples(name)
    prompts = {example.prompt for example in held_out}
    trained = tasks.train_examples(name, 2000, seed=1)
    assert prompts.isdisjoint(example.prompt for example in trained)
    assert trained == tasks.train_examples(name, 2000, seed=1) != tasks.train_examples(name, 2000, seed=2)
    with pytest.raises(ValueError, match="reserved for the test examples"):
        next(tasks.train_stream(name, 0))


def test_the_letters_of_seed_0_are_fixed(tasks):
    """Benchmarks compare figures over time, so the strings must stay what they are."""
    assert [e.prompt for e in tasks.held_out_examples("reverse")[:3]] == ["gaeihg=", "hfjdi=", "ecbj="]
    assert [e.response for e in tasks.held_out_examples("reverse")[:3]] == ["ghieag", "idjfh", "jbce"]
    assert [e.response for e in tasks.held_out_examples("sort")[:3]] == ["aegghi", "dfhij", "bcej"]


def test_countdown_examples_are_solvable_as_the_definition_says(tasks):
    for example in tasks.train_examples("countdown3", 500, seed=4):
        numbers, target = example.prompt[:-1].split(":")
        assert sorted(numbers.split(",")) == sorted(c for c in example.response if c.isdigit())
        assert 1 <= int(target) <= 99
        assert eval(example.response) == int(target)  # our own expression, here in the test
        assert example.ground_truth == example.prompt[:-1]


RIGHT = ["1+2*3", "3*2+1", "(1)+(2*3)"]
WRONG = ["1+2+3", "7", "1*7", "1+2*3+0", "1+1+2+3", "2*3", "1+2*3=7", "1+6", "__import__('os').system('x')", "2**3-1"]
WRONG += ["True+2*3", "-1+2*3", "1+2*", "(" * 5000, "\x00", " 1+2*3"]


@pytest.mark.parametrize("answer", [*RIGHT, *WRONG])
def test_countdown_answers_judged_by_hand(tasks, answer):
    assert tasks.compute_score("countdown3", answer, "1,2,3:7", {}) == float(answer in RIGHT)


@pytest.mark.parametrize(
    "answer, score", [("6,8,0", 1.0), ("6,8,1", 2 / 3), ("5,8,0", 0.0), ("6", 1 / 3), ("", 0.0), ("6,8,0,2", 2 / 3)]
)
def test_digit_answers_judged_by_hand(tasks, answer, score):
    assert tasks.compute_score("digit", answer, "6,8,0", {}) == pytest.approx(score)


@pytest.mark.parametrize("name", ALL)
def test_the_files_load_with_the_char_tokenizer(tasks, name, tmp_path, char_tokenizer):
    folder = tasks.write_task(name, tmp_path / name, 64, sft_rows=32, seed=1)
    train = RLHFDataset(str(folder / "train.parquet"), char_tokenizer)
    test = RLHFDataset(str(folder / "test.parquet"), char_tokenizer)
    sft = SFTDataset(str(folder / "sft.parquet"), char_tokenizer)
    assert (len(train), len(test), len(sft)) == (64, 500, 32)
    item = train[0]
    assert item["data_source"] == name and char_tokenizer.decode(item["prompt_ids"]) == item["raw_prompt"]
    assert max(len(sft[i]["response_ids"]) for i in range(32)) <= (10 if name == "digit" else 8)
