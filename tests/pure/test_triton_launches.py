"""A step with Triton kernels, recorded for a card: launches do nothing, and "cuda" is the card.

Triton comes with PyTorch's builds for CUDA and is large, so most machines that run this test lack
it. Without it a stand-in of a few lines tests the mechanics alone: the class that launches, and the
class that wraps it. With Triton the same tests use its own classes.
"""

import importlib
import importlib.util
import linecache
import sys
import textwrap
import types

import pytest
import torch

from memlab import Outcome, StepConfig, Workload
from memlab.devices import cards
from memlab.errors import UnsupportedError
from memlab.trace import Phase
from memlab.tracing import card_answers, fake_cuda, triton_launches
from memlab.tracing.tracker import Tracker, record_fake
from tests.predictions import predicted

KERNEL = '''
"""A person's own fused kernel: the square of its input, and twice the input times a gradient."""
import torch
import triton
import triton.language as tl


def tuned(kernel):
    return triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])(kernel)


@triton.jit
def square_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, value * value, mask=at < n)


square_tuned = tuned(square_kernel)


def checked(function):
    def inner(*args):
        assert all(arg.device.type in ("cuda", "xpu") for arg in args)
        return function(*args)
    return inner


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert x.is_cuda
        if torch.cuda.get_device_capability(x.device)[0] < 8:
            raise RuntimeError("needs an Ampere card")
        y = torch.empty_like(x, device="cuda")
        with torch.cuda.device(x.device):
            square_kernel[(1,)](x, y, x.numel(), BLOCK=64)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        found = torch.empty_like(x)
        square_tuned[lambda meta: (1,)](x, found, x.numel())
        return found


@checked
def square(x):
    return Square.apply(x)


def processors(x):
    own = torch.cuda.get_device_properties(x.device)
    asked = triton.runtime.driver.active.utils.get_device_properties(x.device.index)
    of_torch = own.multi_processor_count, own.warp_size, own.shared_memory_per_block_optin
    return of_torch, (asked["multiprocessor_count"], asked["warpSize"], asked["max_shared_mem"])


def clock(x):
    return triton.runtime.driver.active.utils.get_device_properties(0)["sm_clock_rate"]


def cache(x):
    return torch.cuda.get_device_properties(x.device).L2_cache_size


def looked_at(x):
    return square_kernel.warmup(x, x, x.numel(), BLOCK=64, grid=(1,))
'''


def fake_triton():
    """Return modules with the classes that launch kernels, as Triton divides them."""

    class KernelInterface:
        def warmup(self, *args, grid, **kwargs):
            return self.run(*args, grid=grid, warmup=True, **kwargs)

        def __getitem__(self, grid):
            return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    class JITFunction(KernelInterface):
        def __init__(self, fn):
            self.fn = fn

        def run(self, *args, grid, warmup, **kwargs):
            raise RuntimeError("0 active drivers")

    class Autotuner(JITFunction):
        def run(self, *args, **kwargs):
            raise RuntimeError("0 active drivers")

    class DriverConfig:
        _active = None

        @property
        def active(self):
            if self._active is None:
                raise RuntimeError("0 active drivers")
            return self._active

        def set_active(self, driver):
            self._active = driver

    names = ("triton", "triton.language", "triton.runtime", "triton.runtime.jit")
    names += ("triton.runtime.driver",)
    modules = {name: types.ModuleType(name) for name in (*names, "triton.runtime.autotuner")}
    for name, module in modules.items():
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        module.__path__ = []
    modules["triton.runtime.jit"].KernelInterface = KernelInterface
    driver = modules["triton.runtime.driver"].driver = DriverConfig()
    modules["triton.runtime"].driver = driver  # the name of its file, too
    modules["triton.language"].constexpr = int
    top = vars(modules["triton"])
    top.update(jit=JITFunction, language=modules["triton.language"], Config=dict)
    top.update(autotune=lambda configs, key: Autotuner, runtime=modules["triton.runtime"])
    return modules


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a person's file with a kernel of its own."""
    if importlib.util.find_spec("triton") is None:
        importlib.import_module("torch._dynamo")  # it would ask the stand-in for more
        for name, module in fake_triton().items():
            monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "own_kernel.py").write_text(textwrap.dedent(KERNEL))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield lambda: importlib.import_module("own_kernel")
    sys.modules.pop("own_kernel", None)


def test_launches_do_nothing_and_the_word_cuda_means_the_card(own):
    tracker = Tracker(fake_cuda.NAME)

    def run(_):
        square = own().square  # imported after the recording has begun
        tracker.mark(0, Phase.FORWARD, 0)
        x = torch.empty(100, device=device, requires_grad=True)
        y = square(x)
        tracker.mark(0, Phase.BACKWARD, 0)
        y.sum().backward()

    with fake_cuda.as_cuda((8, 0)) as device:
        recording = record_fake(run, tracker)
    assert recording.launches == {"own_kernel.square_kernel": 2}
    # x, y, the sum, its gradient twice (`expand` is a view) and what the kernel writes
    made = [block.nbytes for block in recording.blocks]
    assert sorted(made) == [4, 4, 400, 400, 400]
    # afterwards everything is as it was
    with pytest.raises(AssertionError):
        own().square(torch.ones(3))
    with pytest.raises(RuntimeError):
        own().square_kernel[(1,)](torch.ones(3), torch.ones(3), 3, BLOCK=64)


def test_what_needs_another_card_says_so(own):
    def record(capability, run):
        with fake_cuda.as_cuda(capability) as device:
            tracker = Tracker(fake_cuda.NAME)
            module = own()
            record_fake(lambda _: run(module, torch.empty(3, device=device), tracker), tracker)

    def squared(module, x, tracker):
        tracker.mark(0, Phase.FORWARD, 0)
        module.square(x)

    with pytest.raises(RuntimeError, match="needs an Ampere card"):
        record((7, 5), squared)
    record(None, squared)
    with pytest.raises(UnsupportedError, match="square_kernel is compiled to look at it"):
        record(None, lambda module, x, _: module.looked_at(x))


def test_a_card_that_is_known_answers_how_many_processors_it_has(own):
    module = own()

    def asked(card, function):
        with fake_cuda.as_cuda(card and card.compute_capability, card) as device:
            found = []
            run = lambda _: found.append(function(torch.empty(3, device=device)))  # noqa: E731
            record_fake(run, Tracker(fake_cuda.NAME))
            return found[0]

    # deviceQuery of an A100: 108 multiprocessors, warps of 32, 166912 bytes for a block
    answers = (108, 32, 166912)
    assert asked(cards.find("a100-80"), module.processors) == (answers, answers)
    for card, function, said in (
        (None, module.processors, "torch.cuda.get_device_properties is asked for"),
        (cards.find("24GiB"), module.processors, "torch.cuda.get_device_properties is asked for"),
        (cards.find("t4"), module.clock, "'sm_clock_rate' of Triton's get_device_properties"),
        (cards.find("t4"), module.cache, r"get_device_properties\(...\).L2_cache_size"),
    ):
        with pytest.raises(UnsupportedError, match=f"{said}.*use memlab.measure on the card"):
            asked(card, function)
    with pytest.raises(RuntimeError):  # Triton's own driver is back
        module.triton.runtime.driver.active.utils.get_device_properties(0)


def test_every_card_of_the_table_has_its_specifications():
    known = {card.compute_capability for card in cards.every_card() if card.num_multiprocessors}
    assert known <= card_answers.SPECIFICATIONS.keys()


def test_a_workload_with_its_own_kernel_is_predicted_without_a_time(own):
    module = own()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return module.square(self.linear(x))

    workload = Workload(
        name="own kernel",
        build_model=Model,
        make_batch=lambda n: torch.ones(n, 64),
        compute_loss=lambda model, x: model(x).mean(),
    )
    config = StepConfig(batch_size=32, optimizer="sgd")
    result = predicted(config, "a100-80", workload)
    assert result.outcome is Outcome.OK, result.message
    assert result.step_seconds is None
    assert any("square_kernel: 2" in note and "not known" in note for note in result.notes)
    assert any("allocate nothing" in note for note in result.notes)


LATE = '''
import types, torch

class Late(types.ModuleType):
    """A module that is imported when it is first used, and that is missing."""
    def __getattr__(self, name):
        raise RuntimeError(f"it was imported for {name}")

late = Late("late")

def loss(model, batch):
    return model(batch).square().mean() * len([late])
'''


def test_what_a_persons_file_imports_late_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "imports_late.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imports_late", raising=False)
    workload = Workload(
        name="late",
        build_model=lambda: torch.nn.Linear(4, 4),
        make_batch=lambda n: torch.randn(n, 4),
        compute_loss=importlib.import_module("imports_late").loss,
    )
    result = predicted(StepConfig(batch_size=2), "rtx-4060", workload)
    assert result.outcome is Outcome.OK, result.message


@pytest.mark.parametrize("text", ["this is no python\n", "x = 1\0\n"])
def test_a_file_that_is_being_changed_stops_no_prediction(tmp_path, monkeypatch, text):
    file = tmp_path / "half_written.py"
    file.write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "half_written", None)
    monkeypatch.delitem(sys.modules, "half_written")
    loss = importlib.import_module("half_written").loss
    file.write_text(text)
    linecache.checkcache(str(file))
    for compute_loss in (loss, lambda model, batch: model(batch).mean()):
        workload = Workload(
            name="half written",
            build_model=lambda: torch.nn.Linear(4, 4),
            make_batch=lambda n: torch.randn(n, 4),
            compute_loss=compute_loss,
        )
        result = predicted(StepConfig(batch_size=2), "rtx-4060", workload)
        assert result.outcome is Outcome.OK, result.message


def test_a_dictionary_that_holds_itself_is_renamed_once():
    names = {"device": "cuda:0", "sizes": (1, "cuda")}
    names["names"] = names
    found = triton_launches._renamed(names, "there")
    assert found == {"device": "there:0", "sizes": (1, "there"), "names": names}
    assert names["device"] == "cuda:0"
