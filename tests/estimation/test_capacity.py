"""What fits a device is found exactly, in few estimates."""

import pytest

from recompute.errors import ModelError
from recompute.estimation.capacity import Fit, fit, read_capacity

PEAKS = {
    "a line": lambda batch, length: 1000 + 3 * batch * length,
    "with an elbow": lambda batch, length: max(5000, 2 * batch * length),
    "a parabola": lambda batch, length: 1000 + batch * length**2 // 64,
}


def fitted(peak, capacity, batch_size=1):
    return fit(peak, ("a device", capacity), batch_size, 512)


@pytest.mark.parametrize("shape", PEAKS)
@pytest.mark.parametrize("capacity", [500, 4000, 123_457, 10_000_019])
def test_what_is_found_is_the_largest(shape, capacity):
    tried = []

    def peak(batch, length):
        tried.append((batch, length))
        return PEAKS[shape](batch, length)

    found = fitted(peak, capacity, 2)
    assert found.fits == (PEAKS[shape](2, 512) <= capacity)
    batches = [batch for batch in range(1, found.largest_batch + 3) if PEAKS[shape](batch, 512) <= capacity]
    assert found.largest_batch == max(batches, default=0)
    tried_lengths = range(256, found.longest_sequence + 1024, 256)
    lengths = [length for length in tried_lengths if PEAKS[shape](2, length) <= capacity]
    assert found.longest_sequence == max(lengths, default=0)
    assert len(tried) == len(set(tried)) <= (12 if shape == "a line" else 40)


def test_it_says_so_in_words():
    found = Fit("H100", 80 << 30, 1, 4096, 40 << 30, 2, 8192)
    assert str(found) == (
        "Fits H100: 40.00 GiB is 50% of 80.00 GiB. At sequence 4,096, the largest batch is 2; at batch 1, the longest "
        "sequence is 8,192."
    )
    none = found._replace(peak_nbytes=81 << 30, largest_batch=0, longest_sequence=0)
    assert str(none).startswith("Does not fit H100: ")
    assert "no batch fits; at batch 1, no sequence fits. recompute doctor finds changes that" in str(none)


@pytest.mark.parametrize("capacity", [500, 5000])
def test_what_a_size_does_not_change_has_no_largest(capacity):
    own = fitted(lambda batch, length: 1000, capacity)
    assert (own.largest_batch, own.longest_sequence) == (None, None)
    assert "so no other batch sizes and sequence lengths were tried." in str(own)
    images = fitted(lambda batch, length: 1000 * batch, capacity)
    assert (images.largest_batch, images.longest_sequence) == (capacity // 1000, None)
    assert ("The largest batch is 5." if images.fits else "No batch fits.") in str(images)


def test_a_search_that_ends_at_its_bound_says_that_there_may_be_more():
    found = fitted(lambda batch, length: batch + length, 1 << 30)
    assert "the largest batch is 65,536 or more; at batch 1, the longest sequence is 4,194,304 or more." in str(found)


def test_a_device_is_a_name_or_its_bytes():
    assert read_capacity(None, None) is None
    assert read_capacity("h200", None) == ("H200", 139 << 30)
    assert read_capacity("h200", "100GiB") == ("H200", 100 << 30)
    assert read_capacity(None, "24GiB") == ("this device", 24 << 30)
    with pytest.raises(ModelError, match="--gpu-memory: expected something like 24GiB; found 'much'"):
        read_capacity(None, "much")
