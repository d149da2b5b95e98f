"""What only a CUDA card can show; skipped without one."""

import pytest
import torch

from memlab import StepConfig, measure, verify, watch, workloads
from memlab.memory import cuda
from tests.models import IN, OUT, linear

pytestmark = pytest.mark.gpu


def rounded(nbytes: int) -> int:
    """Round as the caching allocator does, to 512 bytes."""
    return -(-nbytes // 512) * 512


def test_a_linear_is_counted_in_blocks_of_512_bytes():
    result = measure(linear(), StepConfig(optimizer="sgd"), "cuda", repeats=1)
    assert result.outcome == "ok", result.message
    assert result.peak_by_category["parameters"] == rounded(4 * IN * OUT)
    assert result.peak_by_category["inputs"] == rounded(4 * 8 * IN)
    assert sum(result.peak_by_category.values()) == result.peak_allocated_bytes
    assert result.peak_reserved_bytes >= result.peak_allocated_bytes
    assert result.peak_reserved_bytes % 2**21 == 0


def test_only_the_micro_batch_at_work_is_on_the_card():
    config = StepConfig(optimizer="sgd", batch_size=64, accumulation_steps=4)
    result = measure(linear(), config, "cuda", repeats=1)
    assert result.peak_by_category["inputs"] == rounded(4 * 16 * IN)


def test_a_second_run_counts_what_the_first_did():
    first, second = (
        measure(workloads.get("gpt-small"), StepConfig(), "cuda", repeats=1) for _ in range(2)
    )
    assert first.peak_by_category == second.peak_by_category
    assert first.peak_reserved_bytes == second.peak_reserved_bytes


def test_the_allocator_is_held_to_the_limit():
    result = measure(
        workloads.get("gpt-small"), StepConfig(batch_size=256), "cuda", memory_limit="256MiB"
    )
    assert (result.outcome, result.fits) == ("out_of_memory", False)
    assert measure(linear(), StepConfig(), "cuda", repeats=1).outcome == "ok"


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16-mixed"},
        {"precision": "fp16-mixed"},
        {"checkpointing": "blocks"},
        {"memory_budget": 0.5, "budget_engine": "compile"},
    ],
)
def test_techniques_keep_the_gradients(fields):
    report = verify(workloads.get("gpt-small"), StepConfig(**fields), "cuda", timeout_seconds=300)
    assert report.ok, report.why


def test_statistics_are_reset_between_steps():
    device = torch.device("cuda", 0)
    cuda.reset_peaks(device)
    torch.ones(2**20, device=device)
    assert cuda.read_peaks(device).allocated_bytes >= 2**22
    cuda.reset_peaks(device)
    assert cuda.read_peaks(device).allocated_bytes < 2**22


def test_a_watch_writes_why_memory_ran_out(tmp_path):
    with pytest.raises(torch.OutOfMemoryError), watch(tmp_path):
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
    text = next(tmp_path.glob("out-of-memory*.txt")).read_text()
    assert "32.0 TiB were requested on device 0" in text
    assert next(tmp_path.glob("out-of-memory*.pickle")).stat().st_size > 0
    assert next(tmp_path.glob("out-of-memory*.html")).stat().st_size > 0
