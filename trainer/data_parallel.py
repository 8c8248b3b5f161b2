"""Gradients of the data-parallel ranks, summed in buckets whose layout never changes.

Owns: the flat gradient buffers and when each of them is sent.
Must not know: losses, optimizers, updates. It adds gradients up; dividing by the sample size is the Trainer's.

Why not torch's DistributedDataParallel: it rebuilds its buckets after the first backward of a process, so a run that
was started again adds gradients up in another order than the run that went on. With three ranks or more that changes
bits. Here buckets are laid out once, in reverse order of registration, and are sent in that order.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterable

import torch
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
# As torch aligns what it allocates: kernels may take another way, to other bits, for other addresses.
ALIGNMENT_BYTES = 64


class GradientMismatchError(RuntimeError):
    """A parameter got a gradient on some ranks and none on others."""

    is_user_error = True

    def __init__(self, name: str, num_ranks: int, world_size: int) -> None:
        super().__init__(
            f"parameter {name} got a gradient on {num_ranks} of {world_size} ranks: the ranks ran different parts of the "
            "model. If that is meant, add: distributed_training.find_unused_parameters=true (ranks without one count 0)"
        )


class Bucket:
    """One flat buffer and the parameters whose gradients are views into it, each at an aligned place."""

    def __init__(self, parameters: list[nn.Parameter], num_flags: int = 0) -> None:
        first = parameters[0] if parameters else None
        dtype = first.dtype if first is not None else torch.float32
        device = first.device if first is not None else torch.device("cpu")
        self.parameters = parameters
        multiple = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        ends = list(itertools.accumulate(-(-p.numel() // multiple) * multiple for p in parameters))
        self.begins = [0, *ends[:-1]]
        self.numel = ends[-1] if ends else 0
        self.buffer = torch.zeros(self.numel + num_flags, dtype=dtype, device=device)
        self.flat = self.buffer[: self.numel]
        self.flags = self.buffer[self.numel :]
        self.views = [self.view_into(self.flat, i) for i in range(len(parameters))]
        self.num_waiting = 0
        self.work: Any = None

    def view_into(self, flat: Tensor, index: int) -> Tensor:
        """The place of parameter `index` in `flat`, [numel] of this layout, in the shape of the parameter."""
        parameter, begin = self.parameters[index], self.begins[index]
        return _view_like(flat[begin : begin + parameter.numel()], parameter)

    def send(self, group: Any) -> None:
        message = torch.view_as_real(self.buffer) if self.buffer.is_complex() else self.buffer
        self.work = torch.distributed.all_reduce(message, group=group, async_op=True)


def _view_like(piece: Tensor, parameter: Tensor) -> Tensor:
    """`piece` in the shape of `parameter`, with its strides where they are dense: optimizers walk both alike."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(parameter.stride(), parameter.size()) if n != 1):
        if stride != expected:
            return piece.view(parameter.size())
        expected *= size
    return piece.as_strided(parameter.size(), parameter.stride(), piece.storage_offset())


class GradientReducer:
    """Sums the gradients of `named_parameters` over the ranks of `group` during the last backward of an update.

    `prepare()`, any number of backwards, `arm()`, one more backward, `finish()`; afterwards each `.grad` holds the
    sum over ranks and micro-batches, the same bits on every rank.

    Args:
        named_parameters: trainable parameters, the same on every rank and in the same order. Any dense dtype.
        group: process group, None for the default one.
        find_unused_parameters: a parameter that only some ranks used counts 0 on the others. Otherwise that is an
            error. A parameter that no rank used has no gradient, so its optimizer leaves it alone, as with one rank.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        group: Any,
        world_size: int,
        find_unused_parameters: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group, self._world_size, self._find_unused = group, world_size, find_unused_parameters
        named = list(named_parameters)[::-1]  # backward reaches the last registered parameters first
        self.buckets = _lay_out([parameter for _, parameter in named], bucket_bytes)
        self._used = [False] * len(named)
        self._armed = False
        self._next = 0
        self._used_order = [p for bucket in self.buckets for p in bucket.parameters]
        names_of = {id(p): name for name, p in named}
        self._names = [names_of[id(p)] for p in self._used_order]
        index = 0
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._make_hook(index, bucket))
                index += 1

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters in the order of the layout."""
        return list(zip(self._names, self._used_order))

    @property
    def flats(self) -> list[Tensor]:
        """The flat gradients, one tensor a bucket: [numel], in the dtype of its parameters. Padding is 0."""
        return [bucket.flat for bucket in self.buckets if bucket.parameters]

    def prepare(self) -> None:
        """Zero all gradients and make every `.grad` a view into its bucket again."""
        for bucket in self.buckets:
            bucket.buffer.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views):
                if parameter.grad is not view:
                    parameter.grad = view
            bucket.num_waiting = len(bucket.parameters)
        self._used = [False] * len(self._used)
        self._armed, self._next = False, 0

    def arm(self) -> None:
        """The next backward is the last of this update: send each bucket as soon as it is complete."""
        self._armed = True

    def _make_hook(self, index: int, bucket: Bucket):
        def hook(_: Tensor) -> None:
            self._used[index] = True
            if self._armed:
                bucket.num_waiting -= 1
                if bucket.num_waiting == 0:
                    self._send_complete()

        return hook

    def _send_complete(self) -> None:
        # In layout order on every rank, whatever order backward finishes them in; the last one waits for its flags.
        while self._next < len(self.buckets) - 1 and self.buckets[self._next].num_waiting == 0:
            self.buckets[self._next].send(self._group)
            self._next += 1

    def finish(self) -> None:
        """Send what is left, wait for everything. Raises GradientMismatchError on every rank alike."""
        self._armed = False
        last = self.buckets[-1]
        last.flags.copy_(torch.tensor(self._used, dtype=last.flags.dtype))
        for bucket in self.buckets[self._next :]:
            bucket.send(self._group)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.work = None
        counts = last.flags.tolist()
        if min(counts, default=self._world_size) < self._world_size:
            self._settle_unused(counts)

    def _settle_unused(self, counts: list[float]) -> None:
        for name, parameter, count in zip(self._names, self._used_order, counts):
            if count == 0:
                parameter.grad = None
            elif count < self._world_size and not self._find_unused:
                raise GradientMismatchError(name, int(count), self._world_size)


def _lay_out(parameters: list[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most `bucket_bytes` (one parameter at least), each of one dtype and device, in the given order.

    The last bucket also carries one flag a parameter: on how many ranks it got a gradient. Flags are float32, exact
    for up to 2^24 ranks, so where the last parameters have another dtype the flags are a bucket of their own.
    """
    groups: list[list[nn.Parameter]] = []
    open_groups: dict[tuple, list[nn.Parameter]] = {}
    sizes: dict[int, int] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        nbytes = parameter.numel() * parameter.element_size()
        group = open_groups.get(key)
        if group is None or sizes[id(group)] + nbytes > bucket_bytes:
            group = []
            groups.append(group)
            open_groups[key], sizes[id(group)] = group, 0
        group.append(parameter)
        sizes[id(group)] += nbytes
    if groups and groups[-1][0].dtype == torch.float32:
        return [Bucket(group) for group in groups[:-1]] + [Bucket(groups[-1], num_flags=len(parameters))]
    flags = Bucket([], num_flags=len(parameters))
    if groups:
        flags.buffer = flags.buffer.to(groups[0][0].device)
        flags.flat, flags.flags = flags.buffer[:0], flags.buffer
    return [Bucket(group) for group in groups] + [flags]
