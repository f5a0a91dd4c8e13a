"""Each body of the table as captured code: bit for bit what it is in plain PyTorch, or on the tape, which says why."""

from __future__ import annotations

import pytest
from bodies import BODIES
from corpus import UNTIL_CAPTURED, assert_as_plain

RULES = {"recompute": {"action": "recompute", "via": "hook"}, "checkpoint": {"action": "checkpoint"}}


@pytest.mark.filterwarnings("ignore::recompute.errors.PolicyWarning")
@pytest.mark.parametrize(
    "name", [name for name, body in BODIES.items() if body.captured is not None and body.ways != ("checkpoint",)]
)
def test_a_body_runs_as_captured_code_or_says_why_not(name: str) -> None:
    assert_as_plain(BODIES[name], RULES["recompute"], UNTIL_CAPTURED)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::recompute.errors.PolicyWarning")
@pytest.mark.parametrize("action", RULES)
@pytest.mark.parametrize("name", BODIES)
def test_so_does_every_body(name: str, action: str) -> None:
    body = BODIES[name]
    if body.captured is None or action == "checkpoint":
        assert_as_plain(body._replace(captured=None), RULES[action], UNTIL_CAPTURED)
