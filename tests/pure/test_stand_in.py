"""What the device that stands in for CUDA dispatches: the operators and formats of CUDA."""

import functools
import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import memlab
from memlab.trace import Phase
from memlab.tracing import fake_cuda
from memlab.tracing.recording import OpTrace
from memlab.tracing.tracker import Tracker, record_fake
from tests.predictions import predicted


@pytest.fixture
def device() -> Iterator[torch.device]:
    with fake_cuda.as_cuda() as found:
        yield found


def recorded(device: torch.device, run: Callable[[], object]) -> OpTrace:
    tracker = Tracker(device.type)

    def go(_: FakeTensorMode) -> None:
        run()

    return record_fake(go, tracker)


def names(recording: OpTrace) -> list[str]:
    return [operator.name for operator in recording.operators]


LOW = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("low", LOW)
def test_autocast_lowers_products_and_keeps_sums_and_norms_in_fp32(
    device: torch.device, low: torch.dtype
) -> None:
    found: dict[str, torch.dtype] = {}

    def run() -> None:
        linear = nn.Linear(8, 8).to(device)
        norm = nn.LayerNorm(8).to(device)
        x = torch.zeros(4, 8, device=device)
        labels = torch.zeros(4, dtype=torch.long, device=device)
        with torch.autocast(device.type, low):
            y = linear(x)
            found["linear"] = y.dtype
            found["conv2d"] = functional.conv2d(
                torch.zeros(1, 1, 4, 4, device=device), torch.zeros(1, 1, 3, 3, device=device)
            ).dtype
            found["relu"] = functional.relu(y).dtype
            found["softmax"] = y.softmax(-1).dtype
            found["layer_norm"] = norm(y).dtype
            found["cross_entropy"] = functional.cross_entropy(y, labels).dtype
            found["sum"] = y.sum().dtype
            found["pow"] = y.pow(2).dtype
            found["mixed add"] = (y + x).dtype

    recorded(device, run)
    lowered = {"linear", "conv2d", "relu"}
    assert found == {name: low if name in lowered else torch.float32 for name in found}


def test_a_weight_is_cast_once_in_each_forward(device: torch.device) -> None:
    def run() -> None:
        linear = nn.Linear(8, 8, bias=False).to(device)
        x = torch.zeros(4, 8, device=device, dtype=torch.float16)
        for _ in range(2):
            with torch.autocast(device.type, torch.float16):
                linear(linear(x))

    recording = recorded(device, run)
    casts = [
        operator
        for operator in recording.operators
        if operator.name == "aten::_to_copy" and operator.outputs[0].dtype is torch.float16
    ]
    assert len(casts) == 2


def attention_kernel(
    device: torch.device, dtype: torch.dtype, heads: int = 4, masked: bool = False
) -> str:
    def run() -> None:
        query = torch.zeros(2, 4, 16, 64, device=device, dtype=dtype, requires_grad=True)
        key = torch.zeros(2, heads, 16, 64, device=device, dtype=dtype)
        mask = torch.ones(16, 16, dtype=torch.bool, device=device) if masked else None
        functional.scaled_dot_product_attention(
            query, key, key, attn_mask=mask, enable_gqa=heads != 4
        ).sum().backward()

    for name in names(recorded(device, run)):
        for kind in ("flash", "efficient"):
            if name == f"aten::_scaled_dot_product_{kind}_attention":
                return kind
    return "math"


@pytest.mark.parametrize(
    ("dtype", "plain", "grouped", "masked"),
    [
        (torch.float16, "flash", "flash", "efficient"),
        (torch.bfloat16, "flash", "flash", "efficient"),
        (torch.float32, "efficient", "math", "efficient"),
    ],
)
def test_attention_is_the_kernel_that_its_format_its_heads_and_a_mask_allow(
    device: torch.device, dtype: torch.dtype, plain: str, grouped: str, masked: str
) -> None:
    assert attention_kernel(device, dtype) == plain
    assert attention_kernel(device, dtype, heads=2) == grouped
    assert attention_kernel(device, dtype, masked=True) == masked


def test_dropout_is_fused_and_its_mask_has_one_byte_a_value(device: torch.device) -> None:
    def run() -> None:
        x = torch.zeros(64, 64, device=device, requires_grad=True)
        functional.dropout(x, 0.1).sum().backward()

    recording = recorded(device, run)
    [dropout] = [o for o in recording.operators if o.name == "aten::native_dropout"]
    assert [output.dtype for output in dropout.outputs] == [torch.float32, torch.bool]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("low", [None, torch.float16])
def test_an_rnn_is_one_kernel_forward_and_one_backward(
    device: torch.device, kind: type[nn.RNNBase], low: torch.dtype | None
) -> None:
    gradients: list[tuple[int, ...]] = []

    def run() -> None:
        model = kind(8, 16, num_layers=2, batch_first=True, bidirectional=True).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.autocast(device.type, low or torch.float16, enabled=low is not None):
            out, _ = model(torch.zeros(4, 10, 8, device=device))
        assert out.dtype is (low or torch.float32)
        out.float().sum().backward()
        gradients.extend(tuple(p.grad.shape) for p in model.parameters())
        assert gradients == [tuple(p.shape) for p in model.parameters()]
        optimizer.step()

    found = names(recorded(device, run))
    assert found.count("aten::_cudnn_rnn") == found.count("aten::_cudnn_rnn_backward") == 1


def test_convolutions_keep_channels_last(device: torch.device) -> None:
    seen: list[bool] = []

    def run() -> None:
        conv = nn.Conv2d(8, 8, 3).to(device)
        x = torch.zeros(2, 8, 8, 8, device=device)
        for given in (x, x.to(memory_format=torch.channels_last)):
            out = conv(given)
            seen.append(out.is_contiguous(memory_format=torch.channels_last))

    recorded(device, run)
    assert seen == [False, True]


def test_a_tensor_of_values_can_be_made_on_the_device(device: torch.device) -> None:
    found: list[torch.Tensor] = []
    recorded(device, lambda: found.append(torch.tensor([1.0, 2.0], device=device)))
    assert found[0].device.type == fake_cuda.NAME
    assert found[0].shape == (2,)


def test_loss_scaling_updates_and_optimizers_are_foreach(device: torch.device) -> None:
    def run() -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler(device.type)
        with torch.autocast(device.type, torch.float16):
            loss = model(torch.zeros(4, 8, device=device)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert len(optimizer.state) == 4

    found = names(recorded(device, run))
    assert "aten::_foreach_addcdiv_" in found
    assert "aten::_amp_update_scale_" in found


def test_every_switch_is_back_after_a_recording() -> None:
    before = (
        torch.clear_autocast_cache,
        torch._C._only_lift_cpu_tensors(),
        torch._C._conv_determine_backend_memory_format,
    )
    with fake_cuda.as_cuda():
        assert torch._C._only_lift_cpu_tensors()
    assert before == (
        torch.clear_autocast_cache,
        torch._C._only_lift_cpu_tensors(),
        torch._C._conv_determine_backend_memory_format,
    )


@torch.library.custom_op("memlab_tests::without_fake_kernel", mutates_args=())
def without_fake_kernel(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize("where", ["hook", "operator", "function"])
def test_an_error_in_backward_is_raised_and_aborts_no_process(where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError(where)

    def fail(_: torch.Tensor) -> None:
        raise KeyError(where)

    def run(device: torch.device) -> None:
        x = torch.ones(2, device=device, requires_grad=True)
        y = x.sin()
        if where == "hook":
            y.register_hook(fail)
        elif where == "function":
            y = Fails.apply(y)
        else:
            y.register_hook(without_fake_kernel)
        y.sum().backward()

    expected = RuntimeError if where == "operator" else KeyError
    for _ in range(3):
        with pytest.raises(expected), fake_cuda.as_cuda() as device:
            recorded(device, functools.partial(run, device))


OWN_FILE = """
import torch
from torch import nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMED = "cuda:0"
AS_TEXT = str(torch.device("cuda", index=0)) if torch.cuda.is_available() else "cpu"
TIMES = []


def opened(device):
    TIMES.append(device)
    return device


OPENED = opened("cuda" if torch.cuda.is_available() else "cpu")
BUILT = [opened(name) for name in ("cpu",) if not torch.cuda.is_available()]


class Model(nn.Module):
    def __init__(self, device="cuda"):
        super().__init__()
        self.layer = nn.Linear(8, 8).to(DEVICE)
        self.device, self.shift = device, torch.ones(8).cuda()

    def forward(self, x):
        here = "cuda" if torch.cuda.is_available() else "cpu"
        assert x.is_cuda and x.device.type == here and torch.cuda.device_count() == 1
        with torch.cuda.amp.autocast(dtype=torch.bfloat16):
            x = self.layer(x.to(here))
        torch.cuda.synchronize()
        assert torch.zeros(2, device=AS_TEXT).is_cuda and TIMES == ["cpu", "cpu"]
        return x + torch.ones(8, device=self.device) + torch.zeros(8, device=NAMED) + self.shift


def compute_loss(model, x):
    return (model(x) - torch.zeros(8, device="cuda")).mean() + torch.ones(1, device=DEVICE).sum()
"""


def test_a_persons_own_file_is_answered_for_the_card_and_then_is_as_before(tmp_path, monkeypatch):
    (tmp_path / "asks_for_cuda.py").write_text(OWN_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("asks_for_cuda")
    before = dict(vars(own)), own.compute_loss.__code__
    made = memlab.Workload(
        name="own",
        build_model=own.Model,
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=own.compute_loss,
    )
    found = predicted(memlab.StepConfig(batch_size=4), "h200", made)
    assert found.outcome == memlab.Outcome.OK, found.message
    assert (dict(vars(own)), own.compute_loss.__code__) == before
    assert torch.device("cpu") == own.DEVICE

    asked = predicted(memlab.StepConfig(batch_size=4), "cpu", made)
    assert asked.outcome == memlab.Outcome.FAILED, "a step on this CPU asks for a card"


# what a product of bitsandbytes in 8 bits allocates, against a count by hand


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
