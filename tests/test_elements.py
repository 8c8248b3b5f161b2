"""The elements of a checkpoint's tensors in bounded pieces: the values that torch reads, and no damage unseen."""

from __future__ import annotations

import pytest
import torch

from checkpoint_file import (
    CheckpointDamagedError,
    ElementReader,
    ShardedTensor,
    TensorRef,
    archive,
    open_local_checkpoint,
    open_writer,
    write_checkpoint_file,
    write_checkpoint_folder,
)
from checkpoint_file.nests import empty_storage, leaves, tensor_in


def odd_state():
    base = torch.randn(7, 5)
    return {
        "plain": torch.randn(3, 4),
        "transposed": torch.randn(6, 5).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "column": base[:, 2],
        "rows": base[2:4],
        "tied": [base, base],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "half": torch.randn(9).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "counts": torch.arange(11),
    }


def same(reader, state):
    elements = ElementReader(reader)
    refs, tensors = leaves(reader.skeleton, (TensorRef,)), leaves(state, (torch.Tensor,))
    assert len(refs) == len(tensors) > 10
    for ref, tensor in zip(refs, tensors):
        flat = tensor.reshape(-1)
        for begin, end in [(0, None), (0, 0), (1, min(3, flat.numel()))]:
            pieces = [piece.clone() for piece in elements.pieces(ref, begin, end)]
            read = torch.cat(pieces) if pieces else flat[:0]
            assert read.dtype == flat.dtype and torch.equal(read, flat[begin:end])


@pytest.mark.parametrize("chunk", [8, 64, 4 << 20])
def test_pieces_are_what_was_saved_whatever_the_layout(tmp_path, monkeypatch, chunk):
    state = odd_state()
    write_checkpoint_file(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    write_checkpoint_folder(state, tmp_path / "folder")
    monkeypatch.setattr(archive, "CHUNK_BYTES", chunk)
    for name in ("a.pt", "old.pt", "folder"):
        with open_local_checkpoint(tmp_path / name, own_format=False) as reader:
            same(reader, state)


@pytest.mark.parametrize("key", ["plain", "column", "transposed"])
def test_a_changed_byte_is_noticed_by_whoever_reads_its_tensor(tmp_path, key):
    path = tmp_path / "a.pt"
    write_checkpoint_file(odd_state(), path)
    with open_local_checkpoint(path, own_format=False) as reader:
        ref = reader.skeleton[key]
        place = reader._source.places[ref._record]
    data = bytearray(path.read_bytes())
    data[place.offset + place.nbytes - 1] ^= 1
    path.write_bytes(data)
    with (
        open_local_checkpoint(path, own_format=False) as reader,
        pytest.raises(CheckpointDamagedError, match=ref._record),
    ):
        for _ in ElementReader(reader).pieces(reader.skeleton[key]):
            pass


def test_a_file_is_written_from_values_that_are_nowhere_in_memory(tmp_path):
    """A state of stand-ins and a supply of bytes give the file that the values would have given."""
    values = {"a": torch.randn(1000), "b": torch.arange(12).reshape(3, 4)}
    write_checkpoint_file(values, tmp_path / "whole.pt")
    stand_ins = {key: tensor_in(empty_storage(t.nbytes), t.dtype, 0, t.shape, t.stride()) for key, t in values.items()}
    by_memory = {stand_ins[key].data_ptr(): values[key] for key in values}

    def supply(parts, begin, end):
        ((start, part),) = parts
        data = memoryview(by_memory[part.data_ptr()].numpy()).cast("B")
        for low in range(begin, end, 100):
            yield data[low : min(low + 100, end)]

    with open_writer(stand_ins, tmp_path / "supplied.pt") as writer:
        writer.write(supply)
        writer.finish()
    assert (tmp_path / "supplied.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


def test_pieces_of_a_tensor_that_a_folder_holds_in_several_boxes(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "CHUNK_BYTES", 64)
    wholes = {"rows": torch.arange(70.0).view(7, 10), "transposed": torch.arange(70.0).view(10, 7).t()}
    flat = {name: whole.as_strided((70,), (1,)) for name, whole in wholes.items()}
    state = {
        name: ShardedTensor(whole.dtype, whole.shape, whole.stride(), ((0, flat[name][:33]), (33, flat[name][33:])))
        for name, whole in wholes.items()
    }
    write_checkpoint_folder(state, tmp_path / "folder")
    with open_local_checkpoint(tmp_path / "folder", own_format=False) as reader:
        assert all(len(ref._chunks) > 2 for ref in reader.skeleton.values())
        elements = ElementReader(reader)
        for name, whole in wholes.items():
            for begin, end in ((0, None), (3, 66), (40, 41)):
                read = torch.cat([piece.clone() for piece in elements.pieces(reader.skeleton[name], begin, end)])
                assert torch.equal(read, whole.reshape(-1)[begin:end])
