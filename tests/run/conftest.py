"""A run of a very small model, in this process, and its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from small_runs import small_config

from smoke.environment import detect
from smoke.plan import resolve


@pytest.fixture
def run(tmp_path) -> Callable[..., dict[str, Any]]:
    """``run(precision=..., layout=...)`` executes the small configuration and returns report.json."""

    def execute_small(name: str = "run", **changes: Any) -> dict[str, Any]:
        from smoke.run import execute

        config = small_config(out=str(tmp_path / name), **changes)
        environment = detect()
        code = execute(resolve(config, environment), environment, ["smoke", "run"])
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert report["exit_code"] == code
        return report

    return execute_small
