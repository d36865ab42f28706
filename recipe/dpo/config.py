"""The keys that DPO adds to the configuration: the section `dpo`."""

from typing import Literal

from verl.config.fields import Section, field, section
from verl.config.schema.ppo import Config


class DPOSection(Section):
    """`dpo`: where the pairs come from, and their loss."""

    answers: Literal["policy", "file"] = field("policy", "the policy answers and the reward prefers; or both are given")
    chosen_key: str = field("chosen", "file: the column of the better answers")
    rejected_key: str = field("rejected", "file: the column of the worse answers")
    beta: float = field(0.1, "how much a preference counts against the distance to the reference", gt=0)
    loss_type: Literal["sigmoid", "ipo"] = field("sigmoid", "DPO, or IPO (a squared error, which does not saturate)")
    label_smoothing: float = field(0.0, "sigmoid: share of preferences held to be wrong", ge=0, lt=0.5)


class DPOConfig(Config):
    """The root, with the section of DPO."""

    dpo: DPOSection = section(DPOSection, "DPO")
