"""What a model is compared under: a policy of ours, or a peer, which is another library's means to the same end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama

from recompute.attach.apply import AppliedPolicy, PolicyLike, apply
from recompute.errors import AblationError
from recompute.policy.document import nearest
from recompute.policy.loading import load_policy
from recompute.profiling.regions import find_regions

BASELINE = "none"
"""The policy that every other one is compared with: the model as it is, with nothing attached."""

COMPILED = "+compile"
"""Follows a policy's name where every layer is compiled, too."""

EXACT_PEERS = (
    "torch-checkpoint", "torch-selective", "torch-save-on-cpu", "torch-remat", "torch-remat-full", "torchtune-offload",
)  # fmt: skip
"""The peers that promise the baseline's bits. The others round in their own ways."""

Match = str | Sequence[str] | None
_MEMORY_BUDGET = re.compile(r"torch-budget-(0\.\d+)")


def is_peer(name: str) -> bool:
    """Whether it is a ``Peer``, not a policy."""
    return name in _WAYS or _MEMORY_BUDGET.fullmatch(name) is not None


def _known_peer(name: str) -> str:
    if not is_peer(name):
        raise ValueError(f"expected one of {', '.join(_WAYS)}, or torch-budget-0.5 (any share){nearest(name, _WAYS)}")
    return name


Peer = Annotated[str, AfterValidator(_known_peer)]
"""The name of what another library offers, each for every decoder layer of the model: see examples/ablation."""


@contextmanager
def under(
    policy: str,
    model: nn.Module,
    policies: Mapping[str, PolicyLike] = MappingProxyType({}),
    match: Match = None,
) -> Iterator[AppliedPolicy | None]:
    """Put the model under a policy or a peer. It stays so after the block, except for what a peer changes elsewhere.

    The block gets the handle of a policy of ours in eager code; None of what else there is.

    policy: a name in ``policies``, which is no peer's; or the name of a peer or a preset, or a policy file.
    match: globs over the paths of the modules that a peer takes for layers; None: by the names of their classes.
    """
    name = policy.removesuffix(COMPILED)
    with ExitStack() as stack:
        if is_peer(name):
            _WAYS.get(name, _compile)(name, model, match, stack)
            yield None
            return
        handle = None if name == BASELINE else apply(model, load_policy(policies.get(name, name)))
        if name != policy:
            _compile(name, model, match, stack)
        yield handle if name == policy else None


def without_adapters(model: Any) -> Any:
    """The model that PEFT has put adapters into; any other one itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The part of a transformers model below its head; None for any other model, and for one without a head."""
    model = without_adapters(model)
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    return decoder if isinstance(decoder, nn.Module) and decoder is not model else None


def _wrap_layers(model: nn.Module, match: Match, wrapped: Callable[[Any], Any]) -> None:
    """Replace each layer's forward by ``wrapped(forward)``."""
    layers: list[Any] = list(find_regions(model, match).values())
    for layer in layers:
        layer.forward = wrapped(layer.forward)


def _checkpoint(peer: str, model: nn.Module, match: Match, stack: ExitStack) -> None:
    options: dict[str, Any] = {"context_fn": _SELECTIVE} if peer == "torch-selective" else {}
    _wrap_layers(model, match, lambda forward: partial(checkpoint, forward, use_reentrant=False, **options))


def _offload(peer: str, model: nn.Module, match: Match, stack: ExitStack) -> None:
    offloading: Any = save_on_cpu(torch.cuda.is_available())  # one for all layers and steps: torchtune's counts them
    if peer == "torchtune-offload":
        training = _imported(peer, "torchtune.training", "torchtune torchao")
        if not torch.cuda.is_available():
            raise AblationError(f"the peer {peer} needs a CUDA device; torch finds none")
        offloading = training.OffloadActivations()

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with offloading:
            return forward(*args, **kwargs)

    _wrap_layers(model, match, lambda forward: partial(run, forward))


def _remat(peer: str, model: nn.Module, match: Match, stack: ExitStack) -> None:
    """torch_remat puts no random state back: where what runs again draws, it computes other gradients."""
    library = _imported(peer, "torch_remat", "torch-remat")
    numbers = itertools.count()  # a region's name is its number in a run of the layer: equal when it runs again

    def saved(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = library.region(function, f"region {next(numbers)}", recompute=False)(*args, **kwargs)
            library.recompute_needs_tensor(output)
            return output

        return run

    def numbered(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal numbers
        numbers = itertools.count()
        return forward(*args, **kwargs)

    if peer == "torch-remat":
        stack.callback(setattr, F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = saved(F.scaled_dot_product_attention)
        for layer in find_regions(model, match).values():
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    vars(module)["forward"] = saved(module.forward)
    _wrap_layers(model, match, lambda forward: library.checkpoint()(partial(numbered, forward)))


def _compile(peer: str, model: nn.Module, match: Match, stack: ExitStack) -> None:
    budget = _MEMORY_BUDGET.fullmatch(peer)
    stack.callback(torch.compiler.reset)
    stack.enter_context(functorch_config.patch(activation_memory_budget=float(budget[1]) if budget else 1.0))
    for path, layer in find_regions(model, match).items():
        if peer == "torch-compile-selective":  # a checkpoint as a replaced forward would run uncompiled
            layer = checkpoint_wrapper(layer, context_fn=_SELECTIVE)
            model.set_submodule(path, layer)
        layer.compile()


def _cut_cross_entropy(peer: str, model: Any, match: Match, stack: ExitStack) -> None:
    """Have forward compute its loss from the decoder's output and the head's weight, by the package's own function."""
    library = _imported(peer, "cut_cross_entropy", peer)
    model, decoder = without_adapters(model), decoder_of(model)
    head = model.get_output_embeddings() if decoder is not None else None
    if decoder is None or not isinstance(head, nn.Linear):
        raise AblationError(
            f"the peer {peer} needs a model of transformers with a decoder and a Linear head; found "
            f"{type(model).__name__}"
        )
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    bias = {} if head.bias is None else {"bias": head.bias}  # the package's release 25.1 does not know a bias

    def forward(input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden = decoder(input_ids=input_ids).last_hidden_state
        loss = library.linear_cross_entropy(hidden, head.weight, labels, softcap=softcap, shift=True, **bias)
        return CausalLMOutput(loss=loss)

    model.forward = forward


def _liger(peer: str, model: nn.Module, match: Match, stack: ExitStack) -> None:
    """Liger changes the model, and a module of transformers for all models: that one is put back as it was."""
    model = without_adapters(model)
    if not isinstance(model, LlamaForCausalLM):
        raise AblationError(f"the peer {peer} needs transformers' LlamaForCausalLM; found {type(model).__name__}")
    liger = _imported(peer, "liger_kernel.transformers", "liger-kernel")
    stack.callback(vars(modeling_llama).update, dict(vars(modeling_llama)))
    has_loss = peer == "liger-loss"
    liger.apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=has_loss, model=model)


def _imported(peer: str, module: str, packages: str) -> Any:
    """The module of a peer. packages: what to install for it, first the one that is named."""
    try:
        return import_module(module)
    except ImportError as error:
        is_absent = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        needed = f"needs the package {packages.split()[0]}" if is_absent else f"cannot import {module} ({error})"
        raise AblationError(f"the peer {peer} {needed}. Run pip install {packages}") from error


_WAYS: dict[str, Callable[[str, Any, Match, ExitStack], None]] = {
    **dict.fromkeys(("torch-checkpoint", "torch-selective"), _checkpoint),
    **dict.fromkeys(("torch-save-on-cpu", "torchtune-offload"), _offload),
    **dict.fromkeys(("torch-remat", "torch-remat-full"), _remat),
    **dict.fromkeys(("torch-compile", "torch-compile-selective"), _compile),
    **dict.fromkeys(("liger", "liger-loss"), _liger),
    "cut-cross-entropy": _cut_cross_entropy,
}
"""These put a model under a peer. The stack takes back what they change elsewhere."""

_SELECTIVE = partial(
    create_selective_checkpoint_contexts,
    [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    ],
)
