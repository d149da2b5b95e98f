"""What the models of the zoo have in common: a workload of each, and the sizes of its samples.

All follows from the fields of a spec. One with a `sequence_length` is trained on texts, one with an
`image_size` on square images; any other has samples of one size only.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from memlab._util.checks import checked
from memlab._util.units import is_a, printable, shown
from memlab.errors import ConfigError, WorkloadError
from memlab.workload import SampleSize, Workload
from memlab.workloads.data import digits_batch, num_text_bytes, text_batch, zoo_import

NUM_BYTES = 256  # the vocabulary of a text that is read byte by byte
TEXT, IMAGE = "sequence_length", "image_size"
WORDS: dict[str, dict[str, Any]] = {
    TEXT: {"name": "sequence length", "unit": "tokens"},
    IMAGE: {"name": "image size", "unit": "pixels", "dimensions": 2},
}
REACH = {TEXT: 8, IMAGE: 4}  # the slider ends at sizes so many times smaller and larger
STEPS = {TEXT: (1,), IMAGE: (1, 3)}  # times powers of two: images have sizes such as 64, 96, 128
DOUBLINGS = range(24)


def token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross entropy of the logits of a model that is called with tokens."""
    tokens, targets = batch
    # (n, length, vocabulary) -> (n * length, vocabulary): every sample has the same number of terms
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def class_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross entropy of a class for each sample, or for each of its voxels."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A model of the zoo and its sizes. A subclass is a frozen dataclass: its fields are options.

    Attributes:
        packages: what builds the model, and where its data is from.
        compute_loss: of the workload.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    compute_loss: ClassVar[Any] = staticmethod(class_loss)  # a function, and no method

    def build(self) -> nn.Module:
        """Return the model, randomly initialised."""
        raise NotImplementedError

    @property
    def make_batch(self) -> Callable[[int], Any]:
        """The function of the workload that makes a batch of n samples."""
        raise NotImplementedError

    def workload(self, name: str) -> Workload:
        """Return the training of this model."""
        return Workload(
            name=name,
            build_model=self.build,
            make_batch=self.make_batch,
            compute_loss=self.compute_loss,
        )

    @property
    def size_field(self) -> str | None:
        """The field that is the size of the samples; None if they have one size only."""
        return next((field for field in WORDS if hasattr(self, field)), None)

    @property
    def size_step(self) -> int:
        """Of what number the size of a sample is a multiple."""
        return getattr(self, "patch_size", 1)

    @property
    def least_size(self) -> int:
        """The smallest size of a sample."""
        if hasattr(self, "depths"):  # the stem halves an image twice, each stage but the first once
            return int(2 ** (len(self.depths) + 1))
        return self.size_step

    def sample_size(self, make_workload: Callable[[int], Workload]) -> SampleSize | None:
        """Return the size of the samples, and the sizes that a slider offers; None for none.

        Args:
            make_workload: makes the workload of this spec in another size.
        """
        field = self.size_field
        if field is None:
            return None

        value, step, reach = getattr(self, field), self.size_step, REACH[field]
        near = range(max(self.least_size, -(-value // reach)), value * reach + 1)
        rounded = (step * times * 2**doubling for times in STEPS[field] for doubling in DOUBLINGS)
        offered = sorted({value, *(size for size in rounded if size in near)})
        if len(offered) < 2:  # an image that is far smaller than a patch
            return None
        return SampleSize(
            **WORDS[field], value=value, offered=tuple(offered), make_workload=make_workload
        )

    def check_size(self, size: int) -> None:
        """Check that the samples can have another size.

        Raises:
            WorkloadError: they cannot; the message says what is allowed.
        """
        field, least, step = self.size_field, self.least_size, self.size_step
        if field == TEXT and size > num_text_bytes() - 2:  # a window, and the byte after it
            raise WorkloadError(
                f"sequence_length={shown(size)} is longer than the text; allowed is an int of at "
                f"most {num_text_bytes() - 2}"
            )
        if size < least:
            raise WorkloadError(
                f"{field}={size} is below {least}, the smallest that this model can take; allowed "
                f"is an int of at least {least}"
            )
        if size % step:
            below = size // step * step
            raise WorkloadError(
                f"{field}={size} is not a multiple of {step}, the size of a patch; allowed is for "
                f"instance {below} or {below + step}"
            )


class TextSpec(Spec):
    """A language model that predicts the next byte; of a larger vocabulary 256 entries are read."""

    __slots__ = ()
    sequence_length: int

    @property
    def make_batch(self) -> Callable[[int], Any]:
        """The function that makes n windows of text."""
        return partial(text_batch, sequence_length=self.sequence_length)


class DigitsSpec(Spec):
    """A model that classifies hand-written digits, scaled up."""

    __slots__ = ()
    image_size: int
    num_channels: int

    @property
    def make_batch(self) -> Callable[[int], Any]:
        """The function that makes n images and their labels."""
        return partial(digits_batch, image_size=self.image_size, num_channels=self.num_channels)


def of_transformers(model: str, config: str, **values: Any) -> Any:
    """Return a model of transformers with a config of these values, randomly initialised."""
    transformers = zoo_import("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**values))


# The lengths of texts, as a person's tokenizer counts them.


@checked()
def lengths_of(texts: Iterable[str], tokenizer: Callable[[str], Any]) -> tuple[int, ...]:
    """Return how many tokens each text has, for `memlab.predict_lengths`.

    Args:
        texts: the texts, such as a data set's column.
        tokenizer: text -> its tokens: a list of them, or what a tokenizer of transformers returns,
            of which `input_ids` is counted.

    Raises:
        ConfigError: a text cannot be tokenized, or has no tokens; the message says which.

    >>> import memlab
    >>> memlab.workloads.lengths_of(["to be", "or not to be"], str.split)
    (2, 4)
    """
    return tuple(_length(tokenizer, text, number) for number, text in enumerate(texts))


def _length(tokenizer: Callable[[str], Any], text: str, number: int) -> int:
    try:
        tokens = tokenizer(text)
        # what a tokenizer of transformers returns behaves as a dict, and is none
        if is_a(tokens, Mapping) or hasattr(tokens, "input_ids"):
            tokens = tokens["input_ids"]
        found = len(tokens)
    except Exception as error:  # a person's own tokenizer may raise anything
        raise ConfigError(
            f"tokenizer={shown(tokenizer)} gives no tokens for texts[{number}] "
            f"({type(error).__name__}: {printable(str(error))[:200]}); pass a function that "
            "returns a list of tokens"
        ) from error
    if not found:
        raise ConfigError(f"texts[{number}]={shown(text)} has no tokens; leave it out")
    return found
