"""What a picture calls the categories of a result: their labels, but for memory of a library."""

from memlab.figures.look import CATEGORY_LABELS
from memlab.result import StepResult
from memlab.trace import Category, Holding, Phase

WORKSPACE = "library workspace"
BOTH = "buffers, workspace"
CUBLAS = tuple(
    f"aten::{name}" for name in ("addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot")
)


def category_names(result: StepResult) -> dict[Category, str]:
    """Return the name of each category, as it is right for what this result holds.

    cuBLAS keeps a workspace for each thread that has multiplied matrices (32 MiB on an H200). It
    outlives a step as the buffers of a model do, and so counts as one of them.
    """
    buffers = [held for held in result.peak_holdings if held.category is Category.BUFFERS]
    kinds = {_is_workspace(held) for held in buffers}
    is_cuda = result.peak_reserved_bytes is not None
    if not is_cuda or True not in kinds:
        return CATEGORY_LABELS
    return {**CATEGORY_LABELS, Category.BUFFERS: BOTH if False in kinds else WORKSPACE}


def _is_workspace(held: Holding) -> bool:
    return held.operator in CUBLAS and held.phase is not Phase.BUILD
