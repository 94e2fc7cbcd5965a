"""A very small configuration, and how tests read the report of its run."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

from smoke.config import CheckConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig
from smoke.environment import detect
from smoke.plan import resolve
from smoke.report.config_yaml import config_text

ROOT = pathlib.Path(__file__).resolve().parents[2]

SMALL = ModelConfig(
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=4,
    num_nextn_predict_layers=1,
)


def small_config(**changes: Any) -> RunConfig:
    """Two layers, 256 tokens a step, four steps."""
    base = RunConfig(
        steps=4,
        recompute=("mla_up_proj",),
        model=SMALL,
        data=DataConfig(source="generated", sequence_length=64, micro_batch_size=4),
        check=CheckConfig(gradient_parity_every=2),
        trainer=TrainerConfig(progress_bar=False),
    )
    return replace(base, **changes)


def statuses(report: dict[str, Any]) -> dict[str, str]:
    """Status of each check."""
    return {check["name"]: check["status"] for check in report["checks"]}


def red(report: dict[str, Any]) -> set[str]:
    """Names of the checks that are not PASS and not SKIP."""
    return {name for name, status in statuses(report).items() if status in ("FAIL", "ERROR")}


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    """One check."""
    return next(check for check in report["checks"] if check["name"] == name)


def small_session(**changes: Any) -> Any:
    """What ``execute`` builds from the small configuration: data, model, swapped leaves, twin."""
    from smoke.run.session import build, load_data

    plan = resolve(small_config(**changes), detect())
    return build(plan, *load_data(plan))


def yaml_of(file: pathlib.Path, **changes: Any) -> pathlib.Path:
    """The small configuration as a YAML file, for a run in a process of its own."""
    file.write_text(config_text(small_config(**changes)), encoding="utf-8")
    return file
