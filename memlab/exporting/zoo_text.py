"""What is left out of the zoo's source in a script: checks of sizes, late imports, `Workload`."""

import ast
import re
from typing import Any

ZOO = "memlab.workloads."
LEFT_OUT = ("workload", "__post_init__")
LATE = "zoo_import"
TYPE_ONLY = re.compile(r" -> [^\n]*\bnpt\.[^\n]*(?=:\n)")  # of a module imported for types only


def is_of_zoo(module: str) -> bool:
    """Return whether a module is part of the zoo."""
    return module.startswith(ZOO)


def imported_at_the_top(text: str) -> tuple[str, list[str]]:
    """Return a text that uses the modules of a library, and the imports that it needs.

    The zoo imports a library where a model is built; a script imports at its top.

    >>> imported_at_the_top('sizes = zoo_import("math").floor(1.5)')
    ('sizes = math.floor(1.5)', ['import math'])
    """
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == LATE
    ]
    text = TYPE_ONLY.sub("", text)
    imports = []
    for node in calls:
        module: Any = ast.literal_eval(node.args[0])
        written = ast.get_source_segment(text, node) or ""
        lines = [x for x in text.split("\n") if x.strip() != f"{module} = {written}"]
        text = "\n".join(lines).replace(written, module)
        imports.append(f"import {module}")
    return text, imports
