"""fairtrain-plot: what is drawn stands where the numbers are, and bad input is a sentence and status 2."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import plot
from trainer.logs import RunLog

BLUE, ORANGE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)


def write_run(run_dir, num_updates=100, loss=lambda n: 1.0 / n):
    log = RunLog(run_dir, SimpleNamespace())
    log.cut_after(0)
    for n in range(1, num_updates + 1):
        log.train({"epoch": 1, "num_updates": n, "loss": loss(n), "gnorm": float(n), "wall": 0.5 * n})
        if n % 25 == 0:
            log.valid("valid", {"epoch": 1, "num_updates": n, "loss": 2.0 / n, "accuracy": n / 100})
    log.close()
    return run_dir


def refused(capsys, *arguments):
    """The sentence that bad input is answered with."""
    assert plot.main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("fairtrain-plot: ") and said.err.count("\n") == 1
    return said.err


# --- curves ----------------------------------------------------------------------------------------------------------


def test_a_picture_has_the_curve_where_its_numbers_are(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    write_run(tmp_path / "run", loss=lambda n: float(n >= 50))  # a step in the middle
    assert plot.main([str(tmp_path / "run"), "--event", "train", "-o", str(tmp_path / "a.png")]) == 0
    with image_module.open(tmp_path / "a.png") as image:
        assert image.format == "PNG" and image.size == (900, 420)
        inside = [(x, y) for x in range(95, 875) for y in range(45, 365) if close(image.getpixel((x, y)), BLUE)]
    left, right = [y for x, y in inside if x < 400], [y for x, y in inside if x > 560]
    assert left and right and min(left) > 340 and max(right) < 70  # y goes down in a picture


def close(pixel, colour):
    return all(abs(a - b) < 40 for a, b in zip(pixel, colour))


def test_each_key_has_a_panel_and_a_curve_its_colour_in_all_of_them(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    output = str(tmp_path / "c.png")
    assert plot.main([*runs, "--event", "train", "--key", "loss", "--key", "gnorm", "-o", output]) == 0
    with image_module.open(output) as image:
        assert image.size == (900, 840)
        for top in (0, 420):
            colours = {image.getpixel((x, y)) for x in range(0, 900) for y in range(top, top + 40)}  # the legend
            assert any(close(pixel, BLUE) for pixel in colours) and any(close(pixel, ORANGE) for pixel in colours)


def test_without_a_file_the_plot_is_text_as_wide_as_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert plot.main([str(write_run(tmp_path / "run"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loss  * train  + valid" and "num_updates" in lines[-1] and lines[-1].endswith("100")
    assert max(map(len, lines)) == 70
    rows = [line.partition("│")[2] for line in lines if "│" in line]
    assert rows[1].startswith("*") and "*" not in rows[1][3:]  # 1/n begins high, on the left, and ends low


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    run_dir = write_run(tmp_path / "run")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "trainer.plot", str(run_dir)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=100)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_one_curve_is_drawn_in_finer_dots(tmp_path, capsys):
    assert plot.main([str(write_run(tmp_path / "run")), "--key", "accuracy"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("accuracy  valid\n") and re.search("[\u2801-\u28ff]", text)


def test_runs_are_told_apart_by_as_much_of_their_paths_as_it_takes(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("x/seed_1", "y/seed_1")]
    arguments = plot._parser().parse_args([*map(str, runs), "--event", "train"])
    assert [curve.name for curve in plot.run_panels(arguments)[0].curves] == ["x/seed_1 train", "y/seed_1 train"]


def test_nan_is_a_gap_and_a_live_run_with_a_torn_last_line_can_be_plotted(tmp_path):
    run_dir = write_run(tmp_path / "run", loss=lambda n: math.nan if 40 <= n < 60 else 1.0)
    with open(run_dir / "log.jsonl", "ab") as file:
        file.write(b'{"event": "train", "num_up')
    panel = plot.run_panels(plot._parser().parse_args([str(run_dir), "--event", "train"]))[0]
    stretches = [[x for x, _ in stretch] for stretch in plot.unbroken(panel.curves[0].points, False)]
    assert [(stretch[0], stretch[-1]) for stretch in stretches] == [(1, 39), (60, 100)]


def test_wall_may_be_the_horizontal_axis_and_the_scale_logarithmic(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run", loss=lambda n: 10.0 ** (-n / 25))
    assert plot.main([str(run_dir), "--x", "wall", "--log", "--event", "train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "wall" in lines[-1] and lines[-1].endswith(" 50")
    rows = [line.partition("│")[2] for line in lines if "│" in line]
    middle = rows[len(rows) // 2]
    first = len(middle) - len(middle.lstrip())
    assert 0.4 < first / max(map(len, rows)) < 0.6  # exponential decay is a straight line


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(2, 40))
def test_thinning_keeps_the_extremes_and_the_order(values, limit):
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = plot.thinned(points, limit)
    assert len(kept) <= max(limit, 2) and kept == sorted(kept) and set(kept) <= set(points)
    assert {min(values), max(values)} <= {y for _, y in kept}


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_within_the_axis(low, width):
    high = low + max(width, abs(low) * 1e-6)
    ticks = plot.round_ticks(low, high)
    slack = (high - low) * 1e-6
    assert 2 <= len(ticks) <= 6 and all(low - slack <= tick <= high + slack for tick in ticks)


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
def test_a_constant_curve_and_a_single_point_can_be_drawn(value, tmp_path):
    for points in ([(1.0, value)], [(1.0, value), (2.0, value)]):
        panel = plot.Panel("loss", "num_updates", [plot.Curve("train", points)])
        assert re.search("[\u2801-\u28ff]", plot.text_plot(panel))
        pytest.importorskip("PIL")
        plot.write_png([panel], tmp_path / "one.png")


# --- schedules -------------------------------------------------------------------------------------------------------


def test_a_schedule_is_the_rate_that_each_update_uses():
    overrides = ["lr_scheduler=cosine", "optimization.max_update=100", "optimization.lr=0.5"]
    overrides += ["lr_scheduler.warmup_updates=10"]
    panel = plot.schedule_panel(plot._parser().parse_args(["--schedule", *overrides]))
    points = dict(panel.curves[0].points)
    assert list(points) == list(range(1, 101))
    assert points[11] == max(points.values()) == 0.5  # the schedule's value after the ten updates of warmup
    assert points[1] < points[5] < points[11] > points[50] > points[100] >= 0


def test_a_long_schedule_is_sampled_and_ends_at_its_last_update():
    overrides = ["lr_scheduler=inverse_sqrt", "optimization.max_update=1234567"]
    points = plot.schedule_panel(plot._parser().parse_args(["--schedule", *overrides])).curves[0].points
    assert len(points) < 2100 and points[0][0] == 1 and points[-1][0] == 1234567


def test_the_console_script_draws_the_schedule_of_a_task(tmp_path):
    pytest.importorskip("PIL")
    overrides = ["task=digits", "lr_scheduler=cosine", "optimization.max_update=1000"]
    command = [sys.executable, "-m", "trainer.plot", "--schedule", *overrides, "-o", "lr.png"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "lr.png\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]


# --- bad input -------------------------------------------------------------------------------------------------------


def test_a_run_that_is_not_there_is_named(tmp_path, capsys):
    assert "nowhere" in refused(capsys, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty/log.jsonl: No such file" in refused(capsys, tmp_path / "empty")


def test_a_key_that_no_run_has_is_answered_with_those_that_there_are(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run")
    assert "'los'" in (said := refused(capsys, run_dir, "--key", "los")) and "accuracy, epoch, gnorm, loss" in said
    assert "'clock'" in refused(capsys, run_dir, "--x", "clock")


def test_values_that_cannot_be_shown_are_said(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run", loss=lambda n: -1.0)
    assert "logarithmic" in refused(capsys, run_dir, "--event", "train", "--log")


def test_a_schedule_without_an_end_or_with_a_mistyped_key_is_refused(capsys):
    assert "optimization.max_update" in refused(capsys, "--schedule", "lr_scheduler=fixed")
    assert "max_updat" in refused(capsys, "--schedule", "lr_scheduler=fixed", "optimization.max_updat=10")


def test_a_picture_that_cannot_be_written_leaves_nothing_behind(tmp_path, capsys):
    pytest.importorskip("PIL")
    run_dir = write_run(tmp_path / "run")
    (tmp_path / "folder.png").mkdir()
    assert "folder.png cannot be written" in refused(capsys, run_dir, "-o", tmp_path / "folder.png")
    assert "no/a.png cannot be written" in refused(capsys, run_dir, "-o", tmp_path / "no/a.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.png", "run"]


def test_without_pillow_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "fairtrain[images]" in refused(capsys, write_run(tmp_path / "run"), "-o", tmp_path / "a.png")
