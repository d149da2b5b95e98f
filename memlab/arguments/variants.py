"""In which other forms a workload can be made: with samples of another size, or other choices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memlab.arguments.checks import count, flag, function, of_type, text
from memlab.arguments.quoting import is_a, shown
from memlab.errors import ConfigError, WorkloadError

MOST_DIMENSIONS = 3  # of a sample: a text, an image, a volume
Value = str | int | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSize:
    """How large one sample of a workload is, and how the workload is made in another size.

    Attributes:
        name: in words, such as "sequence length".
        unit: what is counted, in words, such as "tokens".
        value: the size of a sample of this workload.
        offered: the sizes that a panel's slider offers, ascending.
        make_workload: size -> the same workload with samples of that size; with `value` it gives
            the functions that the workload has. Other sizes than the offered ones can be asked
            for; it raises an error for one that the workload cannot have. A panel calls it in a
            thread, so that a slow one does not hold the page up.
        dimensions: along how many dimensions a sample has this size: 2 for square images.
        varies: whether the samples of this workload differ in size, and `value` is that of the
            longest. `make_workload` gives samples of one size all the same, so with `value` it need
            not give the batches that the workload has.

    Raises:
        WorkloadError: a field has a value that is not allowed.

    >>> import torch
    >>> from memlab import Workload
    >>> def mean_of(length: int) -> Workload:
    ...     return Workload(
    ...         name="mean",
    ...         build_model=lambda: torch.nn.Linear(length, 1),
    ...         make_batch=lambda n: torch.ones(n, length),
    ...         compute_loss=lambda model, batch: model(batch).mean(),
    ...         sample_size=SampleSize(
    ...             name="length", unit="numbers", value=length, offered=(8, 16, 32),
    ...             make_workload=mean_of,
    ...         ),
    ...     )
    >>> mean_of(8).resized(16).name
    'mean, length 16'
    """

    name: str
    unit: str
    value: int
    offered: tuple[int, ...]
    make_workload: Callable[[int], Any]
    dimensions: int = 1
    varies: bool = False

    def __post_init__(self) -> None:
        rules = {
            "name": text,
            "unit": text,
            "value": count(1),
            "offered": lambda name, value: of_type(name, value, Sequence[int]),
            "make_workload": function,
            "dimensions": count(1, MOST_DIMENSIONS),
            "varies": flag,
        }
        try:
            for field, rule in rules.items():
                object.__setattr__(self, field, rule(field, getattr(self, field)))
        except ConfigError as error:
            raise WorkloadError(str(error)) from None

        for field in ("name", "unit"):
            if not getattr(self, field):
                raise WorkloadError(f"{field}='' is empty; allowed is a non-empty text")

        ascending = sorted({size for size in self.offered if size > 0})
        if len(self.offered) < 2 or list(self.offered) != ascending:
            raise WorkloadError(
                f"offered={shown(self.offered)}; allowed are at least two sizes of at least 1, in "
                "ascending order, such as (64, 128, 256)"
            )

    def __str__(self) -> str:
        """Return the size in words, such as "sequence length 128"."""
        return f"{self.name} {self.value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadChoices:
    """What else a workload can be made with than its size, such as the adapter of a fine-tuning.

    Attributes:
        values: of this workload, by name.
        offered: by the same names, the values that a panel offers. Others can be asked for. A
            choice that has no effect on this workload offers its own value alone.
        make_workload: called with a value for each name, as keywords: returns the workload that has
            them, in the sample size of this one. Its name must say the choices, because results
            and a panel know a workload by its name. A panel calls it while the page waits, so it
            must return at once: the model is built by `build_model`, later.

    Raises:
        WorkloadError: a field has a value that is not allowed.

    >>> import torch
    >>> from memlab import Workload
    >>> def layer(bias: bool = True) -> Workload:
    ...     return Workload(
    ...         name=f"layer, bias {bias}",
    ...         build_model=lambda: torch.nn.Linear(4, 1, bias=bias),
    ...         make_batch=lambda n: torch.ones(n, 4),
    ...         compute_loss=lambda model, batch: model(batch).mean(),
    ...         choices=WorkloadChoices(
    ...             values={"bias": bias}, offered={"bias": (True, False)}, make_workload=layer
    ...         ),
    ...     )
    >>> layer().chosen(bias=False).name
    'layer, bias False'
    """

    values: Mapping[str, Value]
    offered: Mapping[str, tuple[Value, ...]]
    make_workload: Callable[..., Any]

    def __post_init__(self) -> None:
        for field in ("values", "offered"):
            given = getattr(self, field)
            if not is_a(given, Mapping) or not all(map(_is_identifier, given)):
                raise WorkloadError(
                    f"{field}={shown(given)}; allowed is a dict whose keys are names of arguments "
                    "of make_workload"
                )
        try:
            function("make_workload", self.make_workload)
        except ConfigError as error:
            raise WorkloadError(str(error)) from None
        if self.values.keys() != self.offered.keys():
            raise WorkloadError(
                f"values has the names {sorted(self.values)} and offered {sorted(self.offered)}; "
                "allowed are the same names in both"
            )
        for name, offered in self.offered.items():
            if not is_a(offered, tuple) or not offered:
                raise WorkloadError(
                    f"offered[{name!r}]={shown(offered)}; allowed is a tuple of at least one value"
                )


def have_same_values(one: WorkloadChoices | None, other: WorkloadChoices | None) -> bool:
    """Return whether two workloads are made with the same, but for choices without effect."""
    if one is None or other is None:
        return one is other
    if one.values.keys() != other.values.keys():
        return False
    return all(
        one.values[name] == other.values[name]
        for name in one.values
        if max(len(one.offered[name]), len(other.offered[name])) > 1
    )


def _is_identifier(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier()
