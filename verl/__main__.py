"""python -m verl: the command `verl`."""

from verl.cli.app import app

app(prog_name="verl")
