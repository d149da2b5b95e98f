"""`ScriptLines`: what a technique adds to a plain PyTorch training script, by place.

`memlab.script` puts the sources of all techniques together. In their lines these names exist:
`device`, `model`, `parameters` (the trainable ones), `batch`, `micro_batch`, `loss`, `weight`,
`optimizer`. Left out: memlab itself, which no script needs.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

PLACE = "model.to(device)"
BACKWARD = "(loss * weight).backward()"
UPDATE = "optimizer.step()"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptLines:
    """What a technique adds to a plain PyTorch training script, by place; lines of Python.

    Attributes:
        imports: at the top, one import a line.
        functions: definitions of the module, each with all of its lines.
        before: before the model is built: switches.
        built: of `model` where it was built: formats and layouts of its weights.
        place: in place of the line `PLACE`.
        model: once `model` is on `device`.
        batch: of each `batch`, whole and where the loader left it.
        optimizer: defines `optimizer` (and `scheduler`, `scaler`).
        contexts: expressions, entered around the forward of a micro-batch.
        backward: in place of the line `BACKWARD`.
        backward_contexts: expressions, entered around all that.
        update: in place of the line `UPDATE`.
        after: once all batches have been trained on.
    """

    imports: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    place: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    backward_contexts: tuple[str, ...] = ()
    update: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def together(sources: list[ScriptLines]) -> ScriptLines:
    """Return one source of several, each place in their order.

    If one source replaces a line and another adds lines around it, the order of the two does not
    matter.

    >>> schedule = ScriptLines(update=(UPDATE, "scheduler.step()"))
    >>> scaler = ScriptLines(update=("scaler.step(optimizer)", "scaler.update()"))
    >>> together([schedule, scaler]).update
    ('scaler.step(optimizer)', 'scaler.update()', 'scheduler.step()')
    """
    found: dict[str, tuple[str, ...]] = {}
    for field in fields(ScriptLines):
        replaced = {"place": PLACE, "backward": BACKWARD, "update": UPDATE}.get(field.name)
        lines = (replaced,) if replaced else ()
        for source in sources:
            given = getattr(source, field.name)
            if not replaced:
                lines += given
            elif given:
                outer, inner = (lines, given) if replaced in lines else (given, lines)
                at = outer.index(replaced)
                lines = (*outer[:at], *inner, *outer[at + 1 :])
        found[field.name] = lines
    return ScriptLines(**found)


def text_of(function: Callable[..., Any]) -> str:
    """Return the definition of a function of memlab, for a script to hold."""
    return textwrap.dedent(inspect.getsource(function)).rstrip()
