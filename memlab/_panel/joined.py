"""The page's JavaScript as one ES module, which anywidget takes as text; there is no build step.

Each file becomes the scope of a function, and what it exports the properties of an object:

    import { rint as round } from "./numbers.js";       const { rint: round } = m_numbers;

    export function rint(value) { ... }                 const m_numbers = (() => {
                                                        function rint(value) { ... }
                                                        return { rint: rint };
                                                        })();

A file is not parsed, so only the forms that are in use are known, each at the beginning of a line:
an import of names in braces or of all as one, `export` before `function`, `async function`, `class`
or a `const` of one name, a list of exports, and in the first file `export default`. Anything else
is an error, as is a name that the other file does not export. Comments are kept.
"""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path

PAGE = Path(__file__).parent / "page"

IMPORT = re.compile(
    r"^import (?:\{(?P<names>[^{}]*)\}|\* as (?P<all>[\w$]+)) "
    r"""from ["'](?P<file>\.\.?/[^"']+)["'];$""",
    re.M,
)
EXPORT = re.compile(r"^export (?=(?:(?:async )?function|class|const) ([\w$]+)[ (])", re.M)
LIST = re.compile(r"(?:^|(?<=;))export ?\{([^{}]*)\};?$", re.M)  # minified files: after `;`
DEFAULT = re.compile(r"^export default ", re.M)
OTHER = re.compile(r"^\s*(?:import|export)\b|\bimport\s*[.(]")
COMMENT = re.compile(r"/\*.*?\*/|^\s*(?:\*|//|/\*(?!.*\*/)).*")


class JoiningError(ValueError):
    """A file of the page cannot be joined with the others; says which, and where."""


@functools.cache
def joined(entry: str) -> str:
    """Return one ES module for a file of the page and all that it imports.

    Args:
        entry: path of the file below `page`, such as "estimate.js"; what it exports, the module
            exports.

    Raises:
        JoiningError: a form of import or export that is not known, a cycle, or a name or file that
            is not there.

    >>> "export function estimate(" in joined("estimate.js")
    True
    """
    exports: dict[str, set[str]] = {}
    scopes: list[str] = []
    linked = _linked(entry, exports, scopes, ())
    exported = DEFAULT.sub("", linked)
    _exports_of(entry, exported)
    return "\n".join([*scopes, linked])


def _scope(
    file: str, exports: dict[str, set[str]], scopes: list[str], above: tuple[str, ...]
) -> None:
    """Append a file as the scope of a function, after those that it imports."""
    text, names = _exports_of(file, _linked(file, exports, scopes, above))
    exports[file] = set(names)
    returned = ", ".join(f"{name}: {own}" for name, own in names.items())
    scopes.append(
        f"const {_variable(file)} = (() => {{\n{text}\nreturn {{ {returned} }};\n}})();\n"
    )


def _linked(
    file: str, exports: dict[str, set[str]], scopes: list[str], above: tuple[str, ...]
) -> str:
    """Return the text of a file whose imports are constants on its first line.

    Args:
        file: below `page`.
        exports: the names that each file exports whose scope was written.
        scopes: written so far; those of files that this one imports are added.
        above: the files that led to this one.
    """
    text = (PAGE / file).read_text(encoding="utf-8")
    constants = []
    for found in IMPORT.finditer(text):
        at = f"{file}, line {_line(text, found.start())}"
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), found["file"]))
        if target in (*above, file):
            raise JoiningError(f"{at}: {' imports '.join([*above, file, target])}, in a cycle")
        if target.startswith("..") or not (PAGE / target).is_file():
            raise JoiningError(f"{at}: there is no {target} in {PAGE.name}")
        if target not in exports:
            _scope(target, exports, scopes, (*above, file))
        if found["all"]:
            constants.append(f"const {found['all']} = {_variable(target)}; ")
            continue
        names = _pairs(found["names"])
        missing = sorted(set(names.values()) - exports[target])
        if missing:
            raise JoiningError(f"{at}: {target} does not export {', '.join(missing)}")
        bound = ", ".join(f"{theirs}: {own}" for own, theirs in names.items())
        constants.append(f"const {{ {bound} }} = {_variable(target)}; ")
    return "".join(constants) + IMPORT.sub(lambda found: "\n" * found[0].count("\n"), text)


def _exports_of(file: str, text: str) -> tuple[str, dict[str, str]]:
    """Return the text without exports, and the name of each in the file by that outside of it."""
    names = {name: name for name in EXPORT.findall(text)}
    for found in LIST.findall(text):
        names |= _pairs(found)
    text = LIST.sub(lambda found: "\n" * found[0].count("\n"), EXPORT.sub("", text))
    for number, line in enumerate(text.splitlines(), 1):
        if OTHER.search(COMMENT.sub("", line)):
            raise JoiningError(
                f"{file}, line {number}: {line.strip()[:60]!r} is none of the forms that "
                "memlab/_panel/joined.py knows"
            )
    return text, names


def _pairs(names: str) -> dict[str, str]:
    """Return `a, b as c` as {"a": "a", "c": "b"}."""
    pairs = [name.split(" as ") for name in names.replace("\n", " ").split(",") if name.strip()]
    return {pair[-1].strip(): pair[0].strip() for pair in pairs}


def _variable(file: str) -> str:
    return "m_" + re.sub(r"\W", "_", file.removesuffix(".js"))


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
