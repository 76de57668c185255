"""What a function says when it refuses."""

import pytest

from einmpi.errors import InputError


def error(function, *arguments, kind=InputError):
    """The one line that it raises."""
    with pytest.raises(kind) as caught:
        function(*arguments)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)
