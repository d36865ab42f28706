"""verl config explain: the table of all keys, and the part of it that is asked for."""

import pytest

from verl.cli.config import SCHEMAS, explain
from verl.config.fields import fields_of


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_of_every_program(name, capsys):
    assert explain([], name) == 0
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head == "| key | type | default | meaning |" and set(rule) == {"|", "-"}
    assert [row.split("`")[1] for row in rows] == list(fields_of(SCHEMAS[name]))


def test_words_choose_lines_in_any_case(capsys):
    assert explain(["CLIP_RATIO", "dual"], "ppo") == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split("`")[1] for row in rows] == ["actor_rollout_ref.actor.clip_ratio_c"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trainbatch_size"], "'trainbatch_size' in its line: did you mean data.train_batch_size?"),
        (["lrr"], "'lrr' in its line: did you mean actor_rollout_ref.actor.optim.lr?"),
        (["actor.optim.lrr"], "'actor.optim.lrr' in its line: did you mean actor_rollout_ref.actor.optim.lr?"),
        (["learning", "critic.optim.lrr"], "'critic.optim.lrr' in its line: did you mean critic.optim.lr?"),
        (["algorithm.clip_range"], "in its line: it is an alias of actor_rollout_ref.actor.clip_ratio"),
        (["engine.num_gpu"], "in its line: did you mean engine.num_gpus?"),
        (["actor_rollout_ref.model.use_shm"], "in its line: it has no effect here: speed or memory only"),
        (["critic", "placement", "lora"], "has 'critic' and 'placement' and 'lora' in one line"),
        (["xyzzy"], "no key of ppo has 'xyzzy' in its line"),
    ],
)
def test_words_that_are_nowhere(words, expected, capsys):
    assert explain(words, "ppo") == 1
    found = capsys.readouterr()
    assert found.err.startswith("error: no key of ppo has ") and found.err.endswith(f"{expected}\n")
    assert found.out == ""


def test_an_unknown_program(capsys):
    assert explain([], "pp") == 1
    assert "error: --of pp: did you mean 'ppo'? known: dpo, " in capsys.readouterr().err
