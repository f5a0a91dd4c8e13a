"""Policies train the same model on the same text; each row says what it measured, or why it failed."""

import math
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from ablation_testing import LEAST, TINY, by_policy, matching, quiet, run, saved
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from recompute.ablation import ablation_config, peers, subjects
from recompute.ablation.ablation_config import AblationConfig
from recompute.diagnostics.comparing_runs import Widened
from recompute.errors import AblationError
from recompute.policy.document import load_document

CONFIGS = Path(__file__).parents[2] / "examples" / "ablation"
EXACT = ("none", "full", "hook", "alternate", "elementwise", "torch-checkpoint", "torch-selective", "torch-save-on-cpu")
ROUNDING = ("kernel", "auto")
PROMISED = {
    "policy", "activation_bytes_held", "peak_bytes", "step_seconds", "losses", "grads_match", "grad_error",
    "losses_match", "sequence_length", "bytes_per_token_layer_hidden", "error",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ablation")


@pytest.fixture(scope="module")
def rows(folder):
    return matching(run(folder, policies=(*EXACT[1:5], *ROUNDING), peers=EXACT[5:]))


def test_results_hold_every_row_with_the_promised_keys(folder, rows):
    results = saved(folder)
    assert [row["policy"] for row in results["rows"]] == [*EXACT[:5], *ROUNDING, *EXACT[5:]]
    assert all(row.keys() >= PROMISED for row in results["rows"])
    assert results["complete"]
    assert results["command"] == "recompute ablate"
    assert results["machine"]["torch"] == torch.__version__
    assert results["config"]["model"]["hidden_size"] == 64
    assert results["text"]["source"].startswith("standard library of Python")
    assert [path.name for path in folder.iterdir()] == ["results.json"]


def test_exact_policies_train_bitwise_as_the_baseline_and_kernels_as_near_as_rounding_allows(rows):
    for policy in EXACT:
        row = rows[policy]
        assert row.exact
        assert row.losses == rows["none"].losses
        assert row.losses_match
        assert (row.loss_error, row.grad_error, row.grad_error_last, row.grad_tolerance) == (0, 0, 0, 0)
    for policy in ROUNDING:
        row = rows[policy]
        assert row.exact is False
        assert row.grad_error <= row.grad_tolerance < 100 * torch.finfo(torch.float32).eps
        assert row.loss_error < 1e-5


def test_policies_hold_less_than_the_baseline(rows):
    held = {policy: row.activation_bytes_held or math.nan for policy, row in rows.items()}
    none = held.pop("none")
    del held["torch-save-on-cpu"]  # here it copies from the CPU to the CPU
    assert max(held.values()) <= 0.75 * none
    assert held["full"] < held["alternate"] < none
    assert held["elementwise"] == held["hook"]  # in float32
    assert held["auto"] == pytest.approx(held["elementwise"], rel=0.01)  # here by the kernels' references
    assert held["torch-checkpoint"] < held["torch-selective"] < none


def test_numbers_are_consistent(rows):
    for row in rows.values():
        assert len(row.losses) == TINY.steps
        assert row.losses[0] == pytest.approx(math.log(256), rel=0.05)
        assert row.losses[1] < row.losses[0]
        assert 0 < row.activation_bytes_held <= row.peak_bytes
        assert row.bytes_per_token_layer_hidden == row.activation_bytes_held / (4 * 64 * 2 * 64)
        assert row.step_seconds > 0
        assert row.forward_cpu_seconds is None


def test_what_regenerating_takes_is_known_of_our_policies(rows):
    for policy in EXACT[1:5]:
        assert rows[policy].regenerating_seconds > 0
        assert all(len(timings["regenerating"]) == TINY.steps for timings in rows[policy].timings)
    assert {rows[name].regenerating_seconds for name in (EXACT[0], *EXACT[5:])} == {None}


def scale_a_gradient(model):
    model.lm_head.weight.register_hook(lambda gradient: gradient * 1.001)


def freeze(model):
    model.lm_head.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("policy", "change", "error"),
    [("hook", scale_a_gradient, 1e-3), ("kernel", scale_a_gradient, 1e-3), ("hook", freeze, 1)],
)
def test_a_wrong_or_a_lost_gradient_does_not_match(policy, change, error, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "apply", lambda model, policy: change(model))
    row = by_policy(run(tmp_path, policies=(policy,)))[policy]
    assert row.grads_match is False
    assert row.grad_error == pytest.approx(error, rel=0.5)
    assert row.losses_match is not (change is freeze)


def test_what_fails_is_told_in_its_row_and_the_others_go_on(tmp_path, monkeypatch):
    def run_out_of_memory(model, policy):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB\nand more")

    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 1\nrules:\n  - actoin: keep\n", encoding="utf-8")
    monkeypatch.setattr(peers, "apply", run_out_of_memory)
    rows = by_policy(run(tmp_path, LEAST, policies=("missing", str(bad), "hook"), peers=("torch-checkpoint",)))
    assert [row["policy"] for row in saved(tmp_path)["rows"]] == list(rows)
    assert rows["missing"].error.startswith("PolicyError: no preset and no file is named 'missing'")
    assert f"{bad}:3" in rows[str(bad)].error
    assert rows["hook"].error == "OutOfMemoryError: tried to allocate 80 GiB\nand more"
    assert rows["hook"].losses is None
    assert matching([rows["none"], rows["torch-checkpoint"]])


@pytest.mark.slow
def test_without_a_baseline_the_others_are_measured_and_not_compared(tmp_path, monkeypatch):
    build = subjects.build
    failures = [MemoryError("no room for the first model")]

    def fail_once(*args, **options):
        if failures and options["device"].type == "cpu":
            raise failures.pop()
        return build(*args, **options)

    monkeypatch.setattr(subjects, "build", fail_once)
    none, *others = run(tmp_path, policies=("full", "kernel"))
    assert none.error == "MemoryError: no room for the first model"
    for row in others:
        assert row.error is None
        assert row.activation_bytes_held
        assert row.grads_match is row.losses_match is row.grad_tolerance is None


@pytest.mark.parametrize(("interrupted", "policies"), [("none", []), ("torch-selective", ["none", "torch-checkpoint"])])
def test_an_interrupted_run_keeps_its_rows_and_none_of_an_old_one(interrupted, policies, tmp_path):
    def interrupt(what, done, total):
        if what == f"{interrupted}, sequence 16":
            raise KeyboardInterrupt

    (tmp_path / "results.json").write_text('{"rows": ["old"]}', encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, LEAST, peers=("torch-checkpoint", "torch-selective"), progress=interrupt)
    results = saved(tmp_path)
    assert [row["policy"] for row in results["rows"]] == policies
    assert len({tuple(row["losses"]) for row in results["rows"]}) == min(1, len(policies))
    assert results["complete"] is False


def test_the_baseline_runs_first_and_once_whatever_is_listed():
    config = TINY.model_copy(update={"policies": ("hook", "none", "hook"), "peers": ("torch-checkpoint",)})
    assert config.treatments() == ("none", "hook", "torch-checkpoint")


def test_model_and_batches_come_from_the_seed_and_leave_the_global_rng_alone():
    text = bytes(range(256)) * 8
    before = torch.get_rng_state()
    first, again = (made(text).make().state_dict() for _ in range(2))
    other = made(text, seed=1).make().state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    batches = torch.stack([batch["input_ids"] for batch in made(text, sequence_lengths=(16,)).batches])
    assert batches.shape == (2, 4, 16)
    assert batches.dtype == torch.int64
    assert torch.equal(batches, subjects.windows(text, 2, 4, 16, TINY.seed))
    assert torch.equal(batches.diff() % 256, torch.ones(2, 4, 15, dtype=torch.int64))
    assert len(set(batches[..., 0].flatten().tolist())) > 1


def made(text, **changes):
    config = TINY.model_copy(update=changes)
    return subjects.experiment_of(config.single(), text, torch.device("cpu"), quiet)


def test_bfloat16_model_keeps_its_rotary_table_in_float32():
    model = made(bytes(2048), dtype="bfloat16").make()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float32", 1e-9, 1e-5), ("bfloat16", 1e-3, 0.1), ("autocast", 1e-3, 0.1)]
)
def test_the_tolerance_is_earned_by_what_the_dtype_does_to_the_baselines_gradient(dtype, least, most):
    experiment = made(subjects.load_text(None)[1], dtype=dtype)
    row = matching([experiment.row("none"), experiment.row("kernel")])["kernel"]
    assert row.grad_error <= row.grad_tolerance
    assert least < row.grad_tolerance < most


@pytest.mark.parametrize(
    "cast", [torch.Tensor.float, lambda x: x.to(torch.float32), lambda x: x.to(dtype=torch.float32)]
)
def test_the_reference_is_wider_throughout(cast):
    x = torch.tensor([1 / 3], dtype=torch.float64)
    with Widened(torch.float64):
        assert torch.equal(cast(x), x)
    with Widened(torch.float32):
        assert torch.equal(cast(x), x.to(torch.float32))


class SeenAttention(TorchFunctionMode):
    """Notes how many heads of keys attention is given, and whether it is told that they are in groups."""

    heads: int
    is_grouped: bool

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.heads, self.is_grouped = args[1].shape[1], (kwargs or {}).get("enable_gqa", False)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"enable_gqa": True, "is_causal": True}, {"enable_gqa": False, "scale": 0.5}, {}])
def test_the_references_attention_is_the_same_but_over_as_many_keys_as_queries(options):
    heads = 2 if options.get("enable_gqa") else 4
    query, key, value = (torch.randn(1, count, 5, 8, dtype=torch.float64) for count in (4, heads, heads))
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    with SeenAttention() as seen, Widened(torch.float64):
        found = F.scaled_dot_product_attention(query, key, value=value, **options)
    torch.testing.assert_close(found, expected)
    assert seen.heads == 4
    assert not seen.is_grouped


def test_a_row_is_whole_where_the_reference_has_no_room(tmp_path, monkeypatch):
    tries = []

    def fail(self):
        tries.append(1)
        raise problem

    monkeypatch.setattr(Widened, "__enter__", fail)
    problem = torch.OutOfMemoryError("CUDA out of memory")
    rows = by_policy(run(tmp_path, LEAST, policies=("kernel", "auto", "hook")))
    assert rows["kernel"].error is None
    assert rows["kernel"].step_seconds
    assert rows["kernel"].grad_error is not None
    assert rows["kernel"].grads_match is rows["kernel"].grad_tolerance is None
    assert rows["hook"].grads_match
    assert len(tries) == 1, "it is not sought again"

    problem = ValueError("no such dtype")  # another failure is the row's
    assert run(tmp_path, LEAST, policies=("kernel",))[1].error == "ValueError: no such dtype"


def test_text_is_a_file_or_the_standard_library_and_refused_before_training(tmp_path):
    path, short = tmp_path / "text.txt", tmp_path / "short.txt"
    path.write_bytes(b"\x00\xff text")
    assert subjects.load_text(path) == ("text.txt", b"\x00\xff text")
    source, text = subjects.load_text(None)
    assert source.startswith("standard library of Python 3.")
    assert len(text) > 1 << 20
    assert b"import" in text
    assert subjects.load_text(None) == (source, text)
    with pytest.raises(AblationError, match=r"gone\.txt: the text cannot be read: No such file"):
        run(tmp_path, text=tmp_path / "gone.txt")
    short.write_bytes(b"x" * 63)
    with pytest.raises(AblationError, match=r"short\.txt: expected a text of at least 64 bytes; found 63"):
        run(tmp_path, text=short)
    assert not (tmp_path / "results.json").exists()


def test_a_gpu_gets_the_large_default_and_is_refused_where_it_is_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ablation_config.default_config() == ablation_config.LLAMA_1B
    assert ablation_config.default_config("cpu") == AblationConfig(device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ablation_config.default_config() == AblationConfig()
    with pytest.raises(AblationError, match="finds no CUDA device"):
        run(tmp_path, device="cuda")


@pytest.mark.parametrize(
    ("file", "builtin"), [("default.yaml", AblationConfig()), ("llama-1b.yaml", ablation_config.LLAMA_1B)]
)
def test_example_configs_spell_out_the_defaults(file, builtin):
    found = load_document(AblationConfig, CONFIGS / file)
    assert found == builtin
    assert file != "default.yaml" or found.model_fields_set == {*AblationConfig.model_fields}


@pytest.mark.slow
def test_a_step_of_the_layers_alone_trains_nothing_and_has_no_logits(tmp_path, rows):
    alone = matching(run(tmp_path, step="layers", policies=("hook", "kernel"), peers=("torch-checkpoint",)))
    for policy, row in alone.items():
        assert row.activation_bytes_held < rows[policy].activation_bytes_held
    assert abs(alone["none"].losses[0] - math.log(256)) > 0.5  # no cross-entropy
    assert alone["hook"].losses_match


@pytest.mark.slow
def test_each_policy_also_runs_compiled(tmp_path, monkeypatch):
    backend = "aot_eager_decomp_partition"  # inductor's cut between forward and backward, without its code
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    found = matching(run(tmp_path, compile=True, policies=("full", "kernel"), peers=("torch-checkpoint",)))
    ways = [name + way for name in ("none", "full", "kernel") for way in ("", "+compile")]
    assert list(found) == [*ways, "torch-checkpoint"]
    for policy, row in found.items():
        assert row.exact is (policy in ("none", "full", "torch-checkpoint"))
    held = {policy: row.activation_bytes_held or 0 for policy, row in found.items()}
    for policy in ("full", "kernel"):
        assert held[f"{policy}+compile"] < 0.95 * held["none+compile"]
        assert held[f"{policy}+compile"] < 1.1 * held[policy]


ON_CUDA = {"device": "cuda", "dtype": "bfloat16"}


@pytest.mark.gpu
def test_compiled_layers_stay_within_rounding_and_hold_less_under_a_checkpoint(tmp_path):
    names = ("torch-selective", "torch-compile", "torch-compile-selective")
    _, *rows = matching(run(tmp_path, peers=names, **ON_CUDA)).values()
    *others, both = (row.activation_bytes_held or 0 for row in rows)
    assert both < min(others)


@pytest.mark.gpu
def test_on_cuda_exact_policies_match_bitwise_and_launching_is_timed(tmp_path):
    policies = ("full", "hook", "kernel", "elementwise", "auto")
    for row in matching(run(tmp_path, policies=policies, peers=("torch-checkpoint",), **ON_CUDA)).values():
        assert row.forward_cpu_seconds > 0
        assert row.losses_match or row.policy in ROUNDING


@pytest.mark.gpu
def test_on_cuda_each_policy_also_runs_compiled(tmp_path):
    policies = ("full", "elementwise", "kernel", "auto")
    rows = matching(run(tmp_path, compile=True, policies=policies, **ON_CUDA))
    held = {policy: row.activation_bytes_held or 0 for policy, row in rows.items()}
    assert all(held[f"{policy}+compile"] < held["none+compile"] for policy in policies)
