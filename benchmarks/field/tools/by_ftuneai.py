"""ftuneai: formulas for decoder models, memory and time."""

from typing import Any

NAME = "ftuneai"
NEEDS = ["ftuneai==0.4.1"]
MEANS = "device: its parts and 20 %"
OWN_FITS = False  # it compares the same number with the nominal size of cards that it knows
OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "sgd": "sgd", "adafactor": "adafactor"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp16": "float16"}
TARGETS = {("q", "v"): "attention", ("k", "o", "q", "v"): "attention_all",
           ("k", "mlp", "o", "q", "v"): "all_linear"}  # fmt: skip
GPUS = {"a100-40": "A100-40GB", "a100-80": "A100-80GB", "h100": "H100-80GB", "l40s": "L40S-48GB"}
SAMPLES = 4_000_000  # so many that the hours, which it rounds, say the seconds of a step


def answer(setting: dict[str, Any]) -> dict[str, Any] | str:
    """Return what `Estimator` says."""
    from ftuneai import Estimator, ModelSpec
    from ftuneai.loader import load_models

    model, method = setting["model"], setting["method"]
    if model is None or model.get("shape") is None:
        return "it knows decoders alone"
    if method["kind"] not in ("full", "lora"):
        return f"it knows no {method['kind']}"
    if setting["optimizer"].lower() not in OPTIMIZERS:
        return f"it knows no optimizer {setting['optimizer']}"
    if setting.get("tensor", 1) > 1:
        return "it knows no tensor parallelism"
    shape = model["shape"]
    load_models()["row"] = ModelSpec(
        name="row", parameters=model["parameters"], hidden_size=shape["hidden"],
        num_layers=shape["layers"], num_attention_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"], intermediate_size=shape["intermediate"],
        vocab_size=shape["vocab"], max_seq_length=8192, default_dtype=DTYPES[setting["precision"]],
    )  # fmt: skip
    given: dict[str, Any] = {"method": "full", "quantization": "none"}
    if method["kind"] == "lora":
        targets = TARGETS.get(tuple(sorted(method.get("targets", ()))))
        if targets is None:
            return "it knows no LoRA of these layers"
        in_4_bits = setting["base"].startswith("nf4")
        given = {
            "method": "qlora" if in_4_bits else "lora",
            "lora_rank": method["rank"],
            "lora_target": targets,
            "quantization": "4bit" if in_4_bits else "none",
        }
    asked = Estimator(
        "row", batch_size=setting["batch"], seq_length=setting["sequence"],
        gradient_checkpointing=bool(setting["checkpointing"]),
        optimizer=OPTIMIZERS[setting["optimizer"].lower()],
        flash_attention=setting["attention"] == "sdpa", num_gpus=setting["cards"],
        sharding="fsdp" if setting.get("sharding") == "zero3" else "none", **given,
    )  # fmt: skip
    said = {"bytes": round(asked.estimate_memory().total_gb * 2**30)}
    if setting["reads"] == "seconds" or setting["table"] == "torchtitan":
        gpu = GPUS.get(setting["card"]["name"])
        if gpu is None:
            return said
        time = asked.estimate_time(
            gpu=gpu, dataset_size=SAMPLES, epochs=1, num_gpus=setting["cards"],
            gradient_accumulation_steps=setting["accumulation"],
        )  # fmt: skip
        said["step_seconds"] = time.total_hours * 3600 / time.total_steps
    return said
