"""Ranks in processes of their own: each call runs in all of them at once."""

import contextlib
import faulthandler
import os
import signal
import traceback
from datetime import timedelta

import torch

from tests.support.processes import PROCESSES, fork
from w2v.distributed import ranks as distributed_ranks
from w2v.distributed.ranks import ProcessGroup

SECONDS = 300  # in which a call must be done


class Pool:
    """Processes that wait for calls, on CPUs or (device="cuda") a GPU each."""

    def __init__(self, size, device="cpu"):
        self.device = device
        self._pipes, self._processes = [], []
        # As of torchrun's agent: another test could take a port that is free for a while.
        self._store = torch.distributed.TCPStore("localhost", 0, is_master=True)
        for rank in range(size):
            pipe, child_pipe = PROCESSES.Pipe()
            self._pipes.append(pipe)
            arguments = child_pipe, rank, size, self._store.port, device
            self._processes.append(fork(_serve, *arguments))

    def run(self, function, *arguments):
        """Return what `function(ranks, *arguments)` returns in each rank.

        The function must be at the top level of a module, so that it can be pickled.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._receive(pipe) for pipe in self._pipes]
        for failed, answer in answers:
            assert not failed, answer
        return [answer for _, answer in answers]

    def _receive(self, pipe):
        """Return an answer; ranks that give none in time write their stacks."""
        if not pipe.poll(SECONDS):
            for process in self._processes:
                os.kill(process.pid, signal.SIGABRT)
            raise AssertionError(f"no answer for {SECONDS} s; stacks are on standard error")
        return pipe.recv()

    def close(self):
        """Return the exit statuses of the processes, after they have ended."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(30)
        return [process.exitcode for process in self._processes]


def _serve(pipe, rank, size, port, device):
    faulthandler.enable()
    # Many tests share the cores and GPUs: a rank that compiles kernels may take minutes.
    distributed_ranks.TIMEOUT = timedelta(seconds=SECONDS)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic algorithms
        torch.cuda.set_device(rank % torch.cuda.device_count())
    ranks = ProcessGroup(device)
    while call := pipe.recv():
        function, arguments = call
        try:
            pipe.send((False, function(ranks, *arguments)))
        except BaseException:
            pipe.send((True, f"rank {rank}: {traceback.format_exc()}"))
    ranks.leave()
