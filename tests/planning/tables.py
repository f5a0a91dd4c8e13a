"""Profiles made by hand, with the fewest numbers that a test has to give."""

from recompute.profiling.cost_table import Choice, HostLink, Place, Profile, RegionCosts
from recompute.profiling.step_trace import StepPart

CHECKPOINT = {"action": "checkpoint"}
HOOK = {"action": "recompute", "via": "hook"}
KERNEL = {"action": "recompute", "via": "kernel"}


def choice(name, rule, seconds, held, forward_peak, backward_peak, *, moved=0, storages=()):
    """A third of its seconds are forward's."""
    return Choice(
        name=name,
        rule=None if rule is None else dict(rule),
        forward_seconds=seconds / 3,
        backward_seconds=seconds - seconds / 3,
        held_nbytes=held,
        forward_peak_nbytes=forward_peak,
        backward_peak_nbytes=backward_peak,
        moved_nbytes=moved,
        storages=tuple(storages),
    )


def part(held, forward_peak, backward_peak):
    """The bytes that a step took at one place."""
    return StepPart("", held_nbytes=held, forward_peak_nbytes=forward_peak, backward_peak_nbytes=backward_peak)


def link(bandwidth=100.0, host=10**9):
    return HostLink(out_bandwidth=bandwidth, back_bandwidth=bandwidth, host_nbytes=host)


def region(name, *choices, gradient=0):
    return RegionCosts(name=name, choices=choices, gradient_nbytes=gradient)


def profile(regions, places, *, static=0, optimizer_peak=0, optimizer_seconds=0.0, capacity=None, link=None):
    return Profile(
        model="made by hand",
        machine={"gpu": None},
        source="measured",
        static_nbytes=static,
        regions=tuple(regions),
        places=tuple(places),
        optimizer_seconds=optimizer_seconds,
        optimizer_peak_nbytes=optimizer_peak,
        capacity_nbytes=capacity,
        link=link,
    )


LAYER = region(
    "Layer",
    choice("keep", None, 3.0, 100, 110, 120),
    choice("hook", HOOK, 3.5, 50, 90, 100),
    choice("kernel", KERNEL, 3.25, 60, 80, 90),
    choice("checkpoint", CHECKPOINT, 4.0, 10, 60, 130),
    gradient=20,
)
EMBEDDING = region("embedding", choice("keep", None, 0.25, 10, 10, 20), gradient=30)
HEAD = region("head", choice("keep", None, 1.0, 200, 250, 400), choice("chunked", KERNEL, 1.5, 20, 60, 80), gradient=30)


def transformer(layers=4, *, static=1000, optimizer_peak=40, **options):
    """An embedding, equal layers in a ModuleList, a head."""
    places = [
        Place(path="", region=0),
        *(Place(path=f"model.layers.{i}", region=1, layer=i) for i in range(layers)),
        Place(path="lm_head", region=2),
    ]
    return profile([EMBEDDING, LAYER, HEAD], places, static=static, optimizer_peak=optimizer_peak, **options)
