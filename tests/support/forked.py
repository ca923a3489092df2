"""train.py and evaluate.py in processes of their own, forked from one that has imported what they need, so that a run takes a third of a
second. A process that takes minutes is ended by SIGALRM.

With `ranks` train.py is started so many times by what torchrun is made of, in processes that this one forks; or, as a forked process
should not use CUDA, by torchrun's own way, which takes ten seconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A forked process ends as Python ends one, but for taking its modules apart: what was printed is written, threads are waited for.
FORKING = """
import gc, json, multiprocessing.synchronize, os, resource, signal, sys, threading, time, traceback
import evaluate, gensim.models, numpy, omegaconf, safetensors, scipy.stats, smart_open, torch, torch._dynamo, torch._inductor, train
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from w2v.api import commands
from w2v.training import step_cpu as cpu
from w2v.vectors import evaluate as evaluation
from w2v.vectors import export
from w2v.text import encode as ingest
from w2v.training import metrics
from w2v.training import plan
from w2v.training import run_folder as runfolder
from w2v.distributed import launcher as torchrun
from w2v.training import trainer

def rank(*arguments):
    sys.exit(torchrun.recorded(train.main)(arguments))

def forked_ranks(ranks, restarts, arguments):
    # multiprocessing's own would make the agent wait forever for a rank that was killed while it waited for the agent
    multiprocessing.synchronize.Event.wait = lambda event: [time.sleep(0.01) for _ in iter(event.is_set, True)]
    job, where = f"job-{os.getpid()}", {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    elastic_launch(LaunchConfig(1, 1, ranks, run_id=job, max_restarts=restarts, start_method="fork", **where), rank)(*arguments)

def ranks_apart(ranks, restarts, arguments):
    options = "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"
    run.run(run.parse_args([*options, train.__file__, *arguments]))

torch.set_num_threads(1)
gc.collect()
gc.freeze()
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
                (forked_ranks if forked else ranks_apart)(ranks, restarts, arguments)
            status = 0 if ranks else {"train": train, "evaluate": evaluate}[program].main(arguments)
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


class Programs:
    """Runs train.py or evaluate.py, one at a time, each in a process of its own that works in `folder` and sees no GPU.

    gpus: train.py sees them, and is always started by torchrun.
    """

    def __init__(self, folder, gpus=False):
        self.output, self._forked = folder / "output.txt", not gpus
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = (
            os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
        )
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )
        assert self._server.stdout.readline() == "ready\n"

    def start(self, *arguments, program="train", ranks=0, restarts=0, forked=None, **limits):
        """The number of the process; limits are those of `resource`, such as RLIMIT_FSIZE.

        ranks: how many torchrun starts, as often as `restarts` again; it puts the number of each for ${local_rank} in the arguments.
        """
        forked = self._forked if forked is None else forked
        order = (
            program,
            list(map(str, arguments)),
            str(self.output),
            limits,
            ranks if forked else ranks or 1,
            restarts,
            forked,
        )
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
