"""python -m verl.env_check: exits with status 1 if a required component is missing or broken."""

from verl.env_check.check import check_env, possible_modes
from verl.processes.streams import command_output

__all__ = ["check_env", "possible_modes"]

if __name__ == "__main__":
    with command_output():
        check_env()
