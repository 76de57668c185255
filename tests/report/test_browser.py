"""The report page in a real browser: it draws, zooms, and responds to pointer and keyboard."""

import json
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import product

import pytest
from in_process import einmpi_here
from paths import ROOT
from timelines import recorded

import einmpi
from einmpi.planner.text.compare import compare
from einmpi.report.graph_picture import PARTIAL, layouts_of
from einmpi.report.html import write_report
from einmpi.report.record import Span, Timeline
from einmpi.schedule.layout import Layout

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
if not CHROMIUM or not DRIVER:
    pytest.skip(
        "there is no Chromium with its driver (Debian: chromium, chromium-driver)",
        allow_module_level=True,
    )
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
wheel_input = pytest.importorskip("selenium.webdriver.common.actions.wheel_input")

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
EVIL = (
    "</script></pre><img src=x onerror=document.title='broken'>"
    "<script>document.title='broken'</script>"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    """The complete page of a run on four ranks, its plan and its timeline."""
    job = einmpi.load(ROOT / "jobs" / "attention.toml")
    plan, timeline = recorded(job, 4)
    file = tmp_path_factory.mktemp("page") / "attention.html"
    write_report(
        file,
        plan,
        comparison=compare(lambda name: einmpi.plan(job, 4, strategy=name)),
        timeline=timeline,
        program=job.source.text,
        title=job.title,
    )
    return file, plan, timeline


@pytest.fixture
def page(browser, attention):
    browser.get(attention[0].as_uri())
    yield browser
    assert browser.get_log("browser") == []


def visible(page):
    """Return the visible part of the timeline, in microseconds."""
    track = page.find_element("id", "track")
    return float(track.get_attribute("data-from")), float(track.get_attribute("data-to"))


def tip(page):
    return page.execute_script(
        "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent"
    )


def over(page, element, x, y):
    """Scroll an element into view and move the pointer to a place in it."""
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    box = element.rect
    actions = webdriver.ActionChains(page)
    actions.move_to_element_with_offset(
        element, x - int(box["width"] / 2), y - int(box["height"] / 2)
    ).perform()


def wheel(page, element, amount):
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    webdriver.ActionChains(page).scroll_from_origin(
        wheel_input.ScrollOrigin.from_element(element), 0, amount
    ).perform()


def settled(read, wanted):
    """Read a value until it is as wanted: the browser may take a moment."""
    for _ in range(600):
        if wanted(value := read()):
            return value
        time.sleep(0.05)
    return value


def painted(page, canvas):
    """Return the number of colours on a canvas."""
    return page.execute_script(
        """const canvas = arguments[0], copy = new OffscreenCanvas(canvas.width, canvas.height);
        const pen = copy.getContext('2d', { willReadFrequently: true }), seen = new Set();
        pen.drawImage(canvas, 0, 0);
        const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let k = 0; k < data.length; k += 4) {
          seen.add(data[k] << 16 | data[k + 1] << 8 | data[k + 2]);
        }
        return seen.size""",
        canvas,
    )


def test_everything_is_there(page, attention):
    assert page.title == "Multi-headed attention"
    heads = [head.text for head in page.find_elements("tag name", "h2")]
    assert heads == [
        "Program",
        "Graph and cuts",
        "Who holds what",
        "Predicted and measured",
        "Timeline",
        "Strategies",
    ]
    assert len(page.find_elements("css selector", "#graph svg rect")) > len(
        attention[1].graph.vertices
    )
    assert len(page.find_elements("css selector", "#tensor-table tbody tr")) == len(
        attention[1].graph.vertices
    )


def test_the_wheel_zooms_and_reset_shows_all(page):
    track = page.find_element("id", "track")
    start, stop = visible(page)
    assert start == 0 and stop > 1
    wheel(page, track, -300)
    left, right = settled(lambda: visible(page), lambda seen: seen != (start, stop))
    assert start < left < right < stop
    wheel(page, track, 300)
    assert settled(lambda: visible(page), lambda seen: seen != (left, right)) == pytest.approx(
        (start, stop), abs=1
    )
    page.find_element("id", "track-in").click()
    left, right = visible(page)
    assert right - left == pytest.approx((stop - start) / 2)
    webdriver.ActionChains(page).move_to_element(track).click_and_hold().move_by_offset(
        -100, 0
    ).release().perform()
    moved = settled(lambda: visible(page), lambda seen: seen != (left, right))
    assert moved[0] > left and moved[1] - moved[0] == pytest.approx(right - left)
    page.find_element("id", "track-reset").click()
    assert visible(page) == (start, stop)


def test_the_pointer_describes_the_step(page, attention):
    track = page.find_element("id", "track")
    longest = max(
        (span for span in attention[2].spans if span.rank == 1),
        key=lambda span: span.end - span.start,
    )
    middle = (longest.start + longest.end) / 2 * 1e6 / visible(page)[1]
    over(
        page, track, round(46 + middle * (track.rect["width"] - 46)), 26 + 26 + 13
    )  # beside names, below times and rank 0
    told = settled(lambda: tip(page), bool)
    assert (
        told.startswith(f"rank 1, {longest.kind} {longest.vertex}: ")
        and " ".join(longest.label.split()) in told
    )


def test_the_keyboard_goes_from_step_to_step(page):
    track = page.find_element("id", "track")
    keys = webdriver.Keys
    track.send_keys(keys.ARROW_RIGHT)
    assert tip(page).startswith("rank 0, load ")
    first = tip(page)
    track.send_keys(keys.ARROW_RIGHT)
    assert tip(page).startswith("rank 0, ") and tip(page) != first
    track.send_keys(keys.ARROW_DOWN)
    assert tip(page).startswith("rank 1, ")
    assert page.find_element("id", "track-said").get_attribute("textContent") == tip(page)
    before = visible(page)
    track.send_keys("+")
    assert visible(page) != before
    track.send_keys("0")
    assert visible(page) == before


def test_tensors_are_painted(page, attention):
    cards = page.find_elements("css selector", "#cards .card")
    assert len(cards) == len(attention[1].graph.vertices)
    for card, vertex in zip(cards[:4], attention[1].graph.vertices, strict=False):
        page.execute_script("arguments[0].scrollIntoView()", card)
        canvases = card.find_elements("tag name", "canvas")
        assert len(canvases) == len(layouts_of(attention[1], vertex.name))
        assert canvases[0].get_attribute("aria-label").startswith(f"{vertex.name}, ")
        assert (
            settled(lambda canvas=canvases[0]: painted(page, canvas), lambda count: count >= 4) >= 4
        )
        over(page, canvases[0], 5, 5)
        assert settled(lambda: tip(page), bool).startswith("rank")


def test_filters_for_a_rank_and_a_tensor(page):
    page.find_element("id", "tensor-filter").send_keys("t3_")
    names = [head.text for head in page.find_elements("css selector", "#cards h3")]
    assert names and all(name.startswith("T3_") for name in names)
    first = "#cards canvas"
    page.execute_script(
        "document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", first
    )

    def colours():
        return painted(page, page.find_element("css selector", first))

    before = settled(colours, lambda count: count >= 4)
    page.find_element("id", "tensor-rank").send_keys("2")
    assert 2 <= settled(colours, lambda count: 2 <= count < before) < before
    page.find_element("id", "table-filter").send_keys("softmax of nothing")
    assert not [
        row
        for row in page.find_elements("css selector", "#tensor-table tbody tr")
        if row.is_displayed()
    ]


def test_dark_differs(page):
    def ground():
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    seen = {}
    for mode in ("light", "dark"):
        page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": mode}]},
        )
        box = page.find_element("css selector", "#graph .s-vertex").value_of_css_property("fill")
        seen[mode] = ground(), box, painted(page, page.find_element("id", "track")) > 2
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert seen["light"][0] == "rgb(255, 255, 255)" and seen["dark"][0] == "rgb(13, 17, 23)"
    assert seen["light"][1] != seen["dark"][1] and seen["light"][2] and seen["dark"][2]


def test_it_fits_a_phone(page):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True},
    )
    assert page.execute_script("return document.documentElement.scrollWidth") <= 390
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize(
    ("name", "ranks"), [("chain", 12), ("attention", 16), ("shortest_path", 7), ("heat", 12)]
)
def test_the_script_finds_the_blocks_that_the_ranks_hold(browser, tmp_path, name, ranks):
    """The script computes who holds what itself; a run uses the same regions."""
    plan = einmpi.plan(einmpi.load(ROOT / "jobs" / f"{name}.toml"), ranks)
    write_report(tmp_path / "page.html", plan)
    browser.get((tmp_path / "page.html").as_uri())
    for number, vertex in enumerate(plan.graph.vertices):
        for k, cuts in enumerate(layouts_of(plan, vertex.name)):
            blocks = browser.execute_script(
                "return blocksOf(arguments[0], arguments[1])", number, k
            )
            held = {rank: set() for rank in range(plan.mesh.ranks)}
            for holders, ranges in blocks:
                for rank in holders:
                    held[rank].add(tuple(map(tuple, ranges)))
            kept = tuple(None if cut < 0 else cut for cut in cuts)
            layout = Layout(plan.mesh, vertex.bound, kept, (), plan.orders_of(vertex.name))
            for rank, found in held.items():
                assert found == set(product(*layout.block(rank))), (vertex.name, cuts, rank)
            assert PARTIAL not in cuts or not vertex.is_input


def test_text_from_users_is_never_executed(browser, tmp_path):
    job = einmpi.program("Z[i] = sum(X[i,j])", X=(8, 8))
    timeline = Timeline(
        2, 1.0, (Span(0, "kernel", EVIL, EVIL, 0.0, 1.0), Span(1, "kernel", "Z", EVIL, 0.0, 1.0))
    )
    write_report(
        tmp_path / "page.html",
        einmpi.plan(job, 2),
        timeline=timeline,
        program=f"Z = 1  # {EVIL}",
        title=EVIL,
    )
    browser.get((tmp_path / "page.html").as_uri())
    assert browser.title == EVIL
    assert browser.find_element("css selector", "#program code").text.endswith(EVIL)
    over(browser, browser.find_element("id", "track"), 300, 36)
    assert EVIL in settled(lambda: tip(browser), bool)
    assert not browser.find_elements("tag name", "img") and browser.get_log("browser") == []


# ---- on paper ------------------------------------------------------------------------------------

PRINTED_WIDTH = 720  # CSS pixels between the margins of a page of A4


def test_on_paper_everything_is_drawn(page):
    """Cards are painted when they come into view, which on paper they never do."""
    painted_at_first = [canvas for canvas in canvases(page) if painted(page, canvas) > 1]
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    everything = canvases(page)
    assert len(everything) > len(painted_at_first)
    for canvas in everything:
        assert painted(page, canvas) > 1
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    root = page.find_element("tag name", "html")
    assert root.get_attribute("class") == ""


def canvases(page):
    return page.find_elements("css selector", "canvas")


def test_on_paper_no_column_is_cut(page):
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    size = {"width": PRINTED_WIDTH, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.execute_script("dispatchEvent(new Event('beforeprint'))")
        too_wide = page.execute_script(
            "return [...document.querySelectorAll('td, th, table, svg, canvas, pre, .scroll')]"
            ".filter((e) => e.getBoundingClientRect().right > innerWidth + 1"
            " || e.scrollWidth > e.clientWidth + 1 && e.tagName !== 'svg')"
            ".map((e) => e.outerHTML.slice(0, 80))"
        )
        assert too_wide == []
    finally:
        page.execute_script("dispatchEvent(new Event('afterprint'))")
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_browser_prints_the_page(page):
    assert len(page.print_page()) > 10_000


@pytest.mark.slow
def test_curves_of_recorded_values_are_drawn(browser, tmp_path):
    """The line of a curve has a size and a colour, inside the picture."""
    job = einmpi.load(ROOT / "jobs" / "power.toml")
    measured = json.loads(einmpi_here(ROOT, ["jobs/power.toml", "--json", "-"]).stdout)
    measured["loop"]["history"] = {"value": [3.0, 5.0, None, 4.0, 4.5], EVIL: [1.0, 2.0]}
    write_report(tmp_path / "loop.html", einmpi.plan(job, 2), measured=measured)
    browser.get((tmp_path / "loop.html").as_uri())
    assert browser.title != "broken"
    drawn = browser.execute_script(
        """
        return [...document.querySelectorAll(".curve-line")].map(line => {
            const box = line.getBoundingClientRect();
            const around = line.closest("svg").getBoundingClientRect();
            const inside = box.left >= around.left && box.right <= around.right
                && box.top >= around.top && box.bottom <= around.bottom;
            return [box.width, box.height, inside, getComputedStyle(line).stroke];
        });
        """
    )
    assert len(drawn) == 3
    for width, height, inside, stroke in drawn:
        assert width > 20 and height > 5 and inside and stroke != "none"


@pytest.mark.slow
def test_the_documentation_works_without_a_server(browser, tmp_path):
    """Links between pages of a site that is opened as a file."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs is not installed (the extra docs)")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    browser.get((site / "index.html").as_uri())
    link = browser.find_element("css selector", "article a[href$='notebooks.html']")
    browser.execute_script("arguments[0].click()", link)
    assert browser.current_url == (site / "notebooks.html").as_uri()
