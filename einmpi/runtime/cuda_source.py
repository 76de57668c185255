"""The text of a CUDA kernel: one kernel a vertex. It holds no word of a user's, only what a checked tree says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from einmpi.graph.scalar import Scalar
from einmpi.runtime.cuda_plan import EDGE, THREADS, Nest, Term
from einmpi.runtime.cuda_text import COMPUTED, STORED, Fold, Steps, stored, width_of
from einmpi.runtime.cuda_words import COMMON, DEVICE

BLOCK = 128  # values of a sum before what they give is added to the total


def source(nest: Nest) -> str:
    """The whole text; its function is called `kernel`."""
    return DEVICE + COMMON + body(nest)


def body(nest: Nest) -> str:
    text = _Text()
    WAYS[nest.way](nest, text)
    names = list(nest.parameters())
    typed = [(f"const {_stored(nest, m)}* __restrict__ p{m}" if m < len(nest.reads) else f"{_stored(nest, m)}* p{m}")
             if letter == "p" else "Long* told" if letter == "t" else f"Long {letter}{m}_{y}_"
             for letter, m, y in names]  # fmt: skip
    place = "Long" if nest.wide else "int"
    wide = "mzbre"  # these are no places
    given = [f"const {'Long' if letter in wide else 'I'} {letter}{m}_{y} = ({'Long' if letter in wide else 'I'})"
             f"{letter}{m}_{y}_;" for letter, m, y in names if letter not in "pt"]  # fmt: skip
    head = [f"typedef {place} I;", *text.outside]
    start = f'extern "C" __global__ void __launch_bounds__({THREADS}) kernel({", ".join(typed)}) {{'
    return "\n".join([*head, start, *("  " + line for line in (*given, *text.lines)), "}", ""])


def _stored(nest: Nest, m: int) -> str:
    return STORED[(*nest.reads, nest.out)[m].dtype]


@dataclass
class _Text:
    lines: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    depth: int = 0

    def add(self, *lines: str) -> None:
        self.lines += ["  " * self.depth + line for line in lines]

    def open(self, line: str) -> None:
        self.add(line + " {")
        self.depth += 1

    def close(self, count: int = 1) -> None:
        for _ in range(count):
            self.depth -= 1
            self.add("}")


def _steps(nest: Nest, prefix: str = "v", given: Callable[[int], str | None] = lambda m: None) -> Steps:
    """Statements at the coordinates i0, i1, …; `given` has the text of what is no longer read from memory."""

    def read(m: int) -> str:
        known = given(m)
        if known is not None:
            return known
        if m in nest.counted:
            return f"(b{m}_0 + {''.join(f'i{k}' for k in nest.reads[m].loops) or '0'})"
        return f"load(p{m}[{_place(nest, m, steps)}])"

    steps = Steps([access.dtype for access in nest.reads], read, prefix)
    return steps


def _place(nest: Nest, m: int, steps: Steps | None = None) -> str:
    """Where the element of an array lies. Nothing is read out of bounds, whatever the index of a gather."""
    access = (*nest.reads, nest.out)[m]
    terms = [f"i{k} * s{m}_{k}" for k in access.loops]
    for g, gather in enumerate(access.gathers):
        assert steps is not None
        index = steps.value(gather, "int64")
        fits = steps.keep(f"0 <= {index} && {index} < e{m}_{g}", "bool")
        number = 1 + 2 * nest.gathers.index((m, g))
        steps.lines.append(f"if (!{fits}) told[0] = 1;")
        steps.lines.append(f"if (r0_0) {{ atomicMin(told + {number}, {index}); atomicMax(told + {number + 1}, {index}); }}")
        terms.append(f"(I)({fits} ? {index} : 0) * j{m}_{g}")
    return " + ".join(terms) or "0"


def _unravel(text: _Text, flat: str, loops: Sequence[int], prefix: str = "i") -> None:
    """The coordinates of a flat index, whose last loop is the fastest. `flat` is a name that may be changed."""
    for k in reversed(loops[1:]):
        text.add(f"const I q{k} = quotient({flat}, m{k}_0, z{k}_0);",
                 f"const I {prefix}{k} = {flat} - q{k} * n{k}_0;", f"{flat} = q{k};")  # fmt: skip
    if loops:
        text.add(f"const I {prefix}{loops[0]} = {flat};")


def _product(loops: Sequence[int]) -> str:
    return " * ".join(f"n{k}_0" for k in loops) or "(I)1"


# ---- no ⊕ -----------------------------------------------------------------------------------------------------------


def _map(nest: Nest, text: _Text) -> None:
    """Neighbouring threads compute neighbours; a thread that has none left does the last one again, and keeps it."""
    loops = range(nest.outputs)
    text.add(f"const I total = {_product(loops)};",
             f"const I first = (I)blockIdx.x * {THREADS * nest.each} + threadIdx.x;", "#pragma unroll")  # fmt: skip
    text.open(f"for (int u = 0; u < {nest.each}; ++u)")
    text.add(f"const I own = first + u * {THREADS};", "I flat = least(own, total - 1);")
    _unravel(text, "flat", loops)
    _store_map(nest, text, _steps(nest), "own < total")
    text.close()


def _store_map(nest: Nest, text: _Text, steps: Steps, condition: str) -> None:
    value = steps.value(nest.function, nest.out.dtype)
    text.add(*steps.lines)
    text.add(f"if ({condition}) p{len(nest.reads)}[{_place(nest, len(nest.reads))}] = "
             f"{stored(value, nest.out.dtype, nest.out.dtype)};")  # fmt: skip


def _turn(nest: Nest, text: _Text) -> None:
    """In squares: what lies across is read along its own lines, through shared memory."""
    y, x, lines = nest.row, nest.column, THREADS // EDGE
    for m in nest.turned:
        text.add(f"__shared__ {_stored(nest, m)} turned{m}[{EDGE}][{EDGE + 1}];")
    text.add(f"const int tx = threadIdx.x % {EDGE}, ty = threadIdx.x / {EDGE};",
             f"const I across = (n{x}_0 + {EDGE - 1}) / {EDGE}, down = (n{y}_0 + {EDGE - 1}) / {EDGE};",
             "I flat = blockIdx.x;", f"const I x0 = flat % across * {EDGE}; flat /= across;",
             f"const I y0 = flat % down * {EDGE}; flat /= down;")  # fmt: skip
    _unravel(text, "flat", range(nest.outputs - 2))
    text.add("#pragma unroll")
    text.open(f"for (int u = 0; u < {EDGE}; u += {lines})")
    text.add(f"const I i{x} = least(x0 + ty + u, n{x}_0 - 1), i{y} = least(y0 + tx, n{y}_0 - 1);")
    text.add(*(f"turned{m}[ty + u][tx] = p{m}[{_place(nest, m)}];" for m in nest.turned))
    text.close()
    text.add("__syncthreads();", "#pragma unroll")
    text.open(f"for (int u = 0; u < {EDGE}; u += {lines})")
    text.add(f"const I i{x} = least(x0 + tx, n{x}_0 - 1), i{y} = least(y0 + ty + u, n{y}_0 - 1);")
    steps = _steps(nest, "v", lambda m: f"load(turned{m}[tx][ty + u])" if m in nest.turned else None)
    _store_map(nest, text, steps, f"x0 + tx < n{x}_0 && y0 + ty + u < n{y}_0")
    text.close()


# ---- ⊕ --------------------------------------------------------------------------------------------------------------


def _fold_of(nest: Nest, types: Sequence[str]) -> Fold:
    assert nest.aggregation is not None
    return Fold(nest.aggregation, nest.function, tuple(types))


def _fold(nest: Nest, text: _Text) -> None:
    """A team of threads goes over the values of a result, each in steps of the team; then they join, in a tree."""
    fold = _fold_of(nest, [access.dtype for access in nest.reads])
    outer, inner, team = range(nest.outputs), range(nest.outputs, nest.loops), nest.team
    results = THREADS // team
    total, part = COMPUTED[fold.total], COMPUTED[fold.dtype]
    mate, slot = (f"threadIdx.x % {team}", f"threadIdx.x / {team}")
    if not nest.along:
        mate, slot = (f"threadIdx.x / {results}", f"threadIdx.x % {results}")
    text.add(f"const int mate = {mate}, slot = {slot};", f"const I results = {_product(outer)};",
             f"const I own = (I)blockIdx.x * {results} + slot;", "I flat = least(own, results - 1);")  # fmt: skip
    _unravel(text, "flat", outer)
    text.add("const I begin = (I)blockIdx.y * c0_0;", f"const I end = least(begin + c0_0, {_product(inner)});",
             f"{total} total = {fold.start(fold.total)};")  # fmt: skip
    step = team * BLOCK
    if fold.in_parts:
        text.open(f"for (I from = begin + mate; from < end; from += {step})")
        text.add(f"const I to = least(from + {step}, end);", f"{part} part = {fold.start(fold.dtype)};")
    first, last, name = ("from", "to", "part") if fold.in_parts else ("begin + mate", "end", "total")
    text.add("#pragma unroll 4")
    text.open(f"for (I j = {first}; j < {last}; j += {team})")
    text.add("I deep = j;")
    _unravel(text, "deep", inner)
    steps = _steps(nest)
    taken = fold.take(steps, name)
    text.add(*steps.lines, f"{name} = {taken};")
    text.close()
    if fold.in_parts:
        text.add(f"total = {fold.join('total', f'Cast<{total}>::of(part)')};")
        text.close()
    if team > 1:
        text.add(f"__shared__ {total} joined[{THREADS}];", f"joined[mate * {results} + slot] = total;", "#pragma unroll")
        text.open(f"for (int half = {team // 2}; half; half /= 2)")
        text.add("__syncthreads();")
        pair = fold.join(f"joined[mate * {results} + slot]", f"joined[(mate + half) * {results} + slot]")
        text.add(f"if (mate < half) joined[mate * {results} + slot] = {pair};")
        text.close()
        text.add("__syncthreads();", "total = joined[slot];")
    value = stored("total", fold.total, nest.out.dtype)
    text.add(f"if (mate == 0 && own < results) p{len(nest.reads)}[{_part_place(nest)}] = {value};")


def _part_place(nest: Nest) -> str:
    return f"{_place(nest, len(nest.reads))} + (I)blockIdx.y * o0_0"


def _tile(nest: Nest, text: _Text) -> None:
    """A block of threads computes a tile: 16 × 16 threads, each some rows and columns that stay in registers. What the
    next step needs is read while this one is computed."""
    rows, columns, depth = nest.tile
    row, column, inner = nest.row, nest.column, range(nest.outputs, nest.loops)
    fold = _fold_of(nest, [term.dtype for term in nest.terms])
    total = COMPUTED["float32" if fold.dtype == "float16" else fold.dtype]
    _take(nest, fold, text)
    for t, term in enumerate(nest.terms):
        kind, length = COMPUTED[term.dtype], _length(nest, term)
        text.add(f"alignas(16) __shared__ {kind} tile{t}[2][{depth}][{length + _pad(term)}];",
                 f"{kind} fetched{t}[{_fetches(nest, term)}];")  # fmt: skip
    text.add("const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;",
             f"const I across = (n{column}_0 + {16 * columns - 1}) / {16 * columns};",
             f"const I down = (n{row}_0 + {16 * rows - 1}) / {16 * rows};", "I flat = blockIdx.x;",
             f"const I c0 = flat % across * {16 * columns}; flat /= across;",
             f"const I r0 = flat % down * {16 * rows}; flat /= down;")  # fmt: skip
    _unravel(text, "flat", range(nest.outputs - 2))
    text.add("const I begin = (I)blockIdx.y * c0_0;", f"const I end = least(begin + c0_0, {_product(inner)});",
             f"{total} total[{rows}][{columns}];", "#pragma unroll", f"for (int u = 0; u < {rows}; ++u)",
             "  #pragma unroll", f"  for (int v = 0; v < {columns}; ++v) total[u][v] = {fold.start(fold.dtype)};")  # fmt: skip
    _fetch(nest, text)
    _keep(nest, text)
    _multiply(nest, text)
    text.add("int now = 0;", "fetch(begin);", "keep(0);", "__syncthreads();")
    text.open(f"for (I j = begin; j < end; j += {depth})")
    text.add(f"const bool more = j + {depth} < end;", f"if (more) fetch(j + {depth});")
    if fold.repeats:  # beyond the end the last value is taken again
        text.add("#pragma unroll", f"for (int k = 0; k < {depth}; ++k) multiply(now, k);")
    else:
        text.open(f"if (j + {depth} <= end)")
        text.add("#pragma unroll", f"for (int k = 0; k < {depth}; ++k) multiply(now, k);")
        text.close()
        text.open("else")
        text.add("for (int k = 0; k < (int)(end - j); ++k) multiply(now, k);")
        text.close()
    text.add("if (more) keep(now ^ 1);", "__syncthreads();", "now ^= 1;")
    text.close()
    text.add("#pragma unroll")
    text.open(f"for (int u = 0; u < {rows}; ++u)")
    text.add("#pragma unroll")
    text.open(f"for (int v = 0; v < {columns}; ++v)")
    place = {True: _within("u", "ty", rows, nest.terms, True), False: _within("v", "tx", columns, nest.terms, False)}
    text.add(f"const I i{row} = r0 + {place[True]}, i{column} = c0 + {place[False]};")
    value = stored("total[u][v]", fold.dtype, nest.out.dtype)
    text.add(f"if (i{row} < n{row}_0 && i{column} < n{column}_0) p{len(nest.reads)}[{_part_place(nest)}] = {value};")
    text.close(2)


def _take(nest: Nest, fold: Fold, text: _Text) -> None:
    """⊕ of a total and of ⊗ over the terms, as a function."""
    types = [term.dtype for term in nest.terms]
    steps = Steps(types, lambda t: f"x{t}")
    taken = fold.take(steps, "total")
    given = ", ".join(f"{COMPUTED[dtype]} x{t}" for t, dtype in enumerate(types))
    kind = COMPUTED[fold.dtype]
    text.outside += [f"FN {kind} take({kind} total, {given}) {{", *("  " + line for line in steps.lines),
                     f"  return {taken};", "}"]  # fmt: skip


def _length(nest: Nest, term: Term) -> int:
    return 16 * nest.tile[not term.is_row]


def _pad(term: Term) -> int:
    """Numbers after each line of a tile: what is written along the depth would all go to one bank of the memory."""
    return max(1, 16 // width_of(term.dtype)) if term.deep else 0


def _pack(count: int, terms: Sequence[Term], is_row: bool) -> int:
    """How many neighbours a thread takes at once: 16 bytes of the widest term."""
    widest = max(width_of(term.dtype) for term in terms if term.is_row == is_row)
    return min(count, max(1, 16 // widest))


def _within(which: str, thread: str, count: int, terms: Sequence[Term], is_row: bool) -> str:
    """Which line of the tile is a thread's number `which`: packs of neighbours, so that no bank is asked twice."""
    pack = _pack(count, terms, is_row)
    return f"{which} / {pack} * {16 * pack} + {thread} * {pack} + {which} % {pack}"


def _fetches(nest: Nest, term: Term) -> int:
    return max(1, -(-_length(nest, term) * nest.tile[2] // THREADS))


def _each(nest: Nest, term: Term, text: _Text) -> None:
    """A loop over what a thread fetches of a term: `line` of the tile and `step` of the depth."""
    length, depth = _length(nest, term), nest.tile[2]
    text.add("#pragma unroll")
    text.open(f"for (int q = 0; q < {_fetches(nest, term)}; ++q)")
    text.add(f"const int e = threadIdx.x + q * {THREADS};")
    divisor = depth if term.deep else length
    names = ("step", "line") if term.deep else ("line", "step")
    text.add(f"const int {names[0]} = e % {divisor}, {names[1]} = e / {divisor};")


def _fetch(nest: Nest, text: _Text) -> None:
    inner = range(nest.outputs, nest.loops)
    text.open("auto fetch = [&](const I j)")
    for t, term in enumerate(nest.terms):
        _each(nest, term, text)
        loop, start = (nest.row, "r0") if term.is_row else (nest.column, "c0")
        text.add(f"const I i{loop} = least({start} + line, n{loop}_0 - 1);", "I deep = least(j + step, end - 1);")
        _unravel(text, "deep", inner)
        steps = _steps(nest)
        value = steps.value(term.expression, term.dtype)
        text.add(*steps.lines, f"fetched{t}[q] = {value};")
        text.close()
    text.close()
    text.lines[-1] += ";"


def _keep(nest: Nest, text: _Text) -> None:
    text.open("auto keep = [&](const int side)")
    for t, term in enumerate(nest.terms):
        _each(nest, term, text)
        text.add(f"if (e < {_length(nest, term) * nest.tile[2]}) tile{t}[side][step][line] = fetched{t}[q];")
        text.close()
    text.close()
    text.lines[-1] += ";"


def _multiply(nest: Nest, text: _Text) -> None:
    rows, columns, _ = nest.tile
    text.open("auto multiply = [&](const int side, const int k)")
    for t, term in enumerate(nest.terms):
        count, thread = (rows, "ty") if term.is_row else (columns, "tx")
        pack = _pack(count, nest.terms, term.is_row)
        kind = f"Pack<{COMPUTED[term.dtype]}, {pack}>"
        text.add(f"{kind} x{t}[{count // pack}];", "#pragma unroll",
                 f"for (int u = 0; u < {count // pack}; ++u) x{t}[u] = *reinterpret_cast<const {kind}*>"
                 f"(&tile{t}[side][k][u * {16 * pack} + {thread} * {pack}]);")  # fmt: skip
    text.add("#pragma unroll", f"for (int u = 0; u < {rows}; ++u)", "  #pragma unroll",
             f"  for (int v = 0; v < {columns}; ++v) total[u][v] = take(total[u][v], {_taken(nest)});")  # fmt: skip
    text.close()
    text.lines[-1] += ";"


def _taken(nest: Nest) -> str:
    def one(t: int, term: Term) -> str:
        count, which = (nest.tile[0], "u") if term.is_row else (nest.tile[1], "v")
        pack = _pack(count, nest.terms, term.is_row)
        return f"x{t}[{which} / {pack}].at[{which} % {pack}]"

    return ", ".join(one(t, term) for t, term in enumerate(nest.terms))


WAYS: dict[str, Callable[[Nest, _Text], None]] = {"map": _map, "turn": _turn, "fold": _fold, "tile": _tile}


def expression_source(function: Scalar, types: Sequence[str], dtype: str) -> str:
    """⊗ alone, as a function of one element of each operand as it lies in memory."""
    steps = Steps(types, lambda m: f"load(x{m})")
    value = steps.value(function, dtype)
    given = ", ".join(f"{STORED[kind]} x{m}" for m, kind in enumerate(types))
    lines = [f"FN {STORED[dtype]} otimes({given}) {{", *steps.lines, f"return {stored(value, dtype, dtype)};", "}"]
    return "\n".join([*lines, ""])
