"""The worker that only generates: a model and a rollout engine, no optimizer."""

from collections.abc import Sequence

import numpy as np

from verl.config.schema.model import ModelConfig as ModelSection
from verl.config.schema.offline import GenerationRolloutConfig
from verl.engines.loading import ModelSpec, load_module
from verl.engines.lora import merge_adapters
from verl.protocol import DataProto
from verl.registry import import_module
from verl.rollout.base import RolloutEngine
from verl.rollout.stop_strings import StopStrings
from verl.single_controller import Dispatch, Worker, register
from verl.utils.device import resolve_device, resolve_dtype
from verl.workers.rollout_build import rollout_on, sample_ids, sampling_params


class RolloutWorker(Worker):
    """Answers prompts with a model that nobody trains.

    model, rollout: the sections of the configuration. The weights are loaded in `rollout.dtype`; auto is bf16 on a GPU
    and fp32 on a CPU. imports: files or modules of the user's, which may define the model. stop_token_ids, stop: the
    ends of an answer.
    """

    def __init__(
        self,
        model: ModelSection,
        rollout: GenerationRolloutConfig,
        *,
        imports: Sequence[str] = (),
        device: str,
        pad_token_id: int,
        stop_token_ids: tuple[int, ...],
        stop: StopStrings | None = None,
    ):
        for address in imports:
            import_module(address)
        on = resolve_device(device, self.local_rank)
        dtype = resolve_dtype(rollout.dtype, on)
        changes = {"use_remove_padding": False} | ({} if model.lora_adapter_path is not None else {"lora_rank": 0})
        section = model.model_copy(update=changes)
        module = load_module(ModelSpec(section, device=on, model_dtype=dtype, compute_dtype=dtype))
        if section.lora_adapter_path is not None:
            module = merge_adapters(module)
        self.engine: RolloutEngine = rollout_on(module, dtype, rollout, pad_token_id)
        self.params = sampling_params(rollout, rollout.response_length, stop_token_ids, stop)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_responses(self, batch: DataProto) -> DataProto:
        """One answer per row, without padding: answers may be long, and nothing here computes on them.

        Reads the columns prompt_ids, uid and sample_index (which sample of its prompt a row is). Gives the columns
        response_ids (int32 arrays, the end token among them) and finish_reason ("stop" or "length").
        """
        answers = self.engine.generate(list(batch.non_tensor_batch["prompt_ids"]), self.params, sample_ids(batch))
        return DataProto.from_dict(
            non_tensors={
                "response_ids": [np.array(answer.token_ids, dtype=np.int32) for answer in answers],
                "finish_reason": [answer.finish_reason for answer in answers],
            }
        )
