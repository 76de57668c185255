"""Write the tables of the pages that are made from records: python docs/make_tables.py

Such a table stands between the comments <!-- table: NAME --> and <!-- end of table -->.
"""

import re
from pathlib import Path

from einmpi.files.formats import all_formats
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.matrices import MATRIX_FUNCTIONS, result_names
from einmpi.graph.operations import OPERATIONS
from einmpi.job.settings import BACKENDS, SETTINGS
from einmpi.kernels.cpu.blas_library.records import BLAS_LIBRARIES
from einmpi.language.macros import MACROS
from einmpi.language.matrices import call_form
from einmpi.planner.strategies import ROLES, STRATEGIES
from einmpi.process.environment import VARIABLES
from einmpi.training.settings import optimizers

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


def settings_table(table):
    """Return the settings that are keys of a table of job files."""
    rows = []
    for name, setting in SETTINGS.items():
        if setting.table == table:
            default = setting.default_text or f"`{str(setting.default).lower()}`"
            flag = f"`{setting.flag}`" if setting.help else ""
            cells = [f"`{name}`", setting.kind.in_files, default, flag, setting.documentation]
            rows.append(cells)
    return markdown(("key", "type", "default", "flag", "meaning"), rows)


def yes_or_no(value):
    return "yes" if value else "no"


def aggregations_table():
    rows = []
    for name, record in AGGREGATIONS.items():
        empty = "error" if record.empty is None else str(record.empty)
        complex_too = yes_or_no(record.takes_complex)
        cells = [f"`{name}`", record.documentation, f"`{record.symbol}`", empty]
        rows.append([*cells, record.result_text, complex_too])
    head = ["aggregation", "⊕", "printed as", "of no values", "dtype of the result", "complex"]
    return markdown(head, rows)


def operators_table():
    found = [record for record in OPERATIONS.values() if not record.is_function]
    rows = []
    for record in sorted(found, key=lambda record: record.precedence):
        written = f"{record.symbol}x" if record.arity == 1 else record.name
        escaped = written.replace("|", r"\|")
        rows.append([f"`{escaped}`", record.documentation, yes_or_no(record.takes_complex)])
    return markdown(["operator", "meaning", "complex"], rows)


def functions_table():
    rows = []
    for record in OPERATIONS.values():
        if record.is_function and not record.is_cast:
            complex_too = yes_or_no(record.takes_complex)
            rows.append([f"`{record.call_text()}`", record.documentation, complex_too])
    return markdown(["function", "meaning", "complex"], rows)


def matrices_table():
    rows = []
    for record in MATRIX_FUNCTIONS.values():
        results = ", ".join(f"`{call}`" for call in result_names(record) if call != record.name)
        shared = yes_or_no(record.on_grid)
        rows.append([f"`{call_form(record)}`", record.documentation, results, shared])
    head = ["statement", "meaning", "results alone", "ranks share one matrix"]
    return markdown(head, rows)


def macros_table():
    rows = []
    for name, macro in MACROS.items():
        call = f"`{name}[L](x)`" if macro.needs_labels else f"`{name}(x)`"
        if macro.reduces:
            call += f" or `{name}[L](x)`"
        options = ", ".join(f"`{key}={value}`" for key, value in macro.options.items())
        definition = macro.body.replace("\n", "; ")
        rows.append([call, macro.documentation, f"`{definition}`", options])
    return markdown(["macro", "meaning", "definition", "options"], rows)


def dtypes_table():
    rows = []
    for name, record in DTYPES.items():
        in_files = f"`{record.file_dtype}`"
        rows.append([f"`{name}`", record.documentation, str(record.itemsize), in_files])
    return markdown(["dtype", "values", "bytes", "in output files"], rows)


def formats_table():
    rows = []
    for known in all_formats():
        suffixes = ", ".join(f"`{suffix}`" for suffix in known.suffixes)
        key = f"`{known.key}`" if known.key else "none"
        access = "read" if known.write is None else "read, write"
        short_form = f"`{known.short_form}`"
        rows.append((known.name, suffixes, key, short_form, access, known.documentation))
    return markdown(("format", "suffixes", "key", "short form", "access", "contents"), rows)


def backends_table():
    rows = [(f"`{known.name}`", known.documentation) for known in BACKENDS.values()]
    return markdown(("`backend`", "computes on"), rows)


def blas_table():
    rows = [
        (
            "`auto`",
            "the first of the libraries below that is installed and made for this machine, "
            "else numpy's",
        ),
        ("`numpy`", "the library that numpy brings, usually OpenBLAS"),
    ]
    rows += [(f"`{known.name}`", known.documentation) for known in BLAS_LIBRARIES]
    return markdown(("`blas`", "which library"), rows)


def variables_table():
    rows = []
    for variable in VARIABLES:
        names = ", ".join(f"`{name}`" for name in variable.names)
        rows.append((names, variable.values, variable.default, variable.documentation))
    return markdown(("variable", "value", "default", "meaning"), rows)


def optimizers_table():
    rows = []
    for name, record in optimizers().items():
        steps = []
        for tensor, text in record.state.items():
            steps.append(f"{tensor} = {text.replace('_next', '')}")
        update = record.update
        for tensor, text in record.numbers.items():
            update = update.replace(f"{{{tensor}}}", f"({text})" if " " in text else text)
        steps.append(f"W = {update.replace('_next', '')}")
        if any(f"{{{tensor}}}" in record.update for tensor in record.state):
            steps.reverse()  # it reads its state before that changes
        formula = "; ".join(steps).replace("{kept}", "W").replace("{count}", "t")
        formula = f"`{formula.replace('{', '').replace('}', '')}`"
        if record.between:
            formula = "[below](#matrices)"
        options = [f"`rate = {record.rate:g}`"]
        if record.decay:
            options.append(f"`decay = {record.decay:g}`")
        for key, option in record.options.items():
            options.append(f"`{key} = {option.default:g}`")
        rows.append([f"`{name}`", record.meaning, formula, ", ".join(options)])
    return markdown(["`name`", "meaning", "update", "options"], rows)


# The name of a table in the comment before it → the function that makes it.
TABLES = {
    "strategies": strategies_table,
    "roles": roles_table,
    "plan-settings": lambda: settings_table("plan"),
    "run-settings": lambda: settings_table("run"),
    "aggregations": aggregations_table,
    "operators": operators_table,
    "functions": functions_table,
    "macros": macros_table,
    "matrices": matrices_table,
    "dtypes": dtypes_table,
    "formats": formats_table,
    "backends": backends_table,
    "blas": blas_table,
    "variables": variables_table,
    "optimizers": optimizers_table,
}


def renewed(text):
    """Return the text of a page with each table replaced by what its records say."""

    def replace(match):
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    pattern = r"(<!-- table: ([\w-]+) -->)\n.*?\n(<!-- end of table -->)"
    return re.sub(pattern, replace, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(renewed(page.read_text()))
