"""The command line: what is typed reaches the config unchanged, mistakes leave with 2 and bring what was meant."""

import contextlib
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trainer import cli, sweep
from trainer.config import complete_config, to_plain
from trainer.errors import ConfigError
from trainer.overrides import parse

OWN_TASK = textwrap.dedent(
    """
    import os, signal
    from dataclasses import dataclass
    import torch
    from trainer import Trainer

    class Own(Trainer):
        @dataclass
        class Config:
            classes: int = 3
            data: str = "here"
            fail: bool = False

        def build_model(self):
            return torch.nn.Linear(4, 1)

        def build_dataset(self, split):
            if self.cfg.task.fail:
                raise RuntimeError("this task fails")
            return [torch.full((4,), float(i)) for i in range(8)]

        def compute_loss(self, sample):
            loss = self.model(sample).square().sum()
            return loss, len(sample), {"loss": loss.detach()}

    class Net(torch.nn.Module):
        def __init__(self, width: int = 4, title: str = "net"):
            super().__init__()
            self.width = width

    def function():
        raise AssertionError("called")
    """
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a task of its own, also as options of --config-dir own."""
    (tmp_path / "own_task_of_a_test.py").write_text(OWN_TASK)
    for group, option, text in [
        (
            "task",
            "own",
            "# @package _global_\ndefaults: [{override /lr_scheduler: cosine}, _self_]\n"
            "task: {_target_: own_task_of_a_test.Own}\noptimization: {max_update: 4, lr: 1e-2}\n"
            "dataset: {batch_size: 4, valid_subset: null}\n",
        ),
        ("task", "other", "# @package _global_\ntask: {_target_: own_task_of_a_test.Own, classes: 7}\n"),
        ("model", "wide", "_target_: own_task_of_a_test.Net\nwidth: 64\n"),
        ("model", "narrow", "_target_: own_task_of_a_test.Net\nwidth: 1\n"),
        ("experiment", "e1", "# @package _global_\noptimization: {lr: 0.25}\n"),
    ]:
        (tmp_path / "own" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / group / f"{option}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_task_of_a_test", None)


def composed(*argv: str):
    """The completed config of a command line, and what counts as typed."""
    made = cli.compose(cli.parse_flags(["--config-dir=own", *argv] if os.path.isdir("own") else list(argv)))
    return complete_config(made.cfg), made.typed


def refused(capsys, *argv: str) -> str:
    """What is printed for a command line that leaves with 2."""
    assert cli.run(["--config-dir=own", *argv]) == cli.BAD_INPUT
    return capsys.readouterr().err


def saved_run(here, *argv: str, change=None) -> str:
    """A run's folder as its last start left it."""
    from trainer import run_folder

    cfg, typed = composed("task=own", f"run_dir={here / 'run'}", *argv)
    folder = run_folder.prepare(cfg.run_dir, cfg, True, typed)
    folder.write_config()
    folder.close()
    if change:
        path = here / "run" / ".hydra" / "config.yaml"
        tree = yaml.safe_load(path.read_text())
        change(tree)
        path.write_text(yaml.safe_dump(tree))
    return str(here / "run")


# Composing


def test_options_are_under_values_and_over_defaults(here):
    cfg, typed = composed("task=own", "model=wide", "optimization.lr=0.5", "task.classes=9")
    assert cfg.task == {"_target_": "own_task_of_a_test.Own", "classes": 9, "data": "here", "fail": False}
    assert (cfg.model.width, cfg.optimization.lr, cfg.optimization.max_update, cfg.common.seed) == (64, 0.5, 4, 1)
    assert cfg.lr_scheduler._target_ == "trainer.lr_scheduler.Cosine"
    assert cfg.task_name == "own" and cfg.run_dir == "outputs/own"
    assert typed == ["task=own", "model=wide", "optimization.lr=0.5", "task.classes=9"]


def test_the_order_of_options_and_values_does_not_matter(here):
    assert composed("optimization.lr=0.5", "model=wide", "task=own") == (
        composed("task=own", "optimization.lr=0.5", "model=wide")[0],
        ["optimization.lr=0.5", "model=wide", "task=own"],
    )


def test_a_task_may_be_named_by_its_class_alone(here):
    cfg, _ = composed("task._target_=own_task_of_a_test.Own", "task.classes=5", "optimization.max_epoch=1")
    assert cfg.task.classes == 5 and cfg.task_name == "run"


def test_groups_of_the_users_own_config_folder_work(here):
    assert composed("task=own", "+experiment=e1")[0].optimization.lr == 0.25


def test_flags_may_stand_anywhere(here):
    flags = cli.parse_flags(["task=own", "--config-dir", "own", "model=wide", "--cfg", "job", "a=b"])
    assert flags.overrides == ["task=own", "model=wide", "a=b"] and flags.cfg == "job"


def test_values_are_added_forced_and_deleted_as_in_hydra(here):
    cfg, _ = composed(
        "task=own",
        "+optimizer.foreach=true",
        "++optimizer.amsgrad=true",
        "~optimization.lr",
        "model={_target_: own_task_of_a_test.Net, width: 3}",
    )
    assert cfg.optimizer.foreach is True and cfg.optimizer.amsgrad is True
    assert cfg.optimization.lr == 1e-3 and cfg.model.width == 3


def test_each_shipped_task_composes():
    """Their classes come with their packages; the config itself must hold together."""
    for name in ("digits", "dit", "language_modeling"):
        made = cli.compose(cli.parse_flags([f"task={name}"]))
        assert made.cfg.task_name == name and made.cfg.task._target_.startswith("trainer.tasks.")
        assert made.cfg.optimization.max_update > 0


# Text and numbers


@pytest.mark.parametrize(
    "text",
    [
        "2024_10",
        "123E4",
        "1_000",
        "1e-4",
        "yes",
        "null_",
        "a=b",
        "a,b",
        "a b",
        "~x",
        "x~",
        "[a]",
        "{a}",
        "(a",
        "a:b",
        "'",
        "1.0",
        "true",
        "a'b",
        "ä",
        "#x",
        "%",
        "!",
    ],
)
@pytest.mark.parametrize("key", ["run_dir", "checkpoint.save_dir", "dataset.train_subset", "task.data", "model.title"])
def test_a_text_field_holds_the_text_that_was_typed(here, key, text):
    cfg, _ = composed("task=own", "model=wide", f"{key}={text}")
    assert OmegaConf.select(cfg, key) == text


@settings(max_examples=20, deadline=None)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="$\\"), min_size=1).filter(
        lambda t: t[0] not in "~'\"" and t.lower() != "null"
    )
)
def test_any_text_is_held_as_typed(text):
    made = cli.compose(cli.parse_flags(["--", f"checkpoint.save_dir={text}"]))
    assert made.cfg.checkpoint.save_dir == text


@pytest.mark.parametrize("quoted", ["'2024_10'", '"2024_10"'])
def test_quotes_around_the_whole_are_hydras(here, quoted):
    assert composed("task=own", f"task.data={quoted}")[0].task.data == "2024_10"


def test_null_is_null_where_a_field_takes_it_and_refused_where_it_does_not(here, capsys):
    assert composed("task=own", "common.wandb_project=null")[0].common.wandb_project is None
    assert "run_dir is text and cannot be null" in refused(capsys, "task=own", "run_dir=null")


def test_references_are_references_in_text_too(here):
    assert composed("task=own", "run_dir=out/${task_name}/${common.seed}")[0].run_dir == "out/own/1"


@pytest.mark.parametrize("written", ["1e-4", "0.0001", "1E-4", "'1e-4'", "[1e-4]"])
def test_numbers_typed_are_numbers(here, written):
    assert composed("task=own", f"optimization.lr={written}")[0].optimization.lr == 1e-4


@pytest.mark.parametrize("written", ["{lr: 0.1}", "{'lr': 0.1}"])
def test_optimizer_overrides_come_as_mapping_or_in_fairseqs_text(here, written):
    value = composed("task=own", f"checkpoint.optimizer_overrides={written}")[0].checkpoint.optimizer_overrides
    assert value == {"lr": 0.1} or value == "{'lr': 0.1}"


def test_a_text_in_a_yaml_file_that_became_a_number_is_refused_by_name(here, capsys):
    (here / "own" / "task" / "own.yaml").write_text(
        "# @package _global_\ntask: {_target_: own_task_of_a_test.Own, data: 2024_10}\ncheckpoint: {save_dir: 123E4}\n"
    )
    message = refused(capsys, "task=own", "optimization.max_update=1")
    assert "task.data takes text" in message and "checkpoint.save_dir takes text" in message


# Mistakes


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["task=owm"], ["there is no option task=owm", "Did you mean task=own?", "digits"]),
        (["taks=own"], ["there is no taks", "Did you mean task?"]),
        (["task=own", "modle=wide"], ["Did you mean model?"]),
        (["task=own", "model=wyde"], ["Did you mean model=wide?"]),
        (["task=own", "optimization.max_updates=3"], ["Did you mean optimization.max_update?"]),
        (["task=own", "max_update=3"], ["Did you mean optimization.max_update?"]),
        (["task=own", "task.clases=3"], ["Did you mean task.classes?"]),
        (["task=own", "model=wide", "model.widht=3"], ["Did you mean model.width?"]),
        (["task=own", "+task.clases=3"], ["Did you mean classes?"]),
        (["task=own", "optimizer=adamv"], ["Did you mean optimizer=adam"]),
        (["task=own", "optimization.max_update=many"], ["optimization.max_update takes a whole number"]),
        (["task=own", "optimization.lr=0.1,0.2"], ["--multirun"]),
        (["task=own", "common=3"], ["common is a section"]),
        (["task=own", "optimization.max_update=0"], ["nothing would end this run"]),
        (["task=own", "optimization.max_update=[1"], ["optimization.max_update=[1"]),
        (["task=own", "optimization"], ["not an override"]),
        (["task=own", "=3"], ["not an override"]),
        (["task=own", "task._target_=os.system"], ["task._target_", "function"]),
        (["task=own", "task._target_=own_task_of_a_test.function"], ["function"]),
        (["task=own", "~task.nothing"], ["there is no task.nothing"]),
        ([], ["no task is chosen"]),
        (["resume="], ["resume= needs the folder"]),
        (["resume=nowhere"], ["no such folder"]),
        (["task=own", "+hydra.nothing.x=3"], []),
        (["task=own", "--config-name=nothing"], ["nothing"]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else None,
)
def test_a_mistake_leaves_with_2_and_says_what_was_meant(here, capsys, argv, parts):
    if argv == ["task=own", "+hydra.nothing.x=3"]:
        pytest.skip("Hydra's own settings are Hydra's")
    message = refused(capsys, *argv)
    assert message.startswith("fairtrain: ") and "Traceback" not in message
    for part in parts:
        assert part in message


def test_all_mistyped_keys_are_told_at_once(here, capsys):
    message = refused(capsys, "task=own", "common.sead=1", "optimization.rl=1")
    assert "common.seed" in message and "optimization.lr" in message


def test_a_missing_config_folder_is_bad_input(capsys):
    assert cli.run(["--config-dir=/nowhere/at/all", "task=digits"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_nothing_is_written_for_a_bad_config(here, capsys):
    before = sorted(os.listdir(here))
    refused(capsys, "task=own", "optimization.max_update=0")
    assert sorted(set(os.listdir(here)) - {"__pycache__"}) == before


# resume=DIR


def test_a_saved_config_is_the_base_and_typed_values_come_last(here):
    saved_run(here, "optimization.lr=0.125", "task.classes=5", "model=wide")
    cfg, typed = composed("resume=run", "optimization.max_update=99", "task.data=2024_10")
    assert (cfg.optimization.lr, cfg.optimization.max_update, cfg.task.classes, cfg.task.data) == (
        0.125,
        99,
        5,
        "2024_10",
    )
    assert cfg.model.width == 64 and cfg.task_name == "own" and cfg.run_dir == "run"
    assert typed == ["optimization.max_update=99", "task.data=2024_10"]


def test_a_typed_option_replaces_its_section_and_no_other(here):
    saved_run(here, "model=wide", "model.title=old", "optimizer.weight_decay=0.5", "optimization.lr=0.125")
    cfg, _ = composed("resume=run", "model=narrow")
    assert cfg.model == {"_target_": "own_task_of_a_test.Net", "width": 1}
    assert cfg.optimizer.weight_decay == 0.5 and cfg.optimization.lr == 0.125
    cfg, _ = composed("resume=run", "task=other")
    assert cfg.task.classes == 7 and cfg.task_name == "other" and cfg.model.width == 64


def test_without_anything_typed_a_resumed_config_is_the_saved_one(here):
    run = saved_run(here, "model=wide", "checkpoint.save_interval_updates=3")
    assert to_plain(composed(f"resume={run}")[0]) == to_plain(
        composed("task=own", "model=wide", f"run_dir={run}", "checkpoint.save_interval_updates=3")[0]
    )


def test_a_saved_config_of_another_version_goes_on_with_what_is_known_and_says_what_is_not(here):
    """Settings that exist no more are left out, in sections and in what classes take; those that are new have defaults."""

    def change(tree):
        tree["optimization"]["use_old_clipping"] = True
        tree["model"]["depth_of_old"] = 3
        tree["task"]["gone"] = 1
        del tree["optimization"]["global_batch_size"], tree["ema"]

    run = saved_run(here, "model=wide", "task.classes=5", change=change)
    made = cli.compose(cli.parse_flags(["--config-dir=own", f"resume={run}", "optimization.lr=0.5"]))
    cfg = complete_config(made.cfg)
    assert (cfg.task["classes"], cfg.model.width, cfg.optimization.global_batch_size) == (5, 64, 0)
    told = " ".join(made.notices)
    assert all(name in told for name in ("optimization.use_old_clipping", "model.depth_of_old=3", "task.gone=1")), told


def test_paths_below_the_folder_follow_a_folder_that_was_moved(here):
    saved_run(here, "common.tensorboard_logdir=${run_dir}/tb")
    (here / "run").rename(here / "moved=a, b")
    cfg, _ = composed("resume=moved=a, b")
    assert cfg.run_dir == "moved=a, b" and cfg.checkpoint.save_dir == "moved=a, b/checkpoints"
    assert cfg.common.tensorboard_logdir == "moved=a, b/tb"
    assert composed("resume=moved=a, b", "checkpoint.save_dir=x")[0].checkpoint.save_dir == "x"


def test_a_save_folder_elsewhere_stays(here):
    saved_run(here, "checkpoint.save_dir=/elsewhere/c")
    assert composed("resume=run")[0].checkpoint.save_dir == "/elsewhere/c"


@pytest.mark.parametrize(
    "target",
    ["os.system", "pathlib.Path.write_text", "own_task_of_a_test.function", "torch.hub.load_state_dict_from_url", 3],
)
@pytest.mark.parametrize("section", ["task", "model", "optimizer"])
def test_a_saved_target_that_is_not_trusted_is_refused_by_name(here, capsys, section, target):
    saved_run(here, "model=wide", change=lambda tree: tree[section].update(_target_=target))
    message = refused(capsys, "resume=run")
    assert f"{section}._target_" in message and str(target) in message
    typed = {"task": "own_task_of_a_test.Own", "model": "own_task_of_a_test.Net", "optimizer": "torch.optim.AdamW"}[
        section
    ]
    assert composed("resume=run", f"{section}._target_={typed}")[0][section]._target_ == typed


def test_a_nested_saved_target_is_refused_too(here, capsys):
    saved_run(
        here,
        "model=wide",
        change=lambda tree: tree["model"].update(inner=[{"_target_": "os.system", "command": "true"}]),
    )
    assert "model.inner.0._target_" in refused(capsys, "resume=run")


def test_a_module_elsewhere_is_trusted_once_the_command_names_it(here, capsys, monkeypatch):
    saved_run(here, "model=wide")
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert cli.run([f"resume={here}/run"]) == 2
    assert "own_task_of_a_test.Own" in capsys.readouterr().err
    made = cli.compose(cli.parse_flags([f"resume={here}/run", "task._target_=own_task_of_a_test.Own"]))
    assert made.cfg.model._target_ == "own_task_of_a_test.Net"


def test_a_saved_reference_must_be_typed_again(here, capsys, monkeypatch):
    monkeypatch.setenv("SECRET_OF_A_TEST", "hunter2")
    saved_run(here, "common.wandb_project=${oc.env:SECRET_OF_A_TEST}")
    message = refused(capsys, "resume=run")
    assert "common.wandb_project=${oc.env:SECRET_OF_A_TEST}" in message and "hunter2" not in message
    cfg, _ = composed("resume=run", "common.wandb_project=${oc.env:SECRET_OF_A_TEST}")
    assert cfg.common.wandb_project == "hunter2"
    assert composed("resume=run", "common.wandb_project=null")[0].common.wandb_project is None


def test_fields_of_another_version_are_left_out_and_named(here):
    def age(tree):
        tree["common"].update(of_old=1)
        tree.update(section_of_old={"a": 1})
        del tree["common"]["seed"]

    saved_run(here, change=age)
    made = cli.compose(cli.parse_flags(["resume=run"]))
    assert complete_config(made.cfg).common.seed == 1
    assert any("common.of_old" in notice and "section_of_old" in notice for notice in made.notices)


# Shown


def test_cfg_job_shows_a_config_that_reads_back_equal_with_references_unresolved(here, capsys, monkeypatch):
    monkeypatch.setenv("SECRET_OF_A_TEST", "hunter2")
    argv = ["--config-dir=own", "task=own", "task.data=2024_10", "common.wandb_project=${oc.env:SECRET_OF_A_TEST}"]
    assert cli.run([*argv, "--cfg", "job"]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text
    assert complete_config(OmegaConf.create(text)) == composed(*argv[1:])[0]
    assert cli.run([*argv, "--cfg", "job", "--package", "optimization"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["max_update"] == 4


def test_help_names_groups_options_and_every_field(capsys):
    from trainer.config import known_keys

    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "task=digits|dit|language_modeling" in text
    assert all(key in text for key in known_keys())


@pytest.mark.parametrize("module", ["cli", "plot", "tasks.sample", "tools.checkpoint", "tools.eval", "tools.verify_resume"])
def test_a_reader_that_leaves_early_is_no_error(module, monkeypatch, capsys):
    command = importlib.import_module(f"trainer.{module}")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        try:
            status = cli.run(["--help"]) if command is cli else command.main(["--help"])
        except SystemExit as leaving:  # argparse's
            status = leaving.code
        with contextlib.suppress(BrokenPipeError if command is cli else ()):  # launch.leave sees to it for `fairtrain`
            stdout.flush()
            stdout.write("more")
        monkeypatch.undo()
        if command is cli:
            os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
    assert status == 0 and capsys.readouterr().err == ""


def test_hydras_own_view_of_the_config_works(capsys):
    assert cli.run(["--cfg", "hydra"]) == 0
    assert "hydra:" in capsys.readouterr().out


# In processes


def fairtrain(*argv: str, folder, **environment) -> subprocess.Popen:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.path.dirname(os.path.dirname(cli.__file__)),
        **environment,
    }
    command = [sys.executable, "-m", "trainer", "--config-dir=own", *argv]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=400)
    return process.returncode, (out or "") + err


def test_a_run_of_an_own_task_writes_one_folder_and_nothing_of_hydras(here):
    status, text = ended(fairtrain("task=own", "run_dir=runs/a=b, c", folder=here))
    assert status == 0, text
    assert sorted(os.listdir(here / "runs")) == ["a=b, c"] and not (here / "outputs").exists()
    kept = here / "runs" / "a=b, c" / ".hydra"
    assert yaml.safe_load((kept / "overrides.yaml").read_text()) == ["task=own", "run_dir=runs/a=b, c"]
    status, text = ended(fairtrain("resume=runs/a=b, c", "optimization.max_update=6", folder=here))
    assert status == 0, text
    lines = [json.loads(line) for line in (here / "runs" / "a=b, c" / "log.jsonl").read_text().splitlines()]
    assert [line["num_updates"] for line in lines if line["event"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert (kept / "1" / "config.yaml").exists()


def test_statuses_of_processes(here):
    runs = {
        2: fairtrain("task=own", "optimization.max_updat=3", folder=here),
        1: fairtrain("task=own", "task.fail=true", "run_dir=f", folder=here),
        0: fairtrain("task=own", "--info", "searchpath", folder=here),
    }
    for expected, process in runs.items():
        status, text = ended(process)
        assert status == expected, text
    assert "own" in text and "command-line" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_request_to_stop_while_starting_up_leaves_with_75_and_loads_no_torch(number):
    program = (
        "import os, sys, time; from trainer import cli, __main__ as early; assert 'torch' not in sys.modules; early.take_early_signals();"
        f"os.kill(os.getpid(), {int(signal.SIGUSR2)}); os.kill(os.getpid(), {int(number)}); time.sleep(60)"
    )
    status, text = ended(subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True))
    assert status == 75 and number.name in text


# --multirun


def test_a_points_name_is_flat_safe_and_its_own():
    hard = [
        ["a=1"],
        ["a=1", "b=2"],
        ["a=x/y"],
        ["a=x_y"],
        ["a=[1,2]"],
        ["a=[1_2]"],
        ["a=" + "x" * 500],
        ["a=" + "x" * 501],
        ["a= "],
        ["a=.."],
        ["a=ä"],
        ["~a"],
        ["a='1'"],
        [],
    ]
    names = [sweep.point_name(point) for point in hard]
    assert len(set(names)) == len(names)
    for name in names:
        assert (
            name
            and len(name) <= 120
            and set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._=,+-")
            and name[0] not in ".-~"
        )
    assert sweep.point_name(["b=2", "a=1", "run_dir=x"]) == sweep.point_name(["a=1", "b=2"]) == "a=1,b=2"


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b.c"]), st.text(max_size=200)), max_size=3),
    st.lists(st.tuples(st.sampled_from(["a", "b.c"]), st.text(max_size=200)), max_size=3),
)
def test_two_points_have_the_same_name_only_if_they_are_the_same(one, other):
    points = [[f"{key}={value}" for key, value in point] for point in (one, other)]
    assert (sweep.point_name(points[0]) == sweep.point_name(points[1])) == (sorted(points[0]) == sorted(points[1]))


def test_the_status_of_a_sweep():
    assert [sweep.final_status(statuses) for statuses in ([0, 0], [0, 2, 1], [2, 75, 1], [0, -9], [])] == [
        0,
        2,
        75,
        1,
        0,
    ]
    assert sweep.final_status([0], cut_short=True) == 75


def test_the_points_are_the_product_of_what_is_typed(here):
    flags = cli.parse_flags(
        [
            "--config-dir=own",
            "-m",
            "task=own",
            "optimization.lr=0.1,0.2",
            "common.seed=range(1,3)",
            "run_dir=~/x",
            "model=glob(*w)",
        ]
    )
    assert sweep._points(flags) == [
        ["task=own", f"optimization.lr={lr}", f"common.seed={seed}", "run_dir=~/x", "model=narrow"]
        for lr in (0.1, 0.2)
        for seed in (1, 2)
    ]


def test_text_that_would_become_a_number_in_a_sweep_is_refused_by_name(here, capsys):
    assert "checkpoint.save_dir is text" in refused(capsys, "-m", "task=own", "checkpoint.save_dir=2024_10,2024_11")


def test_a_sweep_does_not_mix_with_resume_or_torchrun(here, capsys, monkeypatch):
    assert "leave one out" in refused(capsys, "-m", "resume=run", "optimization.lr=1,2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun" in refused(capsys, "-m", "task=own", "optimization.lr=1,2")


def test_a_sweep_goes_on_after_a_point_that_fails_and_records_it(here):
    status, text = ended(
        fairtrain("-m", "task=own", "run_dir=s", "task.fail=true,false", "optimization.max_update=2,-1", folder=here)
    )
    assert status == 2, text
    points = [json.loads(line) for line in (here / "s" / "multirun.jsonl").read_text().splitlines()]
    assert [point["status"] for point in points] == [2, 2, 0, 2] or [point["status"] for point in points] == [
        1,
        2,
        0,
        2,
    ], points
    assert (here / points[2]["run_dir"] / "checkpoints" / "checkpoint_last.pt").exists()
    assert os.path.dirname(points[2]["run_dir"]) == "s"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_a_sweep_with_its_point_saved(here, number):
    sweeping = fairtrain(
        "-m", "task=own", "run_dir=s", "optimization.max_update=100000000,7", "dataset.num_workers=0", folder=here
    )
    deadline = time.monotonic() + 300
    while not list((here / "s").glob("*/log.jsonl")) and time.monotonic() < deadline and sweeping.poll() is None:
        time.sleep(0.1)
    time.sleep(0.5)
    sweeping.send_signal(number)
    status, text = ended(sweeping)
    assert status == 75, text
    points = [json.loads(line) for line in (here / "s" / "multirun.jsonl").read_text().splitlines()]
    assert [point["status"] for point in points] == [75], shlex.quote(text)
    assert (here / points[0]["run_dir"] / "checkpoints" / "checkpoint_last.pt").exists()


def test_an_override_that_is_none_is_told():
    for text in ("", "a", "+", "~"):
        with pytest.raises(ConfigError, match="not an override"):
            parse(text)
