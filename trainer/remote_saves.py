"""Checkpoints in an object store, seen from a run: its folder is on this machine, and objects follow it.

Owns: which folder stands for the URL, on which ranks something is fetched, when uploads are begun, waited for and counted.
Where checkpoint.save_dir is a folder all of this is nothing. Must not know: how objects are stored (checkpoint_utils').
"""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

from omegaconf import DictConfig

import distributed_utils
from checkpoint_utils import object_store
from checkpoint_utils.config import DEFAULT_RESTORE_FILE, expand
from checkpoint_utils.urls import is_url

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"  # of run_dir


class RemoteSaves:
    """The mirror of rank 0; on other ranks, and for a folder, every call returns at once.

    section: the section `checkpoint` as the functions of checkpoint_utils want it, with a folder for save_dir.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.url = cfg.checkpoint.save_dir if is_url(cfg.checkpoint.save_dir) else None
        self.section = cfg.checkpoint if self.url is None else _local_section(cfg, self.url)
        self._mirror: object_store.Mirror | None = None

    @property
    def seconds(self) -> float:
        """What the last upload took, 0.0 where there was none."""
        return self._mirror.seconds if self._mirror is not None else 0.0

    def begin(self) -> None:
        """Collective: fetch what the run goes on from, once for all ranks, or once a node where each rank reads."""
        if self.url is None:
            return
        together(self._begin_on_rank_0)
        if self.section.load_checkpoint_on_all_dp_ranks:
            together(self._begin_on_node)

    def _begin_on_rank_0(self) -> None:
        if distributed_utils.is_master():
            self._mirror = self._new_mirror()
            logger.info("checkpoints: %s", self._mirror.begin())
            if not self.section.no_save:
                self._mirror.push(self.section)  # what an earlier session saved and could not upload
                if self.section.load_checkpoint_on_all_dp_ranks:
                    self._mirror.flush(self.section)

    def _begin_on_node(self) -> None:
        """On the first rank of each other node: where the folder is shared it finds all that it needs there."""
        facts = distributed_utils.launch_facts()
        if facts is None or facts.local_rank != 0 or facts.rank == 0:
            return
        self._new_mirror().begin()
        for wish in (self.section.restore_file, self.section.finetune_from_model):
            if is_url(wish) and not os.path.exists(os.path.join(self.section.save_dir, DEFAULT_RESTORE_FILE)):
                object_store.fetch(wish, self.section.save_dir)

    def _new_mirror(self) -> object_store.Mirror:
        return object_store.Mirror(self.url, expand(self.section.save_dir), object_store.open_store())

    def push(self) -> None:
        """A save counts: begin to upload it. Waits for the upload before."""
        if self._mirror is not None:
            self._mirror.push(self.section)

    def check(self) -> None:
        """Collective, before a save: raise on all ranks if uploads have failed too often (checkpoint.max_failed_saves)."""
        if self.url is not None:
            together(lambda: self._mirror and self._mirror.raise_failure(self.section.max_failed_saves))

    def finish(self) -> None:
        """Collective, where the run ends: all is in the store, or CheckpointWriteError on all ranks."""
        if self.url is not None and not self.section.no_save:
            together(lambda: self._mirror and self._mirror.flush(self.section))

    def close(self) -> None:
        """The run ends by an error: what is on its way may arrive."""
        if self._mirror is not None:
            self._mirror.wait()


def _local_section(cfg: DictConfig, url: str) -> DictConfig:
    local = copy.deepcopy(cfg)  # the copy of a section alone would lose what it refers to
    local.checkpoint.save_dir = os.path.join(expand(cfg.run_dir), FOLDER)
    if cfg.checkpoint.restore_file == f"{url.rstrip('/')}/{DEFAULT_RESTORE_FILE}":
        local.checkpoint.restore_file = DEFAULT_RESTORE_FILE
    return local.checkpoint


def together(do: Any) -> Any:
    """What `do` gives; what it raises on one rank is raised on all."""
    result, error = None, None
    try:
        result = do()
    except Exception as problem:  # the other ranks wait for the agreement
        error = problem
    distributed_utils.agree(error)
    return result
