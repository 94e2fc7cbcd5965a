"""recompute_parity is exact in every recipe, layout and form of the weights, and memory is freed to the byte.

Each case builds what ``execute`` builds and follows the trajectories that ``execute`` follows, with every planned GEMM
quantized (no layer is kept in BF16).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_runs import SMALL, small_session

from smoke.config import LAYOUTS, PRECISIONS, REGIONS, DataConfig, PolicyConfig
from smoke.precision.plugin import CONVERTED, leaves_of
from smoke.run import measure

ONE_ROW = DataConfig(source="generated", sequence_length=64, micro_batch_size=1)
EVERY_GEMM = PolicyConfig(last_layers_bf16=0)
WITH_ABSORBED = PolicyConfig(last_layers_bf16=0, absorbed_kv="recipe")
VARIANTS: dict[str, dict[str, Any]] = {
    "no query latent": {"model": replace(SMALL, q_lora_rank=None)},
    "plain": {"model": replace(SMALL, attention_form="plain")},
    "plain split": {"model": replace(SMALL, attention_form="plain", kv_up_projection="split")},
    "absorbed products quantized": {"policy": WITH_ABSORBED},
    "3 heads": {"model": replace(SMALL, num_attention_heads=3), "policy": WITH_ABSORBED},
    "5 heads plain": {"model": replace(SMALL, num_attention_heads=5, attention_form="plain")},
    "1 row": {"data": ONE_ROW},
    "1 packed row": {"data": ONE_ROW, "layout": "thd"},
    "no multi-token prediction": {"model": replace(SMALL, num_nextn_predict_layers=0)},
}


def _session(**changes: Any) -> Any:
    return small_session(**{"policy": EVERY_GEMM, "recompute": REGIONS, **changes})


def _follow(session: Any) -> None:
    """Follow the trajectories; every bit is equal, every region was replayed and frees what was predicted."""
    bits, memory, held_mib, losses = measure.parity(session)
    recipe, regions = session.plan.recipe, session.recompute.regions
    different = [row for row in bits if not row.equal]
    assert not different, f"{len(different)} of {len(bits)} differ, first {different[0]}"
    steps = set(range(max(3, recipe.warmup_steps + 1)))
    names = {f"model.{name}" for name, _ in session.model.named_parameters()}
    for kind in ("rerun", "recompute"):
        assert {row.step for row in bits if (row.kind, row.quantity) == (kind, "loss")} == steps
        for step in steps:
            assert names <= {row.name for row in bits if (row.kind, row.step, row.quantity) == (kind, step, "weight")}
    assert {row.region for row in memory} == regions
    for row in memory:
        assert row.replays > 0
        assert row.predicted_on_bytes == row.held_on_bytes < row.held_off_bytes
        assert row.released_output_bytes >= row.output_bytes
        assert (row.released_output_bytes > 0) == row.discards_outputs
    assert held_mib == pytest.approx(memory[0].held_on_bytes / 2**20)
    assert session.recompute.active


@pytest.mark.parametrize("regions", [("mla_up_proj",), REGIONS], ids=["mla_up_proj", "all"])
@pytest.mark.parametrize("form", ["combined", "split"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_recipe_layout_and_form_of_the_weights(precision, layout, form, regions):
    model = replace(SMALL, kv_up_projection=form)
    session = _session(precision=precision, layout=layout, recompute=regions, model=model)
    converted = [name for name, leaf in leaves_of(session.model).items() if isinstance(leaf, CONVERTED)]
    assert (len(converted) > 10) == (precision != "bf16")
    _follow(session)


@pytest.mark.parametrize("precision", ["fp8-delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_shapes(variant, precision):
    session = _session(precision=precision, **VARIANTS[variant])
    if variant == "absorbed products quantized":
        headwise = [name for name, leaf in session.precision.plan.items() if "absorbed" in name and leaf.quantized]
        assert len(headwise) == 2 * (SMALL.num_hidden_layers + SMALL.num_nextn_predict_layers)
    _follow(session)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_experts_without_tokens(precision):
    """A bias keeps two of four experts from being chosen; their weights still take part in the comparison."""
    session = _session(precision=precision)
    loads = []
    for router in session.model.routers():
        router.expert_bias[0] = -100.0
        router.register_forward_hook(lambda module, args, out: loads.append(module.expert_load.tolist()))
    _follow(session)
    assert loads
    assert all(load[0] == 0 and sum(load) > 0 for load in loads)
