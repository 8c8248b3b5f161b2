"""Who started this process: what the variables of torchrun and of srun mean, and which of them are left over."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distributed_utils.errors import LAUNCH_VARIABLES, LaunchEnvironmentError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchFacts:
    """This process's place in the launch that started it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    store_is_agents: bool  # torchrun's agent holds the store; else rank 0 does
    started_by_agent: bool  # torchrun or our launcher is the parent process


def launch_facts(env: Mapping[str, str] | None = None, ancestors: Iterable[int] | None = None) -> LaunchFacts | None:
    """What the variables of torchrun (or of srun, where srun started us) say; None: nobody launched ranks.

    A part of the variables is left over from another launch and counts as none (see `stale_variables`).
    Raises LaunchEnvironmentError where they contradict each other.
    """
    env = os.environ if env is None else env
    by_agent = "TORCHELASTIC_RUN_ID" in env
    missing = [name for name in _NEEDED if not env.get(name)]
    if missing and by_agent:
        raise LaunchEnvironmentError(f"torchrun started this process, but {', '.join(missing)} is missing", env)
    _check_ranks(env)
    if missing:
        return _srun_facts(env, ancestors)
    if not env.get("LOCAL_RANK"):
        raise LaunchEnvironmentError("LOCAL_RANK is missing", env)
    local_rank = int(env["LOCAL_RANK"])
    return LaunchFacts(
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_rank=local_rank,
        local_world_size=int(env.get("LOCAL_WORLD_SIZE") or local_rank + 1),
        master_addr=env["MASTER_ADDR"],
        master_port=int(env["MASTER_PORT"]),
        store_is_agents=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        started_by_agent=by_agent,
    )


def stale_variables(env: Mapping[str, str] | None = None) -> list[str]:
    """Names of launch variables that are set though no launcher started this process."""
    env = os.environ if env is None else env
    if all(env.get(name) for name in _NEEDED):
        return []
    return [name for name in LAUNCH_VARIABLES if env.get(name)]


def _check_ranks(env: Mapping[str, str]) -> None:
    number = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if env.get(name):
            if not re.fullmatch(r"\d{1,9}", env[name].strip()):
                raise LaunchEnvironmentError(f"{name} is {env[name]!r}, not a number", env)
            number[name] = int(env[name])
    for small, large in [("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK", "WORLD_SIZE")]:
        if small in number and large in number and number[small] >= number[large]:
            raise LaunchEnvironmentError(f"{small} must be below {large}", env)
    for small, large in [("LOCAL_WORLD_SIZE", "WORLD_SIZE"), ("LOCAL_RANK", "RANK")]:
        if small in number and large in number and number[small] > number[large]:
            raise LaunchEnvironmentError(f"{small} must not be above {large}", env)
    if "MASTER_PORT" in number and not 0 < number["MASTER_PORT"] < 65536:
        raise LaunchEnvironmentError("MASTER_PORT is no port", env)


def _srun_facts(env: Mapping[str, str], ancestors: Iterable[int] | None) -> LaunchFacts | None:
    """The ranks of a job step, if srun started this process as one of several tasks. A batch script is no such task."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_TASK_PID", "SLURM_JOB_ID")
    if not all(re.fullmatch(r"\d{1,10}", env.get(name, "")) for name in names):
        return None
    rank, world_size, local_rank, step, task_pid, job = (int(env[name]) for name in names)
    first_special_step = 0xFFFFFFF0  # batch, interactive and extern steps have numbers from here
    if world_size < 2 or rank >= world_size or step >= first_special_step:
        return None
    if task_pid not in set(_ancestors() if ancestors is None else ancestors):
        return None  # inherited from a shell or another program that srun started elsewhere
    per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return LaunchFacts(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(per_node.group()) if per_node else local_rank + 1,
        master_addr=env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "localhost")),
        master_port=int(env.get("MASTER_PORT") or 20000 + (job * 7 + step) % 20000),
        store_is_agents=False,
        started_by_agent=False,
    )


def _first_host(nodelist: str) -> str:
    """`gpu[03-05,9]-ib,other` names gpu03-ib first."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    return "".join(part or "" for part in found.groups()) if found else nodelist


def _ancestors() -> list[int]:
    """This process and the processes that it descends from, where /proc tells."""
    pids, pid = [], os.getpid()
    while pid > 1:
        pids.append(pid)
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
    return pids
