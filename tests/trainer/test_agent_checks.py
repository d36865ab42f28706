"""Tools, interactions, agents and their files are checked before a model is loaded; a step in which all fail stops."""

import json
import re
from types import SimpleNamespace

import pytest

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.conftest import run_settings
from verl.config import load_config
from verl.config.schema import Config, GenerationConfig
from verl.protocol import DataProto
from verl.rewards.resolve import _parsed_terms
from verl.trainer import main_ppo
from verl.trainer.checks.agents import check_tools_in_prompts, describe_agents
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo.operators import check_failures

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
FILES = {
    "tools.py": '''
from verl.agents.tools.function_tool import function_tool
from verl.agents.tools.base_tool import BaseInteraction

@function_tool
def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: one.
        b: two.
    """
    return str(a + b)

class Guess(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        kwargs["number"]
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "", 1.0, {}
''',
    "talk.yaml": "interaction: [{name: guess, class_name: 'tools.py:Guess', config: {}}]",
    "loops.yaml": "[{name: mine, _target_: 'loop.py:Mine'}]",
    "loop.py": "class Mine:\n    async def run(self, prompt, generate): ...\n",
    "agent.py": "def run(sample, base_url, api_key, model):\n    return 'no score'\n",
    "reward.py": "def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.0\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    tiny_model("qwen2", folder / "model")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"go {i}", "answer": "1"}) + "\n" for i in range(4))
    )
    return folder


@pytest.fixture
def settings(folder, tmp_path):
    sizes = ["data.max_prompt_length=64", "data.max_response_length=16", "data.val_files=[]"]
    return [*run_settings(folder, tmp_path / "run"), "algorithm.name=grpo", "trainer.total_training_steps=1", *sizes]


TOOLS = [f"{TURNS}.enable=true", f"{TURNS}.function_tool_path=FOLDER/tools.py"]
SERVER = [f"{ROLLOUT}.mode=server", f"{ROLLOUT}.server.agent.path=FOLDER/agent.py"]
AGENT_LOOP, NO_TOOLS = f"{ROLLOUT}.agent", "there are no tools"
REFUSED = [
    ([*TOOLS, f"{TURNS}.format=herms"], f"{TURNS}.format .*there is no tool parser 'herms': did you mean 'hermes'"),
    ([f"{TURNS}.enable=true"], f"{TURNS}.enable: true, but {NO_TOOLS} and no interactions: set {TURNS}.tool"),
    ([f"{AGENT_LOOP}.default_agent_loop=tool_agent"], f"{AGENT_LOOP}.default_agent_loop: tool_agent, but {NO_TOOLS}"),
    ([f"{AGENT_LOOP}.agent_loop_config_path=nowhere.yaml"],
     rf"{AGENT_LOOP}.agent_loop_config_path .*: there is no file 'nowhere.yaml' \(looked at /"),
    *(
        ([f"{TURNS}.enable=true", f"{TURNS}.{key}={file}"], f"{TURNS}.{key} .*no file '{file}'")
        for key, file in (("tool_config_path", "no.yaml"), ("interaction_config_path", "a/b.yaml"))
    ),
    ([f"{ROLLOUT}.mode=server", f"{ROLLOUT}.server.agent.path=no.py"], "server.agent.path .*no file 'no.py'"),
    ([*SERVER, *TOOLS],
     f"{TURNS}.enable: true, but {ROLLOUT}.mode is server, where an agent outside of the trainer runs the tools"),
    (["placement.rollout_devices=[1]"], r"rollout_devices: expected only device 0.* use trainer.n_gpus_per_node=2"),
    (["imports=[nowhere.py]"], "imports .*there is no file 'nowhere.py'"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_a_dry_run_finds_what_a_worker_would(overrides, message, settings, folder, forbid_workers, capsys):
    overrides = [text.replace("FOLDER", str(folder)) for text in overrides]
    assert main_ppo.main([*settings, *overrides, "--dry-run"]) == 1
    shown = capsys.readouterr().err
    assert re.search(message, shown), shown
    assert "Traceback" not in shown


def test_a_loop_of_a_file_is_a_known_loop(settings, folder, forbid_workers, capsys):
    overrides = [f"{ROLLOUT}.agent.agent_loop_config_path={folder / 'loops.yaml'}"]
    overrides += [f"{ROLLOUT}.agent.default_agent_loop=mine"]
    assert main_ppo.main([*settings, *overrides, "--dry-run"]) == 0
    assert "\n  agent loop:  mine\n" in capsys.readouterr().out


def test_a_template_without_tools_is_named(settings, folder, forbid_workers, caplog):
    overrides = [text.replace("FOLDER", str(folder)) for text in TOOLS]
    assert main_ppo.main([*settings, *overrides, "--dry-run"]) == 0
    warning = f"THE PROMPTS DO NOT DESCRIBE THE TOOLS (add): the chat template of {folder / 'model'} renders the same"
    assert warning in caplog.text
    caplog.clear()
    template = "{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = f'actor_rollout_ref.model.custom_chat_template="{template}"'
    assert main_ppo.main([*settings, *overrides, "data.max_prompt_length=512", template, "--dry-run"]) == 0
    assert "DO NOT DESCRIBE" not in caplog.text


def test_the_plan_names_tools_interactions_agents_and_staleness(settings, folder, forbid_workers, capsys):
    def plan(*overrides: str) -> str:
        given = [text.replace("FOLDER", str(folder)) for text in overrides]
        assert main_ppo.main([*settings, *given, "--dry-run"]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "tools: add interaction: guess " in plan(*TOOLS, f"{TURNS}.interaction_config_path=FOLDER/talk.yaml")
    assert f" agent: run() of {folder / 'agent.py'}, calls the policy over HTTP " in plan(*SERVER)
    devices = ["trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.rollout_devices=[1]"]
    shown = plan("trainer.async.max_staleness=1", *devices)
    assert "samples are at most 1 update old" in shown
    assert "at most 2 updates old" in plan("trainer.async.max_staleness=2", *devices)
    assert describe_agents(load_config(overrides=[f"{ROLLOUT}.agent.default_agent_loop=two_turns"])) == {
        "agent loop": "two_turns"
    }
    assert describe_agents(load_config()) == {}


def test_failures_are_counted_and_the_first_is_named(caplog):
    def batch(*errors: str | None) -> DataProto:
        facts = [{"num_turns": 2} | ({"agent_failure": error} if error else {}) for error in errors]
        return DataProto.from_dict(non_tensors={"trajectory_info": facts})

    check_failures(batch(None, "first", "second"), raise_if_all=True)
    counted = "the agent or interaction of 2 of 3 samples failed; the first one, of sample 1: first"
    assert [record.getMessage() for record in caplog.records] == [counted]
    check_failures(batch("a", "b"), raise_if_all=False)
    with pytest.raises(
        ValueError, match=r"of 2 of 2 samples failed; the first one, of sample 0: a\. A step in which all"
    ):
        check_failures(batch("a", "b"), raise_if_all=True)
    caplog.clear()
    check_failures(batch(None, None), raise_if_all=True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (SERVER, "of 8 of 8 samples failed; .*the agent returned 'no score': expected a finite number"),
        ([ f"{TURNS}.enable=true", f"{TURNS}.tool_isolation=none", f"{TURNS}.interaction_config_path=FOLDER/talk.yaml",
         ] + [f"{ROLLOUT}.stop=[{','.join('abcdefghijklmnopqrstuvwxyz')}]", "data.max_response_length=160"],
         "of sample .: interaction guess: KeyError: 'number' .the sample has no extra_info.interaction_kwargs"),
    ],
)  # fmt: skip
def test_a_step_in_which_all_agents_fail_stops_the_run(overrides, message, settings, folder):
    trainer = LocalPPOTrainer(overrides=[*settings, *(text.replace("FOLDER", str(folder)) for text in overrides)])
    with pytest.raises(ValueError, match=message):
        trainer.fit()
    assert trainer.global_step <= 1


@pytest.mark.parametrize(("config", "prefix"), [(Config(), "actor_rollout_ref."), (GenerationConfig(), "")])
def test_a_server_run_without_a_chat_template_is_refused_before_the_engine_starts(config, prefix):
    config = config.with_overrides({f"{prefix}rollout.mode": "server"})
    with pytest.raises(ValueError, match=f"^{prefix}rollout.mode=server needs.* or set {prefix}model.custom_chat_temp"):
        check_tools_in_prompts(config, SimpleNamespace(chat_template=None))


@pytest.mark.parametrize("weight", ["heavy", None, float("nan"), [1]])
def test_the_weight_of_a_reward_is_a_finite_number(weight):
    with pytest.raises(ValueError, match="weight of 'format': expected a finite number, found "):
        _parsed_terms([{"name": "format", "weight": weight}])
