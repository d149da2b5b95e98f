"""What a picture calls the categories of a result: their labels, but for memory of a library."""

from memlab.explaining.holdings import is_workspace, name_of_buffers
from memlab.figures.look import CATEGORY_LABELS
from memlab.result import StepResult
from memlab.techniques.sharding.ranks import is_tensor_parallel
from memlab.trace import Category


def category_names(result: StepResult) -> dict[Category, str]:
    """Return the name of each category, as it is right for what this result holds."""
    is_cuda = result.peak_reserved_bytes is not None
    buffers = [held for held in result.peak_holdings if held.category is Category.BUFFERS]
    is_tried = is_tensor_parallel(result.config)
    kinds = {is_workspace(held, is_cuda=is_cuda, is_tried=is_tried) for held in buffers}
    label = CATEGORY_LABELS[Category.BUFFERS]
    return {**CATEGORY_LABELS, Category.BUFFERS: name_of_buffers(kinds, label)}
