"""Properties of one checkpoint file. Numbers in brackets are the invariants of docs/checkpoint.md."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import checkpoint_file
from checkpoint_file import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    NotACheckpointError,
    TensorRef,
    UnsavableValueError,
    archive,
    open_checkpoint,
    verify_file,
    write_checkpoint_file,
    writing,
)
from checkpoint_file.sources import READ_METHODS

BASE = torch.randn(40, 30)
WEIGHT = nn.Parameter(torch.randn(5, 7))
ODD = {
    "plain": torch.randn(3, 4),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "empty_bf16": torch.empty(2, 0, dtype=torch.bfloat16),
    "transposed": torch.randn(6, 4).t(),
    "permuted": torch.randn(3, 4, 5).permute(2, 0, 1),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "strided": torch.randn(100, 60)[::7, 3:9],
    "row_of_large": torch.randn(500, 50)[17],
    "expanded": torch.randn(1, 3).expand(5, 3),
    "expanded_scalar": torch.tensor(1.5).expand(4, 2),
    "expanded_strided": torch.randn(8, 6)[::2, :1].expand(4, 9),
    "overlapping": torch.arange(9.0).unfold(0, 4, 1),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([2**62, -1]),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "half": torch.randn(9).half(),
    "bf16": torch.randn(11).bfloat16(),
    "float8": torch.randn(13).to(torch.float8_e4m3fn),
    "complex": torch.randn(4, 2, dtype=torch.complex64),
    "conjugate": torch.randn(4, 2, dtype=torch.complex64).t().conj(),
    "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    "base": BASE,
    "view_of_base": BASE[3:5],
    "strided_view_of_base": BASE[:, ::3],
    "weight": WEIGHT,
    "tied": WEIGHT,
    "half_of_base_a": BASE.view(-1)[:700],
}


def make_state(tensors: dict, **more) -> dict:
    return {"format_version": 1, "run_id": "r", "model": dict(tensors), **more}


def as_bytes(t: torch.Tensor) -> bytes:
    fresh = t.detach().clone(memory_format=torch.contiguous_format)
    return fresh.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(left, right, keys="state") -> None:
    """Equal in type, value, dtype, shape and bits."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), keys
        assert (left.dtype, left.shape) == (right.dtype, right.shape), keys
        assert as_bytes(left) == as_bytes(right), keys
    elif isinstance(left, dict):
        assert type(left) is type(right) and list(left) == list(right), keys
        for key in left:
            assert_same(left[key], right[key], f"{keys}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert type(left) is type(right) and len(left) == len(right), keys
        for i, pair in enumerate(zip(left, right)):
            assert_same(*pair, f"{keys}[{i}]")
    else:
        assert type(left) is type(right) and (left == right or left != left), keys


def read_all(path, **options) -> dict:
    with open_checkpoint(path, **options) as reader:
        return reader.materialize(reader.skeleton)


def targets_for(refs: dict) -> dict:
    return {name: torch.full(ref.shape, 7.0).to(ref.dtype) for name, ref in refs.items()}


def rss_anon() -> int:
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "file.pt"


# ---- written and read back


def test_every_kind_of_tensor_and_value_comes_back_equal_by_torch_and_by_us(path):  # [F1]
    plain = {"none": None, "flags": [True, 1, 1.5, 2j, "t\u00e9xt", float("inf")], "deep": {1: ({"a": ()},), "b": OrderedDict(x=1)}}
    state = make_state(ODD, task_state=plain, big=2**1500)
    assert write_checkpoint_file(state, path) == path.stat().st_size
    assert_same(torch.load(path, weights_only=True), state)
    assert_same(torch.load(path, weights_only=True, mmap=True), state)
    for read_method in READ_METHODS:
        assert_same(read_all(path, read_method=read_method), state)


@pytest.mark.parametrize("read_method", READ_METHODS)
@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_bytes_go_into_tensors_of_any_layout(path, monkeypatch, read_method, chunk):
    monkeypatch.setattr(archive, "CHUNK_BYTES", chunk)
    write_checkpoint_file(make_state(ODD), path)
    with open_checkpoint(path, read_method=read_method) as reader:
        for change in (lambda t: t, lambda t: t.t().contiguous().t() if t.dim() == 2 else t):
            targets = {name: change(t) for name, t in targets_for(reader.skeleton["model"]).items()}
            reader.copy([(reader.skeleton["model"][name], target) for name, target in targets.items()])
            for name, target in targets.items():
                assert as_bytes(target) == as_bytes(ODD[name]), name


def test_copying_converts_the_dtype(path):
    write_checkpoint_file(make_state({"a": torch.tensor([1.5, 2.0])}), path)
    target = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    with open_checkpoint(path) as reader:
        reader.copy([(reader.skeleton["model"]["a"], target)])
    assert target.tolist() == [1.5, 2.0] and target.dtype is torch.bfloat16 and target.requires_grad


layouts = st.sampled_from(["plain", "transposed", "strided", "expanded", "slice", "flat_view"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            layouts,
            st.lists(st.integers(0, 5), max_size=4),
            st.sampled_from([torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.complex64, torch.uint8]),
            st.integers(0, 3),
        ),
        max_size=8,
    ),
    st.sampled_from([16, 48, 1 << 20]),
)
def test_any_mix_of_views_of_a_few_bases_comes_back_equal(tmp_path_factory, plans, chunk):  # [F1]
    bases = [torch.randint(-9, 9, (4096,)) for _ in range(4)]
    tensors = {}
    for i, (layout, shape, dtype, which) in enumerate(plans):
        base = bases[which].to(dtype) if which % 2 else bases[which].to(torch.uint8).clone().view(torch.uint8)
        if which == 0:  # views of one memory in one dtype
            base = bases[0]
        numel = int(np.prod(shape)) if shape else 1
        t = base[which : which + numel].view(shape)
        if layout == "transposed" and t.dim() > 1:
            t = t.transpose(0, -1)
        elif layout == "strided" and t.dim():
            t = t[::2]
        elif layout == "slice":
            t = base.view(64, 64)[1:4, which : which + 5]
        elif layout == "expanded":
            t = t.unsqueeze(0).expand(3, *t.shape)
        elif layout == "flat_view":
            t = base[10:90]
        tensors[f"t{i}"] = t
    path = tmp_path_factory.mktemp("mix") / "f.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive, "CHUNK_BYTES", chunk)
        write_checkpoint_file(make_state(tensors), path)
        assert_same(torch.load(path, weights_only=True)["model"], tensors)
        assert_same(read_all(path)["model"], tensors)
        assert verify_file(path) == []
        with open_checkpoint(path) as reader:
            targets = {name: t.t() if t.dim() == 2 else t for name, t in targets_for(reader.skeleton["model"]).items()}
            targets = {name: t.contiguous().t() if t.dim() == 2 else t for name, t in targets.items()}
            reader.copy([(reader.skeleton["model"][name], target) for name, target in targets.items()])
        assert_same(targets, tensors)


def test_a_strided_tensor_may_end_in_a_piece_of_one_element(path, monkeypatch):
    monkeypatch.setattr(archive, "CHUNK_BYTES", 64)
    strided = torch.arange(66.0)[::2]
    write_checkpoint_file(make_state({"a": strided}), path)
    assert_same(read_all(path)["model"]["a"], strided)


# ---- sharing and size


def test_shared_memory_stays_shared_and_is_written_once(path):  # [F4]
    big = torch.randn(1000, 100)
    write_checkpoint_file(make_state({"a": big, "b": big, "c": big[10:20], "d": big[:, ::2], "e": nn.Parameter(big)}), path)
    assert path.stat().st_size < big.nbytes + 6 * 600
    for model in (torch.load(path, weights_only=True)["model"], read_all(path)["model"]):
        model["a"].zero_()
        assert all(not t.any() for t in model.values())
        assert all(type(t) is torch.Tensor for t in model.values())


def test_only_the_bytes_of_a_view_are_written(path):  # [F4]
    base = torch.randn(2000, 500)
    views = {"rows": base[5:7], "columns": base[:, 3:5], "twin": base[:, 3:5], "one": base[1, 1], "wide": base[:1].expand(99, 500)}
    write_checkpoint_file(make_state(views), path)
    assert path.stat().st_size < base[5:7].nbytes + base[:, 3:5].nbytes + base[:1].nbytes + 6 * 600
    assert_same(read_all(path)["model"], views)


def test_neighbours_in_one_flat_buffer_are_records_of_their_own(path):
    flat = torch.arange(100.0)
    write_checkpoint_file(make_state({"a": flat[:50], "b": flat[50:]}), path)
    records = [name for name in zipfile.ZipFile(path).namelist() if "/data/" in name]
    assert len(records) == 2


def test_the_file_is_hardly_larger_than_its_tensors(path):  # [F5]
    many = {f"encoder.layers.{i}.self_attn.q_proj.weight": torch.randn(3) for i in range(500)}
    steps = {i: {"step": torch.tensor(1.0)} for i in range(500)}
    assert write_checkpoint_file(make_state(many, last=steps), path) < 500 * 16 + 1000 * 600
    large = {f"w{i}": torch.randn(1024, 1024) for i in range(16)}
    assert write_checkpoint_file(make_state(large), path) < 1.01 * (64 << 20)


def test_ten_rounds_of_reading_and_writing_keep_the_size(path):
    write_checkpoint_file(make_state(ODD), path)
    state, sizes = read_all(path), set()
    for _ in range(10):
        sizes.add(write_checkpoint_file(state, path))
        state = read_all(path)
    assert len(sizes) == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="RssAnon is Linux's")
@pytest.mark.parametrize("deterministic", [False, True])
def test_neither_writing_nor_reading_holds_a_copy(path, deterministic):  # [F6]
    flat = torch.randn(48 << 18)  # 48 MiB
    state = make_state({"flat": flat, "odd": torch.randn(6 << 20, 2)[:, 0].view(-1, 512)})  # strided: 24 MiB
    targets = torch.empty_like(flat).fill_(1.0), torch.zeros(12288, 512)
    torch.use_deterministic_algorithms(deterministic)
    try:
        before, peak = rss_anon(), 0
        original = writing.write_all

        def watched(*args):
            nonlocal peak
            peak = max(peak, rss_anon())
            return original(*args)

        writing.write_all = watched
        write_checkpoint_file(state, path)
        assert peak - before < 16 << 20
        with open_checkpoint(path) as reader:
            reader.copy(list(zip(reader.skeleton["model"].values(), targets)))
            assert rss_anon() - before < 16 << 20
    finally:
        writing.write_all = original
        torch.use_deterministic_algorithms(False)
    assert torch.equal(targets[0], flat) and torch.equal(targets[1], state["model"]["odd"])


# ---- refused values


class SubDict(dict):
    pass


@pytest.mark.parametrize(
    "value, word",
    [
        (np.float64(1.0), ".item()"),
        (np.arange(3), "from_numpy"),
        ({1, 2}, "sorted"),
        (b"x", "uint8"),
        (Path("a"), "str(...)"),
        (torch.float32, "str(...)"),
        (torch.Size([1]), "torch.Size"),
        (SubDict(), "SubDict"),
        (argparse.Namespace(), "Namespace"),
        (2**5000, "5001 bits"),
        ("\ud800", "UTF-8"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        ({1.5: 2}, "1.5"),
        ({(1,): 2}, "(1,)"),
        ({True: 2}, "True"),
        (nn.parameter.UninitializedParameter(), "Uninitialized"),
        (lambda: 0, "function"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_a_value_that_would_not_come_back_is_refused_by_its_key_path(path, value, word):  # [F2]
    with pytest.raises(UnsavableValueError) as caught:
        write_checkpoint_file(make_state({}, extra_state={"mine": [0, {"odd": value}]}), path)
    assert "state['extra_state']['mine'][1]['odd']" in str(caught.value) and word in str(caught.value)
    assert not path.exists()


def test_a_nest_that_contains_itself_is_refused(path):
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsavableValueError, match="contains itself"):
        write_checkpoint_file(make_state({}, x=loop), path)
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnsavableValueError, match="deep"):
        write_checkpoint_file(make_state({}, x=deep), path)


# ---- checksums and damage


def test_the_checksums_are_the_zips_own(path):  # [F3]
    write_checkpoint_file(make_state(ODD), path)
    assert zipfile.ZipFile(path).testzip() is None
    assert verify_file(path) == []
    try:
        assert subprocess.run(["unzip", "-tq", path], capture_output=True).returncode == 0
    except FileNotFoundError:
        pass  # zipfile has looked at the same sums


def test_a_flipped_bit_in_a_tensor_is_named_by_zipfile_by_verify_and_by_a_load(path):  # [F3] [R2]
    write_checkpoint_file(make_state({"a": torch.zeros(1000), "b": torch.full((1000,), 3.0)}), path)
    raw = bytearray(path.read_bytes())
    at = raw.index(torch.full((1000,), 3.0).numpy().tobytes()) + 1234
    raw[at] ^= 4
    path.write_bytes(raw)
    assert zipfile.ZipFile(path).testzip().endswith("/data/1")
    assert "data/1" in verify_file(path)[0]
    for read_method in READ_METHODS:
        with open_checkpoint(path, read_method=read_method) as reader:
            reader.copy([(reader.skeleton["model"]["a"], torch.empty(1000))])
            with pytest.raises(CheckpointDamagedError, match="checksum") as caught:
                reader.copy([(reader.skeleton["model"]["b"], torch.empty(1000))])
            assert caught.value.record == "data/1" and caught.value.path == str(path)


def outcome(path) -> dict | None:
    """What a load gives; None where it is refused by one of our errors."""
    try:
        return read_all(path)
    except CheckpointError:
        return None


def test_a_truncation_at_any_place_is_noticed(path):  # [R2]
    state = make_state({"a": torch.arange(20.0), "b": torch.tensor(True), "c": torch.empty(0)}, text="x" * 50)
    write_checkpoint_file(state, path)
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        assert verify_file(path), length
        with pytest.raises(CheckpointDamagedError if length == 0 or length > 4 else CheckpointError):
            open_checkpoint(path)


def test_a_flipped_byte_at_any_place_is_noticed_or_means_nothing(path):  # [R2]
    state = make_state({"a": torch.arange(20.0), "b": torch.tensor(True)}, text="x" * 50)
    write_checkpoint_file(state, path)
    raw = path.read_bytes()
    silent = 0
    for at in range(len(raw)):
        flipped = bytearray(raw)
        flipped[at] ^= 0xFF
        path.write_bytes(flipped)
        loaded, problems = outcome(path), verify_file(path)
        if loaded is not None:
            assert_same(loaded, state)
        assert problems or loaded is not None, at
        silent += not problems
    assert silent < len(raw) / 2  # padding, times and versions of the zip; most of so small a file


def test_zeros_in_the_place_of_any_block_are_noticed(path):
    state = make_state({f"w{i}": torch.randn(3000) for i in range(4)})
    write_checkpoint_file(state, path)
    raw = path.read_bytes()
    for begin in range(0, len(raw), 4096):
        path.write_bytes(raw[:begin] + bytes(len(raw[begin : begin + 4096])) + raw[begin + 4096 :])
        assert verify_file(path) and outcome(path) is None


# ---- what is no checkpoint


@pytest.mark.parametrize(
    "make, kind, sentence",
    [
        (lambda p: None, CheckpointNotFoundError, "no such file"),
        (lambda p: p.mkdir(), NotACheckpointError, "is a folder"),
        (lambda p: p.write_bytes(b""), CheckpointDamagedError, "is empty"),
        (lambda p: p.write_text("learning_rate: 3\n"), NotACheckpointError, "text file"),
        (lambda p: p.write_bytes(bytes(5000)), CheckpointDamagedError, "zeros"),
        (lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n" * 20), NotACheckpointError, "89 50 4e 47"),
        (lambda p: zipfile.ZipFile(p, "w").writestr("a.txt", "b"), NotACheckpointError, "data.pkl"),
        (lambda p: torch.save({"a": torch.ones(2)}, p), NotACheckpointError, "bare state dict of 1 tensors (a)"),
        (lambda p: torch.save({"model": {}, "ema": {}, "opt": {}, "args": 1}, p), NotACheckpointError, "DiT"),
        (lambda p: torch.save({"model": {}, "optimizer_history": []}, p), NotACheckpointError, "fairseq"),
        (lambda p: torch.save({"step": 3}, p), NotACheckpointError, "step"),
        (lambda p: torch.save([1], p), NotACheckpointError, "list"),
        (lambda p: torch.save(make_state({}) | {"format_version": 9}, p), NotACheckpointError, "version 9"),
        (lambda p: torch.save({"a": argparse.Namespace(x=1)}, p), NotACheckpointError, "argparse.Namespace"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_checkpoint_gets_a_sentence_of_its_own(path, make, kind, sentence):
    make(path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert type(caught.value) is kind and sentence in str(caught.value) and str(path) in str(caught.value)
    assert caught.value.exit_status == 2 and caught.value.is_user_error


def test_a_missing_file_is_a_file_not_found_error_too(path):
    with pytest.raises(FileNotFoundError):
        open_checkpoint(path)


def test_a_file_that_may_not_be_read_says_so(path, monkeypatch):
    path.write_bytes(b"x")
    monkeypatch.setattr(os, "open", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        open_checkpoint(path)


class Attack:
    def __reduce__(self):
        return os.system, ("touch ATTACKED",)


def test_nothing_in_a_file_is_executed(path, monkeypatch, tmp_path):  # [F7]
    monkeypatch.chdir(tmp_path)
    torch.save({"format_version": 1, "model": {"a": Attack()}}, path)
    for act in (open_checkpoint, read_all):
        with pytest.raises(NotACheckpointError, match="system"):
            act(path)
    path.write_bytes(pickle.dumps({"model": Attack()}, protocol=2))
    with pytest.raises(NotACheckpointError):
        open_checkpoint(path)
    assert verify_file(path)
    assert not Path("ATTACKED").exists()


def test_a_ref_that_reaches_beyond_its_record_is_refused(path):
    state = {"format_version": 1, "model": {"a": torch.arange(4.0)}}
    write_checkpoint_file(state, path)
    raw = path.read_bytes()
    pickled = zipfile.ZipFile(path).read("archive/data.pkl")
    evil = pickled.replace(b"K\x00K\x04\x85", b"K\x03K\x04\x85")
    assert evil != pickled
    raw = raw.replace(pickled, evil)
    for before, after in [(archive.crc32(pickled), archive.crc32(evil))]:
        raw = raw.replace(before.to_bytes(4, "little"), after.to_bytes(4, "little"))
    path.write_bytes(raw)
    with pytest.raises(NotACheckpointError, match="beyond"):
        open_checkpoint(path)


# ---- files that torch wrote


def test_what_torch_saved_again_is_read_and_verified(path):
    state = make_state({k: v for k, v in ODD.items()}, extra_state={"x": OrderedDict(a=1)})
    write_checkpoint_file(state, path)
    again = torch.load(path, weights_only=True)
    again["model"]["parameter"] = nn.Parameter(torch.ones(2))
    torch.save(again, path)
    assert verify_file(path) == []
    assert_same(read_all(path)["model"]["strided"], ODD["strided"])
    assert_same(read_all(path)["model"]["parameter"], torch.ones(2))


def test_the_old_layout_of_torch_is_read_whole(path):
    tensors = {"a": torch.randn(4, 3).t(), "b": BASE, "c": BASE[2:4]}
    torch.save(make_state(tensors, size=torch.Size([2])), path, _use_new_zipfile_serialization=False)
    state = read_all(path)
    assert_same(state["model"], tensors)
    assert state["model"]["c"].untyped_storage().data_ptr() == state["model"]["b"].untyped_storage().data_ptr()
    assert "no checksums" in verify_file(path)[0]


def test_an_intact_file_of_another_program_has_no_problem(path):
    torch.save({"args": argparse.Namespace(x=1), "model": {"a": torch.ones(3)}}, path)
    assert verify_file(path) == []


def test_the_skeleton_says_dtype_and_shape_without_reading(path):
    write_checkpoint_file(make_state({"a": torch.zeros(3, 4, dtype=torch.bfloat16)}, n={1: 2}), path)
    with open_checkpoint(path) as reader:
        ref = reader.skeleton["model"]["a"]
        assert isinstance(ref, TensorRef)
        assert (ref.dtype, ref.shape, ref.nbytes) == (torch.bfloat16, torch.Size([3, 4]), 24)
        assert reader.skeleton["n"] == {1: 2}


# ---- failures of the system


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_is_an_error_with_path_cause_and_size(path, monkeypatch, call):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CheckpointWriteError, match=r"No space left on device \(writing 4,800 bytes") as caught:
        write_checkpoint_file(make_state({"a": BASE}), path)
    assert caught.value.path == str(path) and caught.value.exit_status == 1


def test_an_error_while_reading_is_a_checkpoint_error(path, monkeypatch):
    write_checkpoint_file(make_state({"a": BASE}), path)
    with open_checkpoint(path, read_method="pread") as reader:
        monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(CheckpointDamagedError, match="disk fails"):
            reader.copy([(reader.skeleton["model"]["a"], torch.empty(40, 30))])


def test_a_short_write_is_continued(path, monkeypatch):
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: original(fd, data[:100], at))
    write_checkpoint_file(make_state({"a": BASE}), path)
    assert verify_file(path) == [] and torch.equal(read_all(path)["model"]["a"], BASE)


def test_descriptors_stay_level(path):
    write_checkpoint_file(make_state(ODD), path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        write_checkpoint_file(make_state(ODD), path)
        read_all(path)
        verify_file(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_every_error_survives_a_pickle():
    for kind in checkpoint_file.error_kinds().values():
        error = pickle.loads(pickle.dumps(kind("p", "is wrong", "data/1", 3)))
        assert type(error) is kind and str(error) == "p: is wrong (found by rank 3)" and error.record == "data/1"
