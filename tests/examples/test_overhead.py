"""The benchmark of overheads: its ways compute the same and run again what they should; its tables hold all of them."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from tiny import counted_ops

SCRIPT = Path(__file__).parents[2] / "examples" / "ablation" / "overhead.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_each_way_computes_the_same_and_runs_again_what_it_should(script):
    torch.manual_seed(0)
    ways = script["decoder_layer"](CPU)
    assert list(ways) == list(script["WAYS"])
    hidden = ways[script["PLAIN"]].args[0]
    outcomes, ran = {}, {}
    for name, forward in ways.items():
        hidden.grad = None
        output = forward()
        with counted_ops() as counts:
            output.backward(torch.ones_like(output))
        outcomes[name] = output.detach(), hidden.grad
        ran[name] = counts["aten.mm"], counts.get("aten.silu", 0)
    plain = script["PLAIN"]
    for output, gradient in outcomes.values():
        assert torch.equal(output, outcomes[plain][0])
        assert torch.equal(gradient, outcomes[plain][1])
    mms = 2 * 7  # for the gradients of input and weight of seven Linears
    assert ran == {
        plain: (mms, 0),
        script["MODE"]: (mms, 0),
        script["CAPTURED"]: (mms, 1),
        script["TAPE"]: (mms, 1),
        "checkpoint, captured": (mms + 6, 1),  # nobody saved what the last Linear made
        "checkpoint": (mms + 6, 1),
        script["CHECKPOINT"]: (mms + 6, 1),
        script["SELECTIVE"]: (mms, 1),
    }


@pytest.mark.slow
def test_the_tables_hold_every_way(tmp_path, script, output_of):
    printed = output_of("ablation/overhead.py", "--repeats", 2, "--steps", 20, "--json", tmp_path / "figures.json")
    ways = list(script["WAYS"])
    results = json.loads((tmp_path / "figures.json").read_text())
    assert results["machine"]["torch"] == torch.__version__
    parts, layer, inside, growth = results["tables"].values()
    assert [row["way"] for row in parts] == ways[1:]
    assert [row["way"] for row in layer] == [row["way"] for row in growth] == ways
    assert [row["in the layer"] for row in inside] == list(script["INSIDE"])
    selective, checkpoint = (next(row for row in layer if row["way"] == way) for way in (ways[-1], ways[-2]))
    assert selective["step / selective"] == checkpoint["step / checkpoint"] == 1
    plain = layer[0]
    assert all(row["step, whole"] - plain["step, whole"] == pytest.approx(row["step, added"]) for row in layer[1:])
    assert all(printed.count(f"| {way} ") == (2 if way == "plain" else 3) for way in ways)
