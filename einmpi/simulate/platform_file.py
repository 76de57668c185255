"""A platform file of the user: checked, and the hosts that it has. SimGrid may read it then."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn
from xml.parsers import expat

from einmpi.errors import InputError

MOST_BYTES = 2**26
MOST_HOSTS = 2**20
# Other settings would let a file write traces, load plugins or run programs.
_SETTINGS = re.compile(
    r"(network/[a-zA-Z0-9/-]+|cpu/[a-zA-Z0-9/-]+|surf/precision|smpi/(os|or|ois|bw-factor|lat-factor))"
)
PLATFORM_EXPECTED = "a platform file of SimGrid, version 4 or 4.1"


@dataclass(frozen=True)
class Platform:
    """The text of a platform, its hosts in order, and the cores of each."""

    text: str
    hosts: tuple[str, ...]
    cores: int


def read_platform(path: str) -> Platform:
    """Read a platform file. Raise InputError if it is not one, or may do more than describe."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(path, error.strerror or str(error), PLATFORM_EXPECTED) from None
    if len(data) > MOST_BYTES:
        raise InputError(path, "the file is larger than 64 MiB", PLATFORM_EXPECTED)
    text = data.decode(errors="replace")  # as SimGrid gets it: just this is checked
    reader = _Reader(path)
    reader.read(text)
    cores = set(reader.cores)
    if not reader.hosts:
        raise InputError(path, "there is no host in it", "elements <host> or <cluster>")
    if len(cores) > 1:
        raise InputError(path, "hosts have different numbers of cores", "the same number")
    return Platform(text, tuple(reader.hosts), cores.pop())


class _Reader:
    """Goes through the elements of a platform file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.depth = 0
        self.in_config = False
        self.hosts: list[str] = []
        self.cores: list[int] = []
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.EntityDeclHandler = self._refuse_entity

    def read(self, text: str) -> None:
        try:
            self.parser.Parse(text, True)
        except InputError:
            raise
        except (expat.ExpatError, ValueError, LookupError) as error:
            raise InputError(self.path, f"this is not XML: {error}", PLATFORM_EXPECTED) from None

    def _refuse(self, problem: str, expected: str = PLATFORM_EXPECTED) -> NoReturn:
        line = self.parser.CurrentLineNumber
        raise InputError(f"{self.path}:{line}", problem, expected)

    def _refuse_entity(self, name: str, *_: object) -> None:
        self._refuse(f"the entity {name!r:.60}", "no entities")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth == 1:
            version = attributes.get("version", "")
            if name != "platform" or version not in ("4", "4.1"):
                self._refuse(f"<{name:.60}> of version {version!r:.20}")
        elif name == "include":
            self._refuse("<include>", "a file that needs no others")
        elif name == "prop":
            self._check_setting(attributes.get("id", ""))
        elif name == "config":
            self.in_config = True
        elif name == "host":
            self._add(iter([attributes.get("id", "")]), attributes)
        elif name == "cluster":
            self._add(self._cluster_hosts(attributes), attributes)

    def _end(self, name: str) -> None:
        self.depth -= 1
        if name == "config":
            self.in_config = False

    def _check_setting(self, key: str) -> None:
        if self.in_config and not _SETTINGS.fullmatch(key):
            self._refuse(f"the setting {key!r:.60}", "settings of the network and of CPUs only")

    def _add(self, names: Iterator[str], attributes: dict[str, str]) -> None:
        cores = attributes.get("core", "1")
        if not re.fullmatch("[1-9][0-9]{0,5}", cores):
            self._refuse(f"core={cores!r:.60}", "a number of cores")
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", name):
                self._refuse(f"the host {name!r:.60}", "letters, digits and . _ - in its name")
            if len(self.hosts) == MOST_HOSTS:
                self._refuse(f"more than {MOST_HOSTS} hosts", "fewer")
            self.hosts.append(name)
        self.cores.append(int(cores))

    def _cluster_hosts(self, attributes: dict[str, str]) -> Iterator[str]:
        radical = attributes.get("radical", "")
        prefix = attributes.get("prefix", "")
        suffix = attributes.get("suffix", "")
        for part in radical.split(","):
            found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
            if found is None:
                self._refuse(f"radical={radical!r:.60}", "numbers such as 0-127")
            first = int(found[1])
            last = first if found[2] is None else int(found[2])
            for number in range(first, last + 1):
                yield f"{prefix}{number}{suffix}"
