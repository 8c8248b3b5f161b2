"""The ranks of a benchmark: processes of this machine that share its cores and form a gloo process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def run_on_ranks(function: Callable[..., None], ranks: int, *args: Any, group_of_one: bool = False) -> None:
    """Call `function(rank, *args)` in a process for each rank, and return when all have ended.

    A single rank has no process group unless `group_of_one`. What a rank raises is raised here.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    has_group = ranks > 1 or group_of_one
    torch.multiprocessing.spawn(_rank_main, args=(ranks, port, has_group, function, args), nprocs=ranks)


def _rank_main(rank: int, ranks: int, port: int, has_group: bool, function: Callable, args: tuple) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if not has_group:
        function(rank, *args)
        return
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    function(rank, *args)
    dist.barrier()  # nobody leaves while a peer still reads from it
    dist.destroy_process_group()
