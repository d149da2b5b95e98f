"""`memlab`: the commands together. A person's mistake is a sentence on stderr and exit code 2."""

from typing import Any

import click

from memlab._version import __version__
from memlab.commands import many_steps, one_step, shipped
from memlab.commands.answers import ExitCode, plain
from memlab.errors import MemlabError

EPILOG = """MODEL is package.module:function, a config of transformers (a JSON file or a folder), or
a name of the zoo such as gpt-small.

Exit codes: 0 yes, 1 no (does not fit, differs, got worse), 2 wrong use, 3 no answer (failed,
unsupported, nothing compared)."""


class Mistake(click.ClickException):
    """A person's mistake, which click prints."""

    exit_code = int(ExitCode.WRONG_USE)


class Memlab(click.Group):
    """Commands whose mistakes are said in a sentence."""

    def invoke(self, context: click.Context) -> Any:
        """Run a command.

        Raises:
            Mistake: something is not allowed; the message says what is.
        """
        try:
            return super().invoke(context)
        except MemlabError as error:
            raise Mistake(plain(str(error))) from error
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            context.exit(int(ExitCode.INTERRUPTED))


@click.group(cls=Memlab, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="memlab")
def memlab() -> None:
    """What a training step costs in memory and time, and what it could cost instead."""


for command in (*one_step.COMMANDS, *many_steps.COMMANDS, *shipped.COMMANDS):
    memlab.add_command(command)
