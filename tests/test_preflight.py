"""``smoke preflight``: what is listed agrees with what the plan decides, and nothing is built or written."""

from __future__ import annotations

import dataclasses
import io
import os

import pytest
from rich.console import Console

from smoke import cli
from smoke.config import PRECISIONS, DataConfig, ModelConfig, PolicyConfig, RunConfig
from smoke.environment import Device, Environment
from smoke.plan import Refusal, resolve
from smoke.preflight import BROKEN, KEPT, NOTE, Preflight, examine, print_preflight

CPU = Environment(
    python="3.11.7",
    platform="Linux",
    cpu_name="a CPU",
    cpu_flags=("avx2",),
    cpu_count=2,
    memory_bytes=16 * 2**30,
    packages={"torch": "2.13.0", "triton": "3.9.0"},
)
GPU = dataclasses.replace(CPU, devices=(Device(name="a GPU", capability=(9, 0), memory_bytes=2**37),))


def shown(found: Preflight, width: int = 120) -> str:
    out = io.StringIO()
    print_preflight(found, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def broken(found: Preflight) -> dict[str, str]:
    return {rule.option: rule.nearest for rule in found.rules if rule.status == BROKEN}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_default_request_keeps_every_rule(precision):
    found = examine(RunConfig(precision=precision, recompute=("mla_up_proj",)), CPU)
    assert found.exit_code == 0
    assert broken(found) == {}
    assert len(found.rules) >= (9 if precision == "bf16" else 20)
    assert shown(found).splitlines()[-1].startswith(f"PASS: {precision} with recompute mla_up_proj")


def test_every_broken_rule_is_listed_with_its_nearest_value():
    model = ModelConfig(hidden_size=250, moe_intermediate_size=100, qk_rope_head_dim=7, n_group=3)
    found = examine(RunConfig(model=model, data=DataConfig(source="jsonl:/nowhere/x")), CPU)
    rows = broken(found)
    assert rows["--model.qk_rope_head_dim 7"] == "8"
    assert rows["--model.n_group 3"] == "2"
    assert rows["--model.hidden_size = 250"] == "256"
    assert rows["--model.moe_intermediate_size = 100"] == "96"
    assert "--data.source jsonl" in "".join(rows)
    assert rows["--model.kv_lora_rank + --model.qk_rope_head_dim = 71"] == "64"
    kept = [rule.option.split()[0] for rule in found.rules if rule.status == KEPT]
    assert not {"--model.qk_rope_head_dim", "--model.n_group"} & set(kept)
    assert found.exit_code == 2
    assert "exit code 2" in shown(found).splitlines()[-1]


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        RunConfig(precision="current"),
        RunConfig(model=ModelConfig(hidden_size=100)),
        RunConfig(model=ModelConfig(hidden_size=-1, num_hidden_layers=10**9)),
        RunConfig(model=ModelConfig(n_routed_experts=7)),
        RunConfig(model=ModelConfig(hidden_size=2**30, vocab_size=2**30)),
        RunConfig(model=ModelConfig(vocab_size=100)),
        RunConfig(policy=PolicyConfig(keep_bf16=("nothing*",))),
        RunConfig(policy=PolicyConfig(keep_bf16=("*",))),
        RunConfig(policy=PolicyConfig(margin=3)),
        RunConfig(data=DataConfig(source="nope")),
        RunConfig(data=DataConfig(sequence_length=10**9)),
        RunConfig(backend="te"),
        RunConfig(device="cuda"),
        RunConfig(layout="bshd"),
        RunConfig(steps=10**6, data=DataConfig(sequence_length=2**17)),
    ],
)
@pytest.mark.parametrize("environment", [CPU, GPU])
def test_the_verdict_is_the_plans_and_broken_rules_never_pass(config, environment):
    found = examine(config, environment)
    try:
        resolve(config, environment)
        code = 0
    except Refusal as refusal:
        code = refusal.exit_code
    assert found.exit_code == code
    assert not broken(found) or code != 0
    assert f"exit code {code}" in shown(found)


def test_the_other_recipes_say_what_stops_them():
    found = examine(RunConfig(precision="nvfp4", model=ModelConfig(intermediate_size=528)), CPU)
    outcomes = {(o.precision, o.backend): o for o in found.outcomes}
    assert found.exit_code == 0
    assert outcomes["nvfp4", "emulated"].verdict == "runs"
    assert "padded to 128" in outcomes["nvfp4", "emulated"].reason
    assert outcomes["mxfp8", "emulated, te"].verdict == "error"
    assert "the nearest is 544" in outcomes["mxfp8", "emulated, te"].reason
    assert outcomes["nvfp4", "te"].verdict == "unsupported"
    assert outcomes["bf16", "bf16"].verdict == "runs"
    assert {o.precision for o in found.outcomes} == set(PRECISIONS)


def test_odd_attention_widths_are_a_note_on_a_gpu_alone():
    config = RunConfig(precision="bf16", model=ModelConfig(kv_lora_rank=60))
    rules = {(rule.status, rule.nearest) for rule in examine(config, GPU).rules if "attention widths" in rule.option}
    assert rules == {(NOTE, "96 and 64")}
    assert NOTE not in {rule.status for rule in examine(config, CPU).rules}
    assert examine(config, GPU).exit_code == 0


def test_memory_is_a_rule():
    small = dataclasses.replace(CPU, memory_bytes=2**20)
    assert [option for option in broken(examine(RunConfig(), small)) if option.startswith("memory")]
    assert examine(RunConfig(), small).exit_code == 4


def test_hostile_words_are_shown_not_obeyed():
    config = RunConfig(data=DataConfig(source="text:[bold]\x1b[31m\u202e/nowhere"))
    text = shown(examine(config, CPU), width=200)
    assert "[bold]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_command_reads_the_options_of_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "facts", lambda: CPU)
    assert cli.main(["preflight", "--precision", "current", "--recompute", "moe_act"]) == 0
    assert "PASS: fp8-tensorwise with recompute moe_act" in capsys.readouterr().out
    assert cli.main(["preflight", "--model.hidden_size", "250", "--out", "a"]) == 2
    assert cli.main(["preflight", "--precision", "fp9"]) == 2
    assert "--precision: 'fp9' is no precision" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
