"""The task language_modeling: train a decoder-only transformer on text, byte by byte or on token ids.

Owns: its settings, what is reported (bits per byte), the sample of text after each validation.
The text is data.py's, the network model.py's, the loss criterion.py's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

import torch

from trainer import Trainer
from trainer.errors import ConfigError
from trainer.meta_build import init_weights_of
from trainer.randomness import derive_seed
from trainer.tasks.language_modeling.data import BYTE_VOCABULARY, TokenBlocks, open_split
from trainer.tasks.language_modeling.model import TransformerLM, generate

logger = logging.getLogger(__name__)


def _setting(default: Any, meaning: str) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": meaning})
    return field(default=default, metadata={"help": meaning})


class LanguageModeling(Trainer):
    """Predict the next token of a text. Validation reports `bits_per_byte` (`bits_per_token` for token files)."""

    sample_unit = "tokens"

    @dataclass
    class Config:
        data: Optional[str] = _setting(
            None,
            "a text file, a folder of them, or a .bin file of token ids; null: the Python standard library's sources",
        )
        valid_data: Optional[str] = _setting(
            None, "a source of its own to validate on; null: a part of data is held out"
        )
        patterns: Optional[list[str]] = _setting(
            None,
            "files of a folder that are read, such as ['*.txt']; null: all that are text and not hidden "
            "(data=null: '*.py')",
        )
        valid_fraction: float = _setting(
            0.05, "share of the files (of one file: of its tokens) that is held out, above 0, below 1"
        )
        valid_blocks: int = _setting(256, "held-out blocks that a validation reads, evenly spread; 0: all")
        tokens_per_sample: int = _setting(256, "tokens of a sample, and the longest context of the model, from 1")
        vocab_size: int = _setting(BYTE_VOCABULARY, "number of token ids; 256 is bytes, a .bin file may have more")
        token_dtype: Literal["uint16", "uint32"] = _setting("uint16", "type of the ids in a .bin file")
        sample_bytes: int = _setting(256, "length of the text (tokens) that is written after a validation; 0: none")
        sample_prompt: str = _setting("def ", "what that text begins with")
        sample_temperature: float = _setting(0.8, "0: always the likeliest token; 1: as the model says")
        sample_top_k: int = _setting(0, "tokens that are drawn from, the likeliest ones; 0: all")

    # ---- build ----

    def build_model(self) -> torch.nn.Module:
        problems = config_problems(self.cfg.task)
        if problems:
            raise ConfigError("; ".join(problems))
        return super().build_model()

    @property
    def init_weights(self) -> Callable[[torch.nn.Module], None] | None:
        return init_weights_of(self.cfg.model, TransformerLM)

    def build_dataset(self, split: str) -> TokenBlocks:
        task = self.cfg.task
        dataset = open_split(
            split,
            task.data,
            task.tokens_per_sample,
            vocab_size=task.vocab_size,
            token_dtype=task.token_dtype,
            patterns=task.patterns,
            valid_path=task.valid_data,
            valid_fraction=task.valid_fraction,
            valid_blocks=task.valid_blocks,
        )
        logger.info("%s: %d tokens, %d blocks of %d", split, len(dataset.tokens), len(dataset), task.tokens_per_sample)
        return dataset

    # ---- report ----

    def reduce_metrics(self, logging_outputs: list[dict[str, float]]) -> dict[str, float]:
        """`loss` in nats per token as it is trained on, and the same in bits."""
        stats = super().reduce_metrics(logging_outputs)
        if "loss" in stats:
            stats["bits_per_byte" if self._in_bytes() else "bits_per_token"] = stats["loss"] / math.log(2)
        return stats

    def _in_bytes(self) -> bool:
        return not str(self.cfg.task.data or "").endswith(".bin")

    def after_validate(self, stats: dict[str, float]) -> None:
        """Write a text that the model makes up, the same for the same position of the same run."""
        task = self.cfg.task
        if task.sample_bytes == 0 or not self._in_bytes():
            return
        if not (self.is_data_parallel_master or self.forward_is_collective):
            return
        num_updates = self.get_num_updates()
        seed = derive_seed("sample text", self.cfg.common.seed, num_updates)
        prompt = task.sample_prompt.encode()
        averaged = self.ema is not None and self.cfg.ema.ema_validate
        with self.ema.swapped_in(self.model) if averaged else contextlib.nullcontext():
            text = sample_text(self.model, prompt, task.sample_bytes, task.sample_temperature, task.sample_top_k, seed)
        if self.is_data_parallel_master:
            self._write_sample(num_updates, text.decode(errors="replace"))

    def _write_sample(self, num_updates: int, text: str) -> None:
        path = os.path.join(self.cfg.run_dir, "samples", f"update_{num_updates}.txt")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # nobody trains for the samples: a full disk is for the next checkpoint to report
            logger.warning("the sample of update %d was not written: %s", num_updates, error)
            return
        self.log_event("sample", num_updates=num_updates, path=path, text=text)
        logger.info("a sample at update %d (%s):\n%s", num_updates, path, text)


def config_problems(task: Any) -> list[str]:
    """Sentences on values of the section `task` that cannot work."""
    problems = [
        f"task.{name} is {getattr(task, name)}, it must be {least} or more"
        for name, least in (
            ("tokens_per_sample", 1),
            ("vocab_size", 2),
            ("valid_blocks", 0),
            ("sample_bytes", 0),
            ("sample_temperature", 0),
            ("sample_top_k", 0),
        )
        if getattr(task, name) < least
    ]
    if not 0 < task.valid_fraction < 1:
        problems.append(f"task.valid_fraction is {task.valid_fraction}, it must be above 0 and below 1")
    if task.valid_data is not None and task.valid_data.endswith(".bin") != str(task.data or "").endswith(".bin"):
        problems.append(
            f"task.data={task.data} and task.valid_data={task.valid_data}: both must be .bin files, or none"
        )
    if not str(task.data or "").endswith(".bin") and task.vocab_size < BYTE_VOCABULARY:
        problems.append(f"task.vocab_size is {task.vocab_size}, but text is read as bytes: set task.vocab_size=256")
    return problems


def sample_text(
    model: torch.nn.Module, prompt: bytes, num_bytes: int, temperature: float = 0.8, top_k: int = 0, seed: int = 1
) -> bytes:
    """`prompt` and `num_bytes` more, drawn from a model of bytes; a function of its arguments alone.

    An empty prompt stands for the start of a file. The model is left as it was found.
    """
    start = list(prompt) or [0]
    tokens = generate(model, start, num_bytes, temperature, top_k, seed, allowed=BYTE_VOCABULARY)
    return prompt + bytes(tokens)
