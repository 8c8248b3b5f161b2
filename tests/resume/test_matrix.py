"""Any arrangement of ranks saves, any other loads: what it saves again is, bit for bit, what it has loaded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import run_ranks
from tests.resume.harness import config, first_difference

KINDS = {
    "ddp": {},
    "zero": {"zero_sharding": "os"},
    "fsdp": {"ddp_backend": "fully_sharded"},
}
OPTIMIZER = {"_target_": "torch.optim.AdamW", "weight_decay": 0.01, "groups": [{"pattern": "bias$", "weight_decay": 0.0}]}
Arrangement = tuple[str, int]  # a kind and a number of ranks


def name_of(arrangement: Arrangement) -> str:
    return f"{arrangement[0]}_{arrangement[1]}"


def config_of(folder: Path, arrangement: Arrangement, **checkpoint: Any) -> dict:
    cfg = config(folder / "run", optimizer=OPTIMIZER, dataset={"batch_size": 4}, checkpoint=checkpoint)
    return {**cfg, "distributed_training": KINDS[arrangement[0]]}


def train_and_save(folder: Path, arrangement: Arrangement) -> None:
    from tests.resume.task import Toy

    trainer = Toy(config_of(folder, arrangement))
    itr = trainer.get_train_iterator(1)
    for _, samples in zip(range(3), itr.next_epoch_itr()):
        trainer.train_step(samples)
    trainer.best.update(0.5, 2)
    trainer.save_checkpoint(str(folder / f"from_{name_of(arrangement)}.pt"), {"train_iterator": itr.state_dict(), "mine": [1, {"a": 2.5}]})


def load_and_save_again(folder: Path, arrangement: Arrangement, sources: list[Arrangement]) -> None:
    from tests.resume.task import Toy

    for source, on_all_ranks in itertools.product(sources, (True, False)):
        trainer = Toy(config_of(folder, arrangement, load_checkpoint_on_all_dp_ranks=on_all_ranks))
        itr = trainer.get_train_iterator(1)
        extra_state = trainer.load_checkpoint(str(folder / f"from_{name_of(source)}.pt"))
        itr.load_state_dict(extra_state["train_iterator"])
        again = f"{name_of(source)}_through_{name_of(arrangement)}_{on_all_ranks}.pt"
        trainer.save_checkpoint(str(folder / again), {"train_iterator": itr.state_dict()})


def contents(path: Path) -> dict:
    """What a file holds, but for what it says of who wrote it."""
    state = torch.load(path, weights_only=True)
    del state["cfg"], state["extra_state"]["ranks"]
    return state


def check_all_pairs(folder: Path, sources: list[Arrangement], targets: list[Arrangement]) -> None:
    for source in sources:
        run_ranks(train_and_save, source[1], folder, source, timeout=120)
    for target in targets:
        run_ranks(load_and_save_again, target[1], folder, target, sources, timeout=600)
    for source, target, on_all_ranks in itertools.product(sources, targets, (True, False)):
        again = contents(folder / f"{name_of(source)}_through_{name_of(target)}_{on_all_ranks}.pt")
        difference = first_difference(contents(folder / f"from_{name_of(source)}.pt"), again)
        assert difference is None, f"{source} loaded by {target}, on_all_ranks={on_all_ranks}: {difference}"


def test_some_arrangements_save_and_others_load(tmp_path):
    sources = [("ddp", 1), ("ddp", 2), ("zero", 3), ("fsdp", 2)]
    check_all_pairs(tmp_path, sources, [("ddp", 1), ("zero", 2), ("fsdp", 3)])


@pytest.mark.slow
def test_every_arrangement_saves_and_every_other_loads(tmp_path):
    arrangements = [(kind, ranks) for kind in KINDS for ranks in (1, 2, 3, 4)]
    check_all_pairs(tmp_path, arrangements, arrangements)
