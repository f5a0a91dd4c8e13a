"""What ``recompute.keep`` is in compiled code: an op, whose output is kept by those rules that keep it."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("recompute", "FRAGMENT")
_LIBRARY.define("kept(Tensor tensor, str? name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("kept", lambda tensor, name: tensor.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("recompute::kept", lambda tensor, name: torch.empty_like(tensor), lib=_LIBRARY)
torch.library.register_autograd("recompute::kept", lambda ctx, gradient: (gradient, None), lib=_LIBRARY)

kept = torch.ops.recompute.kept.default
"""``(tensor, name) -> tensor``: a copy, which costs its bytes, as an op's output may not be its input."""
