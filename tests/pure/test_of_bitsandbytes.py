"""What a product of bitsandbytes in 8 bits allocates on a card, against a count by hand."""

import pytest
import torch

from memlab.trace import Phase
from memlab.tracing import fake_cuda
from memlab.tracing.tracker import Tracker, record_fake

ROWS, COLUMNS, OUTPUTS = 64, 1024, 2048


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes")


def test_a_product_in_8_bits_allocates_what_the_lines_of_python_do_on_cuda(bitsandbytes):
    """Read in `int8_vectorwise_quant`, `int8_linear_matmul` and `int8_mm_dequant` for CUDA."""
    card, tracker = fake_cuda.device(), Tracker(fake_cuda.NAME)
    operators = torch.ops.bitsandbytes

    def run(_):
        tracker.mark(0, Phase.FORWARD, 0)
        x = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=card)
        weight = torch.empty(OUTPUTS, COLUMNS, dtype=torch.int8, device=card)
        scales = torch.empty(OUTPUTS, device=card)
        rows, of_rows, outliers = operators.int8_vectorwise_quant.default(x.half(), 6.0)
        operators.int8_mixed_scaled_mm.default(x, rows, weight, of_rows, scales, outliers, None)

    recording = record_fake(run, tracker)
    born = [block.nbytes for block in recording.blocks if block.nbytes]
    entries = ROWS * COLUMNS
    expected = [
        2 * entries, OUTPUTS * COLUMNS, 4 * OUTPUTS,  # x, the weight, its scales
        2 * entries,  # x in fp16
        4 * ROWS, entries,  # scales and rows in int8
        2 * entries, entries, 1,  # abs, the mask of outliers, whether there are any
        4 * ROWS * OUTPUTS,  # sums in int32
        2 * ROWS * OUTPUTS, 2 * ROWS * OUTPUTS,  # in fp16, then in bf16
    ]  # fmt: skip
    assert born == expected
    assert [note for note in recording.assumptions if "outliers" in note]
