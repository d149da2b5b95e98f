"""Write a person's value as text into a message, a picture or generated Python.

Nothing about such a value can be relied on. Its `__class__` and its `repr` may raise an error, its
`repr` may be megabytes long or be Python code, and a text may hold quotes, newlines, control
characters and lone surrogates.
"""

import reprlib
from collections.abc import Sequence
from typing import Any

MAX_SHOWN = 80  # characters of a value in a message


class _Repr(reprlib.Repr):
    """A `repr` that stops where a message would cut it off."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = MAX_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        if abs(x) < 10**MAX_SHOWN:
            return repr(x)
        # Python refuses to print an int of more than 4300 digits
        sign = "-" if x < 0 else ""
        return f"{sign}(2**{abs(x).bit_length() - 1} or more)"


_REPR = _Repr()


def is_a(value: Any, kind: Any) -> bool:
    """Return whether a value is an instance of a type; False if its `__class__` raises."""
    try:
        return isinstance(value, kind)
    except Exception:  # a person's own __class__ may raise anything
        return False


def shown(value: Any) -> str:
    """Return the `repr` of a value, cut to one line of at most 80 characters.

    >>> shown("gpt"), len(shown("a" * 10**6))
    ("'gpt'", 80)
    """
    try:
        text = printable(_REPR.repr(value))
    except Exception:  # a person's own __repr__ may raise anything
        text = f"<{type(value).__name__}>"

    if len(text) <= MAX_SHOWN:
        return text
    half = (MAX_SHOWN - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def printable(text: str) -> str:
    r"""Return a text with its control characters and lone surrogates written as escapes.

    >>> printable("two\nlines")
    'two\\nlines'
    """
    text = str.__str__(text)  # a subclass may override isprintable
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them; "" if there are none.

    >>> listed(["step", "saving", "evaluation"])
    'step, saving and evaluation'
    """
    *others, last = names or [""]
    return f"{', '.join(others)} and {last}" if others else last


def in_docstring(text: str) -> str:
    r'''Return a text escaped for use inside the triple quotes of a docstring, on one line.

    >>> print(in_docstring('layers.*"""'))
    layers.*\"\"\"
    '''
    # repr takes single quotes for a text that holds a double one; backslashes come out doubled
    escaped = repr('"' + str.__str__(text))[2:-1]
    return escaped.replace('"', '\\"')


def literal(value: Any) -> str:
    """Return the Python literal of a text, a number, a bool, None or a tuple or list of these.

    Raises:
        TypeError: the value has another type, whose `repr` might be any code.

    >>> literal("layers.*"), literal((1, 2.5))
    ("'layers.*'", '(1, 2.5)')
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    # a subclass may have any repr, so the value is made plain first
    if isinstance(value, str):
        return repr(str.__str__(value))
    if isinstance(value, int):
        return repr(int.__index__(value))
    if isinstance(value, float):
        return repr(float.__float__(value))
    if type(value) in (tuple, list):
        inside = ", ".join(map(literal, value))
        return f"[{inside}]" if type(value) is list else f"({inside}{',' * (len(value) == 1)})"

    raise TypeError(f"{type(value).__name__} has no literal")


def quoted(text: str) -> str:
    r"""Return the literal of a text, in double quotes if that needs no escapes.

    >>> print(quoted("layers.*"), quoted('say "hi"\n'))
    "layers.*" 'say "hi"\n'
    """
    plain = repr(str.__str__(text))
    if plain[0] == "'" and '"' not in plain:
        return f'"{plain[1:-1]}"'
    return plain
