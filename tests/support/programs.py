"""Run train.py and evaluate.py in forked processes with everything loaded.

So a run takes a tenth of a second. A process that takes minutes is ended by SIGALRM, at which it
writes the stacks of its threads to its output.

With `ranks` torchrun's parts start train.py in processes that the forked one forks; or torchrun
itself does, which takes ten seconds. Forked processes can use CUDA, as the one that forks them has
not.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def is_alive(process):
    """Return whether a process holds its files; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Programs:
    """Run train.py or evaluate.py, one at a time, in a new process.

    folder: Where the programs work.
    gpus: train.py sees the GPUs, and torchrun starts it unless `forked`; else it sees none.
    """

    def __init__(self, folder, gpus=False):
        self.output, self._forked = folder / "output.txt", not gpus
        self._running = 0  # the number of its process
        self._server = None  # until a program is started

    def _start_server(self):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        if self._forked:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.output.parent,
            env=environment,
        )
        ready = self._server.stdout.readline() == "ready\n"
        assert ready, "the process that forks programs ended; its errors are above"

    def start(self, *arguments, program="train", ranks=0, restarts=0, forked=None, **limits):
        """Start a program and return the number of its process.

        ranks: how many torchrun starts, and as often as `restarts` again; it puts the number of
            each for ${local_rank} in the arguments.
        limits: of `resource`, such as RLIMIT_FSIZE.
        """
        if self._server is None:
            self._start_server()
        if self._running:  # a test that failed did not wait for its program
            self.kill()
        forked = self._forked if forked is None else forked
        ranks = ranks if forked else ranks or 1
        arguments = list(map(str, arguments))
        order = program, arguments, str(self.output), limits, ranks, restarts, forked
        self.output.write_text("")  # what the last program wrote is not this one's
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        self._running = int(self._server.stdout.readline())
        return self._running

    def wait(self):
        """Return the exit status, or minus the signal, and the output."""
        status = int(self._server.stdout.readline())
        self._running = 0
        return status, self.output.read_bytes().decode()

    def wait_for(self, condition, seconds=60, may_end=False):
        """Return the value of `condition()` as soon as it is true.

        A program that ends before fails the test, unless it may; and one that takes longer, which
        is ended, and its output has the stacks of its threads.
        """
        end = time.monotonic() + seconds
        while not (value := condition()):
            if not Path(f"/proc/{self._running}").exists():
                value = condition()
                assert value or may_end, self.wait()[1]
                return value
            assert time.monotonic() < end, self.kill(signal.SIGALRM)[1]
            time.sleep(0.002)
        return value

    def ranks(self):
        """Return the processes that the program has started."""
        children = Path(f"/proc/{self._running}/task/{self._running}/children")
        return [int(child) for child in children.read_text().split()]

    def kill(self, number=signal.SIGKILL):
        """End the program and its ranks by a signal; return as `wait` does."""
        processes = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            processes = [*self.ranks(), self._running]
            for process in processes:
                os.kill(process, number)
        found = self.wait()
        while any(map(is_alive, processes)):
            time.sleep(0.01)
        return found

    def run(self, *arguments, program="train", **limits):
        """Start a program and wait for it."""
        self.start(*arguments, program=program, **limits)
        return self.wait()

    def close(self):
        """End the process that forks the others."""
        if self._server is None:
            return
        self._server.stdin.close()
        self._server.wait(30)
