"""fairtrain-checkpoint: each command says and does what is so, in bounded memory, with the status that scripts rely on."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_file import write_checkpoint_file, write_checkpoint_folder
from tests.commands import fairtrain
from tests.dist.harness import run_ranks
from tests.resume.harness import first_difference
from tests.tools_states import read, run, run_json, saved, state
from trainer.tools.opened import open_any
from trainer.tools.statistics import Distance, Statistics

# ---- inspect


def test_inspect_of_the_folder_of_a_run_looks_into_its_last_checkpoint(tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    path = saved(folder / "checkpoint_1_10.pt")
    (folder / "checkpoint_last.pt").symlink_to(path)
    for of_run in (tmp_path, folder):
        status, report = run_json(capsys, "inspect", of_run)
        assert status == 0 and report["path"] == str(folder / "checkpoint_last.pt")


def test_inspect_tells_the_run_its_place_and_what_is_in_it(tmp_path, capsys):
    path = saved(tmp_path / "a.pt", num_updates=42)
    status, report = run_json(capsys, "inspect", path, "--tensors", "--stats", "--config", "--depth", 2)
    assert status == 0
    assert (report["task"], report["num_updates"], report["epoch"], report["position"], report["best"]) == (
        "toy",
        42,
        2,
        7,
        0.5,
    )
    assert report["model"]["elements"] == 24 + 16 + 3 + 1, "tied tensors count once"
    assert report["model"]["trained"] == 24 + 16 + 3
    assert [m["module"] for m in report["modules"]] == ["embed", "layers.0", "layers.1", "head", "steps"]
    assert "optimizer moments" in report["resumable"] and "task state" not in report["resumable"]
    assert report["config"] == read(path)["cfg"]
    by_name = {tensor["name"]: tensor for tensor in report["tensors"]}
    weight = read(path)["model"]["embed.weight"].double()
    found = by_name["model.embed.weight"]
    assert found["mean"] == pytest.approx(weight.mean().item()) and found["max"] == weight.max().item()
    assert found["std"] == pytest.approx(weight.std(correction=0).item())
    assert "optimizer.layers.0.weight.exp_avg" in by_name and "ema.head.bias" in by_name
    status, out, _ = run(capsys, "inspect", path, "--tensors", "--config")
    assert status == 0 and "update 42, epoch 2" in out and "lr: 0.1" in out


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(width=32), max_size=6), max_size=4))
def test_statistics_do_not_depend_on_how_a_tensor_is_cut(pieces):
    """Those of all values at once, what is not finite counted and left out."""
    found = Statistics()
    for piece in pieces:
        found.add(torch.tensor(piece, dtype=torch.float32))
    values = torch.tensor([x for piece in pieces for x in piece], dtype=torch.float32).double()
    finite = values[values.isfinite()]
    assert (found.count, found.num_finite) == (values.numel(), finite.numel())
    assert found.num_nan == int(values.isnan().sum())
    if finite.numel():
        scale = finite.abs().max().item() + 1e-30
        assert found.mean == pytest.approx(finite.mean().item(), abs=1e-9 * scale)
        assert found.std == pytest.approx(finite.std(correction=0).item(), abs=1e-6 * scale)
        assert (found.min, found.max) == (finite.min().item(), finite.max().item())


# ---- verify


def flip(path: Path) -> Path:
    """Change one byte of a tensor."""
    with open_any(path) as checkpoint:
        place = checkpoint.reader._source.places[checkpoint.state["model"]["embed.weight"]._record]
    data = bytearray(path.read_bytes())
    data[place.offset] ^= 1
    path.write_bytes(data)
    return path


def test_verify_names_each_kind_of_damage(tmp_path, capsys):
    good = saved(tmp_path / "good.pt")
    assert run(capsys, "verify", good)[0] == 0
    nan = state()
    nan["model"]["embed.weight"][1, 2] = float("nan")
    write_checkpoint_file(nan, tmp_path / "nan.pt")
    lost = {key: value for key, value in state().items() if key != "extra_state"}
    write_checkpoint_file(lost, tmp_path / "lost.pt")
    odd = state()
    odd["last_optimizer_state"]["param_groups"][0]["param_names"][0] = "nobody"
    write_checkpoint_file(odd, tmp_path / "odd.pt")
    for name, said in (
        ("nan", "model.embed.weight is not finite (1 NaN"),
        ("lost", "lacks extra_state"),
        ("odd", "nobody"),
    ):
        status, out, _ = run(capsys, "verify", tmp_path / f"{name}.pt")
        assert status == 1 and said in out, out
    infinite_mask = state()
    infinite_mask["model"]["mask"] = torch.tensor([0.0, float("-inf")])
    write_checkpoint_file(infinite_mask, tmp_path / "mask.pt")
    assert run(capsys, "verify", tmp_path / "mask.pt")[0] == 0, "a mask may hold infinities"


def test_verify_of_a_run_reads_each_content_once_and_finds_the_flipped_bit(tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    saved(folder / "checkpoint_1_10.pt")
    os.link(folder / "checkpoint_1_10.pt", folder / "checkpoint_last.pt")
    saved(folder / "checkpoint_1_5.pt", 1, 5)
    write_checkpoint_folder(state(), folder / "checkpoint_1_20")
    status, report = run_json(capsys, "verify", tmp_path / "run")
    assert status == 0 and report["ok"] and sorted(len(one["paths"]) for one in report["checkpoints"]) == [1, 1, 2]
    flip(folder / "checkpoint_1_5.pt")
    (folder / "checkpoint_best").symlink_to("gone")
    status, report = run_json(capsys, "verify", tmp_path / "run")
    assert status == 1
    bad = {os.path.basename(one["paths"][0]) for one in report["checkpoints"] if one["problems"]}
    assert bad == {"checkpoint_1_5.pt", "checkpoint_best"}


# ---- diff


def test_equal_checkpoints_are_said_to_be_identical_whatever_wrote_them(tmp_path, capsys):
    saved(tmp_path / "a.pt"), saved(tmp_path / "b.pt")
    write_checkpoint_folder(state(), tmp_path / "folder")
    for other in ("b.pt", "folder", "a.pt"):
        status, out, _ = run(capsys, "diff", tmp_path / "a.pt", tmp_path / other)
        assert status == 0 and "identical" in out


def test_a_difference_is_named_and_measured(tmp_path, capsys):
    saved(tmp_path / "a.pt")
    other = state(run_id="another")
    before = other["model"]["layers.0.weight"].clone()
    other["model"]["layers.0.weight"][1, 1] += 0.25
    other["model"]["new"] = torch.zeros(2)
    other["model"]["embed.weight"] = torch.zeros(6, 5)
    del other["model"]["head.bias"]
    other["cfg"]["optimization"]["lr"] = 0.2
    other["last_optimizer_state"]["state"][0]["exp_avg"][0, 0] = float("nan")
    write_checkpoint_file(other, tmp_path / "b.pt")
    status, found = run_json(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert status == 1 and not found["identical"]
    assert (found["added"], found["removed"]) == (["model.new"], ["model.head.bias"])
    assert [one["name"] for one in found["reshaped"]] == ["model.embed.weight"]
    changed = {one["name"]: one for one in found["changed"]}
    assert list(changed) == ["model.layers.0.weight", "model.layers.1.weight", "optimizer.embed.weight.exp_avg"]
    assert found["first_differing_tensor"] == "model.layers.0.weight"
    gap = changed["model.layers.0.weight"]
    assert gap["different"] == 1 and gap["max"] == pytest.approx(0.25)
    assert gap["relative_norm"] == pytest.approx(0.25 / before.norm().item(), rel=1e-5)
    assert found["config"] == [{"name": "optimization.lr", "a": 0.1, "b": 0.2}]
    assert {"name": "run_id", "a": "run", "b": "another"} in found["values"]
    status, out, _ = run(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert status == 1 and "first tensor that differs: model.layers.0.weight" in out


def test_numbers_alone_leaves_out_who_the_run_is(tmp_path, capsys):
    saved(tmp_path / "a.pt")
    saved(tmp_path / "b.pt", run_id="another", cfg={"run_dir": "elsewhere"})
    assert run(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")[0] == 1
    assert run(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt", "--numbers")[0] == 0
    assert (
        run(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt", "--ignore", "^run_id$", "--ignore", "^cfg[.]")[0] == 0
    )


def test_reordered_optimizer_state_is_compared_by_name(tmp_path, capsys):
    one = state()
    other = state()
    saved_state, group = other["last_optimizer_state"]["state"], other["last_optimizer_state"]["param_groups"][0]
    other["last_optimizer_state"]["state"] = {0: saved_state[2], 1: saved_state[0], 2: saved_state[1]}
    group["param_names"] = [group["param_names"][i] for i in (2, 0, 1)]
    write_checkpoint_file(one, tmp_path / "a.pt"), write_checkpoint_file(other, tmp_path / "b.pt")
    found = run_json(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")[1]
    assert not found["changed"] and [value["name"] for value in found["values"]] == ["optimizer.param_names.0"]


def test_a_distance_sees_the_sign_of_zero_and_not_nan_against_itself():
    gap = Distance()
    gap.add(torch.tensor([0.0, float("nan"), 1.0]), torch.tensor([-0.0, float("nan"), 1.0]))
    assert (gap.num_different, gap.max_difference, gap.relative_norm) == (1, 0.0, 0.0)


# ---- average


def fairseq_average(states):
    """What fairseq's scripts/average_checkpoints.py computes, said again."""
    sums = {}
    for one in states:
        for name, value in one["model"].items():
            value = value.float() if value.dtype == torch.float16 else value
            sums[name] = value.clone() if name not in sums else sums[name] + value
    return {
        name: total / len(states) if total.is_floating_point() else total // len(states) for name, total in sums.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_an_average_is_fairseqs_bit_for_bit(tmp_path, capsys, dtype):
    paths = [saved(tmp_path / f"{i}.pt", i, 10 + i, dtype) for i in (2, 0, 1)]
    assert run(capsys, "average", *paths, "-o", tmp_path / "mean.pt")[0] == 0
    mean, expected = read(tmp_path / "mean.pt"), fairseq_average([read(path) for path in paths])
    assert first_difference(mean["model"], expected) is None
    assert mean["model"]["layers.0.weight"].data_ptr() == mean["model"]["layers.1.weight"].data_ptr(), "tied stays tied"
    assert mean["last_optimizer_state"] is None and mean["optimizer_history"][-1]["num_updates"] == 12
    assert mean["run_id"] != "run", "no run counts it as its own"
    ema = [read(path)["extra_state"]["ema"]["head.bias"] for path in paths]
    assert torch.equal(mean["extra_state"]["ema"]["head.bias"], (ema[0] + ema[1] + ema[2]) / 3)
    assert run(capsys, "verify", tmp_path / "mean.pt")[0] == 0


def test_weights_weigh_and_one_file_is_itself(tmp_path, capsys):
    paths = [saved(tmp_path / f"{i}.pt", i) for i in range(2)]
    run(capsys, "average", *paths, "--weights", "3,1", "-o", tmp_path / "w.pt")
    a, b = (read(path)["model"]["embed.weight"].double() for path in paths)
    assert torch.allclose(read(tmp_path / "w.pt")["model"]["embed.weight"].double(), (3 * a + b) / 4, atol=1e-6)
    run(capsys, "average", paths[0], "-o", tmp_path / "same.pt")
    assert first_difference(read(tmp_path / "same.pt")["model"], read(paths[0])["model"]) is None


def test_the_last_and_the_best_of_a_folder_are_chosen_by_number(tmp_path, capsys):
    for i, update in enumerate((9, 10, 100)):
        saved(tmp_path / f"checkpoint_1_{update}.pt", i, update)
        saved(tmp_path / f"checkpoint.best_loss_{[0.5, 10.0, 9.5][i]!r}.pt", i, update)
    for option, names in (
        (("--last", 2), ["checkpoint_1_100.pt", "checkpoint_1_10.pt"]),
        (("--best", 2), ["checkpoint.best_loss_0.5.pt", "checkpoint.best_loss_9.5.pt"]),
    ):
        report = run_json(capsys, "average", tmp_path, *option, "-o", tmp_path / "mean.pt")[1]
        assert [os.path.basename(path) for path in report["inputs"]] == names


def test_what_cannot_be_averaged_is_refused_with_names(tmp_path, capsys):
    saved(tmp_path / "a.pt")
    other = state()
    del other["model"]["head.bias"]
    write_checkpoint_file(other, tmp_path / "b.pt")
    out = tmp_path / "mean.pt"
    for words, said in (
        (["average", tmp_path / "a.pt", tmp_path / "b.pt", "-o", out], "lacks head.bias"),
        (["average", tmp_path / "a.pt", "--weights", "1,2", "-o", out], "2 weights for 1 checkpoints"),
        (["average", tmp_path / "a.pt", "--weights", "x", "-o", out], "--weights x"),
        (["average", tmp_path, "--last", "3", "-o", out], "there are 0"),
        (["average", tmp_path / "gone.pt", "-o", out], "no such file"),
    ):
        status, _, err = run(capsys, *words)
        assert status == 2 and said in err, err
    assert not out.exists() and not list(tmp_path.glob(".*.tmp"))


# ---- export and import


@pytest.mark.parametrize("options", [[], ["--ema"], ["--dtype", "bfloat16"]])
def test_exported_weights_are_those_of_the_checkpoint(tmp_path, capsys, options):
    library = pytest.importorskip("safetensors.torch")
    path = saved(tmp_path / "a.pt")
    whole = read(path)
    expected = {**whole["model"], **(whole["extra_state"]["ema"] if "--ema" in options else {})}
    if "--dtype" in options:
        expected = {name: t.bfloat16() if t.is_floating_point() else t for name, t in expected.items()}
    assert run(capsys, "export", path, "-o", tmp_path / "a.safetensors", "--format", "safetensors", *options)[0] == 0
    assert run(capsys, "export", path, "-o", tmp_path / "bare.pt", "--format", "state_dict", *options)[0] == 0
    for found in (library.load_file(tmp_path / "a.safetensors"), read(tmp_path / "bare.pt")):
        assert first_difference({name: found[name] for name in expected}, expected) is None and len(found) == len(
            expected
        )
    assert run(capsys, "import", tmp_path / "bare.pt", "-o", tmp_path / "back.pt")[0] == 0
    assert first_difference(read(tmp_path / "back.pt")["model"], expected) is None
    assert run(capsys, "verify", tmp_path / "back.pt")[0] == 0


def test_a_hugging_face_folder_has_the_config_and_shards_with_an_index(tmp_path, capsys):
    library = pytest.importorskip("safetensors.torch")
    target = "trainer.tasks.language_modeling.model.TransformerLM"
    path = saved(tmp_path / "a.pt", cfg={"model": {"_target_": target, "dim": 4}})
    assert (
        run(capsys, "export", path, "-o", tmp_path / "hf", "--format", "huggingface", "--max-shard-size", "1e-7")[0]
        == 0
    )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == {
        "model_type": "fairtrain_transformer_lm",
        "architectures": ["TransformerLM"],
        "_target_": target,
        "dim": 4,
    }
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = {name: library.load_file(tmp_path / "hf" / file)[name] for name, file in index["weight_map"].items()}
    assert first_difference({name: found[name] for name in read(path)["model"]}, read(path)["model"]) is None
    status, _, err = run(capsys, "export", path, "-o", tmp_path / "hf", "--format", "huggingface")
    assert status == 2 and "exists" in err
    status, _, err = run(capsys, "export", saved(tmp_path / "b.pt"), "-o", tmp_path / "x", "--format", "huggingface")
    assert status == 2 and "--format safetensors" in err
    assert not (tmp_path / "x").exists()


def test_a_folder_is_imported_as_the_file_that_the_run_would_have_written(tmp_path, capsys):
    write_checkpoint_file(state(), tmp_path / "file.pt")
    write_checkpoint_folder(state(), tmp_path / "folder")
    assert run(capsys, "import", tmp_path / "folder", "-o", tmp_path / "from_folder.pt")[0] == 0
    assert first_difference(read(tmp_path / "from_folder.pt"), read(tmp_path / "file.pt")) is None


# ---- prune


def run_folder(tmp_path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for update in (9, 10, 100):
        saved(folder / f"checkpoint_1_{update}.pt", update, update)
    saved(folder / "checkpoint_1_7.pt", 7, 7, run_id="somebody else's")
    os.link(folder / "checkpoint_1_100.pt", folder / "checkpoint_last.pt")
    return folder


def test_prune_deletes_nothing_unless_told_and_then_what_it_said(tmp_path, capsys):
    folder = run_folder(tmp_path)
    before = sorted(os.listdir(folder))
    status, told = run_json(capsys, "prune", tmp_path / "run", "--keep-interval-updates", 1)
    assert status == 0 and sorted(map(os.path.basename, told["stale"])) == ["checkpoint_1_10.pt", "checkpoint_1_9.pt"]
    assert sorted(os.listdir(folder)) == before
    status, done = run_json(capsys, "prune", tmp_path / "run", "--keep-interval-updates", 1, "--apply")
    assert status == 0 and done["deleted"] == told["stale"]
    assert sorted(os.listdir(folder)) == ["checkpoint_1_100.pt", "checkpoint_1_7.pt", "checkpoint_last.pt"]


def test_prune_follows_the_runs_own_rule_and_refuses_nonsense(tmp_path, capsys):
    run_folder(tmp_path)
    assert run_json(capsys, "prune", tmp_path / "run")[1]["stale"] == [], "keep_interval_updates is -1 by default"
    assert run(capsys, "prune", tmp_path / "run", "--keep-interval-updates", "-2")[0] == 2
    assert run(capsys, "prune", tmp_path / "gone")[0] == 2
    (tmp_path / "empty").mkdir()
    assert run(capsys, "prune", tmp_path / "empty")[0] == 2


# ---- merge-config


def test_merge_config_shows_saved_typed_and_result(tmp_path, capsys):
    hydra = tmp_path / "run" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text(
        "task: {_target_: tests.resume.task.Toy}\noptimization: {lr: 0.1, max_update: 5}\nlr_scheduler: {_target_: trainer.lr_scheduler.Cosine, warmup_updates: 3}\n"
    )
    words = [
        "merge-config",
        tmp_path / "run",
        "optimization.lr=0.2",
        "lr_scheduler=fixed",
        "task._target_=tests.resume.task.Toy",
    ]
    status, report = run_json(capsys, *words)
    rows = {row["key"]: (row["saved"], row["typed"], row["result"]) for row in report["rows"]}
    assert status == 0 and rows["optimization.lr"] == (0.1, "0.2", 0.2)
    assert rows["lr_scheduler._target_"][1:] == ("lr_scheduler=fixed", "trainer.lr_scheduler.Fixed")
    assert "optimization.max_update" not in rows
    status, _, err = run(capsys, "merge-config", tmp_path / "run", "optimization.lrr=1")
    assert status == 2 and "optimization.lr" in err


# ---- all of them


def test_what_is_no_checkpoint_is_bad_input_and_damage_is_damage(tmp_path, capsys):
    (tmp_path / "text").write_text("hello")
    damaged = flip(saved(tmp_path / "damaged.pt"))
    good, out = saved(tmp_path / "good.pt"), tmp_path / "out"
    for path, expected in ((tmp_path / "text", 2), (tmp_path / "gone", 2), (damaged, 1)):
        for words in (
            ["inspect", path, "--stats"],
            ["diff", path, good],
            ["average", path, good, "-o", out],
            ["export", path, "-o", out, "--format", "safetensors"],
            ["export", path, "-o", out, "--format", "state_dict"],
            ["import", path, "-o", out],
        ):
            status, _, err = run(capsys, *words)
            assert status == expected and path.name in err and "Traceback" not in err, (words, status, err)
            assert not out.exists() and sorted(os.listdir(tmp_path)) == ["damaged.pt", "good.pt", "text"], words
    assert run(capsys, "verify", damaged)[0] == 1


def test_the_command_runs_in_a_process_of_its_own(tmp_path):
    path = saved(tmp_path / "a.pt")
    done = fairtrain("inspect", str(path), cwd=tmp_path, module="trainer.tools.checkpoint")
    assert done.status == 0 and "resumable" in done.output


# ---- memory

LARGE = 96 << 20


def _write_large(folder: str) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        weights = {f"layers.{i}.weight": torch.randn(LARGE // 32) for i in range(4)}
        model = {**weights, "wide": torch.randn(3, LARGE // 24).t()}
        one = {**state(seed), "model": model, "last_optimizer_state": None, "extra_state": {}}
        write_checkpoint_file(one, f"{folder}/{seed}.pt")
    write_checkpoint_folder(one, f"{folder}/folder")


def _peaks_of(commands: list[list[str]]) -> list[tuple[int, int]]:
    """(status, the most anonymous memory in bytes beyond what the process had before) of each command."""
    from trainer.tools import checkpoint

    def anonymous() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    def peak_of(words: list[str]) -> tuple[int, int]:
        done, peak, before = threading.Event(), [0], anonymous()

        def watch() -> None:
            while not done.wait(0.002):
                peak[0] = max(peak[0], anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        status = checkpoint.main(words)
        done.set()
        watcher.join()
        return status, peak[0] - before

    peak_of(["inspect", commands[0][1]])  # what is imported at the first use
    return [peak_of(words) for words in commands]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="RssAnon is Linux's")
def test_no_command_needs_the_memory_that_a_file_would_fill(tmp_path):
    run_ranks(_write_large, 1, str(tmp_path), timeout=120)
    a, b, folder = (str(tmp_path / name) for name in ("0.pt", "1.pt", "folder"))
    assert os.path.getsize(a) >= LARGE
    commands = {
        ("inspect", a, "--stats"): 0,
        ("verify", folder): 0,
        ("diff", a, folder): 1,
        ("average", a, b, "-o", str(tmp_path / "mean.pt")): 0,
        ("export", a, "-o", str(tmp_path / "a.safetensors"), "--format", "safetensors", "--dtype", "bfloat16"): 0,
        ("import", folder, "-o", str(tmp_path / "imported.pt")): 0,
    }
    (found,) = run_ranks(_peaks_of, 1, list(map(list, commands)), timeout=120)
    for (words, expected), (status, peak) in zip(commands.items(), found):
        assert status == expected and peak < 48 << 20, (words, status, peak >> 20)
    shutil.rmtree(tmp_path)
