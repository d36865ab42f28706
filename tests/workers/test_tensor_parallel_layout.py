"""The layout of a tensor-parallel rollout: which ranks get which prompts, which rank answers, and what is refused."""

import threading
from contextlib import contextmanager

import pytest
import torch

from verl.config import ConfigError, load_config, schema
from verl.config.schema.offline import GenerationConfig
from verl.protocol import DataProto
from verl.rollout.base import ROLLOUT_ENGINES, RolloutEngine, RolloutEnv, make_rollout_engine
from verl.rollout.request import Completion
from verl.single_controller.dispatch import Coordinates, Layout, registered_methods
from verl.single_controller.worker import RankEnv
from verl.workers.rollout.methods import RolloutMethods, rollout_env
from verl.workers.rollout.role import Rollout

TP = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"


class Follows(RolloutEngine):
    """Records the order of calls; both ranks of a group share `log`."""

    supports_tensor_parallel = True

    def __init__(self, env: RolloutEnv, log: list, ended: threading.Event):
        self.env, self.log, self.ended = env, log, ended

    def generate(self, requests):
        self.log.append((self.env.rank, [request.prompt_ids for request in requests]))
        return [Completion([7], [-0.5], "stop") for _ in requests]

    @contextmanager
    def leading(self):
        try:
            yield
        finally:
            self.ended.set()

    def follow(self):
        assert self.ended.wait(10)
        self.log.append((self.env.rank, "followed"))


class Host(RolloutMethods):
    """The rollout role on one of four ranks with tensor_model_parallel_size=2."""

    def __init__(self, rank: int, log: list, ended: threading.Event):
        self.rank_env = RankEnv(rank, 4, rank, 4)
        config = schema.RolloutConfig(name="follows", tensor_model_parallel_size=2, response_length=4)
        env = rollout_env(self, config, torch.device("cpu"), 0, None)
        ROLLOUT_ENGINES._entries["follows"] = lambda config, model, env, train_engine=None: Follows(env, log, ended)
        self.rollout = Rollout(config, schema.ModelConfig(path="none"), env, stop_token_ids=(7,))
        self.maxima = []

    def max_over_ranks(self, values):
        self.maxima.append(values)
        return [3.0, 2.0]


def test_consecutive_ranks_form_a_group_that_gets_the_same_rows_and_answers_once():
    log, ended = [], [threading.Event(), threading.Event()]
    hosts = [Host(rank, log, ended[rank // 2]) for rank in range(4)]
    layout = Layout(tuple(host.layout("rollout") for host in hosts))
    assert layout.coordinates == (Coordinates(0, 0), Coordinates(0, 1), Coordinates(1, 0), Coordinates(1, 1))
    assert [(h.rollout.env.tp_rank, h.rollout.env.tp_size) for h in hosts] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    columns = {"prompt_ids": [[1], [2, 2], [3]], "uid": list("abc"), "sample_index": [0, 0, 0]}
    batch = DataProto.from_dict({}, columns, {"sampling": "train"})
    registered = registered_methods(Host)["generate_sequences"]
    calls = registered.dispatch(layout, (batch,), {})
    results = [call.finish(host.generate_sequences(*call.args)) for host, call in zip(hosts, calls)]
    assert log == [(0, [[1], [2, 2]]), (1, "followed"), (2, [[3], [1]]), (3, "followed")]
    assert [result is None for result in results] == [False, True, False, True]
    found = registered.collect(layout, results)
    assert found.batch["prompts"].tolist() == [[0, 0, 1], [0, 2, 2], [0, 0, 3]]
    assert found.batch["responses"].tolist() == [[7, 0]] * 3
    assert [host.maxima for host in hosts] == [[[2.0, 1.0]], [[0.0, 0.0]], [[1.0, 1.0]], [[0.0, 0.0]]]


@pytest.mark.parametrize(
    ("ranks", "on_host", "size", "training", "groups"),
    [
        (4, 4, 2, {}, [[0, 2], [1, 3]]),  # a rank has a quarter of the rows, inside of its half
        (8, 8, 2, {}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (8, 8, 4, {"fsdp_size": 4}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 4, 2, {}, [[0, 2], [1, 3], [4, 6], [5, 7]]),  # within a host
        (4, 4, 2, {"tensor_parallel_size": 2}, [[0, 1], [2, 3]]),  # the ranks with the halves
        (8, 8, 2, {"tensor_parallel_size": 4}, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (4, 1, 2, {}, [[0, 1], [2, 3]]),
        (4, 4, 2, None, [[0, 1], [2, 3]]),  # own devices
        (4, 4, 2, {"tensor_model_parallel_size": 2}, [[0, 1], [2, 3]]),  # megatron
        (8, 8, 2, {"tensor_model_parallel_size": 4}, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (4, 4, 2, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, [[0, 1], [2, 3]]),
        (8, 4, 2, {"tensor_model_parallel_size": 8}, [[0, 2], [1, 3], [4, 6], [5, 7]]),  # within a host
    ],
)
def test_groups_on_the_devices_of_training_contain_its_shards(ranks, on_host, size, training, groups):
    config = schema.RolloutConfig(name="native", tensor_model_parallel_size=size)
    if training is not None:
        training = (schema.MegatronConfig if "tensor_model" in str(training) else schema.EngineConfig)(**training)
    envs = []
    for rank in range(ranks):
        worker = RolloutMethods.__new__(type("Ranked", (RolloutMethods,), {"max_over_ranks": None}))
        worker.rank_env = RankEnv(rank, ranks, rank % on_host, on_host)
        envs.append(rollout_env(worker, config, torch.device("cpu"), 0, None, training))
    found = [[env.rank for env in envs if env.tp_group == group] for group in range(ranks // size)]
    assert found == groups
    assert all([envs[rank].tp_rank for rank in group] == list(range(size)) for group in groups)


def test_the_canary_has_one_response_per_group():
    log, ended = [], [threading.Event(), threading.Event()]
    hosts = [Host(rank, log, ended[rank // 2]) for rank in range(4)]
    layout = Layout(tuple(host.layout("rollout") for host in hosts))
    registered = registered_methods(Host)["canary_response"]
    assert registered.mesh == "rollout"
    calls = registered.dispatch(layout, ([5, 6],), {"max_tokens": 1})
    results = [call.finish(host.canary_response(*call.args, **call.kwargs)) for host, call in zip(hosts, calls)]
    assert log == [(0, [[5, 6]]), (1, "followed"), (2, [[5, 6]]), (3, "followed")]
    assert registered.collect(layout, results) == [Completion([7], [-0.5], "stop")] * 2


def test_the_other_ranks_are_released_if_the_first_one_fails():
    ended = threading.Event()
    host = Host(0, [], ended)
    host.rollout.engine.generate = None
    batch = DataProto.from_dict({}, {"prompt_ids": [[1]], "uid": ["a"], "sample_index": [0]}, {"sampling": "train"})
    with pytest.raises(TypeError):
        host.generate_sequences(batch)
    assert ended.is_set()


def test_an_engine_that_does_not_declare_it_is_refused_by_name(monkeypatch):
    class Alone(RolloutEngine):
        def generate(self, requests):
            return []

    monkeypatch.setitem(ROLLOUT_ENGINES._entries, "alone", lambda config, model, env, train_engine=None: Alone())
    env = RolloutEnv(0, 2, 0, torch.device("cpu"), 0, tp_rank=0, tp_size=2)
    with pytest.raises(ValueError, match=r"size=2: the rollout engine 'alone' does not support it \(Alone\.supports_"):
        make_rollout_engine("alone", schema.RolloutConfig(name="alone"), None, env)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"2 does not divide the number of ranks that generate, 1: use 1"),
        (["trainer.n_gpus_per_node=3"], r"2 does not divide the number of ranks that generate, 3: use 1 or 3"),
        (["trainer.n_gpus_per_node=4", "placement.actor_devices=[0,1]", "placement.rollout_devices=[2]"],
         r"2 does not divide the number of ranks"),
        (["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.name=hf"], r"2 is not supported by .*name=hf"),
        (["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.deterministic=true"],
         r"tensor_model_parallel_size .*found 2, but rollout.deterministic=true needs 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_when_the_settings_are_read(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[TP, *overrides])


def test_generation_without_training_is_checked_too():
    keys = ["rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=1"]
    with pytest.raises(
        ConfigError, match=r"rollout.tensor_model_parallel_size .*: 2 does not divide the number of ranks"
    ):
        load_config(overrides=keys, schema=GenerationConfig)


def test_what_fits_is_accepted():
    own = ["trainer.n_gpus_per_node=3", "placement.actor_devices=[0]", "placement.rollout_devices=[1,2]"]
    asynchronous = [*own, "trainer.async.max_staleness=1"]
    for more in (["trainer.n_gpus_per_node=4"], ["trainer.n_gpus_per_node=2", "trainer.nnodes=2"], asynchronous):
        assert load_config(overrides=[TP, *more]).actor_rollout_ref.rollout.tensor_model_parallel_size == 2
