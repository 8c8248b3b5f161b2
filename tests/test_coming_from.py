"""docs/coming-from-*: each command runs as it stands there, on files that the other programs wrote, made short."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.commands import ROOT, fairtrain

FIXTURES = ROOT / "tests" / "fixtures"
TINY = "common.cpu=true common.num_threads=1 common.log_format=simple dataset.num_workers=0 dataset.batch_size=4".split()
DIT = "model.hidden_size=32 model.depth=2 model.num_heads=2 optimization.max_update=14 task.sample_num_classes=0".split()
LM = "task.valid_blocks=4 task.sample_bytes=0 dataset.validate_interval_updates=0".split()
GPT2 = "task.vocab_size=48 task.tokens_per_sample=16 model.dim=16 model.num_layers=2 model.num_heads=2 optimization.max_update=11".split()
SHORT = {"fairseq": [*LM, "optimization.max_update=33"], "dit": DIT, "lightning-and-hugging-face": [*LM, *GPT2]}
PLACES = {
    "/path/to/data": "latents/10",
    "/path/to/other/classes": "latents/7",
    "/path/to/0050000.pt": "train.pt",
    "/path/to/DiT-XL-2-256x256.pt": "release.pt",
    "/path/to/gpt2": "gpt2",
    "/path/to/checkpoint-500": "checkpoint-500",
    "/path/to/ckpt.pt": "ckpt.pt",
}
STARTS = {"from_fairseq": 30, "from_dit": 12, "other_classes": 12, "from_trainer": 9, "from_nanogpt": 5}


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader would stand, with the files of other programs under the names of the pages."""
    here = tmp_path_factory.mktemp("reader")
    shutil.copy(ROOT / "examples" / "from_fairseq" / "my_lm.py", here)
    (here / "fairseq").mkdir()
    shutil.copy(FIXTURES / "fairseq" / "cfg_midepoch2_update30.pt", here / "fairseq" / "checkpoint_last.pt")
    shutil.copy(FIXTURES / "dit" / "dit_train_0000012.pt", here / "train.pt")
    shutil.copy(FIXTURES / "dit" / "dit_release_ema.pt", here / "release.pt")
    shutil.copytree(FIXTURES / "others" / "hf_sharded", here / "gpt2")
    shutil.copytree(FIXTURES / "others" / "hf_trainer_step9", here / "checkpoint-500")
    shutil.copy(FIXTURES / "others" / "nanogpt_ckpt_iter5.pt", here / "ckpt.pt")
    generator = np.random.default_rng(0)
    generator.integers(0, 48, 20_000).astype(np.uint16).tofile(here / "tokens.bin")
    for classes in (10, 7):
        for number in range(classes):
            (here / "latents" / str(classes) / f"{number}").mkdir(parents=True)
            for i in range(3):
                latent = generator.normal(size=(4, 8, 8)).astype(np.float32)
                np.save(here / "latents" / str(classes) / f"{number}" / f"{i}.npy", latent)
    return here


def words_of(command: str) -> list[str]:
    words = []
    for word in shlex.split(command)[1:]:
        key, equals, value = word.partition("=")
        words.append(f"{key}={PLACES.get(value, value)}" if equals else word)
    return words


@pytest.mark.parametrize("page", sorted(SHORT))
def test_every_command_runs(page, folder):
    path = ROOT / "docs" / f"coming-from-{page}.md"
    assert len(commands(path)) >= 2
    for command in commands(path):
        done = fairtrain(*words_of(command), *TINY, *SHORT[page], cwd=folder, timeout=120)
        assert done.status == 0, f"{command}\n{done.output}"
        run_dir = re.search(r"run_dir=(\S+)", command)[1]
        log = [json.loads(line) for line in (folder / run_dir / "log.jsonl").read_text().splitlines()]
        first = next(line["num_updates"] for line in log if line["event"] == "train")
        assert first == STARTS.get(Path(run_dir).name, 0) + 1, command


def test_the_page_shows_what_a_start_says(folder):
    page = (ROOT / "docs" / "coming-from-fairseq.md").read_text()
    shown = re.search(r"^  restored: (.*)$", page, re.MULTILINE)[1]
    log = (folder / "outputs" / "from_fairseq" / "log.jsonl").read_text().splitlines()
    said = next(line for line in map(json.loads, log) if line["event"] == "resume")
    assert ", ".join(said["restored"]).startswith(shown), said
