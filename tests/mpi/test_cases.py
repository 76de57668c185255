"""Every job and program of the tests on real ranks, with every strategy: values, bits, bytes and
memory.
"""

import pytest
from run_cases import CASES, check_case

from einmpi.planner.strategies import STRATEGIES

pytestmark = pytest.mark.mpi(min_size=1)
# Many ranks on few cores take long: beyond this, two strategies that cut differently are enough.
MOST_RANKS_FOR_ALL_STRATEGIES = 4
TWO_STRATEGIES = ("eindecomp", "eindecomp-paper")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_case(name, strategy, world):
    if world.size > MOST_RANKS_FOR_ALL_STRATEGIES and strategy not in TWO_STRATEGIES:
        pytest.skip("this many ranks run two strategies")
    if not check_case(name, strategy, world):
        pytest.skip("the job gives no roles to its labels")
