"""What the tape knows of each op: whether running it again gives the same bits, what it writes to and what it costs.

An op that nothing here calls pure, by its name, its tags or its schema, is opaque: its outputs are kept (invariant 4).
The named ops were reviewed for CPU and CUDA against "Avoiding nondeterministic algorithms" of torch's documentation
(``torch.use_deterministic_algorithms``), and ``tests/engine/test_ops_review.py`` runs the review.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tag, Tensor
from torch._library import simple_registry
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

PINV = torch.ops.aten.linalg_pinv.atol_rtol_tensor


CASTS_INSIDE = frozenset(
    (
        PINV,
        torch.ops.aten._trilinear.default,  # of nn.Bilinear
        torch.ops.aten._native_multi_head_attention.default,  # this and the next: in eval mode without gradients
        torch.ops.aten._transformer_encoder_layer_fwd.default,
    )
)
"""Ops that autocast has no rule for, but whose kernels call ops that it has one for.

torch's own sample inputs find no others. Under inference mode every composite op is one too, because a dispatch mode
sees it whole there.
"""


class Kind(enum.Enum):
    """What running an op again amounts to."""

    VIEW = "it makes nothing new: its outputs, if any are tensors, share memory with its inputs"
    PURE = "the same inputs give the same bits in new memory, and nothing else happens"
    RANDOM = "pure, given the state of the random generator that it draws from"
    IN_PLACE = "pure, but that it writes its result over an input"
    OPAQUE = "none of these, or not known"


class OpFacts(NamedTuple):
    """What is known of an op. If that depends on its arguments, it ``varies``; then ask ``facts_of_call``."""

    name: str
    """Without the overload: "aten.mm"."""
    kind: Kind
    family: str | None = None
    """"gemm", "convolution", "attention" or "collective" of an op that is costly, or ``is_thin``; None of others."""
    writes: tuple[int | str, ...] = ()
    """The arguments that it changes: their positions, or their names if they are keyword-only."""
    reason: str = ""
    """Why its outputs cannot be regenerated; "" if they can."""
    varies: bool = False
    running_statistics: tuple[int | str, ...] = ()
    """The arguments that only collect statistics. They are all that the op writes to. With None in their places the op
    is pure, and its outputs are the same."""
    casts_inside: bool = False
    """Whether autocast applies to the ops that its kernel calls."""
    is_foreign: bool = False
    """Whether it is another library's, which may draw random numbers without saying so."""
    is_thin: bool = False
    """Whether it is a GEMM that takes no longer than to read and write its output. Of calls alone this is known."""

    @property
    def is_costly(self) -> bool:
        """Whether only a rule that names its family runs it again."""
        return self.family is not None and not self.is_thin


FACTORY = "a factory: something unseen may have filled its output"
DATA_DEPENDENT = "its output's shape depends on data"
UNKNOWN = "not known to be pure"
DIFFERS = "it adds up or overwrites in an order that may differ from run to run"
REORDERS = "it may order equal values another way when run again"
WRITES = "it writes into an argument, and is not known to do so alike twice"
DRAWS_IN_PLACE = "it draws random numbers into an argument"
RESHAPES = "it changes the shape or the memory of an argument"
COLLECTIVE = "a collective, whose result is ready only once it is waited for"
HIGHER_ORDER = "a higher-order operator"
STATISTICS = "it updates running statistics"
EFFECT = "it has an effect, which is to happen once"
NO_TENSOR = "it gives no tensor"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FAMILIES = {
    # cuBLAS gives the same bits on one stream and one kind of GPU (cuBLAS documentation, "Results reproducibility"), as
    # long as it adds nothing atomically: that is off by default, and torch never turns it on.
    "gemm": _names("""
        mm bmm mv dot addmm baddbmm addbmm addmv _addmm_activation _int_mm _scaled_mm _grouped_mm
    """),
    "convolution": _names("convolution"),
    "attention": _names("""
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward
    """),
}

# Everything that torch tags as pointwise is pure too, unless it is tagged as random.
_POINTWISE = _names("""
    leaky_relu _prelu_kernel hardswish glu log_sigmoid_forward floor_divide complex polar bucketize searchsorted addr
    copy fill zero
""")
_SOFTMAX = _names("_softmax _log_softmax _safe_softmax _masked_softmax")
# These are deterministic on CUDA too: the last block to finish adds up the results of all blocks, in a fixed order.
_REDUCTIONS = _names("""
    sum nansum mean prod amax amin aminmax max min argmax argmin all any _is_all_true _is_any_true count_nonzero
    logsumexp norm linalg_vector_norm linalg__powsum var var_mean std std_mean
""")
_NORMS = _names("""
    native_layer_norm native_group_norm _fused_rms_norm _weight_norm_interface
    _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
""")
_STATEFUL_NORMS = _names("native_batch_norm cudnn_batch_norm miopen_batch_norm")
# Only their forward is listed. The backward of many of them scatters, and is listed nowhere here.
_GATHERS = _names(
    "index index_select gather take embedding grid_sampler_2d grid_sampler_3d cudnn_grid_sampler im2col col2im"
)
_MOVES = _names("""
    _to_copy cat stack repeat flip roll rot90 tril triu diag_embed constant_pad_nd pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    select_scatter slice_scatter diagonal_scatter
""")
# These are deterministic though indices may repeat, because equal indices write equal values.
_FILLS = _names("scatter.value index_fill masked_fill")
_POOLING = _names("""
    avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d
    max_pool2d_with_indices max_pool3d_with_indices
""")
_UPSAMPLING = _names("""
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
""")
_LOSSES = _names("""
    mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
    nll_loss_forward
""")
_SCANS = _names("cumsum cumprod")

_PURE = frozenset().union(
    *_FAMILIES.values(),
    *(_POINTWISE, _SOFTMAX, _REDUCTIONS, _NORMS, _STATEFUL_NORMS, _GATHERS, _MOVES, _FILLS, _POOLING, _UPSAMPLING),
    *(_LOSSES, _SCANS),
)

_RANDOM = _names("rand rand_like randn randn_like randint randint_like bernoulli normal native_dropout")

# These are views, although their schemas say that the output is new.
_UNANNOTATED_VIEWS = _names("_unsafe_view unsafe_split unsafe_split_with_sizes lift")

# The arguments that these write to, although their schemas say that nothing is written: the statistics of batch norms,
# and the destination of copies between backends.
_UNANNOTATED_WRITES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_STATEFUL_NORMS, (3, 4)),
    **dict.fromkeys(_names("batch_norm_gather_stats batch_norm_gather_stats_with_counts"), (3, 4)),
    "batch_norm_update_stats": (1, 2),
    **dict.fromkeys(_names("_copy_from _copy_from_and_resize"), (1,)),
}

# These are opaque, as is everything that is not named above. They are listed so that ``explain`` can say why: they add
# atomically, or the last of equal indices wins.
_DIFFER = _names("""
    index_add index_copy index_put _index_put_impl _unsafe_index_put index_reduce put scatter scatter_add scatter_reduce
    bincount histc max_unpool2d max_unpool3d nll_loss2d_forward
""")
_REORDER = _names("topk sort kthvalue median nanmedian mode cummax cummin")

# Namespaces of torch itself that serve other uses than eager training, or that were not reviewed.
_INTERNAL_SPACES = _names("""
    prim prims debugprims rngprims inductor inductor_prims quantized _quantized quantization sparse mkl mkldnn onednn
    mkldnn_prepacked prepacked profiler static_runtime export flex_gemm _native _native_aot _test
""")
_COLLECTIVE_SPACES = _names("""
    c10d c10d_functional _c10d_functional _c10d_functional_autograd _dtensor fsdp symm_mem
""")
# Collectives write to tensors without saying so in their schemas. All ops of c10d and fsdp write to whatever is not
# called an input. These write to all of their tensors.
_COLLECTIVE_WRITERS = _names("wait_tensor wait_tensors irecv batch_p2p_ops")

_FAMILY_WORDS = {
    "attention": ("attention", "attn", "fmha", "sdpa"),
    "collective": ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall"),
    "gemm": ("gemm", "matmul", "_mm_", "_bmm_", "_addmm_", "_linear_", "_mlp_"),
    "convolution": ("conv1d", "conv2d", "conv3d", "convolution"),
}


def facts(op: Any) -> OpFacts:
    """What is known of ``op``, an ``OpOverload`` or a ``HigherOrderOperator``, whatever its arguments.

    Where the arguments matter this is the worst case. ``facts_of_call`` may say something better.
    """
    known = _known.get(op)
    if known is None:
        known = _known[op] = _classify(op)
    return known


def facts_of_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpFacts:
    """What is known of ``op(*args, **kwargs)``. Attention with a dropout of 0, say, draws no random numbers."""
    known = facts(op)
    if not known.varies:
        return known
    condition, better = _variants[op]
    return better if condition.holds(functools.partial(_argument, op, args, kwargs)) else known


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``op(*args, **kwargs)`` draws random numbers that it can draw again."""
    return facts_of_call(op, args, kwargs).kind is Kind.RANDOM


def is_defined(op: Any, slot: int) -> bool:
    """Whether the op writes to its output number ``slot``, so that the outputs of two runs can be compared.

    Attention without dropout does not write to the outputs for the generator's state: they show what the memory held
    before. Nothing reads them. (Seen on an H200, torch 2.11: efficient and cuDNN attention, and the unused outputs of
    flash attention.)
    """
    return facts(op).family != "attention" or slot < 2


def is_op(name: str) -> bool:
    """Whether there is an op called ``name``, in the form of ``OpFacts.name``.

    An op that is a composite of others on every backend does not count, unless it is listed as pure: a tape sees only
    the others.
    """
    space, _, base = name.partition(".")
    packet = getattr(getattr(torch.ops, space), base, None)
    if not isinstance(packet, OpOverloadPacket):
        return isinstance(packet, HigherOrderOperator)
    names = [getattr(packet, overload).name() for overload in packet.overloads() if "out" not in overload]
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key
    return base in _PURE or not all(is_composite(op, "CompositeImplicitAutograd") for op in names)


def is_costly_op(name: str) -> bool:
    """Whether the op called ``name`` is of a costly family, such as GEMMs."""
    space, _, base = name.partition(".")
    packet = getattr(getattr(torch.ops, space), base, None)
    if not isinstance(packet, OpOverloadPacket):
        return False
    return any(facts(getattr(packet, overload)).family is not None for overload in packet.overloads())


class _Condition(NamedTuple):
    """Which calls of an op are pure, if not all are; or which GEMMs are thin.

    reason: why the other calls are opaque; "" if they are random instead.
    """

    holds: Callable[[Callable[[str], Any]], bool]
    """Whether a call is one of these. It is passed a function that returns the call's argument of a name."""
    reason: str


_known: dict[Any, OpFacts] = {}
_variants: dict[Any, tuple[_Condition, OpFacts]] = {}


def _classify(op: Any) -> OpFacts:
    if not isinstance(op, OpOverload):
        name, reason = f"{op.namespace}.{op.name()}", EFFECT if _has_effect(op) else HIGHER_ORDER
        return OpFacts(name, Kind.OPAQUE, _family_by_name(op.name()), reason=reason)
    space, base = op._schema.name.split("::")
    writes = _writes(op, space, base)
    is_foreign = space not in ("aten", "recompute") and space not in _INTERNAL_SPACES | _COLLECTIVE_SPACES
    returns = op._schema.returns
    if space in _COLLECTIVE_SPACES:
        best = OpFacts("", Kind.OPAQUE, "collective", writes, COLLECTIVE)
    elif is_foreign and (_has_effect(op) or not (returns or writes)):
        best = OpFacts("", Kind.OPAQUE, _family_by_name(base), writes, EFFECT)
    elif not writes and not _returns_tensors(op) and (is_foreign or (space == "aten" and not returns)):
        best = OpFacts("", Kind.OPAQUE, reason=NO_TENSOR)
    elif writes and (op._schema.is_mutable or space != "aten" or base not in _PURE):
        best = _classify_writer(op, space, base, writes)
    elif _is_view(op, space, base) or not _returns_tensors(op):
        best = OpFacts("", Kind.VIEW)
    elif space == "aten":
        best = _classify_aten(op, base)
    elif space in _INTERNAL_SPACES:
        best = _opaque(op, UNKNOWN)
    else:
        best = _classify_custom(op, base)
    best = best._replace(name=f"{space}.{base}", casts_inside=op in CASTS_INSIDE, is_foreign=is_foreign)
    if best.family == "gemm" and best.kind is not Kind.OPAQUE and (factors := _FACTORS.get(base.removesuffix("_"))):
        _variants[op] = _Condition(functools.partial(_is_thin, factors), ""), best._replace(is_thin=True)
        return best._replace(varies=True)
    condition = _condition(op, space, base)
    if condition is None or best.kind is Kind.OPAQUE:
        return best
    _variants[op] = condition, best
    kind = Kind.OPAQUE if condition.reason else Kind.RANDOM
    worst = best._replace(kind=kind, reason=condition.reason, writes=writes, varies=True)
    return worst._replace(running_statistics=writes) if base in _STATEFUL_NORMS else worst


def _classify_writer(op: OpOverload, space: str, base: str, writes: tuple[int | str, ...]) -> OpFacts:
    pure = base.removesuffix("_")
    if Tag.inplace_view in op.tags:
        return OpFacts("", Kind.OPAQUE, writes=writes, reason=RESHAPES)
    if Tag.nondeterministic_seeded in op.tags:
        return OpFacts("", Kind.OPAQUE, writes=writes, reason=DRAWS_IN_PLACE)
    if space != "aten":
        return OpFacts("", Kind.OPAQUE, _family_by_name(base), writes, WRITES)
    if writes == (0,) and base.endswith("_") and _is_pure(_namesake(op, pure), pure):
        return OpFacts("", Kind.IN_PLACE, _family(pure), writes)
    return OpFacts("", Kind.OPAQUE, _family(pure), writes, DIFFERS if pure in _DIFFER else WRITES)


def _classify_aten(op: OpOverload, base: str) -> OpFacts:
    if base in _RANDOM:
        return OpFacts("", Kind.RANDOM)
    if _is_pure(op, base):
        return OpFacts("", Kind.PURE, _family(base))
    if base in _DIFFER:
        return _opaque(op, DIFFERS)
    if base in _REORDER:
        return _opaque(op, REORDERS)
    is_factory = base.startswith("new_") or base.endswith("_like") or not any(_tensor_arguments(op))
    return _opaque(op, FACTORY if is_factory else UNKNOWN)


def _classify_custom(op: OpOverload, base: str) -> OpFacts:
    """An op of another library. What its schema and its tags say of it is believed."""
    if any(value.alias_info is not None for value in op._schema.returns) or Tag.nondeterministic_bitwise in op.tags:
        return _opaque(op, UNKNOWN)
    if Tag.data_dependent_output in op.tags or Tag.dynamic_output_shape in op.tags:
        return _opaque(op, DATA_DEPENDENT)
    family = _family_by_name(base)
    if family == "collective":
        return OpFacts("", Kind.OPAQUE, family, reason=COLLECTIVE)
    takes_generator = any("Generator" in str(argument.type) for argument in op._schema.arguments)
    is_random = takes_generator or Tag.nondeterministic_seeded in op.tags
    return OpFacts("", Kind.RANDOM if is_random else Kind.PURE, family)


def _has_effect(op: Any) -> bool:
    """Whether an op is registered as having an effect; torch takes one that is given a ScriptObject for one, too."""
    name = op.name() if isinstance(op, OpOverload) else f"{op.namespace}::{op.name()}"
    return simple_registry.singleton.find(name).effect.effect is not None


def is_effect_registered() -> bool:
    """Whether some op has been registered as having an effect, other than those of torch's own. It takes 2 us."""
    entries = simple_registry.singleton._data
    if len(entries) != len(_effects):  # an entry stays, and what it holds of an effect is what changes
        _effects[:] = [None if name in _EFFECTS_OF_TORCH else entry.effect for name, entry in entries.items()]
    return [holder for holder in _effects if holder is not None and holder._effect is not None] != []


_effects: list[Any] = []
"""What holds the effect of each registered op; None for torch's own."""
_EFFECTS_OF_TORCH = _names("""
    aten::_print aten::_linalg_check_errors
    higher_order::call_torchbind higher_order::print higher_order::invoke_leaf_function
""")


def _opaque(op: OpOverload, reason: str) -> OpFacts:
    if Tag.data_dependent_output in op.tags or Tag.dynamic_output_shape in op.tags:
        reason = DATA_DEPENDENT
    return OpFacts("", Kind.OPAQUE, reason=reason)


def _is_pure(op: OpOverload, base: str) -> bool:
    if Tag.nondeterministic_bitwise in op.tags:
        return False
    if base in _PURE or f"{base}.{op._overloadname}" in _PURE:
        return True
    return Tag.pointwise in op.tags and Tag.nondeterministic_seeded not in op.tags and _returns_tensors(op)


def _namesake(op: OpOverload, base: str) -> OpOverload:
    """The op that gives in new memory what ``op`` writes in place; ``op`` itself if none takes the same arguments."""
    return getattr(getattr(torch.ops.aten, base, None), op._overloadname, op)


def _is_view(op: OpOverload, space: str, base: str) -> bool:
    if space == "aten" and base in _UNANNOTATED_VIEWS:
        return True
    returns = op._schema.returns
    return bool(returns) and all(value.alias_info is not None for value in returns)


def _returns_tensors(op: OpOverload) -> bool:
    return any("Tensor" in str(value.type) for value in op._schema.returns)


def _tensor_arguments(op: OpOverload) -> Iterator[tuple[int | str, Any]]:
    """Each argument that takes tensors, with its position, or with its name if it is keyword-only."""
    for position, argument in enumerate(op._schema.arguments):
        if "Tensor" in str(argument.type):
            yield argument.name if argument.kwarg_only else position, argument


def _writes(op: OpOverload, space: str, base: str) -> tuple[int | str, ...]:
    if space in ("c10d", "fsdp"):
        return tuple(where for where, argument in _tensor_arguments(op) if "input" not in argument.name)
    if space in _COLLECTIVE_SPACES and base in _COLLECTIVE_WRITERS:
        return tuple(where for where, _ in _tensor_arguments(op))
    if Tag.maybe_aliasing_or_mutating in op.tags and space != "aten":
        return tuple(where for where, _ in _tensor_arguments(op))
    unannotated = _UNANNOTATED_WRITES.get(base, ()) if space == "aten" else ()
    return tuple(
        where
        for where, argument in _tensor_arguments(op)
        if where in unannotated or (argument.alias_info and argument.alias_info.is_write)
    )


def _family(base: str) -> str | None:
    return next((family for family, names in _FAMILIES.items() if base in names), None)


def _family_by_name(base: str) -> str | None:
    """The family of another library's op, by words in its name."""
    name = f"_{base.lower()}_"
    return next((family for family, words in _FAMILY_WORDS.items() if any(word in name for word in words)), None)


def _argument(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    position, default = _parameters(op)[name]
    return args[position] if position < len(args) else kwargs.get(name, default)


@functools.cache
def _parameters(op: OpOverload) -> dict[str, tuple[int, Any]]:
    """The position and the default of each argument, by name. Keyword-only ones have a position past all others."""
    arguments = op._schema.arguments
    return {
        argument.name: (len(arguments) if argument.kwarg_only else position, argument.default_value)
        for position, argument in enumerate(arguments)
    }


def _condition(op: OpOverload, space: str, base: str) -> _Condition | None:
    numbers = (argument.name for argument in op._schema.arguments if "Tensor" not in str(argument.type))
    if dropouts := [name for name in numbers if "dropout" in name]:
        return _Condition(lambda argument: not any(map(argument, dropouts)), "")
    if space == "recompute" and any(argument.name == "group" for argument in op._schema.arguments):
        return _Condition(lambda argument: not argument("group"), COLLECTIVE)  # ranks that share the words of a head
    return _CONDITIONS.get(base.removesuffix("_")) if space == "aten" else None


def _indexes_by_number(argument: Callable[[str], Any]) -> bool:
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in argument("indices"))


def _scans_in_order(argument: Callable[[str], Any]) -> bool:
    tensor = argument("self")
    dtype = argument("dtype") or tensor.dtype
    return not tensor.is_cuda or not (dtype.is_floating_point or dtype.is_complex)


def _convolves_in_order(argument: Callable[[str], Any]) -> bool:
    """cuDNN computes a transposed convolution as it computes a convolution's gradient: maybe with atomic additions."""
    if not argument("transposed") or not argument("input").is_cuda:
        return True
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def _leaves_statistics(argument: Callable[[str], Any]) -> bool:
    return not argument("training") or argument("running_mean") is None


def _is_waited_for(argument: Callable[[str], Any]) -> bool:
    return not argument("non_blocking")


_CONDITIONS = {
    "index": _Condition(_indexes_by_number, DATA_DEPENDENT),
    **dict.fromkeys(_SCANS, _Condition(_scans_in_order, DIFFERS)),
    "convolution": _Condition(_convolves_in_order, DIFFERS),
    **dict.fromkeys(_STATEFUL_NORMS, _Condition(_leaves_statistics, STATISTICS)),
    **dict.fromkeys(("_to_copy", "copy"), _Condition(_is_waited_for, "a copy that is not waited for")),
}

FLOPS = 4e14
"""Floating-point operations a second of a nominal accelerator."""
BANDWIDTH = 2e12
"""Bytes that it moves a second."""
# Of the products that sum up to an element of a thin GEMM's output, the most for each byte of it. Reading and writing
# the byte takes as long: 2 / BANDWIDTH. In float32, a GPU's rate lies between that in TF32 and that without it.
_THIN, _THIN_IN_FLOAT32 = FLOPS / BANDWIDTH, FLOPS / 8 / BANDWIDTH

# The names of what these multiply: (..., M, K) and (..., K, N).
_FACTORS = {
    **dict.fromkeys(("mm", "bmm", "_grouped_mm"), ("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), ("mat1", "mat2")),
    "baddbmm": ("batch1", "batch2"),
}


def _is_thin(factors: tuple[str, str], argument: Callable[[str], Any]) -> bool:
    """Whether a GEMM takes no longer than to read and write its output, as each elementwise op does at least.

    The scores of attention are thin: sums over the size of a head. So is LoRA's second product. A router's is not: its
    output is small, and what it reads is not. No convolution counts as thin: those of few products, as depthwise ones,
    take several times as long as their arithmetic and their traffic.
    """
    left, right = map(argument, factors)
    if left.dim() > right.dim():  # a grouped GEMM whose groups stand side by side in its output
        return False
    *rows, products = map(size_hint, left.shape)
    made, itemsize = math.prod(rows) * size_hint(right.shape[-1]), left.element_size()
    read = math.prod(rows) * products + math.prod(map(size_hint, right.shape))
    return read <= made and products <= itemsize * (_THIN if itemsize <= 2 else _THIN_IN_FLOAT32)


def size_hint(size: Any) -> int:
    """A size; of a symbolic one, the number that it was traced with. To ask for it adds no guard."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def seconds(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
    """The time of ``output = op(*args, **kwargs)`` on the nominal accelerator: of its arithmetic or of its traffic.

    It is the longer one of the two.
    """
    flops, nbytes = work(op, args, kwargs, output)
    return max(flops / FLOPS, nbytes / BANDWIDTH)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in ``values``: lists, tuples and dicts inside of each other."""
    found: list[Tensor] = []
    _add_tensors((values,), found)
    return found


def _add_tensors(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _add_tensors(value, found)
        elif isinstance(value, dict):
            _add_tensors(value.values(), found)


def work(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[float, int]:
    """The floating-point operations of ``output = op(*args, **kwargs)``, if it is costly, and the bytes that it moves.

    ``torch.utils.flop_counter`` does not serve for this: its formulas refuse some shapes (attention with grouped
    heads), read lengths back from the device, and know no op of other libraries.
    """
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((args, kwargs, output)))
    return _flops(facts(op), args, output), nbytes


def _flops(known: OpFacts, args: tuple[Any, ...], output: Any) -> float:
    """The arithmetic of a costly op; 0 for other ops, and for arguments that its family does not expect."""
    operands = [value for value in args if isinstance(value, Tensor)]
    result = next(iter(tensors_in(output)), None)
    if result is None or len(operands) < 2:
        return 0.0
    if known.family == "gemm":
        left = operands["add" in known.name]  # the first operand of ``addmm`` and its like is what is added
        return 2.0 * result.numel() * math.prod(left.shape[-1:])
    if known.family == "convolution":
        data, weight = operands[:2]
        is_transposed = known.name == "aten.convolution" and args[6]
        return 2.0 * (data if is_transposed else result).numel() * math.prod(weight.shape[1:])
    if known.family == "attention":
        query, key = operands[:2]  # (batch, heads, tokens, size), or ([batch,] tokens, heads, size)
        tokens = -2 if "scaled_dot_product" in known.name else -3
        return 4.0 * query.numel() * math.prod(key.shape[tokens:][:1])
    return 0.0
