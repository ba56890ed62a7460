# SPDX-License-Identifier: Apache-2.0
"""Start a script on ranks with slow links between them: a small cluster inside one Linux machine.

`python launch/bench/cluster.py --nodes 2 --inter_mbit 400 launch/bench/slow_links.py`

Like torchrun, but each rank is in a network namespace of its own, with one virtual cable to a
switch. The kernel limits what each rank sends and receives, apart for ranks of its node and of
others; host names tell the nodes apart. Needs Linux, iproute2 and util-linux; root, or a kernel
that lets users make namespaces. Nothing of it has a name outside its own processes: when the last
of them ends, the kernel takes all away.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

TOOLS = ("ip", "tc", "unshare", "setpriv", "hostname")
AS_ROOT = ("unshare", "--net")
AS_USER = ("unshare", "--user", "--map-root-user", "--net")
WITH_LAUNCHER = ("setpriv", "--pdeathsig", "KILL")  # a rank ends when its launcher does
IN_TIME_S = 10.0
PORT = 29500
SPEEDS = ("LINKS_INTER_MBIT", "LINKS_INTRA_MBIT")  # environment variables of a rank
MTU = 9000  # headers then take 0.7 % of a link instead of 4.5 %
PACKET_BYTES = 18200  # that the kernel cuts later: a larger one passes a limit at once
SOCKET_BYTES = 131072  # that wait in a socket: a send ends when its bytes have nearly left
QUEUE_BYTES = 64 << 20


@dataclass(frozen=True)
class Cluster:
    """Nodes of ranks; each rank has a network card of its own.

    Attributes:
        num_nodes: nodes.
        ranks_per_node: ranks of each.
        inter_mbit: what a rank sends to, and receives from, other nodes, in 10^6 bits a second.
        intra_mbit: likewise, of its own node.
    """

    num_nodes: int
    ranks_per_node: int
    inter_mbit: float
    intra_mbit: float

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1 or self.num_ranks > 100:
            raise ValueError(
                f"{self.num_nodes} nodes of {self.ranks_per_node} ranks: give 1 or more of both, "
                "and at most 100 ranks in all"
            )
        if min(self.inter_mbit, self.intra_mbit) <= 0:
            raise ValueError(
                f"links of {self.inter_mbit} and {self.intra_mbit} Mbit/s carry nothing; give both "
                "a speed above 0"
            )

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would tell a rank, which card to use, and how fast its links are."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            **dict(zip(SPEEDS, (str(self.inter_mbit), str(self.intra_mbit)))),
        }

    def limits(self, rank: int, device: str, way: str) -> Iterator[str]:
        """Commands that limit what passes a device of a rank's cable, each peer in a queue of its
        own, so that peers share a link evenly.

        Args:
            rank: the cable's.
            device: its end at the rank, or at the switch.
            way: of addresses that name the peer: "dst" at the rank, "src" at the switch.
        """
        yield f"tc qdisc add dev {device} root handle 1: htb direct_qlen 10000"
        add = f"tc class add dev {device}"
        for number, rate in ((1, self.intra_mbit), (2, self.inter_mbit)):
            yield f"{add} parent 1: classid 1:{number} htb {_rates(rate, rate)}"
        for peer in range(self.num_ranks):
            is_near = self.node(peer) == self.node(rank)
            number, rate = (1, self.intra_mbit) if is_near else (2, self.inter_mbit)
            own = f"1:{peer + 16:x}"
            share = _rates(rate / self.num_ranks, rate)
            yield f"{add} parent 1:{number} classid {own} htb {share}"
            yield f"tc qdisc add dev {device} parent {own} bfifo limit {QUEUE_BYTES}"
            yield (
                f"tc filter add dev {device} parent 1: protocol ip u32 "
                f"match ip {way} {self.address(peer)}/32 flowid {own}"
            )

    def at_rank(self, rank: int) -> Iterator[str]:
        """Commands that a rank gives at its end of the cable."""
        yield f"hostname node{self.node(rank)}"
        yield "ip link set lo up"
        yield f"echo 4096 65536 {SOCKET_BYTES} > /proc/sys/net/ipv4/tcp_wmem"
        yield f"ip link set eth0 gso_max_size {PACKET_BYTES} up"
        yield f"ip addr add {self.address(rank)}/24 dev eth0"
        yield from self.limits(rank, "eth0", "dst")

    def at_switch(self, rank: int, process: int) -> Iterator[str]:
        """Commands that connect a rank, which is a process, to the switch."""
        port = f"rank{rank}"
        yield (
            f"ip link add name {port} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {process}"
        )
        yield f"ip link set {port} master switch up"
        yield from self.limits(rank, port, "src")


def _rates(assured_mbit: float, most_mbit: float) -> str:
    """Of a class that may borrow; it sends at once what 250 us take, a packet at least."""
    burst = max(int(most_mbit * 1e6 / 8 * 250e-6), PACKET_BYTES + 300)
    return (
        f"rate {assured_mbit:.3f}mbit ceil {most_mbit:.3f}mbit "
        f"burst {burst} cburst {burst} quantum 15000"
    )


def isolation() -> tuple[str, ...]:
    """The command that gives another one a network of its own.

    Raises:
        RuntimeError: this machine does not let us.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(
            f"slow links need {', '.join(missing)}, which are not there; install iproute2 and "
            "util-linux (only Linux has them)"
        )
    trial = ["ip link add name eth0 type veth peer name other", *Cluster(1, 1, 1, 1).at_rank(0)]
    said = ""
    for command in (AS_ROOT, AS_USER):
        tried = [*command, "--uts", *shell(trial)]
        done = subprocess.run(tried, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return command
        said = done.stderr.strip().replace("\n", "; ")
    raise RuntimeError(
        f"this machine lets us make no network with limits ({said}); run as root, in a container "
        "with --privileged, or on a kernel with user namespaces and sch_htb"
    )


def shell(commands: Iterable[str], last: str = "") -> list[str]:
    """Commands that run one after the other while all goes well."""
    return ["sh", "-e", "-c", "\n".join([*commands, last]), "sh"]


@contextmanager
def ranks(
    cluster: Cluster, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[list[subprocess.Popen]]:
    """Processes that run a command, one a rank, connected by the links; killed at the end.

    Call it inside ``isolation``: this process's network becomes the switch.
    """
    switch = ["ip link add name switch type bridge", "ip link set switch up"]
    subprocess.run(shell(switch), check=True)
    started: list[subprocess.Popen] = []
    try:
        for rank in range(cluster.num_ranks):
            waits = ["read connected", *cluster.at_rank(rank)]
            alone = [*WITH_LAUNCHER, *AS_ROOT, "--uts", *shell(waits, 'exec "$@"'), *command]
            own = {**environment, **cluster.environment(rank)}
            started.append(subprocess.Popen(alone, stdin=subprocess.PIPE, env=own))
        for rank, process in enumerate(started):
            _wait_for_own_network(process)
            subprocess.run(shell(cluster.at_switch(rank, process.pid)), check=True)
            assert process.stdin is not None
            process.stdin.write(b"connected\n")
            process.stdin.close()
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def _wait_for_own_network(process: subprocess.Popen) -> None:
    end_s = time.monotonic() + IN_TIME_S
    here = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{process.pid}/ns/net") == here:
        if process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"process {process.pid} got no network of its own in {IN_TIME_S} s")
        time.sleep(0.002)


def wait_for(started: Sequence[subprocess.Popen]) -> int:
    """Exit status of the first rank that fails; 0 when all have ended well."""
    while True:
        statuses = [process.poll() for process in started]
        failed = [status for status in statuses if status]
        if failed:
            return failed[0]
        if all(status == 0 for status in statuses):
            return 0
        time.sleep(0.05)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--nodes", type=int, default=2)
    add("--ranks_per_node", type=int, default=2)
    add("--inter_mbit", type=float, default=400.0, help="of a rank's card, to other nodes")
    add("--intra_mbit", type=float, default=4000.0, help="of a rank's card, within its node")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    add("script", nargs=argparse.REMAINDER, help="Python script and its arguments")
    arguments = parser.parse_args()
    if not arguments.script:
        parser.error("name a Python script to start")
    return arguments


def main() -> None:
    """Isolate this process, then start the ranks and wait for them."""
    given = parse_arguments()
    try:
        cluster = Cluster(given.nodes, given.ranks_per_node, given.inter_mbit, given.intra_mbit)
        if not given.inside:
            again = (*isolation(), sys.executable, __file__, "--inside", *sys.argv[1:])
            os.execvp(again[0], again)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"links: {error}")
    # Addresses here have no host names: torch would complain at each connection.
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with ranks(cluster, [sys.executable, *given.script], {**quiet, **os.environ}) as started:
        sys.exit(wait_for(started))


if __name__ == "__main__":
    main()
