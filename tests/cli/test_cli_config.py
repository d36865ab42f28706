"""python -m verl.cli.config: the table of all keys, and the part of it that is asked for."""

import pytest

from verl.cli.config import TREES, main
from verl.config.node import leaves


@pytest.mark.parametrize("name", TREES)
def test_every_key_of_every_program(name, capsys):
    assert main(["--of", name]) == 0
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head == "| key | type | default | meaning |" and set(rule) == {"|", "-"}
    assert [row.split("`")[1] for row in rows] == list(leaves(TREES[name]))


def test_words_choose_lines_in_any_case(capsys):
    assert main(["CLIP_RATIO", "dual"]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split("`")[1] for row in rows] == ["actor_rollout_ref.actor.clip_ratio_c"]


def test_a_word_that_is_nowhere(capsys):
    assert main(["trainbatch_size"]) == 1
    found = capsys.readouterr()
    assert "no key of ppo has 'trainbatch_size' in its line: did you mean data.train_batch_size?" in found.err
    assert found.out == ""
