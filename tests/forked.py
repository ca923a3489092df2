"""train.py in processes of its own, forked from one that has imported what it needs, so that a run takes a second.

With `ranks` it is started so many times by what torchrun is made of, in processes that this one forks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FORKING = """
import json, os, resource, sys
import gensim.models, numpy, torch, torch._inductor, train  # which deterministic torch imports
from w2v import evaluation, export, metrics, plan, runfolder, trainer
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from w2v import torchrun

def rank(arguments):
    sys.exit(torchrun.recorded(train.main)(arguments[int(os.environ["RANK"])]))

def launched(ranks, restarts, arguments):
    run, where = f"job-{os.getpid()}", {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    try:
        elastic_launch(LaunchConfig(1, 1, ranks, run_id=run, max_restarts=restarts, start_method="fork", **where), rank)(arguments)
    except ChildFailedError as failed:
        print(failed)
        return 1
    return 0

torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    arguments, output, limits, ranks, restarts = json.loads(line)
    if (child := os.fork()) == 0:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        status = 99
        try:
            status = launched(ranks, restarts, arguments) if ranks else train.main(arguments)
        except SystemExit as stop:
            status = stop.code
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Programs:
    """Runs train.py, one at a time, each in a process of its own."""

    def __init__(self, folder):
        self.output = folder / "output.txt"
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        assert self._server.stdout.readline() == "ready\n"

    def start(self, *arguments, ranks=0, restarts=0, **limits):
        """The number of the process; limits are those of `resource`, such as RLIMIT_FSIZE.

        ranks: how many torchrun starts, as often as `restarts` again; arguments that are functions say what the rank's is.
        """
        of_ranks = [[str(entry(rank) if callable(entry) else entry) for entry in arguments] for rank in range(ranks)]
        order = of_ranks or list(map(str, arguments)), str(self.output), limits, ranks, restarts
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def wait(self):
        """The exit status, or minus the signal, and what was said."""
        return int(self._server.stdout.readline()), self.output.read_text()

    def run(self, *arguments, **limits):
        self.start(*arguments, **limits)
        return self.wait()

    def close(self):
        self._server.stdin.close()
        self._server.wait(30)
