"""Programs over sparse tensors with the results that they must give, or the reason of a refusal."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import einmpi
from einmpi.graph.sparse.coordinates import Coordinates

FOLDER = Path(__file__).parent.parent / "sparse" / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclass
class Case:
    """One golden case."""

    record: dict
    arrays: dict

    @property
    def inputs(self):
        """The inputs as a caller gives them: arrays, and SparseArrays."""
        found = {}
        for name, each in self.record["inputs"].items():
            if each["kind"] == "dense":
                found[name] = self.arrays[each["array"]]
            else:
                found[name] = einmpi.SparseArray.from_keys(
                    self.arrays[each["keys"]],
                    self.arrays[each["values"]],
                    each["shape"],
                    number(each["implicit"]),
                )
        return found

    def job(self, inputs):
        loop = self.record["loop"] or {"carry": {}}
        outputs = dict.fromkeys([*self.record["outputs"], *loop["carry"].values()])
        return einmpi.program(
            self.record["program"],
            outputs=[*outputs] or None,
            formats=self.record["formats"],
            **self.record["sizes"],
            **inputs,
        )

    def run(self, **settings):
        """Return the outputs, under the names that the case has for them."""
        inputs = self.inputs
        job = self.job(inputs)
        loop = self.record["loop"]
        if loop is None:
            return einmpi.run(job, inputs, **settings)
        found = einmpi.loop(job, inputs, carry=loop["carry"], steps=loop["steps"], **settings)
        starts = {after: start for start, after in loop["carry"].items()}
        return {name: found.outputs[starts.get(name, name)] for name in self.record["outputs"]}

    def check(self, results):
        """Compare results with those that are wanted: values, pattern and implicit value."""
        tolerance = {"rtol": self.record["rtol"], "atol": 1e-12}
        for name, each in self.record["outputs"].items():
            found = results[name]
            if each["kind"] == "dense":
                assert isinstance(found, einmpi.DistArray), name
                np.testing.assert_allclose(found.gather(), self.arrays[each["array"]], **tolerance)
                continue
            assert isinstance(found, einmpi.SparseArray), name
            whole = found.coordinates()
            assert isinstance(whole, Coordinates)
            assert np.array_equal(np.stack(whole.keys), self.arrays[each["keys"]]), name
            assert list(whole.shape) == each["shape"]
            assert whole.implicit == number(each["implicit"])
            np.testing.assert_allclose(whole.values, self.arrays[each["values"]], **tolerance)


def number(text):
    return {"inf": math.inf, "-inf": -math.inf}.get(text) or json.loads(text)


def read_case(name):
    record = json.loads((FOLDER / f"{name}.json").read_text())
    with np.load(FOLDER / record["data"]) as data:
        return Case(record, dict(data))
