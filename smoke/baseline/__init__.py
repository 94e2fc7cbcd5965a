"""Baselines: what reviewed runs gave, to the last bit, and what they cost, for later runs to be held against.

    key        what has to be the same before two runs can be compared bit by bit
    file       the baseline file: one JSON for all combinations, one line for each loss, so that git shows what changed
    folder     a finished run as it stands in its folder
    compare    a run beside the entry of its key: the rows of the check ``baseline``
    commands   ``smoke baseline update``, ``show`` and ``diff``

The check itself is ``smoke.checks.baseline``: relative to an earlier run, where all others are absolute. So an entry is
taken only from a run whose absolute checks are all green, and with a reason.
"""
