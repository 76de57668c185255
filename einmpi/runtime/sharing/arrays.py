"""What a run knows of memory that ranks share: arrays of slots, transfers without messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from einmpi.comm.base import Comm
from einmpi.runtime.sharing.inputs import SharedInput
from einmpi.schedule.steps import Slot

# An exchange or a reduction in shared memory; its first argument are the Buffers of the run.
SharedTransfer: TypeAlias = Callable[[Any, Comm], None]
# An exchange that receives elements in slots of their own, one for each other member.
TransferBeside: TypeAlias = Callable[[Sequence[Slot | None], Any, Comm], None]


class SharedArrays:
    """The arrays of a rank's slots in memory that other ranks of the node read; here: none."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}  # by the name of the slot
        self.transfers: dict[int, SharedTransfer] = {}  # by the identity of the step
        self.transfers_beside: dict[int, TransferBeside] = {}
        self.inputs: dict[str, SharedInput] = {}  # by the name of the slot
        # How many ranks share the memory of an input that stays between runs, in this run.
        self.ranks_sharing: dict[str, int] = {}
        self.bytes_per_rank = 0  # of the memory of all these arrays

    def is_free(self, slot: Slot) -> bool:
        """Return whether other ranks have finished with the memory of a slot."""
        return True

    def postpone(self, slot: Slot, action: Callable[[], None]) -> None:
        """Call an action as soon as the memory of a slot is free."""
        action()


NOTHING_SHARED = SharedArrays()
