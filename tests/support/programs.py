"""Run train.py and evaluate.py in forked processes with everything loaded.

So a run takes a tenth of a second. A process that takes minutes is ended by SIGALRM, at which it
writes the stacks of its threads to its output (loaded.py).

With `ranks` torchrun's parts start train.py in processes that the forked one forks; or torchrun
itself does, which takes ten seconds. Forked processes can use CUDA, as the one that forks them has
not.
"""

import contextlib
import multiprocessing.synchronize
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from tests.support.processes import ROOT, fork


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
        self.output = folder / "output.txt"
        self._gpus = gpus
        self._process = None  # of the program that runs

    def start(self, *arguments, program="train", ranks=0, restarts=0, forked=None, **limits):
        """Start a program and return the number of its process.

        ranks: how many torchrun starts, and as often as `restarts` again; it puts the number of
            each for ${local_rank} in the arguments.
        limits: of `resource`, such as RLIMIT_FSIZE.
        """
        if self._process:  # a test that failed did not wait for its program
            self.kill()
        forked = not self._gpus if forked is None else forked
        ranks = ranks if forked else ranks or 1
        self.output.unlink(missing_ok=True)
        started = program, list(map(str, arguments)), self.output, limits, ranks, restarts, forked
        self._process = fork(run_program, *started, self._gpus, daemon=False)
        while not self.output.exists():  # before, the process ignores SIGINT
            time.sleep(0.001)
        return self._process.pid

    def wait(self):
        """Return the exit status, or minus the signal, and the output."""
        self._process.join()
        status = self._process.exitcode
        self._process = None
        return status, self.output.read_bytes().decode()

    def wait_for(self, condition, seconds=60, may_end=False):
        """Return the value of `condition()` as soon as it is true.

        A program that ends before fails the test, unless it may; and one that takes longer, which
        is ended, and its output has the stacks of its threads.
        """
        end = time.monotonic() + seconds
        while not (value := condition()):
            if self._process.exitcode is not None:
                value = condition()
                assert value or may_end, self.wait()[1]
                return value
            assert time.monotonic() < end, self.kill(signal.SIGALRM)[1]
            time.sleep(0.002)
        return value

    def ranks(self):
        """Return the processes that the program has started."""
        running = self._process.pid
        children = Path(f"/proc/{running}/task/{running}/children")
        return [int(child) for child in children.read_text().split()]

    def kill(self, number=signal.SIGKILL):
        """End the program and its ranks by a signal; return as `wait` does."""
        processes = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            processes = [*self.ranks(), self._process.pid]
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
        """End the program that runs, if any."""
        if self._process:
            self.kill()


def rank(*arguments):
    """Run train.py as one of several ranks."""
    import train
    from w2v.distributed import launcher

    signal.alarm(240)
    sys.exit(launcher.run(train.main, arguments))


def fork_ranks(ranks, restarts, arguments):
    """Start ranks by torchrun's parts, in processes that this one forks."""
    import torch
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its own wait lets the agent wait forever for a rank that was killed while it waited.
    def wait(event):
        while not event.is_set():
            time.sleep(0.01)

    multiprocessing.synchronize.Event.wait = wait
    # It would ask the driver, after which forked processes cannot use it.
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    config = LaunchConfig(
        1,
        1,
        ranks,
        run_id=f"job-{os.getpid()}",
        max_restarts=restarts,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )
    torch.cuda.is_available = available
    elastic_launch(config, rank)(*arguments)


def spawn_ranks(ranks, restarts, arguments):
    """Start ranks by torchrun itself."""
    from torch.distributed import run as torchrun

    options = "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"
    torchrun.run(torchrun.parse_args([*options, str(ROOT / "train.py"), *arguments]))


def run_program(program, arguments, output, limits, ranks, restarts, forked, sees_gpus):
    """Run a program in this forked process, and exit."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    import evaluate
    import train
    from w2v.distributed import launcher

    # Scripts in the background ignore these. Programs begin as `cli.start` begins them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.alarm(300 if ranks else 120)
    os.chdir(output.parent)
    sys.path.append("")
    if not sees_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    status = 99
    try:
        if ranks:
            (fork_ranks if forked else spawn_ranks)(ranks, restarts, arguments)
        main = {"train": train, "evaluate": evaluate}[program].main
        status = 0 if ranks else launcher.run(main, arguments)
    except ChildFailedError as failed:
        print(failed)
        status = 1
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        # Flush and join threads, but do not tear down modules.
        sys.stdout.flush()
        threading._shutdown()
        os._exit(status)
