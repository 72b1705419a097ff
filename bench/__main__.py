"""`python -m bench`: the same as `python -m bench.run`."""

import sys

from bench.run import main

sys.exit(main())
