"""A pre-flight check for DeepSeek-V3-shaped training in low precision.

Importing this package loads neither torch nor Lightning; the command line is in ``smoke.cli``.
"""

__version__ = "0.1.0"
