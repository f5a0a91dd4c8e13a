"""Policies train the same model on the same text; each row says what it measured, or why it failed."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.llama import modeling_llama

from recompute.ablation import ablation_config, peers, run_ablation, subjects
from recompute.ablation.ablation_config import AblationConfig
from recompute.ablation.results import AblationRow
from recompute.ablation.trials import Progress
from recompute.diagnostics.comparing_runs import Widened
from recompute.errors import AblationError, PolicyError
from recompute.estimation.llama import ModelShape
from recompute.policy.document import load_document, parse_document

CONFIGS = Path(__file__).parents[2] / "examples" / "ablation"
TINY = AblationConfig(
    model=ModelShape(hidden_size=64, intermediate_size=172, layers=2, heads=4, kv_heads=2),
    policies=("none",),
    peers=(),
    sequence_lengths=(64,),
    steps=2,
    warmup=0,
    device="cpu",
)
PROMISED = {
    "policy", "activation_bytes_held", "peak_bytes", "step_seconds", "losses", "grads_match", "grad_error",
    "losses_match", "sequence_length", "bytes_per_token_layer_hidden", "error",
}  # fmt: skip


def quiet(what: str, done: int, total: int) -> None:
    pass


def run(out: Path, *, progress: Progress = quiet, **changes: Any) -> dict[str, AblationRow]:
    config = TINY.model_copy(update=changes)
    return {row.policy: row for row in run_ablation.run(config, out, command="recompute ablate", progress=progress)}


def saved(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ablation")


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, AblationRow]:
    everything = {
        "policies": ("full", "hook", "kernel", "alternate", "elementwise", "auto"),
        "peers": ("torch-checkpoint", "torch-selective", "torch-save-on-cpu"),
    }
    return run(folder, **everything)


def test_results_hold_every_row_with_the_promised_keys(folder: Path, rows: dict[str, AblationRow]) -> None:
    results = saved(folder)
    assert [row["policy"] for row in results["rows"]] == list(rows)
    assert list(rows) == [
        "none",
        "full",
        "hook",
        "kernel",
        "alternate",
        "elementwise",
        "auto",
        "torch-checkpoint",
        "torch-selective",
        "torch-save-on-cpu",
    ]
    for row in results["rows"]:
        assert row.keys() >= PROMISED
        assert row["error"] is None
    assert results["complete"]
    assert results["command"] == "recompute ablate"
    assert results["machine"]["torch"] == torch.__version__
    assert results["config"]["model"]["hidden_size"] == 64
    assert results["text"]["source"].startswith("standard library of Python")
    assert [path.name for path in folder.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    "policy", ["none", "full", "hook", "alternate", "elementwise", "torch-checkpoint", "torch-selective"]
)
def test_exact_policies_train_bitwise_as_the_baseline(rows: dict[str, AblationRow], policy: str) -> None:
    row = rows[policy]
    assert row.exact
    assert row.losses == rows["none"].losses
    assert row.losses_match
    assert row.grads_match
    assert (row.loss_error, row.grad_error, row.grad_error_last, row.grad_tolerance) == (0, 0, 0, 0)


@pytest.mark.parametrize("policy", ["kernel", "auto"])
def test_kernel_gradients_are_as_near_as_float32_rounding_allows(rows: dict[str, AblationRow], policy: str) -> None:
    row = rows[policy]
    assert row.exact is False
    assert row.grads_match
    assert row.grad_error is not None
    assert row.grad_tolerance is not None
    assert row.grad_error <= row.grad_tolerance < 100 * torch.finfo(torch.float32).eps
    assert row.loss_error is not None
    assert row.loss_error < 1e-5


def test_policies_hold_less_than_the_baseline(rows: dict[str, AblationRow]) -> None:
    held = {policy: row.activation_bytes_held or math.nan for policy, row in rows.items()}
    none = held.pop("none")
    del held["torch-save-on-cpu"]  # here it copies from the CPU to the CPU
    assert max(held.values()) <= 0.75 * none
    assert held["full"] < held["alternate"] < none
    assert held["elementwise"] == held["hook"]  # in float32
    assert held["auto"] == held["elementwise"]  # where there is no CUDA
    assert held["torch-checkpoint"] < held["torch-selective"] < none


def test_numbers_are_consistent(rows: dict[str, AblationRow]) -> None:
    for row in rows.values():
        assert row.losses is not None
        assert len(row.losses) == TINY.steps
        assert row.losses[0] == pytest.approx(math.log(256), rel=0.05)
        assert row.losses[1] < row.losses[0]
        assert row.activation_bytes_held is not None
        assert row.peak_bytes is not None
        assert row.step_seconds is not None
        assert 0 < row.activation_bytes_held <= row.peak_bytes
        assert row.bytes_per_token_layer_hidden == row.activation_bytes_held / (4 * 64 * 2 * 64)
        assert row.step_seconds > 0
        assert row.forward_cpu_seconds is None


def test_what_regenerating_takes_is_known_of_our_policies(rows: dict[str, AblationRow]) -> None:
    for policy in ("full", "hook", "alternate", "elementwise"):
        regenerating = rows[policy].regenerating_seconds
        assert regenerating is not None
        assert regenerating > 0
        assert all(len(timings["regenerating"]) == TINY.steps for timings in rows[policy].timings)
    assert {rows[name].regenerating_seconds for name in ("none", "torch-checkpoint", "torch-selective")} == {None}


@pytest.mark.parametrize("policy", ["hook", "kernel"])
def test_a_wrong_gradient_does_not_match(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def scale_a_gradient(model: Any, policy: object) -> None:
        model.lm_head.weight.register_hook(lambda gradient: gradient * 1.001)

    monkeypatch.setattr(peers, "apply", scale_a_gradient)
    row = run(tmp_path, policies=(policy,))[policy]
    assert row.grads_match is False
    assert row.grad_error == pytest.approx(1e-3, rel=0.5)


def test_a_lost_gradient_does_not_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(model: Any, policy: object) -> None:
        model.lm_head.weight.requires_grad_(False)

    monkeypatch.setattr(peers, "apply", freeze)
    row = run(tmp_path, policies=("hook",))["hook"]
    assert row.grads_match is False
    assert row.losses_match is False


@pytest.mark.slow
def test_what_fails_is_told_in_its_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(model: nn.Module, policy: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 1\nrules:\n  - actoin: keep\n", encoding="utf-8")
    monkeypatch.setattr(peers, "apply", run_out_of_memory)
    rows = run(tmp_path, policies=("missing", str(bad), "hook"), peers=("torch-checkpoint",))
    assert [row["policy"] for row in saved(tmp_path)["rows"]] == list(rows)
    assert rows["missing"].error is not None
    assert rows["missing"].error.startswith("PolicyError: no preset and no file is named 'missing'")
    assert f"{bad}:3" in (rows[str(bad)].error or "")
    assert rows["hook"].error == "OutOfMemoryError: tried to allocate 80 GiB"
    assert rows["hook"].losses is None
    assert rows["torch-checkpoint"].error is None
    assert rows["torch-checkpoint"].grads_match


@pytest.mark.slow
def test_without_a_baseline_the_others_are_measured_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model = subjects.build_model
    failures = [MemoryError("no room for the first model")]

    def fail_once(*args: Any) -> nn.Module:
        if failures:
            raise failures.pop()
        return build_model(*args)

    monkeypatch.setattr(subjects, "build_model", fail_once)
    rows = run(tmp_path, policies=("full", "kernel"))
    assert rows["none"].error == "MemoryError: no room for the first model"
    for policy in ("full", "kernel"):
        assert rows[policy].error is None
        assert rows[policy].activation_bytes_held
        assert rows[policy].grads_match is rows[policy].losses_match is rows[policy].grad_tolerance is None


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_rows_and_says_so(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if (what, done) == ("torch-selective, sequence 64", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, peers=("torch-checkpoint", "torch-selective"), progress=interrupt)
    results = saved(tmp_path)
    assert [row["policy"] for row in results["rows"]] == ["none", "torch-checkpoint"]
    assert results["rows"][1]["losses"] == results["rows"][0]["losses"]
    assert results["complete"] is False


def test_a_new_run_does_not_leave_the_rows_of_an_old_one(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "results.json").write_text('{"rows": ["old"]}', encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, progress=interrupt)
    assert saved(tmp_path)["rows"] == []


def test_progress_names_each_step(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    run(tmp_path, sequence_lengths=(8, 16), progress=lambda *step: seen.append(step))
    assert seen == [(f"none, sequence {length}", step, 2) for length in (8, 16) for step in (1, 2)]


def test_the_baseline_runs_first_and_once_whatever_is_listed() -> None:
    config = TINY.model_copy(update={"policies": ("hook", "none", "hook"), "peers": ("torch-checkpoint",)})
    assert config.treatments() == ("none", "hook", "torch-checkpoint")


def test_model_and_batches_come_from_the_seed_and_leave_the_global_rng_alone() -> None:
    cpu, text = torch.device("cpu"), bytes(range(256)) * 8
    before = torch.get_rng_state()
    first, again = (subjects.build_model(TINY, cpu).state_dict() for _ in range(2))
    other = subjects.build_model(TINY.model_copy(update={"seed": 1}), cpu).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])

    batches = subjects.sample_batches(TINY, text, 16)
    assert batches.shape == (2, 4, 16)
    assert batches.dtype == torch.int64
    assert torch.equal(batches, subjects.sample_batches(TINY, text, 16))
    assert torch.equal(batches.diff() % 256, torch.ones(2, 4, 15, dtype=torch.int64))
    assert len(set(batches[..., 0].flatten().tolist())) > 1


def test_bfloat16_model_keeps_its_rotary_table_in_float32() -> None:
    model = subjects.build_model(TINY.model_copy(update={"dtype": "bfloat16"}), torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


@pytest.mark.slow
def test_in_bfloat16_the_tolerance_is_earned_from_bfloat16(tmp_path: Path) -> None:
    row = run(tmp_path, policies=("kernel",), dtype="bfloat16")["kernel"]
    assert row.error is None
    assert row.grads_match
    assert row.grad_tolerance is not None
    assert 1e-3 < row.grad_tolerance < 0.1


@pytest.mark.parametrize(
    "cast", [torch.Tensor.float, lambda x: x.to(torch.float32), lambda x: x.to(dtype=torch.float32)]
)
def test_the_reference_is_wider_throughout(cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.tensor([1 / 3], dtype=torch.float64)
    with Widened(torch.float64):
        assert torch.equal(cast(x), x)
    with Widened(torch.float32):
        assert torch.equal(cast(x), x.to(torch.float32))


class SeenAttention(TorchFunctionMode):
    """Notes how many heads of keys attention is given, and whether it is told that they are in groups."""

    heads: int
    is_grouped: bool

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.heads, self.is_grouped = args[1].shape[1], (kwargs or {}).get("enable_gqa", False)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"enable_gqa": True, "is_causal": True}, {"enable_gqa": False, "scale": 0.5}, {}])
def test_the_references_attention_is_the_same_but_over_as_many_keys_as_queries(options: dict[str, Any]) -> None:
    heads = 2 if options.get("enable_gqa") else 4
    query, key, value = (torch.randn(1, count, 5, 8, dtype=torch.float64) for count in (4, heads, heads))
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    with SeenAttention() as seen, Widened(torch.float64):
        found = F.scaled_dot_product_attention(query, key, value=value, **options)
    torch.testing.assert_close(found, expected)
    assert seen.heads == 4
    assert not seen.is_grouped


def test_a_row_is_whole_where_the_reference_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(self: Widened) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Widened, "__enter__", fail)
    rows = run(tmp_path, policies=("kernel", "auto", "hook"))
    assert rows["kernel"].error is None
    assert rows["kernel"].step_seconds
    assert rows["kernel"].grad_error is not None
    assert rows["kernel"].grads_match is rows["kernel"].grad_tolerance is None
    assert rows["hook"].grads_match
    assert len(tries) == 1, "it is not sought again"


def test_another_failure_of_the_reference_is_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Widened) -> None:
        raise ValueError("no such dtype")

    monkeypatch.setattr(Widened, "__enter__", fail)
    assert run(tmp_path, policies=("kernel",))["kernel"].error == "ValueError: no such dtype"


def test_text_is_a_file_or_the_standard_library(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\x00\xff text")
    assert subjects.load_text(path) == ("text.txt", b"\x00\xff text")
    source, text = subjects.load_text(None)
    assert source.startswith("standard library of Python 3.")
    assert len(text) > 1 << 20
    assert b"import" in text
    assert subjects.load_text(None) == (source, text)


def test_text_that_cannot_be_used_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(AblationError, match=r"gone\.txt: the text cannot be read: No such file"):
        run(tmp_path, text=tmp_path / "gone.txt")
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 63)
    with pytest.raises(AblationError, match=r"short\.txt: expected a text of at least 64 bytes; found 63"):
        run(tmp_path, text=short)
    assert not (tmp_path / "results.json").exists()


def test_asking_for_an_absent_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AblationError, match="finds no CUDA device"):
        run(tmp_path, device="cuda")
    assert ablation_config.default_config() == AblationConfig()


def test_a_gpu_gets_the_large_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ablation_config.default_config() == ablation_config.LLAMA_1B
    assert ablation_config.default_config("cpu") == AblationConfig(device="cpu")


@pytest.mark.parametrize(
    ("file", "builtin"), [("default.yaml", AblationConfig()), ("llama-1b.yaml", ablation_config.LLAMA_1B)]
)
def test_example_configs_spell_out_the_defaults(file: str, builtin: AblationConfig) -> None:
    assert load_document(AblationConfig, CONFIGS / file) == builtin


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes: 3\n", r"c\.yaml:1:1: stpes: unknown key \(did you mean 'steps'\?\)"),
        ("seed: 1\nsteps: many\n", r"c\.yaml:2:8: steps: expected an integer; found 'many'"),
        ("steps: 0\n", r"c\.yaml:1:8: steps: expected .*greater than 0"),
        ("sequence_lengths: []\n", r"c\.yaml:1:19: sequence_lengths: .*at least 1 item"),
        ("dtype: float16\n", r"c\.yaml:1:8: dtype: .*float32.*bfloat16"),
        ("peers: [torch-chekpoint]\n", r"c\.yaml:1:9: peers\[0\]: .*torch-checkpoint"),
        (
            "model:\n  heads: 3\n",
            r"c\.yaml:2:3: model: expected hidden_size to be a multiple of 2 \* heads = 6",
        ),
        ("model:\n  kv_heads: 3\n", r"c\.yaml:2:3: model: expected heads to be a multiple of kv_heads = 3"),
    ],
)
def test_a_mistake_in_a_config_is_told_with_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        parse_document(AblationConfig, text, label="c.yaml")


def test_a_peer_that_is_not_installed_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    row = run(tmp_path, policies=(), peers=("liger",))["liger"]
    assert row.error == "AblationError: the peer liger needs the package liger-kernel: pip install liger-kernel"


@pytest.mark.slow
def test_what_a_peer_replaces_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liger(types.ModuleType):
        @staticmethod
        def apply_liger_kernel_to_llama(*, model: Any, **_: Any) -> None:
            modeling_llama.apply_rotary_pos_emb = lambda q, k, *_: (q * 2, k)

    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", Liger("liger_kernel.transformers"))
    rows = run(tmp_path, policies=("full",), peers=("liger", "torch-checkpoint"))
    assert rows["liger"].losses_match is False
    assert rows["torch-checkpoint"].losses_match


@pytest.mark.gpu
def test_compiled_layers_stay_within_rounding_and_hold_less_under_a_checkpoint(tmp_path: Path) -> None:
    peers = ("torch-selective", "torch-compile", "torch-compile-selective")
    rows = run(tmp_path, device="cuda", dtype="bfloat16", policies=(), peers=peers)
    held = {}
    for peer in peers:
        assert rows[peer].error is None
        assert rows[peer].grads_match
        held[peer] = rows[peer].activation_bytes_held or 0
    assert held["torch-compile-selective"] < min(held["torch-selective"], held["torch-compile"])


@pytest.mark.slow
def test_a_step_of_the_layers_alone_trains_nothing_and_has_no_logits(
    tmp_path: Path, rows: dict[str, AblationRow]
) -> None:
    alone = run(tmp_path, step="layers", policies=("hook", "kernel"), peers=("torch-checkpoint",))
    for policy, row in alone.items():
        assert row.error is None
        assert row.grads_match, policy
        assert (row.activation_bytes_held or 0) < (rows[policy].activation_bytes_held or 0)
    losses = alone["none"].losses
    assert losses is not None
    assert abs(losses[0] - math.log(256)) > 0.5  # no cross-entropy
    assert alone["hook"].losses_match


@pytest.mark.gpu
def test_on_cuda_exact_policies_match_bitwise_and_launching_is_timed(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        policies=("full", "hook", "kernel", "elementwise", "auto"),
        peers=("torch-checkpoint",),
    )
    for policy, row in rows.items():
        assert row.error is None, policy
        assert row.grads_match, policy
        assert row.forward_cpu_seconds is not None
        assert row.forward_cpu_seconds > 0
        assert row.losses_match or policy in ("kernel", "auto")


@pytest.mark.slow
def test_each_policy_also_runs_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = "aot_eager_decomp_partition"  # inductor's cut between forward and backward, without its code
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    found = run(tmp_path, compile=True, policies=("full", "kernel"), peers=("torch-checkpoint",))
    ways = [name + way for name in ("none", "full", "kernel") for way in ("", "+compile")]
    assert list(found) == [*ways, "torch-checkpoint"]
    held = {}
    for policy, row in found.items():
        assert row.error is None
        assert row.grads_match, policy
        assert row.exact is (policy in ("none", "full", "torch-checkpoint"))
        held[policy] = row.activation_bytes_held or 0
    for policy in ("full", "kernel"):
        assert held[f"{policy}+compile"] < 0.95 * held["none+compile"]
        assert held[f"{policy}+compile"] < 1.1 * held[policy]


@pytest.mark.gpu
def test_on_cuda_each_policy_also_runs_compiled(tmp_path: Path) -> None:
    policies = ("full", "elementwise", "kernel", "auto")
    rows = run(tmp_path, device="cuda", dtype="bfloat16", compile=True, policies=policies)
    for policy, row in rows.items():
        assert row.error is None, policy
        assert row.grads_match, policy
    for policy in policies:
        compiled, without = (rows[f"{each}+compile"].activation_bytes_held or 0 for each in (policy, "none"))
        assert compiled < without
