"""What a rule is to ``torch.compile``: a region, some of whose ops the compiler runs again in backward.

The compiler knows a region by torch's checkpoint around it, and what runs again there by the tags of selective
checkpointing, which its partitioner follows. As in eager code, a rule judges each op, and of those that may run again
one minimum cut over the region, at the rule's price, says which do. Where regions nest, the outermost one's cut decides
on what the innermost rules let; all runs again in a plain checkpoint; and ``action: keep`` ends what is around it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recompute.compiled.guards import is_tracing
from recompute.compiled.traced_region import Again, Traced, join
from recompute.engine.cut.ops import FACTORY, STATISTICS, Kind, facts_of_call
from recompute.engine.keeping import keep_op
from recompute.errors import UnsupportedError
from recompute.policy.rules import FAMILIES, PRICE, Rule

Forward = Callable[..., Any]


def is_lowered(module: nn.Module | None = None) -> bool:
    """Whether this is being compiled, in training: what a policy does is then for the compiler to do."""
    return (
        torch.compiler.is_compiling()
        and not is_tracing()
        and not torch.compiler._is_exporting_flag  # is_exporting() is always true to torch 2.11's compiler
        and torch.is_grad_enabled()
        and (module is None or module.training)
    )


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` has wrapped, if it has."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # which takes seconds to load, and wraps nothing until then
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def bare(model: nn.Module) -> nn.Module:
    """The model that was written as one: without what compiles it, or wraps it for parallelism or adapters."""
    while True:
        model = uncompiled(model)
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif callable(get := getattr(model, "get_base_model", None)):  # of PEFT
            return get()
        else:
            return model


class Lowering:
    """A rule, for compiled code. Layers whose rules say the same share one, so that one graph serves them all."""

    def __init__(self, judge: _Judge):
        self.contexts = partial(_contexts, judge)

    def run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """``forward(*args, **kwargs)`` as a region. Only a compiler may trace this, nothing run it."""

        def region() -> Any:  # torch's checkpoint would take some of the keywords for its own
            return forward(*args, **kwargs)

        return checkpoint(region, use_reentrant=False, context_fn=self.contexts)


def lowering_of(rule: Rule) -> Lowering:
    """``rule`` for compiled code."""
    if rule.action == "checkpoint" and rule.keep:  # fewest bytes, whatever it costs
        return _lowering(rule.action, frozenset(FAMILIES) - {"collective"}, frozenset(rule.keep), 0.0)
    return _lowering(rule.action, frozenset(rule.rerun), frozenset(rule.keep), rule.price)


@functools.cache
def _lowering(action: str, rerun: frozenset[str], keep: frozenset[str], price: float) -> Lowering:
    return Lowering(_Judge(action, rerun, keep, price))


@dataclass(frozen=True, eq=False)
class _Judge:
    """Whether a rule lets an op run again."""

    action: str
    rerun: frozenset[str]
    keep: frozenset[str]
    price: float

    @property
    def runs_all_again(self) -> bool:
        return self.action == "checkpoint" and not self.keep

    @property
    def has_tape(self) -> bool:
        """Whether it is a cut that decides, in eager code."""
        return self.action != "keep" and not self.runs_all_again

    def lets_run_again(self, op: Any, args: tuple, kwargs: dict) -> bool:
        if op is keep_op:
            name = args[1]
            return name is not None and name not in self.keep
        if self.runs_all_again:
            return True
        known = facts_of_call(op, args, kwargs)
        if known.name in self.keep or known.family in self.keep:
            return False
        if known.family is not None and known.family not in self.rerun:
            return False
        # No kernel has filled a factory's output unseen here, and whoever writes in place has been made functional.
        return known.kind is not Kind.OPAQUE or known.reason in (FACTORY, STATISTICS)


class _Tracing:
    """What is being traced, which one thread does at a time."""

    judges: ClassVar[list[_Judge]] = []
    """Of the regions around."""
    traced: ClassVar[Traced | None] = None
    """The outermost of these that has a tape in eager code."""


def _in_force() -> Iterator[_Judge]:
    """The judges around, from the innermost out: as in eager code, up to the first ``keep``."""
    return itertools.takewhile(lambda judge: judge.action != "keep", reversed(_Tracing.judges))


def _verdict(op: Any, args: tuple, kwargs: dict) -> Again:
    """The innermost rule's, unless all runs again around that."""
    may = None
    for judge in _in_force():
        lets = judge.lets_run_again(op, args, kwargs) if may is None or judge.runs_all_again else False
        if lets and judge.runs_all_again:
            return Again(may=True, must=True)
        may = lets if may is None else may
    return Again(bool(may))


def _decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if _verdict(op, args, kwargs).may else CheckpointPolicy.MUST_SAVE


def _contexts(judge: _Judge) -> tuple[Any, Any]:
    """What torch's checkpoint enters around a region and around its second run, as AOTAutograd traces both."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is None:
        raise UnsupportedError(
            "a module under a policy is in compiled code that does not reach torch's AOTAutograd as one graph, so the "
            "policy cannot be lowered. Either something in its forward breaks the graph: torch.compile(..., "
            "fullgraph=True) says what; compile something smaller, or give that module no rule. If that is state that "
            "it changes, a key/value cache, say: use_cache=False, or torch._dynamo.config."
            "skip_fwd_side_effects_in_bwd_under_checkpoint = True. Or the backend is one that takes forward alone, as "
            "'eager' does: use 'inductor' or 'aot_eager'."
        )
    first, second = create_selective_checkpoint_contexts(_decide, allow_cache_entry_mutation=True)
    first.judge = judge  # torch wants modes of its own, or of their kind
    first.__class__ = _tracing(type(first))  # type: ignore[arg-type]
    return first, second


@functools.cache
def _tracing(mode: Any) -> type:
    """``mode``, a class of dispatch modes, in which the ops are also judged by its ``judge``, and by what they cost."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # which takes a second to load

    class Tracing(mode):
        def __enter__(self) -> Any:
            is_outermost = all(judge.action == "keep" for judge in _Tracing.judges)
            _Tracing.judges.append(self.judge)
            self.traced, proxies = None, get_proxy_mode()
            graph = None if proxies is None else proxies.tracer.graph
            if is_outermost and self.judge.has_tape:
                self.traced = _Tracing.traced = Traced(graph, self.judge.price)
            self.graph = graph if is_outermost and self.judge.action != "keep" else None
            self.start = 0 if graph is None else len(graph.nodes)
            self.sees_saves = proxies is None and _Tracing.traced is not None
            self.respect_saved_tensors_hooks = False  # torch 2.15 would ask whether it should: they are ours
            if self.sees_saves:
                self.calls_hooks = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
                torch._C._autograd._push_saved_tensors_default_hooks(_save, _never)
            return super().__enter__()

        def __exit__(self, kind: Any, *error: Any) -> None:
            super().__exit__(kind, *error)
            if self.sees_saves:
                torch._C._autograd._pop_saved_tensors_default_hooks()
                torch._C._autograd._saved_tensors_hooks_set_tracing(self.calls_hooks)
            _Tracing.judges.pop()
            traced, self.traced = self.traced, None
            graph, self.graph = self.graph, None
            if traced is not None:
                _Tracing.traced = None
            if kind is not None:
                return
            if graph is None:
                if traced is not None:
                    traced.learn()
                return
            held = None
            if traced is not None:
                held = traced.held()
                if held is None and self.judge.price > PRICE:
                    raise UnsupportedError(_UNLEARNED)
            for node in held or ():
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            join(graph, self.start, is_cut=held is not None)

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self.traced is None:
                return super().__torch_dispatch__(op, types, args, kwargs)
            kwargs = kwargs or {}
            self.traced.begin()
            output = super().__torch_dispatch__(op, types, args, kwargs)
            self.traced.end(op, facts_of_call(op, args, kwargs), _verdict(op, args, kwargs), args, kwargs, output)
            return output

    return Tracing


def _save(tensor: Tensor) -> None:
    """A pack hook, of a graph without a backward."""
    if _Tracing.traced is not None and not any(judge.runs_all_again for judge in _in_force()):
        _Tracing.traced.save(tensor)


def _never(packed: None) -> Tensor:
    raise AssertionError("AOTAutograd has run backward of a forward that it only looked at")


_UNLEARNED = (
    "a rule with a price cannot be lowered here: AOTAutograd has not looked at the region before it traced it, or "
    "has seen other ops in it then. Leave the price away (rerun and keep say which ops run again), or give what the "
    "rule governs to torch.compile by itself."
)

_FIRST_RUN = (
    "an instance of a class decorated with recompute gets its policy when it first runs, which cannot be compiled. Run "
    "it once before it is compiled, or decorate the instance."
)


def refuse_first_run() -> None:
    raise UnsupportedError(_FIRST_RUN)


# As torch.compiler.disable does, which would load the compiler.
refuse_first_run._torchdynamo_disable = True  # type: ignore[attr-defined]
refuse_first_run._torchdynamo_disable_msg = _FIRST_RUN  # type: ignore[attr-defined]

CHECKPOINTS = _lowering("checkpoint", frozenset(), frozenset(), PRICE)
KEEPS = _lowering("keep", frozenset(), frozenset(), PRICE)
