"""The ops of torch that were reviewed, by their names: which are pure, which draw, which differ from run to run.

``ops`` draws the conclusions. An op that is not here is opaque, unless its tags or its schema call it pure.
"""

from __future__ import annotations

from typing import Any

from torch._library import simple_registry
from torch._ops import OpOverload


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FAMILIES = {
    # cuBLAS gives the same bits on one stream and one kind of GPU (cuBLAS documentation, "Results reproducibility"), as
    # long as it adds nothing atomically: that is off by default, and torch never turns it on.
    "gemm": names("""
        mm bmm mv dot addmm baddbmm addbmm addmv _addmm_activation _int_mm _scaled_mm _grouped_mm
    """),
    "convolution": names("convolution"),
    "attention": names("""
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward
    """),
}

# Everything that torch tags as pointwise is pure too, unless it is tagged as random.
_POINTWISE = names("""
    leaky_relu _prelu_kernel hardswish glu log_sigmoid_forward floor_divide complex polar bucketize searchsorted addr
    copy fill zero
""")
_SOFTMAX = names("_softmax _log_softmax _safe_softmax _masked_softmax")
# These are deterministic on CUDA too: the last block to finish adds up the results of all blocks, in a fixed order.
_REDUCTIONS = names("""
    sum nansum mean prod amax amin aminmax max min argmax argmin all any _is_all_true _is_any_true count_nonzero
    logsumexp norm linalg_vector_norm linalg__powsum var var_mean std std_mean
""")
_NORMS = names("""
    native_layer_norm native_group_norm _fused_rms_norm _weight_norm_interface
    _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
""")
STATEFUL_NORMS = names("native_batch_norm cudnn_batch_norm miopen_batch_norm")
# Only their forward is listed. The backward of many of them scatters, and is listed nowhere here.
_GATHERS = names(
    "index index_select gather take embedding grid_sampler_2d grid_sampler_3d cudnn_grid_sampler im2col col2im"
)
_MOVES = names("""
    _to_copy cat stack repeat flip roll rot90 tril triu diag_embed constant_pad_nd pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    select_scatter slice_scatter diagonal_scatter
""")
# These are deterministic though indices may repeat, because equal indices write equal values.
_FILLS = names("scatter.value index_fill masked_fill")
_POOLING = names("""
    avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d
    max_pool2d_with_indices max_pool3d_with_indices
""")
_UPSAMPLING = names("""
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
""")
_LOSSES = names("""
    mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
    nll_loss_forward
""")
SCANS = names("cumsum cumprod")

PURE = frozenset().union(
    *FAMILIES.values(),
    *(_POINTWISE, _SOFTMAX, _REDUCTIONS, _NORMS, STATEFUL_NORMS, _GATHERS, _MOVES, _FILLS, _POOLING, _UPSAMPLING),
    *(_LOSSES, SCANS),
)

RANDOM = names("rand rand_like randn randn_like randint randint_like bernoulli normal native_dropout")

# These are views, although their schemas say that the output is new.
UNANNOTATED_VIEWS = names("_unsafe_view unsafe_split unsafe_split_with_sizes lift")

# The arguments that these write to, although their schemas say that nothing is written: the statistics of batch norms,
# and the destination of copies between backends.
UNANNOTATED_WRITES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(STATEFUL_NORMS, (3, 4)),
    **dict.fromkeys(names("batch_norm_gather_stats batch_norm_gather_stats_with_counts"), (3, 4)),
    "batch_norm_update_stats": (1, 2),
    **dict.fromkeys(names("_copy_from _copy_from_and_resize"), (1,)),
}

# These are opaque, as is everything that is not named above. They are listed so that ``explain`` can say why: they add
# atomically, or the last of equal indices wins.
DIFFER = names("""
    index_add index_copy index_put _index_put_impl _unsafe_index_put index_reduce put scatter scatter_add scatter_reduce
    bincount histc max_unpool2d max_unpool3d nll_loss2d_forward
""")
REORDER = names("topk sort kthvalue median nanmedian mode cummax cummin")

# Namespaces of torch itself that serve other uses than eager training, or that were not reviewed.
INTERNAL_SPACES = names("""
    prim prims debugprims rngprims inductor inductor_prims quantized _quantized quantization sparse mkl mkldnn onednn
    mkldnn_prepacked prepacked profiler static_runtime export flex_gemm _native _native_aot _test
""")
COLLECTIVE_SPACES = names("""
    c10d c10d_functional _c10d_functional _c10d_functional_autograd _dtensor fsdp symm_mem
""")
# Collectives write to tensors without saying so in their schemas. All ops of c10d and fsdp write to whatever is not
# called an input. These write to all of their tensors.
COLLECTIVE_WRITERS = names("wait_tensor wait_tensors irecv batch_p2p_ops")
# It returns its input, as a tensor that is waited for where it is read.
COLLECTIVE_VIEWS = names("_wrap_tensor_autograd")

FAMILY_WORDS = {
    "attention": ("attention", "attn", "fmha", "sdpa"),
    "collective": ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall"),
    "gemm": ("gemm", "matmul", "_mm_", "_bmm_", "_addmm_", "_linear_", "_mlp_"),
    "convolution": ("conv1d", "conv2d", "conv3d", "convolution"),
}


def is_effectful(op: Any) -> bool:
    """Whether an op is registered as having an effect; torch takes one that is given a ScriptObject for one, too."""
    name = op.name() if isinstance(op, OpOverload) else f"{op.namespace}::{op.name()}"
    return simple_registry.singleton.find(name).effect.effect is not None


def is_effect_registered() -> bool:
    """Whether some op that is not torch's own has been registered as having an effect. It takes 2 us."""
    entries = simple_registry.singleton._data
    if len(entries) != len(_effects):  # an entry stays, and only its effect changes
        known = [name in _EFFECTS_OF_TORCH or name.partition("::")[0] in COLLECTIVE_SPACES for name in entries]
        _effects[:] = [None if own else entry.effect for own, entry in zip(known, entries.values(), strict=True)]
    return [holder for holder in _effects if holder is not None and holder._effect is not None] != []


_effects: list[Any] = []
"""The holder of each registered op's effect; None for torch's own."""
_EFFECTS_OF_TORCH = names("""
    aten::_print aten::_linalg_check_errors
    higher_order::call_torchbind higher_order::print higher_order::invoke_leaf_function
""")
