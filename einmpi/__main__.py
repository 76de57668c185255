"""`python -m einmpi` is the same program as `einmpi`."""

import sys

from einmpi.cli import main

sys.exit(main())
