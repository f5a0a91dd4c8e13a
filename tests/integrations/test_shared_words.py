"""A head whose words the ranks of a group share: losses without logits, and without gathering any."""

import itertools

import pytest
import two_shards
from tiers import slow
from two_processes import TwoProcesses
from two_shards import OPTIONS, TOKENS


@pytest.mark.parametrize(
    ("option", "words"),
    [
        *(default := [("plain", 2), ("all", two_shards.WORDS), ("weights", 600), ("extras", two_shards.WORDS)]),
        *slow(*(each for each in itertools.product(OPTIONS, [two_shards.WORDS, 600, 2]) if each not in default)),
    ],
)
def test_a_cross_entropy_is_that_of_all_words(two_processes, option, words):
    for sums in two_processes.run(two_shards.cross_entropy_is_as_whole, option, words):
        forward, backward = sums[:-2], sums[-2:]
        assert len(forward) == (3 if option == "extras" else 2)
        assert max(forward) <= 3 * TOKENS
        assert backward == [TOKENS * two_shards.HIDDEN, TOKENS * 4]  # gradients of hidden states and of an adapter's


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_log_probabilities_are_those_of_all_words(two_processes, several, entropy):
    two_processes.run(two_shards.log_probs_are_as_whole, several, entropy)


@pytest.mark.parametrize("shares_tokens", [False, True])
def test_a_dtensor_says_itself_which_words_it_has(two_processes, shares_tokens):
    two_processes.run(two_shards.dtensors_are_as_whole, shares_tokens)


def test_it_trains_under_fsdp2(two_processes):
    two_processes.run(two_shards.trains_under_fsdp, 1)


@pytest.mark.slow
def test_it_trains_under_fsdp2_of_two_ranks_times_words_of_two(tmp_path):
    processes = TwoProcesses(tmp_path, count=4)
    try:
        processes.run(two_shards.trains_under_fsdp, 2)
    finally:
        processes.close()


@pytest.mark.parametrize("rule", [{"action": "recompute"}, {"action": "recompute", "rerun": ["gemm"], "price": 0}])
def test_a_region_never_sums_between_ranks_again(two_processes, rule):
    for counts in two_processes.run(two_shards.runs_in_a_region, rule):
        assert counts == [(2, 1)] * 6


def test_what_does_not_fit_is_refused(two_processes):
    for found in two_processes.run(two_shards.refusals):
        assert [words in error for words, error in zip(EXPECTED, found, strict=True)] == [True] * len(EXPECTED), found


EXPECTED = [
    "weight has 100 rows on rank",
    "vocabulary is 7 for 601 words; expected group beside it",
    "expected Shard(0) over a mesh of one dimension",
    "weight is a DTensor and bias is none",
    "expected weight to be one",
    "return_logits with the words shared by a group",
    "first derivatives alone (create_graph=False)",
]
