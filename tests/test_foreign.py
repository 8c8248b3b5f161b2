"""Checkpoints of other programs, written by the programs themselves (tests/fixtures): a run continues from each."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import checkpoint_utils
from checkpoint_file import NotACheckpointError
from tests.dist.harness import run_ranks
from trainer import Trainer
from trainer.foreign import Here, read_foreign
from trainer.foreign.names import AmbiguousNamesError, without_wrappers
from trainer.foreign.position import position_here
from trainer.state import ClassMismatchError, ModelMismatchError
from trainer.tasks.dit.model import DiT
from trainer.tasks.language_modeling.gpt2 import GPT2

FIXTURES = Path(__file__).parent / "fixtures"
FAIRSEQ = sorted(FIXTURES.glob("fairseq/*.pt"))
OTHERS = FIXTURES / "others"
NOT_WEIGHTS = ("decoder.version", "decoder.embed_positions._float_tensor")


def facts_of(path: Path) -> dict:
    return json.loads(Path(f"{path}.json").read_text())


def digest(tensor: torch.Tensor) -> str:
    tensor = tensor.detach().cpu().contiguous()
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def module_of(shapes: dict[str, tuple], tied: dict[str, str]) -> nn.Module:
    """A module with parameters of these names, zeros; `tied`: second name -> first."""
    root = nn.Module()
    for name in [*shapes, *tied]:
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        parameter = root.get_parameter(tied[name]) if name in tied else nn.Parameter(torch.zeros(shapes[name]))
        module.register_parameter(leaf, parameter)
    return root


def fairseq_model(path: Path) -> nn.Module:
    with read_foreign(path) as foreign:
        shapes = {name: tuple(ref.shape) for name, ref in foreign.state["model"].items()}
    (tied,) = facts_of(path)["summary"]["tied"]
    order = facts_of(path)["summary"]["parameter_order"]
    return module_of({name: shapes[name] for name in order}, {tied[1]: tied[0]})


class Anything(Trainer):
    """Trains whatever it is given; all parameters get gradients. What it remembers is in no other program's file."""

    seen = 0

    def task_state_dict(self):
        return {"seen": self.seen}

    def load_task_state_dict(self, state):
        self.seen = state["seen"]

    def build_dataset(self, split):
        return [torch.tensor(float(i)) for i in range(100)]

    def compute_loss(self, sample):
        loss = sum(p.square().sum() for p in self.model.parameters()) * sample.square().sum() * 1e-6
        return loss, len(sample), {"loss": loss.detach()}


def trainer_of(model: nn.Module, optimizer: str = "AdamW", **sections) -> Anything:
    cfg = {
        "dataset": {"batch_size": 4, "valid_subset": None},
        "optimization": {"max_update": 10**6, "lr": 1e-3},
        "common": {"cpu": True},
        "optimizer": {"_target_": f"torch.optim.{optimizer}"},
        "lr_scheduler": {"_target_": "trainer.lr_scheduler.InverseSqrt", "warmup_updates": 4},
    }
    return Anything({**cfg, **sections}, model=model)


# ---- fairseq


@pytest.mark.parametrize("path", FAIRSEQ, ids=lambda path: path.stem)
def test_a_run_continues_from_a_file_of_fairseq(path):
    facts = facts_of(path)
    summary, hashes = facts["summary"], facts["sha256"]
    trainer = trainer_of(fairseq_model(path))
    extra_state = trainer.load_checkpoint(str(path))
    for name, tensor in trainer.model.state_dict().items():
        assert digest(tensor) == hashes[f"model/{name}"], name
    assert trainer.get_num_updates() == summary["num_updates"] == 10 * (2 + ("30" in path.stem))
    check_moments(trainer, summary, hashes)
    assert trainer.best.best == summary["best"]
    assert trainer.cumulative_training_time() >= 1.0
    assert trainer.get_lr() == pytest.approx(1e-3 * (4 / summary["num_updates"]) ** 0.5), "the schedule is this run's"
    itr = trainer.get_train_iterator(extra_state["train_iterator"]["epoch"])
    itr.load_state_dict(extra_state["train_iterator"])
    iterator = summary["train_iterator"]
    ranks = 2 if "2ranks" in path.stem else 1
    batch = 4 if ranks == 2 else 8  # --max-tokens over --tokens-per-sample
    samples = iterator["iterations_in_epoch"] * batch * ranks
    assert (itr.epoch, itr.samples_in_epoch) == (
        (iterator["epoch"], samples) if samples < 100 else (iterator["epoch"] + 1, 0)
    )
    said = " ".join(trainer.load_report.restored)
    assert "from fairseq" in said and "FairseqAdam is AdamW" in said and "CrossEntropyCriterion" in said
    trainer.train_step([torch.ones(4)])
    assert trainer.get_num_updates() == summary["num_updates"] + 1


def check_moments(trainer: Trainer, summary: dict, hashes: dict) -> None:
    flat = {key: [] for key in ("exp_avg", "exp_avg_sq")}
    for index, name in enumerate(summary["parameter_order"]):
        state = trainer.optimizer.state[trainer.model.get_parameter(name)]
        assert float(state["step"]) == summary["optimizer_step"]
        for key in flat:
            flat[key].append(state[key].reshape(-1))
            if not summary["optimizer_layout"].startswith("flat"):
                assert digest(state[key]) == hashes[f"last_optimizer_state/state/{index}/{key}"], name
    if summary["optimizer_layout"].startswith("flat"):
        for key, parts in flat.items():
            assert digest(torch.cat(parts)) == hashes[f"last_optimizer_state/state/0/{key}"]


def test_reset_flags_mean_the_same_for_a_file_of_fairseq():
    path = FIXTURES / "fairseq" / "cfg_midepoch2_update30.pt"
    trainer = trainer_of(fairseq_model(path))
    trainer.load_checkpoint(str(path), reset_optimizer=True, reset_meters=True, reset_lr_scheduler=True)
    assert trainer.optimizer.state == {} and trainer.best.best is None and trainer.get_num_updates() == 30


def test_another_optimizer_is_an_error_that_names_both():
    path = FIXTURES / "fairseq" / "cfg_midepoch2_update30.pt"
    with pytest.raises(ClassMismatchError, match="FairseqAdam, this run builds SGD.*checkpoint.reset_optimizer=true"):
        trainer_of(fairseq_model(path), optimizer="SGD").load_checkpoint(str(path))


def fairseq_state(**changes) -> dict:
    model = {"a.weight": torch.randn(2, 3), "a.bias": torch.randn(2)}
    state = {
        "args": None, "cfg": {"_name": None, "lr_scheduler": {"_name": "reduce_lr_on_plateau", "lr": [0.5]}},
        "model": model, "criterion": None, "task_state": {},
        "optimizer_history": [{"criterion_name": "X", "optimizer_name": "FairseqAdam", "num_updates": 7,
                               "lr_scheduler_state": {"best": 2.5, "last_epoch": 3}}],
        "extra_state": {"train_iterator": {"epoch": 4, "iterations_in_epoch": 0}, "best": torch.tensor(1.5, dtype=torch.float64)},
        "last_optimizer_state": {"state": {i: {"step": 7, "exp_avg": t + 1, "exp_avg_sq": t + 2} for i, t in enumerate(model.values())},
                                 "param_groups": [{"lr": 0.125, "params": [0, 1]}]},
    }  # fmt: skip
    return {**state, **changes}


def test_the_average_of_fairseq_is_taken_in_float32(tmp_path):
    state = fairseq_state()
    state["extra_state"]["ema"] = {name: t.half() for name, t in state["model"].items()}
    state["extra_state"]["ema_fp32_params"] = {name: t * 3 for name, t in state["model"].items()}
    torch.save(state, tmp_path / "x")
    trainer = trainer_of(module_of({n: t.shape for n, t in state["model"].items()}, {}), ema={"store_ema": True})
    trainer.load_checkpoint(str(tmp_path / "x"))
    for name, tensor in trainer.ema.state_dict().items():
        assert torch.equal(tensor, state["model"][name] * 3)
    assert trainer.best.best == 1.5


def test_a_shrunken_rate_goes_on_under_reduce_lr_on_plateau(tmp_path):
    torch.save(fairseq_state(), tmp_path / "x")
    shapes = {"a.weight": (2, 3), "a.bias": (2,)}
    schedule = {"_target_": "trainer.lr_scheduler.ReduceLROnPlateau"}
    trainer = trainer_of(module_of(shapes, {}), lr_scheduler=schedule, dataset={"batch_size": 4})
    trainer.load_checkpoint(str(tmp_path / "x"))
    assert trainer.lr_scheduler.state_dict() == {"factor": 0.25, "best": 2.5, "num_bad": 0}


@pytest.mark.parametrize("placeholder", ["SHARDED", None])
def test_a_file_without_moments_gives_the_rest(tmp_path, placeholder):
    torch.save(fairseq_state(last_optimizer_state=placeholder), tmp_path / "x")
    trainer = trainer_of(module_of({"a.weight": (2, 3), "a.bias": (2,)}, {}))
    trainer.load_checkpoint(str(tmp_path / "x"))
    assert trainer.get_num_updates() == 7 and trainer.optimizer.state == {}
    assert any("none in the file" in line for line in trainer.load_report.fresh)


# ---- DiT


REFERENCE = torch.load(FIXTURES / "dit" / "dit_reference_outputs.pt", weights_only=True)
DIT_TRAINING = str(FIXTURES / "dit" / "dit_train_0000012.pt")


def dit_trainer(config: dict = REFERENCE["config"], **sections) -> Anything:
    return trainer_of(DiT(**config), ema={"store_ema": True}, **sections)


def test_a_run_continues_from_a_training_file_of_dit():
    hashes = facts_of(Path(DIT_TRAINING))["sha256"]
    trainer = dit_trainer()
    extra_state = trainer.load_checkpoint(DIT_TRAINING)
    assert trainer.get_num_updates() == 12, "as the optimizer has counted"
    for name, tensor in trainer.model.state_dict().items():
        assert (
            digest(tensor) == hashes[f"model/{name}"]
            and digest(trainer.ema.state_dict()[name]) == hashes[f"ema/{name}"]
        )
    names = [name for name, _ in trainer.model.named_parameters()]
    for index, name in enumerate(names):
        if name != "pos_embed":
            moments = trainer.optimizer.state[trainer.model.get_parameter(name)]
            assert digest(moments["exp_avg"]) == hashes[f"opt/state/{index}/exp_avg"]
    itr = trainer.get_train_iterator(1)
    itr.load_state_dict(extra_state["train_iterator"])
    assert (itr.epoch, itr.samples_in_epoch) == (2, 0), "12 updates of 8 are the 12 whole batches of 100 samples"


def test_release_weights_give_the_numbers_of_the_official_model():
    trainer = dit_trainer()
    for path, output in ((FIXTURES / "dit" / "dit_release_ema.pt", "ema_output"), (DIT_TRAINING, "model_output")):
        trainer.load_model(str(path))
        trainer.model.eval()
        with torch.no_grad():
            found = trainer.model(REFERENCE["x"], REFERENCE["t"], REFERENCE["y"])
        torch.testing.assert_close(found, REFERENCE[output], rtol=1e-5, atol=1e-7)


def test_the_average_of_a_training_file_can_be_asked_for():
    hashes = facts_of(Path(DIT_TRAINING))["sha256"]
    trainer = dit_trainer(checkpoint={"load_rename": ["^ema[.] -> "]})
    trainer.load_model(DIT_TRAINING)
    assert all(digest(tensor) == hashes[f"ema/{name}"] for name, tensor in trainer.model.state_dict().items())


def test_dit_with_other_classes_names_the_table_and_goes_on_without_it():
    config = {**REFERENCE["config"], "num_classes": 7}
    with pytest.raises(ModelMismatchError, match="y_embedder.embedding_table.*file \\[11, 32\\], here \\[8, 32\\]"):
        dit_trainer(config).load_checkpoint(DIT_TRAINING)
    trainer = dit_trainer(config, checkpoint={"load_exclude": ["^y_embedder[.]embedding_table[.]weight$"]})
    trainer.load_checkpoint(DIT_TRAINING)
    assert len(trainer.optimizer.state) == 30 and "model (31 tensors)" in trainer.load_report.restored


# ---- Lightning, Hugging Face, accelerate, nanoGPT, torch.distributed.checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)


def gpt2() -> GPT2:
    return GPT2(vocab_size=48, max_length=16, dim=16, num_layers=2, num_heads=2)


REAL = {
    "lightning_middle_step7.ckpt": (Net, "expected_lightning_middle.pt", 7, (2, 8), 0),
    "lightning_end_step10.ckpt": (Net, "expected_lightning_end.pt", 10, (3, 0), 0),
    "hf_trainer_step9": (gpt2, "expected_hf_trainer.pt", 9, (2, 50), 0),
    "accelerate_step5": (Net, "expected_accelerate.pt", 5, None, 0),
    "nanogpt_ckpt_iter5.pt": (gpt2, "expected_nanogpt.pt", 5, None, 3.25),
}


@pytest.mark.parametrize("name", REAL)
def test_a_run_continues_from_files_of_other_trainers(name):
    build, expected, num_updates, position, best = REAL[name]
    expected = torch.load(OTHERS / expected, weights_only=True)
    trainer = trainer_of(build())
    extra_state = trainer.load_checkpoint(str(OTHERS / name))
    turned = name.startswith("hf") and Here.of(trainer.model).shapes or {}
    for key, tensor in trainer.model.state_dict().items():
        wanted = expected["model"].get(key, expected["model"].get("transformer.wte.weight"))
        assert torch.equal(tensor, wanted.t() if key in turned and is_turned(key) else wanted), key
    assert len(trainer.optimizer.state) == len(expected["exp_avg"])
    for key, moment in expected["exp_avg"].items():
        found = trainer.optimizer.state[trainer.model.get_parameter(key)]["exp_avg"]
        assert torch.equal(found, moment.t() if key in turned and is_turned(key) else moment), key
    assert trainer.get_num_updates() == num_updates
    if best:
        assert trainer.best.best == best
    if position:
        itr = trainer.get_train_iterator(1)
        itr.load_state_dict(extra_state["train_iterator"])
        assert (itr.epoch, itr.samples_in_epoch) == position
    trainer.train_step([torch.ones(4)])


def is_turned(name: str) -> bool:
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


@pytest.mark.parametrize(
    "name", ["hf_trainer_step9", "hf_sharded", "hf_bin", "hf_sharded/model.safetensors.index.json"]
)
def test_gpt2_of_hugging_face_gives_the_same_logits(name):
    expected = torch.load(OTHERS / "expected_hf_trainer.pt", weights_only=True)
    trainer = trainer_of(gpt2())
    trainer.load_model(str(OTHERS / name))
    trainer.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(trainer.model(expected["input_ids"]), expected["logits"], rtol=1e-5, atol=1e-6)


def test_a_folder_of_torch_distributed_checkpoint_is_continued():
    facts = json.loads((OTHERS / "dcp_fsdp2_2ranks_step12.json").read_text())["full_tensors"]
    names = [key.removeprefix("model/") for key in facts if key.startswith("model/")]
    trainer = trainer_of(module_of({name: tuple(facts[f"model/{name}"]["shape"]) for name in names}, {}))
    trainer.load_checkpoint(str(OTHERS / "dcp_fsdp2_2ranks_step12"))
    assert trainer.get_num_updates() == 12
    for name in names:
        parameter = trainer.model.get_parameter(name)
        assert digest(parameter) == facts[f"model/{name}"]["sha256"]
        moment = trainer.optimizer.state[parameter]["exp_avg"]
        assert digest(moment) == facts[f"optimizer/state/{name}/exp_avg"]["sha256"]


# ---- names


WRAPS = st.lists(
    st.sampled_from(["module.", "_orig_mod.", "model.", "net.", "_fsdp_wrapped_module.", "backbone."]), max_size=4
)


@given(WRAPS, st.sampled_from(["", "model", "state_dict", "module", "ema", "whatever"]), st.booleans())
@settings(deadline=None, max_examples=20)
def test_wrappers_are_found_in_any_order_under_any_key(tmp_path_factory, wraps, key, inner):
    net = Net()
    state = {"".join(wraps) + name: t for name, t in net.state_dict().items()}
    if inner:  # as torch.compile of one layer writes
        state = {name.replace("first.", "first._orig_mod."): t for name, t in state.items()}
    path = tmp_path_factory.mktemp("names") / "x"
    torch.save({key: state, "epoch": 3} if key else state, path)
    trainer = trainer_of(Net())
    trainer.load_model(str(path))
    assert all(torch.equal(t, net.state_dict()[name]) for name, t in trainer.model.state_dict().items())


def test_names_that_fit_twice_are_asked_about(tmp_path):
    student, teacher = Net(), Net()
    both = {
        f"{who}.{name}": t
        for who, net in (("student", student), ("teacher", teacher))
        for name, t in net.state_dict().items()
    }
    torch.save({"state_dict": both}, tmp_path / "x")
    with pytest.raises(AmbiguousNamesError) as caught:
        trainer_of(Net()).load_model(str(tmp_path / "x"))
    assert "'state_dict.student.' (9 tensors), 'state_dict.teacher.' (9 tensors)" in str(caught.value)
    override = str(caught.value).partition('load_rename=["')[2].partition('"]')[0]
    for rule, net in ((override, student), ("^teacher[.] -> ", teacher)):
        trainer = trainer_of(Net(), checkpoint={"load_rename": [rule]})
        trainer.load_model(str(tmp_path / "x"))
        assert torch.equal(trainer.model.first.weight, net.first.weight)
    assert any("9 tensors beside the model" in line for line in trainer.load_report.dropped)


def test_what_is_not_the_models_is_listed(tmp_path):
    state = {**{f"net.{n}": t for n, t in Net().state_dict().items()}, "loss.weight": torch.ones(3)}
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.0", "callbacks": {"a": 1}}, tmp_path / "x")
    trainer = trainer_of(Net())
    trainer.load_checkpoint(str(tmp_path / "x"))
    assert trainer.load_report.dropped == ["callbacks", "1 tensors beside the model (state_dict.loss.weight)"]
    assert any("without the prefix 'net.'" in line for line in trainer.load_report.restored)


def test_a_module_saved_whole_is_taken(tmp_path):
    net = Net()
    torch.save({"epoch": 1, "model": net}, tmp_path / "x")
    trainer = trainer_of(Net())
    trainer.load_model(str(tmp_path / "x"))
    assert torch.equal(trainer.model.last.weight, net.last.weight)


def test_a_dictionary_without_a_model_is_refused(tmp_path):
    torch.save({"losses": [1, 2]}, tmp_path / "x")
    with pytest.raises(NotACheckpointError, match="holds no tensors by their names .it has: losses"):
        trainer_of(Net()).load_model(str(tmp_path / "x"))


@given(st.text("abm._", max_size=12))
def test_names_without_wrappers_have_none(name):
    assert not {"_orig_mod", "_fsdp_wrapped_module"} & set(without_wrappers(name).split("."))


# ---- positions


@given(st.integers(1, 500), st.integers(1, 60), st.integers(0, 2000))
def test_updates_without_an_epoch_are_epochs_and_samples(num_samples, per_update, num_updates):
    told = {"samples_per_update": per_update, "num_updates": num_updates, "drops_rest": True}
    found = position_here(told, num_samples, 1)
    per_epoch = max(num_samples // per_update, 1)
    assert found["epoch"] - 1 in (num_updates // per_epoch, num_updates // per_epoch + 1)
    assert 0 <= found["samples_in_epoch"] < num_samples


# ---- several ranks, and a run as it is started


def load_on_ranks(path: str, ways: list) -> list:
    found = []
    for on_all, zero in ways:
        sections = {
            "checkpoint": {"load_checkpoint_on_all_dp_ranks": on_all},
            "distributed_training": {"zero_sharding": zero},
        }
        trainer = dit_trainer(**sections)
        extra_state = trainer.load_checkpoint(path)
        trainer.train_step([torch.ones(4)])
        weights = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
        found.append((digest(weights), trainer.get_num_updates(), extra_state["train_iterator"]["epoch"]))
    return found


def test_both_ways_of_reading_and_sharded_state_agree_on_two_ranks():
    ways = [(True, "none"), (False, "none"), (True, "os"), (False, "os")]
    results = run_ranks(load_on_ranks, 2, DIT_TRAINING, ways)
    assert {one for rank in results for one in rank} == {results[0][0]} and results[0][0][1] == 13


def refused_on_ranks(path: str) -> str:
    try:
        trainer_of(Net()).load_checkpoint(path)
    except NotACheckpointError as error:
        return str(error)
    return ""


def test_a_hostile_file_is_refused_on_every_rank(tmp_path):
    class Evil:
        def __reduce__(self):
            import os

            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"model": Net().state_dict(), "args": Evil()}, tmp_path / "x")
    for said in run_ranks(refused_on_ranks, 2, str(tmp_path / "x")):
        assert "posix.mkdir" in said and "nothing of it was run" in said
    assert not (tmp_path / "made").exists()


def test_restore_file_takes_a_foreign_file_once_then_the_run_goes_on_by_itself(tmp_path):
    checkpoint = {"restore_file": DIT_TRAINING, "save_dir": str(tmp_path)}
    trainer = dit_trainer(checkpoint=checkpoint)
    extra_state, itr = checkpoint_utils.load_checkpoint(trainer.cfg.checkpoint, trainer)
    assert trainer.get_num_updates() == 12 and extra_state["best"] is None and itr.epoch == 2
    trainer.train_step([torch.ones(4)])
    checkpoint_utils.save_checkpoint(trainer.cfg.checkpoint, trainer, itr, None)
    again = dit_trainer(checkpoint=checkpoint)
    checkpoint_utils.load_checkpoint(again.cfg.checkpoint, again)
    assert again.get_num_updates() == 13 and torch.equal(again.model.pos_embed, trainer.model.pos_embed)
