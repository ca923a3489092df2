"""train.py and evaluate.py in forked processes with everything loaded.

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
# A forked process flushes its output and joins its threads, but does not tear down its modules.
FORKING = """
import contextlib, faulthandler, gc, io, json, multiprocessing.synchronize, os, resource, signal
import sys, tempfile, threading, time, traceback
from pathlib import Path
import evaluate, gensim.models, numpy, omegaconf, safetensors, scipy.stats, smart_open, train
import torch, torch._dynamo, torch._inductor  # which deterministic runs import
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tests.support.tiny import tiny_arguments
from w2v.api import commands
from w2v.distributed import launcher as torchrun
from w2v.text import encode
from w2v.training import metrics, plan, run_folder, step, trainer
from w2v.vectors import evaluate as scores, export

signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts in the background ignore these
signal.signal(signal.SIGHUP, signal.SIG_DFL)
faulthandler.register(signal.SIGALRM, chain=True)  # also in forked processes
signal.alarm(240)

def rank(*arguments):
    signal.alarm(240)
    sys.exit(torchrun.run(train.main, arguments))

def forked_ranks(ranks, restarts, arguments):
    # Its own wait lets the agent wait forever for a rank that was killed while it waited.
    def wait(event):
        while not event.is_set():
            time.sleep(0.01)
    multiprocessing.synchronize.Event.wait = wait
    # It would ask the driver, after which forked processes cannot use it.
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    config = LaunchConfig(
        1, 1, ranks, run_id=f"job-{os.getpid()}", max_restarts=restarts, start_method="fork",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )
    torch.cuda.is_available = available
    elastic_launch(config, rank)(*arguments)

def spawned_ranks(ranks, restarts, arguments):
    options = "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"
    run.run(run.parse_args([*options, train.__file__, *arguments]))

torch.set_num_threads(1)
if not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
    # A run loads machine code and numba's types, which took each forked one a third of a second.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        assert train.main(tiny_arguments(Path(folder))) == 0
gc.collect()
gc.freeze()
signal.alarm(0)
print("ready", flush=True)
for line in sys.stdin:
    program, arguments, output, limits, ranks, restarts, forked = json.loads(line)
    if (child := os.fork()) == 0:
        signal.alarm(300 if ranks else 120)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        status = 99
        try:
            if ranks:
                (forked_ranks if forked else spawned_ranks)(ranks, restarts, arguments)
            main = {"train": train, "evaluate": evaluate}[program].main
            status = 0 if ranks else torchrun.run(main, arguments)
        except ChildFailedError as failed:
            print(failed)
            status = 1
        except SystemExit as stop:
            status = stop.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            threading._shutdown()
            os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def _is_alive(process):
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
            [sys.executable, "-c", FORKING],
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
        while any(map(_is_alive, processes)):
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
