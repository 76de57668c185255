"""The text of a CUDA kernel: one kernel a vertex. It holds no word of a user's, only what a checked tree says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from einmpi.graph.scalar import Scalar
from einmpi.kernels.cuda.device_functions import COMMON, DEVICE
from einmpi.kernels.cuda.nest import THREADS, Nest
from einmpi.kernels.cuda.scalar_source import COMPUTED, STORED, Fold, Steps, stored
from einmpi.kernels.cuda.source_parts import (
    Text,
    fold_of,
    join_team,
    part_place,
    place_of,
    product,
    signature,
    steps_of,
    unravel,
)
from einmpi.kernels.cuda.tiles import tile

BLOCK = 128  # values of a sum before what they give is added to the total


def source(nest: Nest) -> str:
    """The whole text; its function is called `kernel`."""
    return DEVICE + COMMON + body(nest)


def body(nest: Nest) -> str:
    text = Text()
    WAYS[nest.way](nest, text)
    types = [STORED[access.dtype] for access in (*nest.reads, nest.out)]
    start = signature(list(nest.parameters()), types, len(nest.reads), nest.wide, THREADS)
    return "\n".join([*text.outside, *start, *("  " + line for line in text.lines), "}", ""])


def _pack_type(nest: Nest, m: int) -> str:
    return f"Pack<{STORED[(*nest.reads, nest.out)[m].dtype]}, {nest.pack}>"


def _read_packs(nest: Nest, text: Text) -> None:
    steps = steps_of(nest, "g")
    for m in nest.packed:
        kind, place = _pack_type(nest, m), place_of(nest, m, steps)
        steps.lines.append(
            f"const {kind} pack{m} = *reinterpret_cast<const {kind}*>(p{m} + {place});"
        )
    text.add(*steps.lines)


# ---- no ⊕ -----------------------------------------------------------------------------------------------------------


def _map(nest: Nest, text: Text) -> None:
    """Neighbouring threads compute neighbours; a thread that has none left does the last one again, and keeps it."""
    loops = range(nest.outputs)
    text.add(
        f"const I total = {product(loops)};",
        f"const I first = (I)blockIdx.x * {THREADS * nest.each} + threadIdx.x;",
        "#pragma unroll",
    )
    text.open(f"for (int u = 0; u < {nest.each}; ++u)")
    text.add(f"const I own = first + u * {THREADS};", "I flat = least(own, total - 1);")
    unravel(text, "flat", loops)
    if nest.pack == 1:
        _store_map(nest, text, steps_of(nest), "own < total")
    else:
        m = len(nest.reads)
        _read_packs(nest, text)
        text.add(f"{_pack_type(nest, m)} result;")
        for part in range(nest.pack):
            steps = steps_of(nest, f"v{part}_", str(part))
            value = steps.value(nest.function, nest.out.dtype)
            text.add(
                *steps.lines,
                f"result.at[{part}] = {stored(value, nest.out.dtype, nest.out.dtype)};",
            )
        text.add(
            f"if (own < total) *reinterpret_cast<{_pack_type(nest, m)}*>(p{m} + {place_of(nest, m)}) = result;"
        )
    text.close()


def _store_map(nest: Nest, text: Text, steps: Steps, condition: str) -> None:
    value = steps.value(nest.function, nest.out.dtype)
    text.add(*steps.lines)
    text.add(
        f"if ({condition}) p{len(nest.reads)}[{place_of(nest, len(nest.reads))}] = "
        f"{stored(value, nest.out.dtype, nest.out.dtype)};"
    )


def _turn(nest: Nest, text: Text) -> None:
    """In squares: what lies across is read along its own lines, through shared memory."""
    y, x, edge, lines = nest.row, nest.column, nest.edge, THREADS // nest.edge
    for m in nest.turned:
        text.add(f"__shared__ {STORED[nest.reads[m].dtype]} turned{m}[{edge}][{edge + 1}];")
    text.add(
        f"const int tx = threadIdx.x % {edge}, ty = threadIdx.x / {edge};",
        f"const I across = (n{x}_0 + {edge - 1}) / {edge}, down = (n{y}_0 + {edge - 1}) / {edge};",
        "I flat = blockIdx.x;",
        f"const I x0 = flat % across * {edge}; flat /= across;",
        f"const I y0 = flat % down * {edge}; flat /= down;",
    )
    unravel(text, "flat", range(nest.outputs - 2))
    text.add("#pragma unroll")
    text.open(f"for (int u = 0; u < {edge}; u += {lines})")
    text.add(f"const I i{x} = least(x0 + ty + u, n{x}_0 - 1), i{y} = least(y0 + tx, n{y}_0 - 1);")
    text.add(*(f"turned{m}[ty + u][tx] = p{m}[{place_of(nest, m)}];" for m in nest.turned))
    text.close()
    text.add("__syncthreads();", "#pragma unroll")
    text.open(f"for (int u = 0; u < {edge}; u += {lines})")
    text.add(f"const I i{x} = least(x0 + tx, n{x}_0 - 1), i{y} = least(y0 + ty + u, n{y}_0 - 1);")
    steps = steps_of(
        nest, "v", "", lambda m: f"load(turned{m}[tx][ty + u])" if m in nest.turned else None
    )
    _store_map(nest, text, steps, f"x0 + tx < n{x}_0 && y0 + ty + u < n{y}_0")
    text.close()


# ---- ⊕ --------------------------------------------------------------------------------------------------------------


def _fold(nest: Nest, text: Text) -> None:
    """A team of threads goes over the values of a result, each in steps of the team; then they join. With packs of
    results a thread has several totals, with packs of values several parts of one total."""
    fold = fold_of(nest, [access.dtype for access in nest.reads])
    outer, inner, team, pack = (
        range(nest.outputs),
        range(nest.outputs, nest.loops),
        nest.team,
        nest.pack,
    )
    results, kept = THREADS // team, 1 if nest.along else pack
    total, part = COMPUTED[fold.total], COMPUTED[fold.dtype]
    mate, slot = f"threadIdx.x % {team}", f"threadIdx.x / {team}"
    if not nest.along:
        mate, slot = f"threadIdx.x / {results}", f"threadIdx.x % {results}"
    text.add(
        f"const int mate = {mate}, slot = {slot};",
        f"const I results = {product(outer)};",
        f"const I own = (I)blockIdx.x * {results} + slot;",
        "I flat = least(own, results - 1);",
    )
    unravel(text, "flat", outer)
    text.add(
        "const I begin = (I)blockIdx.y * c0_0;",
        f"const I end = least(begin + c0_0, {product(inner)});",
        f"{total} total[{kept}];",
        "#pragma unroll",
        f"for (int c = 0; c < {kept}; ++c) total[c] = {fold.start(fold.total)};",
    )
    step = team * BLOCK
    text.open(f"for (I from = begin + mate; from < end; from += {step})")
    text.add(
        f"const I to = least(from + {step}, end);",
        f"{part} part[{pack}];",
        "#pragma unroll",
        f"for (int c = 0; c < {pack}; ++c) part[c] = {fold.start(fold.dtype)};",
        "#pragma unroll 4",
    )
    text.open(f"for (I j = from; j < to; j += {team})")
    text.add("I deep = j;")
    unravel(text, "deep", inner)
    _read_packs(nest, text)
    for number in range(pack):
        steps = steps_of(nest, f"v{number}_", str(number))
        taken = fold.take(steps, f"part[{number}]")
        text.add(*steps.lines, f"part[{number}] = {taken};")
    text.close()
    place = "total[c]" if kept > 1 else "total[0]"
    joined = fold.join(place, f"Cast<{total}>::of(part[c])")
    text.add("#pragma unroll", f"for (int c = 0; c < {pack}; ++c) {place} = {joined};")
    text.close()
    if nest.along:
        join_team(text, "total[0]", total, fold, team, results)
    elif team > 1:
        _join_mates(nest, fold, text, total, kept)
    m = len(nest.reads)
    for number in range(kept):
        value, place = (
            stored(f"total[{number}]", fold.total, nest.out.dtype),
            f"{part_place(nest)} + {number}",
        )
        text.add(f"if (mate == 0 && own < results) p{m}[{place}] = {value};")


def _join_mates(nest: Nest, fold: Fold, text: Text, total: str, kept: int) -> None:
    """⊕ over threads that are far apart, in a tree."""
    results = THREADS // nest.team
    text.add(f"__shared__ {total} joined[{THREADS}];", "#pragma unroll")
    text.open(f"for (int c = 0; c < {kept}; ++c)")
    text.add("__syncthreads();", "joined[threadIdx.x] = total[c];", "#pragma unroll")
    text.open(f"for (int half = {nest.team // 2}; half; half /= 2)")
    pair = fold.join("joined[threadIdx.x]", f"joined[threadIdx.x + half * {results}]")
    text.add("__syncthreads();", f"if (mate < half) joined[threadIdx.x] = {pair};")
    text.close()
    text.add("total[c] = joined[threadIdx.x];")
    text.close()


WAYS: dict[str, Callable[[Nest, Text], None]] = {
    "map": _map,
    "turn": _turn,
    "fold": _fold,
    "tile": tile,
}


def expression_source(function: Scalar, types: Sequence[str], dtype: str) -> str:
    """⊗ alone, as a function of one element of each operand as it lies in memory."""
    steps = Steps(types, lambda m: f"load(x{m})")
    value = steps.value(function, dtype)
    given = ", ".join(f"{STORED[kind]} x{m}" for m, kind in enumerate(types))
    lines = [
        f"FN {STORED[dtype]} otimes({given}) {{",
        *steps.lines,
        f"return {stored(value, dtype, dtype)};",
        "}",
    ]
    return "\n".join([*lines, ""])
