"""Ranks that train together, in processes of their own, for tests: each call is made in all of them at once."""

import contextlib
import os
import socket
import traceback
from multiprocessing import get_context

import torch

from w2v.distributed.ranks import ProcessGroup

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["torch", "w2v.training.trainer", "w2v.training.plan", "w2v.distributed.ranks"]
)


class Pool:
    """`size` processes that wait for calls, on CPUs or, with device="cuda", each with a GPU."""

    def __init__(self, size, device="cpu"):
        self.device = device
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        self._ends, self._processes = [], []
        for rank in range(size):
            ours, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(
                target=_serve, args=(theirs, rank, size, port, device), daemon=True
            )
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function, *arguments):
        """What `function(ranks, *arguments)` gives, in the order of the ranks; it must be at a module's top level."""
        for end in self._ends:
            end.send((function, arguments))
        answers = [end.recv() for end in self._ends]
        for failed, answer in answers:
            if failed:
                raise AssertionError(answer)
        return [answer for _, answer in answers]

    def close(self):
        """The exit statuses of the processes."""
        for end in self._ends:
            with contextlib.suppress(BrokenPipeError):
                end.send(None)
        for process in self._processes:
            process.join(30)
        return [process.exitcode for process in self._processes]


def _serve(end, rank, size, port, device):
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
    }
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for those that are deterministic
        torch.cuda.set_device(rank)
    ranks = ProcessGroup(device)
    while call := end.recv():
        function, arguments = call
        try:
            end.send((False, function(ranks, *arguments)))
        except BaseException:
            end.send((True, f"rank {rank}: {traceback.format_exc()}"))
    ranks.leave()
