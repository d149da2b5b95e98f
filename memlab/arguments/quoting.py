"""A person's values as text: in a message, in a picture, in generated Python; and their kind.

Such a value may be of any kind. Its `__class__` may raise; its `repr` may raise, be megabytes long,
or be Python code; a text may hold quotes, newlines, control characters and halves of surrogate
pairs.
"""

import reprlib
from typing import Any

MAX_SHOWN = 80  # characters of a value in a message


class _Repr(reprlib.Repr):
    """Prints containers and texts no further than a message shows them."""

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
    """Return whether a value is of a kind, also where it lies about its class by raising."""
    try:
        return isinstance(value, kind)
    except Exception:  # a person's own __class__ may raise anything
        return False


def shown(value: Any) -> str:
    """Return a value as a message shows it: its `repr`, on one line of at most 80 characters.

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
    text = str.__str__(text)  # of a subclass, which may say anything about itself
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def in_docstring(text: str) -> str:
    r'''Return a text as it stands between the triple quotes of a docstring, on one line.

    >>> print(in_docstring('layers.*"""'))
    layers.*\"\"\"
    '''
    # repr takes single quotes for a text that holds a double one; backslashes come out doubled
    escaped = repr('"' + str.__str__(text))[2:-1]
    return escaped.replace('"', '\\"')


def literal(value: Any) -> str:
    """Return the Python literal of a text, a number, a bool, None or a tuple or list of these.

    Raises:
        TypeError: it is nothing of the kind, so that its `repr` might be any code.

    >>> literal("layers.*"), literal((1, 2.5))
    ("'layers.*'", '(1, 2.5)')
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    # of a subclass, whose own repr may be anything, the plain value
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
