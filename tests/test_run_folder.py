"""The folder of a run: one live run at a time, the config kept whole, and found again."""

import errno
import os
import subprocess
import sys
import textwrap
import time

import pytest
from omegaconf import OmegaConf

from tests import disk
from trainer import lease, run_folder
from trainer.config import complete_config, to_plain
from trainer.errors import ConfigError

HOLD = textwrap.dedent(
    """
    import os, sys, time
    from trainer import run_folder
    folder = run_folder.prepare(sys.argv[1], None, True)
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(60)
    print(os.getpid(), flush=True)
    time.sleep(60)
    """
)


@pytest.fixture
def cfg(tmp_path):
    return complete_config({"run_dir": str(tmp_path / "run"), "optimization": {"max_update": 3}})


def kept(path) -> dict:
    return OmegaConf.to_container(OmegaConf.load(path))


def hold(path, how="plain") -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), how], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process


def test_nothing_but_the_lock_is_written_before_the_config_is_good(cfg):
    folder = run_folder.prepare(cfg.run_dir, cfg, True)
    assert os.listdir(cfg.run_dir) == [".lock"]
    folder.close()


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", [".lock", "config.yaml.new", "overrides.yaml.new"])
def test_a_disk_that_is_full_at_the_start_leaves_nothing(cfg, name, is_there):
    def around(call, do):
        if call.kind == "write" and call.path.endswith(name):
            raise OSError(errno.ENOSPC, "No space left on device")
        return do()

    if is_there:
        os.mkdir(cfg.run_dir)
    with disk.seen(os.path.dirname(cfg.run_dir), around):
        with pytest.raises(ConfigError, match="No space left on device"):
            folder = run_folder.prepare(cfg.run_dir, cfg, True)
            try:
                folder.write_config()
            finally:
                folder.discard()
    assert os.path.exists(cfg.run_dir) == is_there and not (is_there and os.listdir(cfg.run_dir))


def test_the_config_is_kept_and_each_earlier_one_too(cfg):
    for lr in (0.1, 0.2, 0.3):
        cfg.optimization.lr = lr
        folder = run_folder.prepare(cfg.run_dir, cfg, True, [f"optimization.lr={lr}", "task.x=${oc.env:X}"])
        folder.write_config()
        folder.close()
    base = f"{cfg.run_dir}/.hydra"
    assert sorted(os.listdir(base)) == ["1", "2", "config.yaml", "overrides.yaml"]
    assert [kept(f"{base}/{place}config.yaml")["optimization"]["lr"] for place in ("1/", "2/", "")] == [0.1, 0.2, 0.3]
    assert kept(f"{base}/config.yaml") == to_plain(cfg)
    assert kept(f"{base}/1/overrides.yaml") == ["optimization.lr=0.1", "task.x=${oc.env:X}"]


def test_a_secret_is_not_written(cfg, monkeypatch):
    monkeypatch.setenv("SECRET_OF_A_TEST", "hunter2")
    cfg.common.wandb_project = "${oc.env:SECRET_OF_A_TEST}"
    folder = run_folder.prepare(cfg.run_dir, cfg, True)
    folder.write_config()
    folder.close()
    with open(f"{cfg.run_dir}/.hydra/config.yaml") as file:
        text = file.read()
    assert "hunter2" not in text and "SECRET_OF_A_TEST" in text


@pytest.mark.parametrize("name", ["a=b", "a,b", "a b", "a~b", "[x]", "ä'\"", "deep/er"])
def test_a_folder_may_have_any_name(tmp_path, name):
    cfg = complete_config({"run_dir": str(tmp_path / name), "optimization": {"max_update": 3}})
    folder = run_folder.prepare(cfg.run_dir, cfg, True)
    folder.write_config()
    folder.close()
    assert (tmp_path / name / ".hydra" / "config.yaml").exists()


def test_other_ranks_touch_nothing(cfg):
    folder = run_folder.prepare(cfg.run_dir, cfg, False)
    folder.write_config()
    folder.close()
    assert not os.path.exists(cfg.run_dir)


def test_a_second_live_run_is_refused_with_the_first_ones_pid(cfg, monkeypatch):
    monkeypatch.setattr(lease, "PATIENCE", 0.2)
    first = hold(cfg.run_dir)
    try:
        with pytest.raises(ConfigError, match=f"alive .pid {first.pid} on .*run_dir="):
            run_folder.prepare(cfg.run_dir, cfg, True)
    finally:
        first.kill()
        first.communicate()
    run_folder.prepare(cfg.run_dir, cfg, True).close()


def test_two_runs_of_one_process_are_refused_too_and_the_first_keeps_its_hold(cfg, monkeypatch):
    monkeypatch.setattr(lease, "PATIENCE", 0.1)
    first = run_folder.prepare(cfg.run_dir, cfg, True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="alive"):
            run_folder.prepare(cfg.run_dir, cfg, True)
    first.close()
    run_folder.prepare(cfg.run_dir, cfg, True).close()


def test_a_killed_run_lets_go_although_a_worker_of_it_lives(cfg, monkeypatch):
    monkeypatch.setattr(lease, "PATIENCE", 1.0)
    first = hold(cfg.run_dir, "fork")
    first.kill()
    first.wait()
    begin = time.monotonic()
    run_folder.prepare(cfg.run_dir, cfg, True).close()
    assert time.monotonic() - begin < 0.9


def test_a_start_waits_for_a_run_that_is_just_ending(cfg, monkeypatch):
    monkeypatch.setattr(lease, "PATIENCE", 10.0)
    first = run_folder.prepare(cfg.run_dir, cfg, True)
    program = "import sys; from trainer import run_folder; run_folder.prepare(sys.argv[1], None, True); print('held')"
    second = subprocess.Popen([sys.executable, "-c", program, cfg.run_dir], stdout=subprocess.PIPE, text=True)
    time.sleep(0.3)
    assert second.poll() is None
    first.close()
    assert second.communicate(timeout=60)[0] == "held\n"


def test_a_folder_that_cannot_be_made_is_bad_input_that_names_the_override(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir=") as caught:
        run_folder.prepare(str(tmp_path / "file" / "run"), None, True)
    assert str(tmp_path / "file" / "run") in str(caught.value)


# Found again


def test_the_saved_config_is_what_was_written(cfg):
    folder = run_folder.prepare(cfg.run_dir, cfg, True)
    folder.write_config()
    folder.close()
    saved, source = run_folder.saved_config(cfg.run_dir)
    assert saved == to_plain(cfg) and source.endswith(".hydra/config.yaml")


def test_references_of_a_saved_config_are_not_resolved(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("task: {a: '${oc.env:HOME}', b: '${.a}'}")
    assert run_folder.saved_config(str(tmp_path))[0] == {"task": {"a": "${oc.env:HOME}", "b": "${.a}"}}


@pytest.mark.parametrize("content", ["", "a: [", "- 1", "\0", "!!python/object/apply:os.system [echo]"])
def test_a_damaged_config_is_not_taken(tmp_path, content):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match="config.yaml"):
        run_folder.saved_config(str(tmp_path))


def test_without_a_kept_config_the_checkpoints_is_taken(cfg, tmp_path):
    from checkpoint_file import write_checkpoint_file

    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "checkpoint_last.pt").write_bytes(b"not a checkpoint")
    for num_updates in (9, 10, 3):  # the newest is the one with the most updates, whatever its name and time
        state = {
            "format_version": 1,
            "model": {},
            "extra_state": {},
            "cfg": {**to_plain(cfg), "num": num_updates},
            "optimizer_history": [{"num_updates": num_updates}],
        }
        write_checkpoint_file(state, str(tmp_path / "run" / "checkpoints" / f"checkpoint_1_{num_updates}.pt"))
    saved, source = run_folder.saved_config(cfg.run_dir)
    assert saved == {**to_plain(cfg), "num": 10} and source.endswith("checkpoint_1_10.pt")


def test_a_folder_that_is_missing_or_empty_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        run_folder.saved_config(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="config.yaml is missing"):
        run_folder.saved_config(str(tmp_path))
