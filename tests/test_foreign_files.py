"""Files of other programs, opened as names and records: nothing is run, every byte comes out as torch would give it."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import json
import os
import pathlib
import pickle
import struct
import threading

import numpy as np
import pytest
import torch
from torch import nn

import checkpoint_file
from checkpoint_file import CheckpointDamagedError, NotACheckpointError, open_local_checkpoint


def loaded(path) -> object:
    with open_local_checkpoint(path, own_format=False) as reader:
        return reader.materialize(reader.skeleton)


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


class Colour(enum.Enum):
    RED = "red"


class Settings:
    def __init__(self) -> None:
        self.width, self.path = 3, pathlib.PosixPath("/data/x")


def odd_state() -> dict:
    base = torch.arange(24, dtype=torch.float32)
    return {
        "model": {"a": base[2:14].view(3, 4).t(), "b": base, "half": torch.randn(5).half(), "none": torch.empty(0, 3),
                  "flag": torch.tensor(True), "bf": torch.randn(2, 2, dtype=torch.bfloat16), "n": torch.tensor(7)},
        "epoch": 3,
    }  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("read_method", ["pread", "mmap", "auto"])
def test_both_layouts_of_torch_give_what_torch_gives(tmp_path, zipped, read_method):
    torch.save(odd_state(), tmp_path / "any.name", _use_new_zipfile_serialization=zipped)
    expected = torch.load(tmp_path / "any.name", weights_only=True)
    with open_local_checkpoint(tmp_path / "any.name", own_format=False, read_method=read_method) as reader:
        found = reader.materialize(reader.skeleton)
        assert equal(found, expected)
        assert found["model"]["a"].untyped_storage().data_ptr() == found["model"]["b"].untyped_storage().data_ptr()
        targets = {name: torch.zeros_like(tensor) for name, tensor in expected["model"].items()}
        reader.copy([(reader.skeleton["model"][name], target) for name, target in targets.items()])
        assert equal(targets, dict(expected["model"]))


@pytest.mark.parametrize("zipped", [True, False])
def test_objects_become_the_plain_data_in_them(tmp_path, zipped):
    state = {
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.98), inner=argparse.Namespace(x=[1])),
        "counts": collections.defaultdict(list, {"a": [1]}),
        "settings": Settings(),
        "colour": [Colour.RED, np.float64(0.5), np.int64(3), np.arange(6.0).reshape(2, 3), {"s"}, b"\x00\xff"],
        "device": torch.device("cuda:1"),
        "kind": argparse.Namespace,
        "weight": nn.Parameter(torch.ones(2)),
    }
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    found = loaded(tmp_path / "a.pt")
    assert found["args"] == {"lr": 0.1, "betas": (0.9, 0.98), "inner": {"x": [1]}}
    assert found["counts"] == {"a": [1]} and found["settings"] == {"width": 3, "path": "/data/x"}
    assert found["colour"][1:] == [0.5, 3, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], ["s"], b"\x00\xff"]
    assert found["device"] == "cuda:1" and found["kind"] == "argparse.Namespace"
    assert torch.equal(found["weight"], torch.ones(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.tied = self.layers[0]
        self.register_buffer("cache", torch.ones(1), persistent=False)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_module_saved_whole_is_its_state_dict(tmp_path, zipped):
    net = Net()
    torch.save({"model": net, "epoch": 2}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert equal(loaded(tmp_path / "a.pt")["model"], dict(net.state_dict()))


class Evil:
    def __init__(self, call, *arguments) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def evil_objects(marker: str) -> list[Evil]:
    import builtins
    import subprocess

    return [
        Evil(os.system, f"touch {marker}"),
        Evil(builtins.eval, f"open({marker!r}, 'w')"),
        Evil(builtins.exec, f"open({marker!r}, 'w')"),
        Evil(getattr, argparse.Namespace, "__init__"),
        Evil(subprocess.Popen, ["touch", marker]),
        Evil(functools.partial, os.mkdir, marker),
        Evil(torch.hub.load, marker, "x"),
        Evil(torch.load, marker),
        Evil(np.save, marker, 1),
        Evil(pathlib.Path.touch, pathlib.PosixPath(marker)),
        Evil(open, marker, "w"),
        Evil(pickle.loads, b"cos\nsystem\n."),
    ]


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("layout", ["zip", "old"])
def test_a_file_that_names_a_function_is_refused_and_nothing_is_run(tmp_path, number, layout):
    marker = tmp_path / "was_run"
    evil = evil_objects(str(marker))[number]
    torch.save(
        {"model": {"w": torch.ones(2)}, "x": evil}, tmp_path / "a.pt", _use_new_zipfile_serialization=layout == "zip"
    )
    with pytest.raises(NotACheckpointError, match="nothing of it was run"):
        loaded(tmp_path / "a.pt")
    assert not marker.exists()


def write_safetensors(path, tensors: dict[str, torch.Tensor], **entries) -> None:
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps({**header, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


SOME = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.ones(3, dtype=torch.bool), "d": torch.tensor(1.5),
        "e": torch.randn(7).bfloat16(), "f": torch.empty(0, 2)}  # fmt: skip


def test_safetensors_are_read_at_any_offset(tmp_path):
    for padding in range(5):
        write_safetensors(tmp_path / "x", SOME, __metadata__={"k": "v" * padding})
        assert equal(loaded(tmp_path / "x"), SOME)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"shape": [4]},
        3,
    ],
)
def test_safetensors_that_make_no_sense_are_refused(tmp_path, entry):
    write_safetensors(tmp_path / "x", SOME, evil=entry)
    with pytest.raises((CheckpointDamagedError, NotACheckpointError)):
        loaded(tmp_path / "x")


@pytest.mark.parametrize("layout", ["safetensors", "old"])
def test_a_file_cut_anywhere_is_refused(tmp_path, layout):
    path = tmp_path / "x"
    write_safetensors(path, SOME) if layout == "safetensors" else torch.save(
        SOME, path, _use_new_zipfile_serialization=False
    )
    whole = path.read_bytes()
    for size in [*range(0, len(whole) - 1, 7), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises((CheckpointDamagedError, NotACheckpointError)):
            loaded(path)


def test_parts_that_an_index_joins_are_one_checkpoint(tmp_path):
    first, second = dict(list(SOME.items())[:3]), dict(list(SOME.items())[3:])
    write_safetensors(tmp_path / "one", first)
    torch.save(second, tmp_path / "two")
    names = {**dict.fromkeys(first, "one"), **dict.fromkeys(second, "two")}
    (tmp_path / "any.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert equal(loaded(tmp_path / "any.index.json"), SOME)
    assert checkpoint_file.verify_checkpoint(tmp_path) != []  # safetensors keep no checksums, which it says
    (tmp_path / "two").unlink()
    with pytest.raises(CheckpointDamagedError, match="two that it names is missing"):
        loaded(tmp_path / "any.index.json")


def test_an_index_does_not_lead_out_of_its_folder(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.index.json").write_text(json.dumps({"weight_map": {"w": "../secret"}}))
    with pytest.raises(NotACheckpointError, match="not beside it"):
        loaded(tmp_path / "a" / "x.index.json")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_nest_that_holds_itself_comes_to_an_end(tmp_path, zipped):
    node = argparse.Namespace(value=1)
    node.parent = node
    torch.save({"args": node}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert loaded(tmp_path / "a.pt") == {"args": {"value": 1, "parent": None}}


def anonymous_bytes() -> int:
    (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("layout", ["old", "safetensors"])
def test_files_without_a_directory_are_streamed_too(tmp_path, layout):
    tensors = {str(i): torch.full((4, 1 << 20), float(i)) for i in range(6)}  # 96 MiB
    if layout == "old":
        torch.save({"model": tensors}, tmp_path / "x", _use_new_zipfile_serialization=False)
    else:
        write_safetensors(tmp_path / "x", tensors)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    before, peak, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with open_local_checkpoint(tmp_path / "x", own_format=False) as reader:
        saved = reader.skeleton.get("model", reader.skeleton)
        reader.copy([(saved[name], target) for name, target in targets.items()])
    done.set()
    watcher.join()
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())
    assert peak[0] - before < 24 << 20, f"{(peak[0] - before) >> 20} MiB beside what is filled"
