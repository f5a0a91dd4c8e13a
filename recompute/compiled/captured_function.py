"""A captured region at work: one node of autograd's graph, whose forward and backward are the region's program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recompute.compiled.autocast_settings import cast_of
from recompute.compiled.codegen import GeneratedCode
from recompute.compiled.function_calls import keeps_graph
from recompute.compiled.held_inputs import (
    Other,
    Versioned,
    checked_other,
    contributions_of,
    refuse_none,
    with_new_graphs,
)
from recompute.compiled.program import ANY, DroppedOutputs, Program, share_memory
from recompute.compiled.region_record import RegionRecord
from recompute.engine.compression import Codec, CompressedTensor
from recompute.engine.cut.layout import Layout
from recompute.engine.modes import count_dispatch_modes, count_function_modes, has_foreign_modes, hidden_from_modes
from recompute.engine.numerics import Autocast, autocast_in_force, without_casts
from recompute.engine.recipe_book import open_book
from recompute.engine.recipes import Handle, OpRecipe, RecipeGroup, RecordedCall, forward_again, nbytes_of
from recompute.engine.region_statistics import Stopwatch
from recompute.engine.rng import RngState
from recompute.engine.saved_tensors import (
    Hooks,
    KeptTensor,
    PackedTensor,
    are_held_as_they_are,
    checked,
    fetch,
    pack_through,
    top_hooks,
)
from recompute.engine.tape.op_arguments import PLAIN
from recompute.engine.thread_state import stopwatch_of

_NOTHING = nullcontext()


class CapturedFrame:
    """One run of a program, and all that it holds for backward."""

    def __init__(self, program: Program, graph: Callable[..., Any], region: RegionRecord):
        """graph: the program was made of it. It takes the same inputs, and runs where the program cannot."""
        self._region = region
        self._program = program
        self._graph = graph
        self.statistics = region.statistics
        self._rng: RngState | None = None
        self._left: Sequence[Tensor] = ()
        """Values that brought dropped outputs back, and that backward reads."""
        self.saved: list[Tensor] = []
        """Autograd saves these as it does for other nodes: with their graphs, and through the hooks in force."""

    def run(self, given: Sequence[Tensor], casts: Sequence[Tensor], objects: Sequence[Any]) -> tuple[Any, ...]:
        """Run forward; returns the outputs.

        casts: the inputs that the program takes as autocast has cast them.
        objects: custom Functions in it are given these beside tensors.
        """
        program, statistics = self._program, self.statistics
        if program.draws_from is not None:
            self._rng = RngState(program.draws_from, name=statistics.name, only_torch=True)
        self._held: list[Versioned | None]
        self._others: list[Other]
        is_sure = self._region.trusts(program)  # else backward may turn out to need another run of forward
        with _without(program.around.autocast):
            found = program.forward(statistics.name, objects, is_sure, *given, *casts)
        outputs, self._kept, self._states, self.saved, self._held, self._others = found
        self._versions: list[int] = [self._kept[index]._version for index in program.shown]
        codec, hooks = self._region.tape.codec, top_hooks()
        is_coded = codec is not None and bool(program.compressible)
        self._are_packed = bool(self._kept) and (is_coded or not are_held_as_they_are(hooks))
        if self._are_packed:
            self._kept = self._packed(codec, hooks)
        plan = program.plan
        statistics.plan = None if self._region.is_checkpoint else plan
        if program.outputs is not None and (book := open_book()) is not None:
            recipe = _Outputs(self, program.outputs, given)
            for slot, (position, value) in enumerate(program.outputs.values):
                layout, counted = plan.facts[value].layout, value in plan.demanded
                book.enter(outputs[position], recipe, slot, layout, counted=counted)
        return outputs

    def _packed(self, codec: Codec | None, hooks: Hooks | None) -> Sequence[PackedTensor]:
        """The kept values as these hooks hold them. codec: makes codes of those that may be a little off."""
        program, group, name = self._program, RecipeGroup(self._program.around.numerics), self.statistics.name
        return [
            pack_through(hooks, tensor.detach(), name)
            if codec is None or index not in program.compressible
            else CompressedTensor(tensor, codec, self.statistics, hooks, group).handle(0)
            for index, tensor in enumerate(self._kept)
        ]

    def put_back(self) -> None:
        """Forward has stopped in its middle, and its region is to run in another way."""
        if self._rng is not None:
            self._rng.restore()

    def backward(self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The contributions to the gradients of the program's edges. saved: by autograd."""
        if self._kept is None:
            raise RuntimeError(_FREED)
        program, statistics = self._program, self.statistics
        if not self._is_as_recorded(gradients):
            return self._replay(saved, gradients)
        self._region.count_backward(program)
        kept, held, left, self._left = self._kept, self._values(saved), list(self._left), ()
        if self._are_packed:  # and the hooks check their versions
            kept = fetch(kept)
        else:
            for index, version in zip(program.shown, self._versions, strict=True):
                checked(kept[index], version, statistics.name)
            kept = list(kept) if keeps_graph() else kept
        if not keeps_graph():
            self._free()
        with _without(program.backward_autocast):
            return self._run_backward(held, kept, list(gradients), left)

    def _run_backward(
        self, held: Any, kept: Any, given: list[Tensor | None], left: list[Tensor]
    ) -> Sequence[Tensor | None]:
        program = self._program
        settings: Any = None
        if (count_dispatch_modes() or count_function_modes()) and has_foreign_modes():
            settings = hidden_from_modes
        elif not program.around.numerics.are_in_force():
            settings = program.around.numerics.replayed
        elif left and (outputs := program.outputs) is not None:
            return self._code(outputs.backward)(held, kept, self._states, given, left)
        left.clear()
        return self._code(program.backward, settings)(held, kept, self._states, given)

    def _code(self, code: GeneratedCode, settings: Any = None) -> Callable[..., Any]:
        """The code of backward, whose reruns are in the span of these settings, and counted, and timed if need be."""
        regenerated, is_checkpoint = self.statistics.regenerated, self._region.is_checkpoint
        regenerated.count += 1 if is_checkpoint else code.reruns
        regenerated.nbytes += self._program.plan.dropped_nbytes if is_checkpoint else code.rerun_nbytes
        stopwatch = stopwatch_of(self.statistics)
        if stopwatch is None and settings is None:
            return code
        return partial(code.within(settings is None), partial(_around, settings or nullcontext, stopwatch))

    def leave(self, left: Sequence[Tensor]) -> None:
        """Hold these until backward, if that is still to come. They have brought outputs back."""
        if self._kept is not None:
            self._left = left

    def _free(self) -> None:
        self._kept, self._held, self._others, self._left = None, [], [], ()

    def _is_as_recorded(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether backward is called as it was when it was recorded."""
        if torch.is_grad_enabled() or autocast_in_force() != self._program.backward_autocast:
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        for gradient, layout in zip(gradients, self._program.gradients, strict=True):
            if gradient is None or layout is None:
                if gradient is not layout:
                    return False
            elif type(gradient) not in PLAIN or (
                (of := Layout.of(gradient)) != layout and of._replace(offset=ANY) != layout
            ):
                return False
        return all([share_memory(gradients[one], gradients[other]) for one, other in self._program.shared_gradients])

    def _values(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that backward reads, unless they have changed."""
        name, from_autograd = self.statistics.name, iter(saved)
        return [
            next(from_autograd) if held is None else held[0] if held[0]._version == held[1] else checked(*held, name)
            for held in self._held
        ]

    def _check_reach(self, gradients: Sequence[Tensor | None]) -> None:
        """Refuse gradients that reach less than those that were recorded, where that would not be exact."""
        program = self._program
        then, now = (
            frozenset().union(*[reach for reach, each in zip(program.reaches, given, strict=True) if each is not None])
            for given in (program.gradients, gradients)
        )
        if not now:
            return  # plain PyTorch, too, goes on if no gradient has come
        pairs = zip(program.others, self._others, strict=True)
        inputs = {position: other[0] for (position, _), other in pairs}
        count = len({*inputs, *[position for position, _ in program.held]})
        missing = [position if position < count else program.casts[position - count] for position in then - now]
        refuse_none(self.statistics.name, [inputs.get(position) for position in missing])

    def _replay(self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """``backward`` where the program does not know the case: autograd runs the graph again."""
        program, stopwatch, regenerated = self._program, stopwatch_of(self.statistics), self.statistics.regenerated
        is_differentiated = torch.is_grad_enabled()
        self._check_reach(gradients)
        self._region.count_replay(program, is_differentiated)
        regenerated.count += 1  # as a checkpoint does
        regenerated.nbytes += program.plan.dropped_nbytes
        inputs = dict(zip([position for position, _ in program.held], self._values(saved), strict=True))
        for (position, _), other in zip(program.others, self._others, strict=True):
            inputs[position] = checked_other(other, self.statistics.name, may_be_memory=not is_differentiated)
        inputs |= {position: inputs[position].clone() for position in program.updated}
        given = [inputs[position] for position in range(len(inputs))]
        numerics, autocast, cached = program.around
        with forward_again(numerics, autocast, self._rng):
            if not is_differentiated:
                edges = {*program.edges, *program.casts}
                given = with_new_graphs(given, edges, edges if autocast is None else cached)
            with _around(nullcontext, stopwatch):
                outputs = self._graph(*given)
            given += [cast_of(given[position]) for position in program.casts]
        found = contributions_of(outputs, gradients, given, program.edges)
        if not keeps_graph():
            self._free()
        return found


def _without(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """The span in which autocast casts nothing, as the casts are ops of the program."""
    return _NOTHING if autocast is None else without_casts()


@contextmanager
def _around(settings: Callable[[], AbstractContextManager[Any]], stopwatch: Stopwatch | None) -> Iterator[None]:
    """The span of something that runs again."""
    with settings():
        started = None if stopwatch is None else stopwatch.start()
        yield
        if stopwatch is not None:
            stopwatch.stop(started)


class _Outputs(OpRecipe):
    """The outputs of a frame that others have saved. It holds all it needs, because the frame may be gone before."""

    __slots__ = ("_code", "_frame", "_states")

    def __init__(self, frame: CapturedFrame, outputs: DroppedOutputs, given: Sequence[Tensor]):
        self._frame, self._states, self._code = weakref.ref(frame), frame._states, outputs.run
        name, hooks = frame.statistics.name, top_hooks()
        held: list[PackedTensor] = []
        for index in outputs.held:
            if (versioned := frame._held[index]) is not None:
                held.append(KeptTensor(versioned[0], name, versioned[1]))
            else:
                held.append(pack_through(hooks, given[frame._program.held[index][0]].detach(), name))
        assert frame._kept is not None
        kept = [_again(frame._kept[index], name) for index in outputs.kept]
        call = RecordedCall(outputs.run, (held, kept), {})
        super().__init__(frame.statistics, call, "a captured region", RecipeGroup(frame._program.around.numerics))

    def _run(self) -> Sequence[Tensor]:
        values, left = self._code(*fetch(self._call.args), self._states)
        if (frame := self._frame()) is not None:
            frame.leave(left)
        return values

    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        given_back = super().regenerate(wanted)
        # The recipe itself counts one regeneration, and the bytes that it gives.
        regenerated, code = self.statistics.regenerated, self._code
        regenerated.count += code.reruns - 1
        regenerated.nbytes += code.rerun_nbytes - nbytes_of(given_back.values())
        return given_back


def _again(kept: Tensor | PackedTensor, name: str) -> PackedTensor:
    """A value that a frame keeps, as a saved tensor of its own. name: the region's."""
    if isinstance(kept, Handle):
        return kept.another()
    return kept if isinstance(kept, PackedTensor) else KeptTensor(kept, name)


_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


class CapturedFunction(torch.autograd.Function):
    """The node of autograd's graph that stands for a captured region."""

    @staticmethod
    def forward(ctx: Any, frame: CapturedFrame, inputs: Any, fixed: Sequence[int], *edges: Tensor) -> Any:
        outputs = frame.run(*inputs)
        ctx.frame = frame
        if frame.saved:
            ctx.save_for_backward(*frame.saved)
            frame.saved = []
        ctx.set_materialize_grads(False)
        if fixed:
            ctx.mark_non_differentiable(*[outputs[position] for position in fixed])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.frame.backward(ctx.saved_tensors, gradients)


apply_captured: Callable[..., Any] = super(torch.autograd.Function, CapturedFunction).apply
"""``CapturedFunction.apply``, which does not look at every argument for transforms of torch.func.

The guards of a region's graph accept no tensor that such a transform has wrapped, and no region is captured inside of
one.
"""
