"""`UnknownValues`: answers for a run over fake tensors that reads a value nobody knows.

The answer is what a training step usually meets: numbers are finite, checks pass, and picks (the
experts of a token) are spread evenly. If a check fails with the first answer, the next attempt
gives the other answer, because a step that raises has no memory to predict. So does a `while` loop
that one answer keeps going, after 100 rounds. Every assumption is reported, unless the value only
decides whether an error is raised.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from memlab._util.functions import is_cell
from memlab._util.torch_private.python_device import PAD_PACKED_SEQUENCE, functions
from memlab._util.torch_private.tensors import FakeTensor, schema_of
from memlab._util.units import MIB
from memlab.errors import UnsupportedError
from memlab.trace import Phase
from memlab.tracing.values import MOST_ELEMENTS, Values, for_real, tensors_in

# Packed sequences of different lengths over fake tensors.
#
# PyTorch's kernels read lengths from memory, or write them to memory, that a fake tensor
# does not have. Lengths that come from the batch are known, so this file computes the
# results itself.

LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def packed(
    data: torch.Tensor, counts: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed sequences with all their elements, and the batch size of each time step.

    Args:
        data: padded sequences, (steps, samples, ...), or (samples, steps, ...) if `batch_first`.
        counts: int64, (samples,), how long each is; real.
        batch_first: which of the two.
    """
    with for_real():  # a layer's kernel reads how many sequences each time step has
        batch_sizes = (counts[:, None] > torch.arange(int(counts.max()))).sum(0)
        rows = int(counts.sum())
    return data.new_empty((rows, *data.shape[2:])), batch_sizes


@contextlib.contextmanager
def lengths_known(values: Values) -> Iterator[None]:
    """Make padding, recurrent layers and the CTC loss work with known lengths of sequences.

    Calls with unknown lengths fail as they would without this.
    """
    torch_module: Any = torch
    pad = getattr(functions, PAD_PACKED_SEQUENCE)
    ctc_loss = torch_module.ctc_loss
    layers = {name: getattr(functions, name) for name in LAYERS}

    def padded(
        data: torch.Tensor, batch_sizes: Any, batch_first: bool, value: float, total: int
    ) -> Any:
        known = values.of(batch_sizes)
        if known is None or not isinstance(data, FakeTensor):
            return pad(data, batch_sizes, batch_first, value, total)
        with for_real():
            sizes = known.tolist()
        return _padded(data, sizes, batch_first, value, total)

    def run(name: str) -> Callable[..., Any]:
        def layer(x: torch.Tensor, second: Any, *rest: Any) -> Any:
            # packed sequences come with the batch size of each step, others with a hidden state
            is_batch = isinstance(second, FakeTensor) and second.dtype is torch.int64
            known = values.of(second) if is_batch else None
            return layers[name](x, second if known is None else known, *rest)

        return layer

    def aligned(
        log_probs: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        # PyTorch turns lists into tensors without its dispatcher, where no mode sees them; a card
        # takes lengths in the host's memory, which its kernel brings over
        lengths = (input_lengths, target_lengths)
        both = (torch.as_tensor(given, device=log_probs.device) for given in lengths)
        return ctc_loss(log_probs, targets, *both, *rest, **more)

    setattr(functions, PAD_PACKED_SEQUENCE, padded)
    torch_module.ctc_loss = aligned
    for name in LAYERS:
        setattr(functions, name, run(name))
    try:
        yield
    finally:
        torch_module.ctc_loss = ctc_loss
        for name in (PAD_PACKED_SEQUENCE, *LAYERS):
            delattr(functions, name)


def _padded(
    data: torch.Tensor, sizes: Sequence[int], batch_first: bool, value: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded sequences and their lengths.

    Source: `_pad_packed_sequence` in ATen/native/PackedSequence.cpp, which copies the steps that
    have as many sequences at once.
    """
    steps, most = len(sizes), sizes[0]
    if 0 < total < steps:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but "
            f"got total_length={total} and max sequence length being {steps}"
        )

    out = torch.full(
        (max(total, steps), most, *data.shape[1:]), value, dtype=data.dtype, device=data.device
    )
    lengths: list[int] = []
    done = first = 0

    for step in range(1, steps + 1):
        # as long as no sequence ends, the steps are collected for one copy
        size, following = sizes[step - 1], sizes[step] if step < steps else 0
        if following == size:
            continue

        rows = data[done : done + size * (step - first)]
        out[first:step, :size].copy_(rows.view(step - first, size, *data.shape[1:]))
        done, first = done + len(rows), step
        lengths = [step] * (size - following) + lengths

    return out.transpose(0, 1) if batch_first else out, torch.tensor(lengths)


aten = torch.ops.aten
ALL = frozenset(("aten::all", "aten::_is_all_true"))
CTC = frozenset((aten._ctc_loss.default, aten._ctc_loss.Tensor))
SUPPRESSION = "torchvision.nms.default"  # of overlapping boxes
MOST_ATTEMPTS, MOST_CANDIDATES = 12, 4
MOST_ROUNDS = 100  # of a `while` loop that one answer may keep going
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Site(NamedTuple):
    """A line of code that reads a value."""

    file: str
    line: int


class Guesses:
    """The lines of code whose first answer is turned around, over several attempts.

    Args:
        most_attempts: how often a run is tried again.
    """

    def __init__(self, most_attempts: int = MOST_ATTEMPTS) -> None:
        self._most_attempts = most_attempts
        self.turned: frozenset[Site] = frozenset()
        self.read: list[Site] = []  # in this attempt, in order
        self._kept: frozenset[Site] = frozenset()
        self._candidates: list[Site] = []
        self._reached = -1
        self._attempts = 0

    def turn(self, reached: int) -> bool:
        """Prepare another attempt after one that failed; False if no attempt is left.

        The lines that read a value last before the failure are tried first. An answer stays turned
        around if the run then gets further.

        Args:
            reached: number of operators that were dispatched before the failure.
        """
        if reached > self._reached:
            self._reached, self._kept = reached, self.turned
            latest_first = dict.fromkeys(reversed(self.read))
            others = [site for site in latest_first if site not in self.turned]
            self._candidates = others[:MOST_CANDIDATES]

        self._attempts += 1
        if not self._candidates or self._attempts > self._most_attempts:
            return False

        self.turned = self._kept | {self._candidates.pop(0)}
        return True


class UnknownValues:
    """Answers for one attempt.

    Args:
        values: the known values.
        guesses: what was learned from failed attempts.
        assume: called with what the run does, what is assumed, and what that decides: which
            operators run ("branch"), how work is divided ("spread"), or neither ("value").
        place: returns where the run is.
    """

    def __init__(
        self,
        values: Values,
        guesses: Guesses,
        assume: Callable[[str, str, str], None],
        place: Callable[[], object],
    ) -> None:
        self.values = values
        self._guesses = guesses
        self._assume = assume
        self._place = place
        self._has_said_picked = False
        self._rounds: Counter[tuple[Site, object]] = Counter()
        self._checks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def note_check(self, func: Any, out: Any) -> None:
        """Remember a flag that is true if a check of unknown values passes."""
        if schema_of(func).name in ALL:
            self._checks[id(out)] = out

    def value(self, func: Any, args: Any, real: Any) -> Any:
        """Return the value that the run reads."""
        frame = _reader()
        site = Site(frame.f_code.co_filename, frame.f_lineno)
        # values that PyTorch itself reads, or that only decide about an error, do not matter
        is_theirs = not _module(frame).startswith(("torch.", "memlab."))
        matters = is_theirs and not _guards_an_error(site)
        if real is not None:
            if matters:
                self._say_if_picked(args, f"{_line(frame)} reads a value")
            return real
        if func in (aten.allclose.default, aten.equal.default):
            return True
        if func is not aten._local_scalar_dense.default:
            raise self._refusal(func, "depends on values")

        self._guesses.read.append(site)
        is_turned = site in self._guesses.turned
        is_endless = matters and self._is_endless(site, frame)
        value = self._guess(args[0], _module(frame)) != (is_turned != is_endless)
        dtype = args[0].dtype
        kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
        typed = kind(value)

        if is_endless or (matters and not is_turned):
            doubt = "value" if dtype.is_floating_point else "branch"
            when = f" after {MOST_ROUNDS} rounds of a loop" if is_endless else ""
            self._assume(f"{_line(frame)} reads a value", f"assumed {typed!r}{when}", doubt)

        return typed

    def _is_endless(self, site: Site, frame: FrameType) -> bool:
        """Return whether a `while` loop may go on and on by the same answer: one in 101 differs."""
        key = site, self._place()
        self._rounds[key] += 1
        is_endless = self._rounds[key] > MOST_ROUNDS and _is_in_while(frame)
        if is_endless:
            self._rounds[key] = 0
        return is_endless

    def _guess(self, tensor: Any, module: str) -> bool:
        """Return the usual value: checks pass, other flags are off, no scaler overflows."""
        if tensor.dtype is torch.bool:
            return id(tensor) in self._checks
        return not module.startswith("torch.amp")

    def text(self, tensor: Any) -> Any:
        """Return the number to write into a text, whose value does not matter for the step."""
        real = self.values.of(tensor)
        if real is None and tensor.dtype.is_floating_point:
            return 1.0
        return tensor.item()

    def whole(self, tensor: Any) -> Any:
        """Return the values of a tensor that Python reads as a list or an array.

        Unknown numbers are made up: those between 0 and 1 are all different, as costs are that a
        matching compares; whole numbers are 0, which is an index of anything; masks are full.
        """
        real = self.values.of(tensor)
        if real is None and getattr(self._place(), "phase", None) is Phase.BUILD:
            # a model that is built for real has its own values
            raise RuntimeError(".numpy() and .tolist() are not supported for tensor subclasses.")
        does = f"{_line(_reader())} reads the values of a tensor"
        with for_real():
            if real is not None:
                self._say_if_picked([tensor], does)
                return real.clone()
            shape, dtype = tuple(tensor.shape), tensor.dtype
            if dtype.is_floating_point or dtype.is_complex:
                count = tensor.numel()
                made: Any = ((torch.arange(count) + 0.5) / max(1, count)).to(dtype).view(shape)
                assumed = "assumed different numbers between 0 and 1"
            elif dtype is torch.bool:
                made, assumed = torch.ones(shape, dtype=dtype), "assumed that all are true"
            else:
                made, assumed = torch.zeros(shape, dtype=dtype), "assumed zeros"
        self._assume(
            f"{does} of shape {shape}", f"{assumed}, and all that follows from them", "branch"
        )
        return made

    def largest(self, func: Any, args: Any) -> Any:
        """Return the largest possible output of an operator whose shape depends on values."""
        does = f"{_line(_reader())} calls {func}, whose shape depends on values"
        if func is aten.nonzero.default:
            self._assume(does, "assumed that no element is zero", "branch")
            shape = (args[0].numel(), args[0].dim())
            # column by column, on a CPU and on CUDA alike
            return args[0].new_empty_strided(shape, (1, shape[0]), dtype=torch.int64)

        if func is aten.masked_select.default:
            self._assume(does, "assumed that the mask is full", "branch")
            return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
        if func is aten._pack_padded_sequence.default:
            return self._packed(args, does)
        if func in CTC:
            return self._aligned(args, does)
        if func is aten.bincount.default and args[2:]:
            self._assume(does, "assumed that it counts no more numbers than minlength", "branch")
            dtype = torch.int64 if args[1] is None else torch.float64
            return args[0].new_empty(args[2], dtype=dtype)
        if str(func) == SUPPRESSION:
            kept = "assumed that no box overlaps another; what the kernel itself holds is left out"
            self._assume(does, kept, "branch")
            return args[0].new_empty(args[0].shape[0], dtype=torch.int64)

        raise self._refusal(func, "has a shape that depends on values")

    def shaped(self, args: Any, real: Any) -> Any:
        """Return fake outputs of the shapes that known values give."""
        self._say_if_picked(args, f"{_line(_reader())} needs as much memory as values say")
        made = [
            args[0].new_empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors_in(real)
        ]
        return made[0] if isinstance(real, torch.Tensor) else tuple(made)

    def _packed(self, args: Any, does: str) -> Any:
        data, lengths, batch_first = args
        steps, samples = data.shape[int(batch_first)], data.shape[1 - int(batch_first)]
        counts = self.values.of(lengths)

        if counts is None:
            self._assume(does, "assumed that every sequence is of full length", "value")
            with for_real():
                counts = torch.full((samples,), steps)

        self._say_if_picked([lengths], does)
        return packed(data, counts, batch_first)

    def _aligned(self, args: Any, does: str) -> Any:
        """Return the outputs of the CTC loss: each sample's loss, and sums over all alignments.

        Source: `ctc_loss_cpu_template` and `ctc_loss_gpu_template` in ATen/native. Both hold sums
        for every step of the longest text, with blanks between its letters.
        """
        scores, targets, _, lengths = args[:4]
        steps, samples = scores.shape[0], scores.shape[1]
        if isinstance(lengths, torch.Tensor):
            known = self.values.of(lengths)
            with for_real():
                counts = None if known is None else known.tolist()
        else:
            counts = list(lengths)

        if counts is None:
            self._assume(does, "assumed that every text is of full length", "value")
            counts = [targets.shape[1] if targets.dim() > 1 else targets.numel() // samples]

        longest = max(counts, default=0)
        return scores.new_empty(samples), scores.new_empty(samples, steps, 2 * longest + 1)

    def select(self, args: Any) -> Any:
        """Return what a mask selects; everything if the mask is unknown."""
        masks = [index for index in args[1] if is_mask(index)]
        does = f"{_line(_reader())} selects by a mask"
        if any(self.values.of(mask) is None for mask in masks):
            self._assume(does, "assumed that the mask is full", "branch")
        self._say_if_picked(masks, does)
        return aten.index.Tensor(args[0], [t for index in args[1] for t in self._as_indices(index)])

    def _as_indices(self, index: Any) -> list[Any]:
        if not is_mask(index):
            return [index]
        known = self.values.sum_of(index)
        count = index.numel() if known is None else known
        return [index.new_empty(count, dtype=torch.int64)] * index.dim()

    def _refusal(self, func: Any, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._place()}: {func} {why}, which a prediction does not know; use memlab.measure"
        )

    def _say_if_picked(self, args: Any, does: str) -> None:
        if self.values.are_assumed(args) and not self._has_said_picked:
            self._has_said_picked = True
            picked = "assumed that what the model picks (its experts, say) is spread evenly"
            self._assume(does, picked, "spread")


def is_mask(index: Any) -> bool:
    """Return whether an index of a tensor is a mask."""
    return index is not None and index.dtype is torch.bool


def _reader() -> FrameType:
    """Return the frame of the code that reads a value, outside of memlab and torch's core."""
    core = (
        "torch._",
        "torch.utils",
        "numpy.",
        "memlab._util.torch_private",
        __name__,
        "memlab.tracing.tracker",
        "memlab.tracing.fake_outputs",
        "memlab.tracing.faking",
        "memlab.tracing.script",
        "memlab.tracing.person_script",
    )
    frame = first = sys._getframe(1)
    while frame is not None:
        name = _module(frame)
        if not name.startswith(core) or name.startswith("torch.optim"):
            return frame
        frame = frame.f_back  # type: ignore[assignment]

    return first


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frame: FrameType) -> str:
    module, file = _module(frame), frame.f_code.co_filename
    where = os.path.basename(file) if module == "__main__" else module
    where = "a cell of the notebook" if is_cell(file) else where
    return f"line {frame.f_lineno} of {where}"


@functools.lru_cache(maxsize=1024)
def _guards_an_error(site: Site) -> bool:
    """Return whether the statement at a line asserts something, or raises in one of its branches.

    False if the source is not available.
    """
    found = [
        node
        for node in _around(site)
        if isinstance(node, ast.If | ast.Assert)
        and site.line <= (node.test.end_lineno or node.lineno)
    ]
    if not found:
        return False

    statement = max(found, key=lambda node: node.lineno)
    if isinstance(statement, ast.Assert):
        return True

    return any(isinstance(inner, ast.Raise) for inner in (*statement.body, *statement.orelse))


def _is_in_while(frame: FrameType | None) -> bool:
    """Return whether the innermost loop that runs is a `while`, and not a `for`."""
    while frame is not None:
        code = frame.f_code
        loop = _loop_at(Site(code.co_filename, frame.f_lineno), code.co_firstlineno)
        if loop is not None:
            return loop is ast.While
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=1024)
def _loop_at(site: Site, first: int) -> type | None:
    """Return the kind of the innermost loop at a line of a function that begins at `first`."""
    kinds = ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS
    loops = [node for node in _around(site) if isinstance(node, kinds) and node.lineno >= first]
    return type(max(loops, key=lambda node: node.lineno)) if loops else None


def _around(site: Site) -> list[Any]:
    """Return the parts of the source that a line belongs to; none if it is not available."""
    try:
        tree = _parsed(site.file)
    except (SyntaxError, ValueError):
        return []
    placed: list[Any] = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    return [node for node in placed if node.lineno <= site.line <= node.end_lineno]


@functools.lru_cache(maxsize=16)
def _parsed(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


# `Draws`: the random numbers of a run over fake tensors, if the run depends on them.
#
# Fake kernels draw nothing, so a branch on a random number, such as a layer that is skipped
# by chance, has to be guessed. But a step begins with a seed, and a CPU's generator gives
# the same numbers if it is asked in the same order. So each random operator can run for
# real, alone, and then its numbers are known. This costs memory and time. It is done only
# in a second attempt, if the first one read a value that random numbers of the step may
# have decided.
#
# Left out: a card's own generators, whose numbers are not known without the card.

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
