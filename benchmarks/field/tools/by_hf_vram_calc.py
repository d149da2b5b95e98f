"""hf-vram-calc: a multiple of the weights, from a model's config."""

import json
import tempfile
from pathlib import Path
from typing import Any

NAME = "hf-vram-calc"
NEEDS = ["hf-vram-calc==1.0.9", "torch==2.13.0", "numpy", "transformers==5.23.0", "pyyaml"]
MEANS = "the weights times a factor; no batch, no length"
OWN_FITS = False
DTYPES = {"fp32": "fp32", "bf16": "bf16", "bf16-mixed": "bf16", "fp16": "fp16"}


def answer(setting: dict[str, Any]) -> dict[str, Any] | str:
    """Return what `LlmodelMemoryResult` says of training, or of LoRA."""
    from hf_vram_calc import ConfigManager, ConfigParser, VRAMCalculator
    from hf_vram_calc.calculator import LlmodelMemoryResult, ParameterCalculator

    model, method = setting["model"], setting["method"]
    if model is None or model.get("config") is None or setting["reads"] == "seconds":
        return "it knows models of transformers, and no times"
    if method["kind"] not in ("full", "lora") or setting["cards"] > 1:
        return f"it knows no {method['kind']} on {setting['cards']} cards"
    if str(setting["base"]).startswith("nf4"):
        return "it knows 4 bits of weights that are not trained beside an adapter in other formats"
    with tempfile.TemporaryDirectory() as folder:
        names = {"architectures": ["AutoModelForCausalLM"], "torch_dtype": "float32"}
        shape = model["shape"]
        told = {"hidden_size": shape["hidden"], "num_hidden_layers": shape["layers"],
                "num_attention_heads": shape["heads"], "vocab_size": shape["vocab"]}  # fmt: skip
        text = json.dumps({**told, **model["config"], **names})
        (Path(folder) / "config.json").write_text(text)
        config = ConfigParser.load_and_parse_config(folder, folder)
        count = ParameterCalculator.calculate_transformer_params(config)
    said = LlmodelMemoryResult(
        DTYPES[setting["precision"]], batch_size=setting["batch"],
        sequence_length=setting["sequence"], lora_rank=method.get("rank", 64),
    )  # fmt: skip
    said.calculate_all(config, count, VRAMCalculator(ConfigManager()))
    gib = said.lora_memory if method["kind"] == "lora" else said.training_memory
    return {"bytes": int(gib * 2**30)}
