"""Curves of recorded values in the report page."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st
from in_process import einmpi_here
from paths import ROOT

from einmpi.report.html import MOST_POINTS, curves

VALUES = st.lists(
    st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.none(), st.booleans()),
    min_size=1,
    max_size=40,
)


def points_of(html):
    """The points of all curves of a page, as pairs of numbers."""
    root = ElementTree.fromstring(html)
    found = []
    for line in root.iter("polyline"):
        found += [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    for circle in root.iter("circle"):
        found.append((float(circle.get("cx")), float(circle.get("cy"))))
    return found


@given(VALUES)
def test_all_values_are_inside_the_picture(values):
    points = points_of(curves({"loop": {"history": {"a<b": values}}}))
    assert len(points) == sum(value is not None for value in values)
    for x, y in points:
        assert 0 <= x <= 460 and 0 <= y <= 190


def test_a_curve_goes_up_where_values_do():
    html = curves({"loop": {"history": {"loss": [1.0, 2.0, None, 4.0, 3.0]}}})
    (_, y0), (_, y1), (_, y3), (_, y4) = points_of(html)
    assert y0 > y1 > y4 > y3 and html.count("<polyline") == 2
    assert "loss, last 3" in html


def test_values_over_many_orders_of_magnitude_are_logarithmic():
    html = curves({"loop": {"history": {"turned": [10.0**-k for k in range(10)]}}})
    heights = [y for _, y in points_of(html)]
    steps = [after - before for before, after in itertools.pairwise(heights)]
    assert max(steps) - min(steps) < 0.3 and "(log)" in html


def test_long_histories_keep_their_extremes():
    values = [math.sin(k / 9) for k in range(10**5)]
    values[77_777] = 5.0
    points = points_of(curves({"loop": {"history": {"wave": values}}}))
    assert len(points) <= MOST_POINTS + 2
    assert min(y for _, y in points) == 10


def test_several_loops_and_complex_values():
    history = {"loops": [{"history": {"s": [1]}}, {"history": {"s": [[3.0, 4.0], [0.0, 1.0]]}}]}
    html = curves(history)
    assert "loop 1: s, last 1" in html and "loop 2: s, last 1" in html
    assert curves({}) == "" == curves({"loop": {"history": {}}})


def test_the_page_of_a_run_has_curves(tmp_path):
    done = einmpi_here(ROOT, ["jobs/power.toml", "--report", str(tmp_path / "page.html")])
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert re.search(r'<section id="history">\s*<h2>Recorded values</h2>', page)
    assert page.count('<figure class="curve">') == 2
