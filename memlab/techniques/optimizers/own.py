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

from memlab._util.functions import own_line
from memlab._util.torch_private.tensors import without_modes
from memlab._util.units import printable
from memlab.devices.generators import preserved_random_state
from memlab.errors import ConfigError, MemlabError, UnsupportedError
from memlab.running import is_out_of_memory
from memlab.techniques.offload.offloading import update_one_by_one

# Several optimizers used as one, each for its own parameters; and Muon, which needs another
# one.
#
# `torch.optim.Muon` orthogonalises the update of a matrix. Its docs leave all that is no
# matrix of a hidden layer, such as biases and embeddings, to AdamW.
#
# It is plain PyTorch, of which exported scripts contain what they call.


class Several(torch.optim.Optimizer):
    """Optimizers that share one state and one list of parameter groups.

    Attributes:
        of_each: the optimizers by name, in the order in which they update.
    """

    def __init__(self, of_each: Mapping[str, torch.optim.Optimizer]) -> None:
        every = list(of_each.values())
        super().__init__([p for one in every for g in one.param_groups for p in g["params"]], {})
        self.param_groups = [group for one in every for group in one.param_groups]
        for one in every:
            self.state.update(one.state)
        self.of_each = of_each
        self.state = self.state

    def __setattr__(self, name: str, value: Any) -> None:
        """Give a new state to each of the optimizers too."""
        super().__setattr__(name, value)
        if name == "state":
            for one in vars(self).get("of_each", {}).values():
                one.state = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give each of the optimizers the state and its groups, which `load_state_dict` makes."""
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for one in vars(self).get("of_each", {}).values():  # a deep copy has none yet
            own = [next(groups) for _ in one.param_groups]
            one.__setstate__({"state": self.state, "param_groups": own})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters of each."""
        for one in self.of_each.values():
            one.step()

    def train(self) -> None:
        """Put those that have two modes into that of training."""
        for one in self.of_each.values():
            getattr(one, "train", lambda: None)()


def as_one(found: Any) -> torch.optim.Optimizer:
    """Return one optimizer for a dict of several, ready to train."""
    optimizer: torch.optim.Optimizer = Several(found) if isinstance(found, Mapping) else found
    # schedule-free optimizers have two modes, as modules do
    getattr(optimizer, "train", lambda: None)()
    return optimizer


def muon_and_adamw(
    model: torch.nn.Module, lr: float
) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Return a function of parameters that gives Muon the matrices and AdamW all others."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        parts: dict[str, list[torch.nn.Parameter]] = {"muon": [], "adamw": []}
        for parameter in parameters:
            is_matrix = parameter.ndim == 2 and not parameter.is_complex()
            of_muon = is_matrix and id(parameter) not in embeddings
            parts["muon" if of_muon else "adamw"].append(parameter)
        kinds = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
        return Several({name: kinds[name](own, lr=lr) for name, own in parts.items() if own})

    return make


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


def made_optimizer(said: str, function: Any, given: Any) -> torch.optim.Optimizer:
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


def checked_optimizer(
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
