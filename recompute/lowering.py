"""What a rule is to ``torch.compile``: a region, some of whose ops the compiler may run again in backward.

The compiler's own cut between forward and backward takes the place of tapes and checkpoints. It knows a region by
torch's checkpoint around it, and a rule by a function that judges each op, as selective checkpointing has it. Where
regions nest, an op runs again where any rule around it lets it, up to the innermost ``action: keep``: as in eager code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recompute.engine.kept import kept
from recompute.engine.ops import FACTORY, STATISTICS, Kind, facts_of_call
from recompute.errors import UnsupportedError
from recompute.policy.model import FAMILIES, PRICE, Rule

Forward = Callable[..., Any]


def is_lowered(module: nn.Module | None = None) -> bool:
    """Whether this is being compiled, in training: what a policy does is then for the compiler to do."""
    return (
        torch.compiler.is_compiling()
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

    def __init__(self, judge: _Judge, refuses: bool):
        self.contexts = partial(_contexts, judge)
        self.refuses = refuses

    def run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """``forward(*args, **kwargs)`` as a region. Only a compiler may trace this, nothing run it."""
        if self.refuses:
            _refuse_price()

        def region() -> Any:  # torch's checkpoint would take some of the keywords for its own
            return forward(*args, **kwargs)

        return checkpoint(region, use_reentrant=False, context_fn=self.contexts)


def lowering_of(rule: Rule) -> Lowering:
    """``rule`` for compiled code."""
    rerun = set(FAMILIES) - {"collective"} if rule.action == "checkpoint" else rule.rerun
    return _lowering(rule.action, frozenset(rerun), frozenset(rule.keep), rule.price != PRICE)


@functools.cache
def _lowering(action: str, rerun: frozenset[str], keep: frozenset[str], refuses: bool) -> Lowering:
    return Lowering(_Judge(action, rerun, keep), refuses)


@dataclass(frozen=True, eq=False)
class _Judge:
    """Whether a rule lets an op run again."""

    action: str
    rerun: frozenset[str]
    keep: frozenset[str]

    def lets_run_again(self, op: Any, args: tuple, kwargs: dict) -> bool:
        if op is kept:
            name = args[1]
            return name is not None and name not in self.keep
        if self.action == "checkpoint" and not self.keep:
            return True
        known = facts_of_call(op, args, kwargs)
        if known.name in self.keep or known.family in self.keep:
            return False
        if known.family is not None and known.family not in self.rerun:
            return False
        # No kernel has filled a factory's output unseen here, and whoever writes in place has been made functional.
        return known.kind is not Kind.OPAQUE or known.reason in (FACTORY, STATISTICS)


_judges: list[_Judge] = []  # of the regions around what is being traced, which one thread does at a time


def _decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    for judge in reversed(_judges):
        if judge.action == "keep":
            break
        if judge.lets_run_again(op, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


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
    modes = create_selective_checkpoint_contexts(_decide, allow_cache_entry_mutation=True)
    for mode in modes:
        mode.judge = judge  # torch wants modes of its own, or of their kind
        mode.__class__ = _judging(type(mode))  # type: ignore[arg-type]
    return modes


@functools.cache
def _judging(mode: Any) -> type:
    """``mode``, a class of dispatch modes, in which the ops are also judged by its ``judge``."""

    class Judging(mode):
        def __enter__(self) -> Any:
            _judges.append(self.judge)
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            _judges.pop()

    return Judging


_PRICE = (
    "a rule with a price cannot be compiled: a compiler knows no seconds. Leave the price away (rerun and keep say "
    "which ops run again), or leave what the rule governs out of torch.compile."
)


def _refuse_price() -> None:
    raise UnsupportedError(_PRICE)


_FIRST_RUN = (
    "an instance of a class decorated with recompute gets its policy when it first runs, which cannot be compiled. Run "
    "it once before it is compiled, or decorate the instance."
)


def refuse_first_run() -> None:
    raise UnsupportedError(_FIRST_RUN)


# As torch.compiler.disable does, which would load the compiler.
_refuse_price._torchdynamo_disable = True  # type: ignore[attr-defined]
_refuse_price._torchdynamo_disable_msg = _PRICE  # type: ignore[attr-defined]
refuse_first_run._torchdynamo_disable = True  # type: ignore[attr-defined]
refuse_first_run._torchdynamo_disable_msg = _FIRST_RUN  # type: ignore[attr-defined]

CHECKPOINTS = _lowering("checkpoint", frozenset(), frozenset(), False)
KEEPS = _lowering("keep", frozenset(), frozenset(), False)
