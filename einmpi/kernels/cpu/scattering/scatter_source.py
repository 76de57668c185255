"""The source of a compiled kernel that scatters: each value of ⊗ joins the total at its place."""

from __future__ import annotations

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.scalar import Arg, Call
from einmpi.kernels.cpu.scalar_source import Lanes, operation
from einmpi.kernels.cpu.source_lines import SourceLines, loaded, open_loops, stored
from einmpi.kernels.loop_nest import Nest


def write_scatter(nest: Nest, text: SourceLines) -> None:
    """Write the loops: aggregated labels outside, in order, and the labels of the output inside.

    The place does not depend on the lane. Values whose place is not this kernel's are not computed.
    """
    assert nest.aggregation is not None and nest.place is not None
    rule = AGGREGATIONS[nest.aggregation]
    dtype = nest.out.dtype
    if nest.step is not None:
        open_loops(range(nest.output_loops, nest.step), text)
        text.open(f"for tj0 in range(a{nest.step}_0, b{nest.step}_0):")
    open_loops([loop for loop in range(nest.output_loops) if loop != nest.lane], text)
    lanes = Lanes(nest, "t")
    place = lanes.value(Arg(nest.place), "int64")
    text.add(f"c = a{nest.lane}_0", f"n = b{nest.lane}_0 - c", *lanes.before)
    # One comparison: what is below K0_0 becomes a huge number.
    text.open(f"if uint64({place} - K0_0) < uint64(K0_1 - K0_0):")
    written = len(lanes.before)
    target, lane = lanes.pointer(len(nest.reads))
    value = lanes.value(nest.function, dtype)
    total = f"{target}[{lane}]"
    joined = operation(Call(rule.operation, ()), dtype, [loaded(total, dtype), value])
    if "; " in joined:  # an operation of several statements needs names for its values
        joined = lanes.keep(joined, True)
    text.add(*lanes.before[written:])
    # A loop that is known to end at once is not compiled as a loop.
    lane_count = 1 if nest.width == 1 else "n"
    text.add_lane_loop(lane_count, *lanes.inside, f"{total} = {stored(joined, dtype)}")
