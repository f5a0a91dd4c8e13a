"""How an example and a sweep over models are run and read, and layers of which a sweep has something to say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def swept(script, folder, *arguments):
    """In an interpreter of its own, as it forks; returns what results.json then holds, and what was printed."""
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / script), "--out", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text(encoding="utf-8")), done.stdout


def assert_falls(output, steps):
    """The losses that an example prints, one a step."""
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+)$", output, re.MULTILINE)]
    assert len(losses) == steps
    assert losses[-1] < losses[0]


class Drifting(nn.Linear):
    """Computes something else each time that the program calls it."""

    calls = 0

    def forward(self, input):
        Drifting.calls += 1
        return super().forward(input) * Drifting.calls


def raising(error):
    class Raising(nn.Linear):
        def forward(self, input):
            raise error

    return Raising
