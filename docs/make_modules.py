"""Write docs/modules.md from the docstrings of all modules: python docs/make_modules.py"""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "einmpi"
PAGE = DOCS / "modules.md"
HEAD = """\
# Modules

<!-- python docs/make_modules.py writes this page: change the docstrings instead. -->

Every module of the package in a sentence or two, room by room, in the order of
[the import rule](architecture.md#rooms-and-the-import-rule).
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


def section(room):
    folder = PACKAGE / room
    if not folder.is_dir():
        return f"\n## {room}\n\n{description(folder.with_suffix('.py'))}\n"
    lines = [f"\n## {room}\n", description(folder / "__init__.py"), "", "| module | |", "|---|---|"]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(f"| `{path.stem}` | {description(path)} |")
    known_rooms = {name for row in rooms() for name in row}
    for path in sorted(folder.glob("*/*.py")):
        inner = path.parent.name
        is_in_room = f"{room}/{inner}" not in known_rooms
        if is_in_room and path.name != "__init__.py":
            lines.append(f"| `{inner}/{path.stem}` | {description(path)} |")
    return "\n".join(lines) + "\n"


def page():
    return HEAD + "".join(section(room) for row in rooms() for room in row)


if __name__ == "__main__":
    PAGE.write_text(page())
