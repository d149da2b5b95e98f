"""The training loop and the models of the public GPU peaks, rebuilt over fake tensors.

Source: `conv_train_loop` and `transformer_train_loop` of the repository Stone-ResearchLife/xMem
(MIT, (c) 2025 Jiabo Shi), which ran torch 2.6.0, torchvision 0.21 and transformers 4.51.3: fp32, no
autocast, cuDNN benchmark off, learning rate 1e-3, otherwise default arguments. Outputs and loss
stay in Python locals until they are overwritten, which decides what is alive at the peak.

The sampler that read the memory starts with the loop and subtracts its first reading. The loop of
language models waits two seconds for it (`time.sleep(2)`), that of convnets does not: there the
first reading comes when model and optimizer are on the card, and their bytes are missing in what
was published. That the 46 runs of ConvNeXt on the RTX 3060 are 100 MiB (SGD, AdamW) to 220 MiB
(Adagrad, whose state is made with it) below a replay, whatever their batch, shows it:
`held_at_first_reading`.

Left out: the data (zeros of the same shapes) and, where few samples make the longest text of a
batch shorter than 128 tokens, its true length.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.trace import Phase, Trace
from memlab.tracing import fake_cuda
from memlab.tracing.recording import OpTrace
from memlab.tracing.tracker import Tracker, record_fake

NUM_STEPS = 4
PACKAGES_HELP = "a folder with the runs' own transformers and torchvision"
IMAGE_SIZE, LENGTH = 86, 128
Build = Callable[[], torch.nn.Module]
Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicRun:
    """One measured run.

    Attributes:
        model: its public name.
        optimizer: a class of torch.optim.
        batch_size: samples a step; the loop has no micro-batches.
        zero_grad: 0 first in the step, 1 between forward and backward, 2 after the optimizer.
    """

    model: str
    optimizer: str
    batch_size: int
    zero_grad: int


def options_with_packages(file: str, description: str, *flags: str) -> argparse.Namespace:
    """Return the options of the benchmark in this file: `packages`, `out`, `quick` and flags."""
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    parser.add_argument("--packages", type=Path, default=Path("build/public"), help=PACKAGES_HELP)
    default = Path("build/benchmarks") / f"{Path(file).stem}.json"
    parser.add_argument("--out", type=Path, default=default, help="where the numbers go, as JSON")
    parser.add_argument("--quick", action="store_true", help="few rows")
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def use_packages(folder: Path) -> None:
    """Import transformers and torchvision from this folder, where they are there.

    torchvision's wheel is built for one torch. Its models are plain Python, and load beside any
    other once the operator that its compiled part would bring has a schema.
    """
    sys.path.insert(0, str(folder.resolve()))
    if (folder / "torchvision").is_dir():
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # torch keeps no reference of its own


_KEPT: list[Any] = []


def _convnets() -> dict[str, Build]:
    """Return torchvision's models by name without marks: "ConvNeXtTiny" is convnext_tiny."""
    from torchvision import models

    names = models.list_models(module=models)
    short = [name.replace("_", "") for name in names]  # regnet_x_16gf and regnet_x_1_6gf are one
    found = {
        key: partial(models.get_model, name)
        for key, name in zip(short, names, strict=True)
        if short.count(key) == 1
    }
    return found | {"mnasnet": lambda: models.MNASNet(alpha=1.0, num_classes=10)}


def _gpt_neo() -> torch.nn.Module:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072, window_size=256,
        attention_types=[[["global", "local"], 6]], vocab_size=50257, max_position_embeddings=2048,
        attn_implementation="eager",
    )  # fmt: skip
    return GPTNeoForCausalLM(config)


def _opt() -> torch.nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(attn_implementation="sdpa"))  # its defaults are opt-125m's


def _distilgpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=6, attn_implementation="sdpa"))


def _t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(decoder_start_token_id=0, attn_implementation="eager")
    return T5ForConditionalGeneration(config)


def _qwen() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40960, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
        num_attention_heads=24, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=131072, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


LANGUAGE_MODELS: dict[str, Build] = {
    "EleutherAI/gpt-neo-125M": _gpt_neo,
    "facebook/opt-125m": _opt,
    "distilbert/distilgpt2": _distilgpt2,
    "T5-small": _t5,
    "Qwen/Qwen3-4B": _qwen,
    "meta-llama/Llama-3.2-3B-Instruct": _llama,
}


@cache
def convnets() -> dict[str, Build]:
    """Return torchvision's models by name in small letters without marks; none without it."""
    try:
        return _convnets()
    except (ImportError, RuntimeError):  # absent, or built for another torch
        return {}


def record(run: PublicRun) -> OpTrace:
    """Return what the run would do on a CUDA card."""
    with fake_cuda.as_cuda() as device:
        tracker = Tracker(device.type)
        loop = _language if run.model in LANGUAGE_MODELS else _convolutional

        def go(_: FakeTensorMode) -> None:
            loop(run, tracker, device)

        return record_fake(go, tracker)


def held_at_first_reading(run: PublicRun, recording: OpTrace, trace: Trace, reserved: Bytes) -> int:
    """Return the reserved bytes that the published figure of a run leaves out.

    Args:
        run: of a convnet, or of a language model, where it is 0.
        recording: of the run.
        trace: of the same.
        reserved: int64, (rows of the trace,), what a replay held after each.
    """
    if run.model in LANGUAGE_MODELS:
        return 0
    steps = np.array([interval.step for interval in recording.intervals])[trace.interval]
    before = np.flatnonzero(steps < 0)
    return int(reserved[before[-1]])


def _optimizer(run: PublicRun, model: torch.nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, run.optimizer)(model.parameters(), lr=1e-3)
    return made


def _convolutional(run: PublicRun, tracker: Tracker, device: torch.device) -> None:
    tracker.mark(-1, Phase.BUILD, 0)
    model = convnets()[run.model.lower()]()
    model.to(device)
    model.train()
    optimizer = _optimizer(run, model)
    criterion = torch.nn.CrossEntropyLoss()
    for step in range(NUM_STEPS):
        tracker.mark(step, Phase.DATA, 0)
        inputs = torch.empty(run.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
        labels = torch.empty(run.batch_size, dtype=torch.long)
        if run.zero_grad == 0:
            optimizer.zero_grad()
        inputs, labels = inputs.to(device), labels.to(device)
        tracker.mark(step, Phase.FORWARD, 0)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        if run.zero_grad == 1:
            optimizer.zero_grad()
        tracker.mark(step, Phase.BACKWARD, 0)
        loss.backward()
        tracker.mark(step, Phase.OPTIMIZER, 0)
        optimizer.step()
        _, _predictions = torch.max(outputs, 1)  # stays alive
        if run.zero_grad == 2:
            optimizer.zero_grad()


def _language(run: PublicRun, tracker: Tracker, device: torch.device) -> None:
    tracker.mark(-1, Phase.BUILD, 0)
    model = LANGUAGE_MODELS[run.model]()
    model.train()
    model.to(device)
    # theirs is made before the move, which on real tensors keeps the parameters it was given
    optimizer = _optimizer(run, model)
    names = ("input_ids", "attention_mask", "labels")
    for step in range(NUM_STEPS):
        tracker.mark(step, Phase.DATA, 0)
        batch = {name: torch.zeros(run.batch_size, LENGTH, dtype=torch.long) for name in names}
        if run.zero_grad == 0:
            optimizer.zero_grad()
        batch = {name: value.to(device) for name, value in batch.items()}
        tracker.mark(step, Phase.FORWARD, 0)
        outputs = model(**batch)
        if run.zero_grad == 1:
            optimizer.zero_grad()
        loss = outputs.loss
        tracker.mark(step, Phase.BACKWARD, 0)
        loss.backward()
        tracker.mark(step, Phase.OPTIMIZER, 0)
        optimizer.step()
        if run.zero_grad == 2:
            optimizer.zero_grad()
