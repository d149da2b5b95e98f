"""vramcalc: formulas for five families of decoders."""

from typing import Any

NAME = "vramcalc"
NEEDS = ["vramcalc==0.1.2"]
MEANS = "allocated"
OWN_FITS = True
PRECISIONS = {"fp32": ("fp32", "pure"), "bf16": ("bf16", "pure"), "bf16-mixed": ("bf16", "amp"),
              "fp16": ("fp16", "pure")}  # fmt: skip
ATTENTION = {"sdpa": "sdpa", "sdpa with a mask": "sdpa", "eager": "eager"}


def answer(setting: dict[str, Any]) -> dict[str, Any] | str:
    """Return what `estimate` says. Its LoRA adapts query, key, value and output, always."""
    from vramcalc import estimate

    model, method = setting["model"], setting["method"]
    if model is None or model.get("config") is None or setting["reads"] == "seconds":
        return "it knows decoders alone, and no times"
    if str(setting["base"]).startswith("nf4") or setting["cards"] > 1:
        return "it knows no base in 4 bits, and one card"
    if method["kind"] not in ("full", "lora"):
        return f"it knows no {method['kind']}"
    if setting["optimizer"].lower() not in ("adamw", "sgd"):
        return f"it knows no optimizer {setting['optimizer']}"
    dtype, precision = PRECISIONS[setting["precision"]]
    said = estimate(
        model["config"], mode="train", dtype=dtype, precision=precision, batch=setting["batch"],
        seq_len=setting["sequence"], lora_rank=method.get("rank"),
        grad_checkpoint=bool(setting["checkpointing"]), optimizer=setting["optimizer"].lower(),
        attn_impl=ATTENTION[setting["attention"]],
    )  # fmt: skip
    return {"bytes": int(said.total), "fits": bool(said.fits(setting["card"]["bytes"] / 1e9).ok)}
