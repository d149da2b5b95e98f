"""`Workload`: what is trained, as functions that build the model, a batch and the loss."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memlab._util.checks import count, flag, function, of_type, optional_lengths, text
from memlab._util.functions import is_same_function
from memlab._util.tables import facts_table
from memlab._util.torch_private import pytree
from memlab._util.units import is_a, printable, shown
from memlab.errors import ConfigError, MemlabError, WorkloadError

# In which other forms a workload can be made: with samples of another size, or other choices.

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


OF_BATCHES = ("make_batch", "count_samples", "split_batch")
FUNCTIONS = ("build_model", "compute_loss", "num_loss_terms", "make_optimizer", *OF_BATCHES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, its data and its loss, independent of device and number format.

    Attributes:
        name: the name that results show.
        build_model: returns a new `torch.nn.Module`. `build_step` moves and casts it.
        make_batch: n -> a batch of n samples: any pytree of CPU tensors with n entries along
            dim 0, or of lists with n entries. A batch of any other kind (graphs, packed tokens)
            also needs `count_samples` and `split_batch`.
        compute_loss: (model, batch) -> scalar tensor, the mean over the samples of that batch. It
            must call `model(...)` itself, so that a compiled model is the one that runs. Modules
            and tensors that it brings along (a teacher, class weights, a learnable temperature)
            are copied for each step: they move, count and train with it, in their own format.
            Several losses, each with its backward and its update in order, are a dict by the names
            of submodules (or of optimizers), whose parameters alone they train, or a list, each for
            all parameters. A function in place of one is called after the update before it.
        num_loss_terms: batch -> int, the number of terms that the loss is a mean over, if that is
            not the number of samples (tokens with ignored labels). It weights each micro-batch.
        count_samples: batch -> int, the number of samples, if it is not the size of dim 0.
        split_batch: (batch, sizes) -> list of batches with these numbers of samples, in order. It
            makes the micro-batches if tensors cannot be split along dim 0.
        make_optimizer: model -> the optimizer of its trainable parameters, or a dict of several by
            name, where `StepConfig(optimizer=...)`, a function of the parameters, is not enough:
            groups with settings of their own, chosen by name or by kind of module.
        sample_size: how large a sample is, if the workload can be made in other sizes; a panel then
            has a slider for it.
        choices: what else it can be made with, such as another adapter; a panel has a control for
            each.
        lengths: how large each sample of the data set is, for `predict_lengths`; a step's batch is
            of `sample_size` all the same. A list or an array becomes a tuple of ints.

    Raises:
        WorkloadError: a field has a value that is not allowed.

    >>> import torch
    >>> workload = Workload(
    ...     name="line",
    ...     build_model=lambda: torch.nn.Linear(3, 1),
    ...     make_batch=lambda n: (torch.randn(n, 3), torch.randn(n, 1)),
    ...     compute_loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ... )

    A batch can also be several graphs joined into one. With three nodes in each graph, a batch of
    two samples has six rows.

    >>> graphs = Workload(
    ...     name="graphs",
    ...     build_model=lambda: torch.nn.Linear(3, 1),
    ...     make_batch=lambda n: torch.randn(3 * n, 3),
    ...     compute_loss=lambda model, batch: model(batch).square().mean(),
    ...     count_samples=lambda batch: len(batch) // 3,
    ...     split_batch=lambda batch, sizes: batch.split([3 * size for size in sizes]),
    ... )
    >>> [graphs.count_samples(part) for part in graphs.split_batch(graphs.make_batch(3), [2, 1])]
    [2, 1]
    """

    name: str
    build_model: Callable[[], torch.nn.Module]
    make_batch: Callable[[int], Any]
    compute_loss: Callable[[torch.nn.Module, Any], Any]
    num_loss_terms: Callable[[Any], int] | None = None
    count_samples: Callable[[Any], int] | None = None
    split_batch: Callable[[Any, list[int]], Sequence[Any]] | None = None
    make_optimizer: Callable[[torch.nn.Module], Any] | None = None
    sample_size: SampleSize | None = None
    choices: WorkloadChoices | None = dataclasses.field(default=None, hash=False)
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "name", text("name", self.name))
            object.__setattr__(self, "lengths", optional_lengths("lengths", self.lengths))
        except ConfigError as error:
            raise WorkloadError(str(error)) from None

        if not self.name:
            raise WorkloadError("name='' is empty; allowed is a non-empty text")

        for field in ("build_model", "make_batch", "compute_loss"):
            if not callable(getattr(self, field)):
                raise WorkloadError(
                    f"{field}={shown(getattr(self, field))} cannot be called; "
                    f"pass a function, for instance {field}=lambda ...: ..."
                )

        takes = {
            "num_loss_terms": "a batch to an int",
            "count_samples": "a batch to an int",
            "split_batch": "a batch and a list of sizes to a list of batches",
            "make_optimizer": "the model to a torch.optim.Optimizer",
        }
        for field, what in takes.items():
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise WorkloadError(
                    f"{field}={shown(value)} cannot be called; pass a function that maps {what}, "
                    "or leave it out"
                )

        if self.sample_size is not None and not is_a(self.sample_size, SampleSize):
            raise WorkloadError(
                f"sample_size={shown(self.sample_size)} is not a SampleSize; pass "
                "memlab.SampleSize(name=..., unit=..., value=..., offered=..., make_workload=...), "
                "or leave it out"
            )

        if self.choices is not None and not is_a(self.choices, WorkloadChoices):
            raise WorkloadError(
                f"choices={shown(self.choices)} is not a WorkloadChoices; pass "
                "memlab.WorkloadChoices(values=..., offered=..., make_workload=...), or leave it "
                "out"
            )

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        example_batch: Any,
        loss_fn: Callable[..., torch.Tensor],
        *,
        name: str | None = None,
    ) -> "Workload":
        """Return a workload that trains copies of `module` on the samples of `example_batch`.

        Args:
            module: the model; it is copied for every run and never changed.
            example_batch: CPU tensors in any pytree, at least one sample along dim 0. A batch of n
                repeats these samples in order.
            loss_fn: either `loss_fn(outputs, targets)` such as `torch.nn.functional.cross_entropy`,
                with `example_batch = (inputs, targets)`; or, when its first parameter is named
                `model`, `loss_fn(model, batch)` for anything else.
            name: the name that results show; by default the class name of the module.

        Raises:
            WorkloadError: `module` is not a module, or the batch has no samples.
        """
        if not is_a(module, torch.nn.Module):
            raise WorkloadError(
                f"module={shown(module)} is not a torch.nn.Module; pass the model itself"
            )

        if not callable(loss_fn):
            raise WorkloadError(
                f"loss_fn={shown(loss_fn)} cannot be called; pass a function such as "
                "torch.nn.functional.cross_entropy"
            )

        num_samples = _num_samples(example_batch)
        takes_model = _first_parameter(loss_fn) == "model"
        if not takes_model and not (is_a(example_batch, tuple | list) and len(example_batch) == 2):
            raise WorkloadError(
                "example_batch is not (inputs, targets), which loss_fn(outputs, targets) needs; "
                "pass such a pair, or a loss_fn whose parameters are (model, batch)"
            )

        def copy_of_module() -> torch.nn.Module:
            return copy.deepcopy(module)

        def make_batch(n: int) -> Any:
            index = torch.arange(n) % num_samples
            return pytree.tree_map_only(torch.Tensor, lambda t: t[index], example_batch)

        def compute_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            return loss_fn(model(batch[0]), batch[1])

        return cls(
            name=type(module).__name__ if name is None or _is_empty(name) else name,
            build_model=copy_of_module,
            make_batch=make_batch,
            compute_loss=loss_fn if takes_model else compute_loss,
        )

    @property
    def base_name(self) -> str:
        """The name without the size that `resized` has added to it."""
        added = f", {self.sample_size}" if self.sample_size else ""
        return self.name.removesuffix(added)

    def resized(self, size: int) -> "Workload":
        """Return the same workload with samples of another size, which its name then says.

        Raises:
            WorkloadError: the workload has no `sample_size`, or cannot have this size; or its
                functions or choices are others than those that `make_workload` gives.

        >>> import memlab
        >>> workload = memlab.workloads.get("gpt-small").resized(256)
        >>> workload.name, workload.make_batch(2)[0].shape
        ('gpt-small, sequence length 256', torch.Size([2, 256]))
        """
        own = self.sample_size
        if own is None:
            raise WorkloadError(
                f"{self.name} has samples of one size only; a workload with a sample_size can be "
                "made in others"
            )

        try:
            size = count(1)(own.name, size)
        except MemlabError as error:
            raise WorkloadError(str(error)) from None

        found = self._made_with(f"{own.name} {size}", partial(own.make_workload, size))
        same = found
        if size != own.value:
            same = self._made_with(f"{own.name} {own.value}", partial(own.make_workload, own.value))
        if own.varies:  # its own batches are of several sizes, which no size gives
            same = dataclasses.replace(same, **{name: getattr(self, name) for name in OF_BATCHES})
        self._check_is_made_by("in other sizes", "SampleSize", f"make_workload({own.value})", same)
        if not have_same_values(self.choices, found.choices):
            raise WorkloadError(
                f"make_workload of the SampleSize of {self.name} gives other choices; let it make "
                f"the workload with {dict(self.choices.values) if self.choices else 'none'}"
            )
        sized = dataclasses.replace(own, value=size, varies=False)
        name = f"{self.base_name}, {sized}"
        return dataclasses.replace(found, name=name, sample_size=sized, lengths=self.lengths)

    def chosen(self, **values: Value) -> "Workload":
        """Return the same workload with other choices, in the same sample size.

        Args:
            **values: by the names in `choices.values`; what is not named stays.

        Raises:
            WorkloadError: there is no such choice, or the workload cannot have these; or its
                functions are others than those that `make_workload` gives; or what that makes has
                another sample size, or the same name for other choices.

        >>> import memlab
        >>> workload = memlab.workloads.finetune("llama-1b", adapter="lora", rank=16)
        >>> workload.chosen(adapter="dora", base="nf4").name
        'llama-1b, dora of rank 16 on nf4, sequence length 512'
        """
        own = self.choices
        known = list(own.values) if own else []
        if unknown := [name for name in values if name not in known]:
            raise WorkloadError(
                f"{self.name} has no choice {shown(unknown[0])}; "
                + (f"allowed is one of {known}" if known else "it offers none")
            )
        if own is None:
            return self

        said = ", ".join(f"{name}={shown(value)}" for name, value in values.items())
        make = own.make_workload
        made = self._made_with(said, partial(make, **{**own.values, **values}))
        same = self._made_with(said, partial(make, **own.values)) if values else made
        self._check_is_made_by(
            "with other choices", "WorkloadChoices", "make_workload with the same values", same
        )
        size = self.sample_size.value if self.sample_size else None
        if size != (made.sample_size.value if made.sample_size else None):
            raise WorkloadError(
                f"make_workload of the WorkloadChoices of {self.name} gives another sample_size; "
                f"let it make the workload with {self.sample_size or 'no sample_size'}"
            )
        if made.base_name == self.base_name and not have_same_values(own, made.choices):
            raise WorkloadError(
                f"make_workload with {said} gives another choice the same name, {made.name}; let "
                "the name say the choices"
            )
        added = f", {self.sample_size}" if self.name != self.base_name else ""
        return dataclasses.replace(made, name=made.base_name + added, lengths=self.lengths)

    def _made_with(self, what: str, make: Callable[[], Any]) -> "Workload":
        """Return what a `make_workload` makes, called with all that it needs."""
        try:
            found: Workload = make()
        except MemlabError as error:
            raise WorkloadError(str(error)) from None
        except Exception as error:  # a person's own function may raise anything
            raise WorkloadError(
                f"{self.name} cannot be made with {what}: "
                f"{type(error).__name__}: {printable(str(error))}"
            ) from error

        if not is_a(found, Workload):
            raise WorkloadError(
                f"make_workload({what}) returned {shown(found)}, which is not a Workload"
            )
        return found

    def _check_is_made_by(self, forms: str, kind: str, call: str, made: "Workload") -> None:
        """Check that this workload was not given other functions by `dataclasses.replace`."""
        for field in FUNCTIONS:
            if not is_same_function(getattr(self, field), getattr(made, field)):
                raise WorkloadError(
                    f"{self.name} cannot be made {forms}, because {call} gives another {field}; "
                    f"pass a {kind}(make_workload=...) that makes this workload, or leave it out"
                )

    def _repr_html_(self) -> str:
        """Return a small table of the functions for notebooks. None of them is called."""
        terms = "a mean over the samples"
        if self.num_loss_terms is not None:
            terms = f"a mean over what num_loss_terms counts: {_described(self.num_loss_terms)}"

        samples, micro_batches = "the entries along dim 0", "split along dim 0"
        if self.count_samples is not None:
            samples = f"count_samples: {_described(self.count_samples)}"
        if self.split_batch is not None:
            micro_batches = f"split_batch: {_described(self.split_batch)}"

        made = self.make_optimizer
        own = {} if made is None else {"optimizer": f"make_optimizer: {_described(made)}"}
        size = self.sample_size
        sizes = {} if size is None else {"sample size": f"{size} ({size.unit})"}
        if self.choices is not None:
            values = self.choices.values.items()
            sizes["choices"] = ", ".join(f"{name}={shown(value)}" for name, value in values)
        return facts_table(f"workload {self.name}", {
            "model": _described(self.build_model),
            "batch": _described(self.make_batch),
            "loss": f"{_described(self.compute_loss)}, {terms}",
            "samples": samples,
            "micro-batches": micro_batches,
            **own,
            **sizes,
        })  # fmt: skip


def _described(function: Any) -> str:
    """Return which function it is and with what values, without calling it.

    >>> _described(torch.nn.functional.mse_loss)
    'mse_loss of torch.nn.functional'
    """
    try:
        inner = function.func if is_a(function, partial) else function
        name = inner.__qualname__.replace("<locals>.", "")
        described = f"{name} of {inner.__module__}"
        values = [f"{name}={shown(value)}" for name, value in _values_of(function)]
    except Exception:  # an object that can be called has no name, or raises when it is asked
        return shown(function)

    return printable(f"{described} ({', '.join(values)})" if values else described)


def _values_of(function: Any) -> list[tuple[str, Any]]:
    """Return the values that come with a function: keywords of a `partial`, fields of an owner."""
    if is_a(function, partial):
        return list(function.keywords.items())

    owner = getattr(function, "__self__", None)
    if not dataclasses.is_dataclass(owner):
        return []
    return [(field.name, getattr(owner, field.name)) for field in dataclasses.fields(owner)]


def _is_empty(name: Any) -> bool:
    return is_a(name, str) and not str.__len__(name)


def _num_samples(batch: Any) -> int:
    try:
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if is_a(leaf, torch.Tensor)]
    except Exception:  # a list that holds itself, keys that cannot be sorted, an own container
        raise WorkloadError(
            f"example_batch={shown(batch)} cannot be flattened into tensors; pass tensors in "
            "tuples, lists and dicts"
        ) from None

    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(sizes) != 1 or 0 in sizes:
        raise WorkloadError(
            f"example_batch has tensors of {sorted(sizes) or 'no'} samples along dim 0; every "
            "tensor needs the same number of samples, and at least one. For another kind of batch "
            "write a Workload with make_batch, count_samples and split_batch"
        )

    return sizes.pop()


def _first_parameter(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except Exception:  # a builtin without a signature, or an object that raises when compared
        return None
