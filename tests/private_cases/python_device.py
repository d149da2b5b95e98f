"""The device for backends in Python, and CUDA."""

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.private_cases.parts import arguments_of, at, case, fakes, there


@case(
    "torch.utils.backend_registration._DummyDeviceGuard",
    "torch.utils.backend_registration._DummyPrivateUse1Hook",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    "torch._C._autograd.DeviceType.PrivateUse1",
    "torch._C._get_privateuse1_backend_name",
    to="stand in for CUDA where there is no card",
)
def _() -> None:
    module = importlib.import_module("torch.utils.backend_registration")
    assert hasattr(module._DummyDeviceGuard, "type_")
    module._DummyPrivateUse1Hook()
    given = ["rename", "backend_module", "hook", "device_guard"]
    assert arguments_of(module._setup_privateuseone_for_python_backend) == given
    assert isinstance(at("torch._C._get_privateuse1_backend_name")(), str)


@case("torch._VF", "._pad_packed_sequence", to="run recurrent layers over packed sequences")
def _() -> None:
    functions = sys.modules["torch._VF"]
    own = functions._pad_packed_sequence
    functions._pad_packed_sequence = print
    del functions._pad_packed_sequence
    assert functions._pad_packed_sequence is own
    assert functions._pad_packed_sequence is not print
    assert all(map(callable, (functions.lstm, functions.gru, functions.rnn_tanh)))


@case(
    "torch._C._only_lift_cpu_tensors",
    "torch._C._set_only_lift_cpu_tensors",
    to="see what torch.tensor moves to a device",
)
def _() -> None:
    ask, answer = at("torch._C._only_lift_cpu_tensors"), at("torch._C._set_only_lift_cpu_tensors")
    before = ask()
    try:
        answer(True)
        assert ask() is True
    finally:
        answer(before)


@case(
    "torch._C._conv_determine_backend_memory_format",
    to="let convolutions return channels-last where cuDNN would",
)
def _() -> None:
    given: list[Any] = []

    def channels_last(*args: Any) -> torch.memory_format:
        given.append(args)
        return torch.channels_last

    with pytest.MonkeyPatch.context() as patch, fakes():
        patch.setattr(torch._C, "_conv_determine_backend_memory_format", channels_last)
        out = nn.functional.conv2d(torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3))
    assert len(given[0]) == 3
    assert out.is_contiguous(memory_format=torch.channels_last)


@case(
    "torch._meta_registrations",
    to="give outputs the sizes and strides that they have on CUDA",
)
def _() -> None:
    asked: list[torch.Tensor] = []

    def cuda(tensor: torch.Tensor) -> str:
        asked.append(tensor)
        return "cuda"

    with pytest.MonkeyPatch.context() as patch, fakes():
        x = torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last)
        patch.setattr(at("torch._meta_registrations"), "device_hint", cuda)
        assert nn.functional.pad(x, (1, 1, 1, 1), mode="reflect").is_contiguous()
    assert asked


there("torch._C._cuda_clearCublasWorkspaces", to="give back workspaces of cuBLAS")
there("torch._C._cuda_attach_out_of_memory_observer", to="write a snapshot when memory runs out")
there("torch._C._cuda_isHistoryEnabled", to="leave alone a history that somebody else records")
there("torch.cuda._lazy_call", to="begin a watch once CUDA has started")


@case("torch.cuda.memory._record_memory_history", to="record the allocator's events in a watch")
def _() -> None:
    names = arguments_of(at("torch.cuda.memory._record_memory_history"))
    assert {"enabled", "stacks", "max_entries"} <= {*names}


@case("torch.cuda.memory._dump_snapshot", to="write the snapshot of a watch")
def _() -> None:
    assert arguments_of(at("torch.cuda.memory._dump_snapshot"))[0] == "filename"


@case("torch.cuda.memory._set_allocator_settings", to="set the caching allocator")
def _() -> None:
    assert arguments_of(at("torch.cuda.memory._set_allocator_settings")) == ["env"]
