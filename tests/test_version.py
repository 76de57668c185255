"""The version that is released: one number in the package, the citation and the changelog."""

import re

from paths import ROOT

import einmpi


def test_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1] == einmpi.__version__
    released = re.findall(
        r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert released[0][0] == einmpi.__version__
    assert re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)[1] == released[0][1]
