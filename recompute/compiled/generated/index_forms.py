"""Where an element lies, as a sum of digits of another number: the arithmetic that a kernel does on indices.

A kernel counts the elements that it writes by one number. The index of an element along a dimension is a digit of that
number, ``(number // divisor) % modulus``, and an address is a sum of digits times strides. Digits of such sums are
digits of the number again, in nearly all cases that views make. So a chain of views costs a kernel no more arithmetic
than its last view does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Term(NamedTuple):
    """``factor * ((variable // divisor) % modulus)``."""

    factor: int
    variable: str
    divisor: int
    modulus: int
    """How many values the digit takes."""
    is_last: bool
    """Whether it is the variable's last digit, so that it needs no ``%``."""

    @property
    def largest(self) -> int:
        return self.factor * (self.modulus - 1)


@dataclass(frozen=True)
class Form:
    """A sum of terms and a constant."""

    terms: tuple[Term, ...] = ()
    constant: int = 0

    @staticmethod
    def of_variable(name: str, size: int) -> Form:
        """The variable itself, which counts from 0 to ``size - 1``."""
        return Form((Term(1, name, 1, size, True),) if size > 1 else ())

    @staticmethod
    def total(parts: Iterable[tuple[Form, int]], constant: int = 0) -> Form:
        """The sum of ``part * factor``, and of a constant."""
        terms: list[Term] = []
        for part, factor in parts:
            constant += part.constant * factor
            terms += [term._replace(factor=term.factor * factor) for term in part.terms if factor]
        return Form(_joined(terms), constant)

    def digit(self, divisor: int, modulus: int) -> Form | None:
        """``(self // divisor) % modulus``; None if that is no sum of digits."""
        if self.constant < 0:
            return None
        below, constant, found = self.constant % divisor, self.constant // divisor % modulus, []
        for term in sorted(self.terms, key=lambda term: term.factor):
            for piece in _split(_split([term], divisor), divisor * modulus):
                if piece.factor < divisor:
                    below += piece.largest
                elif piece.factor % divisor:
                    return None
                elif piece.factor < divisor * modulus:
                    found.append(piece._replace(factor=piece.factor // divisor))
                elif piece.factor % (divisor * modulus):
                    return None
        if below >= divisor or constant + sum(piece.largest for piece in found) >= modulus:
            return None  # something carries over
        return Form(_joined(found), constant)

    def __str__(self) -> str:
        parts = []
        for term in self.terms:
            digit = term.variable if term.divisor == 1 else f"{term.variable} // {term.divisor}"
            if not term.is_last:
                digit = f"({digit}) % {term.modulus}" if term.divisor != 1 else f"{digit} % {term.modulus}"
            plain = term.factor == 1
            parts.append((digit if digit == term.variable else f"({digit})") + ("" if plain else f" * {term.factor}"))
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


def _split(terms: Iterable[Term], boundary: int) -> list[Term]:
    """The terms, with each that reaches over ``boundary`` in two where that is even."""
    pieces: list[Term] = []
    for term in terms:
        inner, uneven = divmod(boundary, term.factor)
        if term.factor < boundary < term.factor * term.modulus and not uneven and term.modulus % inner == 0:
            pieces.append(term._replace(modulus=inner, is_last=False))
            outer = term._replace(factor=boundary, divisor=term.divisor * inner, modulus=term.modulus // inner)
            pieces.append(outer)
        else:
            pieces.append(term)
    return pieces


def _joined(terms: Iterable[Term]) -> tuple[Term, ...]:
    """The terms, from the largest divisor to the smallest, with neighbouring digits that count on as one."""
    joined: list[Term] = []
    for term in sorted(terms, key=lambda term: (term.variable, term.divisor)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.variable == term.variable
            and term.divisor == last.divisor * last.modulus
            and term.factor == last.factor * last.modulus
        ):
            joined[-1] = last._replace(modulus=last.modulus * term.modulus, is_last=term.is_last)
        else:
            joined.append(term)
    return tuple(reversed(joined))
