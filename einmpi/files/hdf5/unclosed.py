"""HDF5 files that a killed writer has not closed, read as if it had closed them."""

from __future__ import annotations

import io
import os
import struct
from typing import Any

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_VERSION = 3  # of the superblock: the only one that notes who has the file open
_BYTES_OF_ADDRESS = 8
# The superblock: signature, version, bytes of an address, bytes of a length, flags, then the
# addresses of the base, the extension, the end of the file and the root group; then a checksum.
_SUPERBLOCK = struct.Struct("<8sBBBBQQQQ")
_CHECKSUM = struct.Struct("<I")
_WORD = 2**32 - 1


class ClosedView(io.FileIO):
    """A file whose last writer was killed, with a superblock that says that nobody writes it.

    HDF5 reads the file itself only as one that is still written: it reads what looks damaged again
    and again, and waits longer each time.
    """

    def __init__(self, file: str) -> None:
        super().__init__(file, "r")
        size = os.fstat(self.fileno()).st_size
        self.superblock = _closed_superblock(self.read(_SUPERBLOCK.size + _CHECKSUM.size), size)
        self.seek(0)

    def readinto(self, buffer: Any) -> int:
        """Read as from the file, but the superblock."""
        start = self.tell()
        count = super().readinto(buffer) or 0
        changed = self.superblock[start : start + count]
        memoryview(buffer).cast("B")[: len(changed)] = changed
        return count


def _closed_superblock(written: bytes, size: int) -> bytes:
    """Return a superblock without the note that the file is open; `size` is that of the file.

    The end of the file may have moved after the superblock was written.
    """
    if len(written) < _SUPERBLOCK.size + _CHECKSUM.size:
        raise OSError("truncated file")
    fields = _SUPERBLOCK.unpack_from(written)
    signature, version, bytes_of_address, bytes_of_length, _, base, extension, end, root = fields
    is_known = signature == _SIGNATURE and version == _VERSION
    if not is_known or bytes_of_address != _BYTES_OF_ADDRESS:
        raise OSError("unknown superblock")
    if _CHECKSUM.pack(lookup3(written[: _SUPERBLOCK.size])) != written[_SUPERBLOCK.size :]:
        raise OSError("damaged superblock")
    closed = _SUPERBLOCK.pack(
        signature,
        version,
        bytes_of_address,
        bytes_of_length,
        0,
        base,
        extension,
        max(end, size),
        root,
    )
    return closed + _CHECKSUM.pack(lookup3(closed))


def lookup3(data: bytes) -> int:
    """Return the checksum that HDF5 gives to its metadata: Bob Jenkins' lookup3, from 0."""
    start = (0xDEADBEEF + len(data)) & _WORD
    a = start
    b = start
    c = start
    blocks = [data[place : place + 12] for place in range(0, len(data), 12)]
    for number, block in enumerate(blocks):
        words = struct.unpack("<3I", block.ljust(12, b"\0"))
        a = (a + words[0]) & _WORD
        b = (b + words[1]) & _WORD
        c = (c + words[2]) & _WORD
        if number + 1 < len(blocks):
            a, b, c = _mixed(a, b, c)
    return _finished(a, b, c) if data else c


def _rotated(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & _WORD


def _mixed(a: int, b: int, c: int) -> tuple[int, int, int]:
    """Mix three words with one another, so that all of them depend on all bits."""
    for bits in (4, 6, 8, 16, 19, 4):
        a = ((a - c) & _WORD) ^ _rotated(c, bits)
        c = (c + b) & _WORD
        a, b, c = b, c, a
    return a, b, c


def _finished(a: int, b: int, c: int) -> int:
    """Return the checksum that three words give in the end."""
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotated(b, bits)) & _WORD
        a, b, c = b, c, a
    # The words have changed places seven times: the last one that was computed is in the middle.
    return b
