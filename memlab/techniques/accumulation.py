"""Gradient accumulation: micro-batches, their exact weights, and when the gradient stays the same.

Left out: the weights of several ranks, which depend on all of them: `sharding/ranks.py`.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import BatchNorm, Dropout, InstanceNorm
from memlab.config import StepConfig
from memlab.errors import WorkloadError
from memlab.techniques import batches
from memlab.techniques.batches import is_object, leaves_of, tensors_of
from memlab.techniques.technique import Control, Equivalence, Technique
from memlab.workload import Workload

PLAIN_BATCH = "return tensors in lists, tuples and dicts: dict(encoding), torch.from_numpy(array)"


def check_batch(workload: Workload, batch: Any, batch_size: int) -> None:
    """Raise WorkloadError if a batch has the wrong number of samples.

    Without the workload's `count_samples`, the number is known only if all tensors have the same
    size along dim 0.
    """
    maker = f"make_batch({batch_size})"
    for path, leaf in leaves_of(batch):
        if is_object(leaf) and not tensors_of(leaf):
            raise WorkloadError(
                f"{maker} returned a {type(leaf).__name__} at {path}, which holds no tensor; "
                f"{PLAIN_BATCH}"
            )

    if not tensors_of(batch):
        raise WorkloadError(f"{maker} returned no tensor; {PLAIN_BATCH}")

    if workload.count_samples is not None:
        _check_count(workload, batch, batch_size, maker)
    elif workload.split_batch is None:
        _check_first_dimensions(batch, batch_size)


def split_by(workload: Workload, batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the micro-batches that the workload's own `split_batch` makes.

    Raises:
        WorkloadError: their number or the numbers of their samples differ from `sizes`.
    """
    assert workload.split_batch is not None
    found, asked = workload.split_batch(batch, list(sizes)), f"split_batch(batch, {list(sizes)})"
    if not isinstance(found, list | tuple) or len(found) != len(sizes):
        what = f"{len(found)} of them" if isinstance(found, list | tuple) else type(found).__name__
        raise WorkloadError(
            f"{asked} returned {what}; allowed is a list of {len(sizes)} batches, one for each size"
        )

    for part, size in zip(found, sizes, strict=True):
        if workload.count_samples is not None:
            _check_count(workload, part, size, asked)

    return list(found)


def parts_of(workload: Workload, batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the batch in parts of these sizes, divided as the workload divides its batches."""
    if len(sizes) == 1:
        return [batch]
    return split(batch, sizes) if workload.split_batch is None else split_by(workload, batch, sizes)


def part_of(workload: Workload, batch: Any, sizes: Sequence[int], index: int) -> Any:
    """Return one of the parts of these sizes; the others are not made if they need not be."""
    if workload.split_batch is not None or len(sizes) == 1:
        return parts_of(workload, batch, sizes)[index]
    return split(batch, (sum(sizes[:index]), sizes[index], sum(sizes[index + 1 :])))[1]


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return micro-batches of these sizes. They are views of the batch.

    A value that is not a tensor goes to every micro-batch.

    Raises:
        WorkloadError: a part of the batch cannot be split; the message names it and the remedy.
    """
    return _split(batch, list(sizes), "batch")


def has_samples_first(batch: Any, num_samples: int) -> bool:
    """Return whether every tensor has this size along dim 0 and all other values are constants."""
    tensors = [leaf for _, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]
    return (
        len(tensors) > 0
        and not _has_objects(batch)
        and all(t.ndim > 0 and t.shape[0] == num_samples for t in tensors)
    )


def _split(part: Any, sizes: list[int], path: str) -> list[Any]:
    if isinstance(part, torch.Tensor):
        _check_tensor(part, sum(sizes), path)
        return list(torch.split(part, sizes))
    if not tensors_of(part) and not _has_objects(part):
        return [part] * len(sizes)

    is_list = isinstance(part, list) and len(part) == sum(sizes)
    if is_list and not has_samples_first(part, sum(sizes)):
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [part[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    # by its id: PyTorch keeps this function in a cycle, which would hold the batch too
    whole = id(part)
    children, structure = pytree.tree_flatten_with_path(part, lambda node: id(node) != whole)
    if isinstance(part, PackedSequence) or (len(children) == 1 and children[0][1] is part):
        raise WorkloadError(
            f"a {type(part).__name__} at {path} cannot be split into micro-batches; give the "
            f"workload a split_batch, or {PLAIN_BATCH}"
        )

    columns = [_split(child, sizes, path + pytree.keystr(key)) for key, child in children]
    return [
        pytree.tree_unflatten([column[i] for column in columns], structure)
        for i in range(len(sizes))
    ]


def _check_first_dimensions(batch: Any, batch_size: int) -> None:
    """Raise WorkloadError if all tensors agree on a wrong number of samples along dim 0.

    If they do not agree, or are inside objects or a list of samples, dim 0 proves nothing.
    """
    tensors = [(path, leaf) for path, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]
    agree = len({leaf.shape[:1] for _, leaf in tensors}) == 1
    is_list = isinstance(batch, list) and len(batch) == batch_size
    is_plain = agree and not is_list and not _has_objects(batch)

    for path, leaf in tensors:
        if is_plain or leaf.layout is not torch.strided:
            _check_tensor(leaf, batch_size, path)


def _check_tensor(tensor: torch.Tensor, num_samples: int, path: str) -> None:
    if tensor.layout is not torch.strided:
        raise WorkloadError(f"{path} is {tensor.layout}; allowed are dense tensors")

    if tensor.ndim == 0 or tensor.shape[0] != num_samples:
        raise WorkloadError(
            f"make_batch({num_samples}) returned a tensor of shape {tuple(tensor.shape)} at "
            f"{path}; allowed is {num_samples} samples along dim 0. make_batch(n) must use its n; "
            "if dim 0 is not the sample, give the workload count_samples and split_batch"
        )


def _check_count(workload: Workload, batch: Any, expected: int, maker: str) -> None:
    """Raise WorkloadError unless `count_samples` counts as many samples as were asked for."""
    assert workload.count_samples is not None
    counted = workload.count_samples(batch)
    try:
        number = None if isinstance(counted, bool) else operator.index(counted)
    except TypeError:
        number = None

    if number is None:
        raise WorkloadError(
            f"count_samples returned {counted!r}; allowed is the number of samples of the batch, "
            "an int"
        )

    if number != expected:
        raise WorkloadError(
            f"{maker} returned a batch in which count_samples counts {number} samples; allowed is "
            f"{expected}: make_batch must use its n, and split_batch its sizes"
        )


def _has_objects(part: Any) -> bool:
    return any(is_object(leaf) for _, leaf in leaves_of(part))


def weights(workload: Workload, micro_batches: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return the weight of each micro-batch's loss; they sum to 1.

    The mean over N samples is the sum of the micro-batch means, each weighted by n_i / N. If the
    loss is a mean over another number of terms (tokens that are not ignored), n_i is that number.
    """
    if workload.num_loss_terms is None:
        terms = [float(size) for size in sizes]
    else:
        terms = [_number(workload.num_loss_terms(batch)) for batch in micro_batches]

    total = sum(terms)
    if not min(terms) >= 0 or not 0 < total < math.inf:
        raise WorkloadError(
            f"num_loss_terms returned {terms} for the micro-batches; allowed are counts, at least "
            "one of them above 0"
        )

    return [count / total for count in terms]


def lines(config: StepConfig, workload: Workload | None = None) -> list[str]:
    """Return the lines of a script that define `micro_batch`.

    With several micro-batches they open a loop, whose body has to follow, and define `weight` too.
    A workload with a `split_batch` is split by it.
    """
    sizes = list(config.micro_batch_sizes)
    own_kind = workload is not None and batches.is_own_kind(workload)
    move = "tree_map_only(torch.Tensor, lambda t: t.to(device), {})"
    move = "moved({}, device)" if own_kind else move
    if len(sizes) == 1:
        return [f"micro_batch = {move.format('batch')}"]

    # the comments are lines of the script
    first = [
        "# one micro-batch after another: the gradients add up to that of the whole batch if the"
    ]
    first += ["# loss is a mean over its samples, and no module or loss mixes them"]
    first += [f"sizes = {sizes}"]
    if own_kind:
        first += ["parts = split_batch(batch, sizes)"]
        first += ["del batch  # parts that are copies need not be held beside the whole batch"]
    if workload is not None and workload.num_loss_terms is not None:
        return [*first, *_lines_of_terms(own_kind), f"    micro_batch = {move.format('part')}"]
    if own_kind:
        return [
            *first,
            "for part, size in zip(parts, sizes, strict=True):",
            "    weight = size / sum(sizes)",
            f"    micro_batch = {move.format('part')}",
        ]
    return [
        *first,
        "for index, size in enumerate(sizes):",
        "    weight = size / sum(sizes)",
        "    micro_batch = tree_map_only(",
        "        torch.Tensor, lambda t: t.split(sizes)[index].to(device), batch",
        "    )",
    ]


def _lines_of_terms(own_kind: bool) -> list[str]:
    """Return the loop over micro-batches whose losses are means over what the workload counts."""
    parts = [
        "parts = [",
        "    tree_map_only(torch.Tensor, lambda t: t.split(sizes)[index], batch)",
        "    for index in range(len(sizes))",
        "]",
    ]
    return [
        *([] if own_kind else parts),
        "# the loss is a mean over these terms, and micro-batches have different numbers of them",
        "terms = [float(num_loss_terms(part)) for part in parts]",
        "for part, count in zip(parts, terms, strict=True):",
        "    weight = count / sum(terms)",
        "    if weight == 0:",
        "        continue  # no terms, so no mean to add",
    ]


def _number(terms: Any) -> float:
    try:
        return float(terms)
    except (TypeError, ValueError):
        raise WorkloadError(
            f"num_loss_terms returned {terms!r}; allowed is a number: of how "
            "many terms the loss is the mean"
        ) from None


def sample_mixing_modules(model: torch.nn.Module) -> list[str]:
    """Return the paths of modules whose output for a sample depends on the rest of its batch."""
    kind = BatchNorm
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, kind)
        and not isinstance(module, InstanceNorm)
        and (module.training or module.running_mean is None)
    ]


def random_modules(model: torch.nn.Module) -> list[str]:
    """Return the paths of modules that draw random numbers in training (dropout of any kind)."""
    return [
        path
        for path, module in model.named_modules()
        if module.training
        and (
            (isinstance(module, Dropout) and module.p > 0)
            or (
                isinstance(module, torch.nn.RNNBase)
                and module.dropout > 0
                and module.num_layers > 1
            )
            or (isinstance(module, torch.nn.MultiheadAttention) and module.dropout > 0)
            or isinstance(module, torch.nn.RReLU)
        )
    ]


BATCH = Technique(
    fields=("batch_size", "accumulation_steps"),
    # `verify` reports separately what micro-batches do to the gradient
    equivalence=Equivalence.NOT_COMPARED,
    examples={"accumulation": {"accumulation_steps": 2}},
    controls=(
        Control(field="batch_size", label="Batch size", named=lambda n: f"batch {n}"),
        Control(
            field="accumulation_steps", label="Accumulation", named=lambda n: f"accumulation {n}"
        ),
    ),
)
