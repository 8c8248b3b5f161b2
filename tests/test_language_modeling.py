"""The task language_modeling: its data, its model, its report. The whole command runs in a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainer.errors import ConfigError
from trainer.tasks.language_modeling.criterion import CrossEntropy
from trainer.tasks.language_modeling.data import TokenBlocks, find_files, held_out, open_split, spread, standard_library
from trainer.tasks.language_modeling.model import TransformerLM, draw, ngram_rows
from trainer.tasks.language_modeling.task import LanguageModeling, config_problems, sample_text

REPOSITORY = Path(__file__).parents[1]


def small_model(**changes) -> TransformerLM:
    torch.manual_seed(0)
    model = TransformerLM(
        **{
            "dim": 16,
            "num_layers": 2,
            "num_heads": 2,
            "max_length": 12,
            "max_ngram": 3,
            "ngram_rows": 64,
            "ngram_dim": 8,
            **changes,
        }
    )
    for parameter in model.parameters():  # branches that begin at zero would hide what they see
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def folder(tmp_path):
    """40 files, in folders, with caches, hidden files and a file of another kind beside them."""
    for i in range(40):
        path = tmp_path / "text" / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([65 + i]) * 50)
    (tmp_path / "text" / "__pycache__").mkdir()
    (tmp_path / "text" / "__pycache__" / "0.txt").write_text("cache")
    (tmp_path / "text" / ".hidden.txt").write_text("hidden")
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG")
    return tmp_path / "text"


# ---- data


def test_blocks_cover_the_tokens_once_and_targets_are_the_next_tokens():
    tokens = np.arange(103, dtype=np.uint8)
    blocks = TokenBlocks(tokens, 10, 256)
    assert len(blocks) == 10
    seen = torch.cat([blocks[i][0] for i in range(10)])
    assert seen.tolist() == list(range(100))
    for inputs, targets in blocks.__getitems__([3, 0, 9]):
        assert inputs.dtype == targets.dtype == torch.int64 and torch.equal(targets, inputs + 1)


def test_a_batch_read_at_once_equals_its_samples_read_one_by_one():
    blocks = TokenBlocks(np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8), 7, 256)
    for index, (inputs, targets) in zip([5, 99, 0], blocks.__getitems__([5, 99, 0]), strict=True):
        assert torch.equal(inputs, blocks[index][0]) and torch.equal(targets, blocks[index][1])


def test_train_and_held_out_files_are_disjoint_and_together_all_files(folder):
    options = {"patterns": ["*.txt"], "valid_fraction": 0.2}
    train, valid = (open_split(split, str(folder), 10, **options).tokens for split in ("train", "valid"))
    kinds = [set(np.unique(tokens)) - {0} for tokens in (train, valid)]
    assert not kinds[0] & kinds[1] and len(kinds[0] | kinds[1]) == 40 and kinds[1]
    assert len(train) + len(valid) == 40 * 51


def test_a_file_keeps_its_side_when_other_files_come_and_go():
    names = [f"{i}.txt" for i in range(200)]
    before = held_out(names, 0.1)
    after = held_out(names[::2] + [f"new{i}" for i in range(300)], 0.1)
    assert before & set(names[::2]) == after & set(names[::2])
    assert 5 <= len(before) <= 40


@pytest.mark.parametrize("count, fraction", [(2, 0.001), (2, 0.999), (3, 0.5), (40, 0.001)])
def test_neither_side_of_a_folder_is_empty(count, fraction):
    names = [str(i) for i in range(count)]
    assert 1 <= len(held_out(names, fraction)) < count


def test_caches_hidden_files_and_the_order_of_the_folder_change_nothing(folder, monkeypatch):
    names = find_files(folder, ["*.txt"])
    assert names == sorted(names) and len(names) == 40
    before = open_split("train", str(folder), 10, patterns=["*.txt"]).fingerprint()
    (folder / "part0" / "__pycache__").mkdir()
    (folder / "part0" / "__pycache__" / "more.txt").write_text("more")
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: ((root, folders, files[::-1]) for root, folders, files in walk(top)))
    assert open_split("train", str(folder), 10, patterns=["*.txt"]).fingerprint() == before


def test_files_that_are_no_text_are_left_out_in_one_line_unless_patterns_name_them(folder, caplog):
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.txt"))
    only = {"block_length": 10, "valid_fraction": 0.2}
    before = open_split("train", str(folder), patterns=["*.txt"], **only).fingerprint()
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in names:
            path.unlink()
    (folder / "picture.png").write_bytes(b"\x89PNG" + bytes(range(256)))
    (folder / "numbers.npy").write_bytes(b"x" * 8000 + b"\0")
    (folder / "late.bin").write_bytes(b"x" * 8192 + b"\0")  # looks like text as far as one looks
    with caplog.at_level("INFO"):
        mixed = [open_split(split, str(folder), **only) for split in ("train", "valid")]
    assert caplog.text.count("2 of") == 1 and "task.patterns=['*'] reads all" in caplog.text
    (folder / "late.bin").unlink()
    assert open_split("train", str(folder), **only).fingerprint() == before
    everything = sum(len(open_split(split, str(folder), patterns=["*"], **only).tokens) for split in ("train", "valid"))
    assert everything > sum(len(part.tokens) for part in mixed) - 8194


def test_a_folder_without_any_text_is_refused_with_the_override(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match="none of the 1 files .* is text.*task.patterns="):
        open_split("train", str(tmp_path), 10)


def test_a_pattern_may_name_a_folder(folder):
    assert find_files(folder, ["part1/*"]) == [
        name for name in find_files(folder, ["*.txt"]) if name.startswith("part1/")
    ]


def test_a_single_file_is_split_at_one_point(tmp_path):
    content = bytes(range(250)) * 4
    (tmp_path / "one.txt").write_bytes(content)
    train, valid = (
        open_split(split, str(tmp_path / "one.txt"), 16, valid_fraction=0.1).tokens for split in ("train", "valid")
    )
    assert isinstance(train.base, np.memmap) or isinstance(train, np.memmap)
    assert train.tobytes() + valid.tobytes() == content and len(valid) == 100


def test_a_folder_of_one_file_is_split_too(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"abcdefghij" * 100)
    sizes = [len(open_split(split, str(tmp_path), 16, valid_fraction=0.1).tokens) for split in ("train", "valid")]
    assert sizes == [900, 100]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_mapped_and_give_their_ids(tmp_path, dtype):
    ids = np.random.default_rng(1).integers(0, 5000, 2000).astype(dtype)
    ids.tofile(tmp_path / "tokens.bin")
    options = {"vocab_size": 5000, "token_dtype": dtype, "valid_fraction": 0.25}
    train = open_split("train", str(tmp_path / "tokens.bin"), 32, **options)
    assert isinstance(train.tokens, np.memmap) and not train.in_bytes
    assert train[3][0].tolist() == ids[96:128].tolist()
    assert len(open_split("valid", str(tmp_path / "tokens.bin"), 32, **options).tokens) == 500


def test_a_source_of_its_own_is_held_out_and_data_is_trained_on_as_a_whole(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    (tmp_path / "b.txt").write_bytes(b"b" * 50)
    options = {"valid_path": str(tmp_path / "b.txt")}
    assert open_split("train", str(tmp_path / "a.txt"), 8, **options).tokens.tobytes() == b"a" * 100
    assert open_split("valid", str(tmp_path / "a.txt"), 8, **options).tokens.tobytes() == b"b" * 50


def test_validation_reads_a_fixed_number_of_blocks_from_all_over(folder):
    valid = open_split("valid", str(folder), 10, patterns=["*.txt"], valid_fraction=0.5, valid_blocks=7)
    assert len(valid) == 7 and len(valid.__getitems__(range(7))) == 7
    assert spread(100, 5).tolist() == [0, 24, 49, 74, 99] and spread(3, 5).tolist() == spread(3, 0).tolist() == [
        0,
        1,
        2,
    ]


def test_the_fingerprint_tells_content_and_cutting_apart():
    tokens = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    changed = tokens.copy()
    changed[10] ^= 1
    prints = [
        TokenBlocks(*args).fingerprint()
        for args in ((tokens, 10, 256), (changed, 10, 256), (tokens, 20, 256), (tokens[:-1], 10, 256))
    ]
    assert len(set(prints)) == 4 and TokenBlocks(tokens.copy(), 10, 256).fingerprint() == prints[0]


def test_the_default_data_is_on_this_machine_and_without_tests():
    names = find_files(standard_library(), ["*.py"])
    assert "os.py" in names and len(names) > 100
    assert not [name for name in names if "/test/" in f"/{name}" or "site-packages" in name]


@pytest.mark.parametrize(
    "write, options, words",
    [
        (lambda p: None, {}, "no such file or folder"),
        (lambda p: p.mkdir(), {}, "no file in"),
        (lambda p: p.write_bytes(b""), {}, "is empty"),
        (lambda p: p.write_bytes(b"short"), {}, "task.tokens_per_sample"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_a_sentence(tmp_path, write, options, words):
    path = tmp_path / "data"
    write(path)
    with pytest.raises(ConfigError, match=words):
        open_split("train", str(path), 16, **options)


def test_held_out_text_shorter_than_a_block_names_the_fraction(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="task.valid_fraction"):
        open_split("valid", str(tmp_path / "one.txt"), 16)


def test_token_ids_beyond_the_vocabulary_are_refused_when_opened_and_when_read(tmp_path):
    ids = np.zeros(1000, dtype=np.uint16)
    ids[500] = 300
    ids.tofile(tmp_path / "tokens.bin")
    with pytest.raises(ConfigError, match=r"token id 300.*task.vocab_size=301"):
        open_split("train", str(tmp_path / "tokens.bin"), 16, vocab_size=256)
    with pytest.raises(ValueError, match="token id 300"):
        TokenBlocks(ids, 100, 256, in_bytes=False).__getitems__([5])


def test_a_token_file_of_broken_length_is_refused(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"\1" * 1001)
    with pytest.raises(ConfigError, match="task.token_dtype=uint16"):
        open_split("train", str(tmp_path / "tokens.bin"), 16)


# ---- model


@pytest.mark.parametrize(
    "changes", [{}, {"positions": "learned"}, {"max_ngram": 0}, {"tie_embeddings": True}, {"num_layers": 1}]
)
def test_no_position_sees_what_comes_after_it(changes):
    model = small_model(**changes).eval()
    tokens = torch.randint(0, 256, (2, 12))
    later = tokens.clone()
    later[:, 7:] = torch.randint(0, 256, (2, 5))
    one, other = model(tokens), model(later)
    assert torch.allclose(one[:, :7], other[:, :7], atol=1e-5)
    assert not torch.allclose(one[:, 7:], other[:, 7:], atol=1e-2)


def test_a_position_sees_all_that_comes_before_it():
    model = small_model(max_ngram=0, num_layers=1).eval()
    tokens = torch.randint(0, 256, (1, 12))
    for place in range(12):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 256
        assert not torch.allclose(model(tokens)[0, -1], model(changed)[0, -1], atol=1e-6), place


def test_ngrams_depend_on_their_own_tokens_only_and_differ():
    tokens = torch.randint(0, 256, (1, 50))
    moved = torch.cat([torch.randint(0, 256, (1, 3)), tokens], dim=1)
    for n, (row, later) in enumerate(zip(ngram_rows(tokens, 4, 1 << 20), ngram_rows(moved, 4, 1 << 20)), start=2):
        assert torch.equal(row[:, n - 1 :], later[:, 3 + n - 1 :])
        assert 0 <= row.min() and row.max() < 1 << 20 and len(row.unique()) >= 49
    pairs = torch.cartesian_prod(torch.arange(256), torch.arange(256))[:, None].flatten(1)
    rows = ngram_rows(pairs, 2, 1 << 16)[0][:, 1]
    assert len(rows.unique()) > 0.6 * (1 << 16)  # as many as random hashing leaves: 63 %


def test_tied_embeddings_are_one_tensor_and_untied_two():
    tied, untied = small_model(tie_embeddings=True), small_model()
    assert tied.head.weight is tied.embedding.weight and untied.head.weight is not untied.embedding.weight


def test_recomputed_tables_are_in_no_checkpoint():
    assert not [name for name in small_model().state_dict() if "rotary" in name]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dim": 18, "num_heads": 4}, "model.dim"),
        ({"positions": "relative"}, "rotary, learned"),
        ({"dropout": 1.0}, "dropout"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_impossible_sizes_are_refused_with_a_sentence(changes, words):
    with pytest.raises(ConfigError, match=words):
        small_model(**changes)


def test_a_text_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match="max_length is 12"):
        small_model()(torch.zeros(1, 13, dtype=torch.int64))


# ---- criterion


def test_the_loss_is_the_sum_over_targets_that_count():
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[0, 1, -100], [4, -100, 2]])
    model = torch.nn.Identity()
    loss, sample_size, output = CrossEntropy()(model, (logits, targets))
    by_hand = -sum(
        logits.log_softmax(-1)[i, j, t] for i, row in enumerate(targets) for j, t in enumerate(row) if t >= 0
    )
    assert torch.isclose(loss, by_hand) and sample_size == 4 and torch.equal(output["loss"], loss)


def test_smoothing_changes_training_and_not_evaluation():
    sample = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    plain, smooth = torch.nn.Identity(), torch.nn.Identity()
    assert CrossEntropy(0.1)(smooth.train(), sample)[0] != CrossEntropy()(plain, sample)[0]
    assert CrossEntropy(0.1)(smooth.eval(), sample)[0] == CrossEntropy()(plain, sample)[0]


# ---- sampling


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}, {"max_ngram": 0}, {"max_ngram": 5}])
def test_the_cache_changes_no_logit(changes):
    model = small_model(**changes).eval()
    tokens = torch.randint(0, 256, (2, 12))
    logits, cache = model(tokens), model.new_cache()
    for length in range(4, 13):
        assert torch.allclose(model(tokens[:, :length], cache), logits[:, length - 1 : length], atol=1e-5), length


def test_a_text_may_grow_beyond_the_longest_context_from_any_prompt():
    model = small_model()
    for prompt in (b"a", b"a" * 11, b"a" * 12, b"a" * 40):
        assert len(sample_text(model, prompt, 30)) == len(prompt) + 30


def test_a_sample_is_a_function_of_its_arguments_and_moves_no_other_random_number():
    model = small_model().train()
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    one = sample_text(model, b"def ", 30, 0.8, 0, seed=5)
    assert torch.equal(torch.randn(4), expected) and model.training
    assert one == sample_text(model, b"def ", 30, 0.8, 0, seed=5) != sample_text(model, b"def ", 30, 0.8, 0, seed=6)
    assert one.startswith(b"def ") and len(one) == 34
    assert len(sample_text(model, b"", 5)) == 5


def test_temperature_zero_and_top_1_take_the_likeliest():
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    generator = torch.Generator().manual_seed(0)
    assert (
        {draw(logits, 0, 0, generator) for _ in range(20)}
        == {1}
        == {draw(logits, 1.0, 1, generator) for _ in range(20)}
    )
    assert {draw(logits, 1.0, 2, generator) for _ in range(60)} == {1, 2}


# ---- task


def settings(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(LanguageModeling.Config()), **changes})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"valid_fraction": 0.0}, "valid_fraction"),
        ({"tokens_per_sample": 0}, "tokens_per_sample"),
        ({"vocab_size": 100}, "vocab_size=256"),
        ({"sample_temperature": -1.0}, "sample_temperature"),
        ({"data": "a.bin", "valid_data": "b.txt"}, "both must be .bin"),
    ],
)
def test_impossible_settings_are_told(changes, words):
    assert words in "; ".join(config_problems(settings(**changes)))


def test_the_defaults_are_possible_settings():
    assert config_problems(settings()) == []


SMALL = [
    "common.cpu=true",
    "common.num_threads=1",
    "common.log_format=none",
    "dataset.batch_size=4",
    "task.tokens_per_sample=32",
    "task.valid_blocks=8",
    "task.sample_bytes=20",
    "model.dim=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.ngram_rows=256",
    "model.dropout=0.1",
    "lr_scheduler.warmup_updates=2",
]


def fairtrain(cwd: Path, *overrides: str, status: int = 0) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "trainer", "task=language_modeling", *SMALL, *overrides]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def log_lines(run_dir: Path, *events: str) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [{**line, "wall": None} for line in lines if line["event"] in events]


def test_a_run_in_two_parts_has_the_numbers_samples_and_text_of_one_run(folder, tmp_path):
    data = [
        f"task.data={folder}",
        "task.patterns=['*.txt']",
        "task.valid_fraction=0.3",
        "dataset.validate_interval_updates=4",
    ]
    horizon = ["lr_scheduler.total_num_update=10"]
    fairtrain(tmp_path, *data, *horizon, "run_dir=whole", "optimization.max_update=10")
    fairtrain(tmp_path, *data, *horizon, "run_dir=parts", "optimization.max_update=4")
    fairtrain(tmp_path, *data, *horizon, "run_dir=parts", "optimization.max_update=10")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert log_lines(whole, "train", "valid") == log_lines(parts, "train", "valid")
    for name in ("update_4.txt", "update_8.txt", "update_10.txt"):
        text = (whole / "samples" / name).read_bytes()
        assert text == (parts / "samples" / name).read_bytes() and text.startswith(b"def ")
    for line in log_lines(whole, "valid"):
        assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2), rel=1e-12)
    assert [line["num_updates"] for line in log_lines(whole, "sample")] == [4, 8, 10]


def test_token_files_report_bits_per_token_and_write_no_text(tmp_path):
    np.random.default_rng(0).integers(0, 1000, 5000).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    fairtrain(tmp_path, "task.data=tokens.bin", "task.vocab_size=1000", "run_dir=run", "optimization.max_update=3")
    (line,) = log_lines(tmp_path / "run", "valid")
    assert 9 < line["bits_per_token"] < 12 and "bits_per_byte" not in line
    assert not (tmp_path / "run" / "samples").exists()


def test_missing_data_ends_with_status_2_and_leaves_no_run(tmp_path):
    said = fairtrain(tmp_path, "task.data=nowhere", "run_dir=run", "optimization.max_update=3", status=2)
    assert "task.data=nowhere: there is no such file or folder" in said and "Traceback" not in said
    assert not (tmp_path / "run" / "log.jsonl").exists()
