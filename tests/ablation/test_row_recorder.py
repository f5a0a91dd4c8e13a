"""Rows in turn: repeats are interleaved, failures are kept, and what is there already is not trained again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from recompute.ablation import run_ablation
from recompute.ablation.ablation_config import AblationConfig
from recompute.ablation.results import AblationRow, Timings, row_from
from recompute.ablation.run_ablation import RowRecorder
from recompute.errors import AblationError
from recompute.estimation.llama import ModelShape

FACTS = {"model": "m", "sequence_length": 8, "batch_size": 1, "dtype": "float32"}


def timings(*steps: float, backward: float = 1.0) -> Timings:
    return {"step": steps, "backward": [backward] * len(steps)}


@dataclass
class Trainer:
    """Notes what it is asked for. ``broken``: names whose rows, or repeats, fail."""

    asked: list[str] = field(default_factory=list)
    broken: tuple[str, ...] = ()
    has_baseline: bool = False

    def row(self, policy: str) -> AblationRow:
        self.asked.append(f"row {policy}")
        self.has_baseline |= policy == "none"
        row = AblationRow(policy, **FACTS, error="broken" if f"row {policy}" in self.broken else None)
        return row if row.error else row.timed([timings(1.0, 2.0, 3.0, backward=1.0 if policy == "none" else 1.5)])

    def timings(self, policy: str) -> tuple[Timings | None, str | None]:
        self.asked.append(f"again {policy}")
        return (None, "broken") if f"again {policy}" in self.broken else (timings(4.0, 5.0), None)


def recorded(out: Path | None = None, earlier: tuple[AblationRow, ...] = (), **options: Any) -> RowRecorder:
    return RowRecorder({"command": "recompute ablate"}, out, earlier, **options)


def saved(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_all_run_once_before_any_runs_again_and_numbers_are_over_all_repeats() -> None:
    trainer, recorder = Trainer(), recorded()
    yielded = list(recorder.train(trainer, ("none", "a"), FACTS, repeats=3))
    first, again = ["row none", "row a"], ["again none", "again a"]
    assert trainer.asked == [*first, *again, *again]
    assert [row.policy for row in yielded] == ["none", "a"] * 3
    none, a = recorder.rows
    assert len(none.timings) == 3
    assert none.step_seconds == 4.0  # of 1 2 3 4 5 4 5
    assert none.step_seconds_quartiles == (2.5, 4.5)
    assert none.forward_seconds is none.forward_seconds_quartiles is None
    assert none.backward_added_seconds == 0.0
    assert a.backward_added_seconds == 0.0
    assert yielded[1].backward_added_seconds == 0.5


def test_what_fails_in_a_repeat_keeps_its_numbers_and_does_not_run_again() -> None:
    trainer, recorder = Trainer(broken=("row a", "again b")), recorded()
    list(recorder.train(trainer, ("none", "a", "b"), FACTS, repeats=3))
    assert trainer.asked == ["row none", "row a", "row b", "again none", "again b", "again none"]
    _, a, b = recorder.rows
    assert (a.error, a.step_seconds) == ("broken", None)
    assert (b.error, b.step_seconds) == ("repeat 2: broken", 2.0)


def test_good_rows_are_not_repeated_and_failed_ones_are(tmp_path: Path) -> None:
    before = recorded(tmp_path)
    list(before.train(Trainer(broken=("row a",)), ("none", "a", "b"), FACTS, repeats=2))
    earlier = [row_from(row) for row in saved(tmp_path)["rows"]]
    assert json.loads(json.dumps([asdict(row) for row in earlier])) == saved(tmp_path)["rows"]
    trainer, recorder = Trainer(), recorded(tmp_path, tuple(earlier))
    assert saved(tmp_path)["complete"] is False
    list(recorder.train(trainer, ("none", "a", "b", "c"), FACTS, repeats=2))
    # The baseline trains for its gradients, which are not kept; its row stays.
    assert trainer.asked == ["row none", "row a", "row c", "again a", "again c"]
    assert [row.policy for row in recorder.rows] == ["none", "a", "b", "c"]
    assert [row["error"] for row in saved(tmp_path)["rows"]] == [None] * 4


def test_a_row_short_of_repeats_gets_those_and_needs_no_baseline() -> None:
    earlier = list(recorded().train(Trainer(), ("none", "a"), FACTS))
    trainer, recorder = Trainer(), recorded(earlier=tuple(earlier))
    list(recorder.train(trainer, ("none", "a"), FACTS, repeats=2))
    assert trainer.asked == ["again none", "again a"]


def test_the_longest_sequence_is_written_into_the_rows_of_all_lengths() -> None:
    recorder = recorded()
    longer = {**FACTS, "sequence_length": 16}
    for facts in (FACTS, longer, {**FACTS, "dtype": "autocast"}):
        trainer = Trainer()
        list(replace(row, **facts) for row in recorder.train(_Of(facts, trainer), ("none", "a"), facts))
    searched: list[str] = []

    def longest(name: str) -> tuple[int | None, str | None]:
        searched.append(name)
        return (None, "broken") if name == "a" else (4096, None)

    list(recorder.search(longest, ("none", "a"), FACTS))
    found = {(row.policy, row.sequence_length, row.dtype): (row.longest_sequence, row.error) for row in recorder.rows}
    for length in (8, 16):
        assert found["none", length, "float32"] == (4096, None)
        assert found["a", length, "float32"] == (None, "broken")
    assert found["none", 8, "autocast"] == (None, None)
    list(recorder.search(longest, ("none",), FACTS))
    assert searched == ["none", "a"]


@dataclass
class _Of:
    """The rows of a trainer, with other facts."""

    facts: dict[str, Any]
    trainer: Trainer

    @property
    def has_baseline(self) -> bool:
        return True

    def row(self, policy: str) -> AblationRow:
        return replace(self.trainer.row(policy), **self.facts)

    def timings(self, policy: str) -> tuple[Timings | None, str | None]:
        return self.trainer.timings(policy)


def test_what_is_left_is_told_by_the_mean_of_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0, 40.0, 40.0, 60.0])
    monkeypatch.setattr(run_ablation, "host_seconds", lambda: next(clock))
    told: list[tuple[int, int, float | None]] = []
    recorder = recorded(total=6, tell_left=lambda *left: told.append(left))
    list(recorder.train(Trainer(), ("none", "a", "b"), FACTS))
    assert told == [(0, 6, None), (1, 6, 50.0), (2, 6, 80.0), (3, 6, 60.0)]


TINY = AblationConfig(
    model=ModelShape(hidden_size=32, intermediate_size=48, layers=1, heads=2, kv_heads=1),
    policies=("none",), peers=(), sequence_lengths=(8,), batch_size=1, steps=1, device="cpu",
)  # fmt: skip


def run(config: AblationConfig, out: Path, **options: Any) -> list[AblationRow]:
    return list(run_ablation.run(config, out, command="recompute ablate", progress=lambda *_: None, **options))


def test_a_run_resumes_what_was_interrupted(tmp_path: Path) -> None:
    config = TINY.model_copy(update={"peers": ("torch-checkpoint", "torch-save-on-cpu")})
    for row in run_ablation.run(config, tmp_path, command="first", progress=lambda *_: None):
        if row.policy == "torch-checkpoint":
            break
    before = saved(tmp_path)
    assert [row["policy"] for row in before["rows"]] == ["none", "torch-checkpoint"]
    assert [row.policy for row in run(config, tmp_path, resume=True)] == ["torch-save-on-cpu"]
    after = saved(tmp_path)
    assert after["complete"]
    assert after["command"] == "first"
    assert len(after["resumed"]) == 1
    assert after["rows"][0] == before["rows"][0]
    assert after["rows"][2]["grads_match"]
    assert run(config, tmp_path, resume=True) == []


def test_a_run_without_results_starts_from_the_beginning(tmp_path: Path) -> None:
    assert [row.policy for row in run(TINY, tmp_path, resume=True)] == ["none"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("config", "steps"), 7, r"config\.steps: results\.json has 7, this run 1"),
        (("machine", "torch"), "1.0", r"machine\.torch: results\.json has '1\.0', this run '"),
        (("machine", "cpu"), "another", r"machine\.cpu: results\.json has 'another'"),
        (("machine", "recompute"), "0", r"machine\.recompute: results\.json has '0'"),
        (("text", "nbytes"), 3, r"text\.nbytes: results\.json has 3"),
    ],
)
def test_results_of_others_are_not_resumed(
    results: str, tmp_path: Path, path: tuple[str, str], value: Any, message: str
) -> None:
    found = json.loads(results)
    found[path[0]][path[1]] = value
    (tmp_path / "results.json").write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(AblationError, match=rf"results\.json: expected results of the same(.|\n)*{message}"):
        run(TINY, tmp_path, resume=True)
    assert saved(tmp_path) == found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("results")
    run(TINY, out)
    return (out / "results.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(("text", "message"), [("{", "found no JSON"), ('{"rows": 3}', "with rows that each have")])
def test_a_file_that_holds_no_results_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(AblationError, match=rf"results\.json: expected the results\.json of an ablation.*{message}"):
        run(TINY, tmp_path, resume=True)
