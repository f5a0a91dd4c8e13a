"""The programs of a generated kernel run over a space: the elements that it writes, or the rows of these."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from recompute.compiled.generated.index_forms import Form

BLOCK = 1024
"""Elements that one program of a kernel computes: 16 bytes a thread and tensor, of 16-bit dtypes."""
WARPS = 4
MAX_WIDTH = 16384
"""Elements of a row that one program holds in registers."""

TILE = 128
"""Rows, and columns, of a matrix that one program computes."""


@dataclass(frozen=True)
class Elements:
    """Each program computes ``BLOCK`` of the elements. ``a`` counts these, as they lie in memory."""

    size: int
    warps = WARPS
    rounds = False

    @property
    def programs(self) -> int:
        return -(-self.size // BLOCK)

    def lines(self, index_type: str) -> list[str]:
        """The first lines of the kernel. index_type: the cast to a wider type; "" if that is not needed."""
        lines = [f"a = tl.program_id(0){index_type} * {BLOCK} + tl.arange(0, {BLOCK})"]
        return lines if self.size % BLOCK == 0 else [*lines, f"inside = a < {self.size}"]

    def address(self, count: int) -> Form:
        """Where the elements lie in a dense tensor of so many."""
        return Form.of_variable("a", self.size)

    def writes(self, count: int) -> bool:
        """Whether each element of a dense tensor of so many is written at its own place."""
        return count == self.size

    def width_of(self, count: int) -> int:
        """How many elements of each row a dense tensor of so many has."""
        return 0

    def guards(self, variables: Collection[str], width: int) -> list[str]:
        """The conditions for an address that counts by these variables to be inside of a tensor."""
        return ["inside"] if variables and self.size % BLOCK else []


@dataclass(frozen=True)
class Rows:
    """Each program computes whole rows. ``r`` counts these, and ``c`` the elements of a row, up to a power of two."""

    rows: int
    width: int
    """The elements of the longest row."""
    rounds: bool = True
    """Whether sums over a row may differ from ATen's in their last bits."""

    @property
    def columns(self) -> int:
        return 1 << max(0, self.width - 1).bit_length()

    @property
    def rows_at_once(self) -> int:
        return max(1, BLOCK // self.columns)

    @property
    def warps(self) -> int:
        return min(16, max(WARPS, self.columns // 512))

    @property
    def programs(self) -> int:
        return -(-self.rows // self.rows_at_once)

    def lines(self, index_type: str) -> list[str]:
        first = f"tl.program_id(0){index_type} * {self.rows_at_once}"
        lines = [f"r = ({first} + tl.arange(0, {self.rows_at_once}))[:, None]"]
        return [*lines, f"c = tl.arange(0, {self.columns})[None, :]"]

    def address(self, count: int) -> Form:
        width = self.width_of(count)
        return Form.total([(Form.of_variable("r", self.rows), width), (Form.of_variable("c", width), 1)])

    def writes(self, count: int) -> bool:
        return True

    def width_of(self, count: int) -> int:
        return count // self.rows

    def guards(self, variables: Collection[str], width: int) -> list[str]:
        """width: how many elements of the rows are wanted."""
        guards = [f"(r < {self.rows})"] if "r" in variables and self.rows % self.rows_at_once else []
        return [*guards, f"(c < {width})"] if "c" in variables and width != self.columns else guards


@dataclass(frozen=True)
class Tiles(Rows):
    """Each program computes a square of a matrix, whose rows lie in memory one after the other."""

    rounds: bool = False
    warps = 16

    @property
    def programs(self) -> int:
        return -(-self.rows // TILE) * -(-self.width // TILE)

    def lines(self, index_type: str) -> list[str]:
        program, across = f"tl.program_id(0){index_type}", -(-self.width // TILE)
        lines = [f"r = ({program} // {across} * {TILE} + tl.arange(0, {TILE}))[:, None]"]
        return [*lines, f"c = ({program} % {across} * {TILE} + tl.arange(0, {TILE}))[None, :]"]

    def turned(self) -> Form:
        """Where the elements lie in a tensor that has the columns as rows."""
        return Form.total([(Form.of_variable("r", self.rows), 1), (Form.of_variable("c", self.width), self.rows)])

    def writes(self, count: int) -> bool:
        return False

    def guards(self, variables: Collection[str], width: int) -> list[str]:
        sizes = {"r": self.rows, "c": self.width}
        return [f"({name} < {size})" for name, size in sizes.items() if name in variables and size % TILE]
