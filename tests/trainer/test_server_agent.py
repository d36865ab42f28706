"""rollout.mode=server: an agent that knows only the OpenAI client is trained on the tokens that it sampled."""

import json
import sys
import time

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart.tiny_model import tiny_model
from tests.rollout.asynchronous_runs import turns_agent
from tests.trainer.runs import fit
from verl.config import load_config, settings_without_effect
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.workers.rollout.role import Rollout

AGENT = '''
import openai

CLIENT = openai.OpenAI(api_key="set later", max_retries=0)
CALLS = []  # of every sample, in order: (base_url, response)


def run(sample, base_url, api_key, model):
    """Three turns; the tokens that the server reports are kept for the test."""
    if sample["extra_info"]["index"] == 1:
        raise RuntimeError("this agent fails at once")
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "start"}]
    for turn in range(3):
        found = client.chat.completions.create(
            model=model, messages=messages, max_tokens=8, temperature=0.2, logprobs=True,
            extra_body={"return_token_ids": True},
        )
        CALLS.append((base_url, found))
        messages.append(found.choices[0].message)
        messages.append({"role": "user", "content": f"turn {turn} of {len(messages)}"})
        if sample["extra_info"]["index"] == 2 and turn == 1:
            raise RuntimeError("this agent fails after two turns")
    return {"score": len(found.choices[0].message.content) / 10, "turns": 3}
'''

ASYNC_AGENT = """
import openai


async def run(sample, base_url, api_key, model):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    found = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    await client.close()
    return float("e" in found.choices[0].message.content)
"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    tiny_model("qwen2", folder / "model")
    rows = [{"prompt": f"question {i}", "answer": str(i), "index": i} for i in range(8)]
    lines = [json.dumps(row | {"extra_info": {"index": row.pop("index")}}) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def settings(folder, run, agent: str, *others: str) -> list[str]:
    (run / "agent.py").write_text(agent)
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder / 'train.jsonl'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=96",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"{rollout}.n=2",
        f"{rollout}.mode=server",
        f"{rollout}.server.agent.path={run / 'agent.py'}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "algorithm.name=grpo",
        f"trainer.default_local_dir={run / 'run'}",
        "trainer.logger=[jsonl]",
        "trainer.val_before_train=false",
        "trainer.save_at_end=false",
        "trainer.total_training_steps=2",
        *others,
    ]


def trajectories_of(monkeypatch) -> list:
    """Every trajectory of the run, in order."""
    found, original = [], Rollout._trajectories

    def record(self, batch):
        found.extend(original(self, batch))
        return found[-len(batch) :]

    monkeypatch.setattr(Rollout, "_trajectories", record)
    return found


def test_an_agent_of_three_turns_is_trained_on_what_it_sampled(chat_model, tmp_path, monkeypatch):
    found = trajectories_of(monkeypatch)
    reports = fit(settings(chat_model, tmp_path, AGENT))[1]
    assert len(reports) == 2 and len(found) == 16
    calls = calls_by_url()
    by_tokens = {tuple(urls[0].choices[0].token_ids): urls for urls in calls.values()}
    complete = failed = empty = 0
    for trajectory in found:
        sampled = [segment for segment in trajectory.segments if segment.author == "policy"]
        if not sampled:
            empty += 1
            assert trajectory.token_ids == [trajectory.prompt.params.stop_token_ids[0]]
            assert trajectory.response_mask == [0] and trajectory.finish_reason == "abort"
            assert trajectory.info["agent_score"] == 0 and "fails at once" in trajectory.info["agent_error"]
            continue
        responses = by_tokens[tuple(sampled[0].token_ids)]
        assert [segment.token_ids for segment in sampled] == [r.choices[0].token_ids for r in responses]
        for segment, response in zip(sampled, responses):
            log_probs = [entry.logprob for entry in response.choices[0].logprobs.content]
            assert segment.log_probs == log_probs
        # the last call saw exactly the tokens that are trained on
        before = trajectory.prompt_ids + trajectory.token_ids[: -len(sampled[-1].token_ids)]
        assert responses[-1].choices[0].prompt_token_ids == before
        complete, failed = complete + (len(responses) == 3), failed + (len(responses) == 2)
    assert (complete, failed, empty) == (12, 2, 2)
    for report in reports:
        batch = report.batch
        rows = batch.batch["responses"]
        mask = batch.batch["response_mask"].bool()
        for row in range(len(batch)):
            trajectory = next(t for t in found if t.token_ids == rows[row, : len(t)].tolist())
            assert rows[row][mask[row]].tolist() == [i for s in trajectory.segments if s.log_probs for i in s.token_ids]
        scores = batch.batch["token_level_scores"].sum(1).tolist()
        assert scores == pytest.approx([facts["agent_score"] for facts in batch.non_tensor_batch["trajectory_info"]])
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(m.get("rollout/agent_errors", 0) for m in metrics) == pytest.approx(4 / 8)


def calls_by_url() -> dict[str, list]:
    """Responses that AGENT got, by the base URL of its sample."""
    modules = [module for name, module in sys.modules.items() if name.startswith("verl_user_")]
    (agent,) = [module for module in modules if "CALLS" in vars(module)]
    calls: dict[str, list] = {}
    for url, response in agent.CALLS:
        calls.setdefault(url, []).append(response)
    return calls


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 2 * extra_info["agent_score"] + extra_info["num_turns"]
"""


@pytest.mark.slow
def test_a_reward_function_sees_the_score_and_validation_is_greedy(chat_model, tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text(REWARD)
    found = trajectories_of(monkeypatch)
    others = [f"reward.custom_reward_function.path={tmp_path / 'reward.py'}", "reward.isolation=none"]
    others += [f"data.val_files={chat_model / 'train.jsonl'}", "trainer.val_before_train=true"]
    others += ["trainer.total_training_steps=1"]
    (report,) = fit(settings(chat_model, tmp_path, ASYNC_AGENT, *others))[1]
    scores = report.batch.batch["token_level_scores"].sum(1).tolist()
    assert scores == [2 * facts["agent_score"] + 2 for facts in report.batch.non_tensor_batch["trajectory_info"]]
    validated, trained = found[:8], found[8:16]
    assert len({tuple(t.token_ids) for t in validated}) == 1 < len({tuple(t.token_ids) for t in trained})
    assert {t.prompt.params.temperature for t in validated} == {0.0}


def test_settings_that_do_not_fit_are_named_before_the_run(chat_model, tmp_path):
    def problem(*others: str) -> str:
        with pytest.raises(ValueError) as error:
            LocalPPOTrainer(overrides=settings(chat_model, tmp_path, ASYNC_AGENT, *others))
        return str(error.value)

    rollout = "actor_rollout_ref.rollout"
    assert "go together" in problem(f"{rollout}.agent.default_agent_loop=tool_agent")
    assert "go together" in problem(f"{rollout}.mode=async", f"{rollout}.agent.default_agent_loop=server_agent")
    assert "expected rollout.server.agent.path" in problem(f"{rollout}.server.agent.path=null")
    assert "4096 positions" in problem("data.max_prompt_length=4090")
    (tmp_path / "other.py").write_text("def run(sample): ...")
    assert "expected a function of" in problem(f"{rollout}.server.agent.path={tmp_path / 'other.py'}")


def test_sync_and_settings_without_effect_are_named(caplog):
    rollout = "actor_rollout_ref.rollout"
    config = load_config(None, [f"{rollout}.mode=sync", f"{rollout}.server.agent.path=agent.py"])
    assert f"{rollout}.mode: sync is the same as async" in caplog.text
    assert settings_without_effect(config) == [
        f"{rollout}.server.agent.path: agent.py has no effect with {rollout}.mode=sync"
    ]


LETTERS = '''
import openai

CLIENT = openai.OpenAI(api_key="set later", max_retries=0)


def run(sample, base_url, api_key, model):
    """Two turns; the score is the share of the letter e in both replies."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages, text = [{"role": "user", "content": "write"}], ""
    for _ in range(2):
        found = client.chat.completions.create(model=model, messages=messages, max_tokens=6)
        text += found.choices[0].message.content
        messages += [found.choices[0].message, {"role": "user", "content": "more"}]
    return text.count("e") / max(len(text), 1)
'''


@pytest.mark.slow
def test_an_agent_learns(chat_model, tmp_path):
    others = ["data.train_batch_size=8", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=3e-3"]
    others += ["trainer.total_training_steps=20", "trainer.total_epochs=20"]
    reports = fit(settings(chat_model, tmp_path, LETTERS, *others))[1]
    scores = [report.metrics["critic/score/mean"] for report in reports]
    assert sum(scores[:3]) / 3 < 0.2 and sum(scores[-3:]) / 3 > 0.4, scores


PLACEMENTS = {
    "one rank": ["trainer.n_gpus_per_node=2", "placement.rollout_devices=[1]"],
    "tensor parallel": [
        *("trainer.n_gpus_per_node=3", "placement.rollout_devices=[1,2]"),
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_agents_wait_for_weight_syncs_of_asynchronous_training(placement, chat_model, tmp_path):
    """Two pushes take longer than the limit of an agent, which does not count them."""
    model = AutoModelForCausalLM.from_pretrained(chat_model / "model")
    model.resize_token_embeddings(544)  # two ranks have 272 tokens each
    model.save_pretrained(tmp_path / "even")
    AutoTokenizer.from_pretrained(chat_model / "model").save_pretrained(tmp_path / "even")
    rollout = "actor_rollout_ref.rollout"
    limit = 6.0
    others = [f"actor_rollout_ref.model.path={tmp_path / 'even'}", *PLACEMENTS[placement]]
    others += ["placement.actor_devices=[0]", "trainer.async.max_staleness=1", "trainer.total_training_steps=6"]
    others += ["trainer.total_epochs=8", "data.max_response_length=240", f"{rollout}.server.timeout={limit}"]
    others += [f"{rollout}.ignore_eos=true", f"{rollout}.check_every=1"]
    trainer, reports = LocalPPOTrainer(overrides=settings(chat_model, tmp_path, turns_agent(40), *others)), []
    trainer.on_step.append(reports.append)
    push = trainer.rollout_weights.push

    def slow_push(version: int) -> dict[str, float]:
        if version in (2, 3):
            time.sleep(limit + 1)
        return push(version)

    trainer.rollout_weights.push = slow_push
    trainer.fit()
    assert len(reports) == 6
    for report in reports:
        assert report.metrics["weight_sync/canary_mismatch"] < 1e-5
        assert report.metrics["rollout/agent_timeouts"] == report.metrics["rollout/agent_errors"] == 0
        mask = report.batch.batch["response_mask"]
        turns = (mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0]
        assert turns.tolist() == [3] * len(report.batch) and mask.sum(1).tolist() == [120] * len(report.batch)
    spans = [each for report in reports for each in report.batch.non_tensor_batch["weight_versions"]]
    assert {version for each in spans for _, version in each[1:]} & {2, 3}, "the pushes interrupted no agent"
