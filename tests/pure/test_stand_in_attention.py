"""Which kernel attention takes on a card and why, as PyTorch's sdp_utils.cpp says; what is told."""

import pytest
import torch

from memlab.trace import Interval, Phase
from memlab.tracing.attention_kernels import (
    AttentionInputs,
    AttentionKernel,
    call_of,
    efficient_takes_groups,
    kernels_of,
)
from memlab.tracing.recording import OpTrace
from memlab.tracing.trace_step import attention_notes

SAMPLES, HEADS, TOKENS = 2, 4, 24


def asked(
    dtype=torch.bfloat16, dim=64, *, groups=1, keys=TOKENS, dim_v=None, **others
) -> AttentionInputs:
    """Return what is asked of tensors without memory."""
    mask = others.pop("mask", None)
    sizes = [(HEADS, TOKENS, dim), (HEADS // groups, keys, dim), (HEADS // groups, keys, dim_v)]
    tensors = [
        torch.empty(SAMPLES, heads, tokens, size or dim, dtype=dtype, device="meta",
                    requires_grad=True)
        for heads, tokens, size in sizes
    ]  # fmt: skip
    given = {"dropout": 0.0, "is_causal": False, "enable_gqa": groups > 1} | others
    return AttentionInputs(*tensors, mask, **given)


BOOL = torch.empty(SAMPLES, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
FLOAT = torch.empty(1, 1, TOKENS, TOKENS + 8, dtype=torch.float32, device="meta")
HALF, FP32 = torch.float16, torch.float32
A100, RTX_3090, T4, P100 = (8, 0), (8, 6), (7, 5), (6, 0)


@pytest.mark.parametrize(
    ("what", "capability", "kernel", "flash", "efficient"),
    [
        (asked(), A100, "flash", "", ""),
        (asked(groups=2), A100, "flash", "", ""),
        (asked(dim=256), A100, "flash", "", ""),
        (asked(dim=256), RTX_3090, "flash", "", ""),
        (asked(dim=256, dropout=0.1), RTX_3090, "memory-efficient", "training heads of 256", ""),
        (asked(dim=200), RTX_3090, "memory-efficient", "training heads of 200", ""),
        (asked(dim=320), A100, "memory-efficient", "heads of 320 numbers, more than 256", ""),
        (asked(dim=128, dim_v=64), A100, "memory-efficient", "values of 64", ""),
        (asked(keys=32, is_causal=True), A100, "memory-efficient", "more keys than queries", ""),
        (asked(mask=BOOL), A100, "memory-efficient", "a mask", ""),
        (asked(mask=BOOL, groups=2), A100, "math", "a mask", "share keys"),
        (asked(FP32), A100, "memory-efficient", "float32", ""),
        (asked(FP32, groups=2), A100, "math", "float32", "share keys"),
        (asked(FP32, dim=66), A100, "math", "float32", "no multiple of 4"),
        (asked(FP32, dim=66), T4, "memory-efficient", "older than Ampere", ""),
        (asked(HALF, dim=66, mask=BOOL), T4, "math", "a mask", "no multiple of 8"),
        (asked(HALF, dim=66), P100, "memory-efficient", "older than Ampere", ""),
        (asked(), T4, "math", "older than Ampere", "bfloat16"),
        (asked(torch.float64), A100, "math", "float64", "float64"),
    ],
)
def test_the_rules_are_those_of_pytorch(what, capability, kernel, flash, efficient):
    if efficient == "share keys" and efficient_takes_groups():
        pytest.skip("this PyTorch has a memory-efficient kernel for heads that share keys")
    with kernels_of(capability):
        call = call_of(what)
    assert call.kernel == kernel
    for lack, words in ((call.without_flash, flash), (call.without_efficient, efficient)):
        assert (lack is None) == (not words)
        assert lack is None or words in lack.what


def test_what_is_switched_off_is_the_reason():
    before = torch.backends.cuda.flash_sdp_enabled()
    try:
        torch.backends.cuda.enable_flash_sdp(False)
        call = call_of(asked())
    finally:
        torch.backends.cuda.enable_flash_sdp(before)
    assert call.kernel is AttentionKernel.EFFICIENT
    assert "enable_flash_sdp is off" in call.without_flash.what


def told(what: AttentionInputs, count: int = 2) -> tuple[str, ...]:
    """Return what is told of some calls of one forward, after another one."""
    recording = OpTrace()
    recording.intervals += [Interval(step=s, phase=Phase.FORWARD, micro_batch=0) for s in (0, 1)]
    recording.attention = [(call_of(what), 1), *[(call_of(what), 2)] * count]
    return attention_notes(recording)


def test_a_fallback_is_told_with_its_size_its_reason_and_a_remedy():
    [note] = told(asked(torch.float32, dim=66))
    weights = HEADS * TOKENS * TOKENS * 4
    assert "PyTorch's math kernel in 2 calls of each forward" in note
    assert f"{weights / 1024:.2f} KiB a call and sample" in note
    assert "no flash kernel for float32" in note
    assert "use precision='bf16-mixed'" in note

    [note] = told(asked(mask=BOOL), 1)
    padded = TOKENS * 32 * 2  # rows of 24 padded to 32, in bf16
    assert "memory-efficient kernel in 1 call of each forward" in note
    assert f"the mask in numbers, {padded / 1024:.2f} KiB a call and sample" in note
    assert "attention='flash_attention_2'" in note

    shared = TOKENS * 32 * 4
    [note] = told(asked(keys=TOKENS + 8, mask=FLOAT[..., : TOKENS + 4]))
    assert f"{shared / 1024:.2f} KiB a call." in note.replace(":", ".")
    [note] = told(asked(dim=320))
    assert "heads of 320 numbers" in note


def test_what_holds_no_more_than_flash_attention_by_its_format_is_not_told():
    assert not told(asked())
    assert not told(asked(torch.float32))
    with kernels_of(T4):
        assert not told(asked(torch.float16))
