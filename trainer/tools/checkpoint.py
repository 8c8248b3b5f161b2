"""`fairtrain-checkpoint COMMAND …`: the command line. What each command does stands in the module of its name.

Status: 0 fine; 1 different or damaged, or the output could not be written; 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from checkpoint_file import CheckpointDamagedError, CheckpointError, CheckpointWriteError
from trainer.errors import ConfigError
from trainer.printed import as_long_as_it_is_read
from trainer.tools import average, diff, export, import_, inspect, merge_config, prune, verify

FINE, DIFFERENT, BAD_INPUT = 0, 1, 2
COMMANDS = {
    "inspect": inspect,
    "verify": verify,
    "diff": diff,
    "average": average,
    "export": export,
    "import": import_,
    "prune": prune,
    "merge-config": merge_config,
}


@as_long_as_it_is_read
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (CheckpointDamagedError, CheckpointWriteError) as error:
        return told(error, DIFFERENT)
    except (ConfigError, CheckpointError) as error:
        return told(error, BAD_INPUT)
    except BrokenPipeError:
        raise
    except OSError as error:
        return told(f"{error.filename or ''}: {error.strerror or error}", DIFFERENT)


def told(error: object, status: int) -> int:
    print(f"fairtrain-checkpoint: {error}", file=sys.stderr)
    return status


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="fairtrain-checkpoint",
        description="Look at checkpoints, compare, convert and tidy them. Status: 0 fine, 1 different or damaged, 2 bad input.",
    )
    subcommands = command.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        one = subcommands.add_parser(name, help=module.HELP, description=module.HELP)
        one.set_defaults(run=module.run)
        module.add_arguments(one)
        one.add_argument("--json", action="store_true", help="for programs: one JSON object")
    return command


if __name__ == "__main__":
    sys.exit(main())
