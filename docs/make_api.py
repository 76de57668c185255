"""Writes docs/python_api.md from the docstrings of einmpi's public names: python docs/make_api.py"""

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import einmpi
from einmpi.compiled.program import Compiled
from einmpi.planner.plan import Plan

PAGE = Path(__file__).with_name("python_api.md")
FUNCTIONS = ("load", "program", "plan", "run", "compile", "open_dataset", "einsum", "reference")
# Each with what an object of it is called on the page.
CLASSES = {
    einmpi.DistArray: "x",
    Compiled: "compiled",
    Plan: "plan",
    einmpi.Job: "",
    einmpi.EinmpiError: "",
    einmpi.InputError: "",
}
HEAD = """\
# Python

<!-- python docs/make_api.py writes this page: change the docstrings instead. -->

What `import einmpi` gives. [How to use it under mpirun](howto_python.md) has whole programs. The examples here are for
one process, after `import numpy as np` and `import einmpi`.
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
    """A docstring as Markdown: its examples become blocks that the tests run."""
    text = inspect.getdoc(thing)
    assert text, f"{thing} has no docstring"
    return re.sub(
        r"^>>> (.|\n)*?(?=\n\n|\Z)",
        lambda found: f"```pycon\n{found[0]}\n```",
        text,
        flags=re.MULTILINE,
    )


def members(kind):
    """The properties and methods that a class defines, in the order of the source.

    Those of Compiled, but for its call, are steps of a run that the command line takes one by one.
    """
    own = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("einmpi."):
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
        elif inspect.isfunction(member) and (name == "__call__" or kind is not Compiled):
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
        if is_dataclass(kind):
            parts.append("Fields: " + ", ".join(f"`{field.name}`" for field in fields(kind)) + ".")
        for member in members(kind):
            parts += member
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
