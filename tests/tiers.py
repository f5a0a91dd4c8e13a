"""How a test says which of its cases are slow, and so not in the default tier."""

from collections.abc import Mapping

import pytest


def slow(*cases):
    """These values for ``pytest.mark.parametrize``, all slow. A tuple is a case of several names."""
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow) for case in cases]


def by_default(cases, *names):
    """The values of ``cases``, with their keys for ids: those called ``names`` by default, the others slow.

    A tuple in a list is a case of several names, as for ``slow``, and is called what it is.
    """
    named = cases if isinstance(cases, Mapping) else dict(zip(cases, cases, strict=True))
    assert names, "nothing would run by default"
    assert named.keys() >= set(names), "a case of the default tier is gone"
    mark = {name: [] if name in names else [pytest.mark.slow] for name in named}
    return [
        pytest.param(*each, marks=mark[each]) if type(each) is tuple else pytest.param(value, id=each, marks=mark[each])
        for each, value in named.items()
    ]


def one_in(count, cases):
    """The values of ``cases``, with their keys for ids: of each ``count`` one after another the first by default.

    For long lists of cases of one claim, in folders of which ``.ci/run`` runs the slow ones too.
    """
    return by_default(cases, *list(cases)[::count])
