"""Commands as a person types them, run in processes forked from a server that has imported torch once.

`fairtrain("task=digits", …, cwd=folder)` gives the exit status and all that was printed. A fork saves the seconds that
importing torch takes; a few tests start the installed script itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist.harness import PRELOAD

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Finished:
    """`status`: as the shell gives it, minus a signal's number if one ended the process. `output`: stdout and stderr."""

    status: int | None
    output: str


def fairtrain(*argv: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 60, module: str = "trainer.cli") -> Finished:
    """Run `fairtrain ARGV` (or another module's `main`) in `cwd` to its end. A hang is a status of None."""
    running = start(*argv, cwd=cwd, env=env, module=module)
    return running.wait(timeout)


class Running:
    """A command under way; `process` has its pid."""

    def __init__(self, process: Any, output: Path) -> None:
        self.process, self._output = process, output

    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send `signum` to the command alone, not to its children."""
        os.kill(self.process.pid, signum)

    def wait(self, timeout: float = 60) -> Finished:
        self.process.join(timeout)
        if self.process.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
            return Finished(None, self.output())
        return Finished(self.process.exitcode, self.output())


def start(*argv: str, cwd: Path, env: dict[str, str] | None = None, module: str = "trainer.cli") -> Running:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    output = Path(cwd) / f".output{len(list(Path(cwd).glob('.output*')))}"
    process = context.Process(target=_command, args=(module, argv, str(cwd), env or {}, str(output)))
    process.start()
    return Running(process, output)


def _command(module: str, argv: tuple[str, ...], cwd: str, env: dict[str, str], output: str) -> None:
    os.setpgid(0, 0)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({"PYTHONPATH": str(ROOT), **env})
    os.chdir(cwd)
    sys.argv = ["fairtrain", *argv]
    sys.path[:0] = [cwd, str(ROOT)]
    import importlib

    main = importlib.import_module(module).main
    sys.exit(main())
