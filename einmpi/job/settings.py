"""The settings of a job, one entry each: keys of job files, flags, keywords and tables follow.

An entry is a field of `Settings` with what it may be, where it is set and what it means.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypeVar

from einmpi.arguments import known_name, named_values, path_name
from einmpi.errors import InputError, nearest_of
from einmpi.graph.eingraph import EinGraph
from einmpi.kernels.cpu.blas_library.records import AUTO_BLAS, BLAS_NAMES
from einmpi.language.statements import HALF_MODES
from einmpi.language.toml_document import Entry, kind_of
from einmpi.planner.chains import CHAIN_BLOCK_BYTES, OPERATIONS_OF_A_BYTE
from einmpi.planner.moving.overlap import MODES
from einmpi.planner.plan import AUTO, NONE
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from einmpi.process.environment import BLAS_VARIABLE, SCRATCH_VARIABLE
from einmpi.units import check_bytes, parse_bytes

if TYPE_CHECKING:
    from einmpi.planner.machine import Machine


# ---- backends, one record each -------------------------------------------------------------------


@dataclass(frozen=True)
class BackendRecord:
    """A backend.

    Parameters
    ----------
    name : str
        The value of ``backend`` in a job file and of ``--backend``.
    documentation : str
        One line for the table of backends.
    workplace : str
        ``"package.module:function"``: a function of a Job and a Comm that returns a
        ``einmpi.compiled.running.Workplace``. As with an entry point of a package, the module is
        imported when a run needs it: reading and planning a job load no library of a GPU.
    chain_bytes : int
        The memory that the blocks of a fused chain may take: what fits into a CPU's cache, or
        what gives a GPU enough to do at a time.
    operations_of_a_byte : int
        How many operations of a matrix product take as long as to read or write a byte of memory.
    is_on_host : bool
        Whether arrays are in the memory of the host, which the ranks of a node can share.
    """

    name: str
    documentation: str
    workplace: str
    chain_bytes: int = CHAIN_BLOCK_BYTES
    operations_of_a_byte: int = OPERATIONS_OF_A_BYTE
    is_on_host: bool = False


_RECORDS = (
    BackendRecord(
        name="numpy",
        documentation="CPUs: NumPy, BLAS and compiled loops",
        workplace="einmpi.compiled.running:on_host",
        is_on_host=True,
    ),
    BackendRecord(
        name="cupy",
        documentation="[GPUs](gpu.md) of NVIDIA: CuPy, cuBLAS and compiled kernels",
        workplace="einmpi.compiled.running:on_gpu",
        chain_bytes=2**28,
        operations_of_a_byte=64,
    ),
)
BACKENDS = {record.name: record for record in _RECORDS}
DEFAULT_BACKEND = _RECORDS[0].name


# ---- settings ------------------------------------------------------------------------------------


SHARED_MODES = ("auto", "off")  # of memory that the ranks of a node share; the first is the default
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """A kind of values.

    Attributes
    ----------
    read : function
        Returns the value at a key of a job file, None if there is none; refuses a wrong one.
    check : function
        Returns a value that a flag or a keyword gives, given where that is; refuses a wrong one.
    in_files, in_python : str
        What values are called in the documentation of job files, and their type in Python.
    metavar : str
        What the value of a flag is called; empty if a setting says that itself.
    """

    read: Callable[[Setting, Entry], Any]
    check: Callable[[Setting, str, Any], Any]
    in_files: str
    in_python: str
    metavar: str = ""


@dataclass(frozen=True)
class Setting:
    """What is known of a setting.

    Attributes
    ----------
    name : str
        The key in a job file, and the keyword in Python.
    default : object
        The value where nothing is said.
    kind : Kind
        What values are.
    documentation : str
        Its meaning, in Markdown.
    table : str
        The table of the job file that has the key; empty if it is a keyword only.
    choices : function
        Returns the values that are possible, if they are names.
    noun : str
        What such a name is called in messages and in --help, if not as the setting.
    help, group : str
        What --help says of the flag, and in which group, which also says which commands have it.
        Without a help there is no flag.
    default_text : str
        The default in the documentation, if it is not a value.
    """

    name: str
    default: Any
    kind: Kind
    documentation: str
    table: str = ""
    choices: Callable[[], Iterable[str]] = tuple
    noun: str = ""
    help: str = ""
    group: str = ""
    default_text: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def read(self, document: Entry) -> Any:
        """Return the value that a job file gives, by default that of jobs without it."""
        found = self.kind.read(self, document[self.table][self.name])
        return self.default if found is None else found

    def check(self, where: str, given: Any) -> Any:
        """Return a value that a flag or a keyword gives; InputError if it is a wrong one."""
        return self.kind.check(self, where, given)


# ---- kinds ---------------------------------------------------------------------------------------


def truth_value(name: str, given: bool) -> bool:
    """Return a truth value that a caller gave; refuse anything else."""
    if not isinstance(given, bool):
        raise InputError(name, f"{given!r} is not a truth value", "True or False")
    return given


def _read_bytes(setting: Setting, entry: Entry) -> int | None:
    given = entry.value
    if given is None:
        return None
    if isinstance(given, str):
        return parse_bytes(given, entry.place)
    if type(given) is int:
        return check_bytes(given, entry.place)
    what = f"{setting.name} is {kind_of(given)}"
    raise entry.wrong(what, 'a string such as "4 GiB" or an integer')


def _read_file(setting: Setting, entry: Entry) -> str | None:
    file = entry.get(str)
    return None if file is None else entry.relative_path(file)


def _check_file(setting: Setting, where: str, given: Any) -> Any:
    from einmpi.planner.machine import Machine  # not imported for jobs without one

    return given if isinstance(given, Machine) else path_name(where, given)


def _read_folder(setting: Setting, entry: Entry) -> str | None:
    folder = entry.get(str)
    if not folder:
        return folder
    return os.path.join(os.path.dirname(entry.document.name), os.path.expanduser(folder))


def _check_parts(setting: Setting, where: str, given: Any) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, parts in named_values(where, given).items():
        found[name] = tuple(parts) if isinstance(parts, Iterable) else (parts,)
    return found


_PATH = "str | os.PathLike[str]"
CHOICE = Kind(
    lambda setting, entry: entry.choice(setting.choices(), setting.default),
    lambda setting, where, given: known_name(
        where, given, setting.choices(), setting.noun or setting.name
    ),
    "string",
    "str",
)
SWITCH = Kind(
    lambda _, entry: entry.get(bool),
    lambda _, where, given: truth_value(where, given),
    "true or false",
    "bool",
)
_BYTES = Kind(
    _read_bytes,
    lambda _, where, given: parse_bytes(str(given), where),
    "string or whole number",
    "int | str",
    "BYTES",
)
_FILE = Kind(_read_file, _check_file, "string", _PATH, "FILE.toml")
_FOLDER = Kind(
    _read_folder,
    lambda _, where, given: os.path.expanduser(path_name(where, given)),
    "string",
    _PATH,
    "DIR",
)
_NAMES = Kind(
    lambda _, entry: entry.value,
    lambda _, where, given: given,  # `checked_recompute` checks it against the program
    "string or list of strings",
    "str | Sequence[str]",
)
_PARTS = Kind(
    lambda _, entry: None,  # job files have it in the entries of inputs and outputs
    _check_parts,
    "",
    "Mapping[str, Sequence[int]]",
)


# ---- the entries ---------------------------------------------------------------------------------


def setting(default: Any, kind: Kind, documentation: str, **more: Any) -> Any:
    """Return the field of a setting; `more` are further attributes of its `Setting`."""
    return field(default=default, metadata={"kind": kind, "documentation": documentation, **more})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a job is planned and run. Each field is a setting."""

    strategy: str = setting(
        DEFAULT_STRATEGY,
        CHOICE,
        "how the cuts are chosen: one of the [strategies](job_file.md#strategies)",
        table="plan",
        choices=STRATEGIES.keys,
        help="how to partition; the job's own by default",
        group="plan",
    )
    memory: int | None = setting(
        None,
        _BYTES,
        'the limit of a rank in bytes: `"4 GiB"`, `"512MB"`, `4096`; units B, kB, KB, MB, GB, TB, '
        "KiB, MiB, GiB, TiB",
        table="plan",
        help="limit of a rank, such as 4GiB",
        group="plan",
        default_text="no limit",
    )
    machine: str | Machine | None = setting(  # noqa: RUF009  # a field, as the others
        None,
        _FILE,
        "a file that `einmpi calibrate` has written; the plan is made for the times in it, and "
        "says how many [seconds](planner.md#seconds) it predicts",
        table="plan",
        help="plan with the times that einmpi calibrate measured",
        group="plan",
        default_text="none",
    )
    recompute: str | tuple[str, ...] = setting(
        AUTO,
        _NAMES,
        'with `"auto"`, tensors are '
        "[dropped and computed again](planner.md#tensors-that-are-computed-again) where `memory` "
        'asks for it and it costs least; `"none"`: never; a list of names: those in any case',
        table="plan",
    )
    pin: Mapping[str, tuple[int, ...]] | None = setting(
        None,
        _PARTS,
        "for inputs and outputs, into how many parts each dimension has to be cut, as `parts` in "
        "their entries",
    )
    backend: str = setting(
        DEFAULT_BACKEND,
        CHOICE,
        "what computes: one of the [backends](job_file.md#run)",
        table="run",
        choices=BACKENDS.keys,
        help="numpy, or cupy for GPUs; the job's own by default",
        group="ranks",
    )
    fast_math: bool = setting(
        False,
        SWITCH,
        "allow faster and less exact [arithmetic](job_file.md#run)",
        table="run",
        help="faster arithmetic with larger rounding errors",
        group="run",
    )
    strict: bool = setting(
        False,
        SWITCH,
        "make only rewrites that are [exact for all values](job_file.md#strict), inf and nan "
        "included",
        table="run",
        help="only rewrites that are exact for inf and nan too",
        group="job",
    )
    reproducible: bool = setting(
        False,
        SWITCH,
        "give results the [same bits](reproducibility.md) on any number of ranks, threads and "
        "nodes, and under any memory limit",
        table="run",
        help="the same bits on any number of ranks",
        group="job",
    )
    half: str = setting(
        HALF_MODES[0],
        CHOICE,
        "where [float16 and bfloat16](language.md#half-precision) are rounded: `float32` computes "
        "in float32 and rounds once a statement, `steps` rounds every operation, as numpy does",
        table="run",
        choices=lambda: HALF_MODES,
        noun="mode",
        help="how half precision is computed: float32 or steps",
        group="job",
    )
    scratch: str | None = setting(
        None,
        _FOLDER,
        "the folder for [what does not fit into memory](howto_memory.md#more-than-fits), on a "
        f"local disk; the environment variable `{SCRATCH_VARIABLE}` takes precedence",
        table="run",
        default_text="where temporary files go",
    )
    blas: str = setting(
        AUTO_BLAS,
        CHOICE,
        "which [BLAS](job_file.md#blas) multiplies matrices on CPUs; the environment variable "
        f"`{BLAS_VARIABLE}` takes precedence",
        table="run",
        choices=lambda: BLAS_NAMES,
    )
    overlap: str = setting(
        MODES[0],
        CHOICE,
        "`auto` computes [while tensors move between nodes](architecture.md#how-tensors-move), "
        "which takes more memory, where a limit leaves room for it; `off` does not. Results have "
        "the same bits wherever BLAS computes a column of a product in the same way for any number "
        "of columns, as OpenBLAS does",
        table="run",
        choices=lambda: MODES,
        noun="mode",
        help="compute while tensors move between nodes: auto or off",
        group="job",
    )
    shared: str = setting(
        SHARED_MODES[0],
        CHOICE,
        "whether the ranks of a node "
        "[share memory](architecture.md#memory-that-ranks-share): `auto` where they can, `off` for "
        "messages only. Results, plans and `bytes_moved` are the same",
        table="run",
        choices=lambda: SHARED_MODES,
        noun="mode",
        help="memory that the ranks of a node share: auto or off",
        group="run",
    )


SETTINGS = {
    each.name: Setting(each.name, each.default, **each.metadata) for each in fields(Settings)
}


# ---- reading and checking ------------------------------------------------------------------------


def settings_in(table: str) -> tuple[str, ...]:
    """Return the keys of a table of job files that are settings."""
    return tuple(name for name, setting in SETTINGS.items() if setting.table == table)


def read_settings(document: Entry) -> dict[str, Any]:
    """Return the settings of a job file; `recompute` as it is written, not yet checked."""
    return {name: each.read(document) for name, each in SETTINGS.items() if each.table}


def compared_settings(settings: Settings) -> dict[str, Any]:
    """Return what all ranks have to set alike. Files and folders may have other paths on each."""
    found = {}
    for name, each in SETTINGS.items():
        if each.kind not in (_FILE, _FOLDER):
            found[name] = getattr(settings, name)
    return found


def split_settings(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings among keywords, without those that are None, and the other keywords."""
    settings = {}
    others = {}
    for name, given in keywords.items():
        if name not in SETTINGS:
            others[name] = given
        elif given is not None:
            settings[name] = given
    return settings, others


def only_settings(function: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords that all have to be settings; TypeError, as from Python, if one is not."""
    settings, others = split_settings(keywords)
    for name in others:
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return settings


def checked_recompute(where: str, given: object, written: EinGraph) -> str | tuple[str, ...]:
    """Return what `recompute` says; refuse what is not an intermediate result of the program."""
    if isinstance(given, str) and given in (AUTO, NONE):
        return given
    if isinstance(given, str) or not isinstance(given, Iterable):
        expected = f'"{AUTO}", "{NONE}", or a list of names such as ["H"]'
        raise InputError(where, f"recompute is {given!r}", expected)
    names = tuple(given)
    known = [vertex.name for vertex in written.computed if not written.is_output(vertex.name)]
    for name in names:
        if not isinstance(name, str):
            raise InputError(where, f"recompute has {name!r}", "names of tensors")
        if name not in known:
            what = f"there is no tensor {name}"
            if written.is_output(name):
                what = f"{name} is a result, which stays in memory"
            elif name in written.by_name:
                what = f"{name} is an input"
            expected = nearest_of(known, name) if known else "a program with intermediate results"
            raise InputError(where, what, expected)
    return names


# ---- documentation -------------------------------------------------------------------------------


def takes_settings(function: T) -> T:
    """Show the settings that a function takes as keywords, in its signature and its docstring."""
    found = signature(function)  # type: ignore[arg-type]  # T is a function
    parameters = []
    last = []
    for each in found.parameters.values():
        if each.kind is not Parameter.VAR_KEYWORD:
            parameters.append(each)
        elif each.name != "settings":  # the settings are among other keywords
            last.append(each)
    for setting in SETTINGS.values():
        kind = f"{setting.kind.in_python} | None"
        parameters.append(
            Parameter(setting.name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        )
    function.__signature__ = found.replace(parameters=[*parameters, *last])  # type: ignore[attr-defined]
    return with_settings_listed(function)


def with_settings_listed(thing: T) -> T:
    """Write the settings into a docstring: a line `{settings}` becomes an entry for each of them.

    A line `{settings} : TEXT` becomes a line with their names.
    """
    text = thing.__doc__
    if text is not None:  # python -OO has no docstrings
        text = text.replace("{settings} :", f"{', '.join(SETTINGS)} :")
        ending = "." if isinstance(thing, type) else "; by default as the job says."
        thing.__doc__ = text.replace("    {settings}\n", _entries(ending))
    return thing


def _entries(ending: str) -> str:
    found = []
    for setting in SETTINGS.values():
        meaning = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", setting.documentation)
        text = f"{meaning[0].upper()}{meaning[1:]}{ending}"
        found.append(f"    {setting.name} : {setting.kind.in_python}, optional\n")
        found.append(re.sub(r"(.{1,90})(?: +|$)", r"        \1\n", text))
    return "".join(found)
