"""train.py and evaluate.py in processes of their own, forked from one that has imported what they need, so that a run takes a third of a
second. A process that takes two minutes is ended by SIGALRM."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A forked process ends as Python ends one, but for taking its modules apart: what was printed is written, threads are waited for.
FORKING = """
import gc, json, os, resource, signal, sys, threading, traceback
import evaluate, gensim.models, numpy, omegaconf, safetensors, scipy.stats, smart_open, torch, torch._dynamo, train
from w2v import commands, cpu, evaluation, export, ingest, metrics, plan, runfolder, trainer
torch.set_num_threads(1)
gc.collect()
gc.freeze()
print("ready", flush=True)
for line in sys.stdin:
    program, arguments, output, limits = json.loads(line)
    if (child := os.fork()) == 0:
        signal.alarm(120)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        status = 99
        try:
            status = {"train": train, "evaluate": evaluate}[program].main(arguments)
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
    """Runs train.py or evaluate.py, one at a time, each in a process of its own that works in `folder`."""

    def __init__(self, folder):
        self.output = folder / "output.txt"
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
        )
        assert self._server.stdout.readline() == "ready\n"

    def start(self, *arguments, program="train", **limits):
        """The number of the process; limits are those of `resource`, such as RLIMIT_FSIZE."""
        self._server.stdin.write(json.dumps([program, list(map(str, arguments)), str(self.output), limits]) + "\n")
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
