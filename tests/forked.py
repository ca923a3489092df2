"""train.py in processes of its own, forked from one that has imported what it needs, so that a run takes a second."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FORKING = """
import json, os, resource, sys
import gensim.models, numpy, torch, train
from w2v import evaluation, export, metrics, plan, runfolder, trainer
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    arguments, output, limits = json.loads(line)
    if (child := os.fork()) == 0:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        status = 99
        try:
            status = train.main(arguments)
        except SystemExit as stop:
            status = stop.code
        finally:
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

    def start(self, *arguments, **limits):
        """The number of the process; limits are those of `resource`, such as RLIMIT_FSIZE."""
        self._server.stdin.write(json.dumps([list(map(str, arguments)), str(self.output), limits]) + "\n")
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
