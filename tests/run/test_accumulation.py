"""k micro-batches make the step of one batch that holds them all, also when their labels are unevenly many."""

from __future__ import annotations

import contextlib

import pytest
import torch
from small_runs import SMALL, small_config, small_session
from torch import Tensor

from smoke.config import DataConfig, TrainerConfig
from smoke.data.packing import loss_counts
from smoke.environment import detect
from smoke.model.attention import Sequences
from smoke.model.deepseek import DeepseekV3
from smoke.model.mtp import next_labels
from smoke.module import IGNORED_LABEL, Batch, SmokeModule, make_optimizer, train_step
from smoke.numerics import relative_norm
from smoke.plan import resolve
from smoke.run.session import load_data

COUNT = 3


def _trainer(**options) -> TrainerConfig:
    return TrainerConfig(progress_bar=False, **options)


def _window(layout: str) -> tuple[list[Batch], Batch]:
    """Three small batches with many, half and few labels, as the data module would weigh them, and all as one."""
    data = DataConfig(source="generated", sequence_length=16, micro_batch_size=2)
    plan = resolve(small_config(precision="bf16", recompute=(), layout=layout, data=data), detect())
    batches = load_data(plan)[1][:COUNT]
    for batch, kept in zip(batches, (6, 3, 2), strict=True):
        labels = batch["labels"] = batch["labels"].clone()
        labels.flatten()[torch.arange(labels.numel()) % 6 >= kept] = IGNORED_LABEL
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in ("tokens", "labels", "positions")}
    if layout == "thd":
        edges, start = [batches[0]["cu_seqlens"]], batches[0]["tokens"].numel()
        for batch in batches[1:]:
            edges.append(batch["cu_seqlens"][1:] + start)
            start += batch["tokens"].numel()
        whole["cu_seqlens"] = torch.cat(edges)
    arrays = [{key: value.numpy() for key, value in batch.items()} for batch in batches]
    counts = [torch.from_numpy(loss_counts(batch)).double() for batch in arrays]
    for batch in batches:
        batch["mean_counts"] = torch.stack(counts).sum(0) / COUNT
    return batches, whole


def _float64_module(layout: str) -> SmokeModule:
    config = small_config(layout=layout)
    model = DeepseekV3(SMALL, layout=layout, dtype=torch.float64)
    model.init_weights(5)
    return SmokeModule(model, config.train, mtp_loss_weight=0.3)


def _step(layout: str, window: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    module = _float64_module(layout)
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        gradients.update((n, p.grad.clone()) for n, p in module.named_parameters() if p.grad is not None)

    optimizer = make_optimizer(module.model, module.train_config)
    loss = train_step(module, optimizer, window, contextlib.nullcontext, keep)
    return float(loss), gradients


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_uneven_micro_batches_make_the_large_batchs_step(layout):
    window, whole = _window(layout)
    loss, gradients = _step(layout, window)
    large_loss, large_gradients = _step(layout, [whole])
    assert abs(loss - large_loss) < 1e-12 * large_loss
    assert gradients.keys() == large_gradients.keys()
    assert max(relative_norm(gradients[name], large_gradients[name]) for name in gradients) < 1e-12


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_the_mean_of_the_means_is_another_step(layout):
    """Without the counts of the step, the test above would see the difference."""
    window, whole = _window(layout)
    _, gradients = _step(layout, [{k: v for k, v in batch.items() if k != "mean_counts"} for batch in window])
    _, large = _step(layout, [whole])
    assert min(relative_norm(gradients[name], large[name]) for name in gradients) > 1e-3


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_counts_are_those_of_the_losses(layout):
    for batch in _window(layout)[0]:
        labels_T, sequences = batch["labels"].flatten(), Sequences.of(batch, layout)
        found = loss_counts({key: value.numpy() for key, value in batch.items()})
        pairs = next_labels(labels_T, sequences) != IGNORED_LABEL
        assert found.tolist() == [int((labels_T >= 0).sum()), int(pairs.sum()), len(sequences.last_tokens())]
        assert 0 < found[1] < found[0]


def test_every_batch_of_a_step_brings_the_same_mean_counts():
    session = small_session(layout="thd", trainer=_trainer(accumulate_grad_batches=2), precision="bf16")
    assert [len(window) for window in session.windows] == [2] * 4
    for window in session.windows:
        labels = sum(int((batch["labels"] >= 0).sum()) for batch in window)
        assert all(float(batch["mean_counts"][0]) == labels / 2 for batch in window)
        assert len({tuple(batch["mean_counts"].tolist()) for batch in window}) == 1
    assert "mean_counts" not in small_session(precision="bf16").batches[0]


@pytest.mark.parametrize(("precision", "layout"), [("bf16", "thd"), ("fp8-delayed", "sbhd")])
def test_a_run_with_accumulation_and_clipping_passes(run, precision, layout):
    """The bf16 run's accumulated gradients are its twin's to 1e-6: three micro-batches add up in float32."""
    trainer = _trainer(accumulate_grad_batches=3, gradient_clip_val=0.5)
    data = DataConfig(source="generated", sequence_length=32, micro_batch_size=4)
    report = run(precision=precision, layout=layout, steps=10, trainer=trainer, data=data)
    assert (report["verdict"], report["exit_code"]) == ("pass", 0), report["checks"]
    assert report["summary"]["steps"] == 10
    assert (report["summary"]["tokens"] == 10 * 3 * 128) == (layout == "sbhd")


def test_gradients_accumulate_in_float32():
    session = small_session(trainer=_trainer(accumulate_grad_batches=2), precision="bf16")
    for batch in session.windows[0]:
        session.module.loss(batch).backward()
    assert {p.grad.dtype for p in session.model.parameters() if p.grad is not None} == {torch.float32}
    assert {p.dtype for p in session.model.parameters()} == {torch.bfloat16, torch.float32}
