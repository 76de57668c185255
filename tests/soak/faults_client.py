"""A rank that mpirun starts: it hands everything to a fork of a server that has einmpi imported.

What happens to one of the two happens to the other. Run it with `python -I -S`, which is quick."""

import contextlib
import json
import os
import signal
import socket
import sys

SERVER_VARIABLE = "SOAK_SERVER"  # the path of the server's socket
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def request(environment, words, descriptors, folder):
    """Ask the server for a process; return what it says further, line by line, and the process id.

    `descriptors` has those of this process by the numbers that they get in the other one.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(environment[SERVER_VARIABLE])
    message = {
        "environment": environment,
        "folder": folder,
        "words": words,
        "descriptors": list(descriptors),
    }
    socket.send_fds(connection, [b"x"], list(descriptors.values()))
    connection.sendall(json.dumps(message).encode() + b"\n")
    answers = connection.makefile("rb")
    return answers, int(answers.readline())


def main() -> None:
    descriptors = {0: 0, 1: 1, 2: 2}
    if "PMI_FD" in os.environ:  # MPICH's connection to mpirun
        number = int(os.environ["PMI_FD"])
        descriptors[number] = number
    answers, pid = request(dict(os.environ), sys.argv[1:], descriptors, os.getcwd())

    def forward(number, _):
        with contextlib.suppress(ProcessLookupError):  # its status is on the way
            os.kill(pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    # The descriptors stay open: a launcher takes their end for that of this process.
    status = int(answers.readline() or b"1")
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
