"""Decoder layers that kernels compute, in each way that they run, and what may become of them after a policy."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import models
import torch
import transformers
from models import HIDDEN, SHAPE
from tiny import rule, rules
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

import recompute
from recompute.attach.runners import region_in

STEPS_TO_SETTLE = 8
EVERYTHING = ["gemm", "convolution", "attention"]
PLAIN = {key: value for key, value in SHAPE.items() if key not in ("num_key_value_heads", "head_dim")}
"""Of a model whose heads are all alike."""
TAPES = {
    "gemm": {"rerun": "gemm"},
    "gemm, to the last byte": {"rerun": "gemm", "price": 0},
    "everything": {"rerun": EVERYTHING, "price": 0},
    "nothing": {"price": 1e18},
    "an op kept": {"rerun": "gemm", "keep": "aten.mm"},
    "a kernel kept": {"rerun": "gemm", "keep": "recompute.glu_forward"},
    "a limit": {"rerun": EVERYTHING, "hold": "96KiB"},
}
"""Options of rules under which ops of a layer run again around its kernels."""
WAYS = {"alone": {"capture": False}, "on a tape": {**TAPES["everything"], "capture": False}, "captured": {}}


def theirs(*paths):
    """Classes of transformers, by their model and name."""
    pairs = [path.split(".") for path in paths]
    return [getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name) for model, name in pairs]


def causal(name, **options):
    """A function that builds the causal model of a configuration of transformers."""
    config = getattr(transformers, f"{name}Config")
    return lambda: transformers.AutoModelForCausalLM.from_config(config(**options)).train()


def policy(via="kernel", **options):
    return rules(rule("*DecoderLayer", "recompute", via=via, **options))


def outcome(model, batch, *, autocast=False):
    """The loss of a step, and all gradients."""
    model.zero_grad()
    torch.manual_seed(0)
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def gradients(model, batch, *, autocast=False, **options):
    """``outcome`` without a cache. options: of the model's call."""
    return outcome(model, {**batch, "use_cache": False, **options}, autocast=autocast)


def run_in(options, make, **step):
    """A model that has settled under a policy with these options, and its handle. step: of ``gradients``."""
    model = make()
    handle = recompute.apply(model, policy(**options))
    if options.get("capture", True):
        settle(model, handle, **step)
    else:
        for _ in range(3):  # it learns which Linears read the first norm, and a tape follows a plan then
            gradients(model, models.batch("llama"), **step)
    return model, handle


def settle(model, handle, **step):
    """Take steps until all layers run as captured code."""
    for _ in range(STEPS_TO_SETTLE):
        gradients(model, models.batch("llama"), **step)
    regions = [region_in(attachment.runner) for attachment in handle._attachments]
    found = [region for region in regions if region is not None]
    assert found
    assert all(region.is_captured for region in found), "; ".join(region.failure for region in found)


class Adapter(nn.Module):
    """Adds to what a Linear gives."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.scale = linear, nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.linear(x) + self.scale * x.mean(-1, keepdim=True)


class Mean(nn.LayerNorm):
    """Has the weight of an RMSNorm, and computes something else."""


class Doubled(Tensor):
    """Doubles what a Linear gives of which it is the weight."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found.as_subclass(Tensor) * 2 if function is F.linear else found


class Loud(LlamaMLP):
    def __call__(self, x):
        return super().__call__(x) * 2


Change = Callable[[nn.Module], Any]


def at(path, change):
    """Change the module at ``path`` in each layer."""

    def run(model):
        for layer in model.model.layers:
            change(layer.get_submodule(path))

    return run


def replace(path, make):
    """Put another module in its place."""

    def run(model):
        for layer in model.model.layers:
            parent, _, name = path.rpartition(".")
            setattr(layer.get_submodule(parent), name, make(layer.get_submodule(path)))

    return run


def set_to(name, value):
    return lambda module: setattr(module, name, value)


def hook(module):
    module.register_forward_hook(lambda module, args, output: output * 1.5)


def hook_before(module):
    module.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))


def hook_backward(module):
    module.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.5,))


def patch(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.5


def without_gradients(module):
    module.forward = torch.no_grad()(module.forward)


CHANGES = {
    **{f"an adapter on {name}": replace(f"self_attn.{name}_proj", Adapter) for name in "qv"},
    "an adapter on down": replace("mlp.down_proj", Adapter),
    "another activation": replace("mlp.act_fn", lambda _: nn.GELU()),
    "another first norm": replace("input_layernorm", lambda _: Mean(HIDDEN)),
    "another second norm": replace("post_attention_layernorm", lambda _: Mean(HIDDEN)),
    "another MLP": replace("mlp", lambda mlp: nn.Sequential(mlp.gate_proj, nn.Tanh(), mlp.down_proj)),
    "another epsilon of the first norm": at("input_layernorm", set_to("variance_epsilon", 0.5)),
    "another epsilon of the second norm": at("post_attention_layernorm", set_to("variance_epsilon", 0.5)),
    "another scale of attention": at("self_attn", set_to("scaling", 0.7)),
    "another weight of a norm": at(
        "input_layernorm", lambda norm: setattr(norm, "weight", nn.Parameter(norm.weight.detach() * 1.5))
    ),
    "another weight of k": at(
        "self_attn.k_proj", lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.detach() * 1.5))
    ),
    "a weight of a class of its own": at(
        "mlp.gate_proj",
        lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.detach().as_subclass(Doubled))),
    ),
    "an MLP that is called otherwise": at("mlp", set_to("__class__", Loud)),
    **{f"{name} without gradients": at(f"self_attn.{name}_proj", without_gradients) for name in "qv"},
    "a hook on the first norm": at("input_layernorm", hook),
    "a hook on the second norm": at("post_attention_layernorm", hook),
    "a hook on k": at("self_attn.k_proj", hook),
    "a hook on gate": at("mlp.gate_proj", hook),
    "a hook on the activation": at("mlp.act_fn", hook),
    "a hook on the MLP": at("mlp", hook),
    "a hook on attention's output": at("self_attn.o_proj", hook),
    "a hook before the first norm": at("input_layernorm", hook_before),
    "a hook before the MLP": at("mlp", hook_before),
    "a hook on the backward of the second norm": at("post_attention_layernorm", hook_backward),
    "a hook on the backward of q": at("self_attn.q_proj", hook_backward),
    "a hook on the backward of attention's output": at("self_attn.o_proj", hook_backward),
    "a forward of its own on the first norm": at("input_layernorm", patch),
    "a forward of its own on the MLP": at("mlp", patch),
    "a forward of its own on v": at("self_attn.v_proj", patch),
    "a forward of its own on down": at("mlp.down_proj", patch),
    "a frozen norm": at("input_layernorm", lambda norm: norm.weight.requires_grad_(False)),
    "a frozen gate": at("mlp.gate_proj", lambda linear: linear.weight.requires_grad_(False)),
}
"""What may become of a model's layers after a policy was applied."""
