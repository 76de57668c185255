"""Write the tables of the pages that are made from records: python docs/make_tables.py

Such a table stands between the comments <!-- table: NAME --> and <!-- end of table -->.
"""

import re
from pathlib import Path

from einmpi.planner.strategies import ROLES, STRATEGIES

DOCS = Path(__file__).parent


def markdown(head, rows):
    """Return a table in Markdown, given its head and its rows as sequences of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("| --- ", "|---") for cells in lines)


def strategies_table():
    rows = [(f"`{name}`", strategy.description) for name, strategy in STRATEGIES.items()]
    return markdown(("`strategy`", "each vertex is cut"), rows)


def roles_table():
    rows = []
    for name, role in ROLES.items():
        rows.append((f"`{name}`", "list of labels", "empty", role.description))
    return markdown(("key", "type", "default", "meaning"), rows)


# The name of a table in the comment before it → the function that makes it.
TABLES = {"strategies": strategies_table, "roles": roles_table}


def renewed(text):
    """Return the text of a page with each table replaced by what its records say."""

    def replace(match):
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    pattern = r"(<!-- table: ([\w-]+) -->)\n.*?\n(<!-- end of table -->)"
    return re.sub(pattern, replace, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(renewed(page.read_text()))
