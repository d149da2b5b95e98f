"""The lengths of texts, as a person's tokenizer counts them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from memlab.arguments.checks import checked
from memlab.arguments.quoting import is_a, printable, shown
from memlab.errors import ConfigError


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
