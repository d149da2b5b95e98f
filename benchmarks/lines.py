"""How large is the house: lines of code, files and rooms of memlab, its imports, tests and words.

A line of code is neither docstring, comment, blank nor import, by Python's own parser.

    python -m benchmarks.lines
"""

import ast
from pathlib import Path
from typing import Any

from benchmarks import report

ROOT = Path(__file__).parents[1]


def lines_of(path: Path) -> tuple[int, int]:
    """Return how many lines of a file are code, and how many are imports."""
    text = path.read_text(encoding="utf-8")
    imports: set[int] = set()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if first and ast.get_docstring(node, clean=False) is not None:
                left_out.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    ]
    return len({*code} - imports - left_out), len(imports)


def counted(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return what is counted, a row each."""
    package = root / "memlab"
    files = sorted(package.rglob("*.py"))
    code, imports = (sum(counts) for counts in zip(*map(lines_of, files), strict=True))
    panel = sum(lines_of(path)[0] for path in files if "_panel" in path.parts)
    tests = sum(len(p.read_text().splitlines()) for p in (root / "tests").rglob("*.py"))
    words = len((root / "docs" / "architecture.md").read_text().split())
    rooms = [path for path in package.iterdir() if (path / "__init__.py").exists()]
    return [
        {"what": "lines of code in memlab", "count": code},
        {"what": "of which in _panel", "count": panel},
        {"what": "files", "count": len(files)},
        {"what": "rooms directly under memlab", "count": len(rooms)},
        {"what": "files directly under memlab", "count": len([*package.glob("*.py")])},
        {"what": "lines of code for a line of imports", "count": round(code / imports, 1)},
        {"what": "lines of tests", "count": tests},
        {"what": "words of docs/architecture.md", "count": words},
    ]


def main() -> None:
    """Print the table and write it as JSON."""
    given = report.options(__file__, __doc__ or "")
    before = report.environment()
    rows = counted()
    report.show("The size of the house", rows)
    report.write(given, before, {"rows": rows})


if __name__ == "__main__":
    main()
