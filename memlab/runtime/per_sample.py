"""Whether micro-batches give the gradient of the whole batch, where the model is too large to run.

The loss runs over fake tensors with four samples and with two. A dimension that doubles holds the
samples, so the shapes of both runs show which operators work on each sample for itself: the
dimension of the samples is not reduced, not contracted, not moved into another, and stays single.
Nor may it be given another number, sizes apart, as where a loss multiplies by `len(x)`.

What comes after the first operator of which this is not known, mostly a few operators of the loss,
then runs for real: on the real labels, and on random numbers in place of what the model computes.
Its value and its gradients, of four samples at once and of two halves, must be the same.

A loss that reads random numbers from 0 to 1 as logarithms of probabilities gets a value that means
nothing, and divides and averages all the same. Numbers of both signs are tried too, where the loss
takes them. A bound or a slope that depends on the number of samples and has shown no difference is
left undecided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import FakeTensor, TorchDispatchMode, schema_of
from memlab.config import Precision, StepConfig
from memlab.devices.operators import leaf_tensors
from memlab.errors import MemlabError
from memlab.running import Progress, Report, explain
from memlab.runtime.accumulation import AccumulationEffect, drawing, is_refusal, mixing, silence
from memlab.techniques import precision
from memlab.techniques.accumulation import parts_of, weights
from memlab.techniques.batches import tensors_of
from memlab.techniques.loss.several_losses import several_losses
from memlab.techniques.step import set_seed
from memlab.techniques.trials import check_loss
from memlab.tracing.fake_workload import tried_over_fakes
from memlab.tracing.values import for_real
from memlab.workload import Workload

SAMPLES, PARTS = 4, 2
SIGNED = (False, False, True)  # of the numbers of each try
MOST_NUMBERS = 6e7  # in what runs for real
TOLERANCE = 1e-6  # numbers of terms may be fp32

Dims = tuple[int, ...]
LIKE_POINTWISE = {
    "_to_copy", "alias", "clone", "contiguous", "copy", "detach", "lift_fresh",
    "empty_like", "full_like", "masked_fill", "ones_like", "zeros_like",
}  # fmt: skip
SIZES = {"N", "shape", "size"}  # arguments that may follow the number of samples
RESHAPES = {"view", "_unsafe_view", "reshape"}
SHUFFLES = {"expand", "permute", "squeeze", "t", "transpose", "unsqueeze"}
ARITHMETIC = {"add", "addcdiv", "addcmul", "div", "mul", "pow", "reciprocal", "rsub", "sub"}
ALONG = {
    "_log_softmax", "_softmax", "all", "amax", "amin", "any", "argmax", "argmin", "cat", "cumsum",
    "gather", "glu", "index_select", "linalg_vector_norm", "logsumexp", "max", "mean", "min",
    "narrow", "norm", "prod", "select", "slice", "sort", "split", "split_with_sizes", "std", "sum",
    "topk", "unbind", "var", "var_mean",
}  # fmt: skip
"""Operators that work along their argument `dim`, or along all dimensions without one."""

SAMPLES_FIRST = {
    "_adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "convolution",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "native_group_norm",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_trilinear3d", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
}  # fmt: skip
"""Operators of batches that have a dimension of samples, the first, and treat each alone."""


FIRST_OUTPUT = {"native_group_norm", "mkldnn_rnn_layer"}


class _Undecided(Exception):
    """What cannot be decided in this way; the message says why."""


@dataclass(slots=True)
class _Dispatched:
    """An operator that ran over fake tensors."""

    func: Any
    args: Any
    kwargs: Any
    outputs: list[torch.Tensor]
    result: Any
    with_grad: bool

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return leaf_tensors((self.args, self.kwargs))


class _Look(TorchDispatchMode):
    """Writes down every operator that runs inside of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Dispatched] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with_grad, kwargs = torch.is_grad_enabled(), kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "prim":  # a question about a tensor
            self.calls.append(
                _Dispatched(func, args, kwargs, leaf_tensors(result), result, with_grad)
            )
        return result


@dataclass(slots=True)
class _FakeLoss:
    """The operators of one run over fake tensors, its loss, and its batch."""

    calls: list[_Dispatched]
    loss: torch.Tensor
    batch: list[torch.Tensor]


def judged_by_shapes(
    workload: Workload, *, least_bytes: int = 0, report: Report
) -> AccumulationEffect | None:
    """Return what micro-batches do to the gradient, without running the model.

    None if its parameters take less than `least_bytes`: it is better run.
    """
    report(Progress(text="whether micro-batches give the same gradient, by shapes", fraction=0.0))

    def look(fake: Workload, model: torch.nn.Module) -> AccumulationEffect | None:
        mixed = mixing(model)
        if mixed is not None or precision.bytes_of(model, Precision.AS_BUILT) < least_bytes:
            return mixed
        random = silence(model)
        runs = [_run(fake, model, samples) for samples in (SAMPLES, PARTS)]
        judged = _judged(workload, *runs)
        return drawing(random[0]) if random and judged.same == "yes" else judged

    try:
        return tried_over_fakes(workload, look)
    except (_Undecided, MemlabError) as error:
        same = "refused" if is_refusal(error) else "unknown"
        return AccumulationEffect(same=same, why=str(error))
    except Exception as error:  # whatever a model or a loss raises over fake tensors
        why = f"it could not be looked at over fake tensors ({type(error).__name__}: {error})"
        return AccumulationEffect(same="unknown", why=why[:300])


def _run(fake: Workload, model: torch.nn.Module, samples: int) -> _FakeLoss:
    batch, look = fake.make_batch(samples), _Look()
    with look:
        loss = fake.compute_loss(model, batch)
    if not isinstance(loss, torch.Tensor):
        several_losses(loss, StepConfig(batch_size=SAMPLES, accumulation_steps=PARTS), {})
    return _FakeLoss(look.calls, loss, tensors_of(batch))


def _judged(workload: Workload, whole: _FakeLoss, part: _FakeLoss) -> AccumulationEffect:
    if [call.func for call in whole.calls] != [call.func for call in part.calls]:
        raise _Undecided("it runs other operators with another number of samples")
    tail = _Tail.of(whole, part)
    if tail.draws:
        return drawing("its forward")
    with for_real():
        for seed, is_signed in enumerate(SIGNED):
            try:
                apart = _apart(workload, tail, seed, is_signed=is_signed)
            except _Undecided:
                if is_signed:  # which no logarithm takes
                    continue
                raise
            if not apart <= TOLERANCE:
                return AccumulationEffect(same="no", why=(
                    f"the loss of {SAMPLES} samples changes by {apart:.1e} when it is computed of "
                    f"{PARTS} at a time, from {tail.first} on; if it is a mean over another number "
                    "of terms, give the workload num_loss_terms"
                ))  # fmt: skip
    if tail.doubt:
        raise _Undecided(
            f"an argument of {tail.doubt} depends on the number of samples, and acts on some values"
        )
    return AccumulationEffect(same="yes", why="each sample is computed for itself")


@dataclass(slots=True)
class _Tail:
    """What runs for real: operators by number, and what they read of the model.

    Attributes:
        whole: the run of all samples.
        part: that of some.
        calls: numbers of the operators.
        read: pairs of tensors of both runs that the model computes.
        first: the name of the first operator that does not treat samples alone.
        draws: whether an operator draws random numbers for each sample.
        doubt: the name of one for which the number of samples may count at some values only.
    """

    whole: _FakeLoss
    part: _FakeLoss
    calls: list[int]
    read: list[tuple[torch.Tensor, torch.Tensor]]
    first: str
    draws: bool
    doubt: str

    @classmethod
    def of(cls, whole: _FakeLoss, part: _FakeLoss) -> "_Tail":
        """Return the operators from the first one on that does not treat samples alone."""
        seen, counted, doubts = {id(t) for t in whole.batch}, set[int](), dict[int, str]()
        of_batch, of_model, tail = set(seen), set[int](), set[int]()
        runs, first, draws = list[bool](), "", False
        for number, (call, other) in enumerate(zip(whole.calls, part.calls, strict=True)):
            inputs = call.inputs
            of_model |= {id(t) for t in inputs if isinstance(t, FakeTensor)} - seen
            seen |= {id(t) for t in inputs}
            varies = any(_varying(*pair) for pair in zip(call.outputs, other.outputs, strict=True))
            draws |= varies and _draws(call)
            counts = _reads_number_of_samples(call, other)
            depends = varies or counts or any(id(t) in of_batch for t in inputs)
            is_tail = any(id(t) in tail for t in inputs) or counts
            is_tail = is_tail or (depends and not _is_alone(call, other))
            first = first or (call.name if is_tail and inputs else "")
            is_read = call.name == "_local_scalar_dense" and inputs[0].dtype is not torch.bool
            if is_read and depends:  # a condition changes which operators run, and they are alike
                raise _Undecided("the loss reads a value of its tensors, as with .item()")
            reads_model = any(id(t) in of_model for t in inputs)
            counts |= any(id(t) in counted for t in inputs)
            is_number = not (varies or reads_model or any(id(t) in of_batch for t in inputs))
            if counts and not is_number and _acts_on_some_values(call):
                doubts[number] = call.name
            for output in map(id, call.outputs):
                seen.add(output)
                (counted.add if counts and is_number else counted.discard)(output)
                for flags, flag in ((of_batch, depends), (of_model, reads_model), (tail, is_tail)):
                    (flags.add if flag else flags.discard)(output)
            runs.append(is_tail or not reads_model)
        if id(whole.loss) not in tail:
            raise _Undecided("the loss does not depend on the batch")
        calls, read = _needed(whole, part, runs)
        doubt = next((name for number, name in doubts.items() if number in calls), "")
        return cls(whole, part, calls, read, first, draws, doubt)


def _needed(
    whole: _FakeLoss, part: _FakeLoss, runs: Sequence[bool]
) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return what has to run for the loss, and pairs of what it reads of the model."""
    needed, calls, read = {id(whole.loss)}, list[int](), dict[int, Any]()
    given = {id(t) for t in whole.batch}
    for number in reversed(range(len(runs))):
        call, other = whole.calls[number], part.calls[number]
        made = {id(t) for t in call.outputs}
        if not runs[number]:
            needed -= made  # it stays among what is read
            continue
        if not made & needed and not schema_of(call.func).is_mutable:
            continue
        calls.append(number)
        for one, its in zip(call.inputs, other.inputs, strict=True):
            needed.add(id(one))
            if isinstance(one, FakeTensor) and id(one) not in given:
                read[id(one)] = one, its
    calls.reverse()
    made = {id(t) for number in calls for t in whole.calls[number].outputs}
    pairs = [pair for key, pair in read.items() if key not in made]
    if any(not one.is_floating_point() for one, _ in pairs):
        raise _Undecided("the loss reads whole numbers that the model computes")
    numbers = sum(t.numel() for n in calls for t in whole.calls[n].outputs)
    numbers += sum(one.numel() for one, _ in pairs)
    if numbers > MOST_NUMBERS:
        raise _Undecided(f"the loss of {SAMPLES} samples works on {numbers:.1e} numbers, too many")
    return calls, pairs


def _apart(workload: Workload, tail: _Tail, seed: int, *, is_signed: bool) -> float:
    """Return by how much two halves differ from the whole, in the loss or in a gradient."""
    set_seed(seed)
    batch, sizes = workload.make_batch(SAMPLES), [PARTS, SAMPLES - PARTS]
    parts = parts_of(workload, batch, sizes)
    make = torch.randn if is_signed else torch.rand
    values = [make(one.shape, dtype=torch.float64) * 0.9 + 0.05 for one, _ in tail.read]
    dims = [_varying(*pair) for pair in tail.read]
    try:
        loss, gradients = _ran(tail, tail.whole, batch, values)
        total, sums = torch.zeros_like(loss), [torch.zeros_like(value) for value in values]
        for at, (half, weight) in enumerate(
            zip(parts, weights(workload, parts, sizes), strict=True)
        ):
            cut = [
                value.chunk(2, dim[0])[at] if dim else value
                for value, dim in zip(values, dims, strict=True)
            ]
            its, own = _ran(tail, tail.part, half, cut)
            total += weight * its
            for whole, dim, gradient in zip(sums, dims, own, strict=True):
                (whole.chunk(2, dim[0])[at] if dim else whole).add_(weight * gradient)
    except Exception as error:  # some operators do not run alone
        raise _Undecided(
            f"its loss could not be run for itself ({type(error).__name__}: {error})"[:300]
        ) from None
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    if not 0 < norm < math.inf or not loss.isfinite():
        raise _Undecided("the gradient of its loss is zero or not finite")
    far = math.sqrt(
        sum(float((g - s).square().sum()) for g, s in zip(gradients, sums, strict=True))
    )
    return max(far / norm, float((loss - total).abs()) / max(1.0, float(loss.abs())))


def _ran(
    tail: _Tail, run: _FakeLoss, batch: Any, values: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss in fp64 and its gradients, with these values of what the model computes."""
    leaves = [value.detach().clone().requires_grad_() for value in values]
    read = [one if run is tail.whole else its for one, its in tail.read]
    real = [t.double() if t.is_floating_point() else t for t in tensors_of(batch)]
    known: dict[int, torch.Tensor] = dict(zip(map(id, run.batch), real, strict=True))
    known |= dict(zip(map(id, read), leaves, strict=True))

    def put(given: Any) -> Any:
        if isinstance(given, FakeTensor):
            return known[id(given)]
        if isinstance(given, torch.Tensor):
            return given.double() if given.is_floating_point() else given
        is_float = isinstance(given, torch.dtype) and given.is_floating_point
        return torch.float64 if is_float else given

    for number in tail.calls:
        call = run.calls[number]
        args, kwargs = pytree.tree_map(put, (call.args, call.kwargs))
        with torch.set_grad_enabled(call.with_grad):
            result = call.func(*args, **kwargs)
        known.update(zip(map(id, call.outputs), leaf_tensors(result), strict=True))
    loss = known[id(run.loss)]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), list(found)


def _draws(call: _Dispatched) -> bool:
    """Return whether an operator draws random numbers; an attention may draw none."""
    is_random = torch.Tag.nondeterministic_seeded in call.func.tags
    return is_random and _argument(call, "dropout_p") != 0.0


def _acts_on_some_values(call: _Dispatched) -> bool:
    """Return whether a number that an operator is given may change some of its results only."""
    is_known = torch.Tag.pointwise in call.func.tags or call.name.endswith("_loss")
    return is_known and call.name.rstrip("_") not in ARITHMETIC


def _reads_number_of_samples(call: _Dispatched, other: _Dispatched) -> bool:
    """Return whether an argument besides sizes is another number in the other run."""
    given, its = _numbers(call), _numbers(other)
    with for_real():
        return len(given) != len(its) or any(
            not torch.equal(one, two) if isinstance(one, torch.Tensor) else one != two
            for one, two in zip(given, its, strict=True)
            if one is not two
        )


def _numbers(call: _Dispatched) -> list[Any]:
    """Return the arguments of an operator that are no sizes, and no tensors of the loss."""
    names = (argument.name for argument in schema_of(call.func).arguments)
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    leaves = pytree.tree_leaves([one for name, one in given.items() if name not in SIZES])
    return [leaf for leaf in leaves if not isinstance(leaf, FakeTensor)]


def _is_alone(call: _Dispatched, other: _Dispatched) -> bool:
    """Return whether an operator treats each sample for itself, as far as that is known."""
    pairs = list(zip(call.inputs, other.inputs, strict=True))
    dims = [_varying(*pair) for pair in pairs]
    outs = [_varying(*pair) for pair in zip(call.outputs, other.outputs, strict=True)]
    if call.name in FIRST_OUTPUT or "scaled_dot_product" in call.name:
        outs = outs[:1]  # the others are for backward
    if any(len(dim) != 1 for dim in outs) or any(len(dim) > 1 for dim in dims):
        return False
    if any(
        one.shape[d] != 2 * its.shape[d]
        for (one, its), ds in zip(pairs, dims, strict=True)
        for d in ds
    ):
        return False
    name, out = call.name.rstrip("_") if call.name.endswith("_") else call.name, outs[0][0]
    rank = call.outputs[0].ndim
    if torch.Tag.pointwise in call.func.tags or name in LIKE_POINTWISE:
        return all(
            not d or t.ndim - d[0] == rank - out for (t, _), d in zip(pairs, dims, strict=True)
        )
    if not pairs:
        return name in {"empty", "full", "ones", "zeros"}
    if name in {"new_empty", "new_full", "new_ones", "new_zeros", *SHUFFLES}:
        return True
    tensor, dim = call.inputs[0], dims[0]
    if name in RESHAPES:
        return math.prod(tensor.shape[: dim[0]]) == math.prod(call.outputs[0].shape[:out])
    if name in ALONG:
        along = _argument(call, "dim")
        along = along if isinstance(along, list | tuple) else [along]
        held = {d[0] for d in dims if d}
        has_dims = None not in along and len(along) > 0
        return has_dims and len(held) == 1 and not held & {d % tensor.ndim for d in along}
    return _is_product(name, dims) or _is_known(call, name, tensor, dims)


def _is_product(name: str, dims: Sequence[Dims]) -> bool:
    """Return whether it is a product that does not sum over samples."""
    if name in {"addmm", "baddbmm"}:
        dims = dims[1:]
    if name in {"mm", "addmm", "mv"}:
        return dims[0] in ((), (0,)) and dims[1] in ((), (1,)) and not (dims[0] and dims[1])
    if name in {"bmm", "baddbmm"}:
        return (dims[0], dims[1]) in (((0,), (0,)), ((1,), ()), ((), (2,)))
    return False


def _is_known(call: _Dispatched, name: str, tensor: torch.Tensor, dims: Sequence[Dims]) -> bool:
    """Return whether it is another operator that treats each sample for itself."""
    if name in {"native_layer_norm", "_fused_rms_norm"}:
        shape = _argument(call, "normalized_shape")
        return bool(dims[0]) and dims[0][0] < tensor.ndim - len(shape) and not any(dims[1:])
    if name == "embedding":
        return not dims[0]
    if name == "index":  # a table that is looked up
        return not dims[0] and sum(map(bool, dims)) == 1
    if name == "constant_pad_nd":
        return dims[0] == (0,) and len(_argument(call, "pad")) < 2 * tensor.ndim
    if name in {"native_batch_norm", "cudnn_batch_norm"}:
        # an instance norm sees the channels of all samples as channels of one
        is_instance = tensor.shape[0] == 1 and dims[0] == (1,)
        return is_instance or (not _argument(call, "training") and dims[0] == (0,))
    if name == "mkldnn_rnn_layer":  # of time, sample, feature
        return dims[0] == (1,) and all(d in ((), (0,), (1,)) for d in dims[1:])
    is_first = all(d in ((), (0,)) for d in dims) and dims[0] == (0,)
    if name == "convolution":
        return is_first and not any(dims[1:])
    return name in SAMPLES_FIRST and is_first and tensor.ndim >= 3


def _argument(call: _Dispatched, name: str) -> Any:
    """Return an argument of an operator by its name."""
    for position, argument in enumerate(schema_of(call.func).arguments):
        if argument.name == name:
            given = call.kwargs.get(name, argument.default_value)
            return call.args[position] if position < len(call.args) else given
    return None


def _varying(one: torch.Tensor, other: torch.Tensor) -> Dims:
    """Return the dimensions in which two tensors differ; all if they have not as many."""
    if one.ndim != other.ndim:
        return tuple(range(max(one.ndim, 2)))
    sizes = enumerate(zip(one.shape, other.shape, strict=True))
    return tuple(dim for dim, (size, its) in sizes if size != its)


# Whether `compute_loss` returns one loss, as its forward over fake tensors shows.

SAMPLES_OF_A_TRIAL = 2


def loss_in_process(workload: Workload, *, report: Report) -> tuple[str, str]:
    """Return "one", "several", "wrong" or "unknown", and why it is wrong or unknown."""
    report(Progress(text=f"looking at the loss of {workload.name}", fraction=0.0))
    try:
        return tried_over_fakes(workload, _judged_one_loss)
    except Exception as error:  # whatever a model or a loss raises over fake tensors
        return "unknown", explain(error, "compute_loss over fake tensors")[1]


def _judged_one_loss(fake: Workload, model: torch.nn.Module) -> tuple[str, str]:
    loss: Any = fake.compute_loss(model, fake.make_batch(SAMPLES_OF_A_TRIAL))
    try:
        if isinstance(loss, torch.Tensor):
            check_loss(loss)
            return "one", ""
        several_losses(loss, StepConfig(batch_size=SAMPLES_OF_A_TRIAL), {})
    except MemlabError as error:
        return "wrong", str(error)
    return "several", ""
