"""Which bytes of an arena are taken: first fit, neighbours joined when freed. Pure."""

from bisect import insort

ALIGN_BYTES = 64


class Extents:
    """Extents of [0, total_bytes): free and taken ones add up to it after every call. Offsets are multiples of 64."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._free: list[tuple[int, int]] = [(0, total_bytes)] if total_bytes else []
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    @property
    def largest_bytes(self) -> int:
        """The longest extent that `take` could give."""
        return max((size for _, size in self._free), default=0)

    def take(self, n_bytes: int) -> int | None:
        """Offset of `n_bytes` contiguous bytes, or None where no free extent is as long."""
        size = -(-max(n_bytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
        for at, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[at : at + 1] = [(offset + size, free - size)] if free > size else []
                self._taken[offset] = size
                return offset
        return None

    def give(self, offset: int) -> None:
        """Free what `take` gave at this offset."""
        insort(self._free, (offset, self._taken.pop(offset)))
        joined: list[tuple[int, int]] = []
        for start, size in self._free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._free = joined

    def check(self) -> None:
        """Free and taken extents cover everything once, and no two free ones touch."""
        end = 0
        for offset, size in sorted([*self._free, *self._taken.items()]):
            assert offset == end
            assert size > 0
            end = offset + size
        assert end == self.total_bytes
        ends = {offset + size for offset, size in self._free}
        assert not any(offset in ends for offset, _ in self._free)
