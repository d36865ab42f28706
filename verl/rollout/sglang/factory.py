"""`rollout.name=sglang`: makes the engine of one rank."""

from functools import partial

from verl.config import schema
from verl.rollout.base import RolloutEngine, RolloutEnv, SharesWeights
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.external import check_not_deterministic
from verl.rollout.sglang.engine import SglangFollower, SglangRollout, arguments_of, decode_experts
from verl.rollout.sglang.service import FailureHandler, Service, start_engine
from verl.rollout.sglang.settings import engine_args, probe
from verl.rollout.sglang.weights import SglangMemory, SglangReceiver


def make_sglang(
    config: schema.RolloutEngineConfig,
    model: schema.ModelConfig,
    env: RolloutEnv,
    train_engine: SharesWeights | None = None,
) -> RolloutEngine:
    """Make the engine. It has its own copy of the weights: the trainer pushes them before the first generation; without
    training they are read from the files.

    Raises:
        ImportError, ValueError: SGLang is not installed or too old, settings that contradict each other, or
            `rollout.deterministic`.
    """
    check_not_deterministic(config)
    if env.tp_rank > 0:
        return SglangFollower()
    capabilities = probe(env.device.type == "cuda")
    copy = EngineCopy.from_arguments(config, model, env, train_engine)
    layers, text = copy.recorded_layers(), copy.hf_config.get_text_config()
    experts = None
    if layers is not None:
        shape = text.num_hidden_layers, text.num_experts_per_tok
        experts = partial(decode_experts, layers=layers, shape=shape)
    args = engine_args(copy, env, capabilities)
    arguments, on_failure = partial(arguments_of, records=copy.records), FailureHandler()
    engine = start_engine(args, on_failure)
    service = on_failure.service = Service(engine, capabilities, arguments, experts)
    memory = SglangMemory(service, saves=bool(args["enable_memory_saver"]))
    receiver = SglangReceiver(service, memory, copy, device=env.device, ranks=env.tp_size)
    if args["enable_memory_saver"]:
        receiver.prepare_release()
    copy.fill(receiver)
    return SglangRollout(copy, service, memory, receiver)
