"""config.yaml repeats the run: what --config makes of it is the configuration that wrote it."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from smoke.config import DataConfig, ModelConfig, PolicyConfig, RopeScaling, RunConfig, TrainConfig
from smoke.options import parse_run
from smoke.report.config_yaml import config_text, deltas

CONFIGS = {
    "defaults": RunConfig(),
    "flat": RunConfig(
        precision="bf16", recompute=("mla_up_proj", "moe_act"), steps=3, seed=0, device="cpu", layout="thd"
    ),
    "nested": RunConfig(
        model=ModelConfig(q_lora_rank=None, rope_scaling=RopeScaling(factor=8.0, mscale=0.707), rms_norm_eps=1e-5),
        train=TrainConfig(learning_rate=3e-4, adam_eps=1e-15),
        policy=PolicyConfig(keep_bf16=("layers.0.*", "*.linear_proj"), last_layers_bf16=0),
    ),
    "no yarn": RunConfig(model=ModelConfig(rope_scaling=None)),
    "names that YAML could misread": RunConfig(
        data=DataConfig(source="text:# not: a 'comment'\n- *x", text_field="no"), policy=PolicyConfig(keep_bf16=("*",))
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_config_loads_as_what_wrote_it(tmp_path, config):
    (tmp_path / "config.yaml").write_text(config_text(config), encoding="utf-8")
    assert parse_run(["--config", str(tmp_path / "config.yaml")], "smoke run") == config


def test_the_folder_is_not_repeated():
    assert deltas(RunConfig(out="somewhere")) == deltas(RunConfig())


def test_only_differences_and_the_words_that_name_the_run_are_written():
    config = dataclasses.replace(RunConfig(), model=ModelConfig(rope_scaling=RopeScaling(factor=8.0)))
    assert yaml.safe_load(config_text(config)) == {
        "precision": "mxfp8",
        "recompute": [],
        "layout": "sbhd",
        "steps": 20,
        "seed": 1234,
        "model": {"rope_scaling": {"factor": 8.0}},
    }
