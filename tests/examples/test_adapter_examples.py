"""The guide to adapters: its scripts train, and its tables are what ``recompute.estimate`` calculates."""

import re
import runpy
from pathlib import Path

import pytest
from sweep_testing import assert_falls
from tiers import slow

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"


@pytest.mark.parametrize(
    ("name", "package"), [("lora", "peft"), *slow(("qlora", "bitsandbytes"), ("float8", "torchao"))]
)
def test_it_learns_under_a_policy_in_under_50_lines(name, package, output_of):
    pytest.importorskip(package)
    output = output_of(f"adapters/{name}.py", "--steps", 3)
    assert_falls(output, 3)
    dropped, kept = (int(found.replace(",", "")) for found in re.findall(r"([\d,]+) (?:bytes dropped|kept)", output))
    assert dropped > 0.5 * kept
    assert (ADAPTERS / f"{name}.py").read_text(encoding="utf-8").count("\n") < 50


@pytest.mark.slow
@pytest.mark.parametrize(("task", "policy"), [("LoRA", "auto"), ("QLoRA", "full"), ("all weights, 8 GPUs", "full")])
def test_a_row_of_peaks_is_what_is_calculated(task, policy):
    pages = [(ADAPTERS / name).read_text(encoding="utf-8") for name in ("README.md", "../README.md")]
    (row,) = re.findall(rf"^\| {task} \| `{policy}` \| (.*) \|$", "\n".join(pages), re.MULTILINE)
    script = runpy.run_path(str(ADAPTERS / "peaks.py"))
    if "LoRA" in task:
        peak, spared = script["gib_of_lora"](policy, 8192)
        found = peak - spared if task == "QLoRA" else peak
    else:
        found = script["gib_of_all_weights"](policy, 8192, 8)
    assert float(row.split(" | ")[1]) == pytest.approx(found, abs=0.06)
