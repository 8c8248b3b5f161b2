"""README.md and docs/: every command does what stands there, every name in them exists, every link leads somewhere.

Runs are shortened by overrides that are appended to the command as it stands. `python -m tests.test_readme` writes the
tables of docs/config.md anew.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_file import write_checkpoint_file
from tests.commands import ROOT, Finished, fairtrain, start

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CONFIG_PAGE = ROOT / "docs" / "config.md"
BEGIN, END = "<!-- fields: begin -->", "<!-- fields: end -->"
SECTIONS = ("common", "dataset", "optimization", "checkpoint", "distributed_training", "ema")
GROUPS = ("task", "model", "criterion", "optimizer", "lr_scheduler")
READERS_OWN = {"my_task", "mine", "large"}  # options of groups that a reader is told to make

# ---- what a page consists of


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands(page: Path) -> list[str]:
    """The lines of shell blocks, comments cut off; scripts (#!) are not among them."""
    lines = [line for block in blocks(page, "sh") if not block.startswith("#!") for line in block.splitlines()]
    return [re.sub(r"\s+#\s.*$", "", line) for line in lines if line.strip()]


def scripts(page: Path) -> list[str]:
    return [block for block in blocks(page, "sh") if block.startswith("#!")]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def all_code(page: Path) -> str:
    return "\n".join([*inline_code(page), *commands(page), *scripts(page)])


# ---- names and links


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    files = [target.partition("#")[0] for target in targets if not target.startswith("https://")]
    assert [target for target in files if not (page.parent / target).exists()] == []


def tree_of_readme() -> list[str]:
    """The paths in README's tree, relative to the repository."""
    (tree,) = [block for block in blocks(PAGES[0], "") if "trainer.py" in block]
    paths, folder = [], ""
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else (name if name.endswith("/") else "")
        paths.append(name if name == folder else folder * line.startswith(" ") + name)
    return paths


def test_the_tree_is_what_is_there():
    named = tree_of_readme()
    assert [path for path in named if not (ROOT / path).exists()] == []
    folders = (".", "distributed_utils", "checkpoint_file", "checkpoint_utils", "trainer")
    found = [path.relative_to(ROOT) for folder in folders for path in ROOT.glob(f"{folder}/*.py")]
    modules = {str(path) for path in found if not path.name.startswith(("_", "setup"))}
    assert sorted(modules - set(named)) == [], "name these in README.md's tree"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_are_named_exist(page):
    pattern = r"(?:trainer|checkpoint_file|checkpoint_utils|distributed_utils|tests|configs|examples|benchmarks|docs)/[\w./]+"
    named = {match for match in re.findall(pattern, all_code(page)) if "…" not in match}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_fields_that_are_named_exist(page):
    pattern = rf"(?<![\w./-])({'|'.join((*SECTIONS, *GROUPS))})\.([a-z_]\w*)(?![\w{{(.])"
    found = re.findall(pattern, all_code(page))
    named = {f"{section}.{field}" for section, field in found if field not in ("md", "pt", "py")}
    assert sorted(named - known_fields()) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_options_that_are_named_exist(page):
    named = set(re.findall(rf"(?<![\w./])({'|'.join(GROUPS)})=([a-z]\w*)", all_code(page)))
    named = {(group, option) for group, option in named if option not in READERS_OWN}
    assert sorted(pair for pair in named if not (ROOT / "configs" / pair[0] / f"{pair[1]}.yaml").exists()) == []


def test_classes_and_functions_of_the_tour_exist():
    folders = ("distributed_utils", "checkpoint_file", "checkpoint_utils", "trainer", "tests")
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py"))]
    source = "\n".join(path.read_text() for path in files)
    names = set()
    for code in inline_code(ROOT / "docs" / "tour.md"):
        if match := re.fullmatch(r"([A-Z]\w+)(?:\.(\w+))?", code):
            names |= {name for name in match.groups() if name}
        elif match := re.match(r"(\w+)\(", code):
            names.add(match[1])
    assert len(names) > 30
    assert [name for name in sorted(names) if not re.search(rf"(?:def|class) {name}\b", source)] == []


def test_flags_of_the_tools_exist():
    from trainer import plot
    from trainer.tasks import sample

    known = {flag for parser in (sample.parser(), plot._parser()) for flag in parser._option_string_actions}
    table = PAGES[0].read_text().partition("| `sample.py` |")[2].partition("\n\n")[0]
    ours = [cell for row in table.splitlines() for cell in row.split("|")[2:4]]
    assert [flag for cell in ours for flag in re.findall(r"(?<!\w)--?[a-z][\w-]*", cell) if flag not in known] == []


# ---- fields, and their tables in docs/config.md


@functools.cache
def known_fields() -> frozenset[str]:
    from trainer.config import section_classes

    fields = [f"{name}.{field.name}" for name, cls in section_classes().items() for field in dataclasses.fields(cls)]
    for group in GROUPS:
        fields.append(f"{group}._target_")
        for path in (ROOT / "configs" / group).glob("*.yaml"):
            if group != "task":
                fields += [f"{group}.{key}" for key, _, _ in yaml_fields(path)]
    fields += [f"task.{field.name}" for cls in task_classes().values() for field in task_fields(cls)]
    return frozenset(fields)


def task_classes() -> dict[str, type]:
    from trainer.tasks.dit.digits import Digits
    from trainer.tasks.dit.task import ClassConditionalImages
    from trainer.tasks.language_modeling.task import LanguageModeling

    return {"digits": Digits, "dit": ClassConditionalImages, "language_modeling": LanguageModeling}


def task_fields(cls: type) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(cls.Config)


def yaml_fields(path: Path) -> list[tuple[str, str, str]]:
    """(key, value, meaning) of an option's file: `key: value # meaning`."""
    lines = [re.fullmatch(r"(\w+): (.*?)(?:\s+# (.*))?", line) for line in path.read_text().splitlines()]
    return [(line[1], line[2], line[3] or "") for line in lines if line and line[1] != "_target_"]


def dataclass_rows(fields: tuple[dataclasses.Field, ...], prefix: str) -> list[tuple[str, str, str]]:
    def default(field: dataclasses.Field) -> Any:
        return field.default if field.default is not dataclasses.MISSING else field.default_factory()

    return [(f"{prefix}.{field.name}", word(default(field)), field.metadata["help"]) for field in fields]


def word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def table(title: str, rows: list[tuple[str, str, str]], says: str = "") -> str:
    lines = [f"### {title}", "", *([says, ""] if says else []), "| field | default | meaning |", "|---|---|---|"]
    for key, default, meaning in rows:
        cells = f"`{key}`", f"`{default}`" if default else "", meaning.replace("|", "\\|")
        lines.append(re.sub(r"\| +(?=\|)", "| ", f"| {' | '.join(cells)} |"))
    return "\n".join(lines)


def tables() -> str:
    """All fields of the sections, of the tasks and of the parts, from the source."""
    from trainer.config import section_classes

    made = [table(name, dataclass_rows(dataclasses.fields(cls), name)) for name, cls in section_classes().items()]
    made += [table(f"task={name}", dataclass_rows(task_fields(cls), "task")) for name, cls in task_classes().items()]
    for group, options in {
        "model": ["dit_s_8", "transformer_lm", "gpt2"],
        "criterion": ["diffusion", "cross_entropy"],
        "optimizer": ["adamw", "adam", "sgd", "adafactor"],
        "lr_scheduler": ["fixed", "cosine", "inverse_sqrt", "polynomial_decay", "tri_stage", "wsd", "reduce_lr_on_plateau"],
    }.items():
        for option in options:
            path = ROOT / "configs" / group / f"{option}.yaml"
            says = path.read_text().partition("\n")[0].removeprefix("# ")
            fields = [(key, "" if group == "model" else value, meaning) for key, value, meaning in yaml_fields(path)]
            rows = [(f"{group}.{key}", value, meaning) for key, value, meaning in fields]
            made.append(table(f"{group}={option}", rows, says))
    return "\n\n".join(made)


def page_with_tables() -> str:
    before, rest = CONFIG_PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


def test_every_schedule_has_its_table():
    text = CONFIG_PAGE.read_text()
    missing = [p.stem for p in (ROOT / "configs" / "lr_scheduler").glob("*.yaml") if f"### lr_scheduler={p.stem}\n" not in text]
    assert not missing


def test_the_tables_of_the_config_are_those_of_the_source():
    assert CONFIG_PAGE.read_text() == page_with_tables(), "write them anew: python -m tests.test_readme"


# ---- commands

TINY = "common.cpu=true common.num_threads=1 common.log_format=simple dataset.num_workers=0".split()
DIFFUSION = "model.hidden_size=32 model.depth=1 model.num_heads=2 dataset.batch_size=8".split()
SHORT = {
    "digits": [
        *TINY,
        *DIFFUSION,
        *"optimization.max_update=12 task.samples_per_class=0 dataset.validate_interval_updates=0".split(),
    ],
    "dit": [*TINY, *DIFFUSION, "optimization.max_update=3", "task.sample_num_classes=0"],
    "language_modeling": [
        *TINY,
        *"optimization.max_update=3 dataset.batch_size=4 model.dim=32 model.num_layers=1 model.ngram_rows=64".split(),
        *"task.tokens_per_sample=32 task.valid_blocks=4 task.sample_bytes=0".split(),
    ],
}
TOOLS = {
    "fairtrain-checkpoint": "trainer.tools.checkpoint",
    "fairtrain-eval": "trainer.tools.eval",
    "fairtrain-verify-resume": "trainer.tools.verify_resume",
}
PLACES = {  # what a reader puts in: the place in the working folder of this test
    "PATH": "text",
    "FOLDER": "images",
    "/path/to/data": "latents",
    "/path/to/model.pt": "model.pt",
    "N": "2",
    "HOST:29500": "localhost:29500",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader would stand: a text, images, latents, the example, a trained run in outputs/digits."""
    pytest.importorskip("sklearn")
    here = tmp_path_factory.mktemp("reader")
    (here / "examples").symlink_to(ROOT / "examples")
    (here / "text").mkdir()
    for i in range(40):
        (here / "text" / f"{i}.txt").write_text(f"{i} bottles of beer on the wall. " * 100)
    make_images_and_latents(here)
    done = fairtrain("task=digits", *SHORT["digits"], cwd=here, timeout=120)
    assert done.status == 0, done.output
    return here


def make_images_and_latents(here: Path) -> None:
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        for kind in ("images", "latents"):
            (here / kind / name).mkdir(parents=True)
        for i in range(16):
            pixels = generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(here / "images" / name / f"{i}.png")
            np.save(here / "latents" / name / f"{i}.npy", generator.normal(size=(4, 8, 8)).astype(np.float32))


def typed(command: str) -> list[str]:
    """The words of a command, the reader's own places put in."""
    words = []
    for typed_word in shlex.split(command):
        key, equals, value = typed_word.partition("=")
        words.append(f"{key}={PLACES.get(value, value)}" if equals else PLACES.get(typed_word, typed_word))
    return words


def task_of(words: list[str]) -> str:
    return next((word.removeprefix("task=") for word in words if word.startswith("task=")), "digits")


def run(words: list[str], cwd: Path, *more: str) -> Finished:
    """Run a fairtrain command, shortened; it must end well."""
    shortened = SHORT.get(task_of(words), TINY) if not any("_target_" in word for word in words) else TINY
    done = fairtrain(*words, *shortened, *more, cwd=cwd, timeout=120)
    assert done.status == 0, f"{shlex.join(words)}\n{done.output}"
    return done


def composed(words: list[str], cwd: Path, monkeypatch) -> None:
    """A command's config is found good, for each point of a sweep."""
    from trainer import cli, sweep
    from trainer.config import complete_config

    monkeypatch.chdir(cwd)
    monkeypatch.setenv("PROJECT", "digits")
    flags = cli.parse_flags(words)
    for overrides in sweep._points(flags) if flags.multirun else [flags.overrides]:
        flags.overrides = overrides
        complete_config(cli.require_task(cli.compose(flags).cfg))


def parsed_by_torchrun(words: list[str]) -> list[str]:
    """What torchrun gives to each rank."""
    from torch.distributed.run import parse_args

    arguments = parse_args(words)
    assert arguments.module and arguments.training_script == "trainer", words
    return arguments.training_script_args


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_is_one(page, folder, monkeypatch, capsys):
    """Makefile targets, torchrun's and fairtrain's arguments, configs: all that can be told without training."""
    for command in commands(page):
        name, *words = typed(command)
        if name == "timeout":
            name, *words = words[2:]
        if name == "make":
            done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        elif name == "torchrun":
            composed(parsed_by_torchrun(words), folder, monkeypatch)
        elif name == "fairtrain":
            of_reader = "task._target_=my_task.Digits" in words or any("my_lm." in word for word in words)  # run elsewhere
            if "--help" not in words and not of_reader:
                composed(words, folder, monkeypatch)
        elif name == "python":
            assert words[0] == "-m" or (ROOT / words[0]).exists(), command
        elif name == "kill":
            assert hasattr(signal, f"SIG{words[0].removeprefix('-')}"), command
        else:
            assert name in ("fairtrain-sample", "fairtrain-plot", *TOOLS), command


def test_the_folder_of_a_point_is_named_as_the_page_says(folder, monkeypatch):
    from trainer import cli, sweep

    monkeypatch.chdir(folder)
    (command,) = [command for command in commands(CONFIG_PAGE) if "--multirun" in command]
    points = sweep._points(cli.parse_flags(typed(command)[1:]))
    assert len(points) == 4
    assert f"outputs/sweep/{sweep.point_name(points[0])}" in [block.strip() for block in blocks(CONFIG_PAGE, "")]


def test_a_resume_says_what_the_page_shows(folder):
    (shown,) = [text for text in blocks(ROOT / "docs" / "resume.md", "") if text.startswith("continue from")]
    output = run(["resume=outputs/digits"], folder, "optimization.max_update=16").output
    pattern = r"(continue from \S+) \(update \d+, epoch \d+\)\n  (restored: model) \(\d+ tensors\)(.*)\n"
    found, said = re.search(pattern, shown), re.search(pattern, output)
    assert said is not None and said.groups() == found.groups(), output
    row = r"^  optimization.max_update +\d+ +\d+ +typed$"
    assert re.search(row, shown, re.MULTILINE) and re.search(row, output, re.MULTILINE), output


def demonstration() -> list[list[str]]:
    block = next(block for block in blocks(PAGES[0], "sh") if "timeout" in block)
    return [shlex.split(line) for line in block.splitlines()]


def test_the_killed_run_of_the_readme_has_the_numbers_of_the_whole_one(folder):
    whole, killed, again, compare = demonstration()
    more = ["optimization.max_update=200", "checkpoint.save_interval_updates=50", "lr_scheduler.warmup_updates=10"]
    assert killed[:2] == ["timeout", "--signal=KILL"] and killed[3:] == again, "the second command is the third, killed"
    run(whole[1:], folder, *more)
    running = start(*again[1:], *SHORT["digits"], *more, cwd=folder)
    wait_for(folder / "outputs" / "killed" / "checkpoints" / "checkpoint_last.pt")
    os.killpg(running.process.pid, signal.SIGKILL)
    assert running.wait().status == -signal.SIGKILL, "it was done before it could be killed"
    run(again[1:], folder, *more)
    done = subprocess.run([sys.executable, *compare[1:]], cwd=folder, capture_output=True, text=True)
    said = "all 201 lines are equal, the last is {'event': 'valid'"
    assert done.returncode == 0 and done.stdout.startswith(said), done.stdout


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.002)


def test_the_task_of_the_readme_trains_and_goes_on(folder):
    (source,) = blocks(PAGES[0], "python")
    (folder / "my_task.py").write_text(source)
    (command,) = [command for command in commands(PAGES[0]) if "my_task.Digits" in command]
    words = typed(command)[1:]
    run(words, folder, "optimization.max_epoch=1")
    run(words, folder, "optimization.max_epoch=3")
    log = [json.loads(line) for line in (folder / "outputs" / "my_digits" / "log.jsonl").read_text().splitlines()]
    valid = [line for line in log if line["event"] == "valid"]
    assert [line["epoch"] for line in valid] == [1, 2, 3] and valid[-1]["correct"] > 0.8
    updates = [line["num_updates"] for line in log if line["event"] == "train"]
    assert updates == list(range(1, valid[-1]["num_updates"] + 1))


@pytest.mark.parametrize(
    "part, more",
    [
        ("fairtrain task=language_modeling", []),
        ("fairtrain task=dit", []),
        ("fairtrain resume=", ["optimization.max_update=14"]),
        ("--cfg job", []),
        pytest.param("distributed_world_size=2", [], marks=pytest.mark.slow),  # two ranks run under torchrun below
    ],
)
def test_commands_of_the_readme_run(part, more, folder):
    """Those that are worth it, by a part that names them; all others are composed above."""
    (command,) = [command for command in commands(PAGES[0]) if part in command]
    run(typed(command)[1:], folder, *more)


def test_pictures_and_curves_of_the_readme_are_drawn(folder):
    modules = {"fairtrain-sample": "trainer.tasks.sample", "fairtrain-plot": "trainer.plot"}
    for name in ("whole", "killed"):
        if not (folder / "outputs" / name).exists():
            shutil.copytree(folder / "outputs" / "digits", folder / "outputs" / name)
    for command in commands(PAGES[0]):
        name, *words = typed(command)
        if name in modules:
            short = ["--steps", "2", "-n", "1", "--device", "cpu"] if name == "fairtrain-sample" else []
            done = fairtrain(*words, *short, cwd=folder, module=modules[name])
            assert done.status == 0, f"{command}\n{done.output}"
            assert "-o" not in words or (folder / words[words.index("-o") + 1]).stat().st_size > 0


def test_commands_of_the_tools_run_as_their_page_has_them(folder):
    """One after another, as a reader would type them; a run of one's own is put where the page has one."""
    saved = folder / "outputs" / "digits" / "checkpoints"
    for name in ("whole", "killed"):
        if not (folder / "outputs" / name).exists():
            shutil.copytree(folder / "outputs" / "digits", folder / "outputs" / name)
    state = torch.load(saved / "checkpoint_last.pt", weights_only=True)
    for update in (10, 11):
        state["optimizer_history"][-1]["num_updates"] = update
        write_checkpoint_file(state, saved / f"checkpoint_1_{update}.pt")
    for command in commands(ROOT / "docs" / "tools.md"):
        name, *words = typed(command)
        short = [] if name == "fairtrain-checkpoint" else SHORT["digits"]
        if name == "fairtrain-verify-resume":
            words[words.index("-n") + 1] = words[words.index("-m") + 1] = "1"
        done = fairtrain(*words, *short, cwd=folder, module=TOOLS[name], timeout=180)
        assert done.status == 0, f"{command}\n{done.output}"
        if "-o" in words:
            assert (folder / words[words.index("-o") + 1]).exists()
    assert not (saved / "checkpoint_1_10.pt").exists() and (saved / "checkpoint_1_11.pt").exists()


def test_dit_continues_from_a_file_under_torchrun(folder):
    (command,) = [command for command in commands(PAGES[0]) if "restore_file=/path/to/model.pt" in command]
    words = typed(command)
    fresh = [word for word in parsed_by_torchrun(words[1:]) if "restore_file" not in word]
    run(fresh, folder, "run_dir=outputs/first")
    shutil.copy(folder / "outputs" / "first" / "checkpoints" / "checkpoint_last.pt", folder / "model.pt")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--master_port={port}", *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command += [*SHORT["dit"], "optimization.max_update=5", "run_dir=outputs/continued"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (folder / "outputs" / "continued" / "log.jsonl").read_text().splitlines()]
    assert [line["num_updates"] for line in log if line["event"] == "train"] == [4, 5]
    sizes = [line["sample_size"] for line in log if line["event"] == "train"]
    assert sizes == [8.0, 16.0], "the last 8 of the 32 samples that the file's epoch has left, then both ranks' 8"


# ---- scripts that start a run again


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_scripts_start_again_while_there_is_something_to_do(page, folder, monkeypatch):
    for number, script in enumerate(scripts(page)):
        place = folder / f"{page.stem}_{number}"
        place.mkdir()
        launched = "srun" if "srun" in script else "torchrun" if "torchrun" in script else "fairtrain"
        for name in (launched, "scontrol"):
            # Each call is written down; the third one is done, those before it were stopped.
            calls = f"{place}/{name}.calls"
            (place / name).write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ $(wc -l < {calls}) -ge 3 ] || exit 75\n')
            (place / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=30)
        calls = [typed(call) for call in (place / f"{launched}.calls").read_text().splitlines()]
        if launched == "srun":
            assert done.returncode == 75 and (place / "scontrol.calls").read_text() == "requeue 17\n"
            calls = [call[call.index("trainer") + 1 :] for call in calls]
        else:
            assert done.returncode == 0 and len(calls) == 3, done
            calls = [parsed_by_torchrun(call) for call in calls] if launched == "torchrun" else calls
        composed(calls[0], folder, monkeypatch)


if __name__ == "__main__":
    CONFIG_PAGE.write_text(page_with_tables())
