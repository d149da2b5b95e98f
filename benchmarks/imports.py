"""What `memlab.from_trainer` makes of public training recipes: fields imported, not imported, lost.

A field of a recipe is lost if the result does not name it, or names it as unknown. None may be.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import memlab
from benchmarks import report
from benchmarks.recipes import RECIPES, Recipe, RecipeKind
from memlab.integrations.reading import UNKNOWN, FieldStatus, ImportedTraining, flattened

NEEDS = {
    RecipeKind.TRANSFORMERS: ("transformers",),
    RecipeKind.LIGHTNING: ("lightning",),
    RecipeKind.DEEPSPEED: (),
    RecipeKind.ACCELERATE: ("yaml",),
}


def missing(recipe: Recipe) -> str:
    """Return the package that a recipe needs and that is not installed; "" if there is none."""
    return next((name for name in NEEDS[recipe.kind] if not importlib.util.find_spec(name)), "")


def imported(recipe: Recipe) -> ImportedTraining:
    """Return what memlab makes of a recipe, by the library itself or by a file."""
    if recipe.kind is RecipeKind.TRANSFORMERS:
        return memlab.from_trainer(arguments(recipe.settings))
    if recipe.kind is RecipeKind.LIGHTNING:
        return memlab.from_trainer(lightning_trainer(recipe.settings))

    with tempfile.TemporaryDirectory() as folder:
        if recipe.kind is RecipeKind.DEEPSPEED:
            path = Path(folder, "zero.json")
            path.write_text(json.dumps(recipe.settings))
        else:
            import yaml

            path = Path(folder, "default_config.yaml")
            path.write_text(yaml.safe_dump(recipe.settings))
        return memlab.from_trainer(path)


def arguments(settings: dict[str, Any]) -> Any:
    """Return TrainingArguments with these settings, on a machine without a card too."""
    import transformers

    # it refuses TF32 without a card, bf16 unless use_cpu says so, and sharding without its files
    late = {name: settings[name] for name in ("tf32", "fsdp", "deepspeed") if name in settings}
    given = {name: value for name, value in settings.items() if name not in late}
    made = transformers.TrainingArguments(
        **({"output_dir": "out", "use_cpu": True, "report_to": "none"} | given)
    )
    for name, value in late.items():
        setattr(made, name, value)
    return made


def lightning_trainer(settings: dict[str, Any]) -> Any:
    """Return a Lightning Trainer with these settings that writes nothing."""
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "accelerator": "cpu", "devices": 1}  # fmt: skip
    return Trainer(**(quiet | settings))


def names_of(recipe: Recipe, given: ImportedTraining) -> set[str]:
    """Return the fields that the result must name."""
    if recipe.kind is RecipeKind.TRANSFORMERS:
        import transformers

        return {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    if recipe.kind is RecipeKind.LIGHTNING:
        from lightning.pytorch import Trainer

        return set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    return set(flattened(recipe.settings))


def unreported(recipe: Recipe, given: ImportedTraining) -> set[str]:
    """Return the fields of a recipe that the result does not name, or does not know."""
    named = {each.name for each in given.fields if each.why != UNKNOWN}
    return names_of(recipe, given) - named


def row(recipe: Recipe) -> dict[str, Any]:
    """Return the line of the table for one recipe."""
    given = imported(recipe)
    counts = Counter(each.status for each in given.fields)
    wrong = [
        name for name, value in recipe.expected.items() if getattr(given.config, name) != value
    ]
    return {
        "configuration": recipe.name,
        "of": str(recipe.kind),
        "fields": len(given.fields),
        "imported": counts[FieldStatus.IMPORTED],
        "not concerned": counts[FieldStatus.NOT_CONCERNED],
        "not imported": counts[FieldStatus.NOT_IMPORTED],
        "unreported": len(unreported(recipe, given)),
        "as expected": not wrong,
        "config": str(given.config),
    }


def main() -> None:
    """Import every recipe, print the table and write it as JSON."""
    given = report.options(__file__, __doc__ or "")
    before = report.environment()
    rows, skipped = [], []
    for recipe in RECIPES:
        if package := missing(recipe):
            skipped.append(f"{recipe.name}: {package} is not installed")
            continue
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print
            rows.append(row(recipe))
    report.show(f"{len(rows)} of {len(RECIPES)} recipes", rows)
    for line in skipped:
        print(f"skipped: {line}")
    lost = sum(each["unreported"] for each in rows)
    is_met = lost == 0 and all(each["as expected"] for each in rows)
    print(f"unreported fields: {lost}, goal 0: {report.verdict(is_met)}")
    report.write(given, before, {"recipes": rows, "skipped": skipped, "unreported": lost})


if __name__ == "__main__":
    main()
