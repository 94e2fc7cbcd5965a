"""``python train.py ARGS`` is ``smoke run ARGS``; it also works from a clone that was never installed."""

import sys

from smoke.cli import main
from smoke.process import own

if __name__ == "__main__":
    own(lambda: main(["run", *sys.argv[1:]], prog="train.py"))
