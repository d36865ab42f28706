"""`verl merge`: verl.model_merger, whose command `merge` is the default."""

COMMANDS = ("merge", "test")


def main(arguments: list[str], program: str) -> int:
    """Run `merge`, or `test` if that is the first argument. Returns the exit status."""
    from verl.model_merger.__main__ import main as merger

    asks_for_help = arguments[:1] in ([], ["-h"], ["--help"])
    command = [] if asks_for_help or arguments[0] in COMMANDS else ["merge"]
    return merger([*command, *(arguments or ["--help"])], program)
