"""A folder that plain torch.distributed.checkpoint wrote, of FSDP2 on two ranks with Adam at update 12, in the layout of
torchtitan: parameters by bare names beside `optimizer`, `lr_scheduler`, `train_state`. Any arrangement goes on from it.
tests/fixtures/dcp_fsdp2_2ranks_step12.json says what is in it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import checkpoint_utils
from tests.dist.harness import run_ranks
from tests.resume.task import ModelOnly
from tests.resume.test_matrix import KINDS, config

FOLDER = Path(__file__).parent.parent / "fixtures" / "dcp_fsdp2_2ranks_step12"
FACTS = json.loads(FOLDER.with_suffix(".json").read_text())["full_tensors"]
PARAMETERS = [name.removeprefix("model/") for name in FACTS if name.startswith("model/")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x.abs().sum(-1).long() % 16)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.pad(self.head(h), (0, -2))


class Titan(ModelOnly):
    def build_model(self) -> nn.Module:
        return Net()

    def load_task_state_dict(self, state: dict) -> None:
        assert state == {}


def facts_of(t: torch.Tensor) -> dict:
    data = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(t.dtype).removeprefix("torch."),
        "shape": list(t.shape),
        "sum": t.double().sum().item(),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def load_and_save(folder: str, kind: str, on_all_ranks: bool, moments: bool) -> None:
    checkpoint = {"load_checkpoint_on_all_dp_ranks": on_all_ranks}
    cfg = {**config(Path(folder) / "run", checkpoint=checkpoint), "distributed_training": KINDS[kind], "ema": {}}
    trainer = Titan({**cfg, "task": {"_target_": "tests.resume.test_dcp_fixture.Titan"}})
    trainer.get_train_iterator(1)
    if moments:
        trainer.load_checkpoint(str(FOLDER))
        assert trainer.get_num_updates() == 12
    else:
        trainer.load_model(str(FOLDER))
    trainer.save_checkpoint(f"{folder}/{kind}_{on_all_ranks}.pt", {})


@pytest.mark.parametrize("moments", [False, True], ids=["finetune_from_model", "restore_file"])
@pytest.mark.parametrize("kind, ranks", [("ddp", 1), ("zero", 3), ("fsdp_folder", 2)])
def test_any_arrangement_takes_up_what_another_program_saved(tmp_path, kind, ranks, moments):  # [D2] [R8]
    for on_all_ranks in (True, False) if ranks > 1 else (True,):
        run_ranks(load_and_save, ranks, str(tmp_path), kind, on_all_ranks, moments, timeout=120)
        saved = checkpoint_utils.load_checkpoint_to_cpu(tmp_path / f"{kind}_{on_all_ranks}.pt")
        assert {name: facts_of(t) for name, t in saved["model"].items()} == {n: FACTS[f"model/{n}"] for n in PARAMETERS}
        if moments:
            optimizer = saved["last_optimizer_state"]
            names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
            assert sorted(names) == sorted(PARAMETERS)
            for number, name in enumerate(names):
                for key, value in optimizer["state"][number].items():
                    assert facts_of(value) == FACTS[f"optimizer/state/{name}/{key}"], (name, key)
