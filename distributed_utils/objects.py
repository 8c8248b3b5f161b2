"""Objects and tensors between ranks: values in bounded pieces, tensors as bytes, nothing executed on arrival."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_utils.blocks import bytes_view, lay_out, tensor_of
from distributed_utils.errors import CannotBroadcastError, CannotSendError, PeerError
from distributed_utils.plain_values import (
    Counter,
    PlainPickler,
    PlainUnpickler,
    dereference,
    dump,
    dumps,
    referring,
    refuse,
    refuse_tensor,
)
from distributed_utils.ranks import barrier, communication_device, get_rank, get_world_size

BUCKET_BYTES = 32 * 2**20  # what a rank holds in flight beside the object itself
PACKED_BYTES = 2**20  # blocks up to this size share a bucket, larger ones travel straight from and to their memory
PAYLOAD_BYTES = 4 * 2**20  # of the plain part of an object at a time
HEADER_BYTES = 4096  # a small object travels in its header


def broadcast_object(
    obj: Any,
    src_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    dist_device: torch.device | str | None = None,
) -> Any:
    """Return on every rank of `group` what `src_rank` passed as `obj`; the others' `obj` is ignored.

    obj: any nest of dict, list, tuple, set, None, bool, int, float, complex, str, bytes, torch sizes, dtypes, devices
        and dense tensors of any dtype. Tensors arrive without gradients, equal in dtype, shape and value; permuted
        layouts keep their strides, and what overlapped in memory overlaps again. Meta tensors stay on meta. The source
        gets `obj` itself. Beside the object a rank holds a bucket or two, however large the object is.
    src_rank: a global rank. dist_device: where received tensors live and messages are sent from (default: the CPU).
    Raises on all ranks if the source's value cannot be sent: CannotSendError there, PeerError elsewhere;
        CannotBroadcastError where the backend has no broadcast.
    """
    if get_world_size(group) == 1:
        return obj
    barrier(group)  # ranks may come from work of unequal length
    comm = torch.device(dist_device) if dist_device is not None else communication_device(group)
    is_source = dist.get_rank() == src_rank
    if is_source:
        try:
            head, nest_bytes, sources = _encode(obj)
        except CannotSendError as error:
            _PayloadWriter(len(str(error).encode()), False, src_rank, group, comm).write(str(error).encode())
            raise
        writer = _PayloadWriter(len(head) + nest_bytes, True, src_rank, group, comm)
        writer.write(head)
        if nest_bytes:
            PlainPickler(writer, referring({})).dump(obj)
        _broadcast_blocks([nbytes for nbytes, _ in sources], [make for _, make in sources], src_rank, group, comm)
        return obj
    reader = _PayloadReader(src_rank, group, comm)
    specs, sizes = PlainUnpickler(reader, refuse).load()
    device = torch.device("cpu") if dist_device is None else comm
    blocks = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
    tensors = [tensor_of(spec, blocks, device) for spec in specs]
    nest = PlainUnpickler(reader, lambda reference: dereference(reference, tensors)).load()
    _broadcast_blocks(sizes, [lambda block=block: block for block in blocks], src_rank, group, comm)
    return nest


def broadcast_tensors(tensors: Iterable[Tensor], src_rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensors` with those of the global rank `src_rank`, in place, in few messages.

    Every rank passes the same shapes and dtypes in the same order; memory layouts may differ.
    """
    tensors = list(tensors)
    if get_world_size(group) == 1 or not tensors:
        return
    comm = communication_device(group)
    if comm.type == "cpu" and (device_type := tensors[0].device.type) in str(dist.get_backend_config(group)):
        comm = tensors[0].device if device_type != "cpu" else comm  # an accelerator sends from its own memory
    staged: dict[int, Tensor] = {}

    def bytes_of(index: int) -> Tensor:
        tensor = tensors[index].detach()
        if not tensor.is_contiguous():
            staged[index] = tensor = tensor.contiguous()  # what travels is the row-major order
        return bytes_view(tensor)

    def received(index: int) -> None:
        if index in staged:
            copy = staged.pop(index)
            if dist.get_rank() != src_rank:
                tensors[index].detach().copy_(copy)

    makers = [lambda index=index: bytes_of(index) for index in range(len(tensors))]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    _broadcast_blocks(sizes, makers, src_rank, group, comm, received)


def all_reduce_dict(
    data: Mapping[str, Any], device: torch.device | str | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Sum each entry over the ranks of `group`: numbers stay numbers, tensors come back in float64 on `device`.

    All ranks pass the same keys and shapes, in any order; one message carries them. float64 where the device has it.
    """
    home = torch.device(device) if device is not None else torch.device("cpu")
    comm = communication_device(group)
    keys = sorted(data)
    wide = torch.float32 if comm.type == "mps" else torch.float64
    signature = zlib.crc32(repr([(key, tuple(getattr(data[key], "shape", ()))) for key in keys]).encode())
    values = [torch.as_tensor(data[key], dtype=wide).detach().reshape(-1).to(comm) for key in keys]
    flat = torch.cat([torch.tensor([float(signature >> 8)], dtype=wide, device=comm), *values])
    if get_world_size(group) > 1:
        dist.all_reduce(flat, group=group)
    if flat[0].item() != (signature >> 8) * get_world_size(group):
        raise ValueError(f"all_reduce_dict: the ranks hold different entries; rank {get_rank()} holds {keys}")
    summed = flat[1:].split([value.numel() for value in values])
    return {key: _like(data[key], total, home) for key, total in zip(keys, summed)}


def _like(value: Any, total: Tensor, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return total.reshape(value.shape).to(device)
    number = total.item()
    return int(number) if isinstance(value, int) else number


class _PayloadWriter:
    """A file that all ranks receive while it is written: `size` bytes, the first HEADER_BYTES - 9 with their number."""

    def __init__(
        self, size: int, is_fine: bool, src_rank: int, group: dist.ProcessGroup | None, comm: torch.device
    ) -> None:
        self._src_rank, self._group, self._comm, self._left = src_rank, group, comm, size
        self._message = bytearray(size.to_bytes(8, "little") + bytes([is_fine]))
        self._message_bytes = HEADER_BYTES

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        taken = 0
        while taken < len(data):
            part = data[taken : taken + self._message_bytes - len(self._message)]
            self._message += part
            taken += len(part)
            self._left -= len(part)
            if self._left == 0 or len(self._message) == self._message_bytes:
                self._send()
        return taken

    def _send(self) -> None:
        if self._message_bytes == HEADER_BYTES:
            self._message = self._message.ljust(HEADER_BYTES, b"\0")
        message = torch.frombuffer(self._message, dtype=torch.uint8).to(self._comm)
        _broadcast(message, self._src_rank, self._group)
        self._message, self._message_bytes = bytearray(), PAYLOAD_BYTES


class _PayloadReader:
    """What a _PayloadWriter on another rank writes, for an unpickler. Raises the writer's failure as PeerError."""

    def __init__(self, src_rank: int, group: dist.ProcessGroup | None, comm: torch.device) -> None:
        self._src_rank, self._group, self._comm = src_rank, group, comm
        header = self._receive(HEADER_BYTES)
        size = int.from_bytes(header[:8], "little")
        self._message = header[9 : 9 + size]
        self._position, self._left = 0, size - len(self._message)
        if header[8] != 1:
            raise PeerError(src_rank, "CannotSendError", bytes(self.read(size)).decode(errors="replace"))

    def _receive(self, nbytes: int) -> memoryview:
        message = torch.empty(nbytes, dtype=torch.uint8, device=self._comm)
        _broadcast(message, self._src_rank, self._group)
        return memoryview(message.cpu().numpy())

    def _available(self, most: int) -> memoryview:
        if self._position == len(self._message) and self._left:
            self._message = self._receive(min(self._left, PAYLOAD_BYTES))
            self._position, self._left = 0, self._left - len(self._message)
        part = self._message[self._position : self._position + most]
        self._position += len(part)
        return part

    def read(self, count: int) -> bytes:
        data = bytearray(count)
        return bytes(data[: self.readinto(data)])

    def readinto(self, data: Any) -> int:
        filled = 0
        while filled < len(data) and len(part := self._available(len(data) - filled)):
            data[filled : filled + len(part)] = part
            filled += len(part)
        return filled

    def readline(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (one := self.read(1)):
            line += one
        return line


def _broadcast(message: Tensor, src_rank: int, group: dist.ProcessGroup | None) -> None:
    try:
        dist.broadcast(message, src_rank, group=group)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, NotImplementedError) or "does not support broadcast" in str(error):
            raise CannotBroadcastError(str(dist.get_backend(group)), message.device) from error
        raise


@torch.no_grad()
def _broadcast_blocks(
    sizes: list[int],
    makers: list[Callable[[], Tensor]],
    src_rank: int,
    group: dist.ProcessGroup | None,
    comm: torch.device,
    received: Callable[[int], None] = lambda index: None,
) -> None:
    """Send blocks of bytes: small ones packed into buckets, large ones in slices of their own memory.

    `makers[i]()` gives block i as uint8 [sizes[i]], asked for when its turn comes; `received(i)` tells that it is full.
    The order follows from `sizes` alone, which all ranks share.
    """
    packed: list[int] = []
    for index, nbytes in enumerate(sizes):
        if nbytes > PACKED_BYTES:
            block = makers[index]()
            for begin in range(0, nbytes, BUCKET_BYTES):
                _broadcast_in_place(block[begin : begin + BUCKET_BYTES], src_rank, group, comm)
            received(index)
        elif nbytes:
            packed.append(index)
            if sum(map(sizes.__getitem__, packed)) >= BUCKET_BYTES - PACKED_BYTES:
                _broadcast_packed(packed, makers, src_rank, group, comm, received)
                packed = []
    if packed:
        _broadcast_packed(packed, makers, src_rank, group, comm, received)


def _broadcast_in_place(piece: Tensor, src_rank: int, group: dist.ProcessGroup | None, comm: torch.device) -> None:
    message = piece.to(comm)
    dist.broadcast(message, src_rank, group=group)
    if message.data_ptr() != piece.data_ptr() and dist.get_rank() != src_rank:
        piece.copy_(message)


def _broadcast_packed(
    indices: list[int],
    makers: list[Callable[[], Tensor]],
    src_rank: int,
    group: dist.ProcessGroup | None,
    comm: torch.device,
    received: Callable[[int], None],
) -> None:
    blocks = [makers[index]() for index in indices]
    bucket = torch.cat([block.to(comm) for block in blocks])
    dist.broadcast(bucket, src_rank, group=group)
    if dist.get_rank() != src_rank:
        for block, part in zip(blocks, bucket.split([block.numel() for block in blocks])):
            block.copy_(part)
    for index in indices:
        received(index)


def _encode(obj: Any) -> tuple[bytes, int, list[tuple[int, Callable[[], Tensor]]]]:
    """Pickled specs of the tensors in `obj`, the pickled size of the rest, and the blocks (size, maker) of the tensors.

    The rest is not kept: it is pickled once to be counted and refused, and again while it is sent.
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    counter = Counter()
    dump(obj, counter, referring(tensors))
    specs, blocks = lay_out([tensor for _, tensor in tensors.values()])
    return dumps((specs, [nbytes for nbytes, _ in blocks]), refuse_tensor), counter.nbytes, blocks
