"""Two hosts on one machine: network namespaces with names and addresses of their own, and a cable between them."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

#: The second half of each host's address.  Only the two namespaces know the network.
ADDRESSES = {"a": "10.213.87.1", "b": "10.213.87.2"}
#: What the names of a host's namespace are read from, by ``ip netns exec``.
_ETC = Path("/etc/netns")

SCONTROL = """#!/bin/sh
echo host-a
echo host-b
"""
#: Runs the command on both hosts at once.  When one fails the other is ended too: --kill-on-bad-exit.
#: Over a cut cable that order comes late: the other host's ranks have to find out for themselves.  They do so seconds
#: apart; then their torchrun would wait for the store on the first host, for longer than anybody does.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && [ "${{2%%=*}}" = --cpus-per-task ] && shift 2 || exit 2
{on_a} "$@" & {on_b} "$@" &
for _ in 1 2; do
    wait -n && continue
    [ -e {cut} ] && sleep 30
    kill $(jobs -p) 2>/dev/null
    sleep 5
    kill -9 $(jobs -p) 2>/dev/null
    exit 1
done
"""


class TwoHosts:
    """host-a and host-b, from ``make`` to ``remove``."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.names = {host: f"actmem-{os.getpid()}-{host}" for host in ADDRESSES}

    def make(self):
        """Raises OSError or CalledProcessError where there can't be any."""
        for namespace in self.names.values():
            ip("netns", "add", namespace)
            etc = _ETC / namespace
            etc.mkdir(parents=True)
            hosts = "".join(f"{address} host-{other}\n" for other, address in ADDRESSES.items())
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        ends = {host: {"name": "cable", "netns": namespace} for host, namespace in self.names.items()}
        first, second = ([part for pair in end.items() for part in pair] for end in ends.values())
        ip("link", "add", *first, "type", "veth", "peer", *second)
        for host, namespace in self.names.items():
            ip("-n", namespace, "address", "add", f"{ADDRESSES[host]}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", namespace, "link", "set", device, "up")
        tools = self.folder / "tools"
        tools.mkdir()
        for name, text in {
            "scontrol": SCONTROL,
            "srun": SRUN.format(on_a=self.prefix("a"), on_b=self.prefix("b"), cut=shlex.quote(str(tools / "cut"))),
        }.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.tools = tools

    def prefix(self, host):
        """What runs a command on a host, to be followed by its words."""
        name = f'hostname host-{host} && exec "$@"'
        return f"ip netns exec {self.names[host]} unshare --uts sh -c '{name}' sh"

    def cut(self):
        """Nothing passes between the hosts from now on, and nobody is told."""
        (self.tools / "cut").touch()
        ip("-n", self.names["b"], "link", "set", "cable", "down")

    def processes(self, host):
        """The numbers of the processes on a host."""
        done = subprocess.run(["ip", "netns", "pids", self.names[host]], check=True, capture_output=True, text=True)
        return [int(number) for number in done.stdout.split()]

    def remove(self):
        for namespace in self.names.values():
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
            shutil.rmtree(_ETC / namespace, ignore_errors=True)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
