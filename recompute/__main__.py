"""`python -m recompute` is `recompute`, also where no script is installed."""

from recompute.cli import app

app(prog_name="recompute")
