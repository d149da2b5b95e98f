"""The zoo: real models on real data that ships in a package. Nothing is downloaded.

`get` gives a `Workload` by name; the models' libraries are imported when a model is built.

>>> import memlab
>>> memlab.workloads.get("vit-digits", num_layers=2).name
'vit-digits'
"""

import dataclasses
import functools
import importlib.util
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from memlab._util.checks import choice, count, number, of_type
from memlab._util.units import is_a, shown
from memlab.errors import ConfigError, WorkloadError
from memlab.workload import Workload
from memlab.workloads.configs import ConfiguredModel, from_config
from memlab.workloads.data import JpegDigits as JpegDigits
from memlab.workloads.finetuned import Finetuned, finetune
from memlab.workloads.language import Gpt, Llama, Lstm
from memlab.workloads.plain import PlainConvNet, PlainMlp, PlainTransformer
from memlab.workloads.published import config_named, known_as, nearest
from memlab.workloads.spec import Spec, lengths_of
from memlab.workloads.vision import DenseNet, ResNet, ViT, VNet

__all__ = ["JpegDigits", "finetune", "from_config", "get", "lengths_of", "names"]

MOST_OF_A_SIZE = 10**7  # the largest number of layers, channels or tokens that makes sense
HIGHEST_DROPOUT = 0.999

MODELS = (
    *(Gpt, Llama, Lstm, ResNet, ViT, DenseNet, VNet),
    *(PlainTransformer, PlainConvNet, PlainMlp),
)
EXTRAS = {"peft": "finetune", "bitsandbytes": "finetune", "torchao": "fp8"}  # of others: zoo


@functools.cache
def specs() -> Mapping[str, Spec]:
    """Return the models of the zoo and their sizes, by name, as `zoo.toml` has them."""
    models: dict[str, Callable[..., Spec]] = {model.__name__: model for model in MODELS}
    rows = tomllib.loads(Path(__file__).with_name("zoo.toml").read_text("utf-8"))
    found = {}
    for name, row in rows.items():
        sizes = {key: tuple(size) if is_a(size, list) else size for key, size in row.items()}
        del sizes["model"]
        found[name] = models[row["model"]](**sizes)
    return found


def check_installed(workload: Any) -> None:
    """Refuse a workload of memlab's own whose packages are missing, before anything is built.

    Raises:
        WorkloadError: the message names them, and the command that installs them.
    """
    made: Any = getattr(getattr(workload, "build_model", None), "__self__", None)
    packages = made.packages if is_a(made, Spec | ConfiguredModel | Finetuned) else ()
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    if missing:
        extras = ",".join(sorted({EXTRAS.get(each, "zoo") for each in missing}))
        verb = "is" if len(missing) == 1 else "are"
        raise WorkloadError(
            f"workload {workload.name!r} needs {' and '.join(missing)}, which {verb} not "
            f"installed; run: pip install 'memlab[{extras}]'"
        )


def names() -> list[str]:
    """Return the names that `get` accepts; the first four run in a second or two on a CPU.

    >>> names()[:4]
    ['gpt-small', 'resnet-digits', 'vit-digits', 'lstm-text']
    """
    return list(specs())


def get(name: str, **options: Any) -> Workload:
    """Return a workload of the zoo.

    Args:
        name: one of `names()`, also in another spelling or as it is published ("vit-l/16").
        **options: what to change in it: `dropout` (0 by default), and its sizes, such as
            `sequence_length` or `image_size`; the fields of its class.

    Raises:
        WorkloadError: the name or an option is unknown; the message lists what there is.

    >>> workload = get("lstm-text", hidden_size=64, sequence_length=48)
    >>> inputs, targets = workload.make_batch(2)  # of 2 samples: tokens, int64
    >>> inputs.shape
    torch.Size([2, 48])
    """
    asked = str.__str__(name) if is_a(name, str) else name
    name = asked if not is_a(asked, str) or asked in specs() else known_as(asked, specs()) or asked
    if is_a(name, str) and name not in specs() and config_named(name):
        if options:
            raise WorkloadError(
                f"{next(iter(options))} is given with {shown(name)}, but options are for memlab's "
                f"own models; memlab.workloads.from_config({shown(name)}) takes tokens or "
                "image_size"
            )
        return from_config(name)
    if not is_a(name, str) or name not in specs():
        hint = nearest(name, specs()) if is_a(name, str) else ""
        raise WorkloadError(f"workload {shown(name)} is unknown{hint}; allowed is one of {names()}")

    spec = specs()[name]
    known = {field.name: field.type for field in dataclasses.fields(spec)}
    if unknown := [option for option in options if option not in known]:
        raise WorkloadError(
            f"{name} has no option {shown(unknown[0])}; allowed is one of {list(known)}"
        )

    given = {option: _checked(option, value, known) for option, value in options.items()}
    chosen = dataclasses.replace(spec, **given)
    in_size = partial(_in_size, name=name, options=dict(sorted(given.items())))
    return dataclasses.replace(chosen.workload(name), sample_size=chosen.sample_size(in_size))


def _in_size(size: int, *, name: str, options: Mapping[str, Any]) -> Workload:
    """Return a workload with these options, but with samples of another size.

    Raises:
        WorkloadError: its samples cannot have this size.
    """
    spec = dataclasses.replace(specs()[name], **options)
    spec.check_size(size)
    return get(name, **{**options, str(spec.size_field): size})


def _checked(option: str, value: Any, types: Mapping[str, Any]) -> Any:
    """Return the value of an option of the zoo.

    Raises:
        WorkloadError: it is not of the option's type, or the size is not allowed.
    """
    size = count(1, MOST_OF_A_SIZE)
    try:
        if option == "layer_type":
            return choice("basic", "bottleneck")(option, value)
        if types[option] is int:
            return size(option, value)
        if types[option] is float:
            return number(0.0, HIGHEST_DROPOUT)(option, value)

        found = of_type(option, value, tuple[Any, ...])
        if not found:
            raise ConfigError(f"{option}={shown(value)} is empty; give at least one number")

        return tuple(size(f"{option}[{index}]", each) for index, each in enumerate(found))
    except ConfigError as error:
        raise WorkloadError(str(error)) from None
