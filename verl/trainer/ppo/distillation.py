"""On-policy distillation as a flow edit: the operator `teacher` adds the log-probs of the teachers.

    ... reward -> [old_log_prob] -> [ref] -> [values] -> [kl] -> teacher -> adv -> [update_critic] -> update_actor

A teacher is a frozen policy that computes the log-probs of the sampled responses: in the workers of the role `teacher`,
or on an OpenAI-compatible server with `prompt_logprobs`, as vLLM has it. `algorithms.distillation` has the losses.
"""

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from verl.config import schema
from verl.dataflow import CONTROLLER, DataFlow, Operator
from verl.engines.base import NUM_CANDIDATES
from verl.protocol import DataProto
from verl.trainer.ppo.operators import SEQUENCES, Roles, media_columns, sequence_columns


@dataclass(eq=False, repr=False)
class Teachers:
    """Columns of the log-probs of the sampled tokens, and of the most probable ones if the loss reads them, each by the
    teacher of its row."""

    config: schema.DistillationConfig
    roles: Roles

    def __call__(self, batch: DataProto) -> DataProto:
        result: dict[str, torch.Tensor] = {}
        for key, rows in self.rows_by_teacher(batch).items():
            for name, values in self.log_probs(key, batch[rows]).items():
                if name not in result:
                    result[name] = values.new_zeros(len(batch), *values.shape[1:])
                result[name][rows] = values
        return DataProto.from_dict(result)

    def rows_by_teacher(self, batch: DataProto) -> Mapping[str, list[int]]:
        """Key of a teacher -> its rows. Raises ValueError for a row without a teacher."""
        teachers, column = self.config.teachers_by_key, self.config.teacher_key
        if len(teachers) == 1:
            return {next(iter(teachers)): list(range(len(batch)))}
        selected = list(map(str, batch.column(column)))
        if missing := sorted(set(selected) - teachers.keys()):
            raise ValueError(
                f"no teacher for prompts with {column}={missing[0]!r}: the keys of distillation.teacher_models are "
                f"{', '.join(teachers)}"
            )
        rows_of: dict[str, list[int]] = {}
        for row, key in enumerate(selected):
            rows_of.setdefault(key, []).append(row)
        return rows_of

    def log_probs(self, key: str, batch: DataProto) -> Mapping[str, torch.Tensor]:
        """The columns of one teacher."""
        teacher, count = self.config.teachers_by_key[key], self.config.num_candidates
        if teacher.server_url is not None:
            if media_columns(batch):
                raise ValueError(f"the teacher {key!r} is on a server, which reads no images: use a local model")
            return TeacherServer(teacher, self.config.server_timeout).log_probs(batch, count)
        inputs = sequence_columns(batch)
        inputs.meta_info.update({"teacher": key} | ({} if count is None else {NUM_CANDIDATES: count}))
        return self.roles["teacher"].compute_teacher_log_prob(inputs).tensors


def distill(flow: DataFlow, config: schema.Config, roles: Roles) -> DataFlow:
    """Add the operator `teacher`, whose columns `flow.loss_columns` adds to those of the update."""
    distillation = config.distillation
    several = (distillation.teacher_key,) if len(distillation.teachers_by_key) > 1 else ()
    reads = (*SEQUENCES, "prompts", "response_mask", *several)
    on = "teacher" if distillation.local_teachers else CONTROLLER
    operator = Operator("teacher", Teachers(distillation, roles), reads, teacher_columns(distillation), on=on)
    return flow.insert_before("adv", operator)


def teacher_columns(distillation: schema.DistillationConfig) -> tuple[str, ...]:
    """The columns that the operator `teacher` writes and the loss reads."""
    if not distillation.enabled:
        return ()
    candidates = ("candidate_ids", "teacher_candidate_log_probs") if distillation.num_candidates else ()
    return ("teacher_log_probs", *candidates)


# ---- teachers on a server -------------------------------------------------------------------------------------------


#: requests in flight; the server batches them
CONCURRENCY = 64

Entry = Mapping[str, Mapping[str, Any]]
"""Of one position: token id -> its `logprob` and its `rank`, from 1. The token of the prompt is among them."""


@dataclass(frozen=True)
class TeacherServer:
    """Sends prompt and response as the prompt of a completion, and reads the log-probs of its tokens, at temperature 1.

    Args:
        teacher: its server_url, model_path and api_key.
        timeout: seconds for one request.
    """

    teacher: schema.TeacherConfig
    timeout: float

    def log_probs(self, batch: DataProto, num_candidates: int | None) -> dict[str, torch.Tensor]:
        """teacher_log_probs (B, T), and candidate_ids and teacher_candidate_log_probs (B, T, K) of the K most probable
        tokens; 0 outside the responses.

        Args:
            batch: the columns input_ids, attention_mask and responses.
            num_candidates: K; None: the sampled tokens only.
        """
        columns, count = batch.batch, num_candidates or 0
        width = columns["responses"].shape[1]
        sequences = [ids[keep].tolist() for ids, keep in zip(columns["input_ids"], columns["attention_mask"].bool())]
        lengths = columns["attention_mask"][:, -width:].sum(1).tolist()
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            responses = list(pool.map(self.request, sequences, itertools.repeat(count)))
        ids = torch.zeros(len(batch), width, 1 + count, dtype=torch.int64)
        log_probs = torch.zeros(ids.shape)
        for row, (tokens, entries, length) in enumerate(zip(sequences, responses, lengths)):
            for t, position in enumerate(range(len(tokens) - length, len(tokens))):
                entry = entries[position]
                ranked = sorted(entry, key=lambda token: entry[token]["rank"])[:count]
                selected = [str(tokens[position]), *ranked]
                ids[row, t] = torch.tensor(list(map(int, selected)))
                log_probs[row, t] = torch.tensor([entry[token]["logprob"] for token in selected])
        sampled = {"teacher_log_probs": log_probs[..., 0]}
        candidates = {"candidate_ids": ids[..., 1:], "teacher_candidate_log_probs": log_probs[..., 1:]}
        return sampled | candidates if count else sampled

    def request(self, token_ids: list[int], num_candidates: int) -> list[Entry | None]:
        """One entry per token; of the first one None. Raises ValueError if the server refuses or does not answer."""
        url = self.teacher.server_url.rstrip("/") + "/completions"
        body = {"model": self.teacher.model_path, "prompt": token_ids, "max_tokens": 1, "temperature": 0}
        data = json.dumps(body | {"prompt_logprobs": num_candidates}).encode()
        token = {} if self.teacher.api_key is None else {"Authorization": f"Bearer {self.teacher.api_key}"}
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | token)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                (choice,) = json.load(response)["choices"]
        except OSError as error:
            message = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            raise ValueError(
                f"teacher {url}: {error}: {message or 'start the server, or change server_url'}"
            ) from error
        entries = choice.get("prompt_logprobs")
        if entries is None or len(entries) != len(token_ids):
            raise ValueError(
                f"teacher {url}: expected prompt_logprobs for {len(token_ids)} tokens, found "
                f"{'none' if entries is None else len(entries)}: use a server that supports it, such as vLLM"
            )
        return entries
