"""Layers of which a sweep has something to say."""

from torch import nn


class Drifting(nn.Linear):
    """Computes something else each time that the program calls it."""

    calls = 0

    def forward(self, input):
        Drifting.calls += 1
        return super().forward(input) * Drifting.calls


def raising(error):
    class Raising(nn.Linear):
        def forward(self, input):
            raise error

    return Raising
