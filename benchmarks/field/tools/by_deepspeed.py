"""DeepSpeed's estimators of ZeRO: weights, gradients and states of Adam in mixed precision."""

import os
from typing import Any

NAME = "DeepSpeed"
NEEDS = ["deepspeed==0.19.8", "torch==2.13.0", "numpy", "setuptools"]
MEANS = "model states of mixed precision; no batch, no length"
OWN_FITS = False


def answer(setting: dict[str, Any]) -> dict[str, Any] | str:
    """Return what the estimator of ZeRO-2 or ZeRO-3 says, without offload."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    model, cards = setting["model"], setting["cards"]
    if model is None or setting["reads"] == "seconds":
        return "it knows models, and no times"
    if setting["method"]["kind"] != "full":
        return "it knows the training of all weights"
    on = {"num_gpus_per_node": min(cards, 8), "num_nodes": max(1, cards // 8)}
    if setting.get("sharding") == "zero3":
        _, gpu, _ = estimate_zero3_model_states_mem_needs(
            model["parameters"], model["largest_layer_parameters"], cpu_offload=False,
            cpu_offload_params=False, **on,
        )  # fmt: skip
    else:
        _, gpu = estimate_zero2_model_states_mem_needs(model["parameters"], cpu_offload=False, **on)
    return {"bytes": int(gpu)}
