"""Whether two functions are the same one, although each was made by a call of its own."""

import types
from functools import partial
from typing import Any

from memlab.arguments.quoting import is_a


def is_same_function(one: Any, other: Any) -> bool:
    """Return whether two functions run the same code on equal values.

    A lambda that is made in every call of another function is the same one each time, whatever
    variables it uses. Values that cannot be compared count as equal.

    >>> def adder(number):
    ...     return lambda value: value + number
    >>> is_same_function(adder(1), adder(2)), is_same_function(adder(1), len)
    (True, False)
    >>> is_same_function(partial(round, ndigits=1), partial(round, ndigits=2))
    False
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False

    if is_a(one, types.FunctionType):
        return all(
            getattr(one, name) == getattr(other, name)
            for name in ("__code__", "__module__", "__qualname__")
        )
    if is_a(one, types.MethodType):
        is_same = is_same_function(one.__func__, other.__func__)
        return is_same and is_same_function(one.__self__, other.__self__)
    if is_a(one, partial):
        return (
            is_same_function(one.func, other.func)
            and _are_same(one.args, other.args)
            and one.keywords.keys() == other.keywords.keys()
            and _are_same(one.keywords.values(), other.keywords.values())
        )

    if is_a(one, type):
        return bool((one.__module__, one.__qualname__) == (other.__module__, other.__qualname__))

    # an object that can be called, or a value; without an __eq__ its class has to do
    compare: Any = type(one).__eq__
    if compare is object.__eq__:
        return True
    try:
        return bool(one == other)
    except Exception:  # tensors and arrays of several numbers are neither true nor false
        return True


def _are_same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(is_same_function, some, others))
