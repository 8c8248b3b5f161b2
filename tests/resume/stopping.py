"""The toy task, and signals that come at a named place of it.

The environment variable TEST_SIGNALS = "PLACE|RANK|SIGNAL,SIGNAL…|HOW" sends the signals, once, when the rank (or each
of them: *) comes to the place. HOW: `self`, the rank alone; `group`, its process group, data workers included.

    build, data, load      of a start: the model is built, a dataset, a checkpoint is loaded
    update U.I             micro-batch I of update U (counted from 1) is computed
    valid U                a batch of the validation after update U
    state U, write U       a save of update U: before anything is written, while the bytes are
    rename U, link U       … right before a file gets its name, before a name gets a further one
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from checkpoint_utils import publishing
from tests.resume.task import Toy


class Stopping(Toy):
    """Toy with signals; what it computes is the same."""

    @property
    def _rank(self) -> int:
        return getattr(self, "data_parallel_rank", 0)

    def __init__(self, *args, **kwargs) -> None:
        sys.addaudithook(self._hear)
        super().__init__(*args, **kwargs)

    def _hear(self, event: str, args: tuple) -> None:
        if event in ("os.rename", "os.link") and ".pt" in str(args[1]):
            self._come_to(f"{event.removeprefix('os.')} {self.get_num_updates()}")

    def build_model(self):
        self._come_to("build")
        return super().build_model()

    def build_dataset(self, split: str):
        self._come_to("data")
        return super().build_dataset(split)

    def load_checkpoint(self, *args, **kwargs):
        self._come_to("load")
        return super().load_checkpoint(*args, **kwargs)

    def compute_loss(self, sample):
        done = self.get_num_updates()
        self._come_to(f"update {done + 1}.{self._micro_batch}" if self.model.training else f"valid {done}")
        return super().compute_loss(sample)

    def save_checkpoint(self, filename, extra_state=None):
        self._come_to(f"state {self.get_num_updates()}")
        with _during_write(lambda: self._come_to(f"write {self.get_num_updates()}")):
            return super().save_checkpoint(filename, extra_state)

    def _come_to(self, place: str) -> None:
        wanted, rank, names, how = os.environ.get("TEST_SIGNALS", "|||").split("|")
        if wanted != place or rank not in ("*", str(self._rank)):
            return
        del os.environ["TEST_SIGNALS"]  # once
        for name in names.split(","):
            time.sleep(0.05)  # of two that come at once the system delivers one
            (os.kill if how == "self" else os.killpg)(
                os.getpid() if how == "self" else os.getpgrp(), signal.Signals[name]
            )


class _during_write:
    """While open, `come` is called, from a thread, between the first byte of this rank's share and the last."""

    def __init__(self, come) -> None:
        self._come, self._write = come, publishing.Publication.write

    def __enter__(self) -> None:
        def write(publication) -> None:
            thread = threading.Thread(target=self._come)
            thread.start()
            self._write(publication)
            thread.join()

        publishing.Publication.write = write

    def __exit__(self, *_) -> None:
        publishing.Publication.write = self._write
