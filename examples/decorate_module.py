"""Decorate a class, a module and a function, and see what each holds for backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import recompute
from recompute.counters import step_memory


class Block(nn.Module):
    """A pre-norm gated MLP: (..., 128) -> (..., 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(128)
        self.gate, self.up = nn.Linear(128, 512), nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


NORMS = recompute.Policy(rules=[recompute.Rule(type="RMSNorm", action="recompute", via="hook")])


# A policy says what is regenerated: here the norm's output, which gate and up would hold.
@recompute.recompute(policy=NORMS)
class LeanBlock(Block):
    pass


# Without a policy all that costs little is regenerated; no bit of any gradient changes.
@recompute.recompute
def lean_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def held_nbytes(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    return step_memory(lambda: function(*inputs).sum(), torch.device("cpu")).activation_bytes_held


def show(what: str, plain: Callable[..., Tensor], lean: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Print the bytes held after forward by both, which compute the same."""
    assert torch.equal(plain(*inputs), lean(*inputs))
    before, after = (held_nbytes(function, *inputs) for function in (plain, lean))
    print(f"{what}: {before:,} bytes held without, {after:,} with")


def main() -> None:
    torch.manual_seed(0)
    x, gate, up = (torch.randn(256, size, requires_grad=True) for size in (128, 512, 512))

    block, lean_block = Block(), LeanBlock()
    lean_block.load_state_dict(block.state_dict())
    show("a class", block, lean_block, x)

    module = Block()
    lean_module = recompute.recompute(Block())  # in place, and returned
    lean_module.load_state_dict(module.state_dict())
    show("a module", module, lean_module, x)

    show("a function", swiglu, lean_swiglu, gate, up)


if __name__ == "__main__":
    main()
