"""Checkpoints: regions whose Python runs again in backward, whatever it does.

So even kernels that no dispatcher sees run again. A frame, which is one run of a region, keeps everything to its end.
Then it decides. If it changed its own inputs, it cannot run again as it ran, and keeps everything (invariants 4 and 5).
Otherwise it drops the tensors that autograd saved in it, except those that live anyway (invariant 7).

An op that has an effect never runs again. Once a region is seen to run one, it goes on by a tape, which keeps that op's
outputs and runs all other ops again.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from recompute.engine.bit_comparison import count_different, is_verifying
from recompute.engine.checkpoint.arguments import HeldArguments
from recompute.engine.checkpoint.copies import StateCopies
from recompute.engine.checkpoint.reached_state import LearnedFacts
from recompute.engine.checkpoint.replay import ExpectedTensor, OpNames, Replay, ReplayComplete
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.op_policy import OpPolicy
from recompute.engine.dtensors import has_layout, local_of
from recompute.engine.modes import (
    ActiveModes,
    count_dispatch_modes,
    count_function_modes,
    has_foreign_modes,
    hidden_from_any_modes,
)
from recompute.engine.numerics import autocast_in_force
from recompute.engine.recipes import Handle, Recipe, forward_again
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.rng import RngState, is_random_source
from recompute.engine.saved_tensors import (
    KeptTensor,
    PackedDTensor,
    PackedTensor,
    ParameterReference,
    StorageKey,
    pack_through,
    storage_key,
    top_hooks,
    version_of,
)
from recompute.engine.scopes import Scope, let_transforms_in
from recompute.engine.tape.recorder import TapeRegion
from recompute.engine.thread_state import alive, is_fake
from recompute.engine.wrapper_tensors import inner_tensors, nbytes_held
from recompute.errors import RegenerationError, warn
from recompute.policy.matching import pattern_of

StateHook = tuple[Callable[[], Any], Callable[[Any], AbstractContextManager[Any]]]
"""For state that nothing here sees: forward calls the first to note it; inside of the second it is in force again."""

_NOTHING: AbstractContextManager[None] = nullcontext()
_strided = torch.strided


class CheckpointRegion:
    """A module's forward or a function under ``action: checkpoint``: all tensors that autograd saves are dropped."""

    def __init__(self, statistics: RegionStatistics, op_policy: OpPolicy, *, state_hooks: Iterable[StateHook] = ()):
        """op_policy: of the tape."""
        let_transforms_in()
        self.statistics = statistics
        self.state_hooks = tuple(state_hooks)
        self._op_policy = op_policy
        self._tape: TapeRegion | None = None
        self.learned = LearnedFacts()

    def run(self, function: Callable[..., Any], modules: tuple[nn.Module, ...], args: tuple, kwargs: dict) -> Any:
        """``function(*args, **kwargs)``, which may use ``modules``. The tensors that it saves are dropped."""
        if self.learned.effect:
            self._tape = self._tape or TapeRegion(self.statistics, self._op_policy)
            return self._tape.run(function, args, kwargs)
        modes = ActiveModes()
        with hidden_from_any_modes():
            frame = CheckpointFrame(self, function, modules, args, kwargs, modes)
        with frame, frame.watching():
            result = function(*args, **kwargs)
        with hidden_from_any_modes():
            frame.decide()
        return result


class CheckpointFrame(Scope, Recipe):
    """One run of a region. Its values are the tensors that autograd saved, numbered in order."""

    is_checkpoint = is_frame = True

    def __init__(
        self,
        region: CheckpointRegion,
        function: Callable[..., Any],
        modules: tuple[nn.Module, ...],
        args: tuple,
        kwargs: dict,
        modes: ActiveModes,
    ):
        Recipe.__init__(self, region.statistics, "a checkpoint")
        region.statistics.frames += 1
        self._region = region
        self._function = function
        self._modes = modes
        self._inputs = HeldArguments((args, kwargs), region.statistics.name)
        given, learned = self._inputs.others, region.learned
        self._state, self._places, self._then = learned.reach(function, modules, given)
        self._rng: RngState | None = None
        if not is_fake():
            found = learned.found if learned.generators is None else learned.generators
            sources = [*found, *filter(is_random_source, given)]
            self._rng = RngState(sources, name=region.statistics.name, only_torch=True)
        self._context = contextvars.copy_context()
        self._hooked = [(restored, snapshot()) for snapshot, restored in region.state_hooks]
        self._autocast = autocast_in_force()
        self._expected: list[ExpectedTensor | None] = []
        self._living: dict[int, Tensor] = {}
        self._originals: dict[int, list[Tensor]] = {}  # copies, to compare with
        self._pins: list[KeptTensor] = []
        self.outer = top_hooks()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is not None:  # tensors that the region made before the error may live on, so they are kept
            for handle in alive(self.handles):
                if handle.tensor is not None:
                    handle.keep(KeptTensor(handle.tensor.detach(), self.statistics.name, handle.version))

    def pack(self, tensor: Tensor) -> PackedTensor:
        if (count_dispatch_modes() or count_function_modes()) and has_foreign_modes():
            return self.pack_hidden(tensor)
        if type(tensor) is not Tensor:
            if has_layout(tensor):
                return PackedDTensor(tensor.detach(), self.pack(local_of(tensor)), self.statistics.name)
            tensor = local_of(tensor)
            if type(tensor) is nn.Parameter:
                tensor = tensor.detach()  # its present memory: a library that gathers weights may soon swap it
        handle = Handle(self, len(self.handles), tensor, version_of(tensor))
        self.handles.append(weakref.ref(handle))
        expected: ExpectedTensor | None = None
        if tensor.layout is _strided and not tensor.is_nested:  # else it is kept and not compared
            key = tensor.untyped_storage()._cdata if type(tensor) is Tensor else storage_key(tensor)
            expected = tensor.shape, tensor.dtype, key
        self._expected.append(expected)
        return handle

    def watching(self) -> AbstractContextManager[Any]:
        """A context for the run. In the first frame it is a mode, which learns what later frames of the region rely on.

        Under a mode some of torch's functions, as ``quantile``, call other ops. So replays have it, too.
        """
        self._watching = self._region.learned.watching(self._rng, self.statistics.name)
        return self._watching

    def pin(self, tensor: Tensor, name: str | None) -> Tensor:
        """Have every replay use ``tensor`` here, whatever it calculates, unless it is pinned by name."""
        if name is not None:
            return tensor
        self._pins.append(KeptTensor(tensor.detach(), self.statistics.name))
        return tensor

    def hand_out(self, memory: Any, is_array: bool) -> None:
        """A tensor is about to become an array, which forward may write to."""
        if is_array:
            self._inputs.hand_out(memory)

    def pinned(self, index: int, tensor: Tensor) -> Tensor:
        """The tensor that was pinned as number ``index``, in the place of ``tensor``, and with its gradient."""
        if index >= len(self._pins) or self._pins[index].tensor.shape != tensor.shape:
            raise RegenerationError(
                f"in {self.statistics.name}: forward passed {len(self._pins)} tensors to recompute.keep, and passed "
                f"others when it ran again (number {index} has shape {tuple(tensor.shape)}). Pass the same ones."
            )
        return _SubstituteValue.apply(tensor, self._pins[index].get())

    def decide(self) -> None:
        """Drop all saved tensors, unless the frame changed its inputs and so cannot run again as it ran."""
        self._state.settle()
        changed = self._inputs.changed() or self._state.changed()
        if self._region.learned.is_scripted:
            changed = "it runs a ScriptModule, which changes its ops after some runs"
        effect = self._region.learned.effect
        given, held = self._inputs.settle()
        inputs = set(map(storage_key, given))
        alive, parameters = self._alive_after(inputs, held)
        pinned: set[StorageKey] = {None}  # the key of a tensor without a storage of its own
        pinned.update([storage_key(pin.tensor) for pin in self._pins])
        compares = is_verifying()
        saved: dict[StorageKey, int] = {}  # bytes, by storage; all are alive now, so no address stands for two
        for slot, (ref, expected) in enumerate(zip(self.handles, self._expected, strict=True)):
            handle = ref()
            if handle is None or (tensor := handle.tensor) is None:
                self._expected[slot] = None
                continue
            key: StorageKey = None
            if expected is not None:
                key = tensor.untyped_storage()._cdata if type(tensor) is Tensor else storage_key(tensor)
            if key in pinned or (expected is not None and key != expected[2]):
                self._expected[slot] = None  # forward has given it other data (tensor.data = ...), which autograd uses
            elif (living := alive.get(key)) is not None:
                self._living[slot] = living
            else:
                saved[key] = tensor.untyped_storage().nbytes() if type(key) is int else nbytes_held(tensor)
                if changed is None and not effect:
                    if compares and handle.version == version_of(tensor):
                        self._originals[slot] = [each.detach().clone() for each in inner_tensors(tensor) or (tensor,)]
                    handle.tensor = None  # it comes back
                    continue
            parameter = None if key is None else parameters.get((key, tensor.storage_offset()))
            handle.keep(self._kept(tensor, handle.version, parameter, bool(changed or effect)))
        if self._rng is not None:
            if self._region.learned.generators is None:  # this frame was the first
                self._region.learned.generators = self._rng.extra()
            self._rng = self._rng.drawn()
        if changed is not None or effect:
            self._give_up(changed, sum(saved.values()))
            return
        savings = [nbytes for place, nbytes in saved.items() if place not in inputs]  # others hold inputs (invariant 7)
        self.statistics.dropped_tensors += len(savings)
        self.statistics.dropped_nbytes += sum(savings)
        self.statistics.eager_nbytes += sum(savings)

    def _alive_after(
        self, inputs: set[StorageKey], held: Iterable[Tensor]
    ) -> tuple[dict[StorageKey, Tensor], dict[tuple[StorageKey, Any], Tensor]]:
        """The tensors that are alive in backward anyway, by their storages; and the module's, by storage and offset."""
        alive: dict[StorageKey, Tensor] = {}
        parameters: dict[tuple[StorageKey, Any], Tensor] = {}  # several may have one storage
        for each in self._state.tensors():  # parameters first: an attribute may be the ``data`` of one
            if (place := storage_key(each)) is not None:
                parameters.setdefault((place, local_of(each).storage_offset()), each)
                alive.setdefault(place, each)
        alive |= (restored := {storage_key(tensor): tensor for tensor in held})
        for place in inputs - restored.keys():  # an argument comes back as another tensor
            alive.pop(place, None)
        return alive, parameters

    def _give_up(self, changed: str | None, nbytes: int) -> None:
        """It will not run again: all of the ``nbytes`` that autograd saved are kept."""
        self.statistics.kept_nbytes += nbytes
        self.statistics.eager_nbytes += nbytes
        self._state.unlearn()
        if changed is not None:
            name = pattern_of(self.statistics.name)  # one warning for all layers
            warn(f"{name} cannot run again as it did, so nothing is dropped there: {changed}.")
        del self._inputs, self._state, self._places, self._then, self._context, self._function, self._expected

    def _kept(self, tensor: Tensor, version: int, parameter: Tensor | None, all_are: bool) -> PackedTensor:
        """Hold a tensor as it is, without its graph: the node that saved it may be part of that (invariant 8)."""
        if parameter is not None:
            now = version_of(parameter)
            # A tensor at another version than the parameter, as ``parameter.data`` is, counts as a tensor of its own.
            if parameter.dtype is tensor.dtype and (now == version or has_layout(parameter)):
                part = local_of(parameter)
                inside, inside_part = ([Layout.of(each) for each in inner_tensors(t)] for t in (tensor, part))
                is_whole = tensor.shape == part.shape and tensor.stride() == part.stride()  # at its offset
                is_whole = is_whole and inside == inside_part
                if is_whole or not inside:  # else a view of a wrapper, which has no memory of its own
                    memory = None if is_whole else tensor.untyped_storage()
                    return ParameterReference(parameter, Layout.of(tensor), now, self.statistics.name, memory)
        if all_are and version == version_of(tensor):  # the hooks around this frame decide how
            return pack_through(self.outer, tensor.detach(), self.statistics.name)
        return KeptTensor(tensor.detach(), self.statistics.name, version)

    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        replay = Replay(self.statistics.name, self.pinned, self._expected, self._living, wanted)
        self._context.copy().run(self._run, replay)  # a copy, because a context is entered but once at a time
        what = replay.mismatch
        if what is None and len(replay.values) < len(wanted):
            what = f"it saved {len(self._expected)} tensors in forward, {replay.count} when run again"
        elif what is not None or (what := self._difference(replay)) is not None:  # run again to learn which op it was
            named = Replay(self.statistics.name, self.pinned, self._expected, self._living, wanted)
            self._context.copy().run(self._run, named, OpNames(named))
            what = named.mismatch or self._difference(named) or what
        if what is not None:
            raise RegenerationError(
                f"{self.statistics.name} did not run the same way twice: {what}. Look for state that forward changes "
                "(a cache, a counter), for ops that are not deterministic, and for TorchScript that still profiles "
                "(run it twice before). Or leave the module out of the policy."
            )
        return replay.values

    def _difference(self, replay: Replay) -> str | None:
        """How a value that came back differs from its original, where there is one to compare with."""
        for slot, originals in self._originals.items():
            if slot not in replay.values:
                continue
            value = replay.values[slot].get()
            for found, original in zip(inner_tensors(value) or [value], originals, strict=True):
                if different := count_different(found, original):
                    return (
                        f"of {replay.described(slot, original)}, {different} of {original.numel()} elements differ "
                        "when run again"
                    )
        return None

    def _run(self, replay: Replay, names: AbstractContextManager[Any] = _NOTHING) -> None:
        copies = StateCopies()
        with (
            forward_again(self.group.numerics, self._autocast, self._rng),
            self._state.replayed(self.statistics.name, copies),
            self._places.replayed(self._then, copies),
            # Put back all generators afterwards. One may move now that did not in forward: torch.manual_seed(0).
            _NOTHING if is_fake() else RngState(self._region.learned.generators or (), only_torch=True),
            ExitStack() as stack,
        ):
            for restored, state in self._hooked:
                stack.enter_context(restored(state))
            args, kwargs = self._inputs.restored()
            with self._modes.replayed(), self._watching, names, replay:
                try:
                    self._function(*args, **kwargs)
                except (ReplayComplete, RuntimeError):  # TorchScript makes a RuntimeError of it
                    if not replay.is_done:
                        raise


class _SubstituteValue(torch.autograd.Function):
    """The second tensor's value with the first one's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()  # forward may go on to change it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
