"""Ranks on two machines: network namespaces with a virtual link."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.programs import Programs
from tests.support.saving import run_folder, saving_run

TRAIN = Path(__file__).parents[2] / "train.py"
MASTER = "10.77.0.1"
RENDEZVOUS = {
    "static": ("--master-addr={master}", "--master-port={port}", "--node-rank={host}"),
    "c10d": (
        "--rdzv-backend=c10d",
        "--rdzv-id=job",
        "--rdzv-endpoint={master}:{port}",
        "--rdzv-conf=is_host={is_host}",
        "--local-addr={address}",
    ),
}
ENDS_IN_SECONDS = 60
PORTS = itertools.count(29_500)


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=check)


class Network:
    """Two hosts, each with an address on the link between them."""

    def __init__(self, folder):
        self.folder = folder
        self.names = [f"w2v-{os.getpid()}-{host}" for host in range(2)]
        self.links = [f"link{host}" for host in range(2)]
        self.addresses = [MASTER, "10.77.0.2"]
        self.running = []
        for name in self.names:
            ip("netns", "add", name)
        first, second = zip(self.links, ("netns",) * 2, self.names, strict=True)
        ip("link", "add", *first, "type", "veth", "peer", "name", *second)
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")

    def start(self, rendezvous, *arguments):
        """Start two ranks on each host."""
        port = next(PORTS)
        self.running = []
        for host, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            how = {"master": MASTER, "port": port, "address": address}
            options = [option.format(host=host, is_host=1 - host, **how) for option in rendezvous]
            torchrun = "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"
            command = [sys.executable, *torchrun, *options, TRAIN, *arguments]
            with open(self.folder / f"{host}.txt", "w") as output:
                process = subprocess.Popen(
                    ["ip", "netns", "exec", name, *map(str, command)],
                    env=os.environ | {"GLOO_SOCKET_IFNAME": self.links[host]},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.running.append(process)

    def output(self, host):
        return (self.folder / f"{host}.txt").read_text()

    def wait(self, seconds=240):
        """Return the exit status of each host's torchrun."""
        return [process.wait(seconds) for process in self.running]

    def kill(self, host):
        """Kill all processes of a host."""
        for process in ip("netns", "pids", self.names[host]).stdout.split():
            os.kill(int(process), signal.SIGKILL)

    def close(self):
        for host, name in enumerate(self.names):
            self.kill(host)
            ip("netns", "delete", name, check=False)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command ip")
    try:
        network = Network(tmp_path_factory.mktemp("network"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.strip()}")
    yield network
    network.close()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    more = "train.epochs=20", "train.batch_size=256"
    return saving_run(tmp_path_factory.mktemp("corpus"), 750, *more)


@pytest.fixture(scope="module")
def expected(arguments, tmp_path_factory):
    """The vectors of four ranks on one host."""
    folder = tmp_path_factory.mktemp("one-host")
    programs = Programs(tmp_path_factory.mktemp("programs"))
    its = *arguments, f"run.dir={folder}", "--gpus", 4
    status, output = programs.run(*its, forked=True)
    programs.close()
    assert status == 0, output
    return vectors(folder)


def vectors(folder):
    return (run_folder(folder) / "vectors.bin").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", RENDEZVOUS.values(), ids=RENDEZVOUS)
def test_ranks_on_two_machines_give_the_vectors_of_one(
    network, arguments, expected, tmp_path, rendezvous
):
    network.start(rendezvous, *arguments, f"run.dir={tmp_path}")
    assert network.wait() == [0, 0], network.output(0) + network.output(1)
    assert vectors(tmp_path) == expected


@pytest.mark.slow  # most of it is waiting until a machine counts as lost
@pytest.mark.parametrize("fault", ["link", "machine"])
def test_a_lost_machine_ends_the_other_and_the_run_resumes(
    network, arguments, expected, tmp_path, fault
):
    network.start(RENDEZVOUS["static"], *arguments, f"run.dir={tmp_path}")
    begun = time.monotonic()
    while not list(tmp_path.glob("20*/checkpoints/step-????????")):
        assert time.monotonic() - begun < 240, network.output(0)
        time.sleep(0.01)
    lost = time.monotonic()
    if fault == "link":
        ip("-n", network.names[1], "link", "set", network.links[1], "down")
    else:
        network.kill(1)
    statuses = network.wait()
    outputs = network.output(0) + network.output(1)
    assert statuses == [1, 1 if fault == "link" else -signal.SIGKILL], outputs
    assert time.monotonic() - lost < ENDS_IN_SECONDS
    for host in range(2 if fault == "link" else 1):
        output = network.output(host)
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        assert 1 <= len(errors) <= 2, output  # of each rank
        assert all("another of 4 ranks is lost" in line for line in errors), output

    ip("-n", network.names[1], "link", "set", network.links[1], "up")
    run = run_folder(tmp_path)
    network.start(RENDEZVOUS["static"], "--resume", run)
    assert network.wait() == [0, 0], network.output(0) + network.output(1)
    assert vectors(tmp_path) == expected
