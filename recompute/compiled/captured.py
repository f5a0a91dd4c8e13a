"""A captured region at work: one node of autograd's graph, whose forward and backward are the region's program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from recompute.compiled.program import Program
from recompute.engine.modes import are_others_in_force, count_dispatch_modes, count_function_modes, unseen
from recompute.engine.numerics import Numerics
from recompute.engine.operands import copied
from recompute.engine.recipe import Group, Recipe, open_book
from recompute.engine.rng import RngState
from recompute.engine.saved import Kept, Layout, Owner, Saved, checked, hold_through, top_hooks
from recompute.errors import UnsupportedError

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


class Frame:
    """One run of a program, and what it holds for backward."""

    __slots__ = (
        "_differs",
        "_given",
        "_graph",
        "_held",
        "_kept",
        "_numerics",
        "_others",
        "_program",
        "_rng",
        "_states",
        "owner",
    )

    def __init__(
        self,
        program: Program,
        graph: Callable[..., Any],
        owner: Owner,
        given: Sequence[Tensor],
        differs: Callable[[Program], None],
    ):
        """graph: what the program was made of, on the same inputs: it serves where the program cannot.

        differs: called where backward is given other gradients than the program knows.
        """
        self._differs = differs
        self._program = program
        self._graph = graph
        self.owner = owner
        self._given: Sequence[Tensor] = given
        self._rng: RngState | None = None

    def run(self) -> tuple[Any, ...]:
        """Forward; the outputs."""
        program, given, owner = self._program, self._given, self.owner
        self._numerics = Numerics()
        if program.draws:
            self._rng = _generators(given, owner.name)
        outputs, self._kept, self._states = program.forward(owner.name, *given)
        hooks = top_hooks()
        held: list[tuple[Any, int]] = []
        for position, how in program.held:
            tensor: Any = given[position]
            if how == "memory":  # of a parameter, though its ``data`` be replaced, as autograd holds that of a view
                tensor = tensor.detach()
            elif how == "copy":
                tensor = copied(tensor)
            elif how == "hooks" and hooks is not None:
                held.append((hold_through(hooks, tensor.detach(), owner.name), -1))
                continue
            held.append((tensor, tensor._version))
        self._held = held
        self._others: list[Any] = [
            given[position] if lives else weakref.ref(given[position]) for position, lives in program.others
        ]
        self._given = ()
        plan = program.plan
        owner.frames += 1
        owner.dropped_tensors += len(plan.dropped)
        owner.dropped_nbytes += plan.dropped_nbytes
        owner.kept_nbytes += plan.kept_nbytes
        owner.eager_nbytes += plan.eager_nbytes
        owner.outside = []
        owner.plan = plan
        if program.outputs and (book := open_book()) is not None:
            recipe = _Outputs(self, Group(self._numerics))
            for slot, (position, value) in enumerate(program.outputs):
                layout, counted = plan.facts[value].layout, value in plan.demanded
                book.enter(outputs[position], recipe, slot, layout, counted=counted)
        return outputs

    def regenerate(self) -> Sequence[Tensor]:
        """The outputs that others have saved and dropped."""
        assert self._program.regenerate is not None
        if self._kept is None:
            raise RuntimeError(_FREED)
        with (
            torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
            torch.no_grad(),
            temporarily_clear_interpreter_stack(),
            self._numerics.replayed(),
        ):
            return self._program.regenerate(self._values(), self._kept, self._states)

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The contributions to the gradients of the program's edges."""
        if self._kept is None:
            raise RuntimeError(_FREED)
        program, owner = self._program, self.owner
        if not self._is_as_recorded(gradients):
            if not torch.is_grad_enabled():
                self._differs(program)
            return self._replay(gradients)
        kept, held = self._kept, self._values()
        if _keeps_graph():
            kept = list(kept)
        else:
            self._kept, self._held = None, []
        owner.regenerations += program.reruns
        owner.regenerated_nbytes += program.rerun_nbytes
        given = list(gradients)
        if (count_dispatch_modes() or count_function_modes()) and are_others_in_force():
            return program.under_settings(unseen, held, kept, self._states, given)
        if not self._numerics.are_in_force():
            return program.under_settings(self._numerics.replayed, held, kept, self._states, given)
        return program.backward(held, kept, self._states, given)

    def _is_as_recorded(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether backward is called as it was when it was recorded."""
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        for gradient, layout in zip(gradients, self._program.gradients, strict=True):
            if gradient is None or layout is None:
                if gradient is not layout:
                    return False
            elif (
                type(gradient) is not Tensor or Layout.of(gradient)[:2] != layout[:2] or gradient.dtype != layout.dtype
            ):
                return False
        return True

    def _values(self) -> list[Tensor]:
        """The inputs that backward reads, unless they have changed."""
        name = self.owner.name
        return [
            value.get() if version == -1 else value if value._version == version else checked(value, version, name)
            for value, version in self._held
        ]

    def _replay(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The same by autograd, for what the program does not know: the graph runs again on the region's inputs."""
        program = self._program
        is_differentiated = torch.is_grad_enabled()
        given: list[Any] = [None] * (len(program.held) + len(program.others))
        for (position, _), value in zip(program.held, self._values(), strict=True):
            given[position] = value
        for (position, lives), other in zip(program.others, self._others, strict=True):
            given[position] = other if lives else other()
            if given[position] is None:
                raise UnsupportedError(_GONE.format(self.owner.name))
        if not is_differentiated:
            given = [tensor.detach().requires_grad_(i in program.edges) for i, tensor in enumerate(given)]
        elif any(version == -1 for _, version in self._held):
            raise UnsupportedError(_GONE.format(self.owner.name))
        with (
            torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
            temporarily_clear_interpreter_stack(),
            nullcontext() if self._rng is None else self._rng.replayed(),
            self._numerics.replayed(),
            torch.enable_grad(),
        ):
            outputs = [output for output in self._graph(*given) if isinstance(output, Tensor)]
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        wanted = list(dict.fromkeys(program.edges))
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            [given[position] for position in wanted],
            [gradient for _, gradient in pairs],
            create_graph=is_differentiated,
            allow_unused=True,
        )
        gradient_of: dict[int, Any] = dict(zip(wanted, found, strict=True))
        if not _keeps_graph():
            self._kept, self._held = None, []
        return [gradient_of.pop(position, None) for position in program.edges]


class _Outputs(Recipe):
    """The outputs of a frame that others have saved."""

    __slots__ = ("_frame",)

    def __init__(self, frame: Frame, group: Group):
        super().__init__(frame.owner, "a captured region", group)
        self._frame = frame

    def regenerate(self, wanted: Collection[int]) -> dict[int, Saved]:
        values = self._frame.regenerate()
        return {slot: Kept(values[slot], self.owner.name) for slot in wanted}


_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)
_GONE = (
    "in {}: backward differs from those before it (other outputs take a gradient, or gradients of another layout, or "
    "it is differentiated in its turn), and forward cannot run again, as a tensor that it was given is gone. Give the "
    "rule `capture: false`."
)


def _generators(given: Sequence[Tensor], name: str) -> RngState:
    """The states of the generators that the region may draw from."""
    state = RngState.of(torch.default_generator, name)
    device = next((tensor.device for tensor in given if tensor.is_cuda), None)
    if device is not None:
        state.include(torch.cuda.default_generators[device.index])
    return state


class CapturedFunction(torch.autograd.Function):
    """The node."""

    @staticmethod
    def forward(ctx: Any, frame: Frame, fixed: Sequence[int], *edges: Tensor) -> Any:
        outputs = frame.run()
        ctx.frame = frame
        ctx.set_materialize_grads(False)
        if fixed:
            ctx.mark_non_differentiable(*[outputs[position] for position in fixed])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.frame.backward(gradients)
