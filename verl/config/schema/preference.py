"""The configurations of `verl dpo` and `verl rm`: `load_config(..., schema=DPOConfig)`."""

from typing import Any

from verl.config.fields import Section, field, section
from verl.config.schema.model import OptimConfig
from verl.config.schema.sft import SFTConfig, SFTDataConfig


class PreferenceDataConfig(SFTDataConfig):
    """`data`: preference pairs, or responses with a label."""

    chosen_key: str = field("chosen", "column of the preferred responses")
    rejected_key: str = field("rejected", "column of the other responses")
    label_key: str = field("label", "column that tells whether a response is good (true or 1), if there are no pairs")
    margin_key: str = field("margin", "optional column of how much better the chosen response is (reward models)")


class PreferenceLossConfig(Section):
    """`dpo`: the loss. null: the default of the loss."""

    loss: str = field("dpo", "dpo, ipo, kto, simpo, orpo, or the name of a custom loss (register_preference_loss)")
    beta: float | None = field(None, "strength of the KL constraint; scale of the rewards (simpo); lambda (orpo)", gt=0)
    label_smoothing: float | None = field(None, "dpo: share of preferences assumed to be wrong", ge=0, lt=0.5)
    gamma: float | None = field(None, "simpo: target margin of the rewards", ge=0)
    desirable_weight: float | None = field(None, "kto: weight of good responses", gt=0)
    undesirable_weight: float | None = field(None, "kto: weight of bad responses", gt=0)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the loss that are set."""
        return self.model_dump(exclude={"loss"}, exclude_none=True)


class DPOOptimConfig(OptimConfig):
    """`optim`."""

    lr: float = field(1e-6, "peak learning rate", ge=0)


class DPOConfig(SFTConfig):
    """The root of a configuration of offline preference optimization."""

    optim: DPOOptimConfig = section(DPOOptimConfig, "optimizer")
    data: PreferenceDataConfig = section(PreferenceDataConfig, "preferences")
    dpo: PreferenceLossConfig = section(PreferenceLossConfig, "the loss")


class RewardLossConfig(Section):
    """`rm`: the Bradley-Terry loss."""

    center_coef: float = field(0.0, "weight of (score of chosen + score of rejected)^2: centers scores", ge=0)


class RMConfig(SFTConfig):
    """The root of a configuration that trains a reward model."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "preferences")
    rm: RewardLossConfig = section(RewardLossConfig, "the loss")
