"""accelerate's `estimate-memory`: weights, gradients and states of Adam; no activations."""

from typing import Any

NAME = "accelerate"
NEEDS = ["accelerate==1.15.0", "torch==2.13.0", "numpy", "transformers==5.23.0"]
MEANS = "weights, gradients and Adam; no batch, no length"
OWN_FITS = False
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp16": "float16"}


def answer(setting: dict[str, Any]) -> dict[str, Any] | str:
    """Return what the command prints as training with Adam, which needs the network for a model."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel

    model = setting["model"]
    if model is None or model.get("config") is None or setting["reads"] == "seconds":
        return "it knows models of transformers and timm, and no times"
    if setting["method"]["kind"] != "full" or setting["cards"] > 1:
        return "it knows the training of all weights on one card"
    with init_empty_weights():
        config = AutoConfig.for_model(**model["config"])
        module = AutoModel.from_config(config, torch_dtype=torch.float32)
    total, _ = calculate_maximum_sizes(module)
    return {"bytes": max(estimate_training_usage(total, PRECISIONS[setting["precision"]]).values())}
