"""On-policy distillation as a flow edit: the operator `teacher` adds the log-probs of the teachers.

    ... reward -> [old_log_prob] -> [ref] -> [values] -> [kl] -> teacher -> adv -> [update_critic] -> update_actor

A teacher is a frozen policy that computes the log-probs of the sampled responses: in the workers of the role `teacher`,
or on a server. `algorithms.distillation` has the losses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
            from verl.trainer.ppo.teacher_server import TeacherServer

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
