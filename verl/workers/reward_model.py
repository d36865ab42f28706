"""The reward model's worker: a sequence-classification model that assigns every response one score."""

from typing import Any

import torch

from verl.config import schema
from verl.data.chat import DialogueReader
from verl.data.sequences import build_sequences
from verl.data.tokenization import load_tokenizer
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.engine_worker import EngineWorker, micro_batching


class RewardModelWorker(EngineWorker):
    """Scores dialogues. policy_tokenizer: that of the responses; timeout: of collectives, in seconds."""

    def __init__(
        self, config: schema.RewardModelConfig, *, device: str, policy_tokenizer: Any, timeout: float | None = None
    ):
        section = schema.ModelConfig(
            path=config.model_path,
            tokenizer_path=config.tokenizer_path,
            custom_chat_template=config.custom_chat_template,
            trust_remote_code=config.trust_remote_code,
            use_remove_padding=config.use_remove_padding,
            enable_gradient_checkpointing=False,
        )
        self.micro = micro_batching(
            config.micro_batch_size_per_gpu, config.use_dynamic_bsz, config.forward_max_token_len_per_gpu
        )
        self.reader = DialogueReader(policy_tokenizer, load_tokenizer(section))
        self.engine = self.build_engine("fsdp", section, config.fsdp, kind="reward", device=device, timeout=timeout)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Column rm_scores: the score of a dialogue at the last token sampled by the policy, 0 elsewhere."""
        dialogues = self.reader(batch)
        # the engine returns the value before each response token: one more token yields the value at the end
        extra_tokens = [ids[-1:] for ids in dialogues]
        rows = build_sequences(dialogues, extra_tokens, pad_token_id=0)
        values = self.engine.infer(DataProto.from_dict(rows), ("values",), self.micro)["values"]  # (B, 1)
        mask = batch.column("response_mask")
        last = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1).sub(1).clamp(min=0)
        return DataProto.from_dict({"rm_scores": torch.zeros(mask.shape).scatter(1, last[:, None], values)})
