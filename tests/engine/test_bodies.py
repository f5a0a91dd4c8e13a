"""Each body of the table, by a tape and as a checkpoint: all that a step shows is as in plain PyTorch, bit for bit."""

import itertools

import pytest
from bodies import BODIES
from corpus import FEW_STEPS, assert_as_plain, assert_function_as_plain
from engine_testing import SETTINGS
from tiers import by_default

pytestmark = pytest.mark.filterwarnings("ignore::recompute.errors.PolicyWarning")


def claimed_of(setting):
    return [name for name, body in BODIES.items() if not body.ways or setting["action"] in body.ways]


BY_TAPE = claimed_of(SETTINGS["recompute"])
ON_THE_TAPE_ALONE = [name for name in BY_TAPE if BODIES[name].captured is None]
"""Of others the default tier claims it where they come to be captured, which they are by a tape."""
CHECKPOINTED = claimed_of(SETTINGS["checkpoint"])
CLAIMED_HERE_ALONE = [name for name in BODIES if name.startswith("capture: ")]
RULE_OF_FUNCTION = dict(zip((name for name in BODIES if not BODIES[name].ways), itertools.cycle(SETTINGS.values())))


@pytest.mark.parametrize("name", by_default(CHECKPOINTED, *CHECKPOINTED[::12], *CLAIMED_HERE_ALONE))
def test_a_checkpoint_does_what_plain_pytorch_does(name):
    assert_as_plain(BODIES[name], {**SETTINGS["checkpoint"], "capture": False}, FEW_STEPS)


@pytest.mark.parametrize("name", by_default(BY_TAPE, *ON_THE_TAPE_ALONE[1::12], *CLAIMED_HERE_ALONE))
def test_a_tape_does_what_plain_pytorch_does(name):
    assert_as_plain(BODIES[name], {**SETTINGS["recompute"], "capture": False}, FEW_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", claimed_of(SETTINGS["recompute"]))
def test_so_does_a_tape_under_other_rules(name):
    for setting in ("recompute with gemms", "checkpoint without attention"):
        assert_as_plain(BODIES[name]._replace(drops=False), {**SETTINGS[setting], "capture": False}, FEW_STEPS)


@pytest.mark.parametrize("name", by_default(list(RULE_OF_FUNCTION), *list(RULE_OF_FUNCTION)[::17]))
def test_so_does_a_decorated_function(name):
    """Each body under one rule: a function's runner is that of a module, under which each body runs by every rule."""
    assert_function_as_plain(BODIES[name], {**RULE_OF_FUNCTION[name], "capture": False})


@pytest.mark.slow
@pytest.mark.parametrize("name", claimed_of(SETTINGS["checkpoint"]))
def test_so_do_regions_in_a_region(name):
    """Its parts are under a rule, and so is what is around it."""
    for setting in (SETTINGS["checkpoint"], SETTINGS["recompute"]):
        if BODIES[name].ways and setting["action"] not in BODIES[name].ways:
            continue
        rule = {"match": ["inside.**", "inside"], **setting, "capture": False}
        assert_as_plain(BODIES[name]._replace(drops=False), rule, FEW_STEPS)
