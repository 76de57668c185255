"""One case of the soak: a program, and how it is run. It follows from a seed and a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import numpy as np

from .generate import BFLOAT16, SPECIAL_THEMES, THEMES, VALUES, Draw, ProgramMaker, make_values
from .gradients_programs import THEMES as GRADIENT_THEMES
from .gradients_programs import make_program
from .looping import make_loop
from .tree import Program

HAS_ZARR = find_spec("zarr") is not None  # without it, inputs in stores are in .npy files
RANKS = {
    1: 10.0,
    2: 18.0,
    3: 18.0,
    4: 16.0,
    5: 9.0,
    6: 9.0,
    7: 4.0,
    8: 5.0,
    9: 1.0,
    10: 1.0,
    11: 1.0,
    12: 1.5,
    13: 0.5,
    14: 0.5,
    15: 0.5,
    16: 1.5,
}
GRADIENT_RANKS = {1: 35.0, 2: 25.0, 3: 20.0, 4: 20.0}
STRATEGIES = {"eindecomp": 60.0, "eindecomp-paper": 14.0, "sqrt": 14.0, "replicate": 12.0}
LAYOUTS = {
    "plain": 60.0,
    "fortran": 8.0,
    "strided": 8.0,
    "reversed": 6.0,
    "unaligned": 5.0,
    "read-only": 4.0,
    "repeated": 3.0,
    "other byte order": 4.0,
    "list": 2.0,
}


@dataclass(frozen=True)
class Case:
    """A program and the way to run it."""

    seed: int
    number: int
    theme: str
    program: Program
    ranks: int
    strategy: str = "eindecomp"
    memory: float | None = None  # between the least possible (0) and what a plan wants (1)
    pins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    distributed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    files: bool = False  # whether the inputs are in files, with a job file
    stores: tuple[str, ...] = ()  # those of these inputs that are in zarr stores
    stop_at: float | None = None  # where a run is interrupted and resumed, from 0 to 1
    compiled: bool = False  # whether every kernel is compiled, however small
    verify: bool = False  # whether the schedules of all ranks are checked against each other
    strict: bool = False
    kind: str = "programs"  # a key of the worker's KINDS
    shared: bool = False  # whether ranks share memory for slots of any size

    @property
    def name(self) -> str:
        return f"seed {self.seed}, case {self.number}"

    @property
    def themes(self) -> list[str]:
        return [self.theme]

    @property
    def dtypes(self) -> list[str]:
        return sorted({item.values.dtype.name for item in self.program.inputs})


# Programs whose kernels are compiled are drawn from this many, with any values: compiling takes
# a hundred times as long as running.
COMPILED_PROGRAMS = 16
COMPILED_SHARE = 0.03
LOOP_SHARE = 0.02
BFLOAT16_SHARE = 0.02
SPECIAL_SHARE = 0.04
UNEVEN_SHARE = 0.05  # with a limit at which some ranks spill, and others need not
ZARR_SHARE = 0.3  # of the inputs in files


def make_case(seed: int, number: int, ranks: int | None = None) -> Case:
    """Return a case. It depends on nothing but the seed, the number and a given number of ranks."""
    draw = Draw(seed, number)
    compiled = draw.chance(COMPILED_SHARE)
    theme = draw.one(THEMES)
    strict = draw.chance(0.2)
    if compiled:
        # One of a few programs: other cases of it need no other kernels.
        shape = Draw("compiled", draw.below(COMPILED_PROGRAMS))
        theme = shape.one(THEMES)
        program = ProgramMaker(shape, theme, strict).program()
        program = with_other_values(program, draw)
    elif (special := Draw("special", seed, number)).chance(SPECIAL_SHARE):
        theme = special.one(SPECIAL_THEMES)
        program = ProgramMaker(special, theme, strict).special_program()
    else:
        # These choices follow from other numbers, so that most cases stay what they were.
        with_bfloat16 = Draw("bfloat16", seed, number).chance(BFLOAT16_SHARE)
        maker = ProgramMaker(draw, theme, strict, with_bfloat16)
        program = maker.program()
        if not with_bfloat16 and Draw("loop", seed, number).chance(LOOP_SHARE):
            maker.draw = Draw("looped", seed, number)
            program = make_loop(maker, program) or program
    drawn = draw.weighted(RANKS)
    case = Case(
        seed,
        number,
        theme,
        program,
        ranks or (draw.between(1, 3) if compiled else drawn),
        compiled=compiled,
        strategy=draw.weighted(STRATEGIES),
        verify=draw.chance(0.1),
        strict=strict,
    )
    return with_options(case, draw)


def make_gradient_case(seed: int, number: int, ranks: int | None = None) -> Case:
    """Return a case with gradients, on few ranks: the program is what matters."""
    draw = Draw("gradients", seed, number)
    theme = draw.one(GRADIENT_THEMES)
    program = make_program(draw, theme)
    drawn = draw.weighted(GRADIENT_RANKS)
    case = Case(
        seed,
        number,
        theme,
        program,
        ranks or drawn,
        strategy=draw.weighted(STRATEGIES),
        verify=draw.chance(0.1),
        strict=draw.chance(0.1),
        kind="gradients",
    )
    return with_options(case, draw)


def with_other_values(program: Program, draw: Draw) -> Program:
    """Return the program with new values of its inputs."""
    kind = draw.weighted(VALUES)
    inputs = []
    for item in program.inputs:
        if item.indexes is None:
            values = make_values(draw, kind, item.values.dtype.name, item.values.shape)
            item = replace(item, values=values)
        inputs.append(item)
    return replace(program, inputs=tuple(inputs))


def with_options(case: Case, draw: Draw) -> Case:
    """Return the case with the other choices of how to run it."""
    files = draw.chance(0.08) or case.program.loop is not None
    if any(item.values.dtype == BFLOAT16 for item in case.program.inputs):
        files = False  # .npy and zarr have no such dtype
    memory = None
    if draw.chance(0.5 if files else 0.04):
        memory = draw.share()
    uneven = Draw("uneven", case.seed, case.number)
    is_uneven = memory is None and uneven.chance(UNEVEN_SHARE)
    if is_uneven:
        memory = 0.5 + uneven.share() / 2
    stop_at = draw.share() if files and draw.chance(0.5) else None
    pins = {}
    distributed = {}
    layouts = {}
    for item in case.program.inputs:
        choice = draw.share()
        if choice < 0.06:
            pins[item.name] = cut(draw, case.ranks, item.values.shape)
        elif choice < 0.18 and not files:
            distributed[item.name] = cut(draw, case.ranks, item.values.shape)
        layouts[item.name] = draw.weighted(LAYOUTS)
    stores = []
    if files and HAS_ZARR:
        draw_stores = Draw("zarr", case.seed, case.number)
        stores = [item.name for item in case.program.inputs if draw_stores.chance(ZARR_SHARE)]
    for statement in case.program.statements:
        if statement.name in case.program.output_names() and draw.chance(0.08):
            shape = tuple(case.program.sizes[label.size] for label in statement.labels)
            pins[statement.name] = cut(draw, case.ranks, shape)
    return replace(
        case,
        files=files,
        stores=tuple(stores),
        memory=memory,
        shared=is_uneven or (memory is not None and uneven.chance(0.5)),
        stop_at=stop_at,
        pins=pins,
        distributed=distributed,
        layouts=layouts,
    )


def cut(draw: Draw, ranks: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of parts of each dimension: factors of the ranks, dealt out at random."""
    parts = [1] * len(shape)
    for prime in _primes(ranks):
        suitable = []
        for place, extent in enumerate(shape):
            if parts[place] * prime <= extent:
                suitable.append(place)
        if suitable and draw.chance(0.8):
            parts[draw.one(suitable)] *= prime
    return tuple(parts)


def _primes(number: int) -> list[int]:
    found = []
    prime = 2
    while number > 1:
        if number % prime:
            prime += 1
        else:
            found.append(prime)
            number //= prime
    return found


def laid_out(array: np.ndarray, layout: str) -> object:
    """Return the same values in an unusual layout."""
    if layout == "fortran":
        return array.copy(order="F")
    if layout == "strided":
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        return wide[..., 0]
    if layout == "reversed":
        places = tuple(slice(None, None, -1) for _ in array.shape)
        return array[places].copy()[places]
    if layout == "unaligned":
        memory = np.zeros(array.nbytes + 1, np.uint8)
        view = memory[1:].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view
    if layout == "read-only":
        copy = array.copy()
        copy.flags.writeable = False
        return copy
    if layout == "repeated" and array.ndim and math.prod(array.shape):
        if (array == array[:1]).all():
            return np.broadcast_to(array[:1], array.shape)
        return array
    if layout == "other byte order" and array.dtype.itemsize > 1:
        return array.astype(array.dtype.newbyteorder())
    if layout == "list" and array.ndim and math.prod(array.shape):
        listed = array.tolist()
        if np.asarray(listed).dtype == array.dtype:
            return listed
    return array
