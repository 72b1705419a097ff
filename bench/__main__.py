"""`python -m bench`: the same as `python -m bench.run`."""

import sys

from bench.measure.arguments import status
from bench.run import main

sys.exit(status(main))
