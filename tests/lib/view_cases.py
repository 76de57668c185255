"""Random programs that make views of arrays and write into them: numpy's arrays beside ours."""

import numpy as np

from einmpi import DistArray
from einmpi.comm.threads import run_threads
from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import Layout

DTYPES = ["float64", "int64", "complex128", "float32", "bool", "uint8"]


def check_random_views(seed, ranks, steps=14):
    """Compare arrays and views of them after writes into any of them, with numpy's."""
    run_threads(ranks, lambda comm: RandomProgram(seed, comm).run(steps))


class RandomProgram:
    """What one rank does. Every rank draws the same numbers."""

    def __init__(self, seed, comm):
        self.rng = np.random.default_rng(seed)
        self.comm = comm
        self.pairs = []  # of a DistArray and numpy's array
        self.done = [f"seed {seed} on {comm.size} ranks"]

    def run(self, steps):
        for _ in range(2):
            self.add_array()
        for _ in range(steps):
            ours, expected = self.pairs[self.draw(len(self.pairs))]
            step = self.choose([self.add_view, self.add_view, self.write, self.write, self.copy])
            step(ours, expected)
            if self.draw(3):  # at times, several writes pass before a view is read
                self.compare()
        self.compare()

    def draw(self, count):
        return int(self.rng.integers(count))

    def choose(self, options):
        return options[self.draw(len(options))]

    def compare(self):
        for number, (ours, expected) in enumerate(self.pairs):
            note = "\n".join([*self.done, f"array {number}"])
            assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype), note
            np.testing.assert_array_equal(ours.gather(), expected, note)

    def values(self, shape, dtype):
        return self.rng.integers(0, 9, shape).astype(dtype)

    def same(self, what, on_ours, on_expected):
        """Do the same to both; both raise an error of the same kind, or none does."""
        self.done.append(f"{len(self.pairs)} arrays: {what}")
        found = []
        for action in (on_ours, on_expected):
            try:
                found.append(action())
            except (ValueError, TypeError, IndexError) as error:
                found.append(error)
        errors = [type(each) for each in found if isinstance(each, Exception)]
        assert len(errors) in (0, 2), "\n".join([*self.done, repr(found)])
        return None if errors else found

    def add(self, what, on_ours, on_expected):
        found = self.same(what, on_ours, on_expected)
        if found is not None and isinstance(found[1], np.ndarray):
            self.pairs.append(tuple(found))

    # ---- arrays and views -----------------------------------------------------------------------

    def add_array(self):
        ndim = self.choose([1, 2, 2, 3])
        shape = tuple(self.choose([1, 2, 3, 4, 5, 6, 6]) for _ in range(ndim))
        expected = self.values(shape, self.choose(DTYPES))
        ours = DistArray.from_global(expected.copy(), self.comm)
        if self.comm.size > 1 and not self.draw(3):
            cut = self.choose([None, ndim - 1]) if shape[-1] > 1 else None
            ours = ours.redistribute(Layout(Mesh(2), shape, (cut,)))
        self.pairs.append((ours, expected))

    def add_view(self, ours, expected):
        ndim = expected.ndim
        shape = self.shape_of(expected.size)
        axis = self.draw(max(ndim, 1))
        other = self.draw(max(ndim, 1))
        order = self.rng.permutation(ndim).tolist()
        key = self.key(expected.shape)
        offset = self.draw(3) - 1
        makes = {
            f"x[{key}]": lambda x: x[key],
            f"x[{key}] once more": lambda x: x[key],
            "x.T": lambda x: x.T,
            f"transpose {order}": lambda x: x.transpose(order),
            f"swapaxes {axis} {other}": lambda x: np.swapaxes(x, axis, other),
            f"moveaxis {axis} {other}": lambda x: np.moveaxis(x, axis, other),
            f"expand_dims {axis}": lambda x: np.expand_dims(x, axis),
            "squeeze": lambda x: x.squeeze(),
            f"reshape {shape}": lambda x: x.reshape(shape),
            f"np.reshape {shape}": lambda x: np.reshape(x, shape),
            "ravel": lambda x: x.ravel(),
            "real": lambda x: x.real,
            "imag": lambda x: np.imag(x),
            f"diagonal {offset}": lambda x: np.diagonal(x, offset),
            "broadcast_to": lambda x: np.broadcast_to(x, (2, *x.shape)),
            "flip": lambda x: np.flip(x, axis),
            "split": lambda x: np.array_split(x, 2, axis)[1],
            "rot90": lambda x: np.rot90(x, offset),
            "row": lambda x: list(x)[-1],
        }
        name = self.choose(list(makes))
        self.add(name, lambda: makes[name](ours), lambda: makes[name](expected))

    def shape_of(self, size):
        extents = [
            (a, b, size // (a * b)) for a in range(1, 7) for b in range(1, 7) if size % (a * b) == 0
        ]
        shape = self.choose(extents)
        return self.choose([shape, shape, (shape[0], shape[1] * shape[2]), (-1,)])

    def key(self, shape):
        parts = []
        for extent in shape[: self.draw(len(shape) + 1)]:
            step = self.choose([1, 1, 2, -1, -2])
            ends = sorted(self.draw(extent + 2) for _ in range(2))
            part = slice(*(ends if step > 0 else reversed(ends)), step)
            if extent and not self.draw(3):
                part = self.draw(extent) - self.choose([0, extent])
            parts.append(part)
        if not self.draw(3):
            parts.insert(self.draw(len(parts) + 1), None)
        if not self.draw(4):
            parts.append(Ellipsis)
        return parts[0] if len(parts) == 1 and self.draw(2) else tuple(parts)

    # ---- copies ---------------------------------------------------------------------------------

    def copy(self, ours, expected):
        key = self.advanced_key(expected)
        makes = {
            "copy": lambda x: x.copy(),
            "flatten": lambda x: x.flatten(),
            "list": lambda x: x[key],
            "x[mask]": lambda x: x[x > 3],
            "roll": lambda x: np.roll(x, 0, 0),
            "sum": lambda x: x + x,
        }
        name = self.choose(list(makes))
        # numpy's copies may be stored in another order than that of their dimensions.
        self.add(
            f"{name} {key}",
            lambda: makes[name](ours),
            lambda: np.ascontiguousarray(makes[name](expected)).reshape(
                makes[name](expected).shape
            ),
        )

    def advanced_key(self, array):
        """A key of lists, masks, integers and slices."""
        parts = []
        shape = list(array.shape)
        length = self.draw(3) + 1
        while shape and (not parts or self.draw(3)):
            extent = shape.pop(0)
            kind = self.choose(["list", "list", "table", "mask", "mask 2", "integer", "slice"])
            if kind == "mask 2" and shape:
                parts.append(self.rng.integers(2, size=(extent, shape.pop(0))).astype(bool))
            elif kind.startswith("mask"):
                parts.append(self.rng.integers(2, size=extent).astype(bool))
            elif kind == "slice" or not extent:
                parts.append(slice(self.draw(2), None, self.choose([1, 2])))
            elif kind == "integer":
                parts.append(self.draw(extent))
            else:
                size = length if kind == "list" else (2, length)
                parts.append(self.rng.integers(-extent, extent, size))
        if parts and not any(isinstance(part, np.ndarray) for part in parts):
            parts[0] = np.arange(array.shape[0])
        if not self.draw(4):
            parts.insert(self.draw(len(parts) + 1), self.choose([None, Ellipsis]))
        return tuple(parts)

    # ---- writes ---------------------------------------------------------------------------------

    def write(self, ours, expected):
        kind = self.choose(["key", "key", "advanced", "mask", "in place", "out", "method", "twice"])
        number = self.choose([0, 1, 2, 5])
        if kind == "mask":
            self.write_by_mask(ours, expected)
        elif kind == "in place":
            self.in_place(ours, expected, number)
        elif kind == "out":
            operand = self.values(expected.shape, expected.dtype)
            self.same(
                "np.add(…, out=x)",
                lambda: np.add(DistArray.from_global(operand, self.comm), operand, out=ours),
                lambda: np.add(operand, operand, out=expected),
            )
        elif kind == "method":
            self.same("fill", lambda: ours.fill(number), lambda: expected.fill(number))
        elif kind == "twice":
            key = self.key(expected.shape)

            def change(x):
                x[key] += np.ones((), x.dtype)

            self.same(f"x[{key}] += 1", lambda: change(ours), lambda: change(expected))
        else:
            key = self.key(expected.shape) if kind == "key" else self.advanced_key(expected)
            self.write_at(ours, expected, key)

    def in_place(self, ours, expected, number):
        def change(x):
            if number > 1:
                x *= x.dtype.type(number % 3)
            else:
                np.bitwise_xor(x, x, out=x) if x.dtype.kind == "b" else np.subtract(5, x, out=x)

        self.same("in place", lambda: change(ours), lambda: change(expected))

    def write_by_mask(self, ours, expected):
        mask = self.values(expected.shape, "int64") > 4
        count = int(mask.sum())
        size = self.choose([None, count, count, 1, count + 1])
        value = self.values(() if size is None else size, expected.dtype)
        ours_mask, ours_value = self.maybe_distributed(mask), self.maybe_distributed(value)

        def write(x, key, values):
            x[key] = values

        self.same(
            f"x[mask of {count}] = {value}",
            lambda: write(ours, ours_mask, ours_value),
            lambda: write(expected, mask, value),
        )

    def write_at(self, ours, expected, key):
        try:
            shape = expected[key].shape
        except IndexError:
            shape = ()
        pairs = [pair for pair in self.pairs if pair[1].dtype == expected.dtype]
        value = self.values(shape[self.draw(len(shape) + 1) :], expected.dtype)
        ours_value = self.maybe_distributed(value)
        if not self.draw(3):
            ours_value, value = self.choose(pairs)  # it may overlap, or not fit
        if _is_repeated(expected.shape, key) or not shape:
            ours_value = value = np.ones((), expected.dtype)
        parts = tuple(map(self.maybe_distributed, key)) if isinstance(key, tuple) else key

        def write(x, x_key, values):
            x[x_key] = values

        self.same(
            f"x[{key}] = {value!r}",
            lambda: write(ours, parts, ours_value),
            lambda: write(expected, key, value),
        )

    def maybe_distributed(self, value):
        if isinstance(value, np.ndarray) and self.draw(2):
            return DistArray.from_global(value, self.comm)
        return value


def _is_repeated(shape, key):
    """Whether a key names elements twice: numpy does not promise which value they get."""
    places = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    try:
        chosen = places[key]
    except IndexError:
        return False
    return np.unique(chosen).size < np.size(chosen)
