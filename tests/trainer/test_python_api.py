"""Trainers as objects: what is given in Python in place of files, single steps, generation, further fits."""

import ast
import asyncio
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import Dataset

from tests.pages import DOCS, ROOT, blocks
from tests.trainer.runs import lines as rows_of
from tests.trainer.runs import untimed
from verl import Operator, PPOTrainer, SFTTrainer, load_config
from verl.algorithms.advantages import GroupedRewards, register_adv_est
from verl.algorithms.masked import agg_loss
from verl.algorithms.policy_losses import register_policy_loss
from verl.config import ConfigError
from verl.rewards import register_reward
from verl.trainer import SFTTrainer as SameSFTTrainer
from verl.trainer.base import Trainer

NOTEBOOK = ROOT / "examples" / "notebooks" / "first_steps.ipynb"


def letters(solution_str, ground_truth, data_source, extra_info=None, *, bonus=0.0):
    """As compute_score of the fixture."""
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1) + bonus


@pytest.fixture
def config(tiny, tmp_path) -> dict[str, Any]:
    """The settings of the fixture `settings` as a dictionary, without files."""
    return {
        "algorithm.name": "grpo",
        "data": {"train_batch_size": 4, "max_prompt_length": 8, "max_response_length": 6},
        "actor_rollout_ref": {"model": {"path": tiny / "model"}, "rollout.n": 2, "actor.ppo_mini_batch_size": 2},
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "trainer": {"default_local_dir": tmp_path / "run", "logger": ("jsonl",), "val_before_train": False},
        "trainer.save_freq": -1,
        "trainer.total_training_steps": 3,
        "reward.isolation": "none",
    }


def learned(metrics) -> dict[str, float]:
    """The metrics that do not depend on time."""
    return untimed(metrics, "weight_sync/", "async/")


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_objects_train_as_files_do(tiny, settings, config, tmp_path):
    from_files = PPOTrainer(overrides=[*settings, "algorithm.name=grpo", "trainer.total_training_steps=3"])
    expected = learned(from_files.step())
    rows = [{"prompt": row["prompt"], "ground_truth": row["answer"]} for row in rows_of(tiny / "train.jsonl")]
    assert learned(PPOTrainer(config, train_dataset=rows, reward=letters).step()) == expected
    file = tmp_path / "config.yaml"
    plain = json.loads(json.dumps(config, default=str))
    file.write_text(json.dumps(plain))
    for given in (file, str(file), load_config(config)):
        trainer = PPOTrainer(given, train_dataset=rows, val_dataset=tiny / "test.jsonl", reward=letters)
        assert trainer.config.actor_rollout_ref.rollout.n == 2 and len(trainer.val_dataset) == 6
    with_paths = PPOTrainer(config, train_dataset=[str(tiny / "train.jsonl")], reward=letters)
    assert with_paths.config.data.train_files == [str(tiny / "train.jsonl")] and len(with_paths.train_dataset) == 24
    own = PPOTrainer(load_config(config), overrides={"trainer": {"seed": 3}}, train_dataset=rows, reward=letters)
    assert (own.config.trainer.seed, own.config.data.seed) == (3, 3)  # data.seed follows
    assert SFTTrainer is SameSFTTrainer


def test_a_reward_receives_the_columns_of_the_row(config):
    rows = [{"prompt": "ab=", "answer": 7, "kind": "sum"}, {"prompt": "c=", "answer": 5}]
    seen = []

    async def score(solution_str, ground_truth, extra_info, data_source):
        await asyncio.sleep(0)
        seen.append((ground_truth, extra_info["kind"]))
        return 1.0

    few = {"data.train_batch_size": 2}
    trainer = PPOTrainer(config, overrides=few, train_dataset=rows * 2, reward=score)
    seen.clear()
    assert trainer.step()["critic/score/mean"] == 1.0
    assert set(seen) == {("7", "sum"), ("5", None)} and len(seen) == 4
    assert set(trainer.batch.non_tensor_batch["kind"]) <= {"sum", None}


def test_rewards_of_batches_and_registered_rewards(config):
    rows = [{"prompt": f"{letter}=", "answer": letter} for letter in "abcdefgh"]

    def of_batch(data_sources, solution_strs, ground_truths):
        return [float(len(ground_truths))] * len(solution_strs)

    assert PPOTrainer(config, train_dataset=rows, reward=of_batch).step()["critic/score/mean"] == 8.0

    @register_reward("always_two")
    def always_two(solution_str, ground_truth, data_source):
        return 2.0

    assert PPOTrainer(config, train_dataset=rows, reward="always_two").step()["critic/score/mean"] == 2.0
    with pytest.raises(ValueError, match="no reward function is called 'always_too': did you mean 'always_two'"):
        PPOTrainer(config, train_dataset=rows, reward="always_too")
    with pytest.raises(ValueError, match="reward and reward_fn are the same argument"):
        PPOTrainer(config, train_dataset=rows, reward=of_batch, reward_fn=of_batch)


def test_a_torch_dataset_of_rows_and_one_of_tokens(config):
    class Items(Dataset):
        def __init__(self, item):
            self.item = item

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.item

    row = {"prompt": "ab=", "answer": "ab"}
    assert PPOTrainer(config, train_dataset=Items(row), reward=letters).train_dataset[0]["prompt_ids"]
    item = {"prompt_ids": [4, 5], "data_source": "own", "reward_model": {"ground_truth": "b"}}
    own = Items(item)
    assert PPOTrainer(config, train_dataset=own, reward=letters).train_dataset is own


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "expected at least one row, found none"),
        (iter([]), "expected a list of dicts, a dataset with a length, or paths, found list_iterator"),
        ({"train": []}, "expected one split, found dict with the keys train"),
        ([{"prompt": "a="}, "b="], 'row 1 .*: expected a dict such as {"prompt"'),
        ([{"text": "a="}], r"no column 'prompt' for the prompt \(data.prompt_key\)"),
        ([{"prompt": "a="}] * 3, "train_batch_size is 4 prompts, but the training data has 3 rows"),
        ("missing.jsonl", "missing.jsonl"),
    ],
)
def test_datasets_that_cannot_be_read(config, dataset, message):
    with pytest.raises(ValueError, match=message):
        PPOTrainer(config, train_dataset=dataset, reward=letters)


def test_a_model_object_trains_as_its_folder_does(tiny, config, tmp_path):
    rows = rows_of(tiny / "train.jsonl")
    expected = learned(PPOTrainer(config, train_dataset=rows, reward=letters).step())
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny / "model")
    given = {"model": model, "tokenizer": transformers.AutoTokenizer.from_pretrained(tiny / "model")}
    with pytest.raises(ValueError, match=r"give model or actor_rollout_ref.model.path \(.*\), not both"):
        PPOTrainer(config, train_dataset=rows, reward=letters, **given)
    del config["actor_rollout_ref"]["model"]
    with pytest.raises(ValueError, match="a model object needs its tokenizer"):
        PPOTrainer(config, train_dataset=rows, reward=letters, model=model)
    trainer = PPOTrainer(config, train_dataset=rows, reward=letters, **given)
    assert learned(trainer.step()) == expected
    assert trainer.config.actor_rollout_ref.model.path == str(tmp_path / "run" / "initial_model")


def test_sft_on_rows(tiny, tmp_path):
    rows = [{"prompt": row["prompt"], "response": row["answer"]} for row in rows_of(tiny / "train.jsonl")]
    config = {"model.path": tiny / "model", "data.train_batch_size": 4, "data.max_length": 16, "trainer.save_freq": -1}
    config |= {"trainer.logger": [], "trainer.default_local_dir": tmp_path / "sft", "trainer.total_training_steps": 2}
    trainer = SFTTrainer(config, train_dataset=rows, val_dataset=rows[:6])
    before = trainer.validate()["val/loss"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert SFTTrainer(config, train_dataset=file).step()["train/nll"] == trainer.step()["train/nll"]
    trainer.fit()
    assert trainer.validate()["val/loss"] < before


# ---- steps, generation ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_and_several_fits_train_as_one_fit_does(config, tiny, tmp_path):
    rows = rows_of(tiny / "train.jsonl")
    found: dict[str, list] = {"one": [], "many": []}
    for name, reports in found.items():
        own = {"trainer.default_local_dir": tmp_path / name}
        trainer = PPOTrainer(config, overrides=own, train_dataset=rows, reward=letters)
        trainer.on_step.append(reports.append)
        if name == "one":
            trainer.fit()
        else:
            assert trainer.validate() == {} and trainer.batch is None
            reports.append(trainer.step())
            trainer.fit(steps=1)
            trainer.fit(steps=1)
            assert trainer.total_steps == 3 and repr(trainer.step()).startswith("step 4 of 4")
    assert [report.step for report in found["many"]] == [1, 2, 3]
    for mine, theirs in zip(found["many"], found["one"], strict=True):
        assert learned(mine) == learned(theirs) and mine["critic/score/mean"] == mine.metrics["critic/score/mean"]
    lines = rows_of(tmp_path / "many" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 3]  # fit logs, step does not
    with pytest.raises(KeyError, match="no metric 'critic/score/meen': did you mean 'critic/score/mean'"):
        found["one"][0]["critic/score/meen"]


@pytest.mark.fast("True")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_step_that_raises_does_not_count_and_its_prompts_are_drawn_again(config, tiny, dynamic):
    rows, calls, broken = rows_of(tiny / "train.jsonl"), [], []

    def score(solution_str, ground_truth, data_source, extra_info):
        calls.append(extra_info["number"])
        if broken and len(calls) == 6:
            raise RuntimeError("no such letter")
        return float(len(calls) % 2)

    own = {"algorithm.filter_groups.enable": dynamic, "algorithm.adv_estimator": "grpo"}
    rows = [{**row, "number": number} for number, row in enumerate(rows)]
    trainer = PPOTrainer(config, overrides=own, train_dataset=rows, reward=score)
    trainer.step()
    position = trainer.pipeline.state_dict()
    broken.append(True)
    for _ in range(2):
        calls.clear()
        with pytest.raises(Exception, match="no such letter"):
            trainer.step()
        assert trainer.global_step == 1 and trainer.progress_summary().startswith("in step 2 of 3")
    assert str(trainer.pipeline.state_dict()) == str(position)
    drawn = list(calls)
    broken.clear()
    calls.clear()
    assert trainer.step().step == 2 and calls[:6] == drawn and len(set(drawn)) == 3
    assert trainer.validate() == {} and trainer.fit(steps=1)["training/global_step"] == 3


@pytest.mark.slow
def test_a_fit_that_failed_in_its_first_step_starts_again(config, tiny):
    broken = []

    def score(solution_str, ground_truth, data_source):
        if broken:
            raise RuntimeError("no such letter")
        return letters(solution_str, ground_truth, data_source)

    trainer = PPOTrainer(config, train_dataset=rows_of(tiny / "train.jsonl"), reward=score)
    broken.append(True)
    with pytest.raises(Exception, match="no such letter"):
        trainer.fit()
    broken.clear()
    expected = PPOTrainer(config, train_dataset=rows_of(tiny / "train.jsonl"), reward=letters).step()
    reports = []
    trainer.on_step.append(reports.append)
    trainer.fit(steps=1)
    assert trainer.global_step == 1 and learned(reports[0]) == learned(expected)


def test_a_further_fit_says_that_the_run_has_ended(config, tiny, caplog):
    unsaved = {"trainer.save_at_end": False}
    trainer = PPOTrainer(config, overrides=unsaved, train_dataset=rows_of(tiny / "train.jsonl"), reward=letters)
    trainer.fit()
    assert trainer.fit() == {} and "nothing to train: the run ended at step 3" in caplog.text
    for steps in (0, -1, 1.5):
        with pytest.raises(ValueError, match="expected the number of steps to train, int >= 1"):
            trainer.fit(steps=steps)
    trainer.shutdown()
    with pytest.raises(ValueError, match="the trainer is at step 3, but there is no checkpoint"):
        trainer.fit(steps=1)


def greedy(folder: Path, prompts: list[str]) -> list[str]:
    """Greedy responses of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        texts.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def test_generation_with_the_current_weights(config, tiny):
    prompts = ["abc=", "a=", "jihg="]
    trainer = PPOTrainer(config, train_dataset=rows_of(tiny / "train.jsonl"), reward=letters)
    before = trainer.generate(prompts, temperature=0)
    assert before == greedy(tiny / "model", prompts)
    assert trainer.generate(prompts, n=2, temperature=0) == [[text, text] for text in before]
    sampled = trainer.generate(["abc="], n=8)[0]
    assert len(set(sampled)) > 1 and sampled == trainer.generate(["abc="], n=8)[0]
    assert sampled != trainer.generate(["abc="], n=8, seed=1)[0]
    assert all(len(text) <= 2 for text in trainer.generate(["abc="], n=8, max_tokens=2)[0])
    for _ in range(3):
        trainer.step()
    after = trainer.generate(prompts, temperature=0)
    assert after != before and after == greedy(trainer.save() / "actor" / "huggingface", prompts)
    with pytest.raises(ValueError, match=r"max_tokens=7 exceeds data.max_response_length \(6\)"):
        trainer.generate(prompts, max_tokens=7)
    with pytest.raises(ValueError, match="no sampling parameter is called 'temprature': did you mean 'temperature'"):
        trainer.generate(prompts, temprature=1)
    with pytest.raises(ValueError, match=r"temperature=-1"):
        trainer.generate(prompts, temperature=-1)
    with pytest.raises(ValueError, match=r"expected a list of prompts, found the string 'a=': use \['a='\]"):
        trainer.generate("a=")


def test_what_objects_print(config, tiny):
    trainer = PPOTrainer(config, train_dataset=rows_of(tiny / "train.jsonl"), reward=letters)
    first, second = "prompts -> repeat -> gen -> sleep_rollout -> reward", "adv -> update_actor -> sync_weights"
    flow = f"{first} -> old_log_prob -> ref -> {second}"
    assert repr(trainer) == f"PPOTrainer(step 0 of 3, workers not started; flow: {flow})"
    assert repr(trainer.pipeline) == f"Pipeline({flow})"
    assert repr(trainer.build_flow()).startswith("DataFlow(prompts -> repeat -> gen -> reward")
    assert repr(trainer.config.actor_rollout_ref.actor.optim) == "OptimConfig(lr=0.001)"
    report = trainer.step()
    assert re.match(r"step 1 of 3, 8 samples\n(  .*\n)*  critic/score/mean: 0\.", repr(report))
    assert "step 1 of 3, workers started" in repr(trainer)


# ---- settings of custom code ----------------------------------------------------------------------------------------


def register_scaled() -> None:
    @register_adv_est("scaled", min_group_size=2)
    def scaled(token_level_rewards, response_mask, uid, *, my_temp=1.0, kind: "str | None" = None):
        grouped = GroupedRewards("scaled", token_level_rewards, response_mask, uid)
        return grouped.spread(my_temp * (grouped.reward - grouped.groups.mean(grouped.reward)))


@pytest.mark.slow
def test_settings_of_an_estimator(config, tiny, tmp_path):
    register_scaled()
    given = {"train_dataset": rows_of(tiny / "train.jsonl"), "reward": letters}
    base = ["algorithm.adv_estimator=scaled"]
    plain, key = PPOTrainer(config, overrides=base, **given), "algorithm.adv_kwargs.my_temp"
    plain.step()
    for spelled in ("+algorithm.my_temp=3", f"{key}=3"):
        trainer = PPOTrainer(config, overrides=[*base, spelled, "trainer.resume_mode=disable"], **given)
        assert trainer.config.algorithm.adv_kwargs == {"my_temp": 3}
        trainer.step()
        advantages = (each.batch.batch["advantages"] for each in (trainer, plain))
        torch.testing.assert_close(next(advantages), 3 * next(advantages))
    assert "my_temp: 3" in (trainer.save() / "config.yaml").read_text()
    for wrong, message in (
        ("+algorithm.my_temp=warm", f"{key}: expected float, found 'warm' \\(str\\)"),
        ("+algorithm.my_temp=true", f"{key}: expected float, found True \\(bool\\)"),
        ("+algorithm.kind=3", r"adv_kwargs.kind: expected str \| None, found 3 \(int\)"),
        ("+algorithm.my_tmp=3", r"adv_kwargs.my_tmp: .* did you mean 'my_temp'\? known: kind, my_temp"),
    ):
        with pytest.raises(ValueError, match=message):
            PPOTrainer(config, overrides=[*base, wrong], **given)
    with pytest.raises(ConfigError, match=r"set a parameter .* as algorithm.adv_kwargs.my_temp=... or \+algorithm.my_"):
        PPOTrainer(config, overrides=[*base, "algorithm.my_temp=3"], **given)

    @register_adv_est("needs_factor")
    def needs_factor(token_level_rewards, response_mask, *, factor):
        raise NotImplementedError

    with pytest.raises(ValueError, match=r"_factor needs the setting 'factor': set algorithm\.adv_kwargs\.factor"):
        PPOTrainer(config, overrides=["algorithm.adv_estimator=needs_factor"], **given)


def test_settings_of_a_reward_and_of_a_loss(config, tiny):
    given = {"train_dataset": rows_of(tiny / "train.jsonl"), "reward": letters}
    plain = PPOTrainer(config, **given).step()["critic/score/mean"]
    with_bonus = PPOTrainer(config, overrides={"+reward.bonus": 2}, **given).step()["critic/score/mean"]
    assert with_bonus == pytest.approx(plain + 2)
    with pytest.raises(ValueError, match=r"reward_kwargs.bonus: expected float, found 'big' \(str\)"):
        PPOTrainer(config, overrides={"+reward.bonus": "big"}, **given)

    @register_policy_loss("weighted")
    def weighted(log_prob, advantages, response_mask, loss_agg_mode, *, strength: float = 1.0):
        return agg_loss(-strength * advantages * log_prob.exp(), response_mask, loss_agg_mode), {}

    own = {"actor_rollout_ref.actor.policy_loss.loss_mode": "weighted", "actor_rollout_ref.actor.optim.clip_grad": 1e9}
    own |= {"actor_rollout_ref.actor.use_kl_loss": False, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}
    one = PPOTrainer(config, overrides=own, **given).step()["actor/grad_norm"]
    trainer = PPOTrainer(config, overrides=own | {"+actor_rollout_ref.actor.strength": 2}, **given)
    assert trainer.config.actor_rollout_ref.actor.policy_loss.loss_kwargs == {"strength": 2}
    assert trainer.step()["actor/grad_norm"] == pytest.approx(2 * one, rel=1e-4) and one > 0
    with pytest.raises(ValueError, match=r"policy_loss.loss_kwargs.strength: expected float, found \[1\] \(list\)"):
        PPOTrainer(config, overrides=own | {"+actor_rollout_ref.actor.policy_loss.strength": [1]}, **given)
    weighted.__module__ = "__main__"
    with pytest.raises(ValueError, match=r"weighted\(\) at .* is defined in the main script or a notebook"):
        PPOTrainer(config, overrides=own | {"trainer.n_gpus_per_node": 2, "trainer.device": "cpu"}, **given)


def test_settings_of_an_operator(config, tiny):
    class Shifted(PPOTrainer):
        def build_flow(self):
            def shift(batch, *, by=0.0):
                return {"token_level_rewards": batch.batch["token_level_rewards"] + by}

            rewards = ("token_level_rewards",)
            return super().build_flow().insert_before("adv", Operator("shift", shift, rewards, rewards))

    given, key = {"train_dataset": rows_of(tiny / "train.jsonl"), "reward": letters}, "algorithm.operator_kwargs"
    trainer = Shifted(config, overrides={f"{key}.shift.by": 2}, **given)
    trainer.step()
    rewards = trainer.batch.batch
    torch.testing.assert_close(rewards["token_level_rewards"], rewards["token_level_scores"] + 2)
    with pytest.raises(ValueError, match="has no such keyword-only parameter: did you mean 'by'"):
        Shifted(config, overrides={f"{key}.shift.buy": 2}, **given)


# ---- page, notebook, package ----------------------------------------------------------------------------------------


def test_the_page_runs_as_printed(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(tiny)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("python_api.md", "python"):
        exec(block, names)
    assert names["folder"] == Path("outputs/sums/global_step_5").absolute()
    assert "lr=1e-05" in capsys.readouterr().out
    linked = re.findall(r"\]\(([\w./]+)\)", (DOCS / "python_api.md").read_text())
    assert all((DOCS / link).exists() for link in linked)


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_valid():
    book = json.loads(NOTEBOOK.read_text())
    assert book["nbformat"] == 4 and len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    imported = [node for cell in code_cells() for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imported} >= {"verl", "verl.algorithms.advantages"}
    outputs = [cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"]
    assert sum(map(bool, outputs)) >= 8 and "image/png" in str(outputs)  # scripts/notebook_outputs.py


@pytest.mark.slow
def test_the_notebook_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells():
        exec(cell, names)
    assert names["accuracy"] > names["accuracy_before"] + 0.1
    assert names["losses"][-1] < names["losses"][0] / 2
    assert names["mine"].config.algorithm.adv_kwargs == {"power": 0.5} and len(names["rewards"]) == 10


def test_the_package_is_typed():
    assert (ROOT / "verl" / "py.typed").is_file()
    assert 'verl = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()


# ---- bad arguments --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_rows_do_not_resume_a_run(config, caplog):
    """Without the names of files, experiments on different rows have the same default folder."""
    rows = [{"prompt": f"{letter}=", "answer": letter} for letter in "abcdefgh"]
    once = {"trainer.total_training_steps": 1, "trainer.save_at_end": True}
    PPOTrainer(config, overrides=once, train_dataset=rows, reward=letters).fit()
    other = [*rows[:-1], {"prompt": "h=", "answer": "i"}]
    with pytest.raises(
        ValueError,
        match=r"global_step_1 belongs to another experiment:\n  data: rows in memory has other contents\n.* set",
    ):
        PPOTrainer(config, train_dataset=other, reward=letters).fit()
    again = PPOTrainer(config, overrides={"trainer.total_training_steps": 2}, train_dataset=rows, reward=letters)
    assert again.fit()["training/global_step"] == 2


def test_prompts_and_models_that_are_none(config, tiny):
    trainer = PPOTrainer(config, train_dataset=[{"prompt": "a=", "answer": "a"}] * 4, reward=letters)
    for prompts in ([], 5, None):
        with pytest.raises(ValueError, match=r"generate: expected a list of prompts \(texts or chats\), found"):
            trainer.generate(prompts)
    for n in (True, "2", 1.5):
        with pytest.raises(ValueError, match="n: expected the number of responses to each prompt, int >= 1, found"):
            trainer.generate(["a="], n=n)
    with pytest.raises(ValueError, match=r"row 0 .*character 1 is '\\ud83d', half of a surrogate pair"):
        trainer.generate(["a\ud83d"])
    without_path = {key: value for key, value in config.items() if key != "actor_rollout_ref"}
    for model, tokenizer, message in (("abc", object(), "model: .*found str"), (torch.nn.Linear(1, 1), 3, "model: ")):
        with pytest.raises(ValueError, match=message):
            PPOTrainer(without_path, model=model, tokenizer=tokenizer, train_dataset=[{}], reward=letters)


def test_shutdown_ends_each_group_once_and_the_cluster():
    ended = []

    def ends(name: str) -> Any:
        return type("Ends", (), dict.fromkeys(("shutdown", "close"), lambda self: ended.append(name)))()

    roles = {"actor": (shared := ends("actor and rollout")), "rollout": shared, "critic": ends("critic")}
    parts = {"cluster": ends("cluster"), "source": ends("source"), "runner": SimpleNamespace(stopping=nullcontext)}
    trainer = SimpleNamespace(roles=roles, _started=True, **parts)
    Trainer.shutdown(trainer)
    assert sorted(ended[:2]) == ["actor and rollout", "critic"] and ended[2:] == ["cluster", "source"]
    assert (trainer.roles, trainer._started) == ({}, False)
