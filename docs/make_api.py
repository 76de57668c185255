"""Write docs/python_api.md from the docstrings of public names: python docs/make_api.py"""

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import einmpi
from einmpi.arrays.methods import ArrayMethods

PAGE = Path(__file__).with_name("python_api.md")
FUNCTIONS = (
    "load",
    "program",
    "plan",
    "run",
    "loop",
    "train",
    "grad",
    "value_and_grad",
    "vjp",
    "compile",
    "open_dataset",
    "einsum",
    "jit",
    "trace",
    "fori",
    "reference",
)
# Each with what an object of it is called on the page.
CLASSES = {
    einmpi.DistArray: "x",
    einmpi.SparseArray: "A",
    einmpi.Compiled: "compiled",
    einmpi.Plan: "plan",
    einmpi.LoopResult: "",
    einmpi.Job: "",
    einmpi.EinmpiError: "",
    einmpi.InputError: "",
}
HEAD = """\
# Python

<!-- python docs/make_api.py writes this page: change the docstrings instead. -->

The public names of `import einmpi`. [How to use it under mpirun](howto_python.md) has whole
programs. The examples here run in one process, after `import numpy as np` and `import einmpi`.
`einmpi.array_api` has
[the functions of the array API standard](howto_python.md#the-array-api-standard).
"""


class Annotation:
    """Prints as it is written in the source."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return (
            self.text
            if isinstance(self.text, str)
            else getattr(self.text, "__name__", str(self.text))
        )


def signature(function, name, is_method=False):
    """A call as an indented block; one parameter a line where it would be too long."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[is_method:]
    parameters = [
        p if p.annotation is p.empty else p.replace(annotation=Annotation(p.annotation))
        for p in parameters
    ]
    returned = (
        ""
        if found.return_annotation is found.empty
        else f" -> {Annotation(found.return_annotation)!r}"
    )
    inside = str(found.replace(parameters=parameters, return_annotation=found.empty))[1:-1]
    text = f"    {name}({inside}){returned}"
    if len(text) > 90:
        text = (
            f"    {name}(\n        "
            + re.sub(r", (?=[\w*/]+(:|,|$))", ",\n        ", inside)
            + f"\n    ){returned}"
        )
    return text


def body(thing):
    """Return a numpydoc docstring as Markdown: sections, lists of parameters, examples to run."""
    text = inspect.getdoc(thing)
    assert text, f"{thing} has no docstring"
    parts = re.split(r"^(\w+)\n-{3,}\n", text, flags=re.MULTILINE)
    done = [with_examples(parts[0].strip())]
    for title, section in zip(parts[1::2], parts[2::2], strict=True):
        if title == "Examples":
            done.append(with_examples(section.strip()))
        else:
            done.append(f"**{title}**\n\n{entries(section)}")
    return "\n\n".join(done)


def with_examples(text):
    """Turn examples into blocks that the tests run."""
    return re.sub(
        r"^>>> (.|\n)*?(?=\n\n|\Z)",
        lambda found: f"```pycon\n{found[0]}\n```",
        text,
        flags=re.MULTILINE,
    )


def entries(section):
    """Return the entries of a section, each a line and an indented text, as a list."""
    items = []
    for line in section.strip().split("\n"):
        if line.startswith(" "):
            items[-1].append(line.strip())
        elif line:
            name, _, kind = line.partition(" : ")
            items.append([f"`{name}`" + (f" ({kind}):" if kind else ":")])
    return "\n".join("- " + " ".join(words) for words in items)


def members(kind):
    """The properties and methods that a class defines, in the order of the source.

    Those of Compiled, but for its call, are steps of a run that the command line takes one by one.
    Those that are calls of numpy's functions are with DistArray.
    """
    own = {}
    for base in reversed(kind.__mro__):
        is_described = base is not ArrayMethods or kind is einmpi.DistArray
        if base.__module__.startswith("einmpi.") and is_described:
            own |= vars(base)
    for name, member in own.items():
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(member, property):
            yield f"#### {name}", body(member)
        elif isinstance(member, classmethod):
            yield (
                f"#### {name}",
                signature(getattr(kind, name), f"{kind.__name__}.{name}"),
                body(member),
            )
        elif inspect.isfunction(member) and (name == "__call__" or kind is not einmpi.Compiled):
            call = CLASSES[kind] if name == "__call__" else f"{CLASSES[kind]}.{name}"
            yield f"#### {name.strip('_')}", signature(member, call, is_method=True), body(member)


def page():
    parts = [HEAD.strip(), "## Functions"]
    for name in FUNCTIONS:
        function = getattr(einmpi, name)
        parts += [f"### {name}", signature(function, f"einmpi.{name}"), body(function)]
    parts.append("## Classes")
    for kind in CLASSES:
        parts += [f"### {kind.__name__}", body(kind)]
        if is_dataclass(kind) and "Attributes\n" not in inspect.getdoc(kind):
            parts.append("Fields: " + ", ".join(f"`{field.name}`" for field in fields(kind)) + ".")
        for member in members(kind):
            parts += member
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
