"""train.py and evaluate.py in processes of their own, forked from one that has imported what they need, so that a run takes a third of a
second. A process that takes minutes is ended by SIGALRM.

With `ranks` train.py is started so many times by what torchrun is made of, in processes that this one forks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A forked process ends as Python ends one, but for taking its modules apart: what was printed is written, threads are waited for.
FORKING = """
import gc, json, os, resource, signal, sys, threading, traceback
import evaluate, gensim.models, numpy, omegaconf, safetensors, scipy.stats, smart_open, torch, torch._dynamo, torch._inductor, train
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from w2v import commands, cpu, evaluation, export, ingest, metrics, plan, runfolder, torchrun, trainer

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
gc.collect()
gc.freeze()
print("ready", flush=True)
for line in sys.stdin:
    program, arguments, output, limits, ranks, restarts = json.loads(line)
    if (child := os.fork()) == 0:
        signal.alarm(300 if ranks else 120)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        status = 99
        try:
            status = launched(ranks, restarts, arguments) if ranks else {"train": train, "evaluate": evaluate}[program].main(arguments)
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


class Programs:
    """Runs train.py or evaluate.py, one at a time, each in a process of its own that works in `folder` and sees no GPU."""

    def __init__(self, folder):
        self.output = folder / "output.txt"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
        )
        assert self._server.stdout.readline() == "ready\n"

    def start(self, *arguments, program="train", ranks=0, restarts=0, **limits):
        """The number of the process; limits are those of `resource`, such as RLIMIT_FSIZE.

        ranks: how many torchrun starts, as often as `restarts` again; arguments that are functions say what the rank's is.
        """
        of_ranks = [[str(entry(rank) if callable(entry) else entry) for entry in arguments] for rank in range(ranks)]
        order = program, of_ranks or list(map(str, arguments)), str(self.output), limits, ranks, restarts
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def wait(self):
        """The exit status, or minus the signal, and what was said."""
        return int(self._server.stdout.readline()), self.output.read_bytes().decode()

    def run(self, *arguments, program="train", **limits):
        self.start(*arguments, program=program, **limits)
        return self.wait()

    def close(self):
        self._server.stdin.close()
        self._server.wait(30)
