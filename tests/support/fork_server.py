"""Server of `programs.Programs`: fork a process for each line of stdin.

A line is JSON: the program ("train" or "evaluate"), its arguments, the file of its output, resource
limits, ranks, restarts, and whether ranks are forked. It prints the number of the process, then its
exit status. Everything is loaded once, so that a run takes a tenth of a second.
"""

import contextlib
import faulthandler
import gc
import io
import json
import multiprocessing.synchronize
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import gensim.models
import numpy
import safetensors
import scipy.stats
import smart_open
import torch
import torch._dynamo
import torch._inductor  # deterministic runs import it
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import evaluate
import train
from tests.support.tiny import tiny_arguments
from w2v.api import commands
from w2v.distributed import launcher
from w2v.text import encode
from w2v.training import build, metrics, plan, run_folder, trainer
from w2v.vectors import evaluate as scores
from w2v.vectors import export
from w2v.word2vec import step

# Loaded for the programs.
LOADED = gensim.models, numpy, safetensors, scipy.stats, smart_open, commands, encode
LOADED += build, metrics, plan, run_folder, step, trainer, scores, export


def rank(*arguments):
    """Run train.py as one of several ranks."""
    signal.alarm(240)
    sys.exit(launcher.run(train.main, arguments))


def fork_ranks(ranks, restarts, arguments):
    """Start ranks by torchrun's parts, in processes that this one forks."""

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
    options = "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"
    torchrun.run(torchrun.parse_args([*options, train.__file__, *arguments]))


def run_program(program, arguments, output, limits, ranks, restarts, forked):
    """Run a program in this forked process, and exit."""
    signal.alarm(300 if ranks else 120)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
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


def serve():
    """Load everything, then fork a process for each line of standard input."""
    # Scripts in the background ignore these. Programs begin as `cli.start` begins them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, chain=True)  # also in forked processes
    signal.alarm(240)
    torch.set_num_threads(1)
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
        # A run loads machine code and numba's types, which took each forked one a third of a
        # second.
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            assert train.main(tiny_arguments(Path(folder))) == 0
    gc.collect()
    gc.freeze()
    signal.alarm(0)
    print("ready", flush=True)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            run_program(*json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
