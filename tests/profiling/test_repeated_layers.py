"""A few of the layers that are alike stand for all of them, where it is shown that they do."""

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiers import slow
from torch import nn

import recompute
from recompute.estimation.layer_stacks import find_stacks
from recompute.planning import solver
from recompute.profiling import measure_regions
from recompute.profiling.repeated_layers import representative


class Block(nn.Module):
    def __init__(self, width=16, kind="a"):
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = torch.tanh(self.up(x))
        return x + self.down(torch.sigmoid(y) if self.kind == "b" else y)


class Net(nn.Module):
    """way: "plain"; "all": the head is given what every layer returned; "counted": it asks for each layer by number."""

    def __init__(self, kinds, way="plain"):
        super().__init__()
        self.way, self.count = way, len(kinds)
        self.layers = nn.ModuleList(Block(kind=kind) for kind in kinds)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        found = []
        for number in range(self.count if self.way == "counted" else len(self.layers)):
            x = self.layers[number](x)
            found.append(x)
        return self.head(torch.stack(found).tanh().sum(0) if self.way == "all" else x)


def profiled(model, **options):
    return recompute.profile(model, torch.empty(4, 16), device="H200", **options)


def profiled_whole(model, monkeypatch, **options):
    with monkeypatch.context() as patched:
        patched.setattr(measure_regions, "representative", lambda run, match: [])
        return profiled(model, **options)


@pytest.mark.parametrize(
    ("kinds", "few", "stand_ins"),
    [
        ("a" * 9, 4, [0, *[2] * 7, 3]),
        ("b" + "a" * 10, 5, [0, 1, *[3] * 8, 4]),
        ("ab" * 7, 6, [0, *[3, 4] * 6, 5]),
        ("ab" * 7 + "a", 5, [0, *[3, 2] * 6, 3, 4]),
        ("aaab" * 6, 8, [0, 5, 6, *[3, 4, 5, 6] * 5, 7]),
    ],
)
def test_few_layers_show_all_kinds_and_each_stands_for_its_own(kinds, few, stand_ins):
    (found,) = find_stacks(Net(kinds), None)
    assert (found.path, len(found.kinds), found.few) == ("layers", len(kinds), few)
    assert found.stand_ins("whole") == stand_ins
    assert [kinds[index] for index in stand_ins] == list(kinds)


def test_a_sequence_of_equal_layers_is_a_list_of_layers_and_one_of_others_is_not():
    lists = nn.ModuleList(Block() for _ in range(9)), nn.ModuleList(Block(kind="b") for _ in range(9))
    model = nn.ModuleDict({"blocks": nn.Sequential(*lists[0]), "stages": nn.Sequential(*lists)})
    assert [found.path for found in find_stacks(model, None)] == ["blocks", "stages.0", "stages.1"]


@pytest.mark.parametrize("kinds", ["a" * 6, "ab" * 4, "abba", "aaaaaaaaaaaab"])
def test_where_few_do_not_show_it_all_runs(kinds):
    assert find_stacks(Net(kinds), None) == []


@pytest.mark.parametrize("kinds", ["a" * 9, *slow("a" * 11, "ab" * 7, "baaaaaaaaaa")])
def test_the_profile_is_that_of_all_layers(kinds, monkeypatch):
    found, whole = profiled(Net(kinds)), profiled_whole(Net(kinds), monkeypatch)
    assert found.places == whole.places
    assert found.static_nbytes == whole.static_nbytes
    for few, all_ in zip(found.regions, whole.regions, strict=True):
        assert few.gradient_nbytes == all_.gradient_nbytes
        for one, other in zip(few.choices, all_.choices, strict=True):
            assert (one.name, one.rule, one.held_nbytes) == (other.name, other.rule, other.held_nbytes)
            assert one.forward_seconds == pytest.approx(other.forward_seconds)
            assert one.backward_seconds == pytest.approx(other.backward_seconds)
    least = max(solver.floor(each).prediction.peak_nbytes for each in (found, whole))
    plans = [recompute.plan(each, budget=least) for each in (found, whole)]
    assert plans[0].predicted_step_seconds == pytest.approx(plans[1].predicted_step_seconds)


def test_deeper_models_run_no_more_layers(monkeypatch):
    forward, ran = Block.forward, []

    def counted(self, x):
        ran.append(self)
        return forward(self, x)

    monkeypatch.setattr(Block, "forward", counted)
    counts = []
    for depth in (9, 12):
        ran.clear()
        model = Net("a" * depth)
        profile = profiled(model)
        assert len(model.layers) == depth
        assert [place.layer for place in profile.places] == [None, *range(depth), None]
        counts.append(len(ran))
    assert counts[0] == counts[1] > 0


def test_of_layers_with_adapters_a_few_run_too(monkeypatch):
    """Of their frozen base nothing holds the first layer's input, which the model itself has all through forward.

    A cache would hold keys and values until forward ends, where attention, as in torch 2.11, does not save them.
    """
    with torch.device("meta"):
        base = models.make("llama", torch.bfloat16, num_hidden_layers=9, use_cache=False)
        model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    found = []
    monkeypatch.setattr(measure_regions, "representative", lambda *given: found.extend(representative(*given)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recompute.profile(model, models.batch("llama"), device="H200", kernels=False)
    assert [stack.few for stack in found] == [4]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["all", "counted"])
def test_a_model_whose_other_parts_see_how_many_layers_there_are_runs_whole(way, monkeypatch):
    assert find_stacks(Net("a" * 12, way), None)
    assert profiled(Net("a" * 12, way)) == profiled_whole(Net("a" * 12, way), monkeypatch)


def test_single_layers_that_are_named_are_those_that_run(monkeypatch):
    match = ["layers.3", "layers.7"]
    found = profiled(Net("a" * 9), match=match)
    assert [place.path for place in found.places][1:-1] == match
    assert found == profiled_whole(Net("a" * 9), monkeypatch, match=match)
