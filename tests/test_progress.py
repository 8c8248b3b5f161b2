"""What is seen of a run: on a terminal of its own (a pty), in a pipe, and after a resume."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import time

import pytest

from trainer.errors import ConfigError
from trainer.progress import Progress, format_seconds

STATS = {"loss": 0.12341, "lr": 1e-4, "gnorm": 0.52, "sample_size": 64.0}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def play(progress, clock, first, last, seconds, **fields):
    for num_updates in range(first, last + 1):
        clock.now += seconds
        progress.update(num_updates, 1 + num_updates // 70, {**STATS, **fields})


# --- lines -----------------------------------------------------------------------------------------------------------


def test_without_a_terminal_there_are_plain_lines_at_each_twentieth():
    stream, clock = io.StringIO(), Clock()
    with Progress(2000, stream=stream, clock=clock) as progress:
        play(progress, clock, 1, 2000, 0.01)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "update 1/2000 epoch 1 loss 0.1234 lr 1.0e-04 gnorm 0.52 eta -"
    assert lines[2] == "update 200/2000 epoch 3 loss 0.1234 lr 1.0e-04 gnorm 0.52 6,400 samples/s eta 0:18"
    assert [int(re.match(r"update (\d+)/", line)[1]) for line in lines] == [1, *range(100, 2001, 100)]


def test_slow_updates_are_shown_every_half_minute_and_the_last_one_always():
    stream, clock = io.StringIO(), Clock()
    with Progress(1010, stream=stream, clock=clock, num_updates=980) as progress:
        play(progress, clock, 981, 1010, 10.0)
    shown = [int(re.match(r"update (\d+)/", line)[1]) for line in stream.getvalue().splitlines()]
    assert shown == [981, 984, 987, 990, 993, 996, 999, 1000, 1003, 1006, 1009, 1010]


def test_the_time_left_after_a_resume_is_that_of_this_session():
    stream, clock = io.StringIO(), Clock()
    with Progress(2000, stream=stream, clock=clock, num_updates=1800) as progress:
        clock.now += 60  # building, loading and the first update take their time, once
        play(progress, clock, 1801, 1900, 1.0)
    assert stream.getvalue().splitlines()[-1].endswith("64 samples/s eta 1:40")


def test_a_run_that_stops_between_two_lines_ends_with_its_last_update():
    stream, clock = io.StringIO(), Clock()
    with Progress(2000, stream=stream, clock=clock) as progress:
        play(progress, clock, 1, 1234, 0.01)
    lines = stream.getvalue().splitlines()
    assert lines[-2].startswith("update 1200/2000") and lines[-1].startswith("update 1234/2000")
    progress.close()
    assert stream.getvalue().splitlines() == lines


def test_throughput_follows_a_change_of_pace():
    stream, clock = io.StringIO(), Clock()
    with Progress(2000, stream=stream, clock=clock) as progress:
        play(progress, clock, 1, 1000, 0.1)
        play(progress, clock, 1001, 1200, 0.2)
    assert " 640 samples/s" in stream.getvalue() and " 320 samples/s" in stream.getvalue().splitlines()[-1]


def test_an_unknown_end_gives_no_time_left_and_odd_numbers_are_shown():
    stream, clock = io.StringIO(), Clock()
    with Progress(None, stream=stream, clock=clock) as progress:
        play(progress, clock, 1, 70, 1.0, loss=float("nan"), gnorm=None, sample_size=2)
    assert stream.getvalue().splitlines()[-1] == "update 70 epoch 2 loss nan lr 1.0e-04 2 samples/s"


def test_throughput_has_the_unit_of_the_task():
    shown = {}
    for log_format in ("simple", "json"):
        stream, clock = io.StringIO(), Clock()
        with Progress(10, log_format, stream=stream, clock=clock, unit="tokens") as progress:
            play(progress, clock, 1, 10, 1.0)
        shown[log_format] = stream.getvalue().splitlines()[-1]
    assert " 64 tokens/s " in shown["simple"] and json.loads(shown["json"])["tokens_per_second"] == 64.0


def test_a_validation_is_a_line_of_its_own():
    stream = io.StringIO()
    with Progress(10, stream=stream, num_updates=5) as progress:
        progress.validated({"epoch": 1, "loss": 0.25, "test_accuracy": 0.5, "wall": 1.0, "note": "x"})
    assert stream.getvalue() == "validation at update 5: loss 0.25 test_accuracy 0.5\n"


def test_json_lines_are_standard_json():
    stream, clock = io.StringIO(), Clock()
    with Progress(10, "json", stream=stream, clock=clock) as progress:
        play(progress, clock, 1, 10, 1.0, loss=float("inf"))
        progress.validated({"loss": 0.5})
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [record.get("event") for record in records] == ["progress"] * 10 + ["valid"]
    assert records[1]["loss"] == "inf" and records[1]["eta"] == 8.0 and records[1]["samples_per_second"] == 64.0


@pytest.mark.parametrize("options", [{"rank": 1}, {"log_format": "none"}])
def test_other_ranks_and_none_show_nothing(options):
    stream = io.StringIO()
    with Progress(10, stream=stream, **options) as progress:
        play(progress, Clock(), 1, 10, 1.0)
        progress.validated(STATS)
    assert stream.getvalue() == ""


def test_a_format_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="common.log_format=tqdm is none of auto, rich, simple, json, none"):
        Progress(10, "tqdm")


def test_a_pipe_whose_reader_left_stops_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        progress = Progress(10, stream=stream)
        play(progress, Clock(), 1, 10, 1.0)
        progress.validated(STATS)
        progress.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # so that closing the stream has somewhere to go


@pytest.mark.parametrize("seconds, text", [(None, "-"), (11.6, "0:12"), (3723, "1:02:03"), (180_245, "2d 02:04:05")])
def test_times_are_written_as_people_read_them(seconds, text):
    assert format_seconds(seconds) == text


def test_an_update_that_is_not_shown_costs_next_to_nothing():
    progress = Progress(10**9, stream=io.StringIO())
    progress.update(1, 1, STATS)
    costs, yardstick = [], []
    for _ in range(10):
        before = time.perf_counter()
        for num_updates in range(2, 2002):
            progress.update(num_updates, 1, STATS)
        between = time.perf_counter()
        for _ in range(2, 2002):
            json.dumps(STATS)
        costs.append(between - before)
        yardstick.append(time.perf_counter() - between)
    assert min(costs) < min(yardstick)  # which is 5 µs or so


# --- the bar, on a terminal ------------------------------------------------------------------------------------------

PROLOGUE = """
import logging, os, sys, time
from trainer.logs import setup_logging
from trainer.progress import Progress
setup_logging(sys.argv[1]).open_file()
stats = {"loss": 0.1234, "lr": 1e-4, "gnorm": 0.52, "sample_size": 64.0}
"""


def run_on_terminal(code, run_dir, columns=110, stdout=None):
    """The bytes that a program writes to its terminal, and its exit status."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(code), str(run_dir)]
    child = subprocess.Popen(command, stdin=slave, stdout=stdout or slave, stderr=slave, env=environment)
    os.close(slave)
    output = bytearray()
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # Linux answers so when the last writer has gone
            break
        if not data:
            break
        output += data
    os.close(master)
    return output.decode(), child.wait(timeout=60)


def screen(output, columns=110):
    """The lines that stay on a terminal: enough of one for what a bar does (carriage return, erase, cursor up)."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0  # the terminal's driver has put a carriage return before it
            rows += [""] * (row + 1 - len(rows))
        elif token.startswith("\x1b["):
            number, kind = int(re.sub(r"\D", "", token) or 1), token[-1]
            if kind == "A":
                row = max(0, row - number)
            elif kind == "K":
                rows[row] = "" if number == 2 else rows[row][:column]
        else:
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in rows]


def test_on_a_terminal_one_bar_stays_and_all_lines_stand_above_it(tmp_path):
    output, status = run_on_terminal(
        """
        with Progress(200, num_updates=100) as progress:
            for n in range(101, 201):
                time.sleep(0.01)
                progress.update(n, 3, stats)
                if n == 150:
                    logging.getLogger("trainer").info("checkpoint_1_150.pt saved [0.1 s] in /a/[b]/c")
                    print("a print of the task")
                    print("half a line, ", end=""); print("the other half", file=sys.stdout)
                    progress.validated({"loss": 0.5})
                    logging.getLogger("trainer").warning("x" * 150)
        print("after the bar")
        """,
        tmp_path,
    )
    assert status == 0, output
    shown = [line for line in screen(output) if line]
    assert shown[:4] == [
        "checkpoint_1_150.pt saved [0.1 s] in /a/[b]/c",
        "a print of the task",
        "half a line, the other half",
        "validation at update 150: loss 0.5",
    ]
    assert shown[4] == "warning: " + "x" * 150
    bars = [line for line in shown if line.startswith("epoch 3")]
    assert len(bars) == 1 and "200/200" in bars[0] and "loss 0.1234 lr 1.0e-04 gnorm 0.52" in bars[0]
    assert re.search(r"[\d,]+ samples/s eta 0:00$", bars[0]) and "━" in bars[0]
    assert shown[-1] == "after the bar" and len(shown) == 7


def test_the_bar_is_drawn_at_most_eight_times_a_second(tmp_path):
    output, status = run_on_terminal(
        """
        with Progress(10**6) as progress:
            begin = time.monotonic(); n = 0
            while time.monotonic() < begin + 1.5:
                n += 1
                progress.update(n, 1, stats)
        """,
        tmp_path,
    )
    assert status == 0 and 4 <= len(re.findall(r"epoch 1 ", output)) <= 13, output


def test_a_narrow_terminal_still_has_a_bar_of_one_row(tmp_path):
    output, status = run_on_terminal(
        """
        with Progress(200) as progress:
            for n in range(1, 201):
                time.sleep(0.003)
                progress.update(n, 1, stats)
        """,
        tmp_path,
        columns=50,
    )
    shown = [line for line in screen(output, 50) if line]
    assert status == 0 and len(shown) == 1 and len(shown[0]) <= 50 and "200/200" in shown[0]


def test_a_run_killed_under_its_bar_leaves_the_cursor_visible(tmp_path):
    output, status = run_on_terminal(
        """
        import signal
        progress = Progress(200)
        for n in range(1, 60):
            time.sleep(0.01)
            progress.update(n, 1, stats)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert status == -9 and "epoch 1" in output
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")


def test_a_worker_forked_under_the_bar_writes_plainly_and_draws_no_bar(tmp_path):
    output, _ = run_on_terminal(
        """
        progress = Progress(200)
        progress.update(1, 1, stats)
        child = os.fork()
        if child == 0:
            print("from a worker", file=sys.stderr, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        os._exit(0)
        """,
        tmp_path,
    )
    assert "from a worker" in output and output.count("epoch 1") == 1


def test_output_that_goes_to_a_file_is_left_alone(tmp_path):
    with open(tmp_path / "out", "wb") as file:
        output, status = run_on_terminal(
            """
            with Progress(20) as progress:
                for n in range(1, 21):
                    progress.update(n, 1, stats)
                print("a result")
            """,
            tmp_path,
            stdout=file,
        )
    assert status == 0 and (tmp_path / "out").read_text() == "a result\n" and "20/20" in output


@pytest.mark.parametrize("setting", ["TERM=dumb", "simple"])
def test_a_dumb_terminal_and_simple_get_lines(tmp_path, setting):
    log_format = "simple" if setting == "simple" else "auto"
    output, status = run_on_terminal(
        f"""
        os.environ["TERM"] = "dumb" if {setting!r} == "TERM=dumb" else "xterm"
        with Progress(20, {log_format!r}) as progress:
            for n in range(1, 21):
                progress.update(n, 1, stats)
        assert "rich" not in sys.modules
        """,
        tmp_path,
    )
    assert status == 0 and len(output.splitlines()) == 20 and "\x1b" not in output


STOPPING = """
import os, signal
from tests.resume.task import Toy

class Stopping(Toy):
    def lr_step_update(self):
        super().lr_step_update()
        if self.get_num_updates() == 3 and self.log is not None and "STOP" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("log_format", ["rich", "simple"])
def test_the_last_words_of_a_run_come_behind_its_progress(tmp_path, log_format):
    (tmp_path / "stopping.py").write_text(STOPPING)
    shown = {}
    for way in ("stopped", "done", "finished"):
        output, status = run_on_terminal(
            f"""
            os.environ["{"STOP" if way == "stopped" else "GO"}"] = "1"
            sys.path[:0] = [sys.argv[1], os.getcwd()]
            from trainer import cli
            run_dir = "run_dir=" + sys.argv[1] + "/run"
            task = ["+task._target_=stopping.Stopping", "task_name=toy", run_dir, "common.cpu=true"]
            limits = ["optimization.max_update=6", "optimization.lr=0.01", "dataset.batch_size=4"]
            sys.exit(cli.run([*task, *limits, "common.log_format={log_format}"]))
            """,
            tmp_path,
        )
        assert status == (75 if way == "stopped" else 0), output
        shown[way] = [line for line in screen(output) if line]
    assert shown["stopped"][-1].startswith("stopped by request at update ")
    (done,) = [i for i, line in enumerate(shown["done"]) if line.startswith("done: ")]
    assert not any("/6 " in line for line in shown["done"][done:]) and shown["done"][-1].startswith("train on: ")
    assert shown["finished"][-1].startswith("this run is finished")
