"""The ops below the public functions, as tests call them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recompute.kernels import norm_ops
from recompute.kernels.activation import GLU
from recompute.kernels.blockwise_8bit import BLOCK

Optional = Tensor | None
RMS, LAYER = norm_ops.OPS["llama"], norm_ops.OPS["layer_norm"]


def rms_norm_forward(x: Tensor, weight: Optional, eps: float, casting: str) -> tuple[Tensor, Tensor]:
    y, _, _, rstd = RMS.forward(x, None, weight, None, eps, casting)
    return y, rstd


def rms_norm_regenerate(x: Tensor, weight: Optional, rstd: Tensor, casting: str) -> Tensor:
    return RMS.regenerate(x, weight, None, None, rstd, casting)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Optional,
    rstd: Tensor,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
    dresidual: Optional = None,
) -> tuple[Optional, Optional]:
    needs = (needs_dx, needs_dweight, False)
    return RMS.backward(dy, x, weight, None, None, rstd, casting, *needs, dresidual)[:2]


def rms_norm_reference(x: Tensor, weight: Optional, eps: float, casting: str) -> Tensor:
    return norm_ops.norm_reference(x, weight, None, eps, casting)


def add_rms_norm_reference(
    x: Tensor, residual: Optional, weight: Optional, eps: float, casting: str
) -> tuple[Tensor, Tensor]:
    h = x if residual is None else x + residual
    return rms_norm_reference(h, weight, eps, casting), h


def layer_norm_forward(x: Tensor, weight: Optional, bias: Optional, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, _, mean, rstd = LAYER.forward(x, None, weight, bias, eps, "layer_norm")
    return y, mean, rstd


def layer_norm_regenerate(x: Tensor, weight: Optional, bias: Optional, mean: Tensor, rstd: Tensor) -> Tensor:
    return LAYER.regenerate(x, weight, bias, mean, rstd, "layer_norm")


def layer_norm_backward(dy: Tensor, *saved_and_needs: Any, dresidual: Optional = None) -> tuple[Optional, ...]:
    saved, needs = saved_and_needs[:5], saved_and_needs[5:]
    return LAYER.backward(dy, *saved, "layer_norm", *needs, dresidual)


def layer_norm_reference(x: Tensor, weight: Optional, bias: Optional, eps: float) -> Tensor:
    return norm_ops.norm_reference(x, weight, bias, eps, "layer_norm")


def add_layer_norm_reference(
    x: Tensor, residual: Optional, weight: Optional, bias: Optional, eps: float
) -> tuple[Tensor, Tensor]:
    h = x if residual is None else x + residual
    return layer_norm_reference(h, weight, bias, eps), h


def glu_backward(dproduct: Tensor, gate: Tensor, up: Optional, activation: str, *needs: bool) -> tuple[Optional, ...]:
    return GLU.backward(dproduct, gate, None, up, None, BLOCK, activation, *needs)


def glu_backward_(
    dproduct: Tensor, gate: Tensor, up: Optional, dgate: Optional, dup: Optional, activation: str
) -> None:
    GLU.backward_(dproduct, gate, None, up, None, dgate, dup, BLOCK, activation)


glu_forward = GLU.forward
