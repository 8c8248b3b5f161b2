"""Signals become requests, and a second interrupt ends the process at once."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trainer.preemption import SIGNALS, StopRequest


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_signal_is_a_request_to_stop(signum):
    with StopRequest() as request:
        assert not request.stop_requested and request.signal_name is None
        signal.raise_signal(signum)
        assert request.stop_requested and not request.save_requested
        assert request.signal_name == signum.name


def test_the_save_signal_asks_for_a_save_once_and_for_no_stop():
    with StopRequest() as request:
        signal.raise_signal(signal.SIGUSR2)
        assert request.save_requested and not request.stop_requested
        request.clear_save()
        assert not request.save_requested


def test_stop_signals_may_repeat_without_harm():
    with StopRequest() as request:
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.raise_signal(signum)
        assert request.signal_name == "SIGTERM"  # the first one


def test_handlers_are_put_back():
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with StopRequest():
        assert [signal.getsignal(signum) for signum in SIGNALS] != before
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_a_request_outlives_the_one_that_noticed_it():
    with StopRequest() as outer:
        with StopRequest() as first:
            signal.raise_signal(signal.SIGTERM)
            assert first.stop_requested
        with StopRequest() as second:
            assert second.stop_requested
        assert outer.stop_requested
    with StopRequest() as later:
        assert not later.stop_requested


def test_nothing_is_left_of_a_closed_one():
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with StopRequest(), StopRequest():
            assert threading.active_count() == threads + 1
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_the_main_thread_it_is_only_flags():
    found = []

    def use():
        with StopRequest() as request:
            request.request_stop()
            found.append(request.stop_requested)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [True]
    assert signal.getsignal(signal.SIGTERM) == before


SCRIPT = """
import signal, sys, time
from trainer.preemption import SIGNALS, StopRequest
if "blocked" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
print("started", flush=True)
if "blocked" in sys.argv:
    sys.stdin.readline()
with StopRequest() as request:
    print("ready", flush=True)
    while not request.stop_requested:
        time.sleep(0.01)
    print("stopping", flush=True)
    if "twice" in sys.argv:
        time.sleep(30)
    if "in a call" in sys.argv:  # as in a collective: no signal interrupts it, and no handler runs before it returns
        import ctypes
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
sys.exit(75)
"""


def start(*words):
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize("where", ["twice", "in a call"])
def test_a_second_interrupt_ends_the_process_at_once_with_status_1(where):
    process = start(where)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopping\n"
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert time.monotonic() - begin < 10  # it would have slept for 30 s
    assert "interrupted twice" in stderr


def test_a_signal_blocked_during_start_up_is_not_lost():
    process = start("blocked")
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate("\n", timeout=20)
    assert process.returncode == 75
    assert "stopping" in stdout
