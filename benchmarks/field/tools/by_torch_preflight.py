"""torch-preflight: a cost model over shapes of transformers, and of modules built on meta."""

from typing import Any

NAME = "torch-preflight"
NEEDS = ["torch-preflight==0.5.0", "torch==2.13.0", "numpy"]
MEANS = "device: its parts, the context and a share for fragmentation"
OWN_FITS = True
FAMILIES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen3": "llama"}


def answer(setting: dict[str, Any]) -> dict[str, Any] | str:
    """Return what `estimate_config` says."""
    from torch_preflight.vram import (
        OptimizerKind,
        PrecisionMode,
        RunConfig,
        TransformerShape,
        estimate_config,
        resolve_profile,
    )
    from torch_preflight.vram.providers import static

    model, method = setting["model"], setting["method"]
    if model is None or setting["reads"] == "seconds":
        return "it knows models, and no times"
    if setting["base"] not in ("fp32", "bf16"):
        return "it knows no base in 4 bits"
    precision = {
        "fp32": PrecisionMode.FP32, "bf16": PrecisionMode.PURE_BF16,
        "bf16-mixed": PrecisionMode.AMP, "fp16": PrecisionMode.PURE_FP16,
    }[setting["precision"]]  # fmt: skip
    optimizers = {kind.name.lower().replace("_", ""): kind for kind in OptimizerKind}
    if setting["optimizer"].lower() not in optimizers:
        return f"it knows no optimizer {setting['optimizer']}"
    given = {
        "batch_size": setting["batch"], "precision": precision,
        "optimizer": optimizers[setting["optimizer"].lower()],
        "gradient_checkpointing": bool(setting["checkpointing"]),
    }  # fmt: skip
    if "torchvision" in model:
        given["image_size"] = setting["image"]
        profile = resolve_profile(_known(model["torchvision"]))
    else:
        shape = model["shape"]
        profile = static.from_shape(
            TransformerShape(
                layers=shape["layers"], hidden=shape["hidden"], heads=shape["heads"],
                kv_heads=shape["kv_heads"], vocab=shape["vocab"], gated_mlp=shape["gated"],
                intermediate=shape["intermediate"], has_lm_head=True,
            ),
            FAMILIES.get(shape["family"], shape["family"]),
        )  # fmt: skip
        given |= {"seq_len": setting["sequence"],
                  "flash_attention": setting["attention"] == "sdpa"}  # fmt: skip
    trained = method.get("parameters") or _of_lora(setting)
    if method["kind"] != "full":
        if trained is None:
            return f"it knows no {method['kind']}"
        given["frozen_fraction"] = 1 - trained / profile.param_count
    said = estimate_config(profile, RunConfig(**given), gpu_memory=setting["card"]["bytes"])
    return {"bytes": int(said.total), "fits": said.band.value.lower() in ("fits", "tight")}


def _known(name: str) -> str:
    """Return its own name of a model of torchvision, in which there are no marks."""
    from torch_preflight.vram import archdb

    names = {each.replace("_", "").replace("-", ""): each for each in archdb.names()}
    return names[name.lower()]


def _of_lora(setting: dict[str, Any]) -> int | None:
    """Return how many parameters LoRA trains, where the setting does not say it."""
    method, shape = setting["method"], setting["model"]["shape"]
    if method["kind"] != "lora":
        return None
    hidden, inner = shape["hidden"], shape["intermediate"]
    narrow = hidden * shape["kv_heads"] // shape["heads"]
    ends = {"q": 2 * hidden, "k": hidden + narrow, "v": hidden + narrow, "o": 2 * hidden,
            "mlp": (3 if shape["gated"] else 2) * (hidden + inner), "head": 0}  # fmt: skip
    return shape["layers"] * method["rank"] * sum(ends[part] for part in method["targets"])
