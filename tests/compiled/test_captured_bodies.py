"""Each body of the table as captured code: bit for bit what it is in plain PyTorch, or on the tape, which says why."""

import itertools

import pytest
from bodies import BODIES
from corpus import UNTIL_CAPTURED, assert_as_plain
from tiers import by_default

RULES = {"recompute": {"action": "recompute", "via": "hook"}, "checkpoint": {"action": "checkpoint"}}


NAMES = [name for name, body in BODIES.items() if body.captured is not None and body.ways != ("checkpoint",)]
BY_DEFAULT = [*NAMES[::6], *(name for name in NAMES if name.startswith(("capture: ", "update: ")))]
"""The last are the only claims of what they say."""


@pytest.mark.filterwarnings("ignore::recompute.errors.PolicyWarning")
@pytest.mark.parametrize("name", by_default(NAMES, *BY_DEFAULT))
def test_a_body_runs_as_captured_code_or_says_why_not(name):
    assert_as_plain(BODIES[name], RULES["recompute"], UNTIL_CAPTURED)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::recompute.errors.PolicyWarning")
@pytest.mark.parametrize(("name", "action"), zip(BODIES, itertools.cycle(["checkpoint", "checkpoint", "recompute"])))
def test_whether_it_is_captured_or_not_every_body_does_what_it_does_in_plain_pytorch(name, action):
    body = BODIES[name]
    if name == "view: of new data":
        pytest.skip("captured code reads what was there before, as the page of limits says")
    if name.startswith("mode: ") and name.endswith("in backward"):
        pytest.skip("a mode around backward alone changes what runs again while a graph is watched")
    if not body.ways or action in body.ways:
        assert_as_plain(body._replace(captured=None), RULES[action], UNTIL_CAPTURED)
