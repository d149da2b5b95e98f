"""`python -m memlab`, and the command `memlab`: see `cli/`."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the status of the process."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["doctor"]:  # it runs where click is not installed
        from memlab.cli import doctor

        return doctor.main(given[1:])

    if given[:1] == ["watch"]:  # the script's own process: what it does not need is not imported
        from memlab.cli import watch

        return watch.main(given[1:])

    from memlab.cli.commands import memlab

    try:
        memlab.main(given or ["--help"], prog_name="memlab")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
