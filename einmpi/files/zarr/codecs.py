"""The codecs of zarr arrays: how the elements of a chunk become the bytes of its file."""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Configuration: TypeAlias = Mapping[str, Any]

_EXTRA = "install einmpi[zarr]"
_GZIP_LEVEL = 5
_ZSTD_LEVEL = 3
_BLOSC_LEVEL = 5
_CHECKSUM_BYTES = 4
_TOO_LARGE = "it has more bytes than the chunk"
_UNLIKELY = 0xA5  # as the last byte of a chunk
_BLOSC_SIZE = slice(4, 8)  # the bytes of a blosc header with the number of bytes it unpacks to


class ZarrError(ValueError):
    """A store that cannot be read: the reason, what is expected, and a hint."""

    def __init__(self, reason: str, expected: str = "", hint: str = "") -> None:
        super().__init__(reason)
        self.expected = expected
        self.hint = hint


# (encoded bytes, the most bytes that they can stand for) → decoded bytes; raises ValueError.
Decode: TypeAlias = Callable[[bytes, int], bytes]
Encode: TypeAlias = Callable[[Array], bytes]


@dataclass(frozen=True)
class Compressor:
    """A codec from bytes to bytes: the package it needs, and how it decodes and encodes.

    `configuration` is what a new array says about it, given the bytes of an element.
    """

    name: str
    package: str
    decode: Decode
    encode: Encode | None = None
    configuration: Callable[[int], Configuration] | None = None


def _decode_gzip(data: bytes, most: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)  # the wrapper of gzip
    content = unpacker.decompress(data, most + 1)
    if len(content) > most:
        raise ValueError(_TOO_LARGE)
    if not unpacker.eof:
        raise ValueError("it is cut off")
    return content


def _encode_gzip(array: Array) -> bytes:
    return gzip.compress(array.tobytes(), _GZIP_LEVEL, mtime=0)


def _decode_zstd(data: bytes, most: int) -> bytes:
    # A few bytes may stand for gigabytes: only as many are decoded as this buffer has.
    codec = importlib.import_module("numcodecs.zstd").Zstd()
    content = bytearray(most)
    content[-1] = _UNLIKELY
    codec.decode(data, out=content)
    if content[-1] == _UNLIKELY:  # perhaps they were fewer
        return bytes(codec.decode(data))
    return bytes(content)


def _encode_zstd(array: Array) -> bytes:
    return bytes(importlib.import_module("numcodecs.zstd").Zstd(_ZSTD_LEVEL).encode(array))


def _decode_blosc(data: bytes, most: int) -> bytes:
    # The size is compared first: a damaged header could ask for gigabytes.
    if int.from_bytes(data[_BLOSC_SIZE], "little") > most:
        raise ValueError(_TOO_LARGE)
    return bytes(importlib.import_module("numcodecs.blosc").Blosc().decode(data))


def _encode_blosc(array: Array) -> bytes:
    blosc = importlib.import_module("numcodecs.blosc")
    codec = blosc.Blosc("zstd", _BLOSC_LEVEL, blosc.SHUFFLE)
    return bytes(codec.encode(array))


def _blosc_configuration(itemsize: int) -> Configuration:
    return {
        "cname": "zstd",
        "clevel": _BLOSC_LEVEL,
        "shuffle": "shuffle",
        "typesize": itemsize,
        "blocksize": 0,
    }


def _decode_crc32c(data: bytes, _: int) -> bytes:
    content = data[:-_CHECKSUM_BYTES]
    checksum = importlib.import_module("google_crc32c").value(content)
    if data[-_CHECKSUM_BYTES:] != checksum.to_bytes(_CHECKSUM_BYTES, "little"):
        raise ValueError("its checksum is wrong")
    return content


_COMPRESSORS = (
    Compressor("gzip", "", _decode_gzip, _encode_gzip, lambda _: {"level": _GZIP_LEVEL}),
    Compressor(
        "zstd",
        "numcodecs",
        _decode_zstd,
        _encode_zstd,
        lambda _: {"level": _ZSTD_LEVEL, "checksum": False},
    ),
    Compressor("blosc", "numcodecs", _decode_blosc, _encode_blosc, _blosc_configuration),
    Compressor("crc32c", "google_crc32c", _decode_crc32c),
)
COMPRESSORS = {compressor.name: compressor for compressor in _COMPRESSORS}
ZARR_COMPRESSIONS = tuple(name for name, known in COMPRESSORS.items() if known.encode is not None)
KNOWN_CODECS = ("bytes", "transpose", *COMPRESSORS)


def check_installed(compressor: Compressor) -> None:
    """Raise ZarrError if the package of a compressor is not installed."""
    if not compressor.package:
        return
    try:
        importlib.import_module(compressor.package)
    except ImportError:
        what = f"{compressor.name} needs the package {compressor.package}"
        raise ZarrError(f"{what}, which is not installed", hint=_EXTRA) from None


@dataclass(frozen=True)
class Pipeline:
    """How the chunks of an array are stored: transposed, in a byte order, compressed.

    `stored` is the dtype with its byte order. All codecs are in the order of encoding.
    """

    stored: np.dtype[Any]
    chunk: tuple[int, ...]
    transposes: tuple[tuple[int, ...], ...] = ()
    compressors: tuple[Compressor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes of a chunk before it is compressed."""
        count = self.stored.itemsize
        for extent in self.chunk:
            count *= extent
        return count

    @property
    def most_encoded(self) -> int:
        """Return the most bytes of a chunk after a codec, which may make it a little larger."""
        return 2 * self.nbytes + 2**16

    def decode(self, data: bytes) -> Array:
        """Return the elements of a chunk; raise ValueError if it is damaged."""
        for number, compressor in reversed(list(enumerate(self.compressors))):
            most = self.most_encoded if number > 0 else self.nbytes
            try:
                data = compressor.decode(data, most)
            except (ValueError, RuntimeError, MemoryError, EOFError, zlib.error) as error:
                reason = " ".join(str(error).split())
                raise ValueError(f"{compressor.name}: {reason:.200}") from None
        if len(data) != self.nbytes:
            raise ValueError(f"it has {len(data)} bytes instead of {self.nbytes}")
        extents = self.chunk
        for order in self.transposes:
            extents = tuple(extents[dimension] for dimension in order)
        array: Array = np.frombuffer(data, self.stored).reshape(extents)
        for order in reversed(self.transposes):
            array = array.transpose(np.argsort(order))
        if array.dtype.kind == "b":
            array = array.view(np.uint8) != 0  # any byte but 0 means True
        return array

    def encode(self, array: Array) -> bytes:
        """Return the bytes of a new chunk: in C order, compressed at most once."""
        if not self.compressors:
            return array.tobytes()
        (compressor,) = self.compressors
        assert compressor.encode is not None
        return compressor.encode(np.ascontiguousarray(array))
