"""The `distillation` section: teachers whose log-probs the policy learns from."""

from collections.abc import Mapping
from typing import Any, Literal

from verl.config.fields import FilePath, Section, field, section
from verl.config.schema.model import ModelConfig

_GRADIENT = ("use_policy_gradient", True)
_CLIP = "${distillation.distillation_loss.clip_ratio}"


class TeacherConfig(Section):
    """One entry of `distillation.teacher_models`: a frozen model with the tokenizer of the policy."""

    key: str | None = field(None, "value of the column teacher_key of its prompts; null: the name of the entry")
    model_path: FilePath | None = field(None, "Hugging Face model: a folder or a Hub id; of a server: its model name")
    server_url: str | None = field(
        None, "OpenAI-compatible server with prompt_logprobs, such as http://host:8000/v1; null: a local model"
    )
    api_key: str | None = field(None, "token of the server, such as ${oc.env:TEACHER_API_KEY}; null: none")
    trust_remote_code: bool = field(False, "run the Python code that comes with the model")

    @property
    def model(self) -> ModelConfig:
        """The `model` section of a local teacher."""
        return ModelConfig(path=self.model_path, trust_remote_code=self.trust_remote_code)


class DistillationLossConfig(Section):
    """`distillation.distillation_loss`: the loss on the log-probs of policy and teacher."""

    loss_mode: Literal["forward_kl_topk", "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = field(
        "k3", "forward_kl_topk: KL(teacher, policy) over topk tokens; others: an estimate of KL(policy, teacher)"
    )
    topk: int = field(
        32, "forward_kl_topk: most probable tokens of the teacher", active_when=("loss_mode", "forward_kl_topk"), ge=1
    )
    use_task_rewards: bool = field(True, "add the policy loss of the rewards; false: learn from the teacher alone")
    distillation_loss_coef: float = field(
        1.0, "coefficient of the distillation loss", active_when=("use_task_rewards", True), ge=0
    )
    loss_max_clamp: float | None = field(None, "clamp the loss of a token to +- this; null: no clamp", gt=0)
    log_prob_min_clamp: float | None = field(
        None,
        "forward_kl_topk: lower bound of the log-probs; null: none",
        active_when=("loss_mode", "forward_kl_topk"),
        lt=0,
    )
    use_policy_gradient: bool = field(
        False, "the negative loss of a token is its advantage in a policy loss; false: minimize the loss directly"
    )
    policy_loss_mode: str = field("vanilla", "registered name of that policy loss", active_when=_GRADIENT)
    clip_ratio: float = field(0.2, "its clip range", active_when=_GRADIENT, ge=0)
    clip_ratio_low: float = field(0.2, "its lower clip range", default_from=_CLIP, active_when=_GRADIENT, ge=0)
    clip_ratio_high: float = field(0.2, "its upper clip range", default_from=_CLIP, active_when=_GRADIENT, ge=0)


class DistillationConfig(Section):
    """`distillation`: on-policy distillation from one or more teachers."""

    enabled: bool = field(False, "train on the log-probs of teachers")
    teacher_key: str = field("data_source", "with several teachers: the column that selects the teacher of a prompt")
    teacher_models: dict[str, TeacherConfig] = field(
        {}, "teachers by a name of your choice, each with model_path, key, server_url, api_key, trust_remote_code"
    )
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig, "the loss")
    server_timeout: float = field(300.0, "seconds for one request to the server of a teacher", gt=0)

    @property
    def loss_settings(self) -> dict[str, Any] | None:
        """The settings of the loss; None if distillation is disabled."""
        return self.distillation_loss.model_dump() if self.enabled else None

    @property
    def teachers_by_key(self) -> Mapping[str, TeacherConfig]:
        """Teachers by the value of `teacher_key` that selects them; none if distillation is disabled."""
        teachers = self.teacher_models.items() if self.enabled else ()
        return {teacher.key or name: teacher for name, teacher in teachers}

    @property
    def local_teachers(self) -> Mapping[str, TeacherConfig]:
        """Those that run in the workers of the role `teacher`."""
        return {key: teacher for key, teacher in self.teachers_by_key.items() if teacher.server_url is None}

    @property
    def num_candidates(self) -> int | None:
        """Tokens per position that the loss reads; None: the sampled token only."""
        uses = self.enabled and self.distillation_loss.loss_mode == "forward_kl_topk"
        return self.distillation_loss.topk if uses else None
