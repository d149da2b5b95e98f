"""`dumps`: what a notebook or script defines, pickled by value for another process.

cloudpickle does so with functions and classes. Python pickles a function under
`functools.lru_cache` by its name all the same, which another process cannot look up in `__main__`;
here it is sent as the function and the size of its cache, and begins with nothing in it. Left out:
other objects that pickle themselves by name, such as `typing.NewType`.
"""

import functools
import io
import sys
from collections.abc import Callable
from typing import Any

LRU_CACHE = functools._lru_cache_wrapper


def dumps(value: Any) -> bytes:
    """Return a value as bytes that `pickle.loads` reads in another process.

    Raises:
        Exception: any; a person's class may refuse to be pickled.
    """
    with io.BytesIO() as stream:
        pickler()(stream).dump(value)
        return stream.getvalue()


@functools.cache
def pickler() -> Any:
    """Return the pickler class, which takes a stream."""
    import cloudpickle  # late, so that `import memlab` need not wait for it

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Pickles by value also what the decorators of `functools` make."""

        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is LRU_CACHE and not _is_found_by_name(obj):
                parameters = obj.cache_parameters()
                return _cached, (obj.__wrapped__, parameters["maxsize"], parameters["typed"])
            if type(obj) is functools.cached_property:  # it holds a lock up to Python 3.11
                state = {"attrname": obj.attrname, "__doc__": obj.__doc__}
                return functools.cached_property, (obj.func,), state
            return super().reducer_override(obj)

    return Pickler


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _is_found_by_name(function: Any) -> bool:
    """Return whether a process that imports the function's module finds this function there."""
    module = getattr(function, "__module__", None)
    if module in (None, "__main__"):
        return False
    found: Any = sys.modules.get(module)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function
