"""`python -m memlab`: commands for a terminal. So far there is one, `doctor`."""

import sys
from collections.abc import Sequence

HELP = """usage: python -m memlab doctor [--out FILE.jsonl] [--device NAME] [--minutes N]

doctor: what this machine has, which techniques work on it, and how good predictions are here; about
five minutes, nothing is downloaded. `python -m memlab doctor --help` says more.

In Python and in notebooks: import memlab; help(memlab.predict)"""


def main(arguments: Sequence[str]) -> int:
    """Run a command; return the status of the process."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if arguments[0] != "doctor":
        print(f"{arguments[0]!r} is not a command; allowed is 'doctor'\n\n{HELP}", file=sys.stderr)
        return 2

    from memlab.doctor import command  # late: it imports what only doctor needs

    return command.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
