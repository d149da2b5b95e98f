"""The stand-in for CUDA takes functions apart where CUDA does, and nowhere else.

PyTorch's wheels for a CPU have no CUDA kernels to compare with. What CUDA would do says the table
from which PyTorch's dispatcher is generated; what the stand-in does says the dispatcher itself.
"""

import functools
from collections.abc import Callable

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

from memlab._util.units import MIB
from memlab.cost_model.cuda_kernels import effects
from memlab.trace import Phase
from memlab.tracing import card_answers, fake_cuda
from memlab.tracing.assembly import trace_of
from memlab.tracing.card_answers import COMPOSITE
from memlab.tracing.fake_cuda import MODES
from memlab.tracing.recording import OpTrace
from memlab.tracing.tracker import Tracker, record_fake

TABLE = card_answers.kernels_by_function() or {}
HAS_CUDA = torch.backends.cuda.is_built()
KEY = "AutogradPrivateUse1"

# Where the stand-in differs from the table, and why.
CHOSEN_BY_THE_STAND_IN = {
    "scaled_dot_product_attention": "composite code asks whether the device is CUDA",
    "softmax.int": "composite code asks whether the device is CUDA",
    "log_softmax.int": "composite code asks whether the device is CUDA",
    **{f"{name}.{kind}": "composite code calls cuDNN if the device is CUDA"
       for name in MODES for kind in ("input", "data")},
}  # fmt: skip


@functools.cache
def here(name: str, key: str = KEY) -> str:
    """Return what the dispatcher runs for a key: "math kernel" where it takes a function apart."""
    fake_cuda.device()
    for line in torch._C._dispatch_dump_table(f"aten::{name}").splitlines():
        if line.startswith(f"{key}: "):
            return line[line.rindex("[") + 1 : -1]
    return "nothing"


def test_the_table_is_found_and_read_as_yaml_reads_it() -> None:
    places = card_answers.table_places()
    assert places, "PyTorch came without its table: predictions for cards say so in their notes"
    functions = {
        entry["func"].split("(")[0]: entry for entry in yaml.safe_load(places[0].read_text())
    }

    def keys(entry: dict[str, object]) -> set[str]:
        return {key.strip() for keys in entry.get("dispatch") or {} for key in keys.split(",")}

    for name, entry in functions.items():
        delegate = functions.get(entry.get("structured_delegate", ""), {})
        is_silent = not {"dispatch", "structured_delegate"} & entry.keys()
        assert TABLE[name] == ({COMPOSITE} if is_silent else keys(entry) | keys(delegate)), name
    assert TABLE.keys() == functions.keys()


def test_every_function_of_the_table_is_taken_apart_as_on_cuda() -> None:
    differences = set()
    for name, keys in TABLE.items():
        taken_apart_on_cuda = COMPOSITE in keys and "CUDA" not in keys
        if (here(name) == "math kernel") != taken_apart_on_cuda:
            differences.add(name)
    assert differences == CHOSEN_BY_THE_STAND_IN.keys()


def test_what_has_a_kernel_beside_other_fallbacks_is_seen_by_autograd_as_one() -> None:
    # `CompositeExplicitAutograd` runs below autograd, so there the choice is between kernels
    beside = [name for name, keys in TABLE.items() if "CUDA" in keys and len(keys) > 1]
    assert len(beside) > 500
    assert {here(name) for name in beside} <= {"autograd kernel", "backend fallback"}


@pytest.mark.skipif(not HAS_CUDA, reason="only a PyTorch with CUDA has registered its kernels")
def test_the_dispatcher_of_a_build_with_cuda_agrees_with_the_table() -> None:
    for name in TABLE.keys() - CHOSEN_BY_THE_STAND_IN.keys():
        taken_apart = here(name, "AutogradCUDA") == "math kernel"
        assert (here(name) == "math kernel") == taken_apart, name


def test_autocast_knows_the_functions_that_it_knows_on_cuda() -> None:
    fake_cuda.device()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    # older versions have overloads for named dimensions, which nobody uses
    names = [name for name in names if "imname" not in name and ".names_" not in name]
    cuda = {name for name in names if has(name, "AutocastCUDA")}
    ours = {name for name in names if has(name, "AutocastPrivateUse1")}
    ours -= {f"aten::{name}.{kind}" for name in MODES for kind in ("input", "data")}
    assert ours <= cuda
    assert cuda - ours - {"aten::_cudnn_rnn"} == {  # only a build with CUDA knows that one
        "aten::binary_cross_entropy",  # raises
        "aten::cudnn_convolution", "aten::cudnn_convolution_transpose",  # `convolution` is cast
    }  # fmt: skip


def test_without_the_table_functions_with_a_kernel_on_a_cpu_are_kept_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(card_answers, "table_places", lambda: [])
    for cached in (card_answers.kernels_by_function, card_answers.fused):
        cached.cache_clear()
    try:
        assert {"silu_backward", "mish_backward"} <= card_answers.fused()
        [note] = card_answers.notes()
        assert "torchgen" in note
    finally:
        monkeypatch.undo()
        for cached in (card_answers.kernels_by_function, card_answers.fused):
            cached.cache_clear()
    assert card_answers.notes() == ()


def recorded(run: Callable[[torch.device], object]) -> OpTrace:
    """Return one forward and backward on the stand-in, all in a single step."""
    with fake_cuda.as_cuda((8, 0)) as device:
        tracker = Tracker(device.type)

        def go(_: object) -> None:
            tracker.mark(0, Phase.FORWARD, 0)
            run(device)

        return record_fake(go, tracker)


def peak_bytes(recording: OpTrace) -> int:
    """Return the most bytes that were live at once, cuBLAS's workspaces left out."""
    trace = trace_of(recording, [None] * len(effects(recording, None)))
    return int(trace.nbytes.cumsum().max())


def names(recording: OpTrace) -> list[str]:
    return [o.name.removeprefix("aten::") for o in recording.operators if o.signature is not None]


def there_and_back(function: Callable[[torch.Tensor], torch.Tensor]) -> OpTrace:
    def run(device: torch.device) -> None:
        x = torch.empty(MIB, device=device, requires_grad=True)  # 4 MiB
        y = function(x.view(1024, 1024))
        y.backward(torch.empty_like(y))

    return recorded(run)


@pytest.mark.parametrize(
    ("function", "name", "more"),
    [
        (functional.silu, "silu", 0),
        (functional.mish, "mish", 0),
        (lambda x: functional.rms_norm(x, (1024,)), "_fused_rms_norm", 1024 * 4),  # 1 / rms
    ],
)
def test_a_function_is_one_kernel_forward_and_one_backward(
    function: Callable[[torch.Tensor], torch.Tensor], name: str, more: int
) -> None:
    found = there_and_back(function)
    assert names(found) == ["empty", name, "empty_like", f"{name}_backward"]
    assert peak_bytes(found) == 4 * 4 * MIB + more  # x, y, the gradient of y, the gradient of x


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_rms_norm_saves_narrow_inputs_and_wide_statistics(low: torch.dtype) -> None:
    def run(device: torch.device) -> None:
        x = torch.empty(1024, 1024, device=device, dtype=low, requires_grad=True)
        norm = nn.RMSNorm(1024, device=device, dtype=low)
        norm(x).backward(torch.empty_like(x))

    found = recorded(run)
    [forward] = [o for o in found.operators if o.name == "aten::_fused_rms_norm"]
    assert [spec.dtype for spec in forward.outputs] == [low, torch.float32]
    [backward] = [o for o in found.operators if o.name == "aten::_fused_rms_norm_backward"]
    assert [spec.shape for spec in backward.outputs] == [(1024, 1024), (1024,)]


def test_a_swiglu_mlp_holds_what_a_hand_count_says() -> None:
    rows, width, inner = 512, 256, 1024
    wide, narrow, weight = 2 * rows * inner, 2 * rows * width, 2 * width * inner  # bytes, bf16

    def run(device: torch.device) -> None:
        def linear(from_width: int, to_width: int) -> nn.Linear:
            return nn.Linear(from_width, to_width, bias=False, device=device, dtype=torch.bfloat16)

        gate, up, down = linear(width, inner), linear(width, inner), linear(inner, width)
        x = torch.empty(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        y = down(functional.silu(gate(x)) * up(x))
        y.backward(torch.empty_like(y))

    found = recorded(run)
    assert names(found).count("silu_backward") == 1
    assert "sigmoid" not in names(found)
    # Alive before backward: x, y, its gradient and three weights; of width `inner` the outputs of
    # gate, silu and up. `down` has freed its input and made the gradients of its weight and of its
    # input, from which the product makes those of both factors.
    standing = 3 * narrow + 3 * weight + 3 * wide
    assert peak_bytes(found) == standing + weight + 3 * wide


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_fp16_is_made_wider_by_its_kernel(name: str) -> None:
    found = there_and_back(lambda x: getattr(functional, name)(x.half(), -1, dtype=torch.float32))
    kernel = f"_{name}"
    assert names(found)[1:] == [
        "_to_copy", kernel, "empty_like", f"{kernel}_backward_data", "_to_copy",
    ]  # fmt: skip
    [softmax] = [o for o in found.operators if o.name == f"aten::{kernel}"]
    assert softmax.outputs[0].dtype is torch.float32
    # and bf16 is copied first
    found = there_and_back(
        lambda x: getattr(functional, name)(x.bfloat16(), -1, dtype=torch.float32)
    )
    assert names(found)[1:4] == ["_to_copy", "_to_copy", kernel]


def test_kernels_are_told_of_cuda_and_autocast() -> None:
    def run(device: torch.device) -> None:
        # on CUDA the output of this one is never channels-last
        x = torch.empty(2, 8, 6, 6, device=device).to(memory_format=torch.channels_last)
        assert nn.ReflectionPad2d(1)(x).is_contiguous()
        x = torch.empty(8, 8, device=device, dtype=torch.float16)
        with torch.autocast(device.type, torch.float16):
            assert x.norm().dtype is x.norm(dim=1).dtype is torch.float32
        # small values that are known meet kernels that a CPU lacks
        x = torch.zeros(4, 8, device=device, requires_grad=True)
        functional.rms_norm(x, (8,)).sum().backward()

    assert "_fused_rms_norm_backward" in names(recorded(run))


def test_log_sigmoid_saves_nothing_beside_its_input() -> None:
    found = there_and_back(functional.logsigmoid)
    [forward] = [o for o in found.operators if o.name == "aten::log_sigmoid_forward"]
    assert [spec.shape for spec in forward.outputs] == [(1024, 1024), (0,)]
    assert peak_bytes(found) == 4 * 4 * MIB


def test_what_a_backward_returned_is_freed_when_it_is_dropped() -> None:
    def run(device: torch.device) -> None:
        x = torch.empty(MIB, device=device, requires_grad=True)
        for _ in range(20):
            torch.autograd.grad((x * 2).sum(), x)

    # x, its double, the gradient of that and of x; none of an earlier turn
    assert peak_bytes(recorded(run)) < 4 * 4 * MIB
