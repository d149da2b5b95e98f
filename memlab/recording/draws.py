"""`Draws`: the random numbers of a run over fake tensors, if the run depends on them.

Fake kernels draw nothing, so a branch on a random number, such as a layer that is skipped by
chance, has to be guessed. But a step begins with a seed, and a CPU's generator gives the same
numbers if it is asked in the same order. So each random operator can run for real, alone, and then
its numbers are known. This costs memory and time. It is done only in a second attempt, if the first
one read a value that random numbers of the step may have decided.

Left out: a card's own generators, whose numbers are not known without the card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memlab.arguments.units import MIB
from memlab.recording.values import MOST_ELEMENTS, Values, for_real, tensors_in
from memlab.torch_private.operators import schema_of

# the number of draws of these operators depends on shapes only
FOLLOWED = frozenset(
    (
        "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
        "multinomial", "native_dropout", "normal", "normal_", "rand", "rand_like", "randint",
        "randint_like", "randn", "randn_like", "randperm", "random_", "rrelu_with_noise",
        "rrelu_with_noise_", "uniform_",
    )
)  # fmt: skip
# these operators reject draws, depending on the values of their arguments
REJECTING = frozenset(("_sample_dirichlet", "_standard_gamma", "binomial", "poisson"))
MOST_BYTES = 256 * MIB  # of one operator's arguments and outputs


class Draws:
    """The random numbers of a run.

    Attributes:
        are_followed: whether numbers are drawn for real, in this attempt and all later ones.
    """

    def __init__(self) -> None:
        self.are_followed = False
        self.restart()

    def restart(self) -> None:
        """Forget the last attempt."""
        self._has_drawn = False
        self._may_decide = False
        self._is_lost = False

    def begin_step(self) -> None:
        """Begin a step. It sets a seed, so the state of the generator is known again."""
        self._is_lost = False

    def note_assumed(self) -> None:
        """Record that the run branches on an unknown value."""
        self._may_decide |= self._has_drawn

    def turn(self) -> bool:
        """Return whether another attempt should draw for real, and prepare for it."""
        if self.are_followed or not self._may_decide:
            return False
        self.are_followed = True
        return True

    def drawn(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, values: Values
    ) -> Any:
        """Return the numbers that an operator has drawn; None if unknown or not random.

        Args:
            func: the operator, which has run over fake tensors.
            args: its arguments.
            kwargs: its keyword arguments.
            out: the fake tensors that it returned.
            values: the known values of fake tensors.
        """
        name = schema_of(func).name.partition("::")[2]
        outputs = tensors_in(out)
        if name not in FOLLOWED | REJECTING or any(t.device.type != "cpu" for t in outputs):
            return None

        is_small = all(t.numel() <= MOST_ELEMENTS for t in outputs)
        self._has_drawn |= is_small
        if not self.are_followed or self._is_lost:
            return None

        given = tensors_in([args, list(kwargs.values())])
        if name in REJECTING or sum(t.nbytes for t in (*given, *outputs)) > MOST_BYTES:
            self._is_lost = True
            return None

        written = args[:1] if schema_of(func).is_mutable else ()  # whose old values do not matter
        is_known = all(values.of(t) is not None for t in given if not any(t is w for w in written))
        with for_real():
            real_args = [_real(value, values) for value in args]
            real = func(*real_args, **{key: _real(v, values) for key, v in kwargs.items()})

        return real if is_known and is_small else None


def _real(value: Any, values: Values) -> Any:
    """Return an argument for a real run: the known values of a tensor, or 0.5 everywhere."""
    if isinstance(value, torch.Tensor):
        known = values.of(value)
        if known is not None:
            return known.clone()
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return made.fill_(0.5)
    return value
