"""Pure: the 40 digits of ``.data/serialization_id`` that torch's writer puts into an archive.

The first 20 combine the hashes of the record names in the order in which libstdc++'s unordered_set gives them; the last
20 combine the CRCs of the non-empty records in the order of writing. What is emulated: std::hash (Murmur64A), the
set's insertion at the front of a bucket, its rehash at these prime sizes. Other C++ libraries give other digits.

>>> combine_crcs([1, 2])
175247769363
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_MASK = 0xFFFFFFFFFFFFFFFF
_MULTIPLIER = 0xC6A4A7935BD1E995
_SEED = 0xC70F6907

# The sizes that libstdc++'s rehash policy takes when a set grows one by one.
_PRIMES = (
    13,
    29,
    59,
    127,
    257,
    541,
    1109,
    2357,
    5087,
    10273,
    20753,
    42043,
    85229,
    172933,
    351061,
    712697,
    1447153,
    2938679,
    5967347,
    12117689,
)


def murmur_hash(data: bytes) -> int:
    """Hash as std::hash<std::string> of libstdc++ on 64 bits."""
    length = len(data)
    value = _SEED ^ (length * _MULTIPLIER & _MASK)
    aligned = length & ~7
    for start in range(0, aligned, 8):
        word = int.from_bytes(data[start : start + 8], "little") * _MULTIPLIER & _MASK
        word = (word ^ (word >> 47)) * _MULTIPLIER & _MASK
        value = (value ^ word) * _MULTIPLIER & _MASK
    if length > aligned:
        value = (value ^ int.from_bytes(data[aligned:], "little")) * _MULTIPLIER & _MASK
    value = (value ^ (value >> 47)) * _MULTIPLIER & _MASK
    return value ^ (value >> 47)


def hash_combine(seed: int, value: int) -> int:
    """Mix a value into a running hash as c10::hash_combine does."""
    return seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2) & _MASK)


def combine_crcs(crcs: Iterable[int]) -> int:
    """Combine the CRCs of records in the order of writing."""
    seed = 0
    for crc in crcs:
        seed = hash_combine(seed, crc)
    return seed


class _UnorderedSet:
    """The order of a std::unordered_set: one linked list; a bucket knows the node before its first."""

    def __init__(self) -> None:
        self.next: list[int] = [-1]  # node 0 stands before the first; node i + 1 is the i-th value
        self.values: list[int] = [0]
        self.before: dict[int, int] = {}
        self.num_buckets = 1
        self.primes = iter(_PRIMES)
        self.limit = 0

    def add(self, value: int) -> None:
        if len(self.values) > self.limit:
            self._grow()
        node = len(self.values)
        self.values.append(value)
        self.next.append(-1)
        bucket = value % self.num_buckets
        before = self.before.get(bucket)
        if before is None:
            first = self.next[0]
            if first >= 0:
                self.before[self.values[first] % self.num_buckets] = node
            self.next[node], self.next[0] = first, node
            self.before[bucket] = 0
        else:
            self.next[node], self.next[before] = self.next[before], node

    def _grow(self) -> None:
        self.num_buckets = self.limit = next(self.primes)
        buckets: dict[int, int] = {}
        following, values, size = self.next, self.values, self.num_buckets
        node, following[0], first_bucket = following[0], -1, 0
        while node >= 0:
            after = following[node]
            bucket = values[node] % size
            before = buckets.get(bucket)
            if before is None:
                first = following[0]
                following[node], following[0] = first, node
                buckets[bucket] = 0
                if first >= 0:
                    buckets[first_bucket] = node
                first_bucket = bucket
            else:
                following[node], following[before] = following[before], node
            node = after
        self.before = buckets

    def __iter__(self) -> Iterator[int]:
        node = self.next[0]
        while node >= 0:
            yield self.values[node]
            node = self.next[node]


def combine_names(names: Iterable[str]) -> int:
    """Combine the names of the records, without the archive's directory, given in the order of writing."""
    ordered = _UnorderedSet()
    for name in names:
        ordered.add(murmur_hash(name.encode()))
    seed = 0
    for value in ordered:
        seed = hash_combine(seed, value)
    return seed


def serialization_id(names_hash: int, crcs: Iterable[int]) -> bytes:
    """Give the content of the record: names' hash and the CRCs of all earlier non-empty records."""
    return b"%020d%020d" % (names_hash, combine_crcs(crcs))
