"""Properties of a folder of torch.distributed.checkpoint, written and read by one process. Numbers in brackets are the
invariants of docs/checkpoint.md. tests/dist/test_checkpoint_folder.py is about several ranks, tests/
test_checkpoint_folders.py about the folders of a run.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import checkpoint_file
from checkpoint_file import (
    CheckpointDamagedError,
    CheckpointError,
    NotACheckpointError,
    UnsavableValueError,
    archive,
    dcp_metadata,
    folder_writing,
    sources,
    writing,
)
from tests.test_checkpoint_file import ODD, assert_same, make_state, rss_anon

VALUES = {"none": None, "list": [1, 2.5, True, "ü", 3j, -(2**70)], "nested": {"a": ({}, [], ()), 3: OrderedDict(b=1)}}


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "folder"


def read_all(path, **options) -> dict:
    with checkpoint_file.open_checkpoint(path, **options) as reader:
        return reader.materialize(reader.skeleton)


def saved_by_torch(state: dict, folder) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def test_every_kind_of_tensor_and_value_comes_back_equal(folder):  # [D1]
    state = make_state(ODD, values=VALUES, inside=[ODD["plain"], (torch.ones(2),)])
    nbytes = checkpoint_file.write_checkpoint_folder(state, folder)
    assert nbytes == sum(path.stat().st_size for path in folder.iterdir())
    assert_same(read_all(folder), state)
    assert checkpoint_file.verify_checkpoint(folder) == []


def test_the_same_memory_is_written_once_and_is_the_same_after_loading(folder):  # [F4]
    w = torch.randn(1000)
    checkpoint_file.write_checkpoint_folder(make_state({"a": w, "b": w, "c": torch.nn.Parameter(w)}), folder)
    assert (folder / "__0_0.distcp").stat().st_size < 2 * w.nbytes
    model = read_all(folder)["model"]
    assert len({t.data_ptr() for t in model.values()}) == 1


def test_a_strided_view_costs_its_own_bytes(folder):  # [F4]
    base = torch.randn(1000, 1000)
    checkpoint_file.write_checkpoint_folder(make_state({"view": base[:, ::100]}), folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 60_000
    assert_same(read_all(folder)["model"]["view"], base[:, ::100])


def test_memory_is_bounded_whatever_the_size(folder, monkeypatch):  # [F6]
    state = make_state(
        {"w": torch.ones(32 << 20), "t": torch.ones(2048, 1024).t(), "s": torch.ones(4096, 1024)[:, ::2]}
    )
    peak = []

    def watched(original):
        def call(*args):
            peak.append(rss_anon())
            return original(*args)

        return call

    monkeypatch.setattr(writing, "write_all", watched(writing.write_all))
    monkeypatch.setattr(sources.RecordSource, "read_into", watched(sources.RecordSource.read_into))
    before = rss_anon()
    checkpoint_file.write_checkpoint_folder(state, folder)
    assert max(peak) - before < 32 << 20
    target = torch.zeros(32 << 20)
    peak, before = peak.clear() or peak, rss_anon()
    with checkpoint_file.open_checkpoint(folder) as reader:
        reader.copy([(reader.skeleton["model"]["w"], target)])
    assert max(peak) - before < 32 << 20 and target.sum() == 32 << 20


def test_a_value_that_would_not_come_back_is_refused_by_its_key_path(folder):  # [F2]
    with pytest.raises(UnsavableValueError, match=r"state\['x'\]\[1\]"):
        checkpoint_file.write_checkpoint_folder({"x": [1, {2}]}, folder)
    assert not folder.exists()


def test_names_that_meet_after_flattening_stay_apart(folder):
    state = make_state({"a.b": torch.ones(2), "a": {"b": torch.zeros(3)}, "a.b~": torch.full((2,), 4.0)})
    checkpoint_file.write_checkpoint_folder(state, folder)
    assert_same(read_all(folder), state)


# ---- damage


def outcome(folder) -> dict | None:
    try:
        return read_all(folder)
    except CheckpointError as error:
        assert str(folder) in str(error)
        return None


def test_a_flipped_byte_at_any_place_is_noticed_or_means_nothing(folder):  # [R2]
    state = make_state({"w": torch.arange(9.0).reshape(3, 3), "v": torch.arange(4)}, values=VALUES)
    checkpoint_file.write_checkpoint_folder(state, folder)
    for name in os.listdir(folder):
        whole = (folder / name).read_bytes()
        for at in range(0, len(whole), 11):
            raw = bytearray(whole)
            raw[at] ^= 1 << at % 8
            (folder / name).write_bytes(raw)
            found = outcome(folder)
            assert name != ".metadata" or found is None
            if found is not None:
                assert_same(found, state)
            if name != folder_writing.OWN_RECORD:  # an ordinary file of ours, which tests/test_checkpoint_file.py flips
                assert checkpoint_file.verify_checkpoint(folder), (name, at)
        (folder / name).write_bytes(whole)
    assert_same(read_all(folder), state)


def test_a_folder_with_a_checksum_for_each_block_of_a_box_is_read_and_checked(folder):  # as folders were at first
    w = torch.arange(700_000.0)
    checkpoint_file.write_checkpoint_folder(make_state({"w": w}), folder)
    record = torch.load(folder / "fairtrain.pt", weights_only=True)
    data = w.numpy().tobytes()
    record["block_bytes"] = 1 << 20
    blocks = [archive.crc32(data[begin : begin + (1 << 20)]) for begin in range(0, len(data), 1 << 20)]
    record["checksums"] = torch.tensor(blocks)
    torch.save(record, folder / "fairtrain.pt")
    assert len(blocks) == 3 and torch.equal(read_all(folder)["model"]["w"], w)
    change(folder / "__0_0.distcp", w[600_000:600_010].numpy().tobytes())
    with pytest.raises(CheckpointDamagedError, match="model.w"):
        read_all(folder)


def test_a_truncated_or_missing_part_is_noticed_at_the_choice(folder):  # [R2]
    checkpoint_file.write_checkpoint_folder(make_state({"w": torch.arange(900.0)}), folder)
    for name in os.listdir(folder):
        whole = (folder / name).read_bytes()
        for keep in (0, 1, len(whole) // 2, len(whole) - 1):
            (folder / name).write_bytes(whole[:keep])
            with pytest.raises(CheckpointError):
                checkpoint_file.open_checkpoint(folder)
            assert checkpoint_file.verify_checkpoint(folder)
        (folder / name).unlink()
        with pytest.raises(CheckpointError):
            checkpoint_file.open_checkpoint(folder)
        (folder / name).write_bytes(whole)


def change(path: Path, at: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[raw.index(at) + 5] ^= 4
    path.write_bytes(raw)


CHANGED = "does not have the checksum it was written with"
TENSOR = "model.w (byte 704 of __0_0.distcp)"


@pytest.mark.parametrize(
    "name, harm, sentence",
    [
        (TENSOR, lambda part: change(part, torch.arange(400.0, 410.0).numpy().tobytes()), f"record {TENSOR} {CHANGED}"),
        ("__0_0.distcp", lambda part: os.truncate(part, 1000), "its part __0_0.distcp has 1,000 bytes instead of "),
        ("__0_0.distcp", os.unlink, "its part __0_0.distcp is missing"),
        (".metadata", lambda part: change(part, b"offsets"), f"its part .metadata {CHANGED}"),
        (".metadata", os.unlink, "has parts but no .metadata: its save did not come to its end"),
        ("fairtrain.pt", lambda part: change(part, b"version"), f"its fairtrain.pt is damaged (record data.pkl {CHANGED})"),
        ("fairtrain.pt", lambda part: os.truncate(part, 0), "its fairtrain.pt is damaged (it has no readable directory"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_sentence_that_says_where(folder, name, harm, sentence):  # [R2]
    checkpoint_file.write_checkpoint_folder(make_state({"w": torch.arange(900.0)}), folder)
    harm(folder / ("__0_0.distcp" if name == TENSOR else name))
    with pytest.raises(CheckpointDamagedError) as error:
        read_all(folder)
    (verified,) = checkpoint_file.verify_checkpoint(folder)
    assert str(error.value).startswith(f"{folder}: {sentence}") and str(error.value).startswith(verified)
    assert error.value.record in (name, None)


def test_a_flipped_bit_in_a_folder_of_torch_is_noticed(folder):  # [R2]
    saved_by_torch({"model": {"w": torch.arange(900.0)}}, folder)
    part = folder / "__0_0.distcp"
    raw = bytearray(part.read_bytes())
    raw[raw.index(torch.arange(400.0, 410.0).numpy().tobytes()) + 2] ^= 1
    part.write_bytes(raw)
    with pytest.raises(CheckpointDamagedError, match="checksum"):
        read_all(folder, own_format=False)
    assert "checksum" in checkpoint_file.verify_checkpoint(folder)[0]


def test_a_metadata_that_does_not_cover_a_tensor_once_is_refused():
    def problem(*boxes) -> str | None:
        chunks = [dcp_metadata.StoredChunk(dcp_metadata.Box(*box), "f", 0, 1) for box in boxes]
        return dcp_metadata.cover_problem(dcp_metadata.StoredTensor(torch.float32, (4, 4), chunks))

    assert problem(((0, 0), (4, 2)), ((0, 2), (4, 2))) is None
    assert "elements are stored" in problem(((0, 0), (4, 2)))
    assert "overlap" in problem(((0, 0), (4, 2)), ((0, 1), (4, 2)))
    assert "outside" in problem(((0, 0), (4, 2)), ((1, 2), (4, 2)))


# ---- nothing is executed


class Attack:
    def __init__(self, trace) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("where", ["top", "planner_data", "fqn"])
def test_a_malicious_metadata_runs_nothing(folder, tmp_path, where):  # [F7]
    from torch.distributed.checkpoint.metadata import Metadata

    checkpoint_file.write_checkpoint_folder(make_state({"w": torch.ones(3)}), folder)
    os.unlink(folder / folder_writing.OWN_RECORD)  # as of another program
    attack = Attack(tmp_path / "run")
    made = {
        "top": attack,
        "planner_data": Metadata({}, planner_data=attack, storage_data={}),
        "fqn": Metadata({"a": attack}, storage_data={}),
    }
    (folder / ".metadata").write_bytes(pickle.dumps(made[where]))
    with pytest.raises(NotACheckpointError, match="mkdir.*nothing of it was run"):
        checkpoint_file.open_checkpoint(folder, own_format=False)
    assert "mkdir" in checkpoint_file.verify_checkpoint(folder)[0]
    assert not (tmp_path / "run").exists()


def test_a_malicious_value_runs_nothing_and_is_left_out(folder, tmp_path, caplog):  # [F7]
    saved_by_torch({"model": {"w": torch.ones(3)}, "x": Attack(tmp_path / "run")}, folder)
    assert_same(read_all(folder, own_format=False), {"model": {"w": torch.ones(3)}})
    assert "x is left out" in caplog.text and "mkdir" in caplog.text and not (tmp_path / "run").exists()


def test_a_part_outside_the_folder_is_refused(folder, monkeypatch):
    saved_by_torch({"w": torch.ones(3)}, folder)
    contents = dcp_metadata.parse_metadata((folder / ".metadata").read_bytes(), str(folder))
    contents.tensors["w"].chunks[0].file = "../outside"
    (folder / ".metadata").write_bytes(dcp_metadata.pack_metadata(contents.tensors, contents.paths))
    with pytest.raises(CheckpointDamagedError, match="no name of a file in the folder"):
        read_all(folder, own_format=False)


# ---- folders of other programs


def test_what_torch_flattened_is_a_nest_again(folder):  # [D2]
    state = {
        "model": {"layers.0.w": torch.randn(2, 3), "e": torch.empty(0, 4)},
        "optimizer": {"state": [{"m": torch.ones(2)}, {"m": torch.ones(1)}], "lr": 0.1},
        "values": VALUES["list"],
        "size": (1, 2),
    }
    saved_by_torch(state, folder)
    assert_same(read_all(folder, own_format=False), state)


def test_a_transformed_folder_is_refused_with_a_sentence(folder):
    from torch.distributed.checkpoint import filesystem

    assert "transform_descriptors" in filesystem._StorageInfo.__dataclass_fields__
    saved_by_torch({"w": torch.ones(3)}, folder)
    whole = pickle.loads((folder / ".metadata").read_bytes())
    for info in whole.storage_data.values():
        info.transform_descriptors = ["zstd"]
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    with pytest.raises(NotACheckpointError, match="transformed .zstd."):
        read_all(folder, own_format=False)
