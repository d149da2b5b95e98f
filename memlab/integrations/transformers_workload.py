"""The workload of transformers' `Trainer`: its model, its data and its loss."""

import copy
import dis
import inspect
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import cloudpickle
import torch

from memlab._util.torch_private.tensors import are_tensors_fake
from memlab._util.units import printable, shown
from memlab.errors import WorkloadError
from memlab.integrations.reading import (
    SECRET,
    TABLES,
    TOKENS,
    WHICH,
    KeptColumns,
    KeptSamples,
    SourceReading,
    first_samples,
    ignore,
    is_on_cpu,
    length_of,
)
from memlab.workload import SampleSize, Workload
from memlab.workloads.configs import offered_sizes

# The loss of transformers' `Trainer`, as a workload computes it.
#
# The Trainer divides the summed losses of a micro-batch by the labels of the whole update.
# The workload divides them by the labels of the micro-batch and weights micro-batches by
# their labels, which is the same sum. Labels are counted as this version of the Trainer
# counts them.

IGNORED_LABEL = -100
# these losses do not read `num_items_in_batch`
MEAN_LOSSES = ("ForSequenceClassification", "ForQuestionAnswering")


@dataclass(frozen=True, slots=True)
class TrainerLoss:
    """`compute_loss` of a workload: the Trainer's loss of one micro-batch, as a mean.

    Attributes:
        smoother: the Trainer's `label_smoother`, or None.
        loss_function: the Trainer's `compute_loss_func`, or None.
        terms: what counts the labels; None if the Trainer does not count them.
        model_takes_terms: whether the Trainer passes their number to the model.
        shifts_labels: for the smoother: whether a prediction is about the next label.
    """

    smoother: Callable[..., torch.Tensor] | None
    loss_function: Callable[..., torch.Tensor] | None
    terms: "LossTerms | None"
    model_takes_terms: bool
    shifts_labels: bool

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs = dict(batch)
        terms = None if self.terms is None else self.terms.counted(batch)
        has_own = self.smoother is not None or self.loss_function is not None
        labels = inputs.pop("labels", None) if has_own else None
        if terms is not None and self.model_takes_terms:
            inputs["num_items_in_batch"] = terms
        outputs = model(**inputs)

        if self.loss_function is not None:
            return self.loss_function(outputs, labels, num_items_in_batch=terms)
        if labels is not None and self.smoother is not None:
            named: dict[str, Any] = {"shift_labels": True} if self.shifts_labels else {}
            if terms is not None:
                named["num_items_in_batch"] = terms
            return self.smoother(outputs, labels, **named)
        loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return loss


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`num_loss_terms` of a workload: how many labels count.

    Attributes:
        shifts_labels: whether the first label of each sample is never predicted.
    """

    shifts_labels: bool

    def __call__(self, batch: Any) -> int:
        """Return the number of labels of a batch that are not ignored."""
        return int(self.counted(batch))

    def counted(self, batch: Any) -> torch.Tensor:
        """Return it as a tensor, which a forward need not read."""
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., 1:] if self.shifts_labels else batch["labels"]
        found: torch.Tensor = labels.ne(IGNORED_LABEL).sum()
        return found


def unwrapped(model: torch.nn.Module) -> Any:
    """Return the model of transformers, without the adapters of PEFT around it."""
    is_wrapped = type(model).__module__.partition(".")[0] == "peft"
    found: Any = model
    return found.get_base_model() if is_wrapped else found


def ignores_terms(model: Any) -> bool:
    """Return whether the forward of a model computes a mean, whatever number of terms it is given.

    Such a forward calls a loss of torch.nn by itself, or one of transformers that takes means.
    """
    try:
        source = inspect.getsource(type(model).forward)
    except (OSError, TypeError):  # a model that was defined without a file
        return False
    if "num_items_in_batch" in source:
        return False
    return "loss_function" not in source or getattr(model, "loss_type", None) in MEAN_LOSSES


def is_causal_model(model: Any) -> bool:
    """Return whether the Trainer's label smoother shifts the labels of this model."""
    loaded = sys.modules.get("transformers.trainer")  # whoever has a Trainer has imported it
    names = getattr(loaded, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    return type(model).__name__ in names.values()


# The loss of a subclass of transformers' `Trainer`, computed by its own `compute_loss`.
#
# The method runs on a stand-in: an object of the same class with the Trainer's attributes,
# but with the model of the step, with one process in place of accelerate, and without data,
# optimizer and callbacks. It is made anew for each model, so that the Trainer is never
# changed, and no run sees what an earlier one left in it.

# what a step has itself, and what is large; all else of a Trainer that can be sent is sent
NOT_SENT = frozenset(TABLES["transformers"]["not sent"])
_STAND_INS: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[bytes, Any]]" = (
    weakref.WeakKeyDictionary()
)
WRAPPERS = ("OptimizedModule", "DistributedDataParallel")  # each has the model as its only child


class OneProcess:
    """What a `compute_loss` asks of accelerate, as a single process answers.

    Attributes:
        device: of the model.
    """

    num_processes = 1
    process_index = 0
    is_main_process = True
    parallelism_config = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gather(self, tensors: Any) -> Any:
        """Return the tensors of all processes: those of this one.

        A prediction knows no values. There, what can only be a metric that is read, because it has
        no gradient and is no matrix, is zero, so that reading it assumes nothing about the step.
        """
        is_metric = (
            isinstance(tensors, torch.Tensor) and tensors.dim() < 2 and not tensors.requires_grad
        )
        if is_metric and are_tensors_fake():
            return torch.zeros(tensors.shape, dtype=tensors.dtype, device=tensors.device)
        return tensors

    gather_for_metrics = gather

    def reduce(self, tensors: Any, **_: Any) -> Any:
        """Return the sum over all processes: what this one has."""
        return tensors

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """Return the model itself, without what a library has put around it."""
        return unwrapped_module(model)


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """`compute_loss` of a workload: the Trainer's own, of one micro-batch.

    Attributes:
        name: of the Trainer's class.
        stand_in: the stand-in as cloudpickle's bytes.
        terms: what counts the labels; None if the Trainer does not count them.
    """

    name: str
    stand_in: bytes
    terms: LossTerms | None

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch.

        Raises:
            WorkloadError: the method needs a part of the Trainer that the stand-in lacks.
        """
        trainer = _stand_in_of(unwrapped_module(model), self.stand_in)
        trainer.model = unwrapped_module(model)
        trainer.accelerator = OneProcess(next(model.parameters()).device)
        terms = None if self.terms is None else self.terms.counted(batch)
        # a copy, because the method may write into its inputs
        inputs = {name: value for name, value in batch.items() if name != WHICH}
        try:
            loss: torch.Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=terms)
        except AttributeError as error:
            if error.obj is trainer or error.obj is trainer.accelerator:
                whose = "" if error.obj is trainer else "accelerator."
                raise WorkloadError(
                    f"compute_loss of {self.name} reads self.{whose}{error.name}, which memlab "
                    "does not take out of the Trainer; write a memlab.Workload with this loss"
                ) from error
            raise
        finally:
            del trainer.model
        return loss

    def __repr__(self) -> str:
        """Return whose loss it is, not its bytes."""
        return f"OwnLoss({self.name})"


def own_loss(trainer: Any, terms: LossTerms | None) -> OwnLoss:
    """Return the loss of a Trainer whose class has its own `compute_loss`.

    Raises:
        WorkloadError: the class cannot be sent to the process in which a step runs.
    """
    kind = type(trainer)
    stand_in = object.__new__(kind)
    for name, value in vars(trainer).items():
        if name not in NOT_SENT and not isinstance(value, torch.nn.Module) and _can_be_sent(value):
            setattr(stand_in, name, value)
    stand_in.args = copy.copy(trainer.args)
    for name in vars(trainer.args):
        if name.endswith(SECRET):
            vars(stand_in.args)[name] = None
    # it asks the callbacks, and changes nothing that a step computes
    stand_in.log = ignore
    # memlab weights the micro-batches itself
    stand_in.current_gradient_accumulation_steps = 1
    try:
        sent = cloudpickle.dumps(stand_in)
    except Exception as error:
        raise WorkloadError(
            f"the loss of {kind.__name__} cannot be sent to the process in which a step runs: "
            f"{type(error).__name__}: {error}; define the class in a module, or write a "
            "memlab.Workload with this loss"
        ) from error
    return OwnLoss(kind.__name__, sent, terms)


def ignores_number_of_terms(method: Callable[..., Any]) -> bool:
    """Return whether a `compute_loss` never reads `num_items_in_batch`.

    One that takes it by **kwargs, or has no code of Python, is taken to read it. Its bytecode
    tells, which is there without a source too, as for a class that was typed into a prompt.
    """
    try:
        parameters = inspect.signature(method).parameters
        code = inspect.unwrap(method).__code__
    except (AttributeError, TypeError, ValueError):
        return False
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return not takes_any and not _reads(code, "num_items_in_batch")


def _reads(code: CodeType, name: str) -> bool:
    """Return whether code loads an argument, or may: functions inside of it, and `locals()`."""
    if name in code.co_cellvars or "locals" in code.co_names:
        return True
    loaded = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return any(name == each or (isinstance(each, tuple) and name in each) for each in loaded)


def unwrapped_module(model: Any) -> Any:
    """Return the model inside of what compiles it or averages its gradients."""
    while type(model).__name__ in WRAPPERS:
        (model,) = model.children()
    return model


def _stand_in_of(model: torch.nn.Module, stand_in: bytes) -> Any:
    """Return the stand-in that belongs to a model: a new model begins with a new one."""
    found: tuple[bytes, Any] | None = _STAND_INS.get(model)
    if found is None or found[0] != stand_in:
        found = _STAND_INS[model] = (stand_in, pickle.loads(stand_in))
    return found[1]


def _can_be_sent(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # a person's object may raise anything
        return False
    return True


# A new copy of a trainer's model for each run, whose parts belong to the copy alone.
#
# Libraries set a forward of their own on a module, such as trl's, which computes the loss
# without whole logits. `copy.deepcopy` copies that method, but not what the function inside
# of it refers to, so that it would still call the module it was made for. Here the copy
# gets functions that call the copy.

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class CopiedModel:
    """`build_model` of a workload: a copy on the CPU, without gradients.

    Attributes:
        model: as the trainer has it; never changed.
        autocast: the format to which the forward of the copy autocasts, as accelerate does over
            weights of any format; None if it does not.
    """

    model: torch.nn.Module
    autocast: torch.dtype | None = None

    def __call__(self) -> torch.nn.Module:
        """Return a new copy."""
        made = copy.deepcopy(self.model)
        _bind_forwards(made, dict(zip(self.model.modules(), made.modules(), strict=True)))
        # transformers refuses to move some quantized models, even to where they are
        if any(parameter.device.type != "cpu" for parameter in made.parameters()):
            made = made.to("cpu")
        made.zero_grad(set_to_none=True)

        if self.autocast is not None:
            made.forward_before_autocast = made.forward  # type: ignore[assignment]
            made.autocast_format = self.autocast  # type: ignore[assignment]
            made.forward = MethodType(_in_autocast, made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make it again, with the classes of parameters, which pickle loses."""
        kinds = {
            name: type(parameter)
            for name, parameter in self.model.named_parameters()
            if type(parameter) is not torch.nn.Parameter
        }
        return _restored, (self.model, self.autocast, kinds)

    def __repr__(self) -> str:
        """Return the class of the model, which may print itself over pages."""
        return f"CopiedModel({type(self.model).__name__})"


def _restored(
    model: torch.nn.Module, autocast: torch.dtype | None, kinds: Mapping[str, type]
) -> CopiedModel:
    """Return what was pickled. A quantized parameter keeps its scales, but not its class."""
    for name, parameter in model.named_parameters():
        if name in kinds:
            parameter.__class__ = kinds[name]
    return CopiedModel(model, autocast)


def _bind_forwards(made: torch.nn.Module, copies: Mapping[Any, torch.nn.Module]) -> None:
    """Have forwards that were set on a module call the copies of what they called."""
    for module in made.modules():
        own = vars(module).get("forward")
        if isinstance(own, MethodType) and isinstance(own.__func__, FunctionType):
            module.forward = MethodType(_bound(own.__func__, copies), own.__self__)


def _bound(function: FunctionType, copies: Mapping[Any, torch.nn.Module]) -> FunctionType:
    """Return a function whose closure has the copies of the modules that it had."""
    cells = function.__closure__ or ()
    bound = tuple(_cell(cell, copies) for cell in cells)
    if all(one is other for one, other in zip(cells, bound, strict=True)):
        return function
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, bound
    )
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    return made


def _cell(cell: CellType, copies: Mapping[Any, torch.nn.Module]) -> CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # a name that has no value yet
        return cell
    if isinstance(held, torch.nn.Module) and held in copies:
        return CellType(copies[held])
    if isinstance(held, MethodType) and held.__self__ in copies:
        function = held.__func__
        if isinstance(function, FunctionType):
            function = _bound(function, copies)
        return CellType(MethodType(function, copies[held.__self__]))
    return cell


def _in_autocast(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a model in autocast, and return what it returns in fp32."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, model.autocast_format):
        outputs = model.forward_before_autocast(*args, **kwargs)
    return _widened(outputs)


def _widened(outputs: Any) -> Any:
    """Return outputs with narrow tensors cast to fp32, as accelerate returns them."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in NARROW else outputs
    if isinstance(outputs, dict):  # transformers' outputs are such
        return type(outputs)({name: _widened(value) for name, value in outputs.items()})
    if type(outputs) in (list, tuple):
        return type(outputs)(_widened(value) for value in outputs)
    return outputs


# The lengths of a trainer's samples, and its workload in other sequence lengths.
#
# A sample of another length is one of the data set's own, cut or repeated, and collated as
# before. So nothing is tokenized again, and a step costs what it would with real samples of
# that length.

MOST_READ = 10_000  # samples of a table, whose columns are read at once
MOST_ASKED = 1_000  # samples of any other data set, which may compute each one
LENGTH = "length"


def with_lengths(workload: Workload, kept: KeptSamples, trainer: Any) -> tuple[Workload, str]:
    """Return a Trainer's workload with its sample size and lengths, and what to say of them.

    Only a causal language model has them: of another one it is not known what a length costs.

    Args:
        workload: as the Trainer has it.
        kept: its samples, and what collates them.
        trainer: not run.
    """
    model = unwrapped(trainer.model)
    if not is_causal_model(model):
        return workload, ""
    own = [length_of(sample) for sample in kept.samples]
    value, positions = max(own), _positions(model)
    problem = _why_joined(trainer)
    if not problem and not all(own):
        problem = f"they have no column {TOKENS!r} of tokens, so no lengths are known"
    if problem := problem or _why_fixed(kept, value):
        return workload, problem

    varies = min(own) < value
    if not varies:
        workload = replace(workload, make_batch=replace(kept, length=value))
    size = SampleSize(
        name="sequence length",
        unit="tokens",
        value=value,
        offered=tuple(n for n in offered_sizes(value) if n <= positions),
        make_workload=partial(_of_length, made=workload, kept=kept, positions=positions),
        varies=varies,
    )
    if len(size.offered) < 2:
        return workload, ""
    lengths, said = _lengths(trainer, own)
    return replace(workload, sample_size=size, lengths=lengths), said


def _positions(model: Any) -> int:
    """Return the longest sequence that a model takes, as its config says."""
    config: Any = getattr(model, "config", None)
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(inner, "max_position_embeddings", None)
    return found if isinstance(found, int) else 2**31


def _why_joined(trainer: Any) -> str:
    """Return why the samples have no length of their own in a batch; "" if they have one."""
    if not joins_samples(trainer):
        return ""
    if getattr(trainer.args, "packing", False):
        return (
            "the data set is packed: a sample is a row of several texts, whose own lengths are not "
            "known, and rows are joined without padding, so there is no other sequence length"
        )
    return "a batch joins them in rows of its own, so there is no other sequence length"


def _why_fixed(kept: KeptSamples, value: int) -> str:
    """Return why samples of other lengths cannot be collated; "" if they can."""
    widths = []
    for length in (value, max(1, value // 2)):
        try:
            tokens = replace(kept, length=length)(2)[TOKENS]
        except Exception as error:  # a person's own collator may raise anything
            return (
                f"the data_collator cannot make a batch of samples of {length} tokens "
                f"({type(error).__name__}: {printable(str(error))}), so there is no other sequence "
                "length"
            )
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or len(tokens) != 2:
            return f"the data_collator makes no rows of {TOKENS!r}, one for each sample"
        widths.append(tokens.shape[1])
    if widths[0] == widths[1] and value > 1:
        return (
            f"the data_collator makes rows of {widths[0]} tokens of shorter samples too, so there "
            "is no other sequence length"
        )
    return ""


def _of_length(length: int, *, made: Workload, kept: KeptSamples, positions: int) -> Workload:
    """Return the workload with samples of this many tokens."""
    if length > positions:
        raise WorkloadError(
            f"sequence length {length} is more than {made.name} takes: its config has "
            f"max_position_embeddings={positions}; allowed are 1 to {positions}"
        )
    return replace(
        made,
        name=f"{made.name}, sequence length {length}",
        make_batch=replace(kept, length=length),
        sample_size=None,
    )


def _lengths(trainer: Any, own: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """Return the lengths of the data set's samples, of how many, and how they were found.

    Of more than `MOST_READ` so many are drawn.
    """
    dataset, packed = trainer.train_dataset, getattr(trainer.args, "packing", False)
    what = "rows of the packed data set" if packed else "samples"
    try:
        found, column = _read(dataset, getattr(trainer.args, "length_column_name", LENGTH))
    except Exception as error:  # a person's own data set may raise anything
        return tuple(own), (
            f"lengths are those of the first {len(own)} {what}, because {type(dataset).__name__} "
            f"cannot give the others: {type(error).__name__}: {printable(str(error))}"
        )
    total = f" of {len(dataset):,}" if found and len(found) < len(dataset) else ""
    if not found:
        found, column, total = tuple(own), TOKENS, ", the first ones of a data set without a length"
    return found, (
        f"lengths are those of {len(found):,} {what}{total}, by column {shown(column)}: "
        f"{min(found):,} to {max(found):,} tokens"
    )


def _read(dataset: Any, column: str) -> tuple[tuple[int, ...], str]:
    """Return the lengths of samples spread over a data set, and by which column; () without one."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return (), ""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and hasattr(dataset, "select_columns"):
        name = column if column in columns else TOKENS
        table = dataset.with_format(None).select_columns([name])
        values = table[_spread(len(dataset), MOST_READ)][name]
        return tuple(v if name == column else len(v) for v in values), name
    samples = (dataset[at] for at in _spread(len(dataset), MOST_ASKED))
    return tuple(length_of(sample) for sample in samples), TOKENS


def _spread(total: int, most: int) -> list[int]:
    """Return the numbers of at most so many samples, drawn from all of them; the same each time.

    Every n-th one would follow a data set that repeats itself.
    """
    return sorted(random.Random(0).sample(range(total), min(total, most)))


OF_TRL = ("SFTTrainer", "DPOTrainer")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def workload_of(reading: SourceReading, trainer: Any) -> Workload | None:
    """Return the Trainer's model, data and loss; None if there is no data.

    Raises:
        WorkloadError: its data cannot be read, or its loss cannot be sent.
    """
    dataset = trainer.train_dataset
    part = reading.add("trainer.train_dataset", type(dataset).__name__)
    if dataset is None:
        reading.leave(
            part,
            "there is no train_dataset, so no batch and no workload; write a memlab.Workload",
        )
        return None

    kept = _batches(reading, trainer, dataset)
    first = f"its first {len(kept.samples)} samples, in their order, as often as a batch needs them"
    reading.take_into("make_batch", part, first)
    batch = _first_batch(trainer, kept)
    if not isinstance(batch, Mapping):
        reading.is_complete = False
        reading.leave(
            "trainer.data_collator",
            f"it returns a {type(batch).__name__}, which a Trainer cannot pass to a model by name",
        )
        return None

    terms, loss = _loss(reading, trainer, batch)
    joined = replace(kept, joins=True) if joins_samples(trainer) else None
    made = Workload(
        name=type(trainer.model).__name__,
        build_model=CopiedModel(_on_cpu(trainer.model), _autocast(reading)),
        make_batch=joined or kept,
        compute_loss=loss,
        num_loss_terms=terms,
        count_samples=joined.count if joined else None,
        split_batch=joined.split if joined else None,
    )
    found, said = with_lengths(made, kept, trainer)
    reading.take_into("make_batch", part, "; ".join(filter(None, (first, said))))
    return found


def is_of_trl(kind: type) -> bool:
    """Return whether a class is trl's own."""
    return kind.__module__.partition(".")[0] == "trl"


def is_taken(owner: type) -> bool:
    """Return whether a class is one of trl's trainers whose step memlab takes."""
    return is_of_trl(owner) and owner.__name__ in OF_TRL


def joins_samples(trainer: Any) -> bool:
    """Return whether the batches of a trainer have other rows than samples.

    Sequences without padding are laid end to end, and the chosen answers of pairs come before the
    rejected ones.
    """
    owners = [kind.__name__ for kind in type(trainer).__mro__ if is_taken(kind)]
    return bool(owners) and (
        "DPOTrainer" in owners or bool(getattr(trainer, "padding_free", False))
    )


def owner_of(trainer: Any, name: str) -> type | None:
    """Return the class outside of transformers that defines a method; None if it does not exist."""
    owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    if owner is None or owner.__module__.partition(".")[0] == "transformers":
        return None
    return owner


def replaced_on(trainer: Any, name: str) -> str:
    """Return where another function was put in the place of a method; "" if none was.

    Packages do that to make training faster, and so do people in a notebook.
    """
    if name in vars(trainer):
        return f"this {type(trainer).__name__} itself"
    owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    if owner is None:
        return ""
    library = owner.__module__.partition(".")[0]
    if library not in ("transformers", "trl"):  # a person's class may have functions from anywhere
        return ""
    module = getattr(vars(owner)[name], "__module__", None) or library
    is_own = module.partition(".")[0] == library
    return "" if is_own else f"{owner.__name__} by {module}"


def _on_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, or a copy on the CPU, which a worker that sees no card can read."""
    return model if is_on_cpu(model) else CopiedModel(model)()


def _autocast(reading: SourceReading) -> torch.dtype | None:
    """Return the format of an autocast over weights that `precision` would cast to fp32."""
    for name, dtype in AUTOCAST.items():
        if reading.values.get(name) and reading.settings.get("precision") == "as-built":
            scaler = "; memlab does not scale this loss" if dtype is torch.float16 else ""
            reading.take_into(
                "build_model",
                name,
                "the model has weights that are not fp32, which stay as they are: its forward runs "
                f"in autocast, as in the Trainer{scaler}",
            )
            return dtype
    return None


def _batches(reading: SourceReading, trainer: Any, dataset: Any) -> KeptSamples:
    batch_size = reading.settings["batch_size"]
    samples = first_samples(dataset, batch_size)
    collate = trainer.data_collator
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        collate = KeptColumns(collate, frozenset(trainer._signature_columns))
        reading.take_into("make_batch", "remove_unused_columns")
    else:
        reading.skip("remove_unused_columns")
    reading.take_into(
        "make_batch",
        reading.add("trainer.data_collator", type(trainer.data_collator).__name__),
        "each micro-batch is collated by itself, as in the Trainer"
        if joins_samples(trainer)
        else "it pads the samples of a whole update alike; the Trainer pads each micro-batch by "
        "itself",
    )
    return KeptSamples(samples, collate)


def _first_batch(trainer: Any, kept: KeptSamples) -> Any:
    try:
        return kept(1)
    except Exception as error:  # a person's own collator may raise anything
        raise WorkloadError(
            f"the data_collator ({type(trainer.data_collator).__name__}) cannot make a batch of "
            f"the first sample: {type(error).__name__}: {printable(str(error))}; pass a Trainer "
            "whose collator needs no network and nothing else that is not here, such as one over "
            "samples that are tokenized already"
        ) from error


def _loss(
    reading: SourceReading, trainer: Any, batch: Mapping[str, Any]
) -> tuple[LossTerms | None, Callable[..., torch.Tensor]]:
    """Return what counts the terms of the loss, and the loss."""
    shifts = bool(getattr(trainer, "_loss_shifts_labels", False))
    has_labels = isinstance(batch.get("labels"), torch.Tensor)
    loss_function = getattr(trainer, "compute_loss_func", None)
    takes_terms = bool(getattr(trainer, "model_accepts_loss_kwargs", False))
    is_counted = has_labels and (takes_terms or loss_function is not None)
    is_ignored = is_counted and _ignores_terms(trainer)
    terms = LossTerms(shifts) if is_counted and not is_ignored else None

    reading.take_into("compute_loss", "label_names")
    smoother = trainer.label_smoother
    if smoother is not None:
        reading.take_into("compute_loss", "label_smoothing_factor")
    else:
        reading.skip("label_smoothing_factor")
    if loss_function is not None:
        reading.take_into(
            "compute_loss",
            reading.add("trainer.compute_loss_func", shown(loss_function)),
            "called with the number of labels of each micro-batch, whose mean it returns",
        )

    steps = reading.settings["accumulation_steps"]
    if is_ignored and steps > 1 and getattr(trainer, "loss_is_scaled_for_ga", None) is not False:
        reading.take(
            "gradient_accumulation_steps",
            f"the loss of this model ignores num_items_in_batch, so the Trainer sums {steps} means "
            f"and its gradients are {steps} times as large; memlab takes their mean",
            accumulation_steps=steps,
        )
    if owner_of(trainer, "compute_loss") is not None:
        own = own_loss(trainer, terms)
        reading.take_into(
            "compute_loss",
            "trainer.compute_loss",
            "the method itself runs, on a stand-in for the Trainer that has its attributes, but no "
            "data, optimizer or callbacks",
        )
        return terms, own
    is_causal = is_causal_model(unwrapped(trainer.model))
    return terms, TrainerLoss(smoother, loss_function, terms, takes_terms, is_causal)


def _ignores_terms(trainer: Any) -> bool:
    """Return whether the loss is a mean, whatever number of terms it is given."""
    owner = owner_of(trainer, "compute_loss")
    if owner is not None and (is_of_trl(owner) or ignores_number_of_terms(trainer.compute_loss)):
        return not is_of_trl(owner)
    has_own = getattr(trainer, "compute_loss_func", None) is not None
    return not has_own and trainer.label_smoother is None and (
        ignores_terms(unwrapped(trainer.model))
    )  # fmt: skip
