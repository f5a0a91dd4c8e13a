"""The planner against every assignment there is, against SciPy's milp, and against sums done by hand."""

import math
import time
from itertools import pairwise, product

import numpy as np
import pytest
import tables
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from recompute.errors import BudgetError
from recompute.planning.prediction import Moment, choices_of, moments, predict
from recompute.planning.solver import floor, frontier, solve, uniforms
from recompute.profiling.cost_table import Place


@st.composite
def profiles(draw, most_places=6, most=12):
    """Small numbers, so that ties and tight budgets are common; peaks and what is held in any order.

    Some choices offload, and the host may have too little room for them.
    """
    nbytes = st.integers(0, most)

    def one(name):
        seconds, held = draw(st.integers(0, 9)) / 8, draw(nbytes)
        moved = draw(st.one_of(st.just(0), st.integers(0, held)))
        return tables.choice(f"c{name}", None, seconds, held, draw(nbytes), draw(nbytes), moved=moved)

    count = draw(st.integers(1, 3))
    regions = [
        tables.region(f"r{i}", *(one(c) for c in range(draw(st.integers(1, 4)))), gradient=draw(nbytes))
        for i in range(count)
    ]
    numbers = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=most_places))
    places = [Place(path=f"p.{i}", region=number) for i, number in enumerate(numbers)]
    link = draw(st.one_of(st.none(), st.builds(tables.link, host=st.integers(0, 2 * most))))
    static, optimizer_peak = draw(nbytes), draw(nbytes)
    options = {"static": static, "optimizer_peak": optimizer_peak, "optimizer_seconds": 0.5, "link": link}
    return tables.profile(regions, places, **options)


def every(profile):
    """Every assignment, even those that offload more than the host has room for."""
    return list(product(*(range(len(profile.regions[place.region].choices)) for place in profile.places)))


def every_within_the_host(profile):
    room = math.inf if profile.link is None else profile.link.host_nbytes
    return [a for a in every(profile) if sum(way.moved_nbytes for way in choices_of(profile, a)) <= room]


def peak_by_running(profile, assignment, in_flight=1, microbatches=1):
    """The peak of a step that is acted out, with one count of what is alive.

    So many forwards, then a backward and a forward in turn, and the optimizer. Of what offloads, each place knows the
    one before it, as ``engine.host.offload`` does. Of several microbatches each has a batch of its own, and gradients
    are there as if an earlier step had left them: a region's own count once more while it runs.
    """
    regions = [profile.regions[place.region] for place in profile.places]
    ways = [region.choices[i] for region, i in zip(regions, assignment, strict=True)]
    offloading = [i for i, way in enumerate(ways) if way.moved_nbytes]
    before = dict(zip(offloading[1:], offloading, strict=False))
    away = set()
    alive = peak = profile.static_nbytes
    several = microbatches > 1
    if several:
        alive += microbatches * profile.microbatch_nbytes + in_flight * profile.output_nbytes
        alive += sum(region.gradient_nbytes for region in regions)

    def forward():
        nonlocal alive, peak
        for i, way in enumerate(ways):
            peak = max(peak, alive + way.forward_peak_nbytes)
            alive += way.held_nbytes
            if i in before:
                away.add(before[i])
                alive -= ways[before[i]].moved_nbytes

    def backward():
        nonlocal alive, peak
        for i, way in reversed(list(enumerate(ways))):
            for wanted in away & {i, before.get(i)}:
                away.remove(wanted)
                alive += ways[wanted].moved_nbytes
            alive -= way.held_nbytes
            peak = max(peak, alive + way.backward_peak_nbytes)
            alive += 0 if several else regions[i].gradient_nbytes

    for _ in range(in_flight):
        forward()
    for _ in range(microbatches - in_flight):
        backward()
        forward()
    for _ in range(in_flight):
        backward()
    assert not away
    return max(peak, alive + profile.optimizer_peak_nbytes)


@given(profiles(), st.data())
def test_the_prediction_is_what_a_step_acted_out_takes(profile, data):
    assignment = data.draw(st.sampled_from(every(profile)))
    prediction = predict(profile, assignment)
    assert prediction.peak_nbytes == peak_by_running(profile, assignment)
    ways = choices_of(profile, assignment)
    moved = [way.moved_nbytes for way in ways if way.moved_nbytes]
    assert prediction.moved_nbytes == sum(moved)
    assert prediction.held_nbytes == sum(way.held_nbytes for way in ways) - sum(moved[:-1])  # the last one stays
    assert prediction.step_seconds == pytest.approx(0.5 + sum(w.forward_seconds + w.backward_seconds for w in ways))


def assert_none_is_better(profile, budget):
    """Of all assignments within the budget and the host, the solution is the fastest, and of these the leanest."""
    all_of_them = [predict(profile, assignment) for assignment in every_within_the_host(profile)]
    fitting = [other for other in all_of_them if other.peak_nbytes <= budget]
    if not fitting:
        with pytest.raises(BudgetError):
            solve(profile, budget)
        return
    solution = solve(profile, budget)
    assert solution.prediction == predict(profile, solution.assignment)
    assert solution.assignment in every_within_the_host(profile)
    assert solution.prediction.peak_nbytes <= budget
    fastest = min(other.step_seconds for other in fitting)
    assert solution.prediction.step_seconds == pytest.approx(fastest, abs=1e-10)
    leanest = min(other.peak_nbytes for other in fitting if other.step_seconds < fastest + 1e-10)
    assert solution.prediction.peak_nbytes == leanest


@given(profiles(), st.integers(0, 120))
def test_no_assignment_is_better_than_the_solution(profile, budget):
    assert_none_is_better(profile, budget)


@given(profiles())
def test_the_floor_is_the_least_peak_of_all(profile):
    possible = every_within_the_host(profile)
    if not possible:
        with pytest.raises(BudgetError, match=r"every plan offloads at least .*, and the host has room for"):
            floor(profile)
        return
    least = min(peak_by_running(profile, assignment) for assignment in possible)
    assert floor(profile).assignment in possible
    assert floor(profile).prediction == predict(profile, floor(profile).assignment)
    assert floor(profile).prediction.peak_nbytes == least
    assert solve(profile, least).prediction.peak_nbytes == least
    with pytest.raises(BudgetError):
        solve(profile, least - 1)


@given(profiles(most_places=5))
def test_the_frontier_is_all_that_nothing_undercuts(profile):
    possible = every_within_the_host(profile)
    assume(possible)
    pairs = {(round(p.step_seconds, 9), p.peak_nbytes) for p in (predict(profile, a) for a in possible)}
    best = sorted(p for p in pairs if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in pairs))
    found = [(round(s.prediction.step_seconds, 9), s.prediction.peak_nbytes) for s in frontier(profile, 1000)]
    assert found == best
    for points in (2, 3):
        few = [(round(s.prediction.step_seconds, 9), s.prediction.peak_nbytes) for s in frontier(profile, points)]
        assert len(few) <= points
        assert set(few) <= set(best)
        assert (few[0], few[-1]) == (best[0], best[-1])


@given(profiles(), st.integers(0, 120))
def test_uniform_policies_are_all_that_fit_the_fastest_first(profile, budget):
    """What only the first or the last place may run by is the way of no uniform policy."""
    fitting = {}
    for name in (f"c{i}" for i in range(4)):
        names = [[choice.name for choice in profile.regions[place.region].choices] for place in profile.places]
        if not any(name in row for row in names[1:-1] or names):
            continue
        assignment = tuple(row.index(name) if name in row else 0 for row in names)
        prediction = predict(profile, assignment)
        if prediction.peak_nbytes <= budget and assignment in every_within_the_host(profile):
            fitting[name] = prediction
    found = uniforms(profile, budget)
    assert {uniform.choice: uniform.solution.prediction for uniform in found} == fitting
    seconds = [uniform.solution.prediction.step_seconds for uniform in found]
    assert seconds == sorted(seconds)


def by_milp(profile, budget):
    """The fewest seconds by a mixed-integer program with a bit for each choice of each place, in MiB."""
    bits = [(i, c) for i, place in enumerate(profile.places) for c in profile.regions[place.region].choices]
    place_of = np.array([i for i, _ in bits])
    held, forward, backward = (
        np.array([getattr(c, f"{what}_nbytes") for _, c in bits]) / 2**20
        for what in ("held", "forward_peak", "backward_peak")
    )
    seconds = np.array([c.forward_seconds + c.backward_seconds for _, c in bits])
    room = (budget - profile.static_nbytes) / 2**20
    rows = []
    for i in range(len(profile.places)):
        above = sum(profile.regions[place.region].gradient_nbytes for place in profile.places[i + 1 :]) / 2**20
        here, before = place_of == i, place_of < i
        rows.append(LinearConstraint(here.astype(float), 1, 1))
        rows.append(LinearConstraint(held * before + forward * here, -np.inf, room))
        rows.append(LinearConstraint(held * before + backward * here, -np.inf, room - above))
    options = {"mip_rel_gap": 0.0}
    found = milp(seconds * 1e6, constraints=rows, integrality=np.ones(len(bits)), bounds=Bounds(0, 1), options=options)
    assert found.success, found.message
    return found.fun / 1e6 + profile.optimizer_seconds


def random_profile(rng, pattern, choices, *, kinds):
    """Bytes and seconds as of large layers: what is held less costs more time and a larger transient."""
    mib = 2**20
    regions = []
    for kind in range(kinds):
        held = np.sort(rng.integers(10 * mib, 800 * mib, choices))[::-1].tolist()
        seconds = (0.02 + np.cumsum(rng.random(choices)) * 1e-3).tolist()
        peaks = [h + int(rng.integers(50 * mib, 300 * mib)) + (800 * mib - h) // 2 for h in held]
        ways = [tables.choice(f"c{i}", None, seconds[i], held[i], held[i] + 10 * mib, peaks[i]) for i in range(choices)]
        regions.append(tables.region(f"r{kind}", *ways, gradient=440 * mib))
    places = [Place(path=f"layers.{i}", region=number) for i, number in enumerate(pattern)]
    return tables.profile(regions, places, static=10 * 2**30, optimizer_seconds=0.01)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_the_solution_is_that_of_a_mixed_integer_program(seed, share):
    rng = np.random.default_rng(seed)
    assert_as_by_milp(random_profile(rng, rng.integers(0, 3, 10).tolist(), 5, kinds=3), share)


@pytest.mark.parametrize("share", [0.6, 0.9])  # of less room the program takes seconds
def test_the_solution_for_equal_layers_is_that_of_a_mixed_integer_program(share):
    assert_as_by_milp(random_profile(np.random.default_rng(0), [0] * 20, 6, kinds=1), share)


def assert_as_by_milp(profile, share):
    """share: of what lies between the least budget and the one that everything fits."""
    least, most = floor(profile).prediction.peak_nbytes, frontier(profile, 2)[0].prediction.peak_nbytes
    budget = int(least + share * (most - least))
    assert solve(profile, budget).prediction.step_seconds == pytest.approx(by_milp(profile, budget), abs=1e-8)


PATTERNS = {
    "equal": [0] * 80,
    "alternating": [0, 1] * 40,
    "five to one": [int(i % 6 == 5) for i in range(80)],
    "all different": list(range(80)),
}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_80_layers_by_12_choices_take_no_time(pattern):
    profile = random_profile(np.random.default_rng(0), pattern, 12, kinds=max(pattern) + 1)
    least = floor(profile).prediction.peak_nbytes
    start = time.process_time()
    solution = solve(profile, least + 4 * 2**30)
    assert time.process_time() - start < 5
    assert solution.prediction.peak_nbytes <= least + 4 * 2**30


def test_moments_are_those_of_a_sum_by_hand():
    profile = tables.transformer(2)
    found = dict(moments(profile, (0, 0, 3, 1)))  # keep, keep, checkpoint, chunked
    assert found == {
        Moment("forward", 0): 1000 + 10,
        Moment("backward", 0): 1000 + 20 + (20 + 20 + 30),
        Moment("forward", 1): 1000 + 10 + 110,
        Moment("backward", 1): 1000 + 10 + 120 + (20 + 30),
        Moment("forward", 2): 1000 + 110 + 60,
        Moment("backward", 2): 1000 + 110 + 130 + 30,
        Moment("forward", 3): 1000 + 120 + 60,
        Moment("backward", 3): 1000 + 120 + 80,
        Moment("optimizer step"): 1000 + 100 + 40,
    }
    assert predict(profile, (0, 0, 3, 1)) == (1270, "backward of model.layers.1", 140, pytest.approx(8.75), 0)


def test_the_peak_is_named():
    profile = tables.transformer(1, optimizer_peak=2000)
    assert predict(profile, (0, 0, 0)).peak_moment == "optimizer step"
    alone = tables.profile([tables.EMBEDDING.model_copy(update={"gradient_nbytes": 0})], [Place(path="", region=0)])
    assert predict(alone, (0,)).peak_moment == "backward of embedding"


def test_equal_choices_are_neighbours():
    profile = tables.transformer(12)
    for solution in frontier(profile, 40):
        layers = solution.assignment[1:-1]
        changes = sum(a != b for a, b in pairwise(layers))
        assert changes == len(set(layers)) - 1, layers


@pytest.mark.parametrize(
    ("options", "budget", "texts"),
    [
        (
            {"static": 3 << 30},
            2 << 30,
            [
                "a budget of 2.00 GiB (2,147,483,648 bytes) is below static memory (parameters, optimizer states, the "
                "batch), which is 3.00 GiB",
                "more shards (FSDP, ZeRO)",
            ],
        ),
        ({}, 1001,
            ["cannot be met", "every plan needs at least 1.2 KiB (1,230 bytes)", "in the backward of model.layers.0"]),
        ({"optimizer_peak": 5 << 20}, 2 << 20,
            ["in the optimizer step", "an optimizer whose step needs less than 5.0 MiB more (fused=True)"]),
    ],
)  # fmt: skip
def test_an_impossible_budget_names_the_floor_and_what_helps(options, budget, texts):
    profile = tables.transformer(**options)
    with pytest.raises(BudgetError) as caught:
        solve(profile, budget)
    for text in texts:
        assert text in str(caught.value)


def test_a_head_that_is_the_floor_is_told_of_chunks():
    alone = tables.profile(
        [tables.HEAD.model_copy(update={"choices": tables.HEAD.choices[:1]})], [Place(path="h", region=0)]
    )
    with pytest.raises(BudgetError, match=r"in the backward of h .* a cross-entropy without logits"):
        solve(alone, 10)
