"""`rollout.name=sglang`: makes the engine of one rank."""

import logging
from functools import partial

import torch

from verl.config import schema
from verl.modeling.huggingface import model_source, read_config
from verl.rollout.base import RolloutEngine, RolloutEnv, SharesWeights
from verl.rollout.loading import load_module, parameter_shapes
from verl.rollout.sglang.capabilities import probe
from verl.rollout.sglang.engine import SglangFollower, SglangRollout, arguments_of
from verl.rollout.sglang.service import Service, start_engine
from verl.rollout.sglang.settings import engine_args, max_model_len
from verl.rollout.sglang.weights import SglangMemory, SglangReceiver
from verl.utils.device import resolve_dtype

log = logging.getLogger(__name__)


def make_sglang(
    config: schema.RolloutEngineConfig,
    model: schema.ModelConfig,
    env: RolloutEnv,
    train_engine: SharesWeights | None = None,
) -> RolloutEngine:
    """Make the engine. It has its own copy of the weights: the trainer pushes them before the first generation; without
    training they are read from the files.

    Raises:
        ImportError, ValueError: SGLang is not installed or not supported (`capabilities.probe`), settings that
            contradict each other, or `rollout.deterministic`.
    """
    if isinstance(config, schema.RolloutConfig) and config.deterministic:
        raise ValueError("rollout.deterministic needs the layers of the trainer: set rollout.name=native")
    if env.tp_rank > 0:
        return SglangFollower()
    capabilities = probe(env.device.type == "cuda")
    dtype = resolve_dtype(config.dtype, env.device)
    if config.dtype == "auto" and env.compute_dtype is not None:
        dtype = env.compute_dtype
    model = model.model_copy(update={"path": model_source(model.path)})
    hf_config = read_config(model.path, model.override_config, model.trust_remote_code)
    is_trained = train_engine is not None or env.compute_dtype is not None
    merges = not is_trained and model.lora_adapter_path is not None
    args = engine_args(config, model, env, dtype, hf_config, dummy=is_trained or merges)
    if not args.get("enable_deterministic_inference"):
        log.info(
            "rollout.name=sglang: sampled tokens do not depend on rollout.seed alone; with "
            "engine_kwargs.sglang.enable_deterministic_inference=true they do (slower)"
        )
    service = Service(start_engine(args), capabilities, arguments_of)
    memory = SglangMemory(service, saves=bool(args["enable_memory_saver"]))
    receiver = SglangReceiver(
        service,
        memory,
        partial(parameter_shapes, model),
        dtype=dtype,
        device=env.device,
        ranks=env.tp_size,
        sessions=capabilities.update_sessions,
        filled=not is_trained and not merges,
    )
    if merges:
        module = load_module(model, dtype, torch.device("cpu"))
        receiver.receive(module.named_parameters(), version=0)
    elif is_trained:
        receiver.release()  # the trainer gets the memory until the first push
    return SglangRollout(
        service,
        memory,
        receiver,
        vocab_size=hf_config.get_text_config().vocab_size,
        max_length=max_model_len(config),
    )
