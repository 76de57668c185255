"""Several nodes on one machine: hosts in network namespaces, joined by links of a given rate.

Each host has its own address, host name, /dev/shm and, if there are enough, its own cores. Needs
root and Linux.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.lib.paths import ROOT

MPIRUN = Path(sys.executable).with_name("mpirun")
NETWORK = "10.77.0."  # seen inside the namespaces alone
LINK = "link0"

# AGENT HOST COMMAND…: run a command on a host. mpirun on the first host calls this, not ssh.
AGENT = """#!/bin/sh
host=${{1##*.}}; shift
exec ip netns exec {name}-$host unshare --mount --uts sh -c '
mount -t tmpfs none /dev/shm && hostname {name}-$0 &&
exec taskset -c $(echo "{cores}" | cut -d " " -f $0) sh -c "$1"
' "$host" "$*"
"""


def reason_against():
    """Why there can be no such hosts here; None where there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [
        tool for tool in ("ip", "tc", "unshare", "taskset") if shutil.which(tool) is None
    ]:
        return f"there is no {missing[0]}"
    if not MPIRUN.exists() or MPIRUN.with_name("ompi_info").exists():
        return "MPICH's mpirun is needed beside the Python interpreter"
    try:
        with hosts():
            return None
    except OSError as error:
        return f"no network namespaces: {error}"


@contextlib.contextmanager
def hosts(rate="1gbit"):
    """Make two hosts for the `with` block; yield a function that runs a command on them."""
    name = f"einmpi{os.getpid()}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="einmpi-hosts-"))
        stack.callback(remove, name)
        for host in (1, 2):
            ip("netns", "add", f"{name}-{host}")
        ip(
            "-n",
            f"{name}-1",
            "link",
            "add",
            LINK,
            "type",
            "veth",
            "peer",
            "name",
            LINK,
            "netns",
            f"{name}-2",
        )
        for host in (1, 2):
            ip("-n", f"{name}-{host}", "addr", "add", f"{NETWORK}{host}/24", "dev", LINK)
            for link in ("lo", LINK):
                ip("-n", f"{name}-{host}", "link", "set", link, "up")
            # Each end limits what it sends: both directions have the full rate, as on a card.
            limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            ip("netns", "exec", f"{name}-{host}", "tc", "qdisc", "add", "dev", LINK, "root", *limit)
        for host in (1, 2):
            wait_for(f"{name}-{host}")
        agent = Path(folder, "agent")
        agent.write_text(AGENT.format(name=name, cores=" ".join(cores())))
        agent.chmod(0o755)

        def run(per_host, arguments, timeout=300, cwd=ROOT, env=None, ranks=None):
            """The finished `python …` on so many ranks of each host, or with fewer on the last."""
            mpirun = [
                str(MPIRUN),
                "-launcher",
                "rsh",
                "-launcher-exec",
                str(agent),
                "-iface",
                LINK,
                "-hosts",
                f"{NETWORK}1,{NETWORK}2",
                "-ppn",
                str(per_host),
                "-n",
                str(2 * per_host if ranks is None else ranks),
            ]
            command = [str(agent), f"{NETWORK}1", shlex.join([*mpirun, sys.executable, *arguments])]
            # Else UCX takes the shared memory of what it knows to be one machine.
            settings = {
                "UCX_TLS": "tcp,self",
                "UCX_NET_DEVICES": LINK,
                "PYTHONPATH": str(ROOT),
                # Unbuffered, print writes a line and its end apart, and lines of ranks are mixed.
                "PYTHONUNBUFFERED": "",
            }
            outer = ("EINMPI", "PMI", "HYDI_", "HYDRA_", "SLURM")
            kept = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                env={**kept, **settings, **(env or {})},
            )

        yield run


def wait_for(host):
    """A link is up some moments after it was set up, and MPI does not see it before."""
    deadline = time.monotonic() + 60
    while "state UP" not in ip("-n", host, "link", "show", LINK):
        if time.monotonic() > deadline:
            raise OSError(f"the link of {host} does not come up")
        time.sleep(0.02)


def cores():
    """The cores of each host, for taskset."""
    mine = sorted(os.sched_getaffinity(0))
    half = len(mine) // 2
    return [
        ",".join(map(str, part)) for part in ((mine[:half], mine[half:]) if half else (mine, mine))
    ]


def ip(*words):
    """What the command ip prints; OSError says why it failed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {' '.join(done.stderr.split())}")
    return done.stdout


def remove(name):
    """Remove the hosts of this process and of killed ones. Links go with their namespaces."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    for found in filter(None, (re.fullmatch(r"(einmpi(\d+))-\d", word) for word in listed)):
        if found[1] == name or not os.path.exists(f"/proc/{found[2]}"):
            pids = subprocess.run(
                ["ip", "netns", "pids", found[0]], capture_output=True, text=True
            ).stdout.split()
            for pid in map(int, pids):
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
            with contextlib.suppress(OSError):
                ip("netns", "del", found[0])
