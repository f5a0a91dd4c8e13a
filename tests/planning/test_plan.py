"""Plans are ordinary policies that reach exactly the places they mean, and say what they predict."""

import json

import pytest
import tables
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recompute import load_policy
from recompute.attach.module_entries import module_entries
from recompute.errors import BudgetError, PlanError, PolicyError
from recompute.planning import solver
from recompute.planning.allowed_ways import only_allowed
from recompute.planning.make_plan import plan
from recompute.planning.plan import frontier_table
from recompute.planning.policy_of_plan import policy_of
from recompute.planning.prediction import choices_of
from recompute.policy.document import parse_document
from recompute.policy.matching import assign
from recompute.policy.rules import Policy, Rule
from recompute.profiling.cost_table import FirstSteps, Place, Profile


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(1, 1)
        self.extra = nn.ModuleList([nn.Identity()])

    def forward(self, x):
        return x


class Model(nn.Module):
    """Layers in lists, in lists of lists, in a Sequential, and by names."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.tower = nn.Sequential(*(Block() for _ in range(3)))
        self.mixed = nn.ModuleList(nn.Sequential(Block(), Block(), Block()) for _ in range(3))
        self.first = Block()

    def forward(self, x):
        return x


ENTRIES, _ = module_entries(Model(), "Model")
BLOCKS = [entry for entry in ENTRIES if entry.type == "Block" or (entry.path.endswith(".mlp") and ".1" in entry.path)]
BLOCKS = [
    entry
    for entry in BLOCKS
    if not any(other.path != entry.path and other.path.startswith(f"{entry.path}.") for other in BLOCKS)
]


def governed(policy):
    """For each module that the policy governs, its rule's fields beside what selects it."""
    found = assign(policy, ENTRIES)
    return {
        path: policy.rules[index].model_dump(mode="json", exclude_defaults=True, exclude={"match", "layers"})
        for path, index in found.items()
    }


@given(st.data(), st.booleans())
def test_a_policy_reaches_exactly_the_places_it_means(data, lists_known):
    chosen = data.draw(st.lists(st.sampled_from(BLOCKS), min_size=1, unique=True))
    places = [Place(path=entry.path, region=0, layer=entry.layer if lists_known else None) for entry in chosen]
    profile = tables.profile([tables.LAYER], places)
    assignment = tuple(data.draw(st.integers(0, 3)) for _ in places)
    policy = policy_of(profile, assignment)
    expected = {
        place.path: dict(choice.rule)
        for place, choice in zip(places, choices_of(profile, assignment), strict=True)
        if choice.rule is not None
    }
    assert governed(policy) == expected
    assert parse_document(Policy, policy.to_yaml()) == policy


def test_equal_neighbours_are_one_rule():
    profile = tables.transformer(8)
    policy = policy_of(profile, (0, 1, 1, 1, 3, 3, 0, 3, 3, 1))
    assert policy.rules == (
        Rule(match="model.layers.*", layers=["0-2"], action="recompute", via="hook"),
        Rule(match="model.layers.*", layers=["3-4", "6-7"], action="checkpoint"),
        Rule(match="lm_head", action="recompute", via="kernel"),
    )
    assert policy_of(profile, (0,) * 10).rules == ()


def test_what_equal_choices_of_two_regions_share_is_one_rule():
    places = [Place(path=f"layers.{i}", region=i % 2, layer=i) for i in range(6)]
    other = tables.LAYER.model_copy(update={"name": "Other"})
    policy = policy_of(tables.profile([tables.LAYER, other], places), (3,) * 6)
    assert policy.rules == (Rule(match="layers.*", layers="0-5", action="checkpoint"),)


def test_a_plan_is_a_policy_with_predictions(tmp_path):
    profile = tables.transformer(4)
    found = plan(profile, budget=1500)
    assert found.predicted_peak_bytes <= 1500
    assert found.predicted_step_seconds == solver.solve(profile, 1500).prediction.step_seconds
    found.save(tmp_path / "plan.yaml")
    policy = load_policy(tmp_path / "plan.yaml")
    assert policy == found.policy
    assert policy.description.startswith("planned for made by hand: budget 1.5 KiB, predicted peak ")
    document = json.loads(found.to_json())
    assert load_policy(document["policy"]) == found.policy
    assert document["predicted_peak_bytes"] == found.predicted_peak_bytes
    assert document["predicted_step_seconds"] == found.predicted_step_seconds
    assert [row["path"] for row in document["choices"]] == [place.path for place in profile.places]
    assert document["uniform"]["choice"] == found.uniform.choice
    assert "frontier" not in document


def test_a_plan_shows_itself():
    found = plan(tables.transformer(4), budget=1450, frontier=True)
    text = str(found)
    assert text.startswith("made by hand\nbudget 1.4 KiB; predicted: peak 1.4 KiB in the ")
    for line in (
        "| Layer     | keep     |       3 | model.layers.1-3 |",
        "best uniform policy: checkpoint, peak",
    ):
        assert line in text, text
    assert found.note == ""
    rows = frontier_table(found).splitlines()
    assert len(rows) == 2 + len(found.frontier)
    assert "1.00x" in rows[2]
    assert len(json.loads(found.to_json())["frontier"]) == len(found.frontier)


def test_more_than_is_needed_is_said():
    found = plan(tables.transformer(4), budget="1GiB")
    assert found.policy.rules == ()
    assert found.note == ("no plan is faster, even with more memory: this one needs 1.8 KiB of the 1.00 GiB")
    assert str(found).endswith(found.note)
    roofline = tables.transformer(4).model_copy(update={"source": "roofline"})
    assert plan(roofline, budget=1500).note.startswith("the profile was calculated, not measured")


class TestFirstSteps:
    @staticmethod
    def table(capacity):
        """Until they are captured, layers with kernels need 400 bytes more in backward."""
        first = FirstSteps(held_nbytes=60, forward_peak_nbytes=80, backward_peak_nbytes=490)

        def begun(choice):
            return choice.model_copy(update={"first_steps": first if choice.name == "kernel" else None})

        profile = tables.transformer(4, capacity=capacity)
        return profile.with_choices(lambda region: map(begun, region.choices))

    def test_they_may_be_over_the_budget_where_the_device_has_room(self):
        found = plan(self.table(capacity=10_000), budget=1400)
        assert (found.predicted_peak_bytes, found.most_bytes) == (1370, 1670)
        assert found.policy.rules == plan(tables.transformer(4), budget=1400).policy.rules
        assert "the first steps, in which layers are captured, take up to 1.6 KiB" in str(found)
        assert json.loads(found.to_json())["most_bytes"] == 1670

    @pytest.mark.parametrize("capacity", [1300, 1500, 1700])
    def test_they_fit_the_device(self, capacity):
        for budget in (1250, 1300, 1400, 1500, 1700):
            found = plan(self.table(capacity), budget=budget)
            assert found.predicted_peak_bytes <= budget
            assert found.most_bytes <= 0.98 * capacity

    def test_no_plan_is_made_whose_first_steps_do_not_fit(self):
        with pytest.raises(BudgetError, match=r"can be met, but not from the start: the first steps, .* take 1.6 KiB"):
            plan(self.table(capacity=1200), budget=1300)


def test_no_uniform_policy_may_fit():
    tight = solver.floor(tables.transformer(4)).prediction.peak_nbytes
    found = plan(tables.transformer(4), budget=tight)
    assert found.uniform is None, "make the table tighter"
    assert "no uniform policy fits this budget" in str(found)
    assert json.loads(found.to_json())["uniform"] is None


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (("keep",), [["keep"], ["keep"], ["keep"]]),
        (("keep", "hook", "checkpoint"), [["keep"], ["keep", "hook", "checkpoint"], ["keep"]]),
        (["kernel"], [["keep"], ["kernel"], ["chunked"]]),
        ((), [["keep"], ["keep"], ["keep"]]),
        (None, [["keep"], ["keep", "hook", "kernel", "checkpoint"], ["keep", "chunked"]]),
    ],
)
def test_only_what_is_allowed_is_chosen_from(allowed, names):
    profile = only_allowed(tables.transformer(2), allowed)
    assert [[choice.name for choice in region.choices] for region in profile.regions] == names


def test_codes_of_8_bits_are_chosen_only_where_they_are_named():
    """Their gradients are not exact."""
    exact, lossy = tables.HOOK, {**tables.HOOK, "compress": True}
    rules = {"hook": exact, "hook, in 8 bits": lossy, "both": {**lossy, "offload": True}}
    held = {"hook": 50, "hook, in 8 bits": 30, "both": 10}
    region = tables.region("r", *(tables.choice(name, rule, 1.0, held[name], 60, 60) for name, rule in rules.items()))
    profile = tables.profile([region], [Place(path="r", region=0)])
    names = {
        allowed: [choice.name for choice in only_allowed(profile, allowed).regions[0].choices]
        for allowed in (None, ("hook", "offload"), ("hook", "compress"), ("hook", "compress", "offload"))
    }
    assert list(names.values()) == [["hook"], ["hook"], ["hook", "hook, in 8 bits"], [*rules]]


def test_via_auto_counts_as_a_kernel():
    rules = [{"action": "recompute"}, {"action": "recompute", "via": "auto"}, {"action": "keep"}]
    region = tables.region("r", *(tables.choice(str(i), rule, 1.0, 1, 1, 1) for i, rule in enumerate(rules)))
    profile = tables.profile([region], [Place(path="r", region=0)])
    assert [choice.name for choice in only_allowed(profile, ["kernel"]).regions[0].choices] == ["0", "1"]
    assert [choice.name for choice in only_allowed(profile, ["keep", "hook"]).regions[0].choices] == ["2"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": "lots"}, BudgetError, "'lots' cannot be read"),
        ({"budget": "80%"}, BudgetError, "the capacity of the device is not known"),
        ({"budget": 10}, BudgetError, "is below static memory"),
        ({"budget": "1GiB", "allowed": ["hok"]}, PlanError, "allowed: expected some of keep, hook, kernel, checkpoint"),
        ({"budget": "1GiB", "allowed": "hook"}, PlanError, "allowed: expected a list such as"),
        ({"budget": "1GiB", "verify": True}, PlanError, "verify=True runs the plan, which needs a model and"),
    ],
)
def test_what_is_asked_for_wrongly_is_told(options, error, message):
    with pytest.raises(error) as caught:
        plan(tables.transformer(), **options)
    assert message in str(caught.value)


def test_a_model_is_not_profiled_for_a_budget_that_cannot_be_read():
    with pytest.raises(BudgetError, match="cannot be read"):
        plan(nn.Linear(1, 1), None, budget="much")
    with pytest.raises(PlanError, match="expected a batch on which Linear is profiled; found None"):
        plan(nn.Linear(1, 1), budget="80%")


def test_a_share_of_no_device_is_told_before_anything_is_measured():
    told = []
    with pytest.raises(BudgetError, match="the capacity of the device is not known"):
        plan(nn.Linear(1, 1), torch.ones(1), budget="80%", progress=lambda what, done, total: told.append(what))
    assert told == []


def test_a_share_is_of_the_profiles_device():
    assert plan(tables.transformer(capacity=3000), budget="50%").budget_nbytes == 1500


def test_a_rule_for_what_no_rule_can_match_is_refused(tmp_path):
    text = tables.transformer().model_dump_json(indent=1).replace('"path": "lm_head"', '"path": ""')
    (tmp_path / "profile.json").write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError, match="expected no rules for a place without a path"):
        Profile.load(tmp_path / "profile.json")
