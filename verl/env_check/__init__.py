"""Checks whether this machine can run the library, and prints the fix for each problem."""

from verl.env_check.check import check_env

__all__ = ["check_env"]
