"""The keys that DPO adds to the configuration: the section `dpo`."""

from typing import Literal

from verl.config.fields import Node, key, part
from verl.config.schema.ppo import Config


class DPOSection(Node):
    """`dpo`: where the pairs come from, and their loss."""

    answers: Literal["policy", "file"] = key("policy", "the policy answers and the reward prefers; or both are given")
    chosen_key: str = key("chosen", "file: the column of the better answers")
    rejected_key: str = key("rejected", "file: the column of the worse answers")
    beta: float = key(0.1, "how much a preference counts against the distance to the reference", gt=0)
    loss_type: Literal["sigmoid", "ipo"] = key("sigmoid", "DPO, or IPO (a squared error, which does not saturate)")
    label_smoothing: float = key(0.0, "sigmoid: share of preferences held to be wrong", ge=0, lt=0.5)


class DPOConfig(Config):
    """The root, with the section of DPO."""

    dpo: DPOSection = part(DPOSection, "DPO")
