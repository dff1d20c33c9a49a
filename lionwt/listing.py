"""What an index holds, as ``ls-files -z -s -v`` lists it.

Twenty thousand entries are common and few of them are ever looked at, so an
entry becomes an object only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from lionwt import git

GITLINK: Final = "160000"
SYMLINK: Final = "120000"
#: The arguments that print what is read here.
LIST: Final = ("ls-files", "-z", "-s", "-v")


@dataclass(frozen=True)
class Entry:
    """One path of an index: mode and object."""

    mode: str
    oid: str


class Listing(Mapping[bytes, Entry]):
    """The entries of an index by name."""

    def __init__(self, out: bytes = b"", object_format: str = "sha1") -> None:
        # "H 100644 <oid> 0\t<name>": a tag, then columns of a fixed width.
        self._stage = 10 + (64 if object_format == "sha256" else 40)
        start = self._stage + 2
        rows = git.records(out)
        self._rows = {row[start:]: row for row in rows}
        plain = ord("0")
        odd = [row for row in rows if row[:2] != b"H " or row[self._stage] != plain]
        #: Names with entries of a merge that has not ended.
        self.unmerged = tuple(dict.fromkeys(row[start:] for row in odd if row[self._stage] != plain))
        #: Names whose entry tells git to look away, and among them those that are not on the disk.
        told = [row for row in odd if row[self._stage] == plain and row[:1] != b"M"]
        self.flagged = tuple(row[start:] for row in told)
        self.skipped = {row[start:]: self._entry(row) for row in told if row[:1] in b"Ss"}
        link = GITLINK.encode()
        self.gitlinks = {row[start:]: self._entry(row).oid for row in rows if row[2:8] == link}

    def _entry(self, row: bytes) -> Entry:
        return Entry(row[2:8].decode("ascii"), row[9 : self._stage - 1].decode("ascii"))

    def __getitem__(self, name: bytes) -> Entry:
        return self._entry(self._rows[name])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def missing_from(self, other: Listing) -> set[bytes]:
        """The names that ``other`` does not hold."""
        return self._rows.keys() - other._rows.keys()

    def beyond(self, names: set[bytes]) -> set[bytes]:
        """Those of ``names`` that are not in this index."""
        return names - self._rows.keys()
