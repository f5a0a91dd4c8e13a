"""What the tests of layers share that run as captured code in which kernels are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recompute.attach.apply import AppliedPolicy
from recompute.attach.runners import region_in
from recompute.compiled import captured_function

STEPS_TO_SETTLE = 8


def policy(**options: Any) -> dict[str, Any]:
    return {"rules": [{"type": "*DecoderLayer", "action": "recompute", "via": "kernel", **options}]}


def gradients(
    model: nn.Module, batch: Mapping[str, Tensor], *, autocast: bool = False, use_cache: bool = False
) -> list[Tensor]:
    """The loss of a step, and all gradients."""
    model.zero_grad()
    torch.manual_seed(0)
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model(**batch, use_cache=use_cache).loss
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def captured(model: nn.Module, batch: Mapping[str, Tensor], handle: AppliedPolicy, **options: bool) -> None:
    """Take steps until all layers run as captured code. options: of ``gradients``."""
    for _ in range(STEPS_TO_SETTLE):
        gradients(model, batch, **options)
    regions = [region_in(attachment.runner) for attachment in handle._attachments]
    found = [region for region in regions if region is not None]
    assert found
    assert all(region.is_captured for region in found), "; ".join(region.failure for region in found)


@contextmanager
def runs_code(storages: dict[int, int] | None = None) -> Iterator[Callable[[], int]]:
    """Counts the frames that run as captured code.

    storages: gets the bytes of what these hold for backward, by the address of the storage.
    """
    frames = 0
    run = captured_function.CapturedFrame.run

    def counted(frame: Any) -> Any:
        nonlocal frames
        frames += 1
        outputs = run(frame)
        if storages is not None:
            held = [*frame.saved, *frame._kept, *(each[0] for each in frame._held if each is not None)]
            for tensor in held:
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_function.CapturedFrame, "run", counted)
        yield lambda: frames


class Adapter(nn.Module):
    """Adds to what a Linear gives."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear, self.scale = linear, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * x.mean(-1, keepdim=True)


class Mean(nn.LayerNorm):
    """Has the weight of an RMSNorm, and computes something else."""


Change = Callable[[nn.Module], Any]


def at(path: str, change: Callable[[nn.Module, str], Any]) -> Change:
    """Change what is at ``path`` in each layer, given the module that has it, and its name there."""

    def run(model: nn.Module) -> None:
        for layer in model.model.layers:
            parent, _, name = path.rpartition(".")
            change(layer.get_submodule(parent), name)

    return run


def adapt(parent: nn.Module, name: str) -> None:
    setattr(parent, name, Adapter(getattr(parent, name)))


def hook(parent: nn.Module, name: str) -> None:
    getattr(parent, name).register_forward_hook(lambda module, args, output: output * 1.5)


def hook_before(parent: nn.Module, name: str) -> None:
    getattr(parent, name).register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))


def hook_backward(parent: nn.Module, name: str) -> None:
    getattr(parent, name).register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.5,))


def patch(parent: nn.Module, name: str) -> None:
    module = getattr(parent, name)
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.5


def freeze(parent: nn.Module, name: str) -> None:
    getattr(parent, name).weight.requires_grad_(False)


def without_gradients(parent: nn.Module, name: str) -> None:
    module = getattr(parent, name)
    module.forward = torch.no_grad()(module.forward)


def narrow(parent: nn.Module, name: str) -> None:
    module = getattr(parent, name)
    module.weight = nn.Parameter(module.weight.detach().clone() * 1.5)


CHANGES: dict[str, Change] = {
    "an adapter on q": at("self_attn.q_proj", adapt),
    "an adapter on v": at("self_attn.v_proj", adapt),
    "an adapter on down": at("mlp.down_proj", adapt),
    "another activation": at("mlp.act_fn", lambda parent, name: setattr(parent, name, nn.GELU())),
    "another first norm": at(
        "input_layernorm", lambda parent, name: setattr(parent, name, Mean(getattr(parent, name).weight.numel()))
    ),
    "another second norm": at(
        "post_attention_layernorm",
        lambda parent, name: setattr(parent, name, Mean(getattr(parent, name).weight.numel())),
    ),
    "another weight of a norm": at("input_layernorm", narrow),
    "another weight of k": at("self_attn.k_proj", narrow),
    "q without gradients": at("self_attn.q_proj", without_gradients),
    "a hook on the first norm": at("input_layernorm", hook),
    "a hook on the second norm": at("post_attention_layernorm", hook),
    "a hook before the first norm": at("input_layernorm", hook_before),
    "a hook on the second norm's backward": at("post_attention_layernorm", hook_backward),
    "a hook on k": at("self_attn.k_proj", hook),
    "a hook on gate": at("mlp.gate_proj", hook),
    "a hook before the MLP": at("mlp", hook_before),
    "a hook on the MLP": at("mlp", hook),
    "a hook on the activation": at("mlp.act_fn", hook),
    "a hook on attention's output": at("self_attn.o_proj", hook),
    "a forward of its own on the first norm": at("input_layernorm", patch),
    "a forward of its own on the MLP": at("mlp", patch),
    "a forward of its own on v": at("self_attn.v_proj", patch),
    "a forward of its own on down": at("mlp.down_proj", patch),
    "a frozen norm": at("input_layernorm", freeze),
    "a frozen gate": at("mlp.gate_proj", freeze),
    "another scale of attention": at("self_attn.q_proj", lambda parent, name: setattr(parent, "scaling", 0.7)),
}
"""What may become of a model's layers after a policy was applied."""
