"""DPO on preferences that are given (Rafailov et al. 2023, arXiv 2305.18290): the answers come from the rows.

    prompts -> repeat -> answers -> pairs -> ref -> update_actor

`answers` takes the place of `gen` and `reward`: the first answer to a prompt is the chosen one, with score 1, and the
second the rejected one, with score 0.
"""

from typing import Any

import torch
from torch.utils.data import Dataset

from recipe.dpo.config import DPOSection
from verl.data.sequences import build_sequences
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.registry import did_you_mean
from verl.trainer.ppo_flow import SEQUENCES

SCORES = ("token_level_scores", "token_level_rewards")


class GivenAnswers:
    """The two answers of each row, tokenized, with an end, and with the scores 1 and 0.

    An answer is a text, or chat messages of which the last one is the answer. response_length: its tokens at most.
    """

    def __init__(self, dpo: DPOSection, tokenizer: Any, response_length: int):
        self.keys = (dpo.chosen_key, dpo.rejected_key)
        self.tokenizer = tokenizer
        self.response_length = response_length

    def __call__(self, batch: DataProto) -> DataProto:
        which = batch.non_tensor_batch["sample_index"].tolist()
        answers = [self.tokens(batch.non_tensor_batch[self.keys[i]][row]) for row, i in enumerate(which)]
        columns = build_sequences(list(batch.non_tensor_batch["prompt_ids"]), answers, self.tokenizer.pad_token_id)
        scores = torch.zeros(columns["responses"].shape)
        scores[range(len(answers)), [len(ids) - 1 for ids in answers]] = 1 - torch.tensor(which, dtype=torch.float32)
        return DataProto.from_dict({**columns, **dict.fromkeys(SCORES, scores)})

    def tokens(self, answer: str | list[dict[str, Any]]) -> list[int]:
        """The ids of an answer and of the end."""
        text = answer if isinstance(answer, str) else answer[-1]["content"]
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def check(self, dataset: Dataset) -> None:
        """Every row has two different answers that fit. Raises ValueError that names the row."""
        for row in range(len(dataset)):
            item = dataset[row]
            if missing := [key for key in self.keys if key not in item]:
                raise ValueError(f"DPO: no column {missing[0]!r}: {did_you_mean(missing[0], map(str, item))}")
            chosen, rejected = (self.tokens(item[key]) for key in self.keys)
            if chosen == rejected:
                raise ValueError(f"DPO: row {row} prefers an answer to itself: {item[self.keys[0]]!r:.80}")
            if (longest := max(len(chosen), len(rejected))) > self.response_length:
                raise ValueError(
                    f"DPO: an answer of row {row} has {longest} tokens with its end, data.max_response_length is "
                    f"{self.response_length}: raise it, or leave the row out"
                )


def given_answers(flow: DataFlow, answers: GivenAnswers) -> DataFlow:
    """The edit: nothing is generated and nothing is scored."""
    writes = (*SEQUENCES, "prompts", "response_mask", *SCORES)
    operator = Operator("answers", answers, ("prompt_ids",), writes)  # and sample_index, from `repeat`
    return flow.replace("gen", operator).remove("reward")
