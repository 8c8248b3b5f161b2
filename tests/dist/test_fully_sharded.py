"""fully_sharded computes what data parallel ranks compute, each rank holding its rows only."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpoint_file import ShardedTensor
from tests.dist.harness import run_ranks
from tests.resume.harness import config
from tests.resume.task import Toy, ToyFromMeta
from tests.resume.test_memory import anonymous_bytes

WORLD_SIZES = (2, 3)
NUM_UPDATES = 4
PRIVATE = ("run_id", "previous_training_time", "ddp_backend", "gather_in_half_precision", "cpu_offload")
STILL = {"_target_": "tests.resume.task.Toy", "follow_mean": False}  # buffers do not depend on who has which samples
CPU = {"seed": 7, "log_format": "none", "cpu": True, "num_threads": 1}


class Forgetful(Toy):
    def init_weights(self, model) -> None:
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)


class SetsARow(Forgetful):
    def init_weights(self, model) -> None:
        super().init_weights(model)
        model.first.weight[0].fill_(0.0)


def build(folder: str, sharded: bool, distributed: dict | None = None, cls: type = Toy, **sections):
    """A toy trainer of tests.resume.task: tied, frozen and 0-dim parameters, buffers, a criterion's parameter, EMA."""
    sections.setdefault("task", {"_target_": "tests.resume.task.Toy"})
    if sharded:
        distributed = {**sections.get("distributed_training", {}), **(distributed or {})}
        sections["distributed_training"] = {"ddp_backend": "fully_sharded", **distributed}
    return cls(config(Path(folder), **sections))


def update(index: int, rank: int, num_micro_batches: int = 2) -> list:
    generator = torch.Generator().manual_seed(100 * index + rank)
    inputs = [torch.randn(4, 6, generator=generator) for _ in range(num_micro_batches)]
    return [(x, x[:, :2] * 2) for x in inputs]


def trained(trainer, first: int = 0, count: int = NUM_UPDATES) -> list[dict]:
    return [trainer.train_step(update(index, trainer.data_parallel_rank)) for index in range(first, first + count)]


def described(state):
    """Whole tensors and pieces of `state` as plain tuples that can travel to the test."""
    if isinstance(state, dict):
        return {key: described(value) for key, value in state.items()}
    if isinstance(state, list):
        return [described(value) for value in state]
    if isinstance(state, ShardedTensor):
        return ("sharded", state.dtype, state.shape, [(begin, values.clone()) for begin, values in state.pieces])
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def assembled(parts: list):
    """The state of one process from the states of all ranks; each element must be in exactly one piece."""
    first = parts[0]
    if isinstance(first, dict):
        assert all(list(part) == list(first) for part in parts)
        return {key: assembled([part[key] for part in parts]) for key in first}
    if isinstance(first, list):
        return [assembled(list(group)) for group in zip(*parts)]
    if not (isinstance(first, tuple) and first[:1] == ("sharded",)):
        return first
    pieces = sorted((begin, values) for part in parts for begin, values in part[3])
    ends = [0, *(begin + len(values) for begin, values in pieces)]
    assert [begin for begin, _ in pieces] == ends[:-1] and ends[-1] == first[2].numel()
    flat = torch.cat([values for _, values in pieces]) if pieces else torch.zeros(0, dtype=first[1])
    return flat.reshape(first[2])


def close(one, other, path: str = "", rtol: float = 1e-4) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            close(one[key], other[key], f"{path}.{key}", rtol)
    elif isinstance(one, (list, tuple)):
        for i, pair in enumerate(zip(one, other, strict=True)):
            close(*pair, f"{path}[{i}]", rtol)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * 0.1, msg=lambda m: f"{path}: {m}")
    elif path.endswith(PRIVATE):
        return
    elif isinstance(one, float):
        assert math.isclose(one, other, rel_tol=rtol, abs_tol=1e-12), (path, one, other)
    else:
        assert one == other, (path, one, other)


# ---------------------------------------------------------------------------------------------------- on the ranks


def _numbers(folder: str, **sections) -> dict:
    """Updates, two validations among them, and the state afterwards: of data parallel ranks and of sharded ones."""
    found = {}
    for sharded in (False, True):
        trainer = build(folder, sharded, **sections)
        stats = trained(trainer)
        valid = [trainer.validate("valid"), trainer.validate("valid", max_batches=1)]
        stats += trained(trainer, NUM_UPDATES)
        found[sharded] = {"stats": stats, "valid": valid, "state": described(trainer.state_dict())}
    return found


def _validation_leaves_no_trace(folder: str) -> list:
    """The same updates with and without validations of the average and forward passes without gradients."""
    results = []
    for validate, look in ((False, False), (True, False), (True, True)):
        trainer = build(folder, True, ema={"store_ema": True, "ema_decay": 0.5, "ema_validate": True})
        stats = trained(trainer)
        if validate:
            trainer.validate("valid")
        if look:  # into the state too, which ends what a forward pass left gathered
            trainer.model.eval()
            with trainer.ema.swapped_in(trainer.model), torch.no_grad():
                averaged = trainer.model(torch.ones(2, 6)).clone()
                saved = described(trainer.state_dict())
            with torch.no_grad():
                assert not torch.equal(trainer.model(torch.ones(2, 6)), averaged)
            results.append((saved["model"], described(trainer.state_dict())["model"]))
            results.append((saved["extra_state"]["ema"], described(trainer.state_dict())["extra_state"]["ema"]))
        results.append([*stats, *trained(trainer, NUM_UPDATES), described(trainer.state_dict())])
    return results


def _bytes_held(folder: str) -> dict:
    """Bytes of parameters, averages and moments that a rank keeps, against those of the whole state."""
    trainer = build(folder, True, model=None, task={"_target_": "tests.resume.task.Toy"})
    trained(trainer)
    state = described(trainer.state_dict())
    nests = [state["model"], state["extra_state"]["ema"], state["last_optimizer_state"]["state"]]
    held, whole, largest, stack = 0, 0, 0, list(nests)
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, tuple):
            size = value[2].numel() * value[1].itemsize
            held, whole = held + sum(v.numel() * v.itemsize for _, v in value[3]), whole + size
            largest = max(largest, size)
    return {"held": held, "whole": whole, "largest": largest}


def _norms_gathered_in_half() -> list[torch.dtype]:
    from trainer import fully_sharded
    from trainer.precision import BFloat16

    block = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8))
    model = torch.nn.Sequential(block, torch.nn.Tanh(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    cfg = SimpleNamespace(gather_in_half_precision=True, cpu_offload=False, find_unused_parameters=False)
    precision = BFloat16(torch.device("cpu"))
    fully_sharded.wrap(model, fully_sharded.blocks_of(model), torch.device("cpu"), cfg, precision)
    with precision.autocast():
        loss = model(torch.randn(4, 6)).float().square().sum()
    loss.backward()
    return [block[0].weight.grad.dtype, model[2].weight.grad.dtype, model[2].running_mean.dtype]


def _cases(folder: str) -> dict:
    in_half = {"gather_in_half_precision": True}
    return {
        "memory of a build": _memory_of_a_build(folder),
        "fp32": _numbers(folder),
        "offloaded": _numbers(folder, distributed={"cpu_offload": True}),
        "bf16": _numbers(folder, common={**CPU, "bf16": True}),
        "gathered in bf16": _numbers(folder, common={**CPU, "bf16": True}, distributed=in_half),
        "fp16": _numbers(folder, common={**CPU, "fp16": True, "fp16_init_scale": 2.0**20}),
        "no trace": _validation_leaves_no_trace(folder),
        "bytes": _bytes_held(folder),
        "norms": _norms_gathered_in_half(),
        "errors": _errors(folder),
        "unused": _unused(folder),
        "tasks": _tasks(folder),
        "from meta": _from_meta(folder),
        "still": trained(build(folder, True, task=STILL)),
    }


@pytest.fixture(scope="module", params=WORLD_SIZES)
def cases(request, tmp_path_factory):
    """What each rank found, all cases in one group of processes: starting torch's sharding takes seconds."""
    return run_ranks(_cases, request.param, str(tmp_path_factory.mktemp("sharded")), timeout=120)


def _errors(folder: str) -> dict[str, str]:
    """The messages of what is refused or goes wrong, the same case on all ranks."""
    rank = torch.distributed.get_rank()
    found = {}
    found["optimizer"] = _message(lambda: build(folder, True, optimizer={"_target_": "torch.optim.Adafactor"}))
    trainer = build(folder, True, task=STILL)
    trained(trainer)
    bad = [list(batch) for batch in update(0, rank)]
    if rank == 1:
        bad[1][0][2] = float("nan")
    found["loss"] = _message(lambda: trainer.train_step([tuple(batch) for batch in bad]))
    before = described(trainer.state_dict())["model"]
    trainer.compute_loss = functools.partial(_with_infinite_gradient, trainer, rank == 1)
    found["gradient"] = _message(lambda: trainer.train_step(update(0, rank)))
    close(before, described(trainer.state_dict())["model"], rtol=0)
    del trainer.compute_loss
    found["afterwards"] = str(torch.tensor(trained(trainer, count=1)[0]["gnorm"]).isfinite().item())
    return found


def _unused(folder: str) -> dict:
    """A bias that is used by no rank, by rank 1 alone, and by rank 1 alone where that is allowed."""
    rank = torch.distributed.get_rank()
    found = {}
    for case, users, allowed in (("nobody", (), False), ("one", (1,), False), ("one, allowed", (1,), True)):
        for sharded in (False, True):
            trainer = build(folder, sharded, distributed_training={"find_unused_parameters": allowed})
            trainer.validate("valid")
            if rank not in users:
                tied = trainer.model.tied
                tied.forward = lambda h, tied=tied: torch.nn.functional.linear(h, tied.weight)
            stats = []
            error = _message(lambda: stats.extend(trained(trainer)))
            found[case, sharded] = (error, stats, described(trainer.state_dict()) if stats else None)
    return found


def _tasks(folder: str) -> dict:
    """Numbers, states and samples of the tasks of this package, whole and sharded."""
    found = {}
    for name, cfg in (("text", _text_config(folder)), ("digits", _digits_config(folder))):
        for sharded in (False, True):
            trainer = _trainer(folder, f"{name}_{sharded}", sharded, cfg)
            assert trainer.init_weights is not None, "built whole"
            first = described(trainer.state_dict()["model"])
            batches = trainer.get_train_iterator(1).next_epoch_itr()
            stats = [trainer.train_step(next(batches)) for _ in range(3)]
            stats.append(trainer.validate("valid", max_batches=1))
            trainer.after_validate(stats[-1])
            trainer.after_train()
            samples = sorted(
                str(path.relative_to(trainer.cfg.run_dir)) for path in Path(trainer.cfg.run_dir).rglob("*.*")
            )
            torch.distributed.barrier()
            found[name, sharded] = {
                "first": first,
                "stats": stats,
                "model": described(trainer.state_dict()["model"]),
                "samples": samples,
            }
            found[name, sharded]["wrapped"] = len(trainer.fully_sharded_modules(trainer.model))
    return found


def _trainer(folder: str, run: str, sharded: bool, cfg: dict):
    from trainer.config import get_target

    backend = {"ddp_backend": "fully_sharded" if sharded else "pytorch_ddp"}
    common = {**CPU, "log_format": "none"}
    cfg = {**cfg, "run_dir": f"{folder}/{run}", "distributed_training": backend, "common": common}
    cls = get_target(cfg["task"], object, "task")
    return cls(
        {**cfg, "optimizer": {"_target_": "torch.optim.AdamW"}, "optimization": {"max_update": 3, "clip_norm": 1.0}}
    )


def _text_config(folder: str) -> dict:
    source = Path(folder, "text.txt")
    source.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    model = {"max_length": 16, "dim": 16, "num_layers": 2, "num_heads": 2, "tie_embeddings": True, "max_ngram": 3}
    return {
        "task": {
            "_target_": "trainer.tasks.language_modeling.task.LanguageModeling",
            "data": str(source),
            "tokens_per_sample": 16,
            "sample_bytes": 6,
        },
        "model": {"_target_": "trainer.tasks.language_modeling.model.TransformerLM", "ngram_rows": 65, **model},
        "criterion": {"_target_": "trainer.tasks.language_modeling.criterion.CrossEntropy"},
        "dataset": {"batch_size": 2},
        "ema": {"store_ema": True, "ema_validate": True},
    }


def _digits_config(folder: str) -> dict:
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10, "patch_size": 4}
    return {
        "task": {
            "_target_": "trainer.tasks.dit.digits.Digits",
            "sample_steps": 2,
            "samples_per_class": 1,
            "pictured_per_class": 1,
        },
        "model": {"_target_": "trainer.tasks.dit.model.DiT", "hidden_size": 16, "depth": 2, "num_heads": 2, **sizes},
        "criterion": {"_target_": "trainer.tasks.dit.criterion.DiffusionCriterion", "diffusion_steps": 40},
        "dataset": {"batch_size": 4},
        "ema": {"store_ema": True},
    }


def _from_meta(folder: str) -> dict:
    """The first state, and that after some updates, of a model that is built without memory; and what is forgotten."""
    found = {}
    for sharded in (False, True):
        trainer = build(folder, sharded, cls=ToyFromMeta, task={**STILL, "_target_": "tests.resume.task.ToyFromMeta"})
        assert trainer.model.tied.weight is trainer.model.second.weight
        first = described(trainer.state_dict())["model"]
        found[sharded] = {"first": first, "stats": trained(trainer), "ema": described(trainer.ema.state_dict())}
    found["forgotten"] = _message(lambda: build(folder, True, cls=Forgetful))
    found["row"] = _message(lambda: build(folder, True, cls=SetsARow))
    return found


class Wide(Toy):
    def build_model(self):
        return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))

    def init_weights(self, model) -> None:
        self.seen = []
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
            self.seen.append(anonymous_bytes())


def _memory_of_a_build(folder: str) -> float:
    """Peak memory of building 64 MiB of weights, over the bytes of this rank's rows."""
    build(folder, True)  # imports, buffers of the process group
    before = anonymous_bytes()
    trainer = build(folder, True, cls=Wide, ema={"store_ema": False})
    return (max(trainer.seen) - before) / sum(rows.nbytes for rows in trainer.optimizer.param_groups[0]["params"])


def _with_infinite_gradient(trainer, mine: bool, sample):
    loss, sample_size, output = type(trainer).compute_loss(trainer, sample)
    weight = trainer.model.second.weight  # gathered, since a forward pass has begun
    if mine and sample[0][0, 0] == update(0, 1)[1][0][0, 0]:
        loss = loss + (weight.sum() * 0.0).clamp(min=0.0).sqrt()  # 0, with a gradient that is not a number
    return loss, sample_size, output


def _message(do) -> str:
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# ---------------------------------------------------------------------------------------------------- what must hold


@pytest.mark.parametrize(
    "precision, rtol", [("fp32", 1e-4), ("offloaded", 1e-4), ("bf16", 2e-2), ("gathered in bf16", 1e-1), ("fp16", 2e-2)]
)
def test_numbers_are_those_of_data_parallel_ranks(cases, precision, rtol):
    plain, sharded = ([case[precision][kind] for case in cases] for kind in (False, True))
    for one, other in zip(plain, sharded):
        close(one["stats"], other["stats"], "stats", rtol)
        close(one["valid"], other["valid"], "valid", rtol)
    close(plain[0]["state"], assembled([case["state"] for case in sharded]), "state", rtol)


def test_numbers_are_those_of_one_process_with_all_micro_batches(cases, tmp_path):
    trainer, ranks = build(str(tmp_path), False, task=STILL), range(len(cases))
    stats = [
        trainer.train_step([update(index, rank)[i] for i in range(2) for rank in ranks]) for index in range(NUM_UPDATES)
    ]
    for case in cases:
        close(stats, case["still"], "stats")


def test_validating_the_average_leaves_no_trace_in_training(cases):
    for case in cases:
        without, with_validation, *pairs, with_a_look = case["no trace"]
        for saved, now in pairs:
            close(saved, now, rtol=0)
        close(without, with_validation, rtol=0)
        close(without, with_a_look, rtol=0)


def test_a_rank_holds_its_rows_and_no_more(cases):
    held = [case["bytes"] for case in cases]
    assert sum(case["held"] for case in held) == held[0]["whole"]
    # Rows are dealt out tensor by tensor, rounded up: one row of each tensor more than the share at most.
    assert max(case["held"] for case in held) <= held[0]["whole"] / len(held) + held[0]["largest"]


def test_what_went_wrong_is_named_on_every_rank(cases):
    for case in cases:
        errors = case["errors"]
        assert "sharding cuts parameters into pieces, which Adafactor does not allow" in errors["optimizer"]
        assert "distributed_training.ddp_backend=pytorch_ddp" in errors["optimizer"]
        assert "the loss (nan)" in errors["loss"] and "rank 1" in errors["loss"], errors["loss"]
        assert "the gradient of second.weight" in errors["gradient"] and "rank 1" in errors["gradient"]
        assert errors["afterwards"] == "True"


def test_parameters_that_ranks_do_not_use_count_as_with_data_parallel_ranks(cases):
    results = [case["unused"] for case in cases]
    for result in results:
        for sharded in (False, True):
            assert f"parameter tied.bias got a gradient on 1 of {len(cases)} ranks" in result["one", sharded][0]
        for case in ("nobody", "one, allowed"):
            assert result[case, True][0] == "nothing was raised"
            close(result[case, False][1], result[case, True][1])
    for case in ("nobody", "one, allowed"):
        close(results[0][case, False][2], assembled([result[case, True][2] for result in results]))


@pytest.mark.parametrize("task", ["text", "digits"])
def test_the_tasks_train_validate_and_draw_block_by_block(cases, task):
    plain, sharded = ([case["tasks"][task, kind] for case in cases] for kind in (False, True))
    for one, other in zip(plain, sharded):
        close(one["stats"], other["stats"], "stats", 1e-3)
        assert other["wrapped"] >= 2
    close(plain[0]["first"], assembled([found["first"] for found in sharded]), "first", 0)
    close(plain[0]["model"], assembled([found["model"] for found in sharded]), "model", 1e-2)
    assert sharded[0]["samples"] == plain[0]["samples"] and plain[0]["samples"], plain[0]["samples"]


def test_a_model_built_without_memory_begins_with_the_same_values_everywhere(cases, tmp_path):
    task = {**STILL, "_target_": "tests.resume.task.ToyFromMeta"}
    single = described(build(str(tmp_path), False, cls=ToyFromMeta, task=task).state_dict())["model"]
    found = [case["from meta"] for case in cases]
    close(single, found[0][False]["first"], rtol=0)
    close(single, assembled([one[True]["first"] for one in found]), rtol=0)
    for one in found:
        close(one[False]["stats"], one[True]["stats"])
        assert "it left mean" in one["forgotten"]
        assert "takes a part of a sharded parameter" in one["row"]


def test_building_without_memory_takes_a_rank_its_rows_and_one_parameter(cases):
    whole, one, others = 64 * 2**20, 4 * 2**20, 8 * 2**20
    for case in cases:
        assert case["memory of a build"] < 1 + (one + others) * len(cases) / whole, case["memory of a build"]


def test_a_model_with_batch_norms_trains_when_gathered_in_half_precision(cases):
    assert [found["norms"] for found in cases] == [[torch.float32] * 3] * len(cases)
