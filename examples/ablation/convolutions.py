"""Times and memory of torchvision's convolutional networks under policies: python examples/ablation/convolutions.py

Whole steps of random images of 224 by 224 pixels, in bfloat16 by autocast, with channels last. It needs a GPU. It
prints a row for each model and way, and writes them to the file after --out, with the machine and the versions.

Time is a median of 12 steps, after 20 seconds of others: generated kernels are compiled meanwhile.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision.models as models
from tabulate import tabulate

import recompute
from recompute.counters import describe_machine

MODELS = {
    "resnet50": (models.resnet50, 64),
    "regnet_y_8gf": (models.regnet_y_8gf, 64),
    "efficientnet_v2_s": (lambda: models.efficientnet_v2_s(dropout=0.0, stochastic_depth_prob=0.0), 64),
    "mobilenet_v2": (lambda: models.mobilenet_v2(dropout=0.0), 128),
}
WAYS = ("none", "elementwise", "full", "torch.compile")
WARM_UP_SECONDS, STEPS = 20, 12
GIB = 2**30


def step(model, optimizer, images, labels):
    """Seconds, those until Python has called all of it, and bytes held after forward and at the peak."""
    torch.cuda.reset_peak_memory_stats()
    static = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    held = torch.cuda.memory_allocated() - static
    loss.backward()
    called = time.perf_counter() - began
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - static
    optimizer.step()
    optimizer.zero_grad()
    return seconds, called, held, peak


def measure(make, batch, way):
    torch.manual_seed(0)
    model = make().cuda().train().to(memory_format=torch.channels_last)
    if way == "torch.compile":
        model.compile()
    elif way != "none":
        recompute.apply(model, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    began = time.monotonic()
    while time.monotonic() - began < WARM_UP_SECONDS:
        step(model, optimizer, images, labels)
    seconds, called, held, peak = zip(*[step(model, optimizer, images, labels) for _ in range(STEPS)], strict=True)
    medians = {"ms": 1e3 * statistics.median(seconds), "cpu_ms": 1e3 * statistics.median(called)}
    return {**medians, "held_gib": held[-1] / GIB, "peak_gib": peak[-1] / GIB}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/convolutions.json"))
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("convolutions.py needs a CUDA device, and there is none")
    rows = []
    for name in options.only:
        for way in WAYS:
            rows.append({"model": name, "batch": MODELS[name][1], "way": way, **measure(*MODELS[name], way)})
            print(rows[-1], file=sys.stderr)
            torch.cuda.empty_cache()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": " ".join(sys.argv), "machine": describe_machine(torch.device("cuda")), "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".2f"))


if __name__ == "__main__":
    main()
