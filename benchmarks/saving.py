"""What saves memory or time? Writes the table of docs/saving.md, from what each technique says.

Nothing is measured: the words are those of `Technique.savings`, one row for each setting, in the
order in which techniques apply. Left out: the prose around the table, which is written by hand.
"""

from pathlib import Path

from benchmarks import report
from memlab.techniques.registry import EVERY

PAGE = Path(__file__).resolve().parents[1] / "docs" / "saving.md"
MARK = "techniques"
HEAD = ("| setting | saves | costs | not for |", "|---|---|---|---|")


def table() -> str:
    """Return the lines of the table."""
    rows = [
        f"| {line.setting} | {line.saves} | {line.costs} | {line.not_for} |"
        for technique in EVERY
        for line in technique.savings
    ]
    return "\n".join(["", *HEAD, *rows, ""])


def page() -> str:
    """Return the page with its table as the techniques have it now."""
    return report.rewritten(PAGE.read_text(encoding="utf-8"), MARK, table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
