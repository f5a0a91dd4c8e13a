"""The sweep over architectures: its rows say what happened, to the bit, and it goes on where it stopped."""

import functools

import pytest
import torch
from sweep_testing import EXAMPLES, Drifting, raising, swept
from torch import nn

from recompute.errors import MutationError, NoEffectError

FOLDERS = ("architectures",)
THREE = ("llama", "vit", "t5")

sweep = functools.partial(swept, "architectures/sweep.py")


@pytest.mark.slow
def test_three_architectures_are_bitwise_and_a_second_run_goes_on(tmp_path):
    record, output = sweep(tmp_path, "--only", *THREE, "--presets", "elementwise", "auto", "--workers", "2")
    assert record["rows"].keys() == set(THREE)
    for row in record["rows"].values():
        assert row["finite"]
        reached, of = map(int, row["gradients"].split(" of "))
        assert reached == of
        for outcome in row["outcomes"].values():
            assert outcome["verdict"] == "bitwise"
            assert outcome["dropped_nbytes"] > 0
    assert "Of 3 architectures, 3 were compared" in output
    again, output = sweep(tmp_path, "--only", "llama", "vit", "--presets", "elementwise", "auto")
    assert "0 yet to try" in output
    assert again["rows"] == record["rows"]
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    for name in THREE:
        assert f"\n| {name} " in table


@pytest.mark.slow
def test_where_kernels_stand_in_gradients_are_close(tmp_path):
    record, _ = sweep(
        tmp_path,
        "--only",
        "llama",
        "bert",
        "--presets",
        str(EXAMPLES / "architectures" / "kernels.yaml"),
        "--dtype",
        "float64",
    )
    for row in record["rows"].values():
        (outcome,) = row["outcomes"].values()
        assert outcome["verdict"] == "close"
        assert outcome["dropped_nbytes"] > 0


def test_only_where_kernels_compute_may_gradients_be_close(part):
    stands_in = part("trials").stands_in
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [stands_in(preset, cpu) for preset in ("elementwise", "auto", "kernel")] == [False, False, True]
    assert [stands_in(preset, cuda) for preset in ("elementwise", "auto", "kernel")] == [False, True, True]


def test_two_values_that_are_not_numbers_are_the_same(part):
    relative = part("comparison").relative
    one = [torch.tensor([float("nan"), float("inf"), 3.0]), torch.tensor([4.0])]
    assert relative(one, one) == 0.0
    assert relative([one[0], torch.tensor([5.0])], one) == 0.25
    assert not relative([torch.tensor([0.0, float("inf"), 3.0]), one[1]], one) <= 1e-3


@pytest.mark.slow
def test_what_does_not_end_is_a_row(tmp_path):
    record, output = sweep(tmp_path, "--only", "llama", "--seconds", "0")
    assert record["rows"]["llama"]["not built"] == "no end within 0 s"
    assert "no end within 0 s" in output


def test_a_process_that_dies_under_a_preset_is_wrong(part):
    series, is_wrong = part("series"), part("comparison").is_wrong
    presets = ("elementwise", "full")
    item = series.Item("llama", {"class": "LlamaForCausalLM"}, None)
    done = {"elementwise": {"verdict": "bitwise"}}
    trial = series.Trial(item, None, 0.0, {"class": "LlamaForCausalLM", "outcomes": done})
    row = series.cut_short(trial, series.ended_by(-11), presets)
    assert row["outcomes"]["elementwise"] == done["elementwise"]
    assert (row["outcomes"]["full"]["verdict"], row["outcomes"]["full"]["detail"]) == ("wrong", "killed by SIGSEGV")
    assert is_wrong(row)
    trial.row = None  # it died before any preset: that is no fault of one
    row = series.cut_short(trial, series.ended_by(-11), presets)
    assert row == {"class": "LlamaForCausalLM", "not built": "killed by SIGSEGV"}
    assert not is_wrong(row)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (torch.tensor([0.0, 1.0, float("nan")]), True),
        (torch.tensor([-0.0, 1.0, float("nan")]), False),
        (torch.tensor([0.0, 1.0 + 2**-23, float("nan")]), False),
        (torch.tensor([0.0, 1.0, float("nan")]).double(), False),
        (torch.tensor([[0.0, 1.0, float("nan")]]), False),
    ],
)
def test_bits_are_compared(other, same, part):
    comparison = part("comparison")
    one = torch.tensor([0.0, 1.0, float("nan")])
    assert comparison.same_bits(one, other) is same
    assert (comparison.differences({"loss": other}, {"loss": one}) == []) is same
    assert comparison.differences({}, {"loss": one}) == ["loss: only in one"]


class Stub:
    """Stands for a ``Subject``: a model of one layer, which is given ones."""

    class_name = "stub"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, layer):
        self._layer = layer
        self.batch = {"input": torch.ones(2, 4)}

    def model(self):
        torch.manual_seed(0)
        return self._layer()


@pytest.mark.parametrize(
    ("layer", "verdict", "detail", "told"),
    [
        (nn.Linear, "idle", "nothing governed", 0),
        (Drifting, "wrong", "first step 1: loss", 0),
        (raising(NoEffectError("governs no module")), "idle", "nothing governed", 0),
        (raising(MutationError("changed in place")), "refused", "MutationError: changed in place", 1),
        (raising(ValueError("no such thing")), "wrong", "raises ValueError: no such thing in forward", 1),
    ],
)
def test_verdicts(layer, verdict, detail, told, part):
    trials = part("trials")
    plain, _ = trials.train(Stub(lambda: nn.Linear(4, 4)), None)
    errors = []
    Drifting.calls = 1
    under_policy = functools.partial(trials.train, Stub(lambda: layer(4, 4)), "none")
    outcome = part("comparison").outcome_of(under_policy, plain, errors.append)
    assert outcome.verdict == verdict
    assert detail in outcome.detail
    assert len(errors) == told
