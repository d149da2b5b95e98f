"""torch-kitsune: parameters, optimizer and activations of a module."""

from typing import Any

NAME = "torch-kitsune"
NEEDS = ["torch-kitsune==0.7.0", "torch==2.13.0", "numpy", "transformers==5.23.0"]
MEANS = "its parts and 15 %"
OWN_FITS = False
OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "sgd": "sgd", "adagrad": "adagrad",
              "rmsprop": "rmsprop"}  # fmt: skip
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def answer(setting: dict[str, Any]) -> dict[str, Any] | str:
    """Return what `predict_memory` or `estimate_lora_memory` says of a module on meta."""
    import torch
    from kitsune.predict import LoRAConfig, estimate_lora_memory, predict_memory
    from transformers import AutoConfig, AutoModel

    model, method = setting["model"], setting["method"]
    if model is None or setting["reads"] == "seconds":
        return "it knows models, and no times"
    if model.get("config") is None:
        return "torchvision's compiled part does not load beside this PyTorch"
    if method["kind"] not in ("full", "lora") or setting["base"] == "nf4-dq":
        return f"it knows no {method['kind']} on {setting['base']}"
    if setting["checkpointing"] or setting["cards"] > 1:
        return "it knows no checkpointing"
    if setting["optimizer"].lower() not in OPTIMIZERS:
        return f"it knows no optimizer {setting['optimizer']}"
    dtype = DTYPES[setting["precision"]]
    with torch.device("meta"):
        module = AutoModel.from_config(AutoConfig.for_model(**model["config"]))
    module = module.to(getattr(torch, dtype))
    shape, batch = (setting["sequence"],), setting["batch"]
    optimizer = OPTIMIZERS[setting["optimizer"].lower()]
    if method["kind"] == "full":
        said = predict_memory(module, shape, batch_size=batch, dtype=dtype, optimizer=optimizer)
    else:
        if "targets" not in method:
            return "the row does not say what LoRA adapts"
        names = tuple(f"{part}_proj" for part in method["targets"] if len(part) == 1)
        config = LoRAConfig(rank=method["rank"], target_modules=names, optimizer=optimizer,
                            qlora=setting["base"] == "nf4")  # fmt: skip
        said = estimate_lora_memory(module, shape, batch_size=batch, dtype=dtype, config=config)
    return {"bytes": int(said.total_bytes)}
