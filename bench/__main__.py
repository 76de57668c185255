"""python -m bench list, python -m bench all --out DIR, python -m bench NAME ARGUMENTS …

NAME is a script in one of the folders: `paper` (the experiments of the paper, chains and plans),
`kernels` (CPUs, small calls, loops, arrays), `gpu`, `files` (also memory and reports). What they
share is in `lib`.
"""

from __future__ import annotations

import os
import runpy
import sys

from bench import ROOT
from bench.lib.catalogue import first_sentence, scripts

USAGE = "usage: python -m bench list | all --out DIR [--quick] | NAME ARGUMENTS …"


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
    prefer_installed_package()
    file = str(known[name])
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")


def prefer_installed_package() -> None:
    """Measure the einmpi that is installed or on PYTHONPATH, not that of the current folder.

    Processes that a benchmark starts find `bench` on PYTHONPATH.
    """
    sys.path[0:1] = []
    sys.path.append(str(ROOT))
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([given, str(ROOT)] if given else [str(ROOT)])


if __name__ == "__main__":
    main()
