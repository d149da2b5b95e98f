"""How far off is memlab on fine-tuning with adapters: on others' cards, on a CPU, in differences?

- table: 35 rows that litgpt's authors measured on an A100 of 40 GB (`litgpt_table.py`). Goals: the
  allocated peak within 5 % in the median and 12 % at the 95th percentile, and every row that ran
  out of memory is foreseen.
- methods: the rows that peft's authors measured on an L40S, with all methods of peft
  (`peft_table.py`). The same goals, for reserved bytes; two lengths of samples are found by a row.
- hub: the rows that litgpt's authors measured on an A10G with its recipes, by litgpt's own code,
  which must be installed (`litgpt_hub.py`). The same goals; only where it is asked for by name.
- settings: 20 adapters on a small model, predicted and measured on this CPU, and their gradients
  beside plain PyTorch's (`adapter_settings.py`). Goals: 0.1 % in the median, 3 % at most, 1e-5.
- differences: what a base in 4 bits, checkpointing, a rank, DoRA or `prepare_for_kbit` changes
  (`adapter_differences.py`). Nothing is judged.

Each line goes into the JSON as soon as it is there.

    python -m benchmarks.finetune --only table --out finetune.json
"""

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import (
    adapter_differences,
    adapter_settings,
    litgpt_hub,
    litgpt_table,
    peft_table,
    report,
)

SECTIONS: dict[str, ModuleType] = {
    "table": litgpt_table,
    "methods": peft_table,
    "hub": litgpt_hub,
    "settings": adapter_settings,
    "differences": adapter_differences,
}
USUAL = [name for name in SECTIONS if name != "hub"]
"""Of which every package is an extra of memlab."""


def main() -> None:
    """Run the sections that are asked for, line by line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/finetune.json"))
    parser.add_argument("--quick", action="store_true", help="a few lines of each section")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=USUAL)
    asked = parser.parse_args()
    given = report.Options(quick=asked.quick, out=asked.out)
    before = report.environment()
    given.out.parent.mkdir(parents=True, exist_ok=True)

    results: dict[str, Any] = {}
    for name in asked.only:
        section = SECTIONS[name]
        lines = results[name] = []
        for line in section.lines(given.quick):
            lines.append(line)
            given.out.write_text(json.dumps({**before, **results}, indent=1) + "\n")
        section.show(lines)
        results[f"{name}: summary"] = section.summary(lines)
    report.write(given, before, results)


if __name__ == "__main__":
    main()
