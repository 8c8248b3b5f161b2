"""Text as one long row of tokens, cut into blocks: which files, which of them are held out, how a block is read.

Owns: the search for files, the split, the blocks. Must not know: the Trainer, models, ranks.

Three kinds of source: a folder of text (each byte a token, a zero byte behind each file; split by whole files), one
text file (split at a point near its end), and a `.bin` file of token ids, mapped and never read as a whole (split in
the same way). Order and split depend on names and sizes alone, so every machine with the same files has the same data.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.randomness import derive_seed

logger = logging.getLogger(__name__)

BYTE_VOCABULARY = 256
END_OF_FILE = b"\0"
LOOKED_AT_BYTES = 8192
CHECKED_TOKENS = 1 << 24  # ids of a token file that are looked at when it is opened; blocks check the rest when read
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}  # of the standard library


class TokenBlocks:
    """Sample i is block i of `block_length` tokens and the tokens that follow each: two int64 [block_length] tensors.

    Blocks do not overlap, and the last tokens that fill no block are left out.

    Args:
        tokens: unsigned integers [N], in memory or mapped.
        blocks: which blocks, None: all of them.
        in_bytes: each token is one byte of text, so that bits per token are bits per byte.
    """

    uses_rng = False  # reading draws no random numbers, so nothing is seeded for it

    def __init__(
        self,
        tokens: np.ndarray,
        block_length: int,
        vocab_size: int,
        blocks: np.ndarray | None = None,
        in_bytes: bool = True,
    ) -> None:
        self.tokens, self.block_length, self.vocab_size, self.in_bytes = tokens, block_length, vocab_size, in_bytes
        self.blocks = np.arange(num_blocks(len(tokens), block_length)) if blocks is None else blocks
        self._within = np.arange(block_length + 1)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each sample, for dataset.max_tokens."""
        return np.full(len(self), self.block_length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """All samples of a batch at once, two views each of one array."""
        places = self.blocks[np.asarray(indices)][:, None] * self.block_length + self._within
        rows = self.tokens[places].astype(np.int64)
        if not self.in_bytes and rows.max() >= self.vocab_size:
            raise ValueError(
                f"token id {rows.max()} in one of the blocks {list(indices)}, but task.vocab_size={self.vocab_size}"
            )
        return [(row[:-1], row[1:]) for row in torch.from_numpy(rows)]

    def fingerprint(self) -> str:
        """A hash of the sizes and of 256 short pieces of the tokens, spread evenly: cheap, whatever the size."""
        tokens = self.tokens
        starts = np.linspace(0, max(len(tokens) - 64, 0), 256).astype(np.int64)
        pieces = b"".join(np.ascontiguousarray(tokens[start : start + 64]).tobytes() for start in starts)
        header = f"{len(tokens)} {tokens.dtype.str} {self.block_length} {len(self.blocks)} "
        return hashlib.blake2b(header.encode() + pieces, digest_size=8).hexdigest()


def num_blocks(num_tokens: int, block_length: int) -> int:
    """Whole blocks in `num_tokens` tokens, the last one of which must have a successor."""
    return max(num_tokens - 1, 0) // block_length


def spread(num_all: int, num_wanted: int) -> np.ndarray:
    """`num_wanted` of the numbers 0 .. num_all - 1, evenly spread; all of them if `num_wanted` is 0 or too many."""
    if num_wanted <= 0 or num_wanted >= num_all:
        return np.arange(num_all)
    return np.linspace(0, num_all - 1, num_wanted).astype(np.int64)


def open_split(
    split: str,
    path: str | None,
    block_length: int,
    *,
    vocab_size: int = BYTE_VOCABULARY,
    token_dtype: str = "uint16",
    patterns: Sequence[str] | None = None,
    valid_path: str | None = None,
    valid_fraction: float = 0.05,
    valid_blocks: int = 0,
) -> TokenBlocks:
    """The blocks of `split`: "train" is all but what is held out, any other name is what is held out.

    Args:   path: a text file, a folder of them, a .bin file; None: the Python standard library's sources.
            valid_path: a source of its own for what is held out; then `path` is trained on as a whole.
            valid_fraction: share that is held out, of the files of a folder or of the tokens of a file.
            valid_blocks: held-out blocks that are used, evenly spread; 0: all.
    Raises: ConfigError if there is no such path, no file in it, or less than a block in the split.
    """
    is_train = split == "train"
    source = path if is_train or valid_path is None else valid_path
    place = standard_library() if source is None else Path(os.path.expanduser(source))
    share = None if valid_path is not None else (0.0, 1 - valid_fraction) if is_train else (1 - valid_fraction, 1.0)
    if not place.exists():
        key = "task.data" if is_train or valid_path is None else "task.valid_data"
        raise ConfigError(
            f"{key}={source}: there is no such file or folder. It takes a text file, a folder of them or a .bin file"
        )
    if place.is_dir():
        tokens = _folder_tokens(place, is_train, share is not None, valid_fraction, _patterns(source, patterns))
    else:
        tokens = _part(_file_tokens(place, vocab_size, token_dtype), share)
    count = num_blocks(len(tokens), block_length)
    if count == 0:
        raise ConfigError(
            f"the {split} split of {place} has {len(tokens)} tokens, less than one block of task.tokens_per_sample="
            f"{block_length} and the token after it: set a smaller task.tokens_per_sample"
            + ("" if is_train else ", or a larger task.valid_fraction")
        )
    blocks = None if is_train else spread(count, valid_blocks)
    return TokenBlocks(tokens, block_length, vocab_size, blocks, in_bytes=place.suffix != ".bin")


# ---- folders


def standard_library() -> Path:
    """The sources that come with Python: text that is on every machine already."""
    return Path(sysconfig.get_paths()["stdlib"])


def _patterns(source: str | None, patterns: Sequence[str] | None) -> Sequence[str] | None:
    return patterns or (["*.py"] if source is None else None)


def find_files(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Names relative to `folder`, with slashes, sorted; those whose last part, or which as a whole, match a pattern.

    Hidden files and caches are left out everywhere, tests and installed packages in the standard library only.
    """
    left_out = _LEFT_OUT if folder == standard_library() else {"__pycache__"}
    return sorted(_walk(folder, left_out, patterns))


def _walk(folder: Path, left_out: set[str], patterns: Sequence[str]) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for file in files:
            name = (Path(root) / file).relative_to(folder).as_posix()
            if not file.startswith(".") and any(fnmatch.fnmatch(file, p) or fnmatch.fnmatch(name, p) for p in patterns):
                yield name


def held_out(names: Sequence[str], fraction: float) -> set[str]:
    """The names that are held out: those whose hash lies below `fraction`, at least one and never all.

    A name keeps its side when other files come or go, unless it is the only one on it.
    """
    place = {name: derive_seed("held out", name) / 2**63 for name in names}
    chosen = {name for name in names if place[name] < fraction}
    ordered = sorted(names, key=place.__getitem__)
    if not chosen:
        return set(ordered[:1])
    return chosen if len(chosen) < len(names) else set(ordered[:-1])


def _folder_tokens(
    folder: Path, is_train: bool, split: bool, fraction: float, patterns: Sequence[str] | None
) -> np.ndarray:
    """The bytes of one side's files, in the order of their names; without patterns, of those that are text. uint8 [N]"""
    names = find_files(folder, patterns or ["*"])
    if not names:
        raise ConfigError(f"there is no file in {folder} that matches task.patterns={list(patterns or ['*'])}")
    if not patterns:
        names = _texts_of(folder, names, say=is_train or not split)
    if split and len(names) == 1:
        share = (0.0, 1 - fraction) if is_train else (1 - fraction, 1.0)
        return _part(np.frombuffer(_read(folder / names[0]), dtype=np.uint8), share)
    if split:
        chosen = held_out(names, fraction)
        names = [name for name in names if (name in chosen) != is_train]
    return np.frombuffer(b"".join(_read(folder / name) + END_OF_FILE for name in names), dtype=np.uint8)


def _texts_of(folder: Path, names: list[str], say: bool) -> list[str]:
    """The names of files without a zero byte near their beginning, as git tells text from the rest; `say` how many."""
    texts = [name for name in names if b"\0" not in _read(folder / name, LOOKED_AT_BYTES)]
    left_out = len(names) - len(texts)
    if not texts:
        raise ConfigError(f"none of the {left_out} files in {folder} is text. To read them all the same: task.patterns=['*']")
    if left_out and say:
        logger.info(
            "%s: %d of %d files are not text and left out; task.patterns=['*'] reads all", folder, left_out, len(names)
        )
    return texts


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Leave it out with task.patterns") from error


# ---- single files


def _file_tokens(path: Path, vocab_size: int, token_dtype: str) -> np.ndarray:
    """The whole file, mapped: bytes, or for a .bin file token ids."""
    size = path.stat().st_size
    if size == 0:
        raise ConfigError(f"{path} is empty")
    if path.suffix != ".bin":
        return np.memmap(path, dtype=np.uint8, mode="r")
    dtype = np.dtype(token_dtype)
    if size % dtype.itemsize:
        raise ConfigError(f"{path} has {size} bytes, no whole number of task.token_dtype={token_dtype} tokens")
    tokens = np.memmap(path, dtype=dtype, mode="r")
    _check_ids(path, tokens, vocab_size, token_dtype)
    return tokens


def _check_ids(path: Path, tokens: np.ndarray, vocab_size: int, token_dtype: str) -> None:
    stride = max(len(tokens) // CHECKED_TOKENS, 1)
    largest = int(tokens[::stride].max())
    if largest >= vocab_size:
        raise ConfigError(
            f"{path} has token id {largest}, but task.vocab_size={vocab_size}: set task.vocab_size={largest + 1} "
            f"or more, or another task.token_dtype if the file does not hold {token_dtype}"
        )


def _part(tokens: np.ndarray, share: tuple[float, float] | None) -> np.ndarray:
    if share is None:
        return tokens
    begin, end = (round(part * len(tokens)) for part in share)
    return tokens[begin:end]
