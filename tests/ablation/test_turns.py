"""Rows in turn: repeats are interleaved, failures are kept, and what is there already is not trained again."""

from dataclasses import dataclass, field
from typing import Any

from ablation_testing import LEAST, saved, started

from recompute.ablation import run_ablation
from recompute.ablation.results import AblationRow
from recompute.ablation.run_ablation import RowRecorder

FACTS = {"model": "m", "sequence_length": 8, "batch_size": 1, "dtype": "float32"}


def timings(*steps, backward=1.0):
    return {"step": steps, "backward": (backward,) * len(steps)}


@dataclass
class Trainer:
    """Notes what it is asked for. ``broken``: what fails of that."""

    broken: tuple[str, ...] = ()
    baseline_seconds: float = 1.0
    facts: dict[str, Any] = field(default_factory=lambda: FACTS)
    asked: list[str] = field(default_factory=list)

    def ask(self, task, policy):
        self.asked.append(f"{task} {policy}")
        if f"{task} {policy}" in self.broken:
            return None, "broken"
        if task == "timings":
            return timings(4.0, 5.0), None
        backward = self.baseline_seconds if policy == "none" else 1.5
        return AblationRow(policy, **self.facts).timed([timings(1.0, 2.0, 3.0, backward=backward)]), None


def recorded(out=None, **options):
    return RowRecorder({"command": "recompute ablate", "machine": {"date": "2026"}}, out, **options)


def asked(recorder, *names, repeats=1, broken=()):
    trainer = Trainer(broken)
    list(recorder.train(trainer.ask, names, FACTS, repeats=repeats))
    return trainer.asked


def test_all_run_once_before_any_runs_again_and_numbers_are_over_all_repeats():
    trainer, recorder = Trainer(), recorded()
    yielded = list(recorder.train(trainer.ask, ("none", "a"), FACTS, repeats=3))
    assert trainer.asked == ["row none", "row a", *2 * ["timings none", "timings a"]]
    assert [row.policy for row in yielded] == ["none", "a"] * 3
    none, a = recorder.rows
    assert len(none.timings) == 3
    assert none.step_seconds == 4.0  # of 1 2 3 4 5 4 5
    assert none.step_seconds_quartiles == (2.5, 4.5)
    assert none.forward_seconds is none.forward_seconds_quartiles is None
    assert none.backward_added_seconds == a.backward_added_seconds == 0.0
    assert yielded[1].backward_added_seconds == 0.5


def test_what_fails_in_a_repeat_keeps_its_numbers_and_does_not_run_again():
    recorder = recorded()
    found = asked(recorder, "none", "a", "b", repeats=3, broken=("row a", "timings b"))
    assert found == ["row none", "row a", "row b", "timings none", "timings b", "timings none"]
    _, a, b = recorder.rows
    assert (a.error, a.step_seconds) == ("broken", None)
    assert (b.error, b.step_seconds) == ("repeat 2: broken", 2.0)


def test_good_rows_are_not_repeated_and_failed_ones_are(tmp_path):
    asked(recorded(tmp_path), "none", "a", "b", repeats=2, broken=("row a",))
    rows = saved(tmp_path)["rows"]
    recorder = recorded(tmp_path, resume=True)
    assert saved(tmp_path) == {**recorder.results, "complete": False, "rows": rows}
    # The baseline trains for its gradients, which are not kept; its row stays.
    found = asked(recorder, "none", "a", "b", "c", repeats=2)
    assert found == ["row none", "row a", "row c", "timings a", "timings c"]
    assert [row.policy for row in recorder.rows] == ["none", "a", "b", "c"]
    assert [row["error"] for row in saved(tmp_path)["rows"]] == [None] * 4


def test_a_row_short_of_repeats_gets_those_and_needs_no_baseline(tmp_path):
    asked(recorded(tmp_path), "none", "a")
    assert asked(recorded(tmp_path, resume=True), "none", "a", repeats=2) == ["timings none", "timings a"]


def test_rows_have_their_own_baseline_and_the_longest_sequence_is_written_into_those_of_all_lengths():
    recorder = recorded()
    for seconds, facts in (
        (1.0, FACTS),
        (1.25, {**FACTS, "sequence_length": 16}),
        (2.0, {**FACTS, "dtype": "autocast"}),
    ):
        list(recorder.train(Trainer(facts=facts, baseline_seconds=seconds).ask, ("none", "a"), facts))
    added = [row.backward_added_seconds for row in recorder.rows]
    assert added == [0.0, 0.5, 0.0, 0.25, 0.0, -0.5], "each comparison has a baseline of its own"
    searched = []

    def longest(name):
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


def test_what_is_left_is_told_by_the_mean_of_what_was_done(monkeypatch):
    clock = iter([0.0, 10.0, 10.0, 40.0, 40.0, 60.0])
    monkeypatch.setattr(run_ablation, "host_seconds", lambda: next(clock))
    told = []
    asked(recorded(total=6, tell_left=lambda *left: told.append(left)), "none", "a", "b")
    assert told == [(0, 6, None), (1, 6, 50.0), (2, 6, 80.0), (3, 6, 60.0)]


def test_a_run_resumes_what_was_interrupted_and_one_without_results_begins(tmp_path):
    config = LEAST.model_copy(update={"peers": ("torch-checkpoint", "torch-save-on-cpu")})
    for row in started(tmp_path, config, command="first", resume=True):
        if row.policy == "torch-checkpoint":
            break
    before = saved(tmp_path)
    assert [row["policy"] for row in before["rows"]] == ["none", "torch-checkpoint"]
    assert [row.policy for row in started(tmp_path, config, resume=True)] == ["torch-save-on-cpu"]
    after = saved(tmp_path)
    assert after["complete"]
    assert after["command"] == "first"
    assert len(after["resumed"]) == 1
    assert after["rows"][0] == before["rows"][0]
    assert after["rows"][2]["grads_match"]
    assert list(started(tmp_path, config, resume=True)) == []
