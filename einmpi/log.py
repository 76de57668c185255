"""The logger "einmpi", which is silent unless the user's program sets up logging."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("einmpi")
LOGGER.addHandler(logging.NullHandler())  # without it, warnings would be printed
