"""The review of what is claimed of each op: torch's own samples of their arguments are run, and each claim held to."""

import contextlib
import itertools

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from recompute.engine.cut import ops, reviewed_ops
from recompute.engine.cut.ops import Kind, facts_of_call, is_defined

aten = torch.ops.aten
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def _storages(values):
    storages = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in storages}


def _bytes(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_same(a, b):
    """Whether two outputs of an op agree in every bit, and lie alike in memory."""
    if not isinstance(a, Tensor):
        return a == b
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)))


def _are_same(op, a, b):
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(_is_same(*pair) for slot, pair in enumerate(pairs) if is_defined(op, slot))


def _generator(args, kwargs):
    """The one that an op draws from, if it draws."""
    for value in kwargs.values():
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device")
    if device is None:
        devices = [leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        device = next((device for device in devices if device.type == "cuda"), "cpu")
    device = torch.device(device)
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def _is_plain(values):
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return all(
        type(leaf) in (Tensor, torch.nn.Parameter)
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_nested
        and not leaf._is_zerotensor()
        for leaf in tensors
    )


def _is_lazy(values):
    return any(isinstance(leaf, Tensor) and (leaf.is_conj() or leaf.is_neg()) for leaf in tree_leaves(values))


class Review(TorchDispatchMode):
    """Runs each op twice, and notes where it does not do what is claimed of it."""

    def __init__(self):
        super().__init__()
        self.seen = {kind: set() for kind in Kind}
        self.wrong = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(op, OpOverload) or not _is_plain((args, kwargs)):
            return op(*args, **kwargs)
        known = ops.facts_of_call(op, args, kwargs)
        generator = _generator(args, kwargs)
        inputs = _storages((args, kwargs))
        before = {key: _bytes(storage).clone() for key, storage in inputs.items()}
        state = generator.get_state()
        output = op(*args, **kwargs)
        if not _is_plain(output):
            return output
        self.seen[known.kind].add(op._schema.name.removeprefix("aten::"))
        said = []
        written = _storages([kwargs[where] if isinstance(where, str) else args[where] for where in known.writes])
        if any(not torch.equal(_bytes(inputs[key]), before[key]) for key in inputs.keys() - written):
            said.append("changes an argument")
        if known.kind in (Kind.VIEW, Kind.PURE, Kind.IN_PLACE) and not torch.equal(generator.get_state(), state):
            said.append("draws random numbers")
        shared = _storages(output).keys() & inputs.keys()
        if known.kind is Kind.VIEW and len(shared) != len(_storages(output)):
            said.append("gives new memory")
        if known.kind in (Kind.PURE, Kind.RANDOM):
            generator.set_state(state)
            said += self._compare(op, output, op(*args, **kwargs), shared)
        if known.kind is Kind.IN_PLACE:
            said += self._repeat_in_place(op, args, kwargs, inputs, before)
        self.wrong |= {(op._schema.name, what) for what in said}
        return output

    @staticmethod
    def _compare(op, output, again, shared):
        if shared:
            yield "shares memory with an argument"
        if len(_storages(output)) < sum(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
            yield "shares memory between its outputs"
        if _is_lazy(output):
            yield "conjugates or negates later"
        elif not _are_same(op, output, again):
            yield "gives other bits when run again"

    @staticmethod
    def _repeat_in_place(op, args, kwargs, inputs, before):
        def as_it_was(leaf):
            if not isinstance(leaf, Tensor):
                return leaf
            storage = before[leaf.untyped_storage()._cdata].untyped_storage()
            old = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            old.set_(storage, leaf.storage_offset(), leaf.size(), leaf.stride())
            return torch._conj(old) if leaf.is_conj() else old

        args, kwargs = tree_map(as_it_was, (args, kwargs))
        if _is_lazy(args):
            return
        op(*args, **kwargs)
        if any(not torch.equal(_bytes(storage), before[key]) for key, storage in inputs.items()):
            yield "writes other bits when run again"


@pytest.fixture(scope="module")
def op_db():
    """torch's own samples of the arguments of some 700 ops."""
    from torch.testing._internal import common_methods_invocations

    # Which forbids, for good, to set torch.backends' flags otherwise than by context managers.
    torch.backends.__allow_nonbracketed_mutation_flag = True
    return common_methods_invocations.op_db


def _review_samples(review, info, device, dtype, count):
    is_differentiable = info.supports_autograd and dtype is torch.float32
    # What info.sample_inputs() wraps into something that walks the stack for each sample.
    samples = info.sample_inputs_func(info, device, dtype, is_differentiable)
    for sample in itertools.islice(samples, count):
        with review:
            output = info.op(sample.input, *sample.args, **sample.kwargs)
            leaves = [leaf for leaf in tree_leaves((output,)) if isinstance(leaf, Tensor) and leaf.requires_grad]
            inputs = [
                leaf
                for leaf in tree_leaves((sample.input, sample.args, sample.kwargs))
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            if leaves and _is_plain(leaves):
                loss = sum(leaf.abs().sum() for leaf in leaves)
                torch.autograd.grad(loss, inputs, allow_unused=True)
        if info.inplace_variant is not None and isinstance(sample.input, Tensor) and not sample.broadcasts_input:
            # Some cannot hold their result in their input's dtype.
            with review, contextlib.suppress(RuntimeError):
                info.inplace_variant(sample.input.detach().clone(), *sample.args, **sample.kwargs)


# They compile CUDA code, or have samples that some device refuses.
NOT_RUN = ("jiterator", "sparse.mm", "_softmax_backward_data")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


def _ramp(device, *shape, dtype=torch.float32):
    return torch.linspace(-3, 3, torch.Size(shape).numel(), device=device).view(shape).to(dtype)


def _batch_norm_arguments(device):
    weight = torch.ones(3, device=device)
    return _ramp(device, 4, 3, 5, 5), weight, weight.clone(), weight.clone(), weight.clone()


# Ops that torch has no samples of, or none that reach them.
BY_HAND = {
    "_addmm_activation": lambda at: aten._addmm_activation(_ramp(at, 5), _ramp(at, 4, 3), _ramp(at, 3, 5)),
    "_grouped_mm": lambda at: aten._grouped_mm(
        _ramp(at, 32, 16, dtype=torch.bfloat16),
        _ramp(at, 2, 16, 16, dtype=torch.bfloat16).transpose(1, 2),
        torch.tensor([16, 32], dtype=torch.int32, device=at),
    ),
    "_int_mm": lambda at: aten._int_mm(_ramp(at, 32, 16, dtype=torch.int8), _ramp(at, 16, 32, dtype=torch.int8)),
    "_is_all_true": lambda at: aten._is_all_true(_ramp(at, 4) > 0),
    "_is_any_true": lambda at: aten._is_any_true(_ramp(at, 4) > 0),
    "_masked_softmax": lambda at: aten._masked_softmax(_ramp(at, 2, 2, 4, 4), _ramp(at, 2, 2, 4, 4) > 2, -1, 2),
    "_native_batch_norm_legit_functional": lambda at: aten._native_batch_norm_legit_functional(
        *_batch_norm_arguments(at), True, 0.1, 1e-5
    ),
    "_native_batch_norm_legit_no_training": lambda at: aten._native_batch_norm_legit_no_training(
        *_batch_norm_arguments(at), 0.1, 1e-5
    ),
    "_scaled_mm": lambda at: aten._scaled_mm(
        _ramp(at, 16, 32, dtype=torch.float8_e4m3fn),
        _ramp(at, 16, 32, dtype=torch.float8_e4m3fn).t(),
        torch.ones((), device=at),
        torch.ones((), device=at),
        out_dtype=torch.bfloat16,
    ),
    "_upsample_bicubic2d_aa": lambda at: aten._upsample_bicubic2d_aa(_ramp(at, 1, 2, 6, 6), [3, 4], False),
    "_upsample_nearest_exact3d": lambda at: aten._upsample_nearest_exact3d(_ramp(at, 1, 2, 3, 3, 3), [4, 5, 6]),
    "_weight_norm_interface": lambda at: aten._weight_norm_interface(_ramp(at, 4, 3), _ramp(at, 4, 1)),
    "col2im": lambda at: aten.col2im(_ramp(at, 2, 27, 16), [6, 6], [3, 3], [1, 1], [0, 0], [1, 1]),
    "copy": lambda at: aten.copy(_ramp(at, 3), _ramp(at, 1)),
    "linalg__powsum": lambda at: aten.linalg__powsum(_ramp(at, 4, 3), 2, [1]),
    "native_dropout": lambda at: aten.native_dropout(_ramp(at, 100), 0.5, True),
    "rand_like": lambda at: aten.rand_like(_ramp(at, 100)),
    "zero": lambda at: aten.zero(_ramp(at, 3)),
}


def _halves(device):
    """q, k, v: (2, 4, 256, 64)"""
    q, k, v = (torch.randn(2, 4, 256, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


BY_HAND_ON_CUDA = {
    "_scaled_dot_product_flash_attention": lambda at: [
        aten._scaled_dot_product_flash_attention(*_halves(at), dropout, True) for dropout in (0.0, 0.1)
    ],
    "_scaled_dot_product_efficient_attention": lambda at: [
        aten._scaled_dot_product_efficient_attention(*_halves(at), None, True, dropout, True) for dropout in (0.0, 0.1)
    ],
    "_scaled_dot_product_cudnn_attention": lambda at: [
        aten._scaled_dot_product_cudnn_attention(*_halves(at), None, True, dropout, True) for dropout in (0.0, 0.1)
    ],
    "_cudnn_attention_forward": lambda at: aten._cudnn_attention_forward(
        *_halves(at), None, None, None, 256, 256, True, 0.0, True, False
    ),
    "_flash_attention_forward": lambda at: aten._flash_attention_forward(
        *_halves(at), None, None, 4, 4, 0.0, True, False
    ),
    "_efficient_attention_forward": lambda at: aten._efficient_attention_forward(
        *_halves(at), None, None, None, None, None, 0.0, 1, True
    ),
    "cudnn_batch_norm": lambda at: [
        aten.cudnn_batch_norm(*_batch_norm_arguments(at), training, 0.1, 1e-5) for training in (False, True)
    ],
    "_fused_rms_norm": lambda at: aten._fused_rms_norm(_ramp(at, 4, 8), [8], _ramp(at, 8), 1e-6),
    "cudnn_grid_sampler": lambda at: aten.cudnn_grid_sampler(_ramp(at, 2, 3, 8, 8), _ramp(at, 2, 4, 4, 2) / 3),
}

# Enough work for many blocks: an order that is left to chance shows itself.
LARGE_ON_CUDA = [
    lambda at: [_noise(at, 1 << 24).sum(), _noise(at, 1 << 24).var(), torch.linalg.vector_norm(_noise(at, 1 << 24))],
    lambda at: [_noise(at, 4096, 4096).mean(dim) for dim in (0, 1)],
    lambda at: [_noise(at, 64, 1 << 16).logsumexp(1), torch.var_mean(_noise(at, 1 << 16, 64), 0)],
    lambda at: [_noise(at, 64, 1 << 17).softmax(1), _noise(at, 1 << 14, 1024).log_softmax(0)],
    lambda at: F.layer_norm(_noise(at, 4096, 4096), [4096]),
    lambda at: F.group_norm(_noise(at, 16, 64, 64, 64), 8),
    lambda at: F.rms_norm(_noise(at, 4096, 4096), [4096]),
    lambda at: [_noise(at, 64, 1 << 16, dtype=dtype) @ _noise(at, 1 << 16, 64, dtype=dtype) for dtype in FLOATS],
    lambda at: [_noise(at, 2, 64, 1 << 14, dtype=dtype) @ _noise(at, 2, 1 << 14, 8, dtype=dtype) for dtype in FLOATS],
    lambda at: [_noise(at, 1000, 1 << 16) @ _noise(at, 1 << 16), _noise(at, 1 << 22) @ _noise(at, 1 << 22)],
    lambda at: F.linear(_noise(at, 8192, 4096), _noise(at, 100, 4096), _noise(at, 100)),
    *(
        lambda at, dtype=dtype: F.conv2d(
            _noise(at, 16, 256, 28, 28, dtype=dtype), _noise(at, 64, 256, 3, 3, dtype=dtype), padding=1
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
    *(
        lambda at, layout=layout: F.batch_norm(
            _noise(at, 32, 64, 56, 56).to(memory_format=layout),
            None,
            None,
            _noise(at, 64),
            _noise(at, 64),
            training=True,
        )
        for layout in (torch.contiguous_format, torch.channels_last)
    ),
    lambda at: _noise(at, 1000, 512)[torch.randint(0, 1000, (1 << 15,), device=at)],
    lambda at: F.embedding(torch.randint(0, 1000, (1 << 15,), device=at), _noise(at, 1000, 512)),
    lambda at: _noise(at, 1 << 15, 64).gather(1, torch.randint(0, 64, (1 << 15, 64), device=at)),
    lambda at: torch.zeros(1 << 12, 64, device=at).scatter(1, torch.randint(0, 64, (1 << 12, 64), device=at), 1.0),
    lambda at: torch.zeros(1 << 12, device=at).index_fill(0, torch.randint(0, 99, (1 << 15,), device=at), 1.0),
    lambda at: [F.max_pool2d(_noise(at, 16, 64, 64, 64), 3), _noise(at, 64, 1 << 16).max(1)],
    lambda at: [F.interpolate(_noise(at, 8, 16, 64, 64), scale_factor=1.7, mode="bicubic")],
    lambda at: F.cross_entropy(_noise(at, 8192, 1000), torch.randint(0, 1000, (8192,), device=at)),
    lambda at: F.fold(_noise(at, 8, 64 * 9, 62 * 62), 64, 3),
]


def _noise(device, *shape, dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=dtype)


class TestReview:
    @pytest.mark.parametrize("device", ["cpu", GPU])
    @pytest.mark.slow
    def test_ops_do_what_is_claimed_of_them(self, op_db, device):
        review = Review()
        torch.manual_seed(0)
        for info in op_db:
            if not info.name.startswith(NOT_RUN):
                for dtype in DTYPES:
                    if dtype in info.supported_dtypes(device):
                        _review_samples(review, info, device, dtype, 10)
        by_hand = BY_HAND | (BY_HAND_ON_CUDA if device == "cuda" else {})
        for run in by_hand.values():
            with review:
                run(device)
        assert review.wrong == set()
        listed = {name.partition(".")[0] for name in reviewed_ops.PURE | reviewed_ops.RANDOM} - {"miopen_batch_norm"}
        only_on_cuda = BY_HAND_ON_CUDA.keys() if device == "cpu" else set()
        only_on_cpu = {"_scaled_dot_product_flash_attention_for_cpu"} if device == "cuda" else set()
        unseen = listed - review.seen[Kind.PURE] - review.seen[Kind.RANDOM]
        assert unseen == only_on_cuda | only_on_cpu

    @pytest.mark.gpu
    @pytest.mark.parametrize("index", range(len(LARGE_ON_CUDA)))
    def test_large_calls_give_the_same_bits_each_time(self, index):
        torch.manual_seed(0)
        with Review() as review:
            LARGE_ON_CUDA[index]("cuda")
        assert review.wrong == set()
        assert review.seen[Kind.PURE]

    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize(
        ("device", "op", "dtype"),
        [
            ("cpu", aten.native_batch_norm, torch.float32),
            ("cpu", aten.native_batch_norm, torch.bfloat16),
            pytest.param("cuda", aten.native_batch_norm, torch.float32, marks=pytest.mark.gpu),
            pytest.param("cuda", aten.native_batch_norm, torch.bfloat16, marks=pytest.mark.gpu),
            pytest.param("cuda", aten.cudnn_batch_norm, torch.float32, marks=pytest.mark.gpu),
            pytest.param("cuda", aten.cudnn_batch_norm, torch.float16, marks=pytest.mark.gpu),
        ],
    )
    def test_a_batch_norm_gives_the_same_bits_without_the_statistics_that_it_collects(
        self, device, op, dtype, memory_format
    ):
        torch.manual_seed(0)
        for shape in ((2, 3, 5, 5), (32, 64, 28, 28)):
            x = torch.randn(shape, device=device).to(dtype, memory_format=memory_format)
            weight, bias, mean, variance = torch.rand(4, shape[1], device=device)
            args = (x, weight, bias, mean, variance, True, 0.1, 1e-5)
            statistics = facts_of_call(op.default, args, {}).running_statistics
            without = [None if position in statistics else value for position, value in enumerate(args)]
            assert _are_same(op.default, op(*args), op(*without))
