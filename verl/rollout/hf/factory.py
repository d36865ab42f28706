"""`rollout.name=hf`: on the trainer's module, or on a copy that receives its weights."""

from verl.config import schema
from verl.rollout.base import RolloutEnv, SharesWeights
from verl.rollout.hf.engine import HFRollout
from verl.rollout.loading import empty_module, load_module
from verl.utils.device import resolve_dtype
from verl.weight_sync import ModuleReceiver


def make_hf(
    config: schema.RolloutEngineConfig,
    model: schema.ModelConfig,
    env: RolloutEnv,
    train_engine: SharesWeights | None = None,
) -> HFRollout:
    """Make the engine, on the trainer's module if it is unsharded (adapters may be unmerged), otherwise on a copy."""
    dtype = env.compute_dtype or resolve_dtype(config.dtype, env.device)
    shared = None if train_engine is None else train_engine.shared_module()
    weights = None
    if shared is None and train_engine is None:
        shared = load_module(model, dtype, env.device)
        weights = ModuleReceiver(shared, filled=True)
    elif shared is None:
        shared = empty_module(model, dtype, env.device, train_engine.buffers())
        weights = ModuleReceiver(shared)
    records = isinstance(config, schema.RolloutConfig) and config.enable_rollout_routing_replay
    options = {"max_rows": config.max_num_seqs, "compute_dtype": dtype, "weights": weights, "records": records}
    return HFRollout(shared, env.pad_token_id, **options)
