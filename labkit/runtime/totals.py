"""Sums of what streaming did; the difference of two is what happened between them."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Totals:
    """What a source has done since it was opened.

    Attributes:
        hits, misses: lookups that found an entry resident, and that did not.
        prefetch_hits: of the hits, first uses of entries that were read ahead.
        bytes_read: bytes that left the files, widened edges and reading ahead included.
        prefetch_bytes: of them, read ahead of need.
        read_s: time in which at least one read was under way.
        wait_s: exposed wait, the wall time that the graph stood still for reads.
        manage_s: wall time of looking up, giving memory back and predicting.
    """

    hits: int = 0
    misses: int = 0
    prefetch_hits: int = 0
    bytes_read: int = 0
    prefetch_bytes: int = 0
    read_s: float = 0.0
    wait_s: float = 0.0
    manage_s: float = 0.0

    def copy(self) -> Totals:
        """The sums as they stand now."""
        return Totals(*_values(self))

    def __sub__(self, other: Totals) -> Totals:
        return Totals(*map(operator.sub, _values(self), _values(other)))


_values = operator.attrgetter(*(item.name for item in fields(Totals)))
