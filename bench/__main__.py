"""python -m bench list, python -m bench all --out DIR, python -m bench NAME ARGUMENTS …

The last form is `python bench/NAME.py ARGUMENTS …`: modules of this folder import each other by
their plain names, so the folder takes the place of the current one on the path of imports.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from bench.catalogue import first_sentence

FOLDER = Path(__file__).resolve().parent
USAGE = "usage: python -m bench list | all --out DIR [--quick] | NAME ARGUMENTS …"


def scripts() -> dict[str, Path]:
    """Return the files that can be run, by name."""
    found = {}
    for file in sorted(FOLDER.glob("*.py")):
        if not file.name.startswith("__") and '\nif __name__ == "__main__":' in file.read_text():
            found[file.stem] = file
    return found


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        return
    name, *arguments = sys.argv[1:]
    known = scripts()
    if name == "list":
        for each, file in known.items():
            print(f"{each:14} {first_sentence(file)}")
        return
    if name not in known:
        sys.exit(f"there is no benchmark {name!r}; {USAGE}")
    file = known[name]
    sys.argv = [str(file), *arguments]
    sys.path[0] = str(FOLDER)
    runpy.run_path(str(file), run_name="__main__")


if __name__ == "__main__":
    main()
