"""The zoo: real models on real data that ships in a package. Nothing is downloaded.

`get` gives a `Workload` by name; the models' libraries are imported when a model is built.

- `language.py`, `vision.py`, `plain.py`: the models; `data.py`: what they are trained on;
  `sizes.py`: which other sizes of a sample they can have.
- `configs.py`: a workload of a config of transformers; `published.py`: configs that memlab knows by
  the name of their model; `generation_caches.py`: caches of keys and values.
- `finetuned.py`: adapters and bases in fewer bits, which `quantizing.py` makes.

>>> import memlab
>>> memlab.workloads.get("vit-digits", num_layers=2).name
'vit-digits'
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

from memlab._util.checks import choice, count, number, of_type
from memlab._util.units import is_a, shown
from memlab.errors import ConfigError, WorkloadError
from memlab.workload import Workload
from memlab.workloads import sizes
from memlab.workloads.configs import ConfiguredModel, from_config
from memlab.workloads.data import JpegDigits as JpegDigits
from memlab.workloads.finetuned import finetune, made_of
from memlab.workloads.language import Gpt, Llama, Lstm
from memlab.workloads.plain import PlainConvNet, PlainMlp, PlainTransformer
from memlab.workloads.published import config_named, known_as, nearest
from memlab.workloads.sizes import lengths_of
from memlab.workloads.vision import DenseNet, ResNet, ViT, VNet

__all__ = ["JpegDigits", "finetune", "from_config", "get", "lengths_of", "names"]

MOST_OF_A_SIZE = 10**7  # the largest number of layers, channels or tokens that makes sense
HIGHEST_DROPOUT = 0.999

Spec = (
    Gpt | Llama | Lstm | ResNet | ViT | DenseNet | VNet | PlainTransformer | PlainConvNet | PlainMlp
)

SPECS: dict[str, Spec] = {
    "gpt-small": Gpt(),
    "resnet-digits": ResNet(),
    "vit-digits": ViT(),
    "lstm-text": Lstm(),
    "densenet-digits": DenseNet(),
    "vnet-digits": VNet(),
    "gpt2-medium": Gpt(
        num_layers=24, hidden_size=1024, num_heads=16, sequence_length=1024, vocab_size=50257
    ),
    "resnet-50": ResNet(
        image_size=224,
        num_channels=3,
        embedding_size=64,
        hidden_sizes=(256, 512, 1024, 2048),
        depths=(3, 4, 6, 3),
        layer_type="bottleneck",
        num_labels=1000,
    ),
    "vit-large": ViT(
        image_size=224,
        patch_size=16,
        num_channels=3,
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        num_labels=1000,
    ),
    "llama-1b": Llama(),
    "lstm-large": Lstm(hidden_size=1500, num_layers=3, sequence_length=512),
    # the sizes of the checkpointing repository (pytorch_memonger, 2018): those of its word language
    # model and its VNet, and the depth of its ResNet for 32 x 32 images, whose stem does not divide
    # the sizes by four as ours does
    "lstm-words": Lstm(hidden_size=200, num_layers=1, sequence_length=800, vocab_size=33278),
    "vnet": VNet(volume_size=(128, 128, 64)),
    "resnet-1001": ResNet(
        image_size=128,
        num_channels=3,
        embedding_size=16,
        hidden_sizes=(64, 128, 256),
        depths=(111, 111, 111),
        layer_type="bottleneck",
        segment_length=11,
    ),
    "densenet-121": DenseNet(
        image_size=224,
        num_channels=3,
        embedding_size=64,
        growth_rate=32,
        depths=(6, 12, 24, 16),
        num_labels=1000,
    ),
    # these and the LSTMs need torch alone
    "plain-transformer": PlainTransformer(),
    "plain-convnet": PlainConvNet(),
    "plain-mlp": PlainMlp(),
}

PACKAGES: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((Gpt, Llama, ConfiguredModel), ("transformers",)),
    **dict.fromkeys((ResNet, ViT), ("transformers", "sklearn")),
    **dict.fromkeys((DenseNet, VNet), ("monai", "sklearn")),
}
"""What builds the models of these, and where their data is from."""
EXTRAS = {"peft": "finetune", "bitsandbytes": "finetune", "torchao": "fp8"}  # of others: zoo


def check_installed(workload: Any) -> None:
    """Refuse a workload of memlab's own whose packages are missing, before anything is built.

    Raises:
        WorkloadError: the message names them, and the command that installs them.
    """
    made = getattr(getattr(workload, "build_model", None), "__self__", None)
    tuned = made_of(workload) if is_a(workload, Workload) else None
    packages = tuned.packages if tuned else PACKAGES.get(type(made), ())
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
    return list(SPECS)


def get(name: str, **options: Any) -> Workload:
    """Return a workload of the zoo.

    Args:
        name: one of `names()`, also in another spelling or as it is published ("vit-l/16").
        **options: what to change in it: `dropout` (0 by default), and its sizes, such as
            `sequence_length` or `image_size`; the fields of the spec in `SPECS`.

    Raises:
        WorkloadError: the name or an option is unknown; the message lists what there is.

    >>> workload = get("lstm-text", hidden_size=64, sequence_length=48)
    >>> inputs, targets = workload.make_batch(2)  # of 2 samples: tokens, int64
    >>> inputs.shape
    torch.Size([2, 48])
    """
    asked = str.__str__(name) if is_a(name, str) else name
    name = asked if not is_a(asked, str) or asked in SPECS else known_as(asked, SPECS) or asked
    if is_a(name, str) and name not in SPECS and config_named(name):
        if options:
            raise WorkloadError(
                f"{next(iter(options))} is given with {shown(name)}, but options are for memlab's "
                f"own models; memlab.workloads.from_config({shown(name)}) takes tokens or "
                "image_size"
            )
        return from_config(name)
    if not is_a(name, str) or name not in SPECS:
        hint = nearest(name, SPECS) if is_a(name, str) else ""
        raise WorkloadError(f"workload {shown(name)} is unknown{hint}; allowed is one of {names()}")

    spec = SPECS[name]
    known = {field.name: field.type for field in dataclasses.fields(spec)}
    if unknown := [option for option in options if option not in known]:
        raise WorkloadError(
            f"{name} has no option {shown(unknown[0])}; allowed is one of {list(known)}"
        )

    given = {option: _checked(option, value, known) for option, value in options.items()}
    chosen = dataclasses.replace(spec, **given)
    in_size = partial(_in_size, name=name, options=dict(sorted(given.items())))
    return dataclasses.replace(
        chosen.workload(name), sample_size=sizes.sample_size(chosen, in_size)
    )


def _in_size(size: int, *, name: str, options: Mapping[str, Any]) -> Workload:
    """Return a workload with these options, but with samples of another size.

    Raises:
        WorkloadError: its samples cannot have this size.
    """
    spec = dataclasses.replace(SPECS[name], **options)
    sizes.check(spec, size)
    return get(name, **{**options, str(sizes.field_of(spec)): size})


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
