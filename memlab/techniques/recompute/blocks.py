"""Select the modules to checkpoint: the repeated blocks of a model, or modules by name."""

import difflib
import re

from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.recompute.named_modules import find_named
from memlab.techniques.recompute.repeated_blocks import find_blocks, is_block

AUTO = "auto"
EVERY = re.compile(r"every 0*([1-9]\d*)")


def select(model: nn.Module, which: str) -> dict[str, nn.Module]:
    """Return the modules to checkpoint by path, none inside another.

    Args:
        model: as built.
        which: "auto" for the repeated blocks, "every 3" for the first of every three blocks, the
            name of a class, or a pattern of paths as `fnmatch` reads it: "encoder.layers.*".

    Raises:
        UnsupportedError: no module matches; the message says which there are.
    """
    every = EVERY.fullmatch(which)
    if which == AUTO or every:
        blocks = find_blocks(model)
        if not blocks:
            raise UnsupportedError(
                f"checkpointing='blocks' found no repeated blocks in {type(model).__name__}; "
                "select modules with checkpoint_modules (a class or a pattern of paths), or use "
                "accumulation_steps to save activations"
            )

        step = int(every[1]) if every else 1
        return dict(list(blocks.items())[::step])

    named = find_named(model, which)
    if not named:
        raise UnsupportedError(_nothing_meant(model, which))

    return named


def _nothing_meant(model: nn.Module, which: str) -> str:
    modules = {path: module for path, module in model.named_modules() if path}
    classes = {type(m).__name__ for m in modules.values() if is_block(m)}
    near = difflib.get_close_matches(which, [*classes, *modules], n=1, cutoff=0.5)
    suggestion = f"did you mean {near[0]!r}? " if near else ""

    return (
        f"checkpoint_modules={which!r} matches no module of {type(model).__name__}: {suggestion}"
        "allowed are 'auto', 'every 2', a class "
        f"({', '.join(sorted(classes)[:4]) or 'it has none with children'}) or a pattern of paths "
        f"('{next(iter(modules), '')}')"
    )
