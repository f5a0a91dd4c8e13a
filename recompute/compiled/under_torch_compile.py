"""A rule under ``torch.compile``: the compiler gets a region, and a choice of the ops that run again in backward.

To the compiler a region is torch's checkpoint. The choice stands in the tags of selective checkpointing, and the
compiler's partitioner follows them. Ops are chosen as in eager code: an ``OpPolicy`` says of each op whether it may run
again, and one minimum cut over the region, at the rule's price, chooses among these.

Where regions nest, the cut of the outermost one decides, among the ops that the innermost rules let run again. All ops
run again inside of a plain checkpoint. ``action: keep`` ends the regions around it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recompute.compiled.partitioner import RegionPartitioner, merge_with_region_before
from recompute.engine.cut.op_policy import OpPolicy, op_policy
from recompute.engine.cut.ops import facts_of_call
from recompute.engine.scopes import keep_op
from recompute.engine.thread_state import is_tracing
from recompute.errors import UnsupportedError
from recompute.policy.meaning import Meaning, Mechanism
from recompute.policy.rules import PRICE


def is_compiling_training(module: nn.Module | None = None) -> bool:
    """Whether ``torch.compile`` is tracing this for training, so that it is the compiler that runs ops again.

    module: the one whose ``training`` flag counts; None for a function, which has none.
    """
    return (
        torch.compiler.is_compiling()
        and not is_tracing()
        and not torch.compiler._is_exporting_flag  # is_exporting() is always true to torch 2.11's compiler
        and torch.is_grad_enabled()
        and (module is None or module.training)
    )


def uncompiled(module: nn.Module) -> nn.Module:
    """The user's module inside of a compiled one; ``module`` itself if it is not compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # it takes seconds to load, and wraps nothing until then
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without ``torch.compile``, ``DistributedDataParallel``, ``DataParallel`` and PEFT's adapters."""
    while True:
        model = uncompiled(model)
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif callable(get := getattr(model, "get_base_model", None)):  # of PEFT
            return get()
        else:
            return model


class CompiledRegion:
    """A region of compiled code."""

    def __init__(self, op_policy: OpPolicy, refuse: Callable[[], None] | None):
        """refuse: raises where the rule cannot be lowered; None if it can."""
        self._contexts = partial(_contexts, op_policy)
        self._refuse = refuse

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """``forward(*args, **kwargs)`` as a region. Only a compiler may trace this; nothing may run it."""
        if self._refuse is not None:
            self._refuse()

        def region() -> Any:  # torch's checkpoint would take some of the keywords for its own
            return forward(*args, **kwargs)

        return checkpoint(region, use_reentrant=False, context_fn=self._contexts)


def compiled_region(meaning: Meaning) -> CompiledRegion:
    """The region of a rule. Rules that say the same of ops share one, so that one graph serves all layers."""
    refuse = _refuse_compression if meaning.compresses else None
    return _shared_region(op_policy(meaning), refuse if meaning.offloading is None else _refuse_offloading)


_shared_region = functools.cache(CompiledRegion)


class _Tracing:
    """The regions that AOTAutograd is tracing now, which one thread does at a time."""

    op_policies: ClassVar[list[OpPolicy]] = []
    """The op policies of the regions, the outermost first."""
    partitioner: ClassVar[RegionPartitioner | None] = None
    """The partitioner of the outermost region that would have a tape in eager code."""


def _applicable() -> Iterator[OpPolicy]:
    """The op policies that have a say here, the innermost first: as in eager code, up to the first ``keep``."""
    return itertools.takewhile(lambda each: each.mechanism is not Mechanism.KEEP, reversed(_Tracing.op_policies))


def _is_checkpoint(op_policy: OpPolicy) -> bool:
    return op_policy.mechanism is Mechanism.CHECKPOINT


def _checkpoint_policy(op: Any, args: tuple, kwargs: dict) -> CheckpointPolicy:
    """The innermost rule's answer for an op, unless a checkpoint around that runs the op again in any case."""
    innermost: bool | None = None
    for each in _applicable():
        if innermost is None or _is_checkpoint(each):
            may_rerun = _may_rerun(each, op, args, kwargs)
            if may_rerun and _is_checkpoint(each):
                return CheckpointPolicy.MUST_RECOMPUTE
            innermost = may_rerun if innermost is None else innermost
    return CheckpointPolicy.PREFER_RECOMPUTE if innermost else CheckpointPolicy.MUST_SAVE


def _may_rerun(op_policy: OpPolicy, op: Any, args: tuple, kwargs: dict) -> bool:
    if op is keep_op:  # recompute.keep(tensor, name)
        return not op_policy.keeps_tensor(args[1])
    return op_policy.may_rerun_compiled(op, args, kwargs)


def _policy_fn(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The answer that torch's selective checkpointing wants for each op. The cut may still keep the op's output."""
    is_saved = _checkpoint_policy(op, args, kwargs) is CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(op_policy: OpPolicy) -> tuple[Any, Any]:
    """The contexts of torch's checkpoint for a region and for its second run. AOTAutograd traces both."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is None:
        raise UnsupportedError(
            "torch.compile splits a module under a policy into several graphs, or its backend takes forward alone, so "
            "the policy has no effect there. torch.compile(..., fullgraph=True) says what breaks the graph: compile "
            "something smaller, or give that module no rule. If it is a key/value cache: use_cache=False, or "
            "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True. In place of the backend "
            "'eager': 'inductor' or 'aot_eager'."
        )
    first, second = create_selective_checkpoint_contexts(_policy_fn, allow_cache_entry_mutation=True)
    first.op_policy = op_policy  # torch accepts only modes of its own classes, or subclasses of these
    first.__class__ = _region_mode(type(first))  # type: ignore[arg-type]
    return first, second


@functools.cache
def _region_mode(mode: Any) -> type:
    """A subclass of ``mode``, torch's own for selective checkpointing, which also shows each op to a partitioner."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # it takes a second to load

    class RegionMode(mode):
        def __enter__(self) -> Any:
            is_outermost = all(each.mechanism is Mechanism.KEEP for each in _Tracing.op_policies)
            _Tracing.op_policies.append(self.op_policy)
            self.partitioner, proxies = None, get_proxy_mode()
            graph = None if proxies is None else proxies.tracer.graph
            if is_outermost and self.op_policy.mechanism is Mechanism.TAPE:
                limits = self.op_policy.price, self.op_policy.hold
                self.partitioner = _Tracing.partitioner = RegionPartitioner(graph, *limits)
            self.graph = graph if is_outermost and self.op_policy.mechanism is not Mechanism.KEEP else None
            self.start = 0 if graph is None else len(graph.nodes)
            self.sees_saves = proxies is None and _Tracing.partitioner is not None
            self.respect_saved_tensors_hooks = False  # torch 2.15 asks for this: the hooks are ours
            if self.sees_saves:
                self.calls_hooks = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
                torch._C._autograd._push_saved_tensors_default_hooks(_pack, _unpack)
            return super().__enter__()

        def __exit__(self, kind: Any, *error: Any) -> None:
            super().__exit__(kind, *error)
            if self.sees_saves:
                torch._C._autograd._pop_saved_tensors_default_hooks()
                torch._C._autograd._saved_tensors_hooks_set_tracing(self.calls_hooks)
            _Tracing.op_policies.pop()
            partitioner, self.partitioner = self.partitioner, None
            graph, self.graph = self.graph, None
            if partitioner is not None:
                _Tracing.partitioner = None
            if kind is not None:
                return
            if graph is None:
                if partitioner is not None:
                    partitioner.remember_saves()
                return
            saved = None
            if partitioner is not None:
                saved = partitioner.nodes_to_save()
                if saved is None and (self.op_policy.price > PRICE or self.op_policy.hold is not None):
                    raise UnsupportedError(_SAVES_ARE_UNKNOWN)
            for node in saved or ():
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            merge_with_region_before(graph, self.start, is_cut=saved is not None)

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op in _NEED_LAYOUTS:
                _keep_layouts()
            if self.partitioner is None:
                return super().__torch_dispatch__(op, types, args, kwargs)
            kwargs = kwargs or {}
            self.partitioner.before_op()
            output = super().__torch_dispatch__(op, types, args, kwargs)
            known, policy = facts_of_call(op, args, kwargs), _checkpoint_policy(op, args, kwargs)
            self.partitioner.after_op(op, known, policy, args, kwargs, output)
            return output

    return RegionMode


_NEED_LAYOUTS = (torch.ops.aten._grouped_mm.default, torch.ops.aten._scaled_grouped_mm.default)
"""GEMMs of the experts of a mixture, which take operands of other layouts only if each expert has 8 tokens, or 16, …

On CUDA a device assertion fails otherwise: "dynamic dimension byte size to be non-negative multiple of 16".
"""


def _keep_layouts() -> None:
    """Have Inductor pass operands to these GEMMs that lie in memory as in eager code.

    Backward reads some of them transposed. Inductor makes contiguous copies there of operands that run again (torch
    2.11 to 2.14), and none of operands that forward has saved.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")  # else Inductor is not the backend
    if lowering is not None:
        for op in _NEED_LAYOUTS:
            lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)


def _pack(tensor: Tensor) -> None:
    """The pack hook while AOTAutograd only looks at forward: shows saved tensors to the partitioner."""
    if _Tracing.partitioner is not None and not any(map(_is_checkpoint, _applicable())):
        _Tracing.partitioner.see_save(tensor)


def _unpack(packed: None) -> Tensor:
    raise AssertionError("AOTAutograd has run backward of a forward that it only looked at")


_SAVES_ARE_UNKNOWN = (
    "torch.compile cannot follow a rule with price or hold here, because it does not trace the module's ops before "
    "it compiles them. Remove the key (rerun and keep say which ops run again), or compile the module by itself."
)


def _refusal(message: str) -> Callable[[], None]:
    """A function that raises, in the place of one that cannot be compiled."""

    def refuse() -> None:
        raise UnsupportedError(message)

    # torch.compiler.disable does this too, but would load the compiler.
    refuse._torchdynamo_disable = True  # type: ignore[attr-defined]
    refuse._torchdynamo_disable_msg = message  # type: ignore[attr-defined]
    return refuse


refuse_first_run = _refusal(
    "an instance of a class that is decorated with recompute gets its policy in its first run, which cannot be "
    "compiled. Run it once before you compile it, or decorate the instance."
)
_UNSEEN = (
    "a rule that {} governs a module in compiled code, where saved-tensor hooks do not run. Compile less than that "
    "module, or give it a rule that does not {}."
)
_refuse_offloading = _refusal(_UNSEEN.format("offloads", "offload"))
_refuse_compression = _refusal(_UNSEEN.format("compresses", "compress"))
