"""The guards of every run."""

from verl.trainer.guards.bad_steps import BadSteps
from verl.trainer.guards.base import Guard
from verl.trainer.guards.early_stopping import ValidationWatch
from verl.trainer.guards.interruption import Interruption
from verl.trainer.guards.operator_watch import OperatorWatch
from verl.trainer.guards.quarantine import Quarantine
from verl.trainer.guards.restarts import Restarts

GUARDS: tuple[type[Guard], ...] = (
    OperatorWatch,  # first: it tells what an interrupted operator means
    Interruption,
    BadSteps,
    ValidationWatch,
    Quarantine,  # before a restart, which then drops the rows
    Restarts,  # last: what no other guard can repair
)
"""In the order in which they are asked: of an error, the first action counts."""
