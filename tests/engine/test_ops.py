"""What is claimed of each op, and what op policies make of that: test_ops_review.py holds them to it."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from recompute.attach.check_effect import is_op
from recompute.engine.cut import op_costs, ops, reviewed_ops
from recompute.engine.cut.op_costs import seconds
from recompute.engine.cut.op_policy import op_policy
from recompute.engine.cut.ops import Kind, facts, facts_of_call
from recompute.policy.meaning import meaning_of
from recompute.policy.rules import Rule

aten = torch.ops.aten


ANY = object()
"""Of an op that does not bear to run again: whatever the reason is."""


@pytest.mark.parametrize(
    ("op", "kind", "family", "writes", "reason"),
    [
        (aten.t.default, Kind.VIEW, None, (), ""),
        (aten.split.Tensor, Kind.VIEW, None, (), ""),
        (aten._conj.default, Kind.VIEW, None, (), ""),
        (aten._unsafe_view.default, Kind.VIEW, None, (), ""),  # by its schema, its output is new
        (aten._local_scalar_dense.default, Kind.VIEW, None, (), ""),  # makes no tensor
        (torch.ops.prim.device.default, Kind.VIEW, None, (), ""),
        (aten.add.Tensor, Kind.PURE, None, (), ""),
        (aten._to_copy.default, Kind.OPAQUE, None, (), ANY),  # unless it is waited for
        (aten._native_batch_norm_legit.no_stats, Kind.PURE, None, (), ""),
        (aten.mm.default, Kind.PURE, "gemm", (), ""),
        (aten._scaled_mm.default, Kind.PURE, "gemm", (), ""),
        (aten._scaled_dot_product_flash_attention.default, Kind.RANDOM, "attention", (), ""),  # unless its dropout is 0
        (aten.native_dropout.default, Kind.RANDOM, None, (), ""),
        (aten.rand_like.default, Kind.RANDOM, None, (), ""),
        (torch.ops.higher_order.flex_attention, Kind.OPAQUE, "attention", (), ANY),
        (torch.ops.prims.sin.default, Kind.OPAQUE, None, (), ANY),
        (aten.empty.memory_format, Kind.OPAQUE, None, (), ops.FACTORY),
        (aten.arange.default, Kind.OPAQUE, None, (), ops.FACTORY),
        (aten.nonzero.default, Kind.OPAQUE, None, (), ops.DATA_DEPENDENT),
        (aten.repeat_interleave.Tensor, Kind.OPAQUE, None, (), ops.DATA_DEPENDENT),
        (aten.scatter.src, Kind.OPAQUE, None, (), ops.DIFFERS),
        (aten.index_put.default, Kind.OPAQUE, None, (), ops.DIFFERS),
        (aten.topk.default, Kind.OPAQUE, None, (), ops.REORDERS),
        (aten._cudnn_rnn.default, Kind.OPAQUE, None, (), ops.UNKNOWN),
        (aten.add_.Tensor, Kind.IN_PLACE, None, (0,), ""),
        (aten.scatter_.value, Kind.IN_PLACE, None, (0,), ""),
        (aten.addmm_.default, Kind.IN_PLACE, "gemm", (0,), ""),
        (aten.scatter_.src, Kind.OPAQUE, None, (0,), ANY),
        (aten.index_add_.default, Kind.OPAQUE, None, (0,), ANY),
        (aten.bernoulli_.float, Kind.OPAQUE, None, (0,), ANY),
        (aten.rrelu_with_noise.default, Kind.OPAQUE, None, (1,), ANY),
        (aten.t_.default, Kind.OPAQUE, None, (0,), ANY),
        (aten.resize_.default, Kind.OPAQUE, None, (0,), ANY),
        (aten.mm.out, Kind.OPAQUE, "gemm", ("out",), ANY),
        (aten.max.dim_max, Kind.OPAQUE, None, ("max", "max_values"), ANY),
        (aten.native_batch_norm.default, Kind.OPAQUE, None, (3, 4), ANY),
        (aten.cudnn_batch_norm.default, Kind.OPAQUE, None, (3, 4), ANY),
        (aten.native_batch_norm.out, Kind.OPAQUE, None, (3, 4, "out", "save_mean", "save_invstd"), ANY),
        (aten._batch_norm_with_update.default, Kind.OPAQUE, None, (3, 4), ANY),
        (aten._native_batch_norm_legit.default, Kind.OPAQUE, None, (3, 4), ANY),
        (aten.batch_norm_update_stats.default, Kind.OPAQUE, None, (1, 2), ANY),
    ],
)
def test_what_is_known_of_an_op(op, kind, family, writes, reason):
    known = facts(op)
    assert (known.kind, known.writes) == (kind, writes)
    assert known.family == family
    assert known.reason == reason if reason is not ANY else bool(known.reason)


def test_facts_are_the_same_object_each_time():
    assert facts(aten.mm.default) is facts(aten.mm.default)
    assert facts(aten.mm.default).name == "aten.mm"


def test_is_op():
    assert is_op("aten._softmax")
    assert is_op("higher_order.flex_attention")
    assert not any(map(is_op, ("aten.no_such_op", "nowhere.mm", "mm", "aten.mm.default", "")))


def test_only_the_first_two_outputs_of_an_attention_are_sure_to_be_set():
    attention = aten._scaled_dot_product_efficient_attention.default
    assert [ops.is_defined(attention, slot) for slot in range(4)] == [True, True, False, False]
    assert ops.is_defined(aten.native_layer_norm.default, 2)


def test_names_in_the_lists_are_ops():
    reviewed = reviewed_ops.PURE | reviewed_ops.RANDOM | reviewed_ops.DIFFER | reviewed_ops.REORDER
    listed = reviewed | reviewed_ops.UNANNOTATED_VIEWS | reviewed_ops.UNANNOTATED_WRITES.keys()
    assert [name for name in sorted(listed) if not is_op(f"aten.{name.partition('.')[0]}")] == []


class TestCalls:
    """Of some ops, a call is known to be harmless by its arguments."""

    @pytest.mark.parametrize(
        ("op", "args"),
        [
            (aten._scaled_dot_product_flash_attention.default, lambda q, p: (q, q, q, p)),
            (aten._flash_attention_forward.default, lambda q, p: (q, q, q, None, None, 1, 1, p, False, False)),
        ],
    )
    def test_attention_draws_only_with_dropout(self, op, args):
        q = torch.zeros(1, 1, 1, 1)
        assert facts_of_call(op, args(q, 0.1), {}).kind is Kind.RANDOM
        assert facts_of_call(op, args(q, 0.0), {}) == ops.OpFacts(facts(op).name, Kind.PURE, "attention")

    def test_an_omitted_dropout_is_its_default(self):
        q = torch.zeros(1, 1, 1, 1)
        assert facts_of_call(aten._scaled_dot_product_flash_attention.default, (q, q, q), {}).kind is Kind.PURE
        assert facts_of_call(aten.native_dropout.default, (q, 0.5, True), {}).kind is Kind.RANDOM
        assert facts_of_call(aten.add.Tensor, (q, q), {}).kind is Kind.PURE

    @pytest.mark.parametrize(
        ("indices", "reason"),
        [
            ([torch.tensor([0])], ""),
            ([None, torch.tensor([0])], ""),
            ([torch.tensor([True, False])], ops.DATA_DEPENDENT),
            ([None, torch.tensor([1, 0], dtype=torch.uint8)], ops.DATA_DEPENDENT),
        ],
    )
    def test_an_index_of_booleans_gives_a_shape_that_depends_on_data(self, indices, reason):
        assert facts_of_call(aten.index.Tensor, (torch.zeros(2, 2), indices), {}).reason == reason
        assert facts(aten.index.Tensor).reason == ops.DATA_DEPENDENT

    @pytest.mark.parametrize("op", [aten.native_batch_norm.default, aten.cudnn_batch_norm.default])
    def test_a_batch_norm_is_pure_where_it_updates_nothing(self, op):
        x, stats = torch.zeros(2, 3), torch.zeros(3)
        training = facts_of_call(op, (x, stats, stats, stats, stats, True, 0.1, 1e-5), {})
        assert (training.kind, training.writes, training.running_statistics) == (Kind.OPAQUE, (3, 4), (3, 4))
        for running, is_training in ((stats, False), (None, True)):
            known = facts_of_call(op, (x, stats, stats, running, running, is_training, 0.1, 1e-5), {})
            assert (known.kind, known.writes, known.reason) == (Kind.PURE, (), "")

    @pytest.mark.parametrize(
        ("device", "dtype", "asked", "reason"),
        [
            ("cpu", torch.float32, None, ""),
            ("cuda", torch.int64, None, ""),
            ("cuda", torch.int64, torch.float32, ops.DIFFERS),
            ("cuda", torch.float32, None, ops.DIFFERS),
        ],
    )
    @pytest.mark.parametrize("op", [aten.cumsum.default, aten.cumsum_.default, aten.cumprod.default])
    def test_a_scan_of_floats_differs_from_run_to_run_on_cuda(self, op, device, dtype, asked, reason):
        tensor = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
        known = facts_of_call(op, (tensor, 0), {"dtype": asked} if asked else {})
        assert known.reason == reason
        assert known.writes == ((0,) if op is aten.cumsum_.default else ())

    def test_a_transposed_convolution_may_differ_from_run_to_run_on_cuda(self):
        def known(is_cuda, transposed):
            x = SimpleNamespace(is_cuda=is_cuda)
            return facts_of_call(aten.convolution.default, (x, x, None, [1], [0], [1], transposed, [0], 1), {})

        assert known(True, True) == ops.OpFacts(
            "aten.convolution", Kind.OPAQUE, "convolution", reason=ops.DIFFERS, varies=True
        )
        with torch.backends.cudnn.flags(deterministic=True):
            assert known(True, True).kind is Kind.PURE
        assert {known(True, False), known(False, True)} == {ops.OpFacts("aten.convolution", Kind.PURE, "convolution")}

    @pytest.mark.parametrize(
        ("op", "kind", "args", "unwaited"),
        [
            (aten._to_copy.default, Kind.PURE, (torch.zeros(1),), ((torch.zeros(1),), {"non_blocking": True})),
            (aten.copy_.default, Kind.IN_PLACE, (torch.zeros(1),) * 2, ((*[torch.zeros(1)] * 2, True), {})),
        ],
    )
    def test_a_copy_that_is_not_waited_for_is_kept(self, op, kind, args, unwaited):
        assert facts_of_call(op, args, {}).kind is kind
        assert facts_of_call(op, *unwaited).kind is Kind.OPAQUE


class TestLibraries:
    """Ops of other libraries are taken at the word of their schemas, tags and names."""

    @pytest.fixture
    def define(self):
        library = torch.library.Library("ops_of_a_test", "DEF")

        def define(schema, *tags):
            library.define(schema, tags=tags)
            return getattr(torch.ops.ops_of_a_test, schema.partition("(")[0]).default

        yield define
        library._destroy()

    @pytest.mark.parametrize(
        ("schema", "tags", "kind", "family", "writes"),
        [
            ("norm(Tensor x) -> Tensor", (), Kind.PURE, None, ()),
            ("noise(Tensor x) -> Tensor", (torch.Tag.nondeterministic_seeded,), Kind.RANDOM, None, ()),
            ("noise_of(Tensor x, Generator? g) -> Tensor", (), Kind.RANDOM, None, ()),
            ("racy(Tensor x) -> Tensor", (torch.Tag.nondeterministic_bitwise,), Kind.OPAQUE, None, ()),
            ("unique(Tensor x) -> Tensor", (torch.Tag.dynamic_output_shape,), Kind.OPAQUE, None, ()),
            ("row(Tensor(a) x) -> Tensor(a)", (), Kind.VIEW, None, ()),
            ("row_and_sum(Tensor(a) x) -> (Tensor(a), Tensor)", (), Kind.OPAQUE, None, ()),
            ("norm_(Tensor x, Tensor(a!) y, *, Tensor(b!) z) -> ()", (), Kind.OPAQUE, None, (1, "z")),
            ("log(Tensor x) -> ()", (), Kind.OPAQUE, None, ()),
            ("count(Tensor x) -> int", (), Kind.OPAQUE, None, ()),
            ("maybe(Tensor x, Tensor y) -> Tensor", (torch.Tag.maybe_aliasing_or_mutating,), Kind.OPAQUE, None, (0, 1)),
            ("grouped_gemm(Tensor a, Tensor b) -> Tensor", (), Kind.PURE, "gemm", ()),
            ("flash_attn_fwd(Tensor q, Tensor k, float dropout_p) -> Tensor", (), Kind.RANDOM, "attention", ()),
            ("causal_conv1d(Tensor x, Tensor w) -> Tensor", (), Kind.PURE, "convolution", ()),
            ("quick_all_reduce(Tensor x) -> Tensor", (), Kind.OPAQUE, "collective", ()),
        ],
    )
    def test_by_schema_tags_and_name(self, define, schema, tags, kind, family, writes):
        known = facts(define(schema, *tags))
        assert (known.kind, known.family, known.writes) == (kind, family, writes)
        assert bool(known.reason) == (kind is Kind.OPAQUE)

    def test_dropout_of_zero_draws_nothing(self, define):
        op = define("fmha(Tensor q, float dropout_p=0.0, Tensor? dropout_mask=None) -> Tensor")
        kinds = [facts_of_call(op, args, {}).kind for args in ((0,), (0, 0.0, torch.ones(2)), (0, 0.1))]
        assert kinds == [Kind.PURE, Kind.PURE, Kind.RANDOM]

    def test_the_projects_own_kernels_are_pure(self):
        for module in ("norm_ops", "gated_mlp"):
            importlib.import_module(f"recompute.kernels.{module}")  # registers them
        assert {
            facts(torch.ops.recompute.rms_norm_forward.default),
            facts(torch.ops.recompute.glu_forward.default),
        } == {ops.OpFacts("recompute.rms_norm_forward", Kind.PURE), ops.OpFacts("recompute.glu_forward", Kind.PURE)}

    def test_collectives_are_opaque_and_those_of_c10d_write_without_saying_so(self):
        c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
        found = {
            op: facts(op)
            for op in (
                c10d.allreduce_.default,
                c10d._allgather_base_.default,
                functional.all_reduce.default,
                functional.all_reduce_.default,
                functional.wait_tensor.default,
            )
        }
        assert {(known.kind, known.family, known.reason) for known in found.values()} == {
            (Kind.OPAQUE, "collective", ops.COLLECTIVE)
        }
        assert [known.writes for known in found.values()] == [(0, 3), (0,), (), (0,), (0,)]


class TestSeconds:
    def test_costly_ops_by_their_arithmetic(self):
        a, b, bias = (torch.empty(shape, device="meta") for shape in ((4096, 8192), (8192, 2048), (2048,)))
        expected = 2 * 4096 * 8192 * 2048 / ops.FLOPS
        assert seconds(aten.mm.default, (a, b), {}, a @ b) == pytest.approx(expected)
        assert seconds(aten.addmm.default, (bias, a, b), {}, a @ b) == pytest.approx(expected)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_convolutions_and_batches_as_torch_counts_them(self, transposed):
        image = torch.empty(2, 64, 32, 32, device="meta")
        weight = torch.empty(64, 64, 3, 3, device="meta")
        args = (image, weight, None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1)
        output = aten.convolution.default(*args)
        counted = flop_registry[aten.convolution](*args, out_val=output)
        assert op_costs._flops(facts(aten.convolution.default), args, output) == counted

    def test_attention_with_grouped_heads_as_torch_counts_it_without(self):
        query, key = torch.empty(2, 8, 512, 64), torch.empty(2, 8, 256, 64)
        counted = flop_registry[aten._scaled_dot_product_flash_attention](query, key, key, out_val=(query,))
        known = facts(aten._scaled_dot_product_flash_attention.default)
        assert op_costs._flops(known, (query, key, key), (query,)) == counted
        assert op_costs._flops(known, (query, key[:, :2], key[:, :2]), (query,)) == counted
        by_token = [tensor.transpose(1, 2) for tensor in (query, key, key)]
        assert op_costs._flops(facts(aten._flash_attention_forward.default), tuple(by_token), (query,)) == counted

    @pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 400), (torch.float16, 400), (torch.float32, 100)])
    def test_a_gemm_is_thin_up_to_so_many_products_that_it_takes_as_long_as_a_copy(self, dtype, most):
        def is_thin(products):
            a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((8192, products), (products, 8192)))
            thin = facts_of_call(aten.mm.default, (a, b), {}).is_thin
            assert facts_of_call(aten.addmm.default, (a[0], a), {"mat2": b}).is_thin == thin
            assert facts_of_call(aten.bmm.default, (a[None], b[None]), {}).is_thin == thin
            assert facts_of_call(aten._grouped_mm.default, (a, b[None]), {}).is_thin == thin
            return thin

        assert [is_thin(products) for products in (1, most, most + 1)] == [True, True, False]

    def test_other_ops_by_what_they_move(self):
        x = torch.empty(1000)
        assert seconds(aten.add.Tensor, (x, x), {"alpha": 1}, x) == 3 * 4000 / ops.BANDWIDTH
        assert seconds(aten.cat.default, ([x, x],), {}, torch.empty(2000)) == 4 * 4000 / ops.BANDWIDTH
        assert seconds(aten.mm.default, (), {}, None) == 0.0


def policy(**fields):
    return op_policy(meaning_of(Rule(match="**", **fields)))


RECOMPUTE = policy(action="recompute", via="hook")
ALL_BUT_SILU = policy(action="checkpoint", keep="aten.silu")
X = torch.ones(2, 2)
STATISTICS = (X, None, None, torch.zeros(2), torch.ones(2), True, 0.1, 1e-5)


@pytest.mark.parametrize(
    ("op", "args", "eager", "compiled"),
    [
        (aten.sin.default, (X,), True, True),
        (aten.native_dropout.default, (X, 0.5, True), True, True),
        (aten.mm.default, (X, X), False, False),
        (aten.nonzero.default, (X,), False, False),  # the shape of its output depends on data
        (aten.index_put.default, (X, [torch.tensor([0])], X[0]), False, False),  # not known to be deterministic
        (torch.ops._c10d_functional.all_reduce.default, (X, "sum", ""), False, False),
        # In eager code a kernel may fill a factory's output unseen. In compiled code all that writes is an op.
        (aten.zeros_like.default, (X,), False, True),
        # A tape runs batch norm again without its statistics (see ``Tape._prepare``); a compiler has made them outputs.
        (aten.native_batch_norm.default, STATISTICS, False, True),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_which_ops_may_run_again(op, args, eager, compiled):
    decision = RECOMPUTE.decide(op)
    assert (decision.reason == "") == eager
    assert RECOMPUTE.decisions[op] is decision
    assert RECOMPUTE.may_rerun_compiled(op, args, {}) == compiled


def test_rules_that_say_the_same_of_ops_share_one_policy():
    assert policy(action="recompute", via="kernel", capture=False) is RECOMPUTE
    assert policy(action="checkpoint", keep=["aten.silu"]) is ALL_BUT_SILU
    assert policy(action="recompute", price=2.0) is not policy(action="recompute", price=3.0)
    assert policy(action="recompute", hold=2) is not policy(action="recompute", hold=3)
    assert policy(action="checkpoint") is not policy(
        action="recompute", rerun=["gemm", "convolution", "attention"], price=0.0
    )
