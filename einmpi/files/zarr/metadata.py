"""zarr.json, the metadata of an array or a group in a zarr v3 store."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.errors import one_of
from einmpi.files.datasets import Array, DType, FileIdentity
from einmpi.graph.dtypes import numpy_dtypes

# ---- codecs --------------------------------------------------------------------------------------
#
# The codecs of zarr arrays: how the elements of a chunk become the bytes of its file.


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

    stored: DType
    chunk: tuple[int, ...]
    transposes: tuple[tuple[int, ...], ...] = ()
    compressors: tuple[Compressor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes of a chunk before it is compressed."""
        return prod(self.chunk) * self.stored.itemsize

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
                raise ValueError(f"{compressor.name}: {error!s:.200}") from None
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


Content: TypeAlias = dict[str, Any]

METADATA_FILE = "zarr.json"
# Links are not followed, and a pipe is not waited for: a store may come from anywhere.
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_METADATA_BYTES = 2**24
_MOST_EXTENT = 2**63
_ARRAY_KEYS = (
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "attributes",
    "dimension_names",
    "storage_transformers",
)


@dataclass(frozen=True)
class ChunkNames:
    """How the file of a chunk is named after its index: c/1/2, c.1.2, or 1.2 as in version 2."""

    prefix: str
    separator: str

    def name_of(self, index: Sequence[int]) -> str:
        """Return the name of a chunk's file, relative to the folder of the array."""
        numbers = [str(number) for number in index]
        if self.prefix:
            return self.separator.join([self.prefix, *numbers])
        return self.separator.join(numbers) or "0"


@dataclass(frozen=True)
class ArrayMetadata:
    """What zarr.json says about an array. `digest` is the SHA-256 of its text."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    names: ChunkNames
    fill_value: Array
    pipeline: Pipeline
    digest: str


# ---- the file -----------------------------------------------------------------------------------


def read_metadata(path: str) -> bytes:
    """Return the text of zarr.json; raise OSError, or ZarrError if it is no regular file."""
    descriptor = os.open(path, OPEN_FLAGS)
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_METADATA_BYTES:
            raise ZarrError(f"its {METADATA_FILE} is not a regular file of at most 16 MiB")
        return opened.read()


def parse_content(text: bytes) -> Content:
    """Return the content of a zarr.json; raise ZarrError if it is not one of version 3."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ZarrError(f"its {METADATA_FILE} is not JSON: {error!s:.200}") from None
    if not isinstance(content, dict):
        raise ZarrError(f"its {METADATA_FILE} is not a table")
    if content.get("zarr_format") != 3:
        version = content.get("zarr_format")
        raise ZarrError(f"its zarr_format is {version!r:.20}", "version 3 of the format")
    if content.get("node_type") not in ("array", "group"):
        raise ZarrError(f"its node_type is {content.get('node_type')!r:.20}")
    return content


@bounded_cache(64)
def array_metadata(path: str, identity: FileIdentity) -> ArrayMetadata:
    """Return what the zarr.json of an array says, as long as its identity is this one."""
    text = read_metadata(path)
    try:
        return _parse_array(parse_content(text), sha256(text).hexdigest())
    except ZarrError:
        raise
    except (KeyError, TypeError, IndexError, ValueError, OverflowError) as error:
        raise ZarrError(f"its {METADATA_FILE} is incomplete or wrong: {error!s:.100}") from None


# ---- an array -----------------------------------------------------------------------------------


def _parse_array(content: Content, digest: str) -> ArrayMetadata:
    for key, value in content.items():
        optional = isinstance(value, dict) and value.get("must_understand") is False
        if key not in _ARRAY_KEYS and not optional:
            raise ZarrError(f"it has {key!r:.40}, which is not supported", "an array without it")
    if content.get("storage_transformers"):
        raise ZarrError("it has storage transformers", "an array without them")
    shape = _integers(content["shape"], 0, "shape")
    dtype = _dtype_of(content["data_type"])
    grid, settings = _named(content["chunk_grid"])
    if grid != "regular":
        raise ZarrError(f"its chunk grid is {grid!r:.40}", "a regular chunk grid")
    chunks = _integers(settings["chunk_shape"], 0, "chunk_shape")
    if len(chunks) != len(shape):
        raise ZarrError(f"its chunks have {len(chunks)} dimensions instead of {len(shape)}")
    for extent, chunk in zip(shape, chunks, strict=True):
        if chunk == 0 and extent > 0:
            raise ZarrError("a chunk has no elements")
    chunks = tuple(max(1, chunk) for chunk in chunks)
    pipeline = _pipeline(content["codecs"], dtype, chunks)
    return ArrayMetadata(
        shape,
        chunks,
        _chunk_names(content["chunk_key_encoding"]),
        _fill_value(content["fill_value"], dtype),
        pipeline,
        digest,
    )


def _integers(given: Any, least: int, what: str) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise ZarrError(f"its {what} is not a list")
    for number in given:
        if type(number) is not int or not least <= number < _MOST_EXTENT:
            raise ZarrError(f"its {what} has {number!r:.40}")
    return tuple(given)


def _named(given: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the configuration of an extension, which may be a name alone."""
    if isinstance(given, str):
        return given, {}
    name = given["name"]
    configuration = given.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(configuration, dict):
        raise ZarrError(f"{name!r:.40} is not the name of an extension")
    return name, configuration


def _dtype_of(given: Any) -> DType:
    name, _ = _named(given)
    if name not in numpy_dtypes():
        raise ZarrError(f"it is {name:.40}, which is not supported", one_of(numpy_dtypes()))
    return np.dtype(name)


def _chunk_names(given: Any) -> ChunkNames:
    name, settings = _named(given)
    prefixes = {"default": "c", "v2": ""}
    if name not in prefixes:
        raise ZarrError(f"its chunk key encoding is {name!r:.40}", one_of(prefixes))
    separator = settings.get("separator", "/" if name == "default" else ".")
    if separator not in ("/", "."):
        raise ZarrError(f"its separator is {separator!r:.40}", "/ or .")
    return ChunkNames(prefixes[name], separator)


def _pipeline(codecs: Any, dtype: DType, chunks: tuple[int, ...]) -> Pipeline:
    """Return the codecs as they are applied: transposes, the byte order, then compressors."""
    transposes: list[tuple[int, ...]] = []
    compressors: list[Compressor] = []
    stored: DType | None = None
    for given in codecs:
        name, settings = _named(given)
        if name == "sharding_indexed":
            hint = "store it without shards"
            raise ZarrError("it is stored in shards, which is not supported", hint=hint)
        if name not in KNOWN_CODECS:
            raise ZarrError(f"its codec {name:.40} is not supported", one_of(KNOWN_CODECS))
        is_compressor = name in COMPRESSORS
        if is_compressor == (stored is None):
            raise ZarrError(f"its codec {name} is in the wrong place")
        if name == "transpose":
            transposes.append(_order(settings["order"], len(chunks)))
        elif name == "bytes":
            stored = _with_byte_order(dtype, settings.get("endian"))
        else:
            check_installed(COMPRESSORS[name])
            compressors.append(COMPRESSORS[name])
    if stored is None:
        raise ZarrError("it has no codec bytes")
    return Pipeline(stored, chunks, tuple(transposes), tuple(compressors))


def _order(given: Any, ndim: int) -> tuple[int, ...]:
    order = _integers(given, 0, "order")
    if sorted(order) != list(range(ndim)):
        raise ZarrError(f"its order {list(order)} is not one of {ndim} dimensions")
    return order


def _with_byte_order(dtype: DType, endian: Any) -> DType:
    if endian is None and dtype.itemsize == 1:
        return dtype
    if endian not in ("little", "big"):
        raise ZarrError(f"its endian is {endian!r:.20}", "little or big")
    return dtype.newbyteorder(endian)


def _fill_value(given: Any, dtype: DType) -> Array:
    """Return the value of elements in chunks that are missing."""
    value: bool | int | complex
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        if not isinstance(given, list) or len(given) != 2:
            raise _wrong_fill_value(given, dtype)
        value = complex(_real_number(given[0], part), _real_number(given[1], part))
    elif dtype.kind in "biu":
        wanted = bool if dtype.kind == "b" else int
        if type(given) is not wanted:
            raise _wrong_fill_value(given, dtype)
        value = given
    else:
        value = _real_number(given, dtype)
    return np.array(value, dtype)


def _real_number(given: Any, dtype: DType) -> float:
    """Return a number, nan or an infinity; text in hexadecimal has the bits of an element."""
    words = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
    if isinstance(given, str) and given in words:
        return float(words[given])
    if isinstance(given, str) and given.startswith("0x"):
        bits = int(given, 16).to_bytes(dtype.itemsize, "little")
        return float(np.frombuffer(bits, dtype.newbyteorder("<"))[0])
    if type(given) in (int, float):
        return float(given)
    raise _wrong_fill_value(given, dtype)


def _wrong_fill_value(given: Any, dtype: DType) -> ZarrError:
    return ZarrError(f"its fill_value {given!r:.40} is not {dtype.name}")
