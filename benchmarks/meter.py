"""Is the peak that memlab measures the peak that an independent loop and meter see?

Eight models, each with accumulation 1 and 4, every count in a fresh process; memlab in its worker.
The peer is PyTorch's own MemTracker, which sees what operators return but not the workspace inside
their kernels, and does not do accumulation. Goal: equal to the byte, or the difference explained.
"""

import json
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import nn

import memlab
from benchmarks import report
from benchmarks.report import fresh_python
from memlab import StepConfig, Workload

BATCH_SIZES = {"mlp": 1024}  # where the default of StepConfig would leave little to see
ACCUMULATION = (1, 4)
QUICK = ("mlp", "lstm-text")


def llama() -> Workload:
    """Return next-token prediction with a two-layer Llama (transformers) on random tokens."""

    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512,
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                use_cache=False,
            )
        )

    return Workload(
        name="llama",
        build_model=build,
        make_batch=lambda n: torch.randint(512, (n, 64)),
        compute_loss=lambda model, ids: model(input_ids=ids, labels=ids).loss,
    )


def monai(name: str, network: str, image: tuple[int, ...], **sizes: Any) -> Workload:
    """Return classification of random images, or of their voxels, by a network of MONAI."""

    def build() -> nn.Module:
        from monai.networks import nets

        return getattr(nets, network)(
            spatial_dims=len(image) - 1, in_channels=image[0], out_channels=2, **sizes
        )

    def compute_loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        logits = model(images)  # (n, 2) or (n, 2, ...)
        labels = torch.zeros((logits.shape[0], *logits.shape[2:]), dtype=torch.long)
        return nn.functional.cross_entropy(logits, labels)

    return Workload(
        name=name,
        build_model=build,
        make_batch=lambda n: torch.randn(n, *image),
        compute_loss=compute_loss,
    )


def mlp() -> Workload:
    """Return a plain classifier with BatchNorm and dropout on random vectors."""

    def build() -> nn.Module:
        def layer(width: int) -> list[nn.Module]:
            return [nn.Linear(width, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1)]

        return nn.Sequential(*layer(64), *layer(256), *layer(256), nn.Linear(256, 10))

    return Workload(
        name="mlp",
        build_model=build,
        make_batch=lambda n: (torch.randn(n, 64), torch.randint(10, (n,))),
        compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt-small": lambda: memlab.workloads.get("gpt-small"),
    "resnet-digits": lambda: memlab.workloads.get("resnet-digits"),
    "vit-digits": lambda: memlab.workloads.get("vit-digits"),
    "lstm-text": lambda: memlab.workloads.get("lstm-text"),
    "llama": llama,
    "densenet121": lambda: monai("densenet121", "DenseNet121", (1, 32, 32)),
    "unet-3d": lambda: monai(
        "unet-3d", "UNet", (1, 32, 32, 32), channels=(16, 32, 64), strides=(2, 2)
    ),
    "mlp": mlp,
}


def independent_peak(
    workload: Workload, *, batch_size: int = 8, accumulation_steps: int = 1
) -> dict[str, int]:
    """Return the peaks of a workload's first two fp32 AdamW steps on a CPU, by no code of memlab.

    Args:
        workload: only its `build_model`, `make_batch` and `compute_loss` are used.
        batch_size: samples per optimizer update.
        accumulation_steps: micro-batches that they are split into.

    Raises:
        RuntimeError: the fresh process failed.
    """
    return _in_fresh_process("peak_in_profile", workload, batch_size, accumulation_steps)


def tracker_peak(workload: Workload, *, batch_size: int = 8) -> int | str:
    """Return what PyTorch's MemTracker says of the second step, or why it says nothing."""
    try:
        return _in_fresh_process("peak_in_tracker", workload, batch_size, 1)["peak_2"]
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]


def compare(workload: Workload, accumulation_steps: int, batch_size: int) -> dict[str, Any]:
    """Return one row: the second step's peak by memlab, by the independent meter, by the peer."""
    config = StepConfig(batch_size=batch_size, accumulation_steps=accumulation_steps)
    result = memlab.measure(workload, config, "cpu", repeats=1, warmup=0, timeout_seconds=600)
    if result.peak_allocated_bytes is None:
        raise RuntimeError(f"{workload.name}: {result.outcome}: {result.message}")
    other = independent_peak(workload, batch_size=batch_size, accumulation_steps=accumulation_steps)
    peer = tracker_peak(workload, batch_size=batch_size) if accumulation_steps == 1 else None
    return {
        "model": workload.name,
        "accumulation": accumulation_steps,
        "memlab bytes": result.peak_allocated_bytes,
        "independent bytes": other["peak_2"],
        "difference": result.peak_allocated_bytes - other["peak_2"],
        "allocator's count": other["allocator_peak_2"],
        "first step": result.first_step_peak_bytes,
        "independent first": other["peak_1"],
        "equal": (result.peak_allocated_bytes, result.first_step_peak_bytes)
        == (other["peak_2"], other["peak_1"]),
        "MemTracker": peer,
        "its error %": (100 * (peer / other["peak_2"] - 1) if isinstance(peer, int) else None),
    }


def _in_fresh_process(function: str, workload: Workload, *sizes: int) -> dict[str, int]:
    definition = (workload.build_model, workload.make_batch, workload.compute_loss, *sizes)
    stdin = cloudpickle.dumps((function, torch.get_num_threads(), definition))
    done = fresh_python("from benchmarks.independent import main; main()", stdin=stdin)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Compare every model at every accumulation."""
    given, before = report.options(__file__, __doc__), report.environment()
    rows = []
    for name in QUICK if given.quick else WORKLOADS:
        for accumulation_steps in ACCUMULATION:
            rows.append(compare(WORKLOADS[name](), accumulation_steps, BATCH_SIZES.get(name, 8)))
            print(rows[-1], flush=True)
    report.show("peak of the second step, allocated bytes", rows)
    report.write(given, before, {"rows": rows})


if __name__ == "__main__":
    main()
