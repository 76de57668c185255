"""Transfers in the background: one thread does them in order, while the rank computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter

from einmpi.comm.base import Comm
from einmpi.runtime.backend import Backend
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.transfer import transfer
from einmpi.schedule.steps import Step, Transfer

# Seconds between two looks at messages. Kernels need the core; the buffers of a network hold what
# arrives meanwhile. While the rank waits, nothing else needs the core.
PAUSE_WHILE_COMPUTING = 3e-4
PAUSE_WHILE_WAITING = 5e-5

OnTransfer = Callable[[Step, float, float], None]  # a transfer, when it began and when it ended


class SharedBuffers(Buffers):
    """Buffers that the thread of transfers uses too."""

    def __init__(self, backend: Backend, background: Background) -> None:
        self.background = background
        self.lock = threading.Lock()
        super().__init__(backend)

    def grow(self, nbytes: int) -> None:
        with self.lock:
            super().grow(nbytes)

    def shrink(self, nbytes: int) -> None:
        with self.lock:
            super().shrink(nbytes)


@dataclass
class _Task:
    """A transfer that was handed to the thread."""

    step: Transfer
    beside_kernels: AbstractContextManager[None]
    done: threading.Event = field(default_factory=threading.Event)
    start: float = 0.0
    end: float = 0.0


class Background:
    """The transfers of one run that go on while the rank computes.

    Only one thread calls the communicator at any time: while transfers are under way, the rank
    itself does not. The thread sleeps between its looks at the messages, because it shares its
    core with the kernels.
    """

    def __init__(self, backend: Backend, comm: Comm, on_transfer: OnTransfer | None) -> None:
        self.buffers = SharedBuffers(backend, self)
        self.comm = comm
        self.on_transfer = on_transfer
        self.tasks: deque[_Task] = deque()  # handed over and not awaited yet, in order
        self.queue: deque[_Task] = deque()  # those that the thread has not begun
        self.changed = threading.Condition()
        self.is_closed = False
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.pause = PAUSE_WHILE_COMPUTING
        self.seconds_moving = 0.0  # in which transfers were under way
        self.seconds_waiting = 0.0  # in which the rank waited for them

    def close(self) -> None:
        """End the thread. After an error it may wait for messages that never come: it is left."""
        with self.changed:
            self.is_closed = True
            self.changed.notify()
        if not self.tasks:
            del self.buffers  # which refer to this: arrays are to be freed when nobody uses them

    def begin(self, step: Transfer) -> None:
        """Hand over a transfer; its target has memory from here on."""
        for slot in step.writes:
            self.buffers.make(slot)
        task = _Task(step, self.comm.beside_kernels())
        with self.changed:
            self._raise_error()
            self.tasks.append(task)
            self.queue.append(task)
            self.changed.notify()
        if self.thread is None:
            # A daemon: a rank that fails must not wait for messages that never come.
            self.thread = threading.Thread(target=self._work, daemon=True, name="transfers")
            self.thread.start()

    def wait_for(self, step: Step) -> None:
        """Wait until a transfer, and all that were handed over before it, are done."""
        found = None
        while self.tasks and found is not step:
            with self.changed:
                task = self.tasks.popleft()
            found = task.step
            if not task.done.is_set():
                start = perf_counter()
                self._look_again_after(PAUSE_WHILE_WAITING)
                task.done.wait()
                self._look_again_after(PAUSE_WHILE_COMPUTING)
                self.seconds_waiting += perf_counter() - start
            self._raise_error()
            self.seconds_moving += task.end - task.start
            if self.on_transfer is not None:
                self.on_transfer(task.step, task.start, task.end)

    def wait_for_all(self) -> None:
        """Wait until nothing is under way."""
        if self.tasks:
            self.wait_for(self.tasks[-1].step)

    @property
    def seconds_hidden(self) -> float:
        """In which transfers were under way while the rank did something else."""
        return max(0.0, self.seconds_moving - self.seconds_waiting)

    def _look_again_after(self, pause: float) -> None:
        """Set how long the thread sleeps between two looks at messages."""
        self.pause = pause
        if self.comm.pause:  # it is under way
            self.comm.pause = pause

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.queue and not self.is_closed:
                    self.changed.wait()
                if self.is_closed:
                    return
                task = self.queue.popleft()
            if not self._carry_out(task):
                return

    def _carry_out(self, task: _Task) -> bool:
        """Do a transfer; return False if it failed, and then nothing more is done."""
        task.start = perf_counter()
        self.comm.pause = self.pause
        try:
            with task.beside_kernels:
                transfer(task.step, self.buffers, self.comm)
        except BaseException as error:
            with self.changed:
                self.error = error
                for other in self.tasks:  # nobody may wait for what is never done
                    other.done.set()
            task.done.set()
            return False
        finally:
            self.comm.pause = 0.0
        task.end = perf_counter()
        task.done.set()
        return True
