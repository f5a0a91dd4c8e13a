"""What fits a device is found exactly, in few estimates."""

import math
from types import SimpleNamespace

import models
import pytest
import transformers

from recompute.errors import ModelError
from recompute.estimation.attention_choice import Platform
from recompute.estimation.capacity import Fit, fit, read_capacity
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.fitting_changes import Sizes, fewest_changes
from recompute.estimation.model_and_batch import fake_model_and_batch
from recompute.estimation.model_estimator import ModelEstimator

PEAKS = {
    "a line": lambda batch, length: 1000 + 3 * batch * length,
    "with an elbow": lambda batch, length: max(5000, 2 * batch * length),
    "a parabola": lambda batch, length: 1000 + batch * length**2 // 64,
}


@pytest.mark.parametrize("shape", PEAKS)
@pytest.mark.parametrize("capacity", [500, 4000, 123_457, 10_000_019])
def test_what_is_found_is_the_largest(shape, capacity):
    tried = []

    def peak(batch, length):
        tried.append((batch, length))
        return PEAKS[shape](batch, length)

    found = fit(peak, ("a device", capacity), 2, 512, lambda what, done, total: None)
    assert found.fits == (PEAKS[shape](2, 512) <= capacity)
    batches = [batch for batch in range(1, found.largest_batch + 3) if PEAKS[shape](batch, 512) <= capacity]
    assert found.largest_batch == max(batches, default=0)
    lengths = range(256, found.longest_sequence + 1024, 256)
    assert found.longest_sequence == max(
        [length for length in lengths if PEAKS[shape](2, length) <= capacity], default=0
    )
    assert len(tried) == len(set(tried)) <= (12 if shape == "a line" else 40)


def test_it_says_so_in_words():
    found = Fit("H100", 80 << 30, 1, 4096, 40 << 30, 2, 8192)
    assert str(found) == (
        "Fits H100: 40.00 GiB is 50% of 80.00 GiB. At sequence 4,096, the largest batch is 2; at batch 1, the longest "
        "sequence is 8,192."
    )
    none = found._replace(peak_nbytes=81 << 30, largest_batch=0, longest_sequence=0)
    assert str(none).startswith("Does not fit H100: ")
    assert "no batch fits; at batch 1, no sequence fits" in str(none)


@pytest.mark.parametrize("capacity", [500, 5000])
def test_what_a_size_does_not_change_has_no_largest(capacity):
    def fitted(peak):
        return fit(peak, ("a device", capacity), 1, 512, lambda what, done, total: None)

    own = fitted(lambda batch, length: 1000)
    assert (own.largest_batch, own.longest_sequence) == (None, None)
    assert str(own).endswith("so no other batch sizes and sequence lengths were tried.")
    images = fitted(lambda batch, length: 1000 * batch)
    assert (images.largest_batch, images.longest_sequence) == (capacity // 1000, None)
    assert str(images).endswith("The largest batch is 5." if images.fits else "No batch fits.")


def test_a_search_that_ends_at_its_bound_says_that_there_may_be_more():
    found = fit(lambda batch, length: batch + length, ("a device", 1 << 30), 1, 512, lambda what, done, total: None)
    assert "the largest batch is 65,536 or more; at batch 1, the longest sequence is 4,194,304 or more." in str(found)


def test_a_device_is_a_name_or_its_bytes():
    assert read_capacity(None, None) is None
    assert read_capacity("h200", None) == ("H200", 139 << 30)
    assert read_capacity("h200", "100GiB") == ("H200", 100 << 30)
    assert read_capacity(None, "24GiB") == ("this device", 24 << 30)
    with pytest.raises(ModelError, match="--gpu-memory: expected something like 24GiB; found 'much'"):
        read_capacity(None, "much")


def test_the_fewest_changes_that_fit_are_offered():
    """A model of 1.3 GiB of weights in bfloat16, whose AdamW takes three times as much beside."""
    config = transformers.LlamaConfig(
        **{**models.SHAPE, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 4, "head_dim": 128}
    )
    options = EstimateOptions("bfloat16", "adamw-fused", "none", 1, "full")
    with fake_model_and_batch(config, options, 1, 64, None) as subject:
        estimator = ModelEstimator(subject, Platform.of(None))
        peak = estimator.estimate(options, None).peak_bytes
        enough, close = (
            fewest_changes(estimator, options, None, peak),
            fewest_changes(estimator, options, None, peak // 2),
        )
        small = fewest_changes(estimator, options, None, peak // 4)
        assert fewest_changes(estimator, options, None, 1) is None
    assert enough is not None
    assert enough.changes == ()
    assert close is not None
    assert close.changes == ("fsdp2 over 4 devices",)
    assert small is not None
    assert small.peak_nbytes <= peak // 4


class Tokens:
    """Stands for an estimator: ``static`` bytes a device, and for each token 16 bytes, or fewer by a policy."""

    fitting_peak = ModelEstimator.fitting_peak

    def __init__(self, static, sizes):
        self.static, self.sizes = static, sizes

    def of_sizes(self, batch_size, seq_len):
        return Tokens(self.static, Sizes(batch_size, seq_len))

    def head(self):
        return None

    def static_nbytes(self, options):
        return self.static // options.devices

    def estimate(self, options, policy):
        per_token = {None: 16, "elementwise": 12, "auto": 8, "full": 4}[policy and policy.name]
        return SimpleNamespace(peak_bytes=self.static_nbytes(options) + per_token * math.prod(self.sizes))


@pytest.mark.parametrize(
    ("static", "given", "capacity", "changes"),
    [
        (0, Sizes(8, 1024), 16 * 8192, ()),
        (0, Sizes(8, 1024), 4 * 8192, ("policy full",)),
        (0, Sizes(8, 1024), 4 * 8192 - 1, ("batch size 1",)),
        (0, Sizes(8, 1024), 16 * 1024 - 1, ("batch size 2", "policy full")),
        (0, Sizes(1, 1024), 4 * 1024 - 1, ("sequence length 512", "policy full")),
        (0, Sizes(8, 1024), 4 * 512, ("batch size 1", "sequence length 512", "policy full")),
        (0, Sizes(8, 1024), 4 * 512 - 1, ("batch size 1", "sequence length 256", "policy full")),
        (64 * 8192, Sizes(8, 1024), 4 * 8192, ("batch size 1", "fsdp2 over 32 devices")),
        (64 * 8192, Sizes(1, 128), 16 * 128, ("policy auto", "fsdp2 over 512 devices")),
        (64 * 8192, None, 8 * 8192, ("policy full", "fsdp2 over 16 devices")),
    ],
)
def test_smaller_batches_and_shorter_sequences_are_among_the_changes(static, given, capacity, changes):
    estimator = Tokens(static, given or Sizes(8, 1024))
    options = EstimateOptions("bfloat16", "sgd", "none", 1, "full")
    found = fewest_changes(estimator, options, None, capacity, given=given)
    assert found is not None
    assert found.changes == changes
    assert found.peak_nbytes <= capacity
