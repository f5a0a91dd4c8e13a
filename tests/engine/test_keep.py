"""What is kept because a rule or the user says so: modules, tensors, and tensors by a name."""

import pytest
from engine_testing import (
    RULES_OF_SETTINGS,
    RMSNorm,
    assert_as_plain,
    holding,
    module_of,
    no_garbage_collection,
    policy,
    tokens,
    weak,
)
from tiers import by_default

import recompute


@pytest.mark.parametrize(
    "rules",
    by_default({**RULES_OF_SETTINGS, "its norm": policy(("inside.norm", "recompute"))}, "checkpoint", "its norm"),
)
def test_what_the_user_keeps_stays_alive_until_the_graph_is_gone(rules):
    kept = []

    def forward(self, x):
        logits = recompute.keep(self.norm(x))
        kept.append(weak(logits))
        return (logits.sin() * x).sin()

    model = holding(forward, norm=RMSNorm())
    recompute.apply(model, rules)
    kept.clear()
    with no_garbage_collection():
        result = model(tokens())
        assert not kept[0].expired()
        result.sum().backward()
        del result
        assert all(reference.expired() for reference in kept)


def test_a_kept_module_inside_a_checkpointed_one_keeps_what_it_saves():
    references = []

    def forward(self, x):
        hidden = x.exp()
        references.append(weak(hidden))
        return hidden.sin()

    model = holding(lambda self, x: self.kept(x.cos()).tan(), kept=module_of(forward))
    recompute.apply(model, policy(("inside.kept", "keep"), ("inside", "checkpoint")))
    result = model(tokens())
    assert not references[0].expired()
    result.sum().backward()
    assert_as_plain(model, {"rules": "none"}, tokens())


def test_keep_returns_the_tensor_itself_outside_of_regions_and_takes_nothing_else():
    x = tokens()
    assert recompute.keep(x) is x
    with pytest.raises(TypeError, match="takes a tensor, got list"):
        recompute.keep([x])


@pytest.mark.parametrize("name", ["a name", "gemm", 3])
def test_keep_refuses_what_no_rule_can_list_as_a_name(name):
    with pytest.raises(ValueError, match=f"a name of letters, digits and '_', .* got {name!r}"):
        recompute.keep(tokens(), name)
