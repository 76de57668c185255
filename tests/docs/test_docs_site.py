"""The pages as a whole: links work, generated pages are up to date, the site has every page."""

import re
import runpy

import pytest
from paths import ROOT

import einmpi

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
OUTSIDE = ("http://", "https://")


def prose(path):
    """Return the lines of a page without blocks, comments and code."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [
        re.sub(r"`[^`]*`", "code", line) for line in text.split("\n") if not line.startswith("    ")
    ]


def anchors(path):
    """Return the anchors of a page: headings in lower case, - for spaces, no punctuation."""
    found = set()
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(path))):
        if link.startswith(OUTSIDE):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name}: {link}: there is no such file"
        # A page of the site sees nothing but the site.
        assert path.parent == ROOT or target.is_relative_to(DOCS), (
            f"{path.name}: {link} leads out of docs"
        )
        if anchor:
            assert anchor in anchors(target), (
                f"{path.name}: {link}: {target.name} has no such heading"
            )


def test_python_page_equals_the_docstrings():
    script = runpy.run_path(str(ROOT / "docs" / "make_api.py"), run_name="make_api")
    page = script["PAGE"].read_text()
    assert page == script["page"](), "python docs/make_api.py writes it anew"
    for name in einmpi.__all__:
        assert name == "__version__" or f"\n### {name}\n" in page, (
            f"docs/python_api.md says nothing about {name}"
        )


def test_modules_page_equals_the_docstrings():
    script = runpy.run_path(str(ROOT / "docs" / "make_modules.py"), run_name="make_modules")
    assert script["PAGE"].read_text() == script["page"](), "python docs/make_modules.py writes it"
    for path in (ROOT / "einmpi").rglob("*.py"):
        assert script["description"](path), f"{path} has no docstring"


def test_tables_equal_the_records():
    script = runpy.run_path(str(ROOT / "docs" / "make_tables.py"), run_name="make_tables")
    found = set()
    for path in DOCS.rglob("*.md"):
        text = path.read_text()
        found |= set(re.findall(r"<!-- table: ([\w-]+) -->", text))
        assert text == script["renewed"](text), (
            f"{path.name}: python docs/make_tables.py writes its tables anew"
        )
    assert found == set(script["TABLES"])


def test_site_has_every_page():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"^ +- .*: (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_files_that_pages_name_exist():
    for path in PAGES:
        for name in re.findall(r"`((?:[\w.]+/)+\w+\.(?:py|c|toml))`", path.read_text()):
            is_there = (ROOT / name).exists() or (ROOT / "einmpi" / name).exists()
            assert is_there or path.name == "CHANGELOG.md", f"{path.name}: there is no {name}"
