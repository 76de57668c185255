"""The text of a CUDA kernel for ⊕ over what rows and columns share: products of matrices in any semiring, distances."""

from __future__ import annotations

from collections.abc import Sequence

from einmpi.kernels.cuda.nest import THREADS, Nest, Term
from einmpi.kernels.cuda.scalar_source import COMPUTED, Fold, Steps, stored, weight_of, width_of
from einmpi.kernels.cuda.source_parts import Text, fold_of, part_place, product, steps_of, unravel

UNROLLED = 2**13  # weight of the text of an inner loop, at the most


def tile(nest: Nest, text: Text) -> None:
    """A block of threads computes a tile: 16 × 16 threads, each some rows and columns that stay in registers. What the
    next step needs is read while this one is computed."""
    rows, columns, depth = nest.tile
    row, column, inner = nest.row, nest.column, range(nest.outputs, nest.loops)
    fold = fold_of(nest, [term.dtype for term in nest.terms])
    total = COMPUTED[fold.dtype]
    _take(nest, fold, text)
    for t, term in enumerate(nest.terms):
        kind, length = COMPUTED[term.dtype], _length(nest, term)
        text.add(
            f"alignas(16) __shared__ {kind} tile{t}[2][{depth}][{length + _pad(term)}];",
            f"{kind} fetched{t}[{_fetches(nest, term)}];",
        )
    text.add(
        "const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;",
        f"const I across = (n{column}_0 + {16 * columns - 1}) / {16 * columns};",
        f"const I down = (n{row}_0 + {16 * rows - 1}) / {16 * rows};",
        "I flat = blockIdx.x;",
        f"const I c0 = flat % across * {16 * columns}; flat /= across;",
        f"const I r0 = flat % down * {16 * rows}; flat /= down;",
    )
    unravel(text, "flat", range(nest.outputs - 2))
    text.add(
        "const I begin = (I)blockIdx.y * c0_0;",
        f"const I end = least(begin + c0_0, {product(inner)});",
        f"{total} total[{rows}][{columns}];",
        "#pragma unroll",
        f"for (int u = 0; u < {rows}; ++u)",
        "  #pragma unroll",
        f"  for (int v = 0; v < {columns}; ++v) total[u][v] = {fold.start(fold.dtype)};",
    )
    _fetch(nest, text)
    _keep(nest, text)
    _multiply(nest, text)
    text.add("int now = 0;", "fetch(begin);", "keep(0);", "__syncthreads();")
    text.open(f"for (I j = begin; j < end; j += {depth})")
    text.add(f"const bool goes_on = j + {depth} < end;", f"if (goes_on) fetch(j + {depth});")
    unrolled = max(1, min(depth, UNROLLED // (rows * columns * weight_of(nest.function))))
    if fold.repeats:  # beyond the end the last value is taken again
        text.add(
            f"#pragma unroll {unrolled}", f"for (int k = 0; k < {depth}; ++k) multiply(now, k);"
        )
    else:
        text.open(f"if (j + {depth} <= end)")
        text.add(
            f"#pragma unroll {unrolled}", f"for (int k = 0; k < {depth}; ++k) multiply(now, k);"
        )
        text.close()
        text.open("else")
        text.add("#pragma unroll 1", "for (int k = 0; k < (int)(end - j); ++k) multiply(now, k);")
        text.close()
    text.add("if (goes_on) keep(now ^ 1);", "__syncthreads();", "now ^= 1;")
    text.close()
    text.add("#pragma unroll")
    text.open(f"for (int u = 0; u < {rows}; ++u)")
    text.add("#pragma unroll")
    text.open(f"for (int v = 0; v < {columns}; ++v)")
    place = {
        True: _within("u", "ty", rows, nest.terms, True),
        False: _within("v", "tx", columns, nest.terms, False),
    }
    text.add(f"const I i{row} = r0 + {place[True]}, i{column} = c0 + {place[False]};")
    value = stored("total[u][v]", fold.dtype, nest.out.dtype)
    text.add(
        f"if (i{row} < n{row}_0 && i{column} < n{column}_0) p{len(nest.reads)}[{part_place(nest)}] = {value};"
    )
    text.close(2)


def _take(nest: Nest, fold: Fold, text: Text) -> None:
    """⊕ of a total and of ⊗ over the terms, as a function."""
    types = [term.dtype for term in nest.terms]
    steps = Steps(types, lambda t: f"x{t}")
    taken = fold.take(steps, "total")
    given = ", ".join(f"{COMPUTED[dtype]} x{t}" for t, dtype in enumerate(types))
    kind = COMPUTED[fold.dtype]
    text.outside += [
        f"FN {kind} take({kind} total, {given}) {{",
        *("  " + line for line in steps.lines),
        f"  return {taken};",
        "}",
    ]


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


def _each(nest: Nest, term: Term, text: Text) -> None:
    """A loop over what a thread fetches of a term: `line` of the tile and `step` of the depth."""
    length, depth = _length(nest, term), nest.tile[2]
    text.add("#pragma unroll")
    text.open(f"for (int q = 0; q < {_fetches(nest, term)}; ++q)")
    text.add(f"const int e = threadIdx.x + q * {THREADS};")
    divisor = depth if term.deep else length
    names = ("step", "line") if term.deep else ("line", "step")
    text.add(f"const int {names[0]} = e % {divisor}, {names[1]} = e / {divisor};")


def _fetch(nest: Nest, text: Text) -> None:
    inner = range(nest.outputs, nest.loops)
    text.open("auto fetch = [&](const I j)")
    for t, term in enumerate(nest.terms):
        _each(nest, term, text)
        loop, start = (nest.row, "r0") if term.is_row else (nest.column, "c0")
        text.add(
            f"const I i{loop} = least({start} + line, n{loop}_0 - 1);",
            "I deep = least(j + step, end - 1);",
        )
        unravel(text, "deep", inner)
        steps = steps_of(nest)
        value = steps.value(term.expression, term.dtype)
        text.add(*steps.lines, f"fetched{t}[q] = {value};")
        text.close()
    text.close()
    text.lines[-1] += ";"


def _keep(nest: Nest, text: Text) -> None:
    text.open("auto keep = [&](const int side)")
    for t, term in enumerate(nest.terms):
        _each(nest, term, text)
        text.add(
            f"if (e < {_length(nest, term) * nest.tile[2]}) tile{t}[side][step][line] = fetched{t}[q];"
        )
        text.close()
    text.close()
    text.lines[-1] += ";"


def _multiply(nest: Nest, text: Text) -> None:
    rows, columns, _ = nest.tile
    text.open("auto multiply = [&](const int side, const int k)")
    for t, term in enumerate(nest.terms):
        count, thread = (rows, "ty") if term.is_row else (columns, "tx")
        pack = _pack(count, nest.terms, term.is_row)
        kind = f"Pack<{COMPUTED[term.dtype]}, {pack}>"
        text.add(
            f"{kind} x{t}[{count // pack}];",
            "#pragma unroll",
            f"for (int u = 0; u < {count // pack}; ++u) x{t}[u] = *reinterpret_cast<const {kind}*>"
            f"(&tile{t}[side][k][u * {16 * pack} + {thread} * {pack}]);",
        )
    text.add(
        "#pragma unroll",
        f"for (int u = 0; u < {rows}; ++u)",
        "  #pragma unroll",
        f"  for (int v = 0; v < {columns}; ++v) total[u][v] = take(total[u][v], {_taken(nest)});",
    )
    text.close()
    text.lines[-1] += ";"


def _taken(nest: Nest) -> str:
    def one(t: int, term: Term) -> str:
        count, which = (nest.tile[0], "u") if term.is_row else (nest.tile[1], "v")
        pack = _pack(count, nest.terms, term.is_row)
        return f"x{t}[{which} / {pack}].at[{which} % {pack}]"

    return ", ".join(one(t, term) for t, term in enumerate(nest.terms))
