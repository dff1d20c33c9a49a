"""What an index holds, as ``ls-files -z -s -v`` lists it.

Twenty thousand entries are common and few of them are ever looked at, so an
entry becomes an object only where it is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Final

from lionwt import git
from lionwt.values import Value

GITLINK: Final = "160000"
SYMLINK: Final = "120000"
#: The arguments that print what is read here.
LIST: Final = ("ls-files", "-z", "-s", "-v")


class Entry(Value, frozen=True):
    """One path of an index: mode and object."""

    mode: str
    oid: str

    def row(self, name: bytes) -> bytes:
        """The entry under ``name``, as ``ls-files -s`` prints it and ``update-index --index-info`` takes it."""
        return f"{self.mode} {self.oid} 0\t".encode("ascii") + name


class Listing(Mapping[bytes, Entry]):
    """The entries of an index by name."""

    def __init__(self, out: bytes = b"", object_format: str = "sha1") -> None:
        # "H 100644 <oid> 0\t<name>": a tag, then columns of a fixed width.
        self._stage = 10 + (64 if object_format == "sha256" else 40)
        self._start = start = self._stage + 2
        self._rows = git.records(out)
        plain, link = ord("0"), GITLINK.encode()
        odd = [row for row in self._rows if row[:2] != b"H " or row[self._stage] != plain or row[2:8] == link]
        #: Names with entries of a merge that has not ended.
        self.unmerged = tuple(dict.fromkeys(row[start:] for row in odd if row[self._stage] != plain))
        #: Names whose entry tells git to look away, and among them those that are not on the disk.
        told = [row for row in odd if row[self._stage] == plain and row[:1] not in b"HM"]
        self.flagged = tuple(row[start:] for row in told)
        self.skipped = {row[start:]: self._entry(row) for row in told if row[:1] in b"Ss"}
        self.assumed = tuple(row[start:] for row in told if row[:1].islower())
        self.gitlinks = {row[start:]: self._entry(row).oid for row in odd if row[2:8] == link}

    @functools.cached_property
    def _by_name(self) -> dict[bytes, bytes]:
        return {row[self._start :]: row for row in self._rows}

    def _entry(self, row: bytes) -> Entry:
        return Entry(row[2:8].decode("ascii"), row[9 : self._stage - 1].decode("ascii"))

    def __getitem__(self, name: bytes) -> Entry:
        return self._entry(self._by_name[name])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._by_name)

    def __len__(self) -> int:
        """The number of entries; a name that is unmerged counts for each of its stages."""
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def missing_from(self, other: Listing) -> set[bytes]:
        """The names that ``other`` does not hold; rows that are the same in both need no name."""
        differing = set(self._rows).difference(other._rows)
        return {name for row in differing if (name := row[self._start :]) not in other}

    def beyond(self, names: set[bytes]) -> set[bytes]:
        """Those of ``names`` that are not in this index."""
        return names - self._by_name.keys()
