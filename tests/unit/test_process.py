"""Cores, signals, exit and versions of this process."""

import contextlib
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.each_case import each_case
from w2v.system import process
from w2v.system.process import Signals, cores, describe_environment, git_commit

ROOT = Path(__file__).parents[2]


def run_code(code):
    """Run Python code in a process of its own, where no signal is ignored."""
    imports = "import os, signal, time\nfrom w2v.system import process\n"
    restored = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # as of `&` in a script
    restored += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # as of nohup
    command = [sys.executable, "-c", imports + restored + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@each_case("quota, count", [(math.inf, 3), (4.0, 3), (1.2, 2), (0.1, 1)])
def test_cores_are_those_that_may_be_busy(monkeypatch, quota, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6})
    monkeypatch.setattr(process, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "environ", {})
    assert cores() == count
    process.limit_threads()
    assert os.environ.get("OMP_NUM_THREADS") == (str(count) if count < 3 else None)


@each_case(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_signal_ends_with_its_status(name, status):
    done = run_code(f"with process.Signals(): os.kill(os.getpid(), signal.{name})")
    assert (done.returncode, done.stderr) == (status, "")


def test_recorded_signal_only_sets_the_status():
    reached = False
    with pytest.raises(SystemExit) as stop, Signals() as signals:
        with signals.recorded():
            os.kill(os.getpid(), signal.SIGTERM)
        reached = signals.status == 143
    assert reached and stop.value.code == 143
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Signals keeps its handler while ending


def test_a_signal_that_comes_again_at_once_counts_once():
    """A terminal that is closed sends two."""
    code = """
with process.Signals() as signals, signals.recorded():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGHUP)
    print("saved", flush=True)
    process.SAME_SECONDS = 0
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on", flush=True)
"""
    done = run_code(code)
    assert (done.returncode, done.stdout, done.stderr) == (129, "saved\n", "")


def test_a_signal_ends_at_once_what_waits_in_c_and_handlers_stay():
    code = """
import ctypes, threading
locked, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
with process.Signals() as signals:
    with process.ended_by_signals():
        assert signal.getsignal(signal.SIGTERM) == signals._receive
    with process.ended_by_signals():
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        for _ in range(2):
            lock(locked)
"""
    assert run_code(code).returncode == 143


def test_deferred_signal_raises_after_the_block():
    reached = False
    with pytest.raises(SystemExit) as stop, Signals() as signals, signals.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        reached = True
    assert reached
    assert stop.value.code == 143
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Signals keeps its handler while ending


@pytest.mark.parametrize("raised", [None, ValueError("because of it")], ids=str)
def test_signal_counts_where_a_library_swallows_its_exception(raised):
    with pytest.raises(SystemExit) as stop, Signals():
        with contextlib.suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        if raised:
            raise raised
    assert stop.value.code == 143
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_signal_in_a_callback_prints_nothing():
    code = """
import weakref
class Handler: pass
handler = Handler()
reference = weakref.ref(handler, lambda _: os.kill(os.getpid(), signal.SIGTERM))
with process.Signals():
    del handler
    print("after")
"""
    done = run_code(code)
    assert (done.returncode, done.stdout, done.stderr) == (143, "after\n", "")


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with Signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_ignored_signals_stay_ignored():
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = run_code(code + "with process.Signals(): os.kill(os.getpid(), signal.SIGHUP); print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")


@each_case("closed", [(2,), (1,), (0, 1, 2)])
def test_closed_streams_take_no_other_file(closed, tmp_path):
    code = f"""
import os, sys
from w2v.system.process import Signals
with Signals(), open({str(tmp_path / "file")!r}, "w") as file:
    print("message", file=sys.stderr)
    print("message")
    file.write(str(file.fileno() > 2))
"""
    arguments = f'"{sys.executable}" -c "$0" ' + " ".join(f"{number}>&-" for number in closed)
    subprocess.run(["sh", "-c", arguments, code], cwd=ROOT, check=True)
    assert (tmp_path / "file").read_text() == "True"


@pytest.mark.parametrize("late", [False, True])
def test_child_ends_with_its_parent(late):
    code = f"""
reader, writer = os.pipe()
if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        while {late} and os.getppid() == parent:
            time.sleep(0.01)
        process.terminate_with_parent(parent)
        os.write(writer, b"x")
        for _ in range(6000):  # a signal just before a sleep would not end it
            time.sleep(0.01)
    {late} or os.read(reader, 1)
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
os.close(writer)
print(os.read(reader, 1))  # returns when the grandchild, which has the pipe open, has ended
"""
    assert run_code(code).stdout == "b''\n"


def test_the_end_of_a_parent_counts_once_even_while_it_is_handled():
    counted = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda *_: counted.append(1))
    process.terminate_with_parent(os.getppid())

    def send_again(frame, event, _):
        if event == "call" and frame.f_code.co_name == "terminate":
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)

    try:
        sys.settrace(send_again)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        sys.settrace(None)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        process._glibc("prctl", process.PR_SET_PDEATHSIG, 0)
    assert counted == [1]


def test_environment_names_machine_commit_and_packages(monkeypatch):
    monkeypatch.setenv("W2V_COMMIT", "abc123")
    lines = describe_environment("of mine").splitlines()
    assert {"machine of mine", "commit abc123"} <= set(lines)
    assert any(line.startswith("torch ") for line in lines)


def test_commit_is_unknown_without_git(monkeypatch):
    monkeypatch.delenv("W2V_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert git_commit() == "unknown"


def test_commit_is_read_without_a_lock_of_the_clone(monkeypatch, tmp_path):
    """A run that is killed at that moment would leave the lock behind."""
    monkeypatch.delenv("W2V_COMMIT", raising=False)
    monkeypatch.setattr(process, "__file__", str(tmp_path / "w2v" / "system" / "process.py"))
    (tmp_path / "file").write_text("text")
    for command in ("init", "add file", "-c user.name=x -c user.email=x commit -m x"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True)
    head = git_commit()
    index = (tmp_path / ".git" / "index").read_bytes()
    os.utime(tmp_path / "file", (0, 0))  # with the lock, git would write the new time
    assert git_commit() == head and not head.endswith("-dirty")
    assert (tmp_path / ".git" / "index").read_bytes() == index
    (tmp_path / "file").write_text("another text")
    assert git_commit() == f"{head}-dirty"


FAILS = """
def fail():
    raise FileNotFoundError(2, "is missing", "a.txt")
try:
    with process.forked(fail):
        print("goes on", flush=True)
except FileNotFoundError as error:
    print(error.filename, error.strerror)
"""


def test_calls_that_wait_are_few_and_errors_come_in_order():
    assert run_code(FAILS).stdout == "goes on\na.txt is missing\n"  # of a forked process
    taken, ended = [], []

    def call(number):
        ended.append(number)
        if number >= 50:
            raise ValueError(number)

    def numbers():
        for number in range(100):
            taken.append(number)
            assert len(taken) - len(ended) <= 9  # four a thread, and one that is taken
            yield number

    found = process.map_in_order(2, call, numbers())
    assert [next(found) for _ in range(50)] == [None] * 50
    with pytest.raises(ValueError, match="^50$"):
        next(found)


def test_memory_of_freed_arrays_is_reused():
    code = """
import resource
import numpy as np

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(4 << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

process.limit_heap_fragmentation()
limited = faults()
process.reuse_freed_memory()
faults()
print(limited > 40, faults() < 40)  # of 4 KiB, or where it has them of 2 MiB
"""
    assert run_code(code).stdout == "True True\n"
