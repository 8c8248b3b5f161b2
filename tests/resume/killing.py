"""Runs that are killed, again and again, and started again by the same command until they are done.

    wound(run_dir, arrangement, kills, …) -> list of Session     the run, killed at the places that `kills` gives
    differences(one, other)                                       what two finished runs do not have in common

A session is a process group of its own, forked from a process that has imported everything, so that a start costs a
fraction of a second. A kill is SIGKILL to the whole group: at a random moment, or at the N-th call by which a rank changes
something in the run's folder: before it or, of a write, in the middle of it. Writes to one file in a row count as one.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.disk import Call, seen
from tests.dist.harness import PRELOAD
from tests.resume.harness import config, first_difference, read_log

PHASES = ("start", "update", "validation", "save", "end")
CALLS = ("-", "create", "write", "truncate", "fsync", "rename", "link", "symlink", "unlink", "mkdir", "rmdir")
LAYOUTS = {
    "one process": (1, {}),
    "data parallel": (2, {}),
    "zero": (2, {"zero_sharding": "os"}),
    "fully sharded": (2, {"ddp_backend": "fully_sharded"}),
}
COMMAND = [
    sys.executable, "-m", "trainer", "+task._target_=tests.resume.task.Toy", "common.cpu=true", "common.num_threads=1",
    "dataset.batch_size=4", "optimization.lr=0.01", "optimization.max_update=4", "checkpoint.save_interval_updates=1",
    "checkpoint.keep_interval_updates=1", "common.log_format=none",
]  # fmt: skip
KNOWN = {"checkpoints", "log.jsonl", "train.log", ".hydra", ".lock"}  # in the folder of a run


@dataclass(frozen=True)
class Arrangement:
    """layout: a key of LAYOUTS."""

    layout: str = "one process"
    folder: bool = False
    asynchronous: bool = False

    def __str__(self) -> str:
        return f"{self.layout}, {'folder' if self.folder else 'file'}, {'a' if self.asynchronous else ''}synchronous"

    @property
    def world_size(self) -> int:
        return LAYOUTS[self.layout][0]

    def config(self, run_dir: Path, max_update: int, save_every: int = 1) -> dict:
        """A run of tiny updates that saves after each, under several names, validates and prunes."""
        return config(
            run_dir,
            dataset={"batch_size": 4, "batch_size_valid": 8, "validate_interval_updates": 5},
            optimization={"max_update": max_update, "lr": 0.01, "clip_norm": 1.0},
            checkpoint={
                "save_interval_updates": save_every,
                "keep_interval_updates": 2,
                "keep_last_epochs": 1,
                "keep_best_checkpoints": 1,
                "max_failed_saves": 4,
                "write_checkpoints_asynchronously": self.asynchronous,
            },
            distributed_training={**LAYOUTS[self.layout][1], "use_sharded_state": self.folder},
        )


@dataclass(frozen=True)
class Kill:
    """When a session is killed: `after_s` seconds, or at the `call`-th call of `rank`; neither: it is left alone."""

    after_s: float | None = None
    call: int | None = None
    rank: int = 0
    torn: bool = False  # in the middle, if it is a write


@dataclass
class Session:
    """What became of one session. started_at: the update that it went on from, None if it did not get so far.

    announced: the newest update of which the log said, before this session, that it is in a checkpoint.
    """

    kill: Kill
    status: int | None = None
    phase: str = ""
    started_at: int | None = None
    announced: int = 0
    strays: list[str] = field(default_factory=list)
    num_calls: list[int] = field(default_factory=list)
    output: str = ""

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    @property
    def went_back(self) -> bool:
        """Whether it lost something that was said to be safe."""
        return self.started_at is not None and self.started_at < self.announced


# ---- what a session tells the process that watches it


class Board:
    """Memory shared with the ranks of a session."""

    def __init__(self, world_size: int) -> None:
        self.memory, self.world_size = mmap.mmap(-1, 1 << 16), world_size
        self.clear()

    def clear(self) -> None:
        self.memory[:] = bytes(len(self.memory))
        self.tell_start(-1, [])

    def enter(self, rank: int, phase: str) -> int:
        previous = self.memory[64 * rank]
        self.memory[64 * rank] = PHASES.index(phase)
        return previous

    def call(self, rank: int, kind: str, number: int) -> None:
        self.memory[64 * rank + 1] = CALLS.index(kind)
        if number:
            struct.pack_into("<I", self.memory, 64 * rank + 4, number)

    def tell_start(self, num_updates: int, strays: list[str]) -> None:
        data = json.dumps([num_updates, strays]).encode()
        struct.pack_into(f"<I{len(data)}s", self.memory, 4096, len(data), data)

    def read(self, session: Session) -> None:
        (length,) = struct.unpack_from("<I", self.memory, 4096)
        num_updates, session.strays = json.loads(self.memory[4100 : 4100 + length])
        session.started_at = num_updates if num_updates >= 0 else None
        session.num_calls = [struct.unpack_from("<I", self.memory, 64 * r + 4)[0] for r in range(self.world_size)]
        session.phase = self.phase(session.kill.rank)

    def phase(self, rank: int) -> str:
        phase, call = PHASES[self.memory[64 * rank]], CALLS[self.memory[64 * rank + 1]]
        return phase if call == "-" else f"{phase}: {call}"


# ---- a session, in a process of its own for each rank


def run_rank(rank: int, world_size: int, cfg: dict, store_path: str, kill: Kill, board: Board) -> int:
    import torch
    import torch.distributed as dist

    import checkpoint_utils
    from tests.resume.task import Toy
    from trainer.config import complete_config
    from trainer.train import Run, main

    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(world_size), TEST_STOP=":")
    if world_size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store_path, world_size), rank=rank, world_size=world_size)
    marks = [(Toy, "train_step", "update"), (Toy, "validate", "validation"), (Run, "_save", "save")]
    marks += [(checkpoint_utils.Save, "finish", "save"), (Run, "_finish", "end")]
    for owner, name, phase in marks:
        setattr(owner, name, in_phase(getattr(owner, name), board, rank, phase))
    Run.train = telling_where_it_starts(Run.train, board, Path(cfg["run_dir"]))
    with seen(cfg["run_dir"], counting(kill, board, rank)):
        return main(complete_config(cfg))


def in_phase(method: Any, board: Board, rank: int, phase: str) -> Any:
    def marked(*args: Any, **kwargs: Any) -> Any:
        previous = board.enter(rank, phase)
        try:
            return method(*args, **kwargs)
        finally:
            board.enter(rank, PHASES[previous])

    return marked


def telling_where_it_starts(train: Any, board: Board, run_dir: Path) -> Any:
    def told(run: Any) -> int:
        if run.is_master:
            board.tell_start(run.trainer.get_num_updates(), stray_files(run_dir))
        return train(run)

    return told


def stray_files(run_dir: Path) -> list[str]:
    """What no run has any use for: half-written files, hidden folders that no link names."""
    from checkpoint_utils.names import CheckpointName, is_linked_name

    found = [name for name in os.listdir(run_dir) if name not in KNOWN]
    save_dir = run_dir / "checkpoints"
    links = {os.readlink(path) for path in save_dir.iterdir() if path.is_symlink()}
    for name in os.listdir(save_dir):
        linked = is_linked_name(name) and name in links
        if CheckpointName.parse(name) is None and not linked:
            found.append(f"checkpoints/{name}")
    found += [f"checkpoints/{name} -> nothing" for name in links if not (save_dir / name).exists()]
    kept = [path.relative_to(run_dir) for path in (run_dir / ".hydra").rglob("*") if path.is_file()]
    found += [str(path) for path in kept if path.name not in ("config.yaml", "overrides.yaml")]
    return sorted(found)


def counting(kill: Kill, board: Board, rank: int) -> Any:
    count, written = 0, ""

    def around(call: Call, do: Any) -> Any:
        nonlocal count, written
        if call.kind != "write" or call.path != written:
            count += 1
        written = call.path if call.kind == "write" else ""
        board.call(rank, call.kind, count)
        if count == kill.call and rank == kill.rank:
            if kill.torn and call.kind == "write":
                do(len(call.data) // 2)
            os.killpg(0, signal.SIGKILL)
            time.sleep(60)
        result = do()
        board.call(rank, "-", 0)
        return result

    return around


def fork_rank(group: int, output: str, *args: Any) -> int:
    """A process for one rank, in the process group `group` (0: a new one). Returns its pid."""
    pid = os.fork()
    if pid:
        os.setpgid(pid, group or pid)
        return pid
    status = 1
    try:
        if os.getpgid(0) != (group or os.getpid()):
            os.setpgid(0, group)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = run_rank(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run_session(cfg: dict, world_size: int, kill: Kill, timeout: float = 120) -> Session:
    """One session to its end, or to the kill. Who still lives after `timeout` is killed, with the status None."""
    session, board = Session(kill, announced=announced(Path(cfg["run_dir"]))), Board(world_size)
    with tempfile.TemporaryDirectory(prefix="session_") as folder:
        output, store, pids = os.path.join(folder, "output"), os.path.join(folder, "store"), []
        for rank in range(world_size):
            group = pids[0] if pids else 0
            pids.append(fork_rank(group, output, rank, world_size, cfg, store, kill, board))
        statuses = wait_for_all(pids, timeout if kill.after_s is None else kill.after_s)
        if len(statuses) < world_size:
            os.killpg(pids[0], signal.SIGKILL)
            statuses.update(wait_for_all([pid for pid in pids if pid not in statuses], timeout))
            statuses = dict.fromkeys(pids, None) if kill.after_s is None else statuses
        session.output = Path(output).read_text(errors="replace") if os.path.exists(output) else ""
    ends = list(statuses.values())
    session.status = next((end for end in ends if end != 0), 0)
    board.read(session)
    return session


def wait_for_all(pids: list[int], seconds: float) -> dict[int, int]:
    """The exit status of each process that ended in this time; after a failure the others have three seconds more."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(statuses) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in statuses and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = os.waitstatus_to_exitcode(ended[1])
                if statuses[pid] != 0:
                    deadline = min(deadline, time.monotonic() + 3)
        time.sleep(0.002)
    return statuses


# ---- a run through many kills


def wound(run_dir: Path, arrangement: Arrangement, kills: Iterator[Kill], max_update: int) -> list[Session]:
    """Start the run, kill it as `kills` says, start it again, until it is done. Raises if it fails by itself.

    The last session is one that nobody killed: either it was done first, or `kills` had ended.
    """
    cfg, sessions = arrangement.config(Path(run_dir), max_update), []
    while not sessions or sessions[-1].killed:
        session = run_session(cfg, arrangement.world_size, next(kills, Kill()))
        sessions.append(session)
        if session.status not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{arrangement}: session {len(sessions)} ({session.kill}) ended by itself: {session}")
    return sessions


def campaign(run_dir: Path, arrangement: Arrangement, kills: list[Kill], max_update: int) -> list[Session]:
    """`wound` in a process of its own, which has imported all that a session needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_campaign, args=(sender, run_dir, arrangement, kills, max_update))
    process.start()
    sender.close()
    try:
        sessions, problem = receiver.recv()
    except EOFError:
        sessions, problem = None, "the process that starts the sessions has died"
    finally:
        process.join()
    if problem:
        raise RuntimeError(problem)
    return sessions


def _campaign(sender: Any, *args: Any) -> None:
    import tests.resume.task  # noqa: F401
    import trainer.train  # noqa: F401

    run_dir, arrangement, kills, max_update = args
    try:
        sender.send((wound(run_dir, arrangement, iter(kills), max_update), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))


def calls_one_after_another(count: int) -> list[Kill]:
    """Kill the first session at its first call, the second at its second, …: a session goes on from the one before."""
    return [Kill(call=call, torn=call % 2 == 1) for call in range(1, count + 1)]


def random_kills(number: int, seed: int, num_calls: list[int], session_s: float) -> list[Kill]:
    """Half at a random moment of `session_s` seconds, half at a random call of a random rank among the first tenth.

    num_calls: of each rank, in the run that nobody kills.
    """
    rng = random.Random(seed)
    kills = []
    for i in range(number):
        if i % 2:
            kills.append(Kill(after_s=rng.uniform(0, session_s)))
        else:
            rank = rng.randrange(len(num_calls))
            kills.append(Kill(call=rng.randint(1, max(4, num_calls[rank] // 8)), rank=rank, torn=rng.random() < 0.5))
    return kills


def announced(run_dir: Path) -> int:
    """The newest update of which log.jsonl says that a checkpoint holds it."""
    if not (run_dir / "log.jsonl").exists():
        return 0
    lines = re.findall(r'^\{"event": "checkpoint".*"num_updates": (\d+)', (run_dir / "log.jsonl").read_text(), re.M)
    return max(map(int, lines), default=0)


def differences(one: Path, other: Path) -> list[str]:
    """What two finished runs do not have in common: names, the bits of each checkpoint, lines of the log."""
    import checkpoint_utils

    found = []
    for event in ("train", "valid", "epoch"):
        difference = first_difference(read_log(one, event), read_log(other, event), event)
        found += [difference] if difference else []
    names = [sorted(os.listdir(run_dir / "checkpoints")) for run_dir in (one, other)]
    if names[0] != names[1]:
        found.append(f"names: {names[0]} against {names[1]}")
    for name in set(names[0]) & set(names[1]):
        states = [checkpoint_utils.load_checkpoint_to_cpu(run_dir / "checkpoints" / name) for run_dir in (one, other)]
        difference = first_difference(*states, name)
        found += [difference] if difference else []
    return found + [f"{other.name}: stray {name}" for name in stray_files(other)]


def summary(sessions: list[Session]) -> Counter[str]:
    """How many kills hit which phase."""
    return Counter(session.phase for session in sessions if session.killed)
