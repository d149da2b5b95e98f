"""The lengths of a trainer's samples, and its workload in other sequence lengths.

A sample of another length is one of the data set's own, cut or repeated, and collated as before. So
nothing is tokenized again, and a step costs what it would with real samples of that length.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memlab.arguments.quoting import printable, shown
from memlab.errors import WorkloadError
from memlab.importing.samples import TOKENS, KeptSamples, length_of
from memlab.importing.transformers_loss import is_causal_model, unwrapped
from memlab.importing.trl_trainer import joins_samples
from memlab.workload import SampleSize, Workload
from memlab.workloads.configs import offered_sizes

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
