"""ml-memguard: formulas for transformers."""

from typing import Any

NAME = "ml-memguard"
NEEDS = ["ml-memguard==0.5.0"]
MEANS = "device: its parts, 25 % and 400 MiB"
OWN_FITS = True
OPTIMIZERS = ("adam", "adamw", "sgd", "adafactor")
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "nf4": 4, "nf4-dq": 4, None: 16}


def answer(setting: dict[str, Any]) -> dict[str, Any] | str:
    """Return what `estimate_training_memory` says."""
    from memory_guard import FinetuneMethod, ModelSpec, TrainSpec, estimate_training_memory

    model, method = setting["model"], setting["method"]
    if model is None or model.get("shape") is None or setting["reads"] == "seconds":
        return "it knows transformers alone, and no times"
    if method["kind"] not in ("full", "lora") or setting["cards"] > 1:
        return f"it knows no {method['kind']} on {setting['cards']} cards"
    if setting["optimizer"].lower() not in OPTIMIZERS:
        return f"it knows no optimizer {setting['optimizer']}"
    if method["kind"] == "lora" and "targets" not in method:
        return "the row does not say what LoRA adapts"
    shape, in_4_bits = model["shape"], str(setting["base"]).startswith("nf4")
    kind = FinetuneMethod.FULL
    if method["kind"] == "lora":
        kind = FinetuneMethod.QLORA if in_4_bits else FinetuneMethod.LORA
    said = estimate_training_memory(
        model=ModelSpec(
            params=model["parameters"], hidden_dim=shape["hidden"], num_heads=shape["heads"],
            num_layers=shape["layers"], intermediate_dim=shape["intermediate"],
            bits=BITS[setting["base"]],
        ),
        train=TrainSpec(
            method=kind, batch_size=setting["batch"], seq_length=setting["sequence"],
            lora_rank=method.get("rank", 8), lora_layers=shape["layers"],
            lora_targets=len(method.get("targets", ())) or 4,
            optimizer=setting["optimizer"].lower(),
            grad_checkpoint=bool(setting["checkpointing"]),
            mixed_precision=setting["precision"] != "fp32",
            flash_attention=setting["attention"] == "sdpa",
        ),
    )  # fmt: skip
    room = setting["card"]["bytes"] / 2**20
    return {"bytes": int(said.total_mb * 2**20), "fits": bool(said.fits_in(0.80 * room))}
