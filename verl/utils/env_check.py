"""`verl.env_check` under the path that articles and scripts use: `python -m verl.utils.env_check`."""

from verl.env_check.check import check_env, possible_modes

__all__ = ["check_env", "possible_modes"]

if __name__ == "__main__":
    check_env()
