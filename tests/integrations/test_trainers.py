"""What a callback does in either Trainer, Hugging Face's and Lightning's: their own files have what differs."""

from typing import Any, NamedTuple

import pytest
import torch
from lightning_testing import Decoder, fitted
from tiers import slow
from trainer_testing import ACCUMULATED, STEPS, MeasuredTrainer, arguments, model, right_tokens

from recompute.errors import AlreadyAppliedError, UnsupportedError
from recompute.integrations import lightning, training, transformers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


class Training(NamedTuple):
    held: list[int]
    """Of each micro-batch, after forward."""
    logs: list[dict[str, Any]]

    def logged(self, key):
        return [entry[key] for entry in self.logs if key in entry]


def by_transformers(folder, net, *callbacks, steps=STEPS, every=1):
    options = {"max_steps": steps, "logging_steps": every, "learning_rate": 0.05}
    trainer = MeasuredTrainer(net, arguments(folder, **options), callbacks=list(callbacks))
    trainer.train()
    return Training(trainer.held, trainer.state.log_history)


def by_lightning(folder, net, *callbacks, steps=STEPS, every=1):
    module = Decoder(net, learning_rate=0.05)
    fitted(folder, *callbacks, of=module, max_steps=steps, log_every_n_steps=every)
    return Training(module.held, module.records.entries)


TRAINERS = {
    "transformers": (by_transformers, transformers.RecomputeCallback),
    "lightning": (by_lightning, lightning.RecomputeCallback),
}
one_trainer_by_default = pytest.mark.parametrize(
    ("train", "callback"), [TRAINERS["lightning"], *slow(TRAINERS["transformers"])], ids=["lightning", "transformers"]
)
each_trainer = pytest.mark.parametrize(("train", "callback"), TRAINERS.values(), ids=TRAINERS)


@pytest.mark.slow
@each_trainer
def test_the_logs_say_what_was_dropped(train, callback, tmp_path):
    plain, found = train(tmp_path, model()), train(tmp_path, model(), callback("elementwise"))
    eager, dropped, kept = (found.logged(f"recompute_{fate}_nbytes") for fate in ("eager", "dropped", "kept"))
    assert len(dropped) == len(kept) == STEPS
    assert len({*dropped}) == len({*kept}) == 1  # of a forward, however many there were
    assert eager == [dropped[0] + kept[0]] * STEPS  # here nothing is held for others alone
    assert found.logged("recompute_regenerated_nbytes")[0] >= dropped[0]  # what is on the way to a dropped one, too
    assert 0.5 * dropped[0] < plain.held[0] - found.held[0] < 1.5 * dropped[0]
    assert found.logged("token_accuracy") == []
    by_kernels = train(tmp_path, model(), callback("kernel"))
    saved = by_kernels.logged("recompute_eager_nbytes")[0] - by_kernels.logged("recompute_kept_nbytes")[0]
    assert 0.5 * saved < plain.held[0] - by_kernels.held[0] < 1.5 * saved
    without = train(tmp_path, model(), callback("elementwise", logs=False))
    assert [entry.keys() for entry in without.logs] == [entry.keys() for entry in plain.logs]


@each_trainer
def test_memory_on_a_device_that_counts_it(train, callback, tmp_path, monkeypatch):
    now = iter(range(0, 10_000, 100))  # an allocator that gives 100 bytes away each time it is asked
    monkeypatch.setattr(training, "allocated_nbytes", lambda device: (next(now), 7_000))
    started, net = [], model()
    monkeypatch.setattr(training, "start_peak", started.append)
    found = train(tmp_path, net, callback("elementwise"))
    assert found.logged("recompute_held_nbytes") == [100] * STEPS
    assert found.logged("recompute_peak_nbytes") == [7_000] * STEPS
    assert started == [torch.device("cpu")]
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


@one_trainer_by_default
def test_token_accuracy_is_that_of_the_logits(train, callback, tmp_path):
    steps, counts, net = 6, [], model()

    def count(net, args, batch):
        if net.training:
            counts.append(right_tokens(net, batch))

    net.register_forward_pre_hook(count, with_kwargs=True)
    found = train(tmp_path, net, callback("elementwise", logits=False), steps=steps, every=2)
    micro = torch.tensor(counts).view(steps, ACCUMULATED, 2).sum(1)  # of each step (right, all)
    assert len(set(micro[:, 1].tolist())) > 1  # steps of different numbers of tokens
    assert int(micro[:, 0].sum()) > 0
    last, pairs = micro[1::2], micro.view(steps // 2, 2, 2).sum(1)
    assert found.logged("token_accuracy") == pytest.approx((last[:, 0] / last[:, 1]).tolist())
    assert found.logged("mean_token_accuracy") == pytest.approx((pairs[:, 0] / pairs[:, 1]).tolist())


@one_trainer_by_default
def test_kernels_as_the_switch_says(train, callback, tmp_path):
    said = {
        None: {"kernel: rms_norm"},
        False: {"cheap ops run again"},
        True: {"kernel: rms_norm", "cheap ops run again"},  # the one on CUDA, else the other
    }
    for kernels, expected in said.items():
        of_it, net, texts = callback("kernel", kernels=kernels), model(), []
        net.register_forward_hook(lambda *_: texts.append(of_it.handle.explain(wide=True)))  # noqa: B023
        train(tmp_path, net, of_it, steps=1)
        assert {note for note in said[True] if note in texts[-1]} == expected


@each_trainer
def test_a_model_that_checkpoints_by_itself_or_has_a_policy_is_refused(train, callback, tmp_path):
    net = model()
    net.gradient_checkpointing_enable()
    with pytest.raises(
        UnsupportedError, match=r"checkpointing on \(gradient_checkpointing in model.*checkpointing_disable"
    ):
        train(tmp_path, net, callback())
    with pytest.raises(AlreadyAppliedError):
        train(tmp_path, model(), callback(), callback())
