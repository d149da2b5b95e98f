"""Several optimizers used as one, each for its own parameters; and Muon, which needs another one.

`torch.optim.Muon` orthogonalises the update of a matrix. Its docs leave all that is no matrix of a
hidden layer, such as biases and embeddings, to AdamW.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch


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
