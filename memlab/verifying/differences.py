"""Compare the updates of two runs, bit by bit or by relative errors."""

import math

import torch

from memlab.verifying.updates import Tensors, Update, UpdatesRun

RANDOM_STATE = "the random state"


def relative_errors(found: Tensors, expected: Tensors) -> tuple[str, float, float]:
    """Return the worst parameter, its relative error, and the error of all gradients together.

    The error of a parameter is relative to its own gradient. If that is nearly zero, the error is
    relative to 1e-3 of the average gradient.
    """
    norm = math.sqrt(sum(float(_double(g).square().sum()) for g in expected.values()))
    floor = 1e-3 * norm / math.sqrt(len(expected))
    worst, max_error, squares = "", -1.0, 0.0

    for name, reference in expected.items():
        difference = float((_double(found[name]) - _double(reference)).norm())
        squares += difference**2
        error = ratio(difference, max(float(_double(reference).norm()), floor))
        if math.isnan(error) or error > max_error:
            worst, max_error = name, error
        if math.isnan(error):
            break

    return worst, max_error, ratio(math.sqrt(squares), norm)


def ratio(difference: float, size: float) -> float:
    """Return a difference relative to a size; infinite if only the size is zero."""
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else math.inf


def _double(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.double()


def misplaced(ours: Update, theirs: Update, begin: Tensors, tolerance: float) -> str | None:
    """Return whether weights or which optimizer states differ after an update; None if none do.

    Only weights whose gradients agree are compared: if a gradient is nothing but rounding, Adam
    makes a full step in either direction. Tensors in different formats are not compared.
    """
    squares = size = 0.0
    for name, reference in theirs.after.weights.items():
        weight, gradient = ours.after.weights[name], theirs.gradients.get(name)
        if gradient is None or weight.dtype != reference.dtype:
            continue

        agrees = (ours.gradients[name] - gradient).abs() <= 0.01 * gradient.abs()
        # a small update of a large weight is lost in the weight's own rounding
        rounding = 2 * torch.finfo(weight.dtype).eps * reference.abs()
        excess = ((weight - reference).abs() - rounding).clamp(min=0) * agrees
        squares += float(excess.double().square().sum())
        size += float(((reference - begin[name]).abs() * agrees).double().square().sum())

    if not ratio(math.sqrt(squares), math.sqrt(size)) <= tolerance:
        return "weights"

    # states are summed over all parameters by kind ("exp_avg"), since single ones may be near zero
    kinds: dict[str, list[float]] = {}
    for place, reference in theirs.after.states.items():
        state = ours.after.states.get(place)
        if state is None or state.dtype != reference.dtype or state.shape != reference.shape:
            continue

        if reference.is_floating_point() or reference.is_complex():
            sums = kinds.setdefault(place.rpartition(": ")[2], [0.0, 0.0])
            sums[0] += float((state.to_dense() - reference.to_dense()).norm()) ** 2
            sums[1] += float(reference.to_dense().norm()) ** 2

    far = (
        kind
        for kind, (apart, whole) in kinds.items()
        if not ratio(math.sqrt(apart), math.sqrt(whole)) <= tolerance
    )
    return next((f"the optimizer's {kind}" for kind in far), None)


def first_difference(
    found: UpdatesRun, kept: UpdatesRun, device: torch.device
) -> tuple[int, str] | None:
    """Return the first update (from 1) in which a bit differs, and what differs; None if none."""
    if device.type == "cpu":  # a model that is built on a card draws other initial weights
        name = _first_unequal(found.begin.weights, kept.begin.weights)
        if name is not None:
            return 1, f"the first values of {name}"

    for number, (ours, theirs) in enumerate(zip(found.updates, kept.updates, strict=True), 1):
        if not torch.equal(ours.random_state, theirs.random_state):
            return number, RANDOM_STATE
        if ours.hooks != theirs.hooks:
            return number, "the hooks of " + min(ours.hooks.items() ^ theirs.hooks.items())[0]
        if ours.loss != theirs.loss and not math.isnan(theirs.loss):
            return number, "the loss"

        pairs = {
            "the gradient of": (ours.gradients, theirs.gradients),
            "buffer": (ours.buffers, theirs.buffers),
            "weight": (ours.after.weights, theirs.after.weights),
            "buffer ": (ours.after.buffers, theirs.after.buffers),
            "the optimizer state of": (ours.after.states, theirs.after.states),
        }
        for kind, pair in pairs.items():
            name = _first_unequal(*pair)
            if name is not None:
                return number, f"{kind.strip()} {name}"

    return None


def _first_unequal(ours: Tensors, theirs: Tensors) -> str | None:
    if ours.keys() != theirs.keys():
        return min(ours.keys() ^ theirs.keys())
    return next((name for name in theirs if not _is_equal(ours[name], theirs[name])), None)


def _is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    ours, theirs = ours.to_dense(), theirs.to_dense()  # a momentum of sparse gradients is sparse
    return torch.equal(ours, theirs) or (
        theirs.is_floating_point() and torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    )


def first_unequal_buffer(found: Tensors, expected: Tensors, tolerance: float) -> str | None:
    """Return a buffer that differs by more than a relative tolerance; None if none does."""
    for name, reference in expected.items():
        buffer = found.get(name)
        if buffer is None or buffer.shape != reference.shape:
            return name
        if not torch.allclose(buffer.double(), reference.double(), rtol=tolerance, atol=tolerance):
            return name

    return None
