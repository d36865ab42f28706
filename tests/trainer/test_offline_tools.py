"""`verl generate` and `verl eval` with the agent loop of training: the responses and scores of validation."""

import json
import shlex
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.programs import run_python
from tests.trainer.runs import fit, metrics_of
from tests.trainer.test_multi_turn_run import ROLLOUT, EveryTurn, settings
from verl.agents.multi_turn import MultiTurnLoop
from verl.agents.tools.parsers import TOOL_PARSERS, register_tool_parser
from verl.evaluation.prompts import SavedResponses
from verl.evaluation.report import Evaluation
from verl.trainer import main_eval
from verl.trainer.main_generation import GenerationRun, main
from verl.trainer.output.run_log import evaluation_commands

__all__ = ["settings"]
ROOT = Path(__file__).parents[2]
PARSER = """
from tests.trainer.test_multi_turn_run import EveryTurn
from verl.agents.tools.parsers import register_tool_parser

register_tool_parser("every_turn")(EveryTurn)
"""
TOOLS = '''
from verl.agents.tools.function_tool import function_tool
from verl.agents.tools.schemas import ToolResponse

@function_tool
def count(text: str):
    """Count characters.

    Args:
        text: any text.
    """
    return ToolResponse(text=f"{len(text)} characters"), 0.5
'''


@pytest.fixture
def keys(settings, tmp_path):
    """Greedy responses to 6 prompts, 4 per batch."""
    if "every_turn" not in TOOL_PARSERS:
        register_tool_parser("every_turn")(EveryTurn)
    (tmp_path / "tools.py").write_text(TOOLS)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()[:6]
    rows = [json.dumps({**json.loads(line), "level": i}) + "\n" for i, line in enumerate(lines)]
    (tmp_path / "test.jsonl").write_text("".join(rows))
    turns = [each.replace("actor_rollout_ref.", "") for each in settings if each.startswith(f"{ROLLOUT}.multi_turn.")]
    return [
        f"data.path={tmp_path / 'test.jsonl'}",
        "data.batch_size=4",
        f"data.output_path={tmp_path / 'out.parquet'}",
        f"model.path={tmp_path / 'model'}",
        "rollout.temperature=0",
        "rollout.prompt_length=64",
        "rollout.response_length=160",
        "rollout.stop=[a,e,o,u]",
        *turns,
    ]


@pytest.fixture
def trajectories(monkeypatch):
    """Those that the agent loop has returned since the list was cleared: prompt, tokens and mask."""
    recorded, run = [], MultiTurnLoop.run

    async def record(self, prompt, generate):
        trajectory = await run(self, prompt, generate)
        recorded.append((prompt.token_ids, trajectory.token_ids, trajectory.response_mask))
        return trajectory

    monkeypatch.setattr(MultiTurnLoop, "run", record)
    return recorded


def validate(settings, tmp_path) -> dict[str, float]:
    """The metrics of a validation on test.jsonl."""
    more = [
        f"{ROLLOUT}.stop=[a,e,o,u]",
        "data.max_response_length=160",
        f"data.val_files={tmp_path / 'test.jsonl'}",
        "trainer.val_only=true",
    ]
    fit([*settings, *more, f"trainer.default_local_dir={tmp_path / 'validation'}"])
    (metrics,) = metrics_of(tmp_path / "validation").values()
    return metrics


def test_responses_and_scores_are_those_of_validation(settings, keys, trajectories, tmp_path):
    metrics = validate(settings, tmp_path)
    expected = sorted(trajectories)
    trajectories.clear()
    rows = pq.read_table(GenerationRun(overrides=keys).run()).to_pylist()

    assert sorted(trajectories) == expected and any(0 in mask for _, _, mask in expected)
    for row, (_, tokens, mask) in zip(rows, trajectories):
        (response,), (turns,), (info,) = row["responses"], row["turns"], map(json.loads, row["trajectory_info"])
        assert "".join(turn["content"] for turn in turns) == response
        assert [turn["role"] for turn in turns[:2]] == ["assistant", "observation"]
        assert "characters" in turns[1]["content"]
        assert sum(turn["tokens"] for turn in turns) == len(tokens) == info["response_length"]
        assert sum(turn["tokens"] for turn in turns if turn["role"] == "assistant") == sum(mask)
        assert info["num_turns"] == 1 + len(turns) and set(info["tool_rewards"]) == {0.5}
    counts = json.loads((tmp_path / "out.parquet.settings.json").read_text())
    assert counts["tokens"] == sum(sum(mask) for _, _, mask in expected)
    reward = [f"reward.custom_reward_function.path={tmp_path / 'reward.py'}", "reward.num_processes=1"]
    report = Evaluation(overrides=[f"data.path={tmp_path / 'out.parquet'}", *reward]).run()
    score = report["evaluated"]["overall"]["metrics"]["score"]["value"]
    assert score == pytest.approx(metrics["val-core/x/acc/mean@1"]) and score > 1


AGENT = """
import json
from urllib.request import Request, urlopen

def run(sample, base_url, api_key, model):
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", json.dumps(chat).encode(), headers)) as reply:
        content = json.load(reply)["choices"][0]["message"]["content"]
    return sample["extra_info"]["index"] + 0.5
"""
LOOP = """
from verl.agents.loop import SingleTurn, register_agent_loop

@register_agent_loop("ranked")
class Ranked(SingleTurn):
    @staticmethod
    def score_group(samples):
        assert len({sample.prompt[0]["content"] for sample in samples}) == 1
        return [float(rank) for rank in range(len(samples))]
"""


@pytest.mark.fast("server*")
@pytest.mark.parametrize(("kind", "n", "expected"), [("server", 1, [0.5, 1.5, 2.5, 3.5]), ("ranked", 3, [0, 1, 2] * 4)])
def test_scores_of_agents_and_of_groups_are_in_the_file(kind, n, expected, keys, tmp_path):
    pytest.importorskip("uvicorn")
    (tmp_path / "agent.py").write_text(AGENT if kind == "server" else LOOP)
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    rows = [{**row, "extra_info": {"index": i}} for i, row in enumerate(rows[:4])]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [key for key in keys if "multi_turn" not in key and "stop=" not in key]
    given += ["data.batch_size=3", f"data.n_samples={n}", "rollout.temperature=1", "rollout.response_length=8"]
    if kind == "server":
        given += ["rollout.mode=server", f"rollout.server.agent.path={tmp_path / 'agent.py'}"]
    else:
        given += ["rollout.agent.default_agent_loop=ranked", f"imports=[{tmp_path / 'agent.py'}]"]
    rows = pq.read_table(GenerationRun(overrides=given).run()).to_pylist()
    scores = [json.loads(info)["agent_score"] for row in rows for info in row["trajectory_info"]]
    assert scores == expected
    scored = ["reward.reward_function=agent_score", "reward.num_processes=1"]
    report = Evaluation(overrides=[f"data.path={tmp_path / 'out.parquet'}", *scored]).run()
    score = report["evaluated"]["overall"]["metrics"]["score"]["value"]
    assert score == pytest.approx(sum(expected) / len(expected))
    if kind == "server":  # responses of two agents are not mixed
        (tmp_path / "agent.py").write_text(AGENT + "\n# changed\n")
        with pytest.raises(ValueError, match=r"other settings.*rollout\.server\.agent\.path"):
            GenerationRun(overrides=given).run()
        (tmp_path / "agent.py").write_text("def run(sample, base_url, api_key, model):\n    raise RuntimeError('no')\n")
        given += [f"data.output_path={tmp_path / 'none.parquet'}"]
        with pytest.raises(ValueError, match="the agents of all samples failed"):
            GenerationRun(overrides=given).run()
        assert not list(tmp_path.glob("none.parquet"))


KILLED = """
import os, signal, sys
from verl.trainer.main_generation import main

flush = os.fsync

def flush_and_die(file):
    flush(file)
    os.kill(os.getpid(), signal.SIGKILL)

os.fsync = flush_and_die
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_to_the_same_file(kills, keys, tmp_path, caplog, monkeypatch):
    given = [*keys, "rollout.temperature=1", "data.n_samples=2", "data.batch_size=3"]
    expected = GenerationRun(overrides=[*given, f"data.output_path={tmp_path / 'whole.parquet'}"]).run().read_bytes()
    (tmp_path / "parser.py").write_text(PARSER)
    given.append(f"imports=[{tmp_path / 'parser.py'}]")
    if kills:
        killed = run_python("-c", KILLED, *given, cwd=ROOT)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    else:
        save = SavedResponses.append

        def stop(self, *arguments):
            save(self, *arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(SavedResponses, "append", stop)
            GenerationRun(overrides=given).run()
    with caplog.at_level("INFO", "verl"):
        assert main(given) == 0
    assert "resuming: 3 of 6 prompts are finished" in caplog.text
    assert (tmp_path / "out.parquet").read_bytes() == expected
    (tmp_path / "tools.py").write_text(TOOLS.replace("0.5", "0.7"))
    with pytest.raises(ValueError, match=r"generated with other settings .*function_tool_path \(contents\): changed"):
        GenerationRun(overrides=given)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.agent.default_agent_loop=server_agent", "rollout.mode is async: mode=server and the agent loop"),
        ("rollout.agent.default_agent_loop=tool_agnt", "rollout.agent.default_agent_loop"),
        ("rollout.multi_turn.function_tool_path=null", "rollout.multi_turn.enable: true, but there are no tools"),
        ("rollout.multi_turn.format=hermess", "rollout.multi_turn.format"),
        ("rollout.multi_turn.function_tool_path=nowhere.py", "rollout.multi_turn.function_tool_path"),
        ("rollout.mode=server", "rollout.multi_turn.enable: true, but rollout.mode is server"),
    ],
)
def test_what_cannot_work_ends_in_one_message(override, message, keys, capsys):
    assert main([*keys, override]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "Traceback" not in error


def test_a_row_selects_its_loop(keys, trajectories, tmp_path):
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    names = ["tool_agent", "single_turn_agent", None]
    lines = [json.dumps({**row, "agent_name": names[i % 3]}) + "\n" for i, row in enumerate(rows)]
    (tmp_path / "test.jsonl").write_text("".join(lines))
    rows = pq.read_table(GenerationRun(overrides=[*keys, "rollout.multi_turn.enable=false"]).run()).to_pylist()
    assert [len(row["turns"][0]) > 1 for row in rows] == [True, False, False] * 2 and len(trajectories) == 2


def test_the_next_commands_of_a_run_work(settings, keys, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more = [f"data.val_files={tmp_path / 'test.jsonl'}", f"{ROLLOUT}.stop=[a,e,o,u]", "trainer.save_at_end=true"]
    more += ["data.max_response_length=160", "trainer.test_freq=1", f"{ROLLOUT}.n=2"]
    trainer, _ = fit([*settings, *more])
    generation, scoring = evaluation_commands(trainer.config, trainer.checkpoints.latest())
    assert generation.startswith("verl generate ") and scoring.startswith("verl eval ")
    assert main(shlex.split(generation)[2:]) == 0 and main_eval.main(shlex.split(scoring)[2:]) == 0
    (report,) = Path("run").glob("*.eval.json")
    score = json.loads(report.read_text())["evaluated"]["overall"]["metrics"]["score"]["value"]
    assert score == pytest.approx(metrics_of(tmp_path / "run")[1]["val-core/x/acc/mean@1"])
