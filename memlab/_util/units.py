"""Parse and print bytes, seconds and energy.

Everywhere else sizes are int bytes, times float seconds and energies float joules; only this file
converts them.
Sizes are printed in binary units only (1 GiB = 2**30 bytes), because "GB" can mean two things.
"""

import math
import operator
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from memlab.errors import ConfigError

# Write a person's value as text into a message, a picture or generated Python.
#
# Nothing about such a value can be relied on. Its `__class__` and its `repr` may raise an
# error, its `repr` may be megabytes long or be Python code, and a text may hold quotes,
# newlines, control characters and lone surrogates.

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


KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
MOST_BYTES = 2**63 - 1
BYTES_PER_UNIT = {
    "B": 1,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


def parse_bytes(value: int | str, field: str = "memory_limit") -> int:
    """Return a positive size in bytes from an int (bytes) or text such as "24GiB" or "512 MiB".

    "GB" is read as 10**9 bytes, as the SI defines it. "24G" is refused because it is ambiguous.

    Raises:
        ConfigError: the text is not a size, or the size is not at least one byte.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    field = field if type(field) is str else shown(field)
    allowed = 'an int (bytes) or text such as "24GiB" or "512 MiB"'
    given: Any = value

    if is_a(given, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str.__str__(given))
        unit = (match.group(2) or "B").upper() if match else ""
        if match is None or unit not in BYTES_PER_UNIT or len(match.group(1)) > 20:
            raise ConfigError(f"{field}={shown(value)} is not a size; allowed is {allowed}")
        size = math.floor(float(match.group(1)) * BYTES_PER_UNIT[unit])
    else:
        try:
            if isinstance(given, bool):
                raise TypeError
            size = operator.index(given)
        except Exception:  # not an int, or a person's own class, which may raise anything
            raise ConfigError(
                f"{field}={shown(value)} is not a size; allowed is {allowed}"
            ) from None

    if size < 1:
        raise ConfigError(f"{field}={shown(value)} is below one byte; allowed is {allowed}")
    if size > MOST_BYTES:
        raise ConfigError(f"{field}={shown(value)} is more than any memory; allowed is {allowed}")

    return size


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a size."""
    return -(-size // multiple) * multiple


def with_unit(number: str, most_bytes: int = TIB) -> str:
    """Return the size that is meant by a number without a unit: in GiB, if that is not too much.

    >>> with_unit("8"), with_unit("200", 16 * GIB)
    ('8 GiB', '200 MiB')
    """
    return f"{number.strip()} {'GiB' if float(number) * GIB <= most_bytes else 'MiB'}"


def parse_share(text: str) -> float:
    """Return a share as people type it.

    Raises:
        ValueError: the text is no number.

    >>> parse_share("0,5"), parse_share("40 %")
    (0.5, 0.4)
    """
    number = text.strip().replace(",", ".")
    return float(number.removesuffix("%")) / 100 if number.endswith("%") else float(number)


def format_bytes(num_bytes: float) -> str:
    """Return a size with about three significant digits, in the largest unit that is below it.

    >>> format_bytes(1406142546)
    '1.31 GiB'
    """
    _number("num_bytes", num_bytes)
    units = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
    return _in_largest(num_bytes, units) or f"{num_bytes:.0f} B"


def signed_bytes(num_bytes: int) -> str:
    """Return a difference of sizes with its sign.

    >>> signed_bytes(-512 * 2**20), signed_bytes(0)
    ('-512 MiB', '0 B')
    """
    return f"{'+' if num_bytes > 0 else ''}{format_bytes(num_bytes)}"


def format_seconds(seconds: float) -> str:
    """Return a duration with about three significant digits, in s, ms or us.

    >>> format_seconds(0.4123)
    '412 ms'
    """
    _number("seconds", seconds)
    if found := _in_largest(seconds, {"s": 1.0, "ms": 1e-3}):
        return found
    scaled = seconds / 1e-6
    return f"{scaled:.0f} us" if abs(scaled) >= 1 or not scaled else f"{scaled:.2g} us"


MHZ = 1e6  # a second
HOUR, DAY, KWH = 3600.0, 86400.0, 3.6e6  # seconds, seconds, joules


def format_duration(seconds: float) -> str:
    """Return the time of a whole run, in days, hours or minutes, or as `format_seconds` does.

    >>> format_duration(5400), format_duration(200_000), format_duration(90), format_duration(2)
    ('1.50 h', '2.31 days', '1.50 min', '2.00 s')
    """
    _number("seconds", seconds)
    return _in_largest(seconds, {"days": DAY, "h": HOUR, "min": 60.0}) or format_seconds(seconds)


def format_energy(joules: float) -> str:
    """Return an energy in kWh or Wh, with about three significant digits.

    >>> format_energy(5.4e6), format_energy(36_000), format_energy(0.9)
    ('1.50 kWh', '10.0 Wh', '0.00025 Wh')
    """
    _number("joules", joules)
    found = _in_largest(joules, {"kWh": KWH, "Wh": KWH / 1000})
    return found or f"{joules / KWH * 1000:.3g} Wh"


def _in_largest(number: float, units: Mapping[str, float]) -> str:
    """Return a number in the first of these units that is not above it; "" if all are."""
    for unit, factor in units.items():
        if abs(number) >= factor:
            scaled = number / factor
            digits = sum(abs(scaled) < limit for limit in (100, 10))
            return f"{scaled:.{digits}f} {unit}"
    return ""


def from_milliseconds(milliseconds: float) -> float:
    """Return in seconds what CUDA's events give in milliseconds.

    >>> from_milliseconds(1.5)
    0.0015
    """
    return milliseconds / 1e3


def _number(field: str, value: Any) -> float:
    """Return a number as a float.

    Raises:
        ConfigError: the value is not a number, or too large for a float.
    """
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except Exception:  # too large, or of a person's own class, which may raise anything
        raise ConfigError(
            f"{field}={shown(value)} is not a number; pass an int or a float"
        ) from None


def format_percent(fraction: float) -> str:
    """Return a share or a relative error with one or two significant digits.

    >>> format_percent(0.0125), format_percent(0.473), format_percent(0.0)
    ('1.2 %', '47 %', '0 %')
    """
    percent = 100 * fraction
    return f"{percent:.0f} %" if abs(percent) >= 10 else f"{percent:.2g} %"


def plus_minus(width: float) -> str:
    """Return a relative uncertainty as it is printed after a number; "" if there is none.

    >>> f"1.31 GiB{plus_minus(0.02)}", plus_minus(0.0)
    ('1.31 GiB ± 2 %', '')
    """
    return f" ± {format_percent(width)}" if width else ""


def signed_percent(error: float) -> str:
    """Return a signed relative error.

    >>> signed_percent(-0.0078), signed_percent(0.0), signed_percent(0.123), signed_percent(1e-7)
    ('-0.78 %', '+0.00 %', '+12.3 %', '+1e-05 %')
    """
    digits = 1 if abs(error) >= 0.1 else 2
    rounded = round(100 * error, digits)
    if error and not rounded:
        return f"{100 * error:+.1g} %"
    return f"{rounded + 0.0:+.{digits}f} %"  # 0.0: no minus before a zero
