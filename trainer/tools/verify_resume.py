"""`fairtrain-verify-resume task=… [overrides]`: does this task continue exactly?

One run does N + M updates. Another does N, saves, ends its process; a new process does M. All their numbers, tensors and
what is saved are compared bit by bit. Where they are not equal, the first difference is named, and further runs find out
why. Status: 0 exact; 1 not; 2 bad input, or a run that fails by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import typed_keys
from trainer.printed import as_json, as_long_as_it_is_read
from trainer.tools.causes import Finding, Outcome, explain
from trainer.tools.traces import Trace, read_trace, saved_differences

EXACT, NOT_EXACT, BAD_INPUT = 0, 1, 2
STOPPED = 75
OURS = ("run_dir", "checkpoint.save_dir", "resume")  # what a trial needs for itself
Start = Callable[[list[str], dict[str, str]], tuple[int, str]]  # (words, environment) to (status, output)


@as_long_as_it_is_read
def main(argv: Sequence[str] | None = None, start: Start | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    problem = problem_of(arguments)
    if problem:
        print(f"fairtrain-verify-resume: {problem}", file=sys.stderr)
        return BAD_INPUT
    with folder_of(arguments.keep) as folder:
        trials = Trials(arguments, Path(folder), start or start_process)
        try:
            outcome = Outcome(*trials.three(), trials.num_before)
            finding = explain(outcome, trials)
        except RunFailed as failed:
            print(f"fairtrain-verify-resume: {failed}", file=sys.stderr)
            return BAD_INPUT
    with contextlib.suppress(BrokenPipeError):  # whoever reads it may have seen enough; the status counts
        report(finding, arguments)
    return EXACT if finding.difference is None else NOT_EXACT


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="fairtrain-verify-resume",
        description="Does this task continue exactly? Compares a run of N + M updates with one of N that a new process "
        "continues for M. Status: 0 exact, 1 not, 2 bad input.",
    )
    command.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="all that fairtrain takes: task=…, key=value")
    command.add_argument("-n", "--before", type=int, default=4, metavar="N", help="updates before the stop (default 4)")
    command.add_argument("-m", "--after", type=int, default=4, metavar="M", help="updates after it (default 4)")
    command.add_argument("--config-dir", metavar="DIR", help="as of fairtrain: a folder with options of your own")
    command.add_argument(
        "--keep", metavar="DIR", help="keep the folders of the runs in DIR (default: they are removed)"
    )
    command.add_argument("--json", action="store_true", help="for programs: one JSON object")
    return command


def problem_of(arguments: argparse.Namespace) -> str | None:
    if arguments.before < 1 or arguments.after < 1:
        return "-n and -m take numbers from 1 on"
    ours = sorted(typed_keys(arguments.overrides) & set(OURS))
    if ours:
        return f"{', '.join(ours)}: the runs that are compared have folders of their own; leave it out and give task=…"
    if not arguments.overrides:
        return "which task? Type what fairtrain takes, such as task=digits"
    return None


@contextlib.contextmanager
def folder_of(keep: str | None) -> Iterator[str]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="verify_resume_") as folder:
            yield folder
        return
    os.makedirs(os.path.expanduser(keep), exist_ok=True)
    yield tempfile.mkdtemp(prefix="runs_", dir=os.path.expanduser(keep))


class RunFailed(RuntimeError):
    """A run did not end as it should; the message has its last words."""


@dataclass
class Trials:
    """Runs of the user's task, each session in a process of its own, in folders of their own."""

    arguments: argparse.Namespace
    folder: Path
    start: Start
    number: int = 0  # of sessions so far: each hashes text in another way, unless told otherwise

    @property
    def num_before(self) -> int:
        return self.arguments.before

    @property
    def num_updates(self) -> int:
        return self.arguments.before + self.arguments.after

    def three(self, more: Sequence[str] = (), env: dict[str, str] | None = None) -> tuple[Trace, Trace]:
        """(the trace of a run that never stopped, that of one that was stopped and continued)."""
        whole = self._session("whole", 0, more, env)
        name = self._session("stopped", self.arguments.before, more, env)
        self._continue(name, more, env)
        return self._trace(whole), self._trace(name)

    def twins(self, more: Sequence[str] = (), env: dict[str, str] | None = None) -> tuple[Trace, Trace]:
        """Two runs that stop at the same update, from nothing."""
        return tuple(self._trace(self._session("twin", self.arguments.before, more, env)) for _ in range(2))

    def _session(self, kind: str, stop_at: int, more: Sequence[str], env: dict[str, str] | None) -> str:
        name = f"{kind}_{self.number}"
        self._run(name, stop_at, more, env, STOPPED if stop_at else 0)
        return name

    def _continue(self, name: str, more: Sequence[str], env: dict[str, str] | None) -> None:
        self._run(name, 0, more, env, 0)

    def _run(self, name: str, stop_at: int, more: Sequence[str], env: dict[str, str] | None, wanted: int) -> None:
        self.number += 1
        (self.folder / name).mkdir(exist_ok=True)
        trace = self.folder / name / "trace"
        flags = ["--config-dir", self.arguments.config_dir] if self.arguments.config_dir else []
        words = [str(trace), str(stop_at), *flags, *self.arguments.overrides, *self._limits(name), *more]
        status, output = self.start(words, {"PYTHONHASHSEED": str(self.number), **(env or {})})
        if status != wanted:
            last = "\n".join(output.strip().splitlines()[-15:])
            raise RunFailed(f"a run of this task left with status {status}, and {wanted} was to come:\n{last}")

    def _limits(self, name: str) -> list[str]:
        return [
            f"run_dir={self.folder / name / 'run'}",
            f"optimization.max_update={self.num_updates}",
            "optimization.max_epoch=0",
            "optimization.stop_time_hours=0",
            "checkpoint.no_save=false",
            "checkpoint.no_last_checkpoints=false",
            "checkpoint.patience=-1",
            "common.log_format=none",
            "common.tensorboard_logdir=null",
            "common.wandb_project=null",
        ]

    def _trace(self, name: str) -> Trace:
        return read_trace(self.folder / name)

    def saved_differences(self, one: Trace, other: Trace) -> list[str]:
        return saved_differences(one.folder / "run" / "checkpoints", other.folder / "run" / "checkpoints")


def start_process(words: list[str], env: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "trainer.tools.traced", *words]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def report(finding: Finding, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(as_json(finding.as_dict()))
        return
    span = f"{arguments.before} updates, a new process, {arguments.after} more"
    if finding.difference is None:
        print(f"exact: {span}: equal bit by bit to {arguments.before + arguments.after} without a stop")
        print(f"  compared: {', '.join(finding.compared)}")
    else:
        print(f"not exact: {span}")
        print(f"  first difference: {finding.difference}")
        print(f"  likely cause:     {finding.cause_in_words}")
        for line in finding.evidence:
            print(f"  seen:             {line}")
        print(f"  way out:          {finding.way_out}")
    for warning in finding.warnings:
        print(f"  warning: {warning}")


if __name__ == "__main__":
    sys.exit(main())
