"""Mutations of real checkpoints, each a function of its number: `python -m tests.hostile.fuzz --minutes 60`.

Whatever comes out, reading it ends in a CheckpointError or in a value, in bounded memory and time, and runs nothing.
A mutation that does not is kept under `--keep` and its number printed; `--first N --count 1` makes it again.
"""

from __future__ import annotations

import argparse
import io
import random
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

import checkpoint_file
import checkpoint_utils
from tests.hostile import archives, pickles

MEMORY_BYTES = 256 << 20  # that reading a mutation of a few KiB may take
SECONDS = 60  # after which it counts as endless


def sound_file() -> bytes:
    state = {
        "format_version": 1,
        "run_id": "r",
        "cfg": {"checkpoint": {"save_dir": "x"}},
        "model": {
            "weight": torch.arange(12.0).view(3, 4),
            "bias": torch.zeros(3, dtype=torch.bfloat16),
            "flag": torch.tensor(True),
        },
        "optimizer_history": [{"num_updates": 3, "criterion_name": "Loss"}],
        "last_optimizer_state": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "task_state": {"words": ["a", ("b", 1.5, None, 2**80)]},
        "extra_state": {"train_iterator": {"epoch": 1, "samples_in_epoch": 8}},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.pt"
        checkpoint_file.write_checkpoint_file(state, path)
        return path.read_bytes()


OPCODES = b"(.0N)]}tlaesuRbQcKMJGXhjqr\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8f\x90\x91\x93\x94\x95\x96\x8d\x8e\x82ioIPV2d1"


def mutant(number: int, sound: bytes) -> bytes:
    """The mutation of that number: of the zip, or of the pickle in it (then the checksums are right again)."""
    dice = random.Random(number)
    if dice.random() < 0.3:
        return archives.repaired(scrambled(dice, sound)) if dice.random() < 0.5 else scrambled(dice, sound)
    with zipfile.ZipFile(io.BytesIO(sound)) as file:
        prefix = file.namelist()[0].partition("/")[0]
        records = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    pickled = records.pop("data.pkl")
    for _ in range(dice.choice([1, 1, 2, 5])):
        pickled = changed_pickle(dice, pickled)
    return archives.archive(pickled, records, prefix)


def scrambled(dice: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(dice.choice([1, 2, 8])):
        at = dice.randrange(len(made)) if dice.random() < 0.5 else max(0, len(made) - 1 - dice.randrange(600))
        kind = dice.randrange(4)
        if kind == 0:
            made[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            made[at : at + 4] = dice.choice([b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", dice.randbytes(4)])
        elif kind == 2:
            made[at:at] = dice.randbytes(dice.choice([1, 20]))
        else:
            del made[at : at + dice.choice([1, 30])]
    return bytes(made)


def changed_pickle(dice: random.Random, data: bytes) -> bytes:
    at, end = dice.randrange(len(data) + 1), dice.randrange(len(data) + 1)
    kind = dice.randrange(6)
    if kind == 0:
        return data[:at] + bytes([dice.choice(OPCODES)]) + data[at + dice.randrange(2) :]
    if kind == 1:  # a piece of it somewhere else
        return data[:at] + data[min(at, end) : max(at, end)][:200] + data[at:]
    if kind == 2:
        return data[: min(at, end)] + data[max(at, end) :]
    if kind == 3:
        fragment = dice.choice(
            [
                pickles.tensor(),
                pickles.storage(),
                pickles.name("posix", "mkdir"),
                pickles.integer(2**40),
                b"\x8e" + b"\xff" * 8,
            ]
        )
        return data[:at] + fragment + data[at:]
    if kind == 4:  # another number in the place of one
        places = [i for i, byte in enumerate(data) if byte in b"KMJ"]
        at = dice.choice(places) if places else 0
        return data[:at] + pickles.integer(dice.choice([-1, 0, 7, 2**31, 2**62, 2**70])) + data[at + 2 :]
    return data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]


def read(path: Path) -> None:
    """Every way in that one process has. Raises nothing but what is a fault."""
    for enter in (checkpoint_utils.verify_checkpoint, checkpoint_utils.load_checkpoint_to_cpu, open_as_own):
        try:
            enter(path)
        except checkpoint_file.CheckpointError as error:
            assert len(str(error)) < 6000, len(str(error))


def open_as_own(path: Path) -> None:
    with checkpoint_file.open_local_checkpoint(path) as reader:
        refs = [ref for ref in reader.skeleton["model"].values() if isinstance(ref, checkpoint_file.TensorRef)]
        reader.copy([(ref, torch.empty(ref.shape, dtype=ref.dtype)) for ref in refs])


class limited:
    """While open: an alarm ends what is endless, and the memory that was needed at most is measured."""

    def __enter__(self) -> limited:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = memory("VmRSS")
        signal.alarm(SECONDS)
        return self

    def __exit__(self, kind, *_) -> None:
        signal.alarm(0)
        if kind is None:
            taken = memory("VmHWM") - self._before
            assert taken < MEMORY_BYTES, f"{taken:,} bytes of memory"


def memory(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def faults(numbers: Iterator[int], folder: Path) -> Iterator[tuple[int, str]]:
    """(number, what happened) of each mutation whose reading was not as it should be."""
    sound, path = sound_file(), folder / "mutant.pt"
    for number in numbers:
        path.write_bytes(mutant(number, sound))
        before = set(folder.parent.iterdir())
        try:
            with limited():
                read(path)
            assert set(folder.parent.iterdir()) == before, "it made a file"
        except Exception:
            yield number, traceback.format_exc()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--first", type=int, default=None, help="number of the first mutation; without it, by the clock"
    )
    parser.add_argument("--count", type=int, default=None, help="mutations; without it, until the time is up")
    parser.add_argument("--keep", default="fuzz-failures", help="folder for what failed")
    arguments = parser.parse_args()
    first = time.time_ns() if arguments.first is None else arguments.first
    deadline, tried, failed = time.monotonic() + 60 * arguments.minutes, 0, 0

    def numbers() -> Iterator[int]:
        nonlocal tried
        while time.monotonic() < deadline and tried != arguments.count:
            tried += 1
            yield first + tried - 1

    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / "inner"
        inner.mkdir()
        for number, story in faults(numbers(), inner):
            failed += 1
            Path(arguments.keep).mkdir(exist_ok=True)
            (Path(arguments.keep) / f"{number}.pt").write_bytes((inner / "mutant.pt").read_bytes())
            print(f"mutation {number}:\n{story}", flush=True)
    print(f"{tried} mutations from number {first} on, {failed} faults")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
