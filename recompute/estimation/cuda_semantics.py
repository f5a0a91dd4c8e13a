"""Makes fake CPU tensors run as tensors on a CUDA device would: the same kernels, and the same tensors saved.

Fake CUDA tensors would not do: their backward asks for streams, which only a GPU has (torch 2.11 to 2.15).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from recompute.engine.modes import function_modes
from recompute.engine.thread_state import local, swapped
from recompute.estimation.attention_choice import NAMES, Attention, Platform, SDPBackend, choose
from recompute.substitution.whole_heads import WholeHeads, whole_heads

_aten = torch.ops.aten
_torchs_attention = F.scaled_dot_product_attention
_torchs_dropout = F.dropout
_HALVES = (torch.float16, torch.bfloat16)


class _Simulated(threading.local):
    """The device that fake CPU tensors stand for in this thread, and its kernels of attention that have run."""

    def __init__(self) -> None:
        self.platform: Platform | None = None
        self.attention: set[str] = set()


_simulated = _Simulated()


@contextmanager
def as_on_cuda(platform: Platform | None = None, *, autocast: torch.dtype | None = None) -> Iterator[set[str]]:
    """Inside, in this thread, torch chooses the kernels of CUDA for fake CPU tensors.

    platform: the device; None for that of the block around this one, or else ``Platform.of(None)``.
    autocast: the dtype of CUDA's autocast, if forward and loss are to run under it.

    Yields the names of the kernels of ``scaled_dot_product_attention`` that have run, also in blocks around this one.
    """
    around = _simulated.platform
    if around is None:
        _simulated.attention = set()
    with (
        swapped(local, "simulates_cuda", True),
        swapped(_simulated, "platform", platform or around or Platform.of(None)),
        swapped(F, "scaled_dot_product_attention", _attention_here),
        swapped(F, "dropout", _dropout_here),
        nullcontext() if autocast is None else torch.autocast("cpu", autocast),
        _AsOnCuda(),
    ):
        yield _simulated.attention


def _dropout_here(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """On CUDA dropout is one kernel that saves a mask of bools; on the CPU it saves a mask in the input's dtype.

    ``is_fused_kernel_acceptable`` in ATen/native/Dropout.cpp.
    """
    if local.simulates_cuda and training and not inplace and 0.0 < p < 1.0 and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return _torchs_dropout(input, p, training, inplace)


def _attention_here(*args: Any, **kwargs: Any) -> Tensor:
    """Attention as on CUDA, in this thread. A mode does not see it where functions of torch's own call it."""
    return (_attention if local.simulates_cuda else _torchs_attention)(*args, **kwargs)


class _AsOnCuda(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _torchs_attention:
            return _attention(*args, **kwargs)
        if function is torch.tensor and isinstance(args[0], (list, tuple)):  # it would read the memory of fake ones
            args = tree_map_only(Tensor, lambda each: each.item() if each.numel() == 1 else each, args)
        if torch.is_autocast_enabled("cpu") and getattr(function, "__name__", "") in _WIDENED:
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        return function(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


# Functions, by their names in torch and torch.nn.functional, that CUDA's autocast runs in float32. The list is that of
# ATen/autocast_mode.h; the CPU's is another.
_WIDENED_NAMES = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus
    layer_norm group_norm norm cosine_similarity poisson_nll_loss nll_loss hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits cross_entropy dist pdist cdist renorm logsumexp softmax
    log_softmax cumprod cumsum prod sum
"""
_WIDENED = frozenset(_WIDENED_NAMES.split())


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that the simulated device chooses, with the ops around it of ATen's attention.cpp."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(dtype) for each in (query, key, value))
    if any(isinstance(mode, WholeHeads) for mode in function_modes()):
        key, value = whole_heads(query, key, value)
    platform = _simulated.platform
    assert platform is not None, "as_on_cuda sets it"
    if platform.torch >= (2, 14) and query.dim() == key.dim() == value.dim() == 3:  # fused kernels take these, too
        query, key, value = (each.unsqueeze(0) for each in (query, key, value))
        mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
        return _attention(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    call = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    chosen = choose(call, platform)
    _simulated.attention.add(NAMES[chosen])
    size = query.shape[-1]
    # Not "is": torch makes a new object for each.
    if chosen == SDPBackend.CUDNN_ATTENTION:
        bias, cudnn = _numbers(attn_mask, query), _aten._scaled_dot_product_cudnn_attention
        return cudnn(query, key, value, bias, call.trains, dropout_p, is_causal, False, scale=scale)[0]
    if chosen == SDPBackend.FLASH_ATTENTION:
        scale = size**-0.5 if scale is None else scale
        if size % 8:
            query, key, value = (F.pad(each, (0, -size % 8)) for each in (query, key, value))
        flash = _aten._scaled_dot_product_flash_attention
        output = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :size] if size % 8 else output
    if chosen == SDPBackend.EFFICIENT_ATTENTION:
        bias, efficient = _bias(attn_mask, query, key), _aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, call.trains, dropout_p, is_causal, scale=scale)[0]
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        return _torchs_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _numbers(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask of bools as numbers to add to the scores.

    The ops are those of ``convert_boolean_attn_mask`` in ATen/native/transformers/attention.cpp, so that a tape drops
    the same tensors as on CUDA.
    """
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=mask.device))


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for the efficient kernel, whose rows begin at multiples of 16 bytes."""
    mask = _numbers(mask, query)
    if mask is None:
        return None
    if mask.shape[-1] % 8:
        mask = F.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
