"""Match the arguments of a call with the parameters of a function, or say what it takes instead."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from memlab.arguments.quoting import shown
from memlab.errors import ArgumentError


def bound_arguments(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments by the names of parameters.

    Raises:
        ArgumentError: they do not go with the parameters; a name that is none is said first.
    """
    known = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    wrong = next((given for given in kwargs if given not in known and not takes_any), None)
    if wrong is not None:
        near = difflib.get_close_matches(wrong, list(known), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ArgumentError(
            f"{name} has no argument {wrong}={shown(kwargs[wrong])}{hint}; allowed are "
            f"{', '.join(known)}"
        )
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{name}: {error}; allowed are {', '.join(known)}") from None
