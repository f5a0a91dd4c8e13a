"""``recompute.keep``: tensors that are never dropped.

In eager code it tells the regions around it. In compiled code it is an op, and a rule that names it keeps its output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recompute.engine.modes import hidden_from_any_modes
from recompute.engine.recipe_book import open_book
from recompute.engine.thread_state import local
from recompute.policy.rules import is_tensor_name

_LIBRARY = torch.library.Library("recompute", "FRAGMENT")
_LIBRARY.define("kept(Tensor tensor, str? name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("kept", lambda tensor, name: tensor.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("recompute::kept", lambda tensor, name: torch.empty_like(tensor), lib=_LIBRARY)
torch.library.register_autograd("recompute::kept", lambda ctx, gradient: (gradient, None), lib=_LIBRARY)

keep_op = torch.ops.recompute.kept.default
"""``(tensor, name) -> tensor``: a copy, which costs its bytes, because an op may not return its input."""


def keep(tensor: Tensor, name: str | None = None) -> Tensor:
    """Pin ``tensor``: it is kept, and what runs again in backward uses it instead of calculating it anew.

    Call it inside a module's forward, on what must not come out differently the second time, such as a router's logits;
    returns ``tensor``. Outside of every region it does nothing.

    name: pin it only where the rule that governs the module lists this name in its ``keep``.

    >>> recompute.keep(torch.ones(2), "router_logits")
    tensor([1., 1.])
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"recompute.keep takes a tensor, got {type(tensor).__name__}")
    if name is not None and not (isinstance(name, str) and is_tensor_name(name)):
        raise ValueError(
            f"recompute.keep takes a name that a rule's keep can list, such as 'router_logits', got {name!r}"
        )
    if torch.compiler.is_compiling():
        return keep_op(tensor, name) if torch.is_grad_enabled() and not torch.compiler._is_exporting_flag else tensor
    with hidden_from_any_modes():
        for frame in local.active_frames:
            tensor = frame.pin(tensor, name)
    if name is None and (book := open_book()) is not None:
        book.forget(tensor)
    return tensor
