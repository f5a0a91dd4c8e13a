"""Which kernel torch chooses for scaled_dot_product_attention on a CUDA device, which need not be here.

Where the device is here, torch is asked. Elsewhere its conditions are calculated, as ``sdp_utils.cpp`` in
ATen/native/transformers/cuda and ``sdp_utils_cpp.h`` have them (torch 2.11 to 2.14).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend

from recompute.estimation.gpus import GPUS, Gpu

_HALVES = (torch.float16, torch.bfloat16)
_USUAL_ORDER = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_CUDNN_IN_WHEELS = 91900
"""The cuDNN of torch 2.11 for CUDA 13, for a torch that was built without one."""
NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}


class Attention(NamedTuple):
    """The arguments of a call that decide on its kernel."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(each.requires_grad for each in self[:3])

    @property
    def same_heads(self) -> bool:
        return self.query.shape[-3] == self.key.shape[-3] == self.value.shape[-3]


class Platform(NamedTuple):
    """A device and its libraries, on which the choice depends beside the arguments."""

    name: str
    capability: tuple[int, int]
    cudnn: int | None
    """Its version as a number; None where there is none, as on AMD's devices."""
    torch: tuple[int, int]

    @staticmethod
    def of(gpu: Gpu | None) -> Platform:
        """A GPU's platform with this torch. None: this machine's device if it has one, else an H100."""
        if gpu is None and torch.cuda.is_available():
            device = Platform(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), _cudnn(), _torch())
            return device if torch.version.hip is None else device._replace(cudnn=None)
        gpu = GPUS["H100"] if gpu is None else gpu
        return Platform(gpu.name, gpu.capability, None if gpu.name.startswith("MI") else _cudnn(), _torch())

    @property
    def is_here(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability() == self.capability


def _torch() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _cudnn() -> int:
    return torch.backends.cudnn.version() or _CUDNN_IN_WHEELS


def choose(call: Attention, platform: Platform) -> SDPBackend:
    """The kernel that runs. Raises ``RuntimeError``, as torch does, where none that is enabled can."""
    if platform.is_here:
        return _torchs_choice(call)
    for backend in _order(platform):
        if _CONDITIONS[backend](call, platform):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _torchs_choice(call: Attention) -> SDPBackend:
    """Torch's answer for tensors on the device that take no memory: each is one row, repeated."""

    def on_device(tensor: Tensor, needs_grad: bool) -> Tensor:
        row = torch.empty(tensor.shape[-1] + 8, dtype=tensor.dtype, device="cuda")
        row = row[tensor.storage_offset() % 8 :][: tensor.shape[-1]]
        return row.requires_grad_(needs_grad and tensor.is_floating_point()).expand(tensor.shape)

    with unset_fake_temporarily():
        query, key, value = (on_device(each, call.trains) for each in call[:3])
        mask = None if call.mask is None else on_device(call.mask, call.mask.requires_grad)
        chosen = torch._fused_sdp_choice(
            query, key, value, mask, call.dropout, call.is_causal, scale=None, enable_gqa=call.enable_gqa
        )
    return next(each for each in NAMES if each.value == chosen)


def _order(platform: Platform) -> list[SDPBackend]:
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    if tuple(order[:3]) == _USUAL_ORDER and _prefers_cudnn(platform):
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return [each for each in order if each in NAMES]


def _prefers_cudnn(platform: Platform) -> bool:
    """``check_prefer_cudnn_attention``; on CUDA 12, whose wheels have an older cuDNN, this is never so."""
    if platform.cudnn is None or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return platform.cudnn > 91500 and platform.capability[0] in (9, 10)


def _is_fused(call: Attention, *, grouped: bool, one_head: bool, same_heads: bool = True) -> bool:
    """Whether shapes and strides meet the conditions of all fused kernels.

    grouped: whether the kernel takes fewer heads of keys where that is said to be meant.
    one_head: whether it takes one head of keys and values for all queries without that being said.
    same_heads: whether keys and values must have as many.
    """
    query, key, value, mask = call[:4]
    if not query.dim() == key.dim() == value.dim() == 4 or not query.dtype == key.dtype == value.dtype:
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0] or not query.shape[2] or not key.shape[2]:
        return False
    if any(each.stride(-1) != 1 for each in (query, key, value, *(() if mask is None else (mask,)))):
        return False
    heads = [each.shape[1] for each in call[:3]]
    if call.enable_gqa and grouped:
        return (heads[1] == heads[2] or not same_heads) and not any(heads[0] % each for each in heads[1:])
    return call.same_heads or (one_head and heads[1] == heads[2] == 1)


def _can_use_cudnn(call: Attention, platform: Platform) -> bool:
    query, key, value, mask = call[:4]
    recent = platform.torch >= (2, 14)
    if platform.cudnn is None or not torch.backends.cuda.cudnn_sdp_enabled() or platform.capability < (8, 0):
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if query.dtype not in _HALVES or not _is_fused(call, grouped=True, one_head=recent, same_heads=False):
        return False
    sizes = query.shape[-1], value.shape[-1]
    if any(size % 8 for size in sizes) or not _cudnn_takes_sizes(sizes, call, platform):
        return False
    if key.shape[2] == 1 or (call.dropout and (query.shape[2] == 1 or (recent and call.dropout * 16 % 1))):
        return False
    return mask is None or _cudnn_takes_mask(mask, query, key)


def _cudnn_takes_sizes(sizes: tuple[int, int], call: Attention, platform: Platform) -> bool:
    """``check_cudnn_tensor_shapes`` and ``check_cudnn_d256_bprop_head_dim``."""
    assert platform.cudnn is not None, "without one it takes none"
    if max(sizes) <= 128:
        return True
    if platform.torch < (2, 14):
        if platform.capability == (9, 0):
            return max(sizes) <= 256
        return platform.capability[0] == 10 and sizes == (192, 128)
    if platform.capability != (9, 0) and platform.capability[0] != 10:
        return False
    if platform.cudnn <= 92200:
        return sizes == (192, 128)
    return max(sizes) <= 256 and (not call.trains or sizes in ((192, 128), (256, 256)))


def _cudnn_takes_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """``check_attn_mask_shape``."""
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (*query.shape[:3], key.shape[2])[-mask.dim() :]
    return all(size in (1, whole) for size, whole in zip(mask.shape, full, strict=True))


def _can_use_flash(call: Attention, platform: Platform) -> bool:
    query, key, value = call[:3]
    size, at = query.shape[-1], platform.capability
    if not torch.backends.cuda.flash_sdp_enabled() or at < (8, 0) or call.mask is not None:
        return False
    if query.dtype not in _HALVES or not size == key.shape[-1] == value.shape[-1] or size > 256:
        return False
    if call.is_causal and query.shape[-2] != key.shape[-2]:
        return False
    has_small_memory = (8, 6) <= at <= (8, 9) or at[0] == 12
    if call.trains and has_small_memory and size > 192 and (call.dropout > 0 or size <= 224):
        return False
    return _is_fused(call, grouped=True, one_head=platform.torch >= (2, 14))


def _can_use_efficient(call: Attention, platform: Platform) -> bool:
    query, key, value = call[:3]
    recent, at = platform.torch >= (2, 14), platform.capability
    kinds = (torch.float32, *_HALVES) if at >= (8, 0) else (torch.float32, torch.float16)
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or query.dtype not in kinds:
        return False
    multiple = (8 if query.dtype in _HALVES else 4) if at >= (8, 0) else 8 if query.dtype is torch.float16 else 1
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % multiple or value.shape[-1] % multiple:
        return False
    if recent and at >= (8, 0) and any(each.storage_offset() % multiple for each in call[:3]):
        return False
    return _is_fused(call, grouped=recent, one_head=recent)


_CONDITIONS = {
    SDPBackend.CUDNN_ATTENTION: _can_use_cudnn,
    SDPBackend.FLASH_ATTENTION: _can_use_flash,
    SDPBackend.EFFICIENT_ATTENTION: _can_use_efficient,
    SDPBackend.MATH: lambda call, platform: torch.backends.cuda.math_sdp_enabled(),
}
