"""How long a report page takes to write, how large it is, and how long a browser takes to open it.

    python -m bench report [--layers 48] [--ranks 64] [--repeat 5]

The page is that of a LLaMA with some layers and a synthetic timeline as long as a real one. Opening
is the time until headless Chromium has run the script and drawn the timeline; the median counts.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import einmpi
from bench.lib.results import write_results
from einmpi.models.config import NAMED
from einmpi.report.html import write_report
from einmpi.units import show_bytes
from tests.lib.paper_llama import llama_program
from tests.lib.timelines import made_up

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


def opening_times(file: Path, repeat: int) -> list[float]:
    """Return the seconds from the start of loading to the drawn page, for each repetition."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        with webdriver.Chrome(
            options, webdriver.ChromeService(shutil.which("chromedriver"))
        ) as browser:
            return [_open(browser, file) for _ in range(repeat)]


def _open(browser: Any, file: Path) -> float:
    browser.get("about:blank")
    browser.get(file.as_uri())
    # The second frame after loading begins when the first one, with all drawings, is done.
    return browser.execute_async_script(
        "const done = arguments[0];"
        "requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() / 1000)))"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    program, shapes, _ = llama_program(NAMED["7B"], 4, 2048, options.layers)
    plan = einmpi.plan(einmpi.program(program, dtype="float32", **shapes), options.ranks)
    timeline = made_up(plan)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        start = time.perf_counter()
        write_report(file, plan, timeline=timeline, program=program, title="LLaMA")
        tensors = len(plan.graph.vertices)
        print(f"{tensors:,} tensors, {plan.ranks} ranks, {len(timeline.spans):,} spans")
        row: dict[str, Any] = {"tensors": tensors, "ranks": plan.ranks}
        row["seconds_to_write"] = time.perf_counter() - start
        row["bytes"] = file.stat().st_size
        print(f"written in {row['seconds_to_write']:.2f} s, {show_bytes(row['bytes'])}")
        if shutil.which("chromium") and shutil.which("chromedriver"):
            seconds = opening_times(file, options.repeat)
            row["seconds_to_open"] = statistics.median(seconds)
            each = ", ".join(f"{value:.2f}" for value in seconds)
            print(f"opened in {statistics.median(seconds):.2f} s ({each})")
        else:
            print("not opened: Chromium or its driver is not installed")
    if options.json:
        write_results(options.json, [row])


if __name__ == "__main__":
    main()
