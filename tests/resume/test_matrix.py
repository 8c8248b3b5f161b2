"""Any arrangement of ranks saves, any other loads: what it saves again is, bit for bit, what it has loaded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import checkpoint_utils
from tests.dist.harness import run_ranks
from tests.resume.harness import config, first_difference

KINDS = {
    "ddp": {},
    "zero": {"zero_sharding": "os"},
    "fsdp": {"ddp_backend": "fully_sharded"},
    "zero_folder": {"zero_sharding": "os", "use_sharded_state": True},
    "fsdp_folder": {"ddp_backend": "fully_sharded", "use_sharded_state": True},
}
OPTIMIZER = {"_target_": "torch.optim.AdamW", "weight_decay": 0.01, "groups": [{"pattern": "bias$", "weight_decay": 0.0}]}
Arrangement = tuple[str, int]  # a kind and a number of ranks


def name_of(arrangement: Arrangement) -> str:
    return f"{arrangement[0]}_{arrangement[1]}"


def config_of(folder: Path, arrangement: Arrangement, **checkpoint: Any) -> dict:
    cfg = config(folder / "run", optimizer=OPTIMIZER, dataset={"batch_size": 4}, checkpoint=checkpoint)
    return {**cfg, "distributed_training": KINDS[arrangement[0]]}


def path_of(folder: Path, stem: str, arrangement: Arrangement) -> str:
    return str(folder / (stem if arrangement[0].endswith("folder") else f"{stem}.pt"))


def train_and_save(folder: Path, arrangement: Arrangement) -> None:
    from tests.resume.task import Toy

    trainer = Toy(config_of(folder, arrangement))
    itr = trainer.get_train_iterator(1)
    for _, samples in zip(range(3), itr.next_epoch_itr()):
        trainer.train_step(samples)
    trainer.best.update(0.5, 2)
    trainer.save_checkpoint(path_of(folder, f"from_{name_of(arrangement)}", arrangement), {"train_iterator": itr.state_dict(), "mine": [1, {"a": 2.5}]})


def load_and_save_again(folder: Path, arrangement: Arrangement, sources: list[Arrangement]) -> None:
    from tests.resume.task import Toy

    for source, on_all_ranks in itertools.product(sources, (True, False)):
        trainer = Toy(config_of(folder, arrangement, load_checkpoint_on_all_dp_ranks=on_all_ranks))
        itr = trainer.get_train_iterator(1)
        extra_state = trainer.load_checkpoint(path_of(folder, f"from_{name_of(source)}", source))
        itr.load_state_dict(extra_state["train_iterator"])
        again = path_of(folder, f"{name_of(source)}_through_{name_of(arrangement)}_{on_all_ranks}", arrangement)
        trainer.save_checkpoint(again, {"train_iterator": itr.state_dict()})


def contents(path: str) -> dict:
    """What a file holds, but for what it says of who wrote it."""
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    del state["cfg"], state["extra_state"]["ranks"]
    return state


def check_all_pairs(folder: Path, sources: list[Arrangement], targets: list[Arrangement]) -> None:
    for source in sources:
        run_ranks(train_and_save, source[1], folder, source, timeout=120)
    for target in targets:
        run_ranks(load_and_save_again, target[1], folder, target, sources, timeout=600)
    for source, target, on_all_ranks in itertools.product(sources, targets, (True, False)):
        again = contents(path_of(folder, f"{name_of(source)}_through_{name_of(target)}_{on_all_ranks}", target))
        difference = first_difference(contents(path_of(folder, f"from_{name_of(source)}", source)), again)
        assert difference is None, f"{source} loaded by {target}, on_all_ranks={on_all_ranks}: {difference}"


def test_some_arrangements_save_and_others_load(tmp_path):
    sources = [("ddp", 1), ("ddp", 2), ("zero", 3), ("fsdp", 2), ("fsdp_folder", 3)]
    check_all_pairs(tmp_path, sources, [("ddp", 1), ("zero_folder", 2), ("fsdp", 3)])


@pytest.mark.slow
def test_every_arrangement_saves_and_every_other_loads(tmp_path):
    arrangements = [(kind, ranks) for kind in KINDS for ranks in (1, 2, 3, 4)]
    check_all_pairs(tmp_path, arrangements, arrangements)
