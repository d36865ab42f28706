"""python -m verl.env_check: exits with status 1 if a required component is missing or broken."""

from verl.env_check.check import check_env

check_env()
