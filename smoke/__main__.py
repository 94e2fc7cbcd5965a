"""``python -m smoke``: the command line without an installed console script."""

from smoke.cli import entry

entry()
