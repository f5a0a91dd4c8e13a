"""Objects that traced code compares by identity: torch's frontend takes the answer for a constant, and guards none."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from recompute.compiled.replaced_methods import replacing
from recompute.engine.thread_state import local


def guard_identities() -> None:
    """Have torch's frontend guard that such objects are the same ones again."""
    from torch._dynamo import variables
    from torch._dynamo.variables.builtin import BuiltinVariable

    compared = operator.is_, operator.is_not, operator.eq, operator.ne

    @replacing(BuiltinVariable, "call_function")
    def comparing(call: Callable[..., Any], self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in compared and len(args) == 2:
            _guard(*args, by_identity=self.fn in compared[:2])
        return call(self, translator, args, kwargs)

    protocol = getattr(variables, "object_protocol", None)
    if protocol is not None:  # since torch 2.12 containers compare what is in them by it

        @replacing(protocol, "vt_identity_compare")
        def identifying(compare: Callable[..., Any], left: Any, right: Any) -> Any:
            _guard(left, right, by_identity=False)
            return compare(left, right)


def _guard(*compared: Any, by_identity: bool) -> None:
    """by_identity: whatever methods they have. Else only objects without an ``__eq__`` are compared by identity."""
    if not local.is_tracing:
        return
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import ConstDictVariable, ListVariable, UserDefinedObjectVariable

    compared = tuple([each.realize() for each in compared])
    kinds = (UserDefinedObjectVariable, ConstDictVariable, ListVariable) if by_identity else UserDefinedObjectVariable
    if not all(isinstance(each, kinds) for each in compared):
        return
    types = {each.python_type() for each in compared}
    if len(types) > 1 or not (by_identity or types.pop().__eq__ is object.__eq__):
        return  # objects of two types are never the same one
    sources = [each.source for each in compared if each.source is not None]
    install_guard(*[source.make_guard(GuardBuilder.ID_MATCH) for source in sources])
