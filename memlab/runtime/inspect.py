"""Facts about a workload before it runs: sizes, and the modules that limit techniques."""

from dataclasses import dataclass

import torch

from memlab.config import Precision
from memlab.running import Progress, Report
from memlab.techniques import precision
from memlab.techniques.accumulation import random_modules, sample_mixing_modules
from memlab.techniques.batches import tensors_of
from memlab.techniques.checkpointing.blocks import find_blocks
from memlab.techniques.step import set_seed
from memlab.techniques.trials import check_shapes
from memlab.tracing.fakify import outline_of, own_formats
from memlab.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadFacts:
    """Facts about a workload's model and data.

    Attributes:
        num_parameters: each shared parameter once; of a 4-bit weight each of its values.
        num_trainable: those of them that are trained.
        parameter_bytes: of the parameters as they were built.
        fp32_parameter_bytes: of the parameters cast to fp32.
        half_parameter_bytes: of the parameters cast to a format of 16 bits.
        parameter_formats: of the parameters as they were built, by torch's names, ordered by
            bytes.
        sample_bytes: of one sample of a batch.
        random_modules: paths of modules that draw random numbers in training.
        sample_mixing_modules: paths of modules that normalise over the batch.
        recurrent_modules: paths of torch.nn RNNs, at which torch.compile breaks its graph.
        blocks: paths of the repeated blocks that can be checkpointed.
    """

    num_parameters: int
    num_trainable: int
    parameter_bytes: int
    fp32_parameter_bytes: int
    half_parameter_bytes: int
    parameter_formats: tuple[str, ...]
    sample_bytes: int
    random_modules: tuple[str, ...]
    sample_mixing_modules: tuple[str, ...]
    recurrent_modules: tuple[str, ...]
    blocks: tuple[str, ...]


def inspect_in_process(workload: Workload, *, report: Report) -> WorkloadFacts:
    """Return the facts. The model is built without memory if that is possible."""
    report(Progress(text=f"inspecting {workload.name}", fraction=0.0))
    set_seed(0)
    model = build_cheaply(workload).train()
    check_shapes(model)
    parameters = list(model.parameters())
    two = tensors_of(workload.make_batch(2))

    return WorkloadFacts(
        num_parameters=sum(map(_num_values, parameters)),
        num_trainable=sum(_num_values(p) for p in parameters if p.requires_grad),
        parameter_bytes=precision.bytes_of(model, Precision.AS_BUILT),
        fp32_parameter_bytes=precision.bytes_of(model, Precision.FP32),
        half_parameter_bytes=precision.bytes_of(model, Precision.BF16),
        parameter_formats=precision.number_formats(model),
        sample_bytes=sum(tensor.nbytes for tensor in two) // 2,
        random_modules=tuple(random_modules(model)),
        sample_mixing_modules=tuple(sample_mixing_modules(model)),
        recurrent_modules=tuple(
            path for path, m in model.named_modules() if isinstance(m, torch.nn.RNNBase)
        ),
        blocks=tuple(find_blocks(model)),
    )


def build_cheaply(workload: Workload) -> torch.nn.Module:
    """Return the model, built without memory if that is possible."""
    try:
        with torch.device("meta"):
            model = workload.build_model()
        if not own_formats(model):
            return model
    # some models read values of tensors while they are built
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        pass
    return outline_of(workload.build_model).quantized or workload.build_model()


def _num_values(parameter: torch.nn.Parameter) -> int:
    """Return how many weights a parameter holds: two in each byte of a 4-bit one."""
    packed = getattr(parameter, "quant_state", None)
    return (parameter if packed is None else torch.empty(packed.shape, device="meta")).numel()
