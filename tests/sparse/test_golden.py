"""The golden cases of sparse tensors, in this process."""

import pytest
from sparse_cases import NAMES, read_case

import einmpi


@pytest.mark.parametrize("name", NAMES)
def test_case(name):
    case = read_case(name)
    if case.record["refused"]:
        with pytest.raises(einmpi.InputError, match=case.record["refused"]) as error:
            case.run()
        assert "\n" not in str(error.value)
    else:
        case.check(case.run())
