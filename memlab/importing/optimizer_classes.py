"""How an optimizer that is already built becomes an optimizer of memlab, by its class."""

from typing import Any

from memlab.arguments.quoting import is_a
from memlab.importing.reading import SourceReading

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
WEIGHT_DECAY = {"adamw": 0.01, "adamw-8bit": 0.01}  # of PyTorch; 0 for the others
LEARNING_RATE = {"adafactor": 1e-2}  # 1e-3 for the others
HYPERPARAMETER = (
    "memlab runs an optimizer with PyTorch's own defaults; memory, time and gradients of a step do "
    "not depend on it"
)
BY_CLASS = {
    "AdamW": "adamw", "Adam": "adam", "Adafactor": "adafactor", "AdamW8bit": "adamw-8bit",
}  # fmt: skip
PACKAGES = ("torch", "bitsandbytes", "transformers")
# what an optimizer is called with that changes neither its state nor its temporaries
HYPERPARAMETERS = {
    "lr", "betas", "eps", "weight_decay", "initial_lr", "dampening",
    "beta2_decay", "d", "alpha", "percentile_clipping",
}  # fmt: skip
OFF = {"amsgrad": False, "maximize": False, "nesterov": False, "capturable": False,
       "differentiable": False}  # fmt: skip


def settings_of(optimizer: Any) -> dict[str, str] | None:
    """Return the settings of memlab for an optimizer; None if memlab has none like it.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> settings_of(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9))
    {'optimizer': 'sgd-momentum', 'optimizer_implementation': 'default'}
    """
    kind = type(optimizer)
    defaults = getattr(optimizer, "defaults", {})
    if kind.__module__.partition(".")[0] not in PACKAGES:
        return None

    if kind.__name__ == "SGD":
        name = "sgd-momentum" if defaults.get("momentum") else "sgd"
    elif kind.__name__ in BY_CLASS:
        name = BY_CLASS[kind.__name__]
    else:
        return None

    return {"optimizer": name, "optimizer_implementation": _implementation(defaults)}


def read_optimizer(reading: SourceReading, name: str, optimizer: Any, model: Any) -> None:
    """Report the optimizer of a model, and each of the values that it was made with."""
    import torch

    reading.add(name, type(optimizer).__name__)
    found = settings_of(optimizer) if is_a(optimizer, torch.optim.Optimizer) else None
    if found is None:
        reading.leave(
            name,
            f"memlab has no optimizer like {type(optimizer).__name__}; the config has the default",
            optimizer="adamw",
        )
        return

    reading.take(name, **found)
    groups = optimizer.param_groups
    num_trainable = sum(p.requires_grad for p in model.parameters())
    if (num_updated := sum(len(group["params"]) for group in groups)) != num_trainable:
        reading.leave(
            name,
            f"it updates {num_updated} parameters of {num_trainable}; memlab updates all, so set "
            "requires_grad=False for the others",
            **found,
        )
    if len(groups) > 1:
        reading.add(f"{name}.param_groups", len(groups))
        reading.leave(f"{name}.param_groups", HYPERPARAMETER)
    for option, value in optimizer.defaults.items():
        if option in ("foreach", "fused", "params"):
            continue
        part = f"{name}.{option}"
        reading.add(part, value)
        _read_option(reading, part, option, value, found["optimizer"])


def hyperparameter(reading: SourceReading, name: str, usual: Any) -> None:
    """Report a learning rate, a decay or the like, which memlab has at PyTorch's default."""
    if name not in reading.values:
        return
    value = reading.values[name]
    if isinstance(value, list):
        value = tuple(value)
    if value == usual:
        reading.same(name, f"optimizer={reading.settings.get('optimizer', 'adamw')}")
    else:
        reading.leave(name, f"{HYPERPARAMETER} (here {usual})")


def usual_value(option: str, optimizer: str) -> Any:
    """Return what memlab's optimizer has for a learning rate, a decay, betas or eps."""
    return {
        "lr": LEARNING_RATE.get(optimizer, 1e-3),
        "weight_decay": WEIGHT_DECAY.get(optimizer, 0.0),
        "betas": ADAM_BETAS,
        "eps": ADAM_EPS,
    }.get(option)


def _read_option(
    reading: SourceReading, part: str, option: str, value: Any, optimizer: str
) -> None:
    if option == "momentum":
        if value in (0, 0.9):
            reading.same(part, f"optimizer={optimizer}")
        else:
            reading.leave(part, f"{HYPERPARAMETER} (here 0.9)")
    elif option in HYPERPARAMETERS:
        hyperparameter(reading, part, usual_value(option, optimizer))
    elif option in OFF:
        reading.leave_unless([OFF[option]], part, "memlab's optimizers have no such option")
    elif option == "decoupled_weight_decay":
        reading.same(part, f"optimizer={optimizer}")
    else:
        reading.leave_unless([None], part, "memlab's optimizers have no such option")


def _implementation(defaults: dict[str, Any]) -> str:
    if defaults.get("fused"):
        return "fused"
    if defaults.get("foreach"):
        return "foreach"
    return "single-tensor" if defaults.get("foreach") is False else "default"
