"""`python -m einmpi` is the same program as `einmpi`."""

import sys

from einmpi.cli.main import main

sys.exit(main())
