"""Reading samples, here or in worker processes.

Owns: the random numbers of a sample, collation, the error of a dataset, the worker processes and how a batch
travels from them. Must not know: order, ranks, positions; it is given indices.

Own processes instead of torch's DataLoader, because of four things that it does: a batch that cannot be pickled
leaves its caller waiting for ever, an exception that cannot be pickled loses its message, ignoring SIGTERM makes its
workers hang at exit, and each tensor costs a connection to the worker. Here a worker answers each request on one
socket, with the batch or with the text of its error, and the socket's end is the news that a process died.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import multiprocessing
import os
import pickle
import queue
import random
import signal
import struct
import sys
import tempfile
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from multiprocessing import reduction, util
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from trainer.randomness import derive_seed

_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # meant for the trainer alone
_INLINE_BYTES = 1 << 16  # a batch up to this size goes through the socket, a larger one through shared memory
_ALIGNMENT = 64


class DatasetError(RuntimeError):
    """A dataset, its collation or a data worker failed. Plain text all through, so that it can be sent anywhere.

    Fields: `index` of the sample (None where the fault is not of one sample), `error_class` and `error_message` of
    what was raised, `traceback_text` where it was raised, `worker` (None in the trainer's own process).
    """

    def __init__(
        self,
        doing: str,
        error_class: str,
        error_message: str,
        traceback_text: str = "",
        index: int | None = None,
        worker: int | None = None,
    ) -> None:
        super().__init__(doing, error_class, error_message, traceback_text, index, worker)
        self.doing, self.error_class, self.error_message = doing, error_class, error_message
        self.traceback_text, self.index, self.worker = traceback_text, index, worker

    def __str__(self) -> str:
        place = "" if self.worker is None else f" (data worker {self.worker})"
        text = f"{self.doing}{place}: {self.error_class}: {self.error_message}"
        return f"{text}\n{self.traceback_text.rstrip()}" if self.traceback_text else text


def dataset_error(doing: str, error: BaseException, index: int | None = None, worker: int | None = None):
    """The DatasetError for `error`, whose text is taken now: the exception itself may not survive pickling."""
    try:
        message = str(error)
    except Exception as unprintable:
        message = f"(its message cannot be had: {type(unprintable).__name__})"
    text = "".join(traceback.format_tb(error.__traceback__))
    name = type(error).__qualname__ if type(error).__module__ == "builtins" else _full_name(type(error))
    return DatasetError(doing, name, message, text, index, worker)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _few(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"samples {shown}{f', ... ({len(indices)} in all)' if len(indices) > 8 else ''}"


# ---- one micro-batch: indices to a collated batch


def collate_samples(samples: list) -> Any:
    """torch's default_collate, with a short way for what most datasets give: tensors, or tuples of tensors and ints."""
    first = samples[0]
    if type(first) is not tuple:
        return _collate_column(samples)
    if len(set(map(len, samples))) > 1:
        raise ValueError(f"the samples of a batch have tuples of different lengths: {sorted(set(map(len, samples)))}")
    return [_collate_column(column) for column in zip(*samples)]


def _collate_column(values) -> Any:
    kind = type(values[0])
    if kind is torch.Tensor:
        return torch.stack(values)
    if kind is int:
        return torch.tensor(values)
    return default_collate(list(values))


def collation_of(dataset, collate_fn: Callable | None) -> Callable:
    """The task's `collate_fn`, else the dataset's `collater` (fairseq's name) or `collate_fn`, else the default."""
    found = collate_fn or getattr(dataset, "collater", None) or getattr(dataset, "collate_fn", None)
    return found or collate_samples


class Fetcher:
    """Indices to a collated batch; what is drawn depends on (`stream`, seed, epoch, index) and on nothing else."""

    def __init__(self, dataset, collate: Callable, seed: int, stream: str = "sample") -> None:
        self.dataset, self.collate, self.seed, self.stream = dataset, collate, seed, stream
        self.worker: int | None = None
        self.draws = _uses_rng(dataset)
        self._own_collation = collate is not collate_samples
        self._epoch: int | None = None
        self._stacked = type(dataset) is TensorDataset and not self._own_collation
        self._whole = hasattr(dataset, "__getitems__") and not self.draws
        self._numpy_generator = np.random.MT19937(0)

    def __call__(self, epoch: int | None, indices: list[int]) -> Any:
        """The collated batch of `indices`. `epoch` is None for validation, where every epoch draws the same."""
        if epoch != self._epoch:
            self.set_epoch(epoch)
        if self._stacked:
            rows = torch.tensor(indices)
            return [tensor[rows] for tensor in self.dataset.tensors]
        samples = self._samples(epoch, indices)
        try:
            if self._own_collation:  # it may draw too: masks, mixtures
                seed_cpu(self._seed_of("collate", epoch, indices[0]))
            return self.collate(samples)
        except Exception as error:
            raise dataset_error(f"collating {_few(indices)} failed", error, worker=self.worker) from error

    def _samples(self, epoch: int | None, indices: list[int]) -> list:
        dataset, index = self.dataset, None
        try:
            if self.draws:
                samples = []
                for index in indices:
                    seed_cpu(self._seed_of(self.stream, epoch, index))
                    samples.append(dataset[index])
                return samples
            if self._whole:
                return dataset.__getitems__(indices)
            samples = []
            for index in indices:
                samples.append(dataset[index])
            return samples
        except Exception as error:
            what = f"sample {index}" if index is not None else _few(indices)
            raise dataset_error(f"reading {what} failed", error, index, self.worker) from error

    def _seed_of(self, stream: str, epoch: int | None, index: int) -> int:
        if epoch is None:
            return derive_seed(stream, self.seed, index)
        return derive_seed(stream, self.seed, epoch, index)

    def set_epoch(self, epoch: int | None) -> None:
        """Tell the dataset, where it wants to know."""
        self._epoch = epoch
        if epoch is None or not hasattr(self.dataset, "set_epoch"):
            return
        try:
            self.dataset.set_epoch(epoch)
        except Exception as error:
            raise dataset_error(f"set_epoch({epoch}) of the dataset failed", error, worker=self.worker) from error

    def fetch_here(self, epoch: int | None, parts: list[list[int]]) -> list:
        """A batch for each of `parts`, read in the trainer's own process, whose random numbers do not move by that."""
        if not (self.draws or self._own_collation):
            return [self(epoch, indices) for indices in parts]
        torch_state, python_state = torch.default_generator.get_state(), random.getstate()
        numpy_generator = np.random.get_bit_generator()
        np.random.set_bit_generator(self._numpy_generator)  # exchanged whole: its state takes 60 us to read
        try:
            return [self(epoch, indices) for indices in parts]
        finally:
            np.random.set_bit_generator(numpy_generator)
            random.setstate(python_state)
            torch.default_generator.set_state(torch_state)


def _uses_rng(dataset) -> bool:
    """What the dataset says, or what is known of torch's own kinds. Who says nothing is taken to draw."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "uses_rng", type(dataset) is not TensorDataset))


def seed_cpu(seed: int) -> None:
    """Seed what datasets draw from. No accelerator: in a forked worker torch would queue the call for ever."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


# ---- a batch on its way from a worker


class _Pickler(reduction.ForkingPickler):
    """Plain CPU tensors leave the pickle as raw buffers, like numpy arrays; everything else goes torch's own way."""

    def reducer_override(self, value):
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.requires_grad or not value.is_contiguous() or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        buffer = pickle.PickleBuffer(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else None
        return _tensor_from, (buffer, value.dtype, value.shape)


def _tensor_from(buffer, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if buffer is None:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _send(connection, value) -> None:
    """Pickle first and send then: if the pickling fails nothing has been sent, and the failure can be."""
    stream, buffers = io.BytesIO(), []
    _Pickler(stream, 5, True, buffers.append).dump(value)
    raws = [buffer.raw() for buffer in buffers]
    sizes = [raw.nbytes for raw in raws]
    offsets, total = _layout(sizes)
    inline = total <= _INLINE_BYTES
    head = struct.pack(f"<?I{len(sizes)}Q", inline, len(sizes), *sizes)
    if inline:
        body = bytearray(total)
        for raw, offset in zip(raws, offsets):
            body[offset : offset + raw.nbytes] = raw
        connection.send_bytes(head + body + stream.getbuffer())
        return
    descriptor = _shared_memory()
    try:
        os.ftruncate(descriptor, total)
        for raw, offset in zip(raws, offsets):
            _write_at(descriptor, raw, offset)
        connection.send_bytes(head + stream.getbuffer())
        reduction.send_handle(connection, descriptor, None)
    finally:
        os.close(descriptor)


def _receive(connection) -> Any:
    message = bytearray(connection.recv_bytes())  # writable: tensors and arrays will stand on it
    inline, count = struct.unpack_from("<?I", message)
    sizes = struct.unpack_from(f"<{count}Q", message, 5)
    offsets, total = _layout(sizes)
    begin = 5 + 8 * count
    if inline:
        memory, begin = memoryview(bytearray(message[begin : begin + total])), begin + total
    else:
        memory = memoryview(_map(reduction.recv_handle(connection), total))
    views = [memory[offset : offset + size] for offset, size in zip(offsets, sizes)]
    return pickle.loads(memoryview(message)[begin:], buffers=views)


def _layout(sizes) -> tuple[list[int], int]:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _shared_memory() -> int:
    """A descriptor of anonymous memory: unlike /dev/shm it has no size limit of its own in containers."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fairtrain-batch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())  # the name is gone already


def _write_at(descriptor: int, raw: memoryview, offset: int) -> None:
    while raw.nbytes:  # one call writes at most 2 GiB
        written = os.pwrite(descriptor, raw, offset)
        raw, offset = raw[written:], offset + written


def _map(descriptor: int, size: int) -> mmap.mmap:
    try:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(descriptor, size, flags=flags)
    finally:
        os.close(descriptor)


# ---- the workers


class WorkerPool:
    """`num_workers` processes that fetch micro-batches; what is taken comes in the order of submission.

    Request k goes to worker k % num_workers, so the answers need no sorting. The processes are forked: a dataset
    need not be picklable and costs no copy, and starting takes milliseconds. A fork of a process with threads is
    sound here because the child runs only the dataset, with one intra-op thread and no accelerator. Args:
    prefetch_factor, micro-batches per worker that are under way; pin_memory, copy batches to pinned memory in a
    thread.
    """

    def __init__(self, fetch: Fetcher, num_workers: int, prefetch_factor: int = 2, pin_memory: bool = False) -> None:
        self.capacity = num_workers * prefetch_factor
        self._connections, self._processes = _start_workers(fetch, num_workers)
        self._waiting: deque[tuple[int, list[int]]] = deque()  # (worker, indices) of the requests under way
        self._next_worker = 0
        self._pinning = _PinningThread(self._connections, self._processes) if pin_memory else None
        # At exit multiprocessing sends daemonic processes a SIGTERM, which ours ignore, and waits: come before that.
        ending = (self._connections, self._processes, self._pinning)
        self.close = util.Finalize(self, _end_workers, ending, exitpriority=100)

    @property
    def outstanding(self) -> int:
        return len(self._waiting)

    def submit(self, epoch: int | None, indices: list[int]) -> None:
        worker = self._next_worker
        self._next_worker = (worker + 1) % len(self._processes)
        self._waiting.append((worker, indices))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead worker is reported by its answer
            self._connections[worker].send_bytes(pickle.dumps((epoch, indices)))
        if self._pinning:
            self._pinning.requests.put((worker, indices))

    def take(self) -> Any:
        """The batch of the oldest request. Raises DatasetError; no answer is lost by that."""
        worker, indices = self._waiting.popleft()
        if self._pinning:
            answer = self._pinning.answers.get()
        else:
            answer = _answer_of(self._connections[worker], self._processes[worker], worker, indices)
        if isinstance(answer, DatasetError):
            raise answer
        return answer


def _start_workers(fetch: Fetcher, num_workers: int) -> tuple[list, list]:
    context = multiprocessing.get_context("fork")
    # Linux can end a child with its parent, but it means the thread that forked: of use if that one stays to the end.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    ours, processes = [], []
    # Signals that arrive between the fork and the child's ignoring them wait, instead of running our handlers there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
    try:
        for worker in range(num_workers):
            here, there = context.Pipe()
            ours.append(here)
            arguments = (fetch, worker, num_workers, there, list(ours), parent)
            process = context.Process(target=_work, args=arguments, daemon=True, name=f"data-worker-{worker}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12, on forking with threads
                process.start()
            there.close()  # so that the worker alone holds it, and its death ends the connection
            processes.append(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ours, processes


def _end_workers(connections: list, processes: list, pinning: _PinningThread | None) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    if pinning:
        pinning.stop()
    for connection in connections:
        connection.close()


def _answer_of(connection, process, worker: int, indices: list[int]) -> Any:
    try:
        return _receive(connection)
    except (EOFError, OSError):
        return _death_of(process, worker, indices)


def _death_of(process, worker: int, indices: list[int]) -> DatasetError:
    process.join(timeout=5)
    code = process.exitcode
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        hint = " (often because memory ran out: try fewer dataset.num_workers)" if -code == signal.SIGKILL else ""
    else:
        how, hint = f"ended with status {code}", ""
    doing = f"reading {_few(indices)} failed"
    return DatasetError(doing, "worker died", f"data worker process {process.pid} {how}{hint}", worker=worker)


class _PinningThread:
    """Takes the answers in order and moves their tensors to pinned memory, while the trainer is busy."""

    def __init__(self, connections: list, processes: list) -> None:
        self.requests: queue.SimpleQueue = queue.SimpleQueue()
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        arguments = (self.requests, self.answers, connections, processes)
        self._thread = threading.Thread(target=_pin_answers, args=arguments, daemon=True, name="data-pinning")
        self._thread.start()

    def stop(self) -> None:
        """To be called when the workers are dead, so that the thread waits for none of them."""
        self.requests.put(None)
        self._thread.join()


def _pin_answers(requests: queue.SimpleQueue, answers: queue.SimpleQueue, connections: list, processes: list) -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    for worker, indices in iter(requests.get, None):
        try:
            answer = _answer_of(connections[worker], processes[worker], worker, indices)
            answers.put(answer if isinstance(answer, DatasetError) else pin_memory(answer))
        except Exception as error:
            answers.put(dataset_error(f"pinning the memory of {_few(indices)} failed", error))


# ---- inside a worker


def _work(fetch: Fetcher, worker: int, num_workers: int, connection, inherited: list, parent: int | None) -> None:
    for other in inherited:  # else a worker would keep the others' connections open when the trainer dies
        other.close()
    _detach_from_signals()
    _die_with(parent)
    torch.set_num_threads(1)
    fetch.worker = worker
    _publish_worker_info(fetch, worker, num_workers)
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(connection, requests), daemon=True).start()
    while True:
        epoch, indices = requests.get()
        _send_answer(connection, fetch, epoch, indices)


def _send_answer(connection, fetch: Fetcher, epoch: int | None, indices: list[int]) -> None:
    try:
        answer = fetch(epoch, indices)
    except DatasetError as error:
        answer = error
    except BaseException as error:  # SystemExit too: the trainer must hear of it
        answer = dataset_error(f"reading {_few(indices)} failed", error, worker=fetch.worker)
    try:
        _send(connection, answer)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the trainer is gone
    except Exception as error:
        doing = f"sending {_few(indices)} from the worker failed (dataset.num_workers=0 needs no sending)"
        _send(connection, dataset_error(doing, error, worker=fetch.worker))


def _read_requests(connection, requests: queue.SimpleQueue) -> None:
    """Reads ahead, so that the trainer never blocks on a busy worker; the end of the connection ends the process."""
    while True:
        try:
            requests.put(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)


def _detach_from_signals() -> None:
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)


def _die_with(parent: int | None) -> None:
    """Ask Linux for a SIGKILL when the trainer dies, for when another process still holds our connection."""
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _publish_worker_info(fetch: Fetcher, worker: int, num_workers: int) -> None:
    """So that torch.utils.data.get_worker_info() answers as it does under a DataLoader."""
    from torch.utils.data._utils import worker as torch_worker

    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker, num_workers=num_workers, seed=derive_seed("worker", fetch.seed, worker), dataset=fetch.dataset
    )
