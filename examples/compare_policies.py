"""Compare policies on a model of your own: python examples/compare_policies.py, or on the command line

PYTHONPATH=examples recompute ablate --model compare_policies:make
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import recompute


class ConvBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.convolutions
        return x + second(nn.functional.silu(first(nn.functional.silu(self.norm(x)))))


class Classifier(nn.Module):
    def __init__(self, channels: int = 16, blocks: int = 4, classes: int = 10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((-2, -1))), labels)


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and a batch; called anew for each policy, with the same random state."""
    return Classifier(), {"images": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder for the numbers, a table and a plot")
    arguments = parser.parse_args()
    policies = {
        "elementwise": "elementwise",
        "blocks again": {"rules": [{"type": "ConvBlock", "action": "checkpoint"}]},
    }
    found = recompute.ablate(make, policies=policies, steps=4, out=arguments.out)
    print(found)
    print(f"elementwise holds {found.row('elementwise').activation_bytes_held:,} bytes for backward")
