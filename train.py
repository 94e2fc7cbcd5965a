"""``python train.py ARGS`` is ``smoke run ARGS``; it also works from a clone that was never installed."""

import sys

from smoke.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]], prog="train.py"))
