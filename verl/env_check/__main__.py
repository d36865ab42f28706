"""python -m verl.env_check: exits with status 1 if a required component is missing or broken."""

from verl.env_check.check import check_env
from verl.processes.streams import command_output

with command_output():
    check_env()
