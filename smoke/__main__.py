"""``python -m smoke``: the command line without an installed console script."""

import sys

from smoke.cli import main

sys.exit(main())
