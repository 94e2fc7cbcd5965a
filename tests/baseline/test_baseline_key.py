"""The key: everything that moves a bit is in it, nothing else is, and a run outside of it is told what differs."""

from __future__ import annotations

import dataclasses

import pytest

from smoke.baseline.compare import rows_of
from smoke.baseline.file import Entry
from smoke.baseline.key import FIELDS, key_of, options_of
from smoke.config import CheckConfig, ModelConfig, RunConfig, TrainerConfig
from smoke.environment import Device, Environment
from smoke.plan import resolve
from smoke.record import RunMark, plain

HERE = Environment(
    python="3.11.9",
    platform="Linux",
    cpu_name="a CPU",
    cpu_flags=("avx2", "fma", "rdtscp"),
    cpu_count=2,
    memory_bytes=2**34,
    packages={"torch": "2.13.0", "triton": "3.6.0"},
)
COSTS = {"tokens_per_s": 1.0, "peak_gib": 1.0, "held_mib": 1.0}


def key(environment: Environment = HERE, data: str = "d", threads: int = 2, **options) -> dict[str, str]:
    config = RunConfig(**options)
    return key_of(resolve(config, environment), environment, data_sha256=data, threads=threads)


def changed(**environment) -> set[str]:
    one, other = key(), key(dataclasses.replace(HERE, **environment))
    return {name for name in FIELDS if one[name] != other[name]}


def test_every_field_is_there_in_its_order():
    assert tuple(key()) == FIELDS
    assert (key()["python"], key()["features"], key()["threads"]) == ("3.11", "avx2 fma", "2")


@pytest.mark.parametrize(
    ("environment", "fields"),
    [
        ({"packages": {"torch": "2.12.0"}}, {"torch"}),
        ({"python": "3.12.0"}, {"python"}),
        ({"python": "3.11.10"}, set()),
        ({"cpu_name": "another CPU"}, {"device"}),
        ({"cpu_flags": ("avx2", "fma", "avx512f")}, {"features"}),
        ({"cpu_flags": ("avx2", "fma", "sse4_2")}, set()),
        ({"platform": "Linux-6.1", "memory_bytes": 2**35, "cpu_count": 4}, set()),
    ],
)
def test_toolchain_and_device(environment, fields):
    assert changed(**environment) == fields


def test_threads_and_data():
    assert key(threads=4)["threads"] == "4"
    assert key(data="e")["data"] == "e"


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "nvfp4"},
        {"recompute": ("mlp",)},
        {"steps": 21},
        {"seed": 1},
        {"layout": "thd"},
        {"model": ModelConfig(rms_norm_eps=1e-5)},
        {"model": ModelConfig(rope_scaling=None)},
        {"trainer": TrainerConfig(gradient_clip_val=1.0)},
    ],
)
def test_an_option_that_moves_a_bit_changes_the_hash(options):
    assert key(**options)["config"] != key()["config"]


@pytest.mark.parametrize(
    "options",
    [
        {"out": "elsewhere"},
        {"baseline": "b.json", "require_baseline": True},
        {"check": CheckConfig(skip=("memory",))},
        {"trainer": TrainerConfig(progress_bar=False, checkpoint_every=5)},
        {"device": "cpu"},
        {"backend": "emulated"},
        {"impl": "reference"},
        {"precision": "mxfp8"},
    ],
)
def test_an_option_that_moves_none_does_not(options):
    assert key(**options)["config"] == key()["config"]


def test_a_cuda_device_counts_by_its_own_name_and_capability():
    gpu = Device(name="NVIDIA H200", capability=(9, 0), memory_bytes=2**37)
    found = key(dataclasses.replace(HERE, devices=(gpu,), cuda_version="12.8"))
    assert (found["device"], found["features"], found["threads"]) == ("NVIDIA H200", "sm_90", "")
    assert found["triton"] == "3.6.0"
    assert key()["triton"] == ""
    assert found["config"] != key()["config"]


def outside(**changes: str) -> str:
    options = options_of(plain(RunConfig()))
    recorded = Entry(key=key() | changes, options=options, reason="r", losses=((0, "0x1.0p+0"),), costs=())
    return rows_of("b.json", [recorded], RunMark(key=key(), costs=COSTS), options).outside


def test_the_reason_names_what_differs():
    assert outside() == ""
    assert "torch 2.12.0 recorded, 2.13.0 here" in outside(torch="2.12.0")
    assert "threads 1 recorded, 2 here" in outside(threads="1")
    assert "other data" in outside(data="e")
    assert "other defaults" in outside(config="e")


def test_the_reason_names_options_of_the_nearest_entry():
    def entry(**options):
        made = options_of(plain(RunConfig(**options)))
        return Entry(key=key(**options), options=made, reason="r", losses=((0, "0x1.0p+0"),), costs=())

    far = dataclasses.replace(entry(steps=4), key=key(steps=4) | {"torch": "1", "python": "2.7"})
    here = RunConfig()
    rows = rows_of("b.json", [far, entry(steps=9)], RunMark(key=key(), costs=COSTS), options_of(plain(here)))
    assert rows.outside.endswith("nearest: steps 9 recorded, 20 here")
    assert "2.7" not in rows.outside


def test_no_file_and_no_entry_say_so():
    mark = RunMark(key=key(), costs=COSTS)
    assert "does not exist" in rows_of("b.json", None, mark, {}).outside
    assert "holds no entry" in rows_of("b.json", [], mark, {}).outside


def test_options_tell_precision_and_what_is_no_default():
    found = options_of(plain(RunConfig(seed=7, out="x", baseline="y", model=ModelConfig(hidden_size=512))))
    assert found == {
        "precision": '"mxfp8"',
        "recompute": "[]",
        "layout": '"sbhd"',
        "steps": "20",
        "seed": "7",
        "model.hidden_size": "512",
    }
