"""What a run leaves behind: the contract, its writers, the run folder, tables at the terminal, and the exit code.

In the order of a run::

    show_plan(plan)                                              # before the work
    folder = create(config)                                      # a new folder, or Refusal (exit code 2)
    with StepWriter(folder / STEPS) as sink: ...                 # sink(StepRow) after each step
    report = build(record, plan, findings, environment=..., command=...)       # or refused(...)
    report = write_all(folder, report, record, config)
    show_report(report, folder)
    report.exit_code

``matrix_row`` and ``show_matrix`` do the same for several runs, ``worst`` gives their exit code. Nothing here imports
torch; rich, plotly, junitparser and yaml are imported by the function that needs them.
"""

from smoke.report.contract import SCHEMA_VERSION, Report, Summary, build, refused, verdict_line
from smoke.report.exit_code import verdict_and_exit, worst
from smoke.report.files import StepWriter, write_atomic
from smoke.report.folder import create
from smoke.report.json_report import schema
from smoke.report.markdown import matrix_markdown
from smoke.report.matrix import MatrixRow, matrix_row
from smoke.report.selftest import SelftestRow, selftest_exit, selftest_json, selftest_line
from smoke.report.terminal import show_matrix, show_plan, show_report, show_selftest
from smoke.report.write import STEPS, write_all, write_config

__all__ = [
    "SCHEMA_VERSION",
    "STEPS",
    "MatrixRow",
    "Report",
    "SelftestRow",
    "StepWriter",
    "Summary",
    "build",
    "create",
    "matrix_markdown",
    "matrix_row",
    "refused",
    "schema",
    "selftest_exit",
    "selftest_json",
    "selftest_line",
    "show_matrix",
    "show_plan",
    "show_report",
    "show_selftest",
    "verdict_and_exit",
    "verdict_line",
    "worst",
    "write_all",
    "write_atomic",
    "write_config",
]
