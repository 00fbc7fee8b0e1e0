"""Write the notebooks of docs/tutorials from the pages that have Python in them.

Run with `make docs`. A page is the source: each block of Python becomes a cell, and the text
between two blocks another one.
"""

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tutorials"
PAGES = ("first_port", "training_step", "fitting_a_slice")
_PYTHON = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
    """Return the blocks of Python in a page."""
    return [match[1] for match in _PYTHON.finditer(text)]


def notebook(text: str) -> str:
    """Return a page as a notebook."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(_PYTHON.split(text)):
        source = part.strip("\n")
        if not source:
            continue
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        cell["source"] = source.splitlines(keepends=True)
        if number % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            # Links of a page lead to pages, which lie beside the notebook too.
            cell |= {"cell_type": "markdown"}
        cells.append(dict(sorted(cell.items())))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    found = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write each notebook beside its page."""
    for name in PAGES:
        page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        (FOLDER / f"{name}.ipynb").write_text(notebook(page), encoding="utf-8")


if __name__ == "__main__":
    main()
