"""What transfers between nodes must have so that they are worth doing while kernels run."""

from __future__ import annotations

MODES = ("auto", "off")  # values of the setting `overlap`

# A block that moves is cut into √(its bytes / this) parts, so that large blocks have more parts and
# larger ones. Of blocks below four times this there is one part: it takes less time to move them
# than to start and to await transfers.
PART_UNIT_BYTES = 2**19
MOST_PARTS = 8
# Operations of a rank for a part of a kernel, about half a millisecond: to start a transfer and
# to wait for it takes a tenth of that.
LEAST_PART_OPERATIONS = 5_000_000
