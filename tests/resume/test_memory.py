"""A resumed run needs no more memory than the fresh one, on any rank; saving and loading hold no second copy."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.harness import run_ranks
from tests.resume.harness import config
from tests.resume.task import FEATURES, Toy

WIDTH = 2048  # 3 x 4.2 million parameters: 50 MB, 200 MB with moments and average


class Wide(Toy):
    def build_model(self):
        layers = [nn.Linear(FEATURES, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 2)]
        return nn.Sequential(*layers)


def wide_config(run_dir: Path, on_all_ranks: bool) -> dict:
    return config(run_dir, checkpoint={"load_checkpoint_on_all_dp_ranks": on_all_ranks})


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's (pages of a mapped file can be reclaimed and are shared)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def _train(trainer: Wide, num_updates: int) -> int:
    itr = trainer._train_iterator
    for samples in itr.next_epoch_itr():
        trainer.train_step(samples)
        num_updates -= 1
        if num_updates == 0:
            break
    del samples
    return anonymous_bytes()


def _fresh(cfg: dict, path: str) -> tuple[int, int]:
    trainer = Wide(cfg)
    trainer.get_train_iterator(1)
    before_save = _train(trainer, 2)
    trainer.save_checkpoint(path)
    after_save = anonymous_bytes()
    return _train(trainer, 1), after_save - before_save


def _resumed(cfg: dict, path: str) -> int:
    trainer = Wide(cfg)
    extra_state = trainer.load_checkpoint(path)
    trainer.get_train_iterator(1).load_state_dict(extra_state["train_iterator"])
    del extra_state
    return _train(trainer, 1)


@pytest.mark.parametrize("on_all_ranks", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_resume_each_rank_holds_what_a_fresh_run_holds(tmp_path, world_size, on_all_ranks):
    cfg, path = wide_config(tmp_path, on_all_ranks), str(tmp_path / "a.pt")
    fresh = run_ranks(_fresh, world_size, cfg, path, timeout=120)
    resumed = run_ranks(_resumed, world_size, cfg, path, timeout=120)
    for rank, ((fresh_bytes, left_by_save), resumed_bytes) in enumerate(zip(fresh, resumed)):
        assert resumed_bytes <= 1.02 * fresh_bytes, f"rank {rank}: {resumed_bytes / fresh_bytes:.3f}"
        assert left_by_save < 0.02 * fresh_bytes, f"rank {rank}: a save left {left_by_save} bytes"
    assert torch.load(path, weights_only=True)["optimizer_history"][-1]["num_updates"] == 2
