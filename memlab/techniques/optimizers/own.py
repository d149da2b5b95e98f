"""An optimizer that a person's own function makes: checked, and tried for what changes its updates.

Nothing is known of such an optimizer by name. Some techniques update one parameter at a time, or
give each parameter an optimizer of its own, or a part of each to every rank. Whether it then does
the same is tried: small tensors are updated both ways, three times. Adam does the same in each;
one that counts its steps for a group of parameters, or goes by a norm over all, does not.
"""

import contextlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memlab.arguments.libraries import own_line
from memlab.arguments.quoting import printable
from memlab.devices.generators import preserved_random_state
from memlab.errors import ConfigError, MemlabError, UnsupportedError
from memlab.running import is_out_of_memory
from memlab.techniques.offload.offloading import update_one_by_one
from memlab.techniques.optimizers.several import Several, as_one
from memlab.torch_private.dispatch import without_modes

Tensors = list[torch.nn.Parameter]
Kind = Callable[..., torch.optim.Optimizer]
SIZES = (4, 6, 3, 3, 2, 2)  # of small tensors; different ones show what goes by rows
NUM_TRIED = 3  # updates; the first makes the state
CLOSE = {"rtol": 1e-4, "atol": 1e-7}  # kernels for many parameters round in another order


def looked_up(optimizer: Any) -> Any:
    """Return the function that a config has, or that its import path names."""
    if not isinstance(optimizer, str):
        return optimizer
    try:
        return pkgutil.resolve_name(optimizer)
    except Exception as error:  # no module of this name, or its file raises anything
        raise ConfigError(
            f"optimizer={optimizer!r} cannot be imported ({type(error).__name__}: "
            f"{printable(str(error))}); allowed is the path of a class or function, such as "
            "'torch.optim.NAdam': pass the function itself"
        ) from None


def made(said: str, function: Any, given: Any) -> torch.optim.Optimizer:
    """Return the optimizer that a function makes of a model or parameters; several become one.

    Raises:
        ConfigError: it makes none; the message begins with `said`.
    """
    takes = "the model" if isinstance(given, torch.nn.Module) else "the list of parameters"
    allowed = f"allowed is a function of {takes} that returns a torch.optim.Optimizer"
    try:
        found = function(given)
    except MemlabError:
        raise
    except Exception as error:  # a person's own function may raise anything
        if is_out_of_memory(error):
            raise
        line = own_line(error)
        raise ConfigError(
            f"{said} raised {type(error).__name__}: {printable(str(error))}"
            f"{f' ({line})' if line else ''}; {allowed}: mend what it raised"
        ) from error

    is_several = isinstance(found, Mapping) and len(found) > 0
    each = dict(found) if is_several else {"": found}
    for one in each.values():
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(
                f"{said} returned {type(one).__name__}; {allowed}, or a dict of several by name: "
                "let it return torch.optim.AdamW(...)"
            )
    return as_one(found)


def checked(
    said: str, optimizer: torch.optim.Optimizer, model: torch.nn.Module, parameters: Tensors
) -> torch.optim.Optimizer:
    """Return an optimizer that updates all of a model's trainable parameters from gradients alone.

    Raises:
        ConfigError: it updates others, or not all.
        UnsupportedError: it needs more than gradients.
    """
    for one in optimizer.of_each.values() if isinstance(optimizer, Several) else [optimizer]:
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UnsupportedError(
                f"{said} makes a {type(one).__name__}, whose step needs a function that computes "
                "the loss again (a closure); allowed is one that updates from gradients alone: use "
                "torch.optim.AdamW"
            )

    groups = [group["params"] for group in optimizer.param_groups]
    updated = [id(parameter) for group in groups for parameter in group]
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    if twice := [paths.get(each, "") for each in updated if updated.count(each) > 1]:
        raise ConfigError(
            f"{said} updates {twice[0]} twice; allowed is one group for each parameter: give it to "
            "one optimizer alone"
        )
    if foreign := [each for each in updated if each not in paths]:
        raise ConfigError(
            f"{said} updates {len(foreign)} tensors that are no parameters of the model that is "
            "trained, which is built anew for each run; allowed are its parameters: use what the "
            "function is given"
        )
    if missing := [paths[id(p)] for p in parameters if id(p) not in set(updated)]:
        raise ConfigError(
            f"{said} leaves out {len(missing)} trainable parameters, the first of them "
            f"{missing[0]}; allowed is an optimizer of all: give it these too, or set their "
            "requires_grad to False in build_model"
        )
    return optimizer


def one_each(kind: Kind, tensors: Tensors) -> Callable[[], Any]:
    """Return the update by an optimizer for each tensor."""
    every = [kind([tensor]) for tensor in tensors]
    return lambda: [one.step() for one in every]


def one_by_one(
    kind: Kind, tensors: Tensors, given: Callable[[Any], Any] = lambda optimizer: optimizer
) -> Callable[[], Any]:
    """Return the update of one tensor after another, by an optimizer that was changed by `given`.

    Args:
        kind: makes the optimizer.
        tensors: what it updates.
        given: changes the optimizer first.
    """
    whole = update_one_by_one(given(kind(tensors)), lambda *_: contextlib.nullcontext())
    return whole.step


def flat(kind: Kind, tensors: Tensors) -> Callable[[], Any]:
    """Return the update of all tensors as one of one dimension, as of parts of them."""
    one = torch.nn.Parameter(torch.cat([tensor.detach().flatten() for tensor in tensors]))
    optimizer = kind([one])

    def step() -> None:
        one.grad = torch.cat([tensor.grad.flatten() for tensor in tensors])  # type: ignore[union-attr]
        optimizer.step()
        parts = one.detach().split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    return step


DOES = {
    one_each: "updates a parameter in another way when it has an optimizer of its own",
    flat: "does not update each number by itself, and a rank holds parts of parameters",
}
ONE_BY_ONE = "updates a parameter in another way when one after another is updated"


def check_same(
    said: str, setting: str, kind: Kind, change: Callable[..., Any], parameters: Tensors
) -> None:
    """Raise UnsupportedError if a technique would change the updates of an optimizer.

    Args:
        said: the optimizer as the beginning of a sentence.
        setting: the technique, as a person writes it.
        kind: makes the optimizer.
        change: `one_each`, `one_by_one` or `flat`.
        parameters: of the model; small tensors of as many dimensions are tried.
    """
    with without_modes(), preserved_random_state(torch.device("cpu")), torch.enable_grad():
        dims = sorted({parameter.ndim for parameter in parameters})
        draw = torch.Generator().manual_seed(0)
        shapes = [SIZES[:n] for n in (*dims, dims[-1])]
        values = [
            [torch.randn(shape, generator=draw) for shape in shapes] for _ in range(NUM_TRIED + 1)
        ]
        try:
            plain = _updated(kind, lambda kind, tensors: kind(tensors).step, values)
            changed = _updated(kind, change, values)
            is_same, why = torch.allclose(plain, changed, equal_nan=True, **CLOSE), ""
        except Exception as error:  # a person's own function or optimizer may raise anything
            is_same, why = False, f" ({type(error).__name__}: {printable(str(error))})"
    if not is_same:
        raise UnsupportedError(
            f"{setting} with {said}: it {DOES.get(change, ONE_BY_ONE)}; small tensors were tried"
            f"{why}: leave {setting.partition('=')[0]} at its default, or use optimizer='adamw'"
        )


def _updated(kind: Kind, change: Callable[..., Any], values: list[list[torch.Tensor]]) -> Any:
    """Return the values of small tensors after a few updates."""
    tensors = [torch.nn.Parameter(value.clone()) for value in values[0]]
    update = change(kind, tensors)
    for gradients in values[1:]:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient.clone()
        update()
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
