"""Write docs/modules.md from the docstrings of rooms and chapters: python docs/make_modules.py"""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "einmpi"
PAGE = DOCS / "modules.md"
# What to read first, in the order in which a job goes through it.
CHAPTERS = (
    "job/job_file",
    "language/parse",
    "graph/einsum",
    "graph/eingraph",
    "graph/rewrite",
    "planner/mesh",
    "planner/search",
    "planner/make_plan",
    "schedule/layout",
    "schedule/steps",
    "schedule/compute",
    "schedule/lower",
    "schedule/passes",
    "compiled/program",
    "runtime/program",
    "runtime/compute",
    "runtime/transfer",
    "kernels/cpu/dispatch",
    "kernels/reference",
    "comm/base",
    "arrays/dist_array",
    "files/reading",
    "files/writing",
    "loops/running",
)
HEAD = """\
# Modules

<!-- python docs/make_modules.py writes this page: change the docstrings instead. -->

Where to begin. Each module says in its docstring what it is for; an editor shows the rest.

## The chapters of the core

In the order in which [a job goes through them](how_it_works.md).

| chapter | |
|---|---|
"""
ROOMS = """
## Rooms

In the order of [the import rule](architecture.md#rooms-and-the-import-rule).

| room | |
|---|---|
"""


def rooms():
    """The rooms in order, from the table in architecture.md; rooms in one row are one tuple."""
    text = (DOCS / "architecture.md").read_text()
    table = text.split("<!-- rooms -->")[1].split("\n\n")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [tuple(re.findall(r"`([a-z_/]+)`", row)) for row in rows]


def description(path):
    """The first paragraph of a module's docstring on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")


def line_of_room(room):
    folder = PACKAGE / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return f"| `{room}` | {description(path)} |\n"


def page():
    chapters = [f"| `{name}.py` | {description(PACKAGE / f'{name}.py')} |\n" for name in CHAPTERS]
    lines = [line_of_room(room) for row in rooms() for room in row]
    return HEAD + "".join(chapters) + ROOMS + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
