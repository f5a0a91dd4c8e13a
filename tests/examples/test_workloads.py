"""The sweep over workloads: what is recorded of each step, whoever runs it, and what a row says."""

import configparser
import json

import pytest
import torch
from sweep_testing import EXAMPLES, Drifting, raising, swept
from torch import nn

FOLDERS = ("architectures", "workloads")
FILES = ("plain", "loops", "adapters", "quantization", "diffusion", "vision", "trainers", "alignment")


def row_of(part, train, *presets):
    """What the sweep says of training that needs no package but torch."""
    module = part("workload")
    *_, row = module.examine(module.Workload("torch", ("torch",), train), presets, torch.device("cpu"), torch.float32)
    return row


@pytest.mark.parametrize("name", ["pre-norm blocks", "weights that blocks share", "convolutions with batch norm"])
def test_a_workload_of_torch_is_bitwise_and_holds_less(name, part):
    part("plain")
    row = row_of(part, part("workload").WORKLOADS[f"torch: {name}"].train, "elementwise", "full")
    assert row["finite"]
    for outcome in row["outcomes"].values():
        assert outcome["verdict"] == "bitwise", outcome["detail"]
        assert 0 < outcome["held"] < 1
        assert outcome["time"] > 0


def test_int8_layers_of_bitsandbytes_which_move_their_codes_in_the_first_step_are_bitwise(part):
    pytest.importorskip("bitsandbytes")
    part("quantization")
    row = row_of(part, part("workload").WORKLOADS["bitsandbytes: int8 weights beside LoRA"].train, "full")
    assert row["outcomes"]["full"]["verdict"] == "bitwise", row


@pytest.mark.parametrize(
    ("layer", "key", "said"),
    [
        (Drifting, "differs without a policy", "step 1: loss"),
        (raising(ValueError("no such thing")), "not built", "ValueError: no such thing"),
    ],
)
def test_what_cannot_be_compared_says_why(layer, key, said, part):
    def train(run):
        model = run.govern(layer(4, 4))
        run.train(model, lambda: model(torch.ones(2, 4)).sum())

    row = row_of(part, train, "full")
    assert said in row[key]
    assert "outcomes" not in row


def test_each_backward_and_each_step_of_any_loop_is_recorded(part):
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def closure():
        optimizer.zero_grad()
        for scale in (1.0, 2.0):
            loss = model(torch.full((3, 4), scale)).sum()
            loss.backward()
        return loss

    with part("comparison").Recording(model, 3) as recording:
        for _ in range(3):
            optimizer.step(closure)
    steps = [(f"step {step}: loss", f"step {step}: loss 2", f"step {step}: gradient of weight") for step in (1, 2, 3)]
    assert list(recording.trace) == [*(name for names in steps for name in names), "after: weight"]
    for step in (1, 2, 3):
        assert recording.trace[f"step {step}: gradient of weight"].tolist() == [[9.0] * 4]
    assert len(recording.seconds) == 2  # the last step is not timed: its memory is counted
    assert recording.held_nbytes >= 48  # the input that the weight's gradient needs


def test_the_extra_brings_the_package_of_each_workload(part):
    for file in FILES:
        part(file)
    workloads = part("workload").WORKLOADS
    assert len(workloads) >= 60
    setup = configparser.ConfigParser()
    setup.read(EXAMPLES.parent / "setup.cfg")
    brought = {line.partition(">=")[0] for line in setup["options.extras_require"]["workloads"].split()}
    brought |= {line.partition(">=")[0] for line in setup["options"]["install_requires"].split()}
    assert {name for each in workloads.values() for name in each.needs} <= brought


def test_the_guide_has_the_counts_of_the_record(part):
    record = json.loads((EXAMPLES / "workloads" / "results" / "cpu" / "results.json").read_text(encoding="utf-8"))
    assert part("sweep_report").groups(record) in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_script_makes_the_table(tmp_path):
    names = ["torch: LSTM", "torch: several backwards through one graph"]
    record, _ = swept("workloads/workloads.py", tmp_path, "--only", *names)
    assert sorted(record["rows"]) == names
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| torch     |           2 |" in table
    for name in names:
        assert f"\n| {name} " in table
