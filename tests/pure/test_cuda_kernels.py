"""What CUDA kernels take beyond their outputs, counted by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from memlab._util.units import KIB, MIB
from memlab.cost_model.cuda_kernels import (
    BACKWARD,
    FORWARD,
    Workspaces,
    effects,
    middle,
    take_workspace,
    with_workspaces,
)
from memlab.devices import cards
from memlab.trace import Phase
from memlab.tracing import fake_cuda
from memlab.tracing.assembly import KernelMemory
from memlab.tracing.recording import OpTrace
from memlab.tracing.tracker import Tracker, record_fake

RTX_3060, H100, T4 = (cards.find(name) for name in ("rtx-3060", "h100", "t4"))


def step(make: Callable[[torch.device], tuple[nn.Module, torch.Tensor]]) -> OpTrace:
    """Return the recording of a forward and a backward."""
    with fake_cuda.as_cuda() as device:
        tracker = Tracker(device.type)

        def run(_: FakeTensorMode) -> None:
            model, x = make(device)
            tracker.mark(0, Phase.FORWARD, 0)
            out = model(x)
            tracker.mark(0, Phase.BACKWARD, 0)
            out.sum().backward()

        return record_fake(run, tracker)


def effects_of(recording: OpTrace, name: str, card: cards.Card | None) -> list[KernelMemory | None]:
    found = effects(recording, card)
    return [e for o, e in zip(recording.operators, found, strict=True) if o.name == name]


class Model(nn.Module):
    """What a function does, with a layer if it has one."""

    def __init__(self, function: Callable[..., torch.Tensor], *layer: nn.Module) -> None:
        super().__init__()
        self.function, self.layer = function, nn.ModuleList(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(*self.layer, x)


def step_of(
    function: Callable[..., torch.Tensor],
    *shape: int,
    dtype: torch.dtype = torch.float32,
    layer: Callable[[], nn.Module] | None = None,
) -> OpTrace:
    """Return the recording of a step of a function of a layer, if any, and a tensor."""

    def make(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
        x = torch.zeros(shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)
        return Model(function, *[layer()] if layer else []).to(device), x

    return step(make)


@pytest.mark.parametrize(("card", "size"), [(RTX_3060, 8320 * KIB), (H100, 32 * MIB)])
def test_cublas_keeps_a_workspace_for_each_thread(card: cards.Card, size: int) -> None:
    recording = step_of(nn.Module.__call__, 4, 8, layer=lambda: nn.Linear(8, 8))
    assert [one.kept_bytes for one in effects(recording, card) if one is not None] == [size, size]
    without = step_of(nn.Module.__call__, 4, 8, layer=lambda: nn.LayerNorm(8))
    assert not any(effect and effect.kept_bytes for effect in effects(without, card))


def convolution(
    channels: int, out: int, kernel: int, size: int = 16, n: int = 2, last: bool = False,
    **options: int,
) -> Callable[[torch.device], tuple[nn.Module, torch.Tensor]]:  # fmt: skip
    def make(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
        form = torch.channels_last if last else torch.contiguous_format
        model = nn.Conv2d(channels, out, kernel, bias=False, **options).to(device)
        x = torch.zeros(n, channels, size, size, device=device)
        return model, x.to(memory_format=form).requires_grad_()

    return make


def workspaces(
    recording: OpTrace, card: cards.Card | None, hypothesis: Workspaces
) -> tuple[int, int]:
    """Return that of the forward and that of the backward convolution."""
    found = with_workspaces(effects(recording, card), recording.operators, card, hypothesis)
    names = [operator.name for operator in recording.operators]
    forward, backward = (
        0 if effect is None else effect.workspace_bytes
        for effect in (found[names.index(FORWARD)], found[names.index(BACKWARD)])
    )
    return forward, backward


@pytest.mark.parametrize("groups", [1, 2])
def test_each_hypothesis_copies_in_its_passes(groups: int) -> None:
    recording = step(convolution(8, 32, 3, padding=1, groups=groups))
    copies = 4 * (2 * 8 * 16 * 16 + 2 * 32 * 16 * 16 + 32 * 8 // groups * 9)
    said = {hypothesis: workspaces(recording, RTX_3060, hypothesis) for hypothesis in Workspaces}
    assert said == {
        Workspaces.NONE: (0, 0),
        Workspaces.COPIES_IN_FORWARD: (copies, 0),
        Workspaces.COPIES_IN_BACKWARD: (0, copies),
        Workspaces.COPIES: (copies, copies),
        Workspaces.PATCHES: (0, 0),  # it has no stride
    }
    assert workspaces(recording, None, Workspaces.COPIES) == (copies, copies)
    assert workspaces(recording, T4, Workspaces.COPIES) == (0, 0)  # it has no TF32
    assert take_workspace(recording.operators, RTX_3060)
    assert not any(effects_of(recording, name, RTX_3060)[0] for name in (FORWARD, BACKWARD))


def test_a_strided_convolution_may_lay_out_patches() -> None:
    recording = step(convolution(3, 32, 3, size=86, n=300, stride=2, padding=1))
    assert workspaces(recording, RTX_3060, Workspaces.PATCHES) == (0, 9 * 300 * 32 * 43 * 43 * 4)


@pytest.mark.parametrize(
    "make",
    [
        convolution(8, 32, 1),
        convolution(8, 8, 3, groups=8),
        convolution(8, 32, 3, last=True),
    ],
    ids=["1x1", "depthwise", "channels last"],
)
def test_products_depthwise_and_channels_last_take_nothing(
    make: Callable[[torch.device], tuple[nn.Module, torch.Tensor]],
) -> None:
    recording = step(make)
    assert {workspaces(recording, RTX_3060, each) for each in Workspaces} == {(0, 0)}
    assert not take_workspace(recording.operators, RTX_3060)


def test_the_middle_is_the_weighted_median() -> None:
    peaks = dict(zip(Workspaces, (100, 130, 110, 180, 100), strict=True))
    equal = dict.fromkeys(Workspaces, 1.0)
    assert middle(peaks, equal) is Workspaces.COPIES_IN_BACKWARD
    assert middle(peaks, {**equal, Workspaces.COPIES: 5.0}) is Workspaces.COPIES
    assert middle({Workspaces.NONE: 7}, equal) is Workspaces.NONE


@pytest.mark.parametrize(
    ("name", "recorded", "effect"),
    [
        (
            "native_layer_norm",  # copies what is not contiguous
            lambda: step_of(
                lambda norm, x: norm(x.transpose(1, 2)), 4, 8, 16, layer=lambda: nn.LayerNorm(8)
            ),
            KernelMemory(workspace_bytes=4 * 8 * 16 * 4),
        ),
        (
            "_fused_rms_norm",
            lambda: step_of(lambda x: functional.rms_norm(x.transpose(0, 1), (1024,)), 1024, 256),
            KernelMemory(workspace_bytes=1024 * 256 * 4),
        ),
        (
            "logsumexp",  # holds the exponentials
            lambda: step_of(lambda x: x.logsumexp(-1), 1024, 256),
            KernelMemory(workspace_bytes=(1024 * 256 + 1024) * 4),
        ),
    ],
    ids=["layer_norm", "rms_norm", "logsumexp"],
)
def test_a_kernel_takes_the_workspace_that_a_hand_count_says(
    name: str, recorded: Callable[[], OpTrace], effect: KernelMemory
) -> None:
    recording = recorded()
    assert effects_of(recording, f"aten::{name}", H100) == [effect]
    for backward in effects_of(recording, "aten::_fused_rms_norm_backward", H100):
        assert backward.workspace_bytes >= effect.workspace_bytes


@pytest.mark.parametrize(("tokens", "size"), [(3072, 0), (4000, (400 + 100) * 64 * 4 + 4000 * 32)])
def test_many_indices_of_an_embedding_are_sorted(tokens: int, size: int) -> None:
    recording = step_of(
        nn.Module.__call__, tokens, dtype=torch.long, layer=lambda: nn.Embedding(100, 40)
    )
    [effect] = effects_of(recording, "aten::embedding_dense_backward", H100)
    assert (0 if effect is None else effect.workspace_bytes) == size


def test_an_lstm_keeps_gates_cells_and_their_tanh() -> None:
    recording = step_of(
        lambda lstm, x: lstm(x)[0], 10, 4, 8, layer=lambda: nn.LSTM(8, 16, num_layers=2)
    )
    [effect] = effects_of(recording, "aten::_cudnn_rnn", H100)
    assert effect is not None
    assert effect.output_bytes == (
        10 * 4 * 16 * 4, 2 * 4 * 16 * 4, 2 * 4 * 16 * 4, 10 * 4 * 2 * 16 * 6 * 4, 0,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_a_loss_made_of_operators_holds_what_they_return(reduction: str, is_weighted: bool) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(256, device=x.device) if is_weighted else None
        target = torch.empty(1024, 256, device=x.device)
        return functional.binary_cross_entropy_with_logits(
            x, target, reduction=reduction, pos_weight=weight
        )

    recording = step_of(loss, 1024, 256)
    [effect] = effects_of(recording, "aten::binary_cross_entropy_with_logits", H100)
    assert effect is not None
    count = 1 + (reduction == "mean")  # weights are gone before the losses are there
    assert effect.workspace_bytes == count * 1024 * 256 * 4


@pytest.mark.parametrize(("heads_of_keys", "size"), [(4, 64), (2, 64), (4, 136)])
def test_flash_backward_sums_gradients_of_queries_in_fp32_as_counted_by_hand(
    heads_of_keys: int, size: int
) -> None:
    samples, heads, tokens = 2, 4, 1000

    def attention(x: torch.Tensor) -> torch.Tensor:
        key = x[:, :heads_of_keys]
        return functional.scaled_dot_product_attention(
            x, key, key, enable_gqa=heads_of_keys != heads
        )

    name = "aten::_scaled_dot_product_flash_attention_backward"
    recording = step_of(attention, samples, heads, tokens, size, dtype=torch.bfloat16)
    [effect] = effects_of(recording, name, H100)
    rows = samples * heads * 1024  # tokens in blocks of 128
    by_hand = rows * {64: 64, 136: 192}[size] * 4 + rows * 4
    if heads_of_keys != heads:  # keys and values of all heads, in bf16, before they are summed
        by_hand += 2 * samples * heads * tokens * size * 2
    assert effect == KernelMemory(workspace_bytes=by_hand)
