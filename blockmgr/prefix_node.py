"""One edge of the prefix tree: a run of blocks without a branch."""

from array import array
from typing import Final

import numpy as np

from blockmgr.block_table import HOLE
from blockmgr.free_queue import BlockIds

NO_INDEX: Final = -1
"""Of a node that is not in the tree (any more)."""


class PrefixNode:
    """Full blocks ``[start, end)`` of every sequence that runs through here.

        root ─────[0, 5)──┬──[5, 9)──
                          └──[5, 6)──┬──[6, 7)
                                     └──[6, 30)

    A *column* is the blocks of one index, one per KV group. A group without a window has them all;
    one with a window has a hole where the block was evicted or never offered.
    """

    __slots__ = (
        "children",
        "end",
        "index",
        "key",
        "parent",
        "rows",
        "start",
        "tokens",
        "version",
        "window_used",
    )

    def __init__(
        self, parent: "PrefixNode | None", start: int, tokens: bytearray, rows: "list[array[int]]"
    ) -> None:
        self.parent = parent
        self.start = start
        self.end = start + len(rows[0])
        self.tokens = tokens
        """Packed, see ``TokenRun``."""
        self.rows = rows
        """Block ids per group, or ``HOLE``."""
        self.key = b""
        """Of the first block: under it the parent finds this node."""
        self.children: dict[bytes, PrefixNode] = {}
        self.index = NO_INDEX
        """Names the node in arrays over blocks."""
        self.version = 0
        """Grows whenever the run loses its end: what comes there next may be other tokens."""
        self.window_used = 0
        """When its blocks in groups with a window were."""

    @property
    def num_columns(self) -> int:
        """Blocks per group."""
        return self.end - self.start

    def row(self, group: int, start: int, stop: int) -> BlockIds:
        """Return a copy of the ids of ``group`` at the absolute indices ``[start, stop)``."""
        return np.array(self.rows[group][start - self.start : stop - self.start], dtype=np.int64)

    def blocks_from(self, index: int) -> BlockIds:
        """Return the blocks of all groups from ``index`` to the end, the last column first."""
        columns = np.array([row[index - self.start :] for row in self.rows], dtype=np.int64)
        block_ids = columns[:, ::-1].T.ravel()
        return block_ids[block_ids != HOLE]

    def append(self, tokens: bytearray, columns: "list[array[int]]") -> None:
        """Lengthen the run of a node without children."""
        self.tokens += tokens
        for row, column in zip(self.rows, columns, strict=True):
            row.extend(column)
        self.end += len(columns[0])

    def append_one(self, tokens: bytearray, column: "array[int]") -> None:
        """Do the same with one column, given as one id per group."""
        self.tokens += tokens
        self.end += 1
        for at, row in enumerate(self.rows):
            row.append(column[at])

    def truncate(self, end: int) -> None:
        """Shorten the run of a node without children; at least one column stays."""
        nbytes = len(self.tokens) // self.num_columns
        del self.tokens[(end - self.start) * nbytes :]
        for row in self.rows:
            del row[end - self.start :]
        self.end = end
        self.version += 1

    def split(self, index: int, block_nbytes: int) -> "PrefixNode":
        """Return a new parent with the run up to ``index``; this node keeps the rest.

        Args:
            index: Strictly inside of the run.
            block_nbytes: Packed tokens of one block.
        """
        at = index - self.start
        nbytes = block_nbytes * at
        key = bytes(self.tokens[nbytes : nbytes + block_nbytes])
        upper = PrefixNode(
            self.parent, self.start, self.tokens[:nbytes], [row[:at] for row in self.rows]
        )
        upper.key = self.key
        upper.window_used = self.window_used
        upper.children = {key: self}
        if self.parent is not None:
            self.parent.children[self.key] = upper
        self.parent, self.key, self.start = upper, key, index
        del self.tokens[:nbytes]
        for row in self.rows:
            del row[:at]
        return upper
