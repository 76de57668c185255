"""The inputs of a job that come from files, looked up before they are read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.compiled.residents import Residents
from einmpi.files.datasets import Dataset, files_as_read, is_unchanged
from einmpi.files.load import find_planned
from einmpi.job.job import Job


class InputFiles:
    """Where the inputs of a job were found in files."""

    def __init__(self, job: Job, comm: Comm, residents: Residents) -> None:
        self.job = job
        self.comm = comm
        self.residents = residents
        self.found: dict[str, Dataset] = {}

    def find(self, given: Collection[str], staying: Sequence[str]) -> None:
        """Look up the inputs in files that are not given; those that stay loaded only once.

        The ranks read together, so all have to find the same. They do this before every call: a
        file may change between two calls, but not between here and the end of reading.
        """
        if self.residents.is_shared:
            self._take_from_other_jobs(staying)
        vertices = self.job.graph.by_name
        wanted = []
        for spec in self.job.inputs:
            stays_loaded = spec.name in self.found and spec.name in staying
            if spec.file and spec.name in vertices and spec.name not in given and not stays_loaded:
                wanted.append(spec)

        def find() -> dict[str, Dataset]:
            found = {}
            for spec in wanted:
                dataset = self.found.get(spec.name)
                if dataset is None or not is_unchanged(dataset):
                    vertex = vertices[spec.name]
                    dataset = find_planned(spec, vertex.bound, vertex.dtype)
                found[spec.name] = dataset
            return found

        if wanted:
            found = together(self.comm, find, files_as_read)
            self.found.update(found)
            for name in staying:
                if name in found:
                    self.residents.files[name] = found[name]

    def forget(self) -> None:
        """Look up all inputs again before the next call."""
        self.found.clear()
        self.residents.files.clear()

    def _take_from_other_jobs(self, staying: Sequence[str]) -> None:
        """Note which inputs other jobs have loaded or forgotten since the last call."""
        for name in staying:
            known = self.residents.files.get(name)
            if known is None:
                self.found.pop(name, None)
            else:
                self.found[name] = known
