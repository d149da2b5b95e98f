"""How the precisions of trainers become those of memlab.

Trainers autocast over whatever formats the weights have. memlab's mixed precisions cast the weights
to fp32 first, so both are the same only for a model of fp32 weights.
"""

from collections.abc import Sequence

from memlab.importing.reading import SourceReading

FP32_FORMATS = ("float32", "float64")
FLOATS = ("float32", "float64", "bfloat16", "float16")
CHECK_FORMATS = "the same step if the model's weights are fp32"


def take_mixed(
    reading: SourceReading, name: str, precision: str, formats: Sequence[str], why: str = ""
) -> None:
    """Import a mixed precision, unless the weights of the model are in a narrower format.

    Args:
        reading: what the field belongs to.
        name: the field of the source.
        precision: that of memlab.
        formats: the formats of the model's parameters by torch's names; empty without a model.
        why: what else a reader must know.
    """
    narrow = [each for each in formats if each in FLOATS and each not in FP32_FORMATS]
    if narrow:
        reading.leave(
            name,
            f"the model has weights of {' and '.join(narrow)}, which precision={precision!r} would "
            "cast to fp32; the config keeps the formats of the model, without autocast",
            precision="as-built",
        )
        return

    said = [text for text in (why, "" if formats else CHECK_FORMATS) if text]
    reading.take(name, "; ".join(said), precision=precision)


def take_tf32(reading: SourceReading, name: str, formats: Sequence[str]) -> None:
    """Import TF32 for a step that multiplies in fp32."""
    if reading.settings.get("precision", "as-built") != "as-built":
        precision = reading.settings["precision"]
        reading.leave(
            name, f"a config has one precision, which is {precision!r}; few products are in fp32"
        )
    elif any(each != "float32" for each in formats):
        reading.leave(name, "the model has weights that are not fp32, which 'tf32' would cast")
    else:
        reading.take(name, "" if formats else CHECK_FORMATS, precision="tf32")
