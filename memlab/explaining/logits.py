"""What the logits of a cross entropy hold, read off a result: what a chunked loss would not hold.

A plain loss saves the log-softmax of the logits; the logits themselves, and their gradient twice,
live for a while around it. Told by operators: `nll_loss` takes (tokens, classes), as a linear head
makes them, and `nll_loss2d` what a convolution makes. Left out: whether that head is the last
`nn.Linear`, and whether something else reads the logits, which no result knows.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memlab.trace import CATEGORIES, PHASES, Category, Holding, Phase, Timeline

SAVED = "aten::_log_softmax"
OPERATORS = (SAVED, "aten::_log_softmax_backward_data", "aten::nll_loss_backward")
OF_TOKENS = ("aten::nll_loss_forward", "aten::nll_loss_backward")
ACTIVATIONS, TEMPORARIES = (
    CATEGORIES.index(c) for c in (Category.ACTIVATIONS, Category.TEMPORARIES)
)
OUTSIDE = [PHASES.index(phase) for phase in PHASES if phase not in (Phase.FORWARD, Phase.BACKWARD)]


def saved_logits(holdings: Sequence[Holding]) -> tuple[int, int]:
    """Return the bytes of all log-softmaxes that are saved at the peak, and of one; 0 if none."""
    saved = [h for h in holdings if h.operator == SAVED and h.category is Category.ACTIVATIONS]
    if not saved or not any(h.operator in OF_TOKENS for h in holdings):
        return 0, 0
    total = sum(h.nbytes for h in saved)
    return total, total // sum(h.num_blocks for h in saved)


def without_logits(
    timeline: Timeline, live: npt.NDArray[np.float64], holdings: Sequence[Holding], chunks: int
) -> npt.NDArray[np.float64]:
    """Return the live bytes (instants, categories) with the loss in chunks.

    Lowered is only what surely is the loss's, around the highest instant of each micro-batch: from
    the last rise of the activations by as much as a log-softmax to the first such fall. A loss in
    stretches holds several, at most instants: their share of the activations is taken off all.
    """
    total, one = saved_logits(holdings)
    live, saving = live.copy(), 1 - 1 / chunks
    if total > one:
        live[:, ACTIVATIONS] *= 1 - total * saving / live[timeline.peak_index, ACTIVATIONS]
        return live
    in_batch = ~np.isin(timeline.phase, OUTSIDE)
    for micro_batch in np.unique(timeline.micro_batch[in_batch]):
        instants = np.flatnonzero(in_batch & (timeline.micro_batch == micro_batch))
        part = live[instants]
        born, dead = _life(part[:, ACTIVATIONS], int(part.sum(axis=1).argmax()), one)
        large = part[:, TEMPORARIES] >= one / 2  # under autocast logits have half the bytes
        first, end = born, dead
        while first and large[first - 1]:
            first -= 1
        while dead and end < len(part) and large[end]:
            end += 1
        part[first:end, TEMPORARIES] /= np.where(large[first:end], chunks, 1)
        part[born:dead, ACTIVATIONS] -= total * saving
        live[instants] = part
    return live


def _life(activations: npt.NDArray[np.float64], peak: int, nbytes: int) -> tuple[int, int]:
    """Return the instants of birth and death of a block of activations that is live at the peak."""
    changes = np.diff(activations)
    rises = np.flatnonzero(changes[:peak] >= 0.9 * nbytes)
    falls = np.flatnonzero(changes[peak:] <= -0.9 * nbytes)
    if not len(rises):
        return 0, 0
    return int(rises[-1]) + 1, peak + int(falls[0]) + 1 if len(falls) else len(activations)
