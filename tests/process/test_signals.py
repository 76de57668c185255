"""A request to stop is not lost while a rank starts, and does not end one that has finished."""

import os
import signal
import subprocess
import sys

import pytest
from paths import ROOT

RANK = """
import os, signal
os.kill(os.getpid(), signal.SIGUSR1)  # held by whoever started this process
from einmpi.process.signals import collect_stop_requests, hold_stop_requests
hold_stop_requests()
with collect_stop_requests() as asked:
    print(asked)
os.kill(os.getpid(), signal.SIGUSR1)
print("lives")
"""


@pytest.mark.parametrize("launched", [True, False])
def test_requests_before_and_after_a_run(launched):
    """Without a launcher the signal means afterwards what it meant before."""
    settings = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        **({"PMI_RANK": "0"} if launched else {}),
    }
    done = subprocess.run(
        [sys.executable, "-u", "-c", RANK],
        env=settings,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}),
    )
    said = "['SIGUSR1']\n"
    assert (done.returncode, done.stdout) == (
        (0, said + "lives\n") if launched else (-signal.SIGUSR1, said)
    ), done
