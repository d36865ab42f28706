"""Programs written for public verl: they build the trainer from roles, pools and worker classes, and run unchanged."""

import json

import pytest
from omegaconf import OmegaConf

ray = pytest.importorskip("ray")

from verl.experimental.dataset.sampler import AbstractCurriculumSampler  # noqa: E402
from verl.experimental.reward_loop import migrate_legacy_reward_impl  # noqa: E402
from verl.single_controller.base import Worker  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray.base import create_colocated_worker_cls  # noqa: E402
from verl.trainer.ppo.ray_trainer import (  # noqa: E402
    RayPPOTrainer,
    ResourcePoolManager,
    Role,
    compute_data_metrics,
)
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path  # noqa: E402
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker  # noqa: E402

from tests.trainer.test_ray_waiting import ON_RAY  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.data.order import CustomOrder  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from verl.trainer.local_trainer import LocalPPOTrainer  # noqa: E402
from verl.trainer.main_ppo import TaskRunner, run_ppo  # noqa: E402
from verl.trainer.ppo.public import placement_of, with_workers  # noqa: E402

TWO_STEPS = ["trainer.total_training_steps=2", "algorithm.name=grpo"]


class LoggingWorker(ActorRolloutRefWorker):
    """A worker of a recipe: its own constructor, `init_model`, and one method replaced."""

    def __init__(self, config, role: str):
        super().__init__(config, role)
        self.calls = [role]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        super().init_model()
        self.calls.append(type(self.engine).__name__)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        self.calls.append("compute_log_prob")
        return super().compute_log_prob(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read_calls(self):
        return self.calls


@pytest.fixture
def local_ray():
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_main_of_a_recipe_trains_with_its_worker(local_ray, settings, tmp_path):
    mapping = {Role.ActorRollout: ray.remote(LoggingWorker)}
    pools = ResourcePoolManager({"global_pool": [1]}, {Role.ActorRollout: "global_pool"})
    config = OmegaConf.from_dotlist([*settings, *ON_RAY, *TWO_STEPS, "trainer.n_gpus_per_node=4"])
    trainer = RayPPOTrainer(
        config=config,
        tokenizer=None,
        role_worker_mapping=mapping,
        resource_pool_manager=pools,
        ray_worker_group_cls=RayWorkerGroup,
    )
    trainer.init_workers()
    assert trainer.config.trainer.n_gpus_per_node == 1  # of the pool
    calls = trainer.roles["actor"].read_calls()[0]
    assert calls[0] == "actor_rollout" and calls[1] == "TorchEngine"
    last = trainer.fit()
    alone = LocalPPOTrainer(overrides=[*settings, *TWO_STEPS, f"trainer.default_local_dir={tmp_path / 'alone'}"]).fit()
    for name in ("critic/score/mean", "actor/entropy", "actor/grad_norm"):
        assert last[name] == pytest.approx(alone[name], rel=1e-4), name


class RecipeRunner(TaskRunner):
    """The program of a recipe, which replaces the worker of the actor."""

    def add_actor_rollout_worker(self, config):
        self.role_worker_mapping[Role.ActorRolloutRef] = ray.remote(LoggingWorker)
        self.mapping[Role.ActorRolloutRef] = "global_pool"
        return LoggingWorker, RayWorkerGroup


@pytest.mark.slow
def test_the_program_of_a_recipe_runs(local_ray, settings, tmp_path):
    more = ["trainer.save_freq=1", "trainer.n_gpus_per_node=1"]
    config = migrate_legacy_reward_impl(OmegaConf.from_dotlist([*settings, *ON_RAY, *TWO_STEPS, *more]))
    run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(RecipeRunner))
    assert find_latest_ckpt_path(str(tmp_path / "run")) == str(tmp_path / "run" / "global_step_2")


# ---- worker groups --------------------------------------------------------------------------------------------------


class Adder(Worker):
    def __init__(self, start, step=1):
        self.total, self.step = start + self.rank, step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, times):
        self.total += times * self.step
        return self.total

    def peek(self, more=0):
        return self.total + more


@pytest.mark.slow  # the calls of a group on Ray are those of tests/single_controller/test_ray_group.py
def test_a_group_of_public_verl_and_two_in_the_same_processes(local_ray):
    pool = RayResourcePool([2], use_gpu=False)
    assert (pool.store, pool.world_size) == ([2], 2)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Adder), 10, step=2), device_name="cpu")
    assert group.add(3) == [16, 17] and group.execute_all_sync("peek", 1) == [17, 18]
    assert group.execute_rank_zero_sync("peek", more=5) == 21
    group.shutdown()
    classes = {"one": RayClassWithInitArgs(Adder, 0), "ten": RayClassWithInitArgs(cls=Adder, start=0, step=10)}
    both = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(class_dict=classes))
    groups = both.spawn(prefix_set=classes.keys())
    assert (groups["one"].add(2), groups["ten"].add(2)) == ([2, 3], [20, 21])
    assert groups["one"].processes == groups["ten"].processes
    both.shutdown()
    with pytest.raises(TypeError, match="worker_names are not supported"):
        RayWorkerGroup(pool, classes["one"], worker_names=["a"])


def test_pools_become_the_placement():
    roles = {Role.ActorRollout: "train", Role.Critic: "value", Role.RefPolicy: "train"}
    two = ResourcePoolManager({"train": [2, 2], "value": [1, 1]}, roles)
    assert two.get_n_gpus() == 6
    assert placement_of(two) == {
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 3,
        "placement.actor_devices": [0, 1, 3, 4],
        "placement.ref_devices": [0, 1, 3, 4],
        "placement.critic_devices": [2, 5],
    }
    with pytest.raises(ValueError, match=r"pools over the same nodes.*placement.actor_devices"):
        placement_of(ResourcePoolManager({"train": [2, 2], "value": [1]}, roles))


def test_only_workers_that_a_run_can_use_are_accepted(settings):
    specs = LocalPPOTrainer(overrides=[*settings, *TWO_STEPS]).specs
    assert with_workers(specs, {Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: CriticWorker}) == specs
    spec = with_workers(specs, {Role.ActorRollout: LoggingWorker})["actor"]
    assert spec.kwargs.keys() == {"config", "role"} and spec.attributes["settings"]["device"] == "auto"
    with pytest.raises(ValueError, match=r"expected a subclass of verl.workers.public.ActorRolloutRefWorker.*Adder"):
        with_workers(specs, {Role.ActorRollout: Adder})
    with pytest.raises(ValueError, match="no such worker"):
        with_workers(specs, {Role.Critic: type("MyCritic", (CriticWorker,), {})})
    with pytest.raises(TypeError, match="role_worker_mapping"):
        LoggingWorker(None, "actor_rollout")


# ---- samplers -------------------------------------------------------------------------------------------------------


class Backwards(AbstractCurriculumSampler):
    """The last rows first; every update moves the first row to the end."""

    def __init__(self, data_source, data_config):
        self.rows, self.updates = list(range(len(data_source)))[::-1], []

    def __iter__(self):
        position = 0
        while position < len(self.rows):
            yield self.rows[position]
            position += 1

    def __len__(self):
        return len(self.rows)

    def update(self, batch: DataProto) -> None:
        self.updates.append([uid.split(":")[1] for uid in batch.non_tensor_batch["uid"]][::2])


SAMPLER = ["data.sampler.class_path=tests.trainer.test_public_programs", "data.sampler.class_name=Backwards"]


def test_a_curriculum_sampler_orders_the_prompts_and_hears_of_steps(settings):
    trainer = LocalPPOTrainer(overrides=[*settings, *TWO_STEPS, *SAMPLER])
    trainer.fit()
    sampler = trainer.source.sampler.sampler
    assert sampler.updates == [["23", "22", "21", "20"], ["19", "18", "17", "16"]]  # 24 rows, 4 prompts a step


class Rotating(Backwards):
    """Every update moves the last row of the next epoch to its start."""

    def __iter__(self):
        return iter(list(self.rows))

    def update(self, batch: DataProto) -> None:
        self.rows = self.rows[-1:] + self.rows[:-1]

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = list(state["rows"])


def test_a_curriculum_with_state_goes_on_as_if_it_had_not_stopped():
    def rows(order, count):
        drawn = []
        for _ in range(count):
            drawn.append([row for _, row in order.next_items()])
            order.update(None)
        return drawn

    straight = rows(CustomOrder(Rotating(range(6), None), 6, 2), 7)
    assert straight[:4] == [[5, 4], [3, 2], [1, 0], [2, 1]]  # three updates: 2, 1, 0, 5, 4, 3
    for stop in range(7):
        first, second = (CustomOrder(Rotating(range(6), None), 6, 2) for _ in range(2))
        drawn = rows(first, stop)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert drawn + rows(second, 7 - stop) == straight


@pytest.mark.slow
def test_a_curriculum_without_state_is_not_resumed_in_another_order(settings):
    more = ["trainer.save_freq=1", "trainer.total_training_steps=1", "algorithm.name=grpo", *SAMPLER]
    LocalPPOTrainer(overrides=[*settings, *more]).fit()
    with pytest.raises(ValueError, match=r"Backwards cannot be resumed after step 1.*state_dict"):
        LocalPPOTrainer(overrides=[*settings, *SAMPLER, *TWO_STEPS]).fit()


@pytest.mark.slow
def test_a_sampler_object_is_resumed_by_reading_again(settings):
    from torch.utils.data import SequentialSampler

    def train(steps: int):
        more = ["algorithm.name=grpo", "trainer.save_freq=1", f"trainer.total_training_steps={steps}"]
        trainer = LocalPPOTrainer(overrides=[*settings, *more], train_sampler=SequentialSampler(range(24)))
        trainer.fit()
        return [uid for uid in trainer.batch.non_tensor_batch["uid"]][::2]

    train(1)
    assert train(2) == ["0:4", "0:5", "0:6", "0:7"]


# ---- agent loops and tools ------------------------------------------------------------------------------------------

CODE = """
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.utils.tool_registry import initialize_tools_from_config
from verl.utils.rollout_trace import rollout_trace_op


class Counter(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.instances = {}

    async def create(self, instance_id=None, start: int = 0, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self.instances[instance_id] = start
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        self.instances[instance_id] += int(parameters["step"]) * self.config["factor"]
        return ToolResponse(text=f"counter is {self.instances[instance_id]}"), 0.5, {"calls": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(self.instances[instance_id])

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.instances[instance_id]


class CountingLoop(AgentLoopBase):
    def __init__(self, *args, tools_file, **kwargs):
        super().__init__(*args, **kwargs)
        self.tools = {tool.name: tool for tool in initialize_tools_from_config(tools_file)}

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        first = await self.server_manager.generate(
            request_id="a", prompt_ids=prompt_ids, sampling_params={**sampling_params, "max_tokens": 8}
        )
        tool = self.tools["count"]
        instance_id, _ = await tool.create(start=1)
        response, reward, metrics = await tool.execute(instance_id, {"step": 2})
        more = self.tokenizer(response.text)["input_ids"]
        ids = first.token_ids + more
        second = await self.server_manager.generate(
            request_id="a", prompt_ids=prompt_ids + ids, sampling_params={**sampling_params, "max_tokens": 4}
        )
        mask = [1] * len(first.token_ids) + [0] * len(more) + [1] * len(second.token_ids)
        score = await tool.calc_reward(instance_id) + reward * metrics["calls"]
        await tool.release(instance_id)
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=ids + second.token_ids, response_mask=mask, reward_score=score,
            num_turns=4, metrics={"tool_calls": 1.0},
        )
"""
TOOLS = """
tools:
  - class_name: counting.Counter
    config: {type: native, factor: 3}
    tool_schema:
      type: function
      function:
        name: count
        description: Counts.
        parameters:
          type: object
          properties: {step: {type: integer, description: by how much}}
          required: [step]
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return (extra_info or {}).get("reward_score", 0.0) + ("counter is 7" in solution_str)
"""


def test_grpo_with_an_agent_loop_and_a_tool_of_public_verl(tmp_path, monkeypatch):
    from examples.quickstart.tiny_model import tiny_model
    from tests.trainer.conftest import run_settings

    tiny_model("qwen2", tmp_path / "model", size="tiny")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "counting.py").write_text(CODE)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "reward.py").write_text(REWARD)
    loop = f"- {{name: counting, _target_: counting.CountingLoop, tools_file: {tmp_path / 'tools.yaml'}}}"
    (tmp_path / "loops.yaml").write_text(loop)
    rows = [{"prompt": [{"role": "user", "content": f"Go {i}."}], "data_source": "x", "answer": "1"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = "actor_rollout_ref.rollout.agent"
    more = [f"{agent}.agent_loop_config_path={tmp_path / 'loops.yaml'}", f"{agent}.default_agent_loop=counting"]
    more += ["data.max_prompt_length=64", "data.max_response_length=48", "data.val_files=[]", "algorithm.name=grpo"]
    trainer = LocalPPOTrainer(overrides=[*run_settings(tmp_path, tmp_path / "run"), *more])
    trainer.step()
    # 1 + 2 * 3 from the tool, and 0.5 of its call: the reward function is not called
    assert trainer.batch.batch["token_level_scores"].sum(-1).tolist() == pytest.approx([7.5] * 8)
    mask = trainer.batch.batch["response_mask"]
    assert mask[0].sum() <= 12 and not mask[0].all()
    trainer.shutdown()


class OwnLoop(RayPPOTrainer):
    """A trainer with a custom `fit`."""

    def fit(self):
        self.start()
        scores = []
        while self.global_steps < self.total_training_steps:
            self.step()
            scores.append(compute_data_metrics(self.batch, use_critic=False)["critic/score/mean"])
        self._save_checkpoint()
        self.shutdown()
        return scores


@pytest.mark.slow
def test_a_trainer_with_a_custom_fit_on_ray(local_ray, settings, tmp_path):
    trainer = OwnLoop(overrides=[*settings, *ON_RAY, *TWO_STEPS])
    for name in ("actor_rollout_wg", "train_dataloader"):
        with pytest.raises(AttributeError, match=rf"{name}.*edit the flow .*calls start\(\), step\(\)"):
            getattr(trainer, name)
    scores = trainer.fit()
    assert find_latest_ckpt_path(str(tmp_path / "run")) == str(tmp_path / "run" / "global_step_2")
    alone = LocalPPOTrainer(overrides=[*settings, *TWO_STEPS, f"trainer.default_local_dir={tmp_path / 'alone'}"]).fit()
    assert len(scores) == 2 and scores[1] == pytest.approx(alone["critic/score/mean"], rel=1e-4)
