"""SmokeData: batches, their hash, and a Lightning Trainer that reads them without a warning."""

import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from smoke.config import DataConfig
from smoke.data.module import WORKERS_WARNING, SmokeData, batch_sha256
from smoke.data.sources import DataError

SMALL = DataConfig(source="generated", sequence_length=32, micro_batch_size=2)


def smoke_data(data=SMALL, *, layout="sbhd", seed=1, steps=3, vocab_size=288):
    return SmokeData(data, layout=layout, seed=seed, steps=steps, vocab_size=vocab_size)


def hashes(*args, **options):
    return [batch_sha256(batch) for batch in smoke_data(*args, **options).batches()]


@pytest.mark.parametrize("source", ["prose", "generated"])
@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_default_batches(layout, source):
    data = smoke_data(DataConfig(source=source), layout=layout, seed=1234, steps=20)
    batches = data.batches()
    assert len(batches) == 20
    assert batches is data.batches()
    shape = (4, 256) if layout == "sbhd" else (1024,)
    for batch in batches:
        for name in ("tokens", "labels", "positions"):
            assert batch[name].shape == shape
            assert batch[name].dtype is torch.int64
        assert 0 <= batch["tokens"].min() <= batch["tokens"].max() <= 256
        assert batch["positions"].max() < 256
        ignored = int((batch["labels"] == -100).sum())
        if layout == "thd":
            assert batch["cu_seqlens"].dtype is torch.int32
            assert ignored == len(batch["cu_seqlens"]) - 1 >= 3
        else:
            assert "cu_seqlens" not in batch
            assert ignored == 0
    assert len({batch_sha256(batch) for batch in batches}) == 20


@pytest.mark.parametrize(
    ("layout", "first"),
    [
        ("sbhd", "48358289b3d3d7b563221b757970ec808bd79ef4db5d4ec5ef55d0fe74630d66"),
        ("thd", "c5c7ff90b06cca937e3ee85191c4fd48fa99631008f054ec62c6b87ae212ce73"),
    ],
)
def test_generated_batches_are_the_same_everywhere(layout, first):
    assert hashes(layout=layout)[0] == first


@pytest.mark.parametrize("source", ["prose", "generated"])
@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_order_depends_on_the_seed_and_not_on_the_steps(layout, source):
    data = DataConfig(source=source, sequence_length=32, micro_batch_size=2)
    made = hashes(data, layout=layout)
    assert made == hashes(data, layout=layout)
    assert made == hashes(data, layout=layout, steps=40)[:3]
    assert not set(made) & set(hashes(data, layout=layout, seed=2))


def test_hash_covers_values_names_dtype_and_shape():
    tokens = torch.arange(6)
    changed = tokens.clone()
    changed[5] = 0
    batches = [
        {"tokens": tokens},
        {"labels": tokens},
        {"tokens": tokens.int()},
        {"tokens": tokens.reshape(2, 3)},
        {"tokens": changed},
        {"tokens": tokens, "cu_seqlens": torch.tensor([0, 6], dtype=torch.int32)},
        {"tokens": tokens, "cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32)},
    ]
    assert len({batch_sha256(batch) for batch in batches}) == len(batches)
    both = {"labels": tokens, "tokens": tokens}
    assert batch_sha256(both) == batch_sha256(dict(reversed(both.items())))
    strided = torch.stack((tokens, tokens), dim=1)[:, 0]
    assert batch_sha256({"tokens": strided}) == batch_sha256({"tokens": tokens})


def test_entropy_floor_only_where_it_is_known():
    assert smoke_data(DataConfig()).entropy_floor is None
    assert smoke_data().entropy_floor == pytest.approx(1.3082, abs=1e-4)
    assert smoke_data(layout="thd").entropy_floor == pytest.approx(1.2745, abs=1e-4)


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_a_short_file_is_read_again(tmp_path, layout):
    path = tmp_path / "short.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(200)))
    data = smoke_data(
        DataConfig(source=f"text:{path}", sequence_length=32, micro_batch_size=2), layout=layout, steps=12
    )
    assert data.epochs is None
    assert len({batch_sha256(batch) for batch in data.batches()}) > 6
    assert data.source_tokens == 201
    assert data.epochs == pytest.approx(12 * 64 / 201)


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
@pytest.mark.parametrize("size", [3, 30, 64, 100, 160])
def test_a_file_shorter_than_a_batch_names_sizes_that_work(tmp_path, layout, size):
    path = tmp_path / "short.txt"
    path.write_text("x" * size)
    config = DataConfig(source=f"text:{path}", sequence_length=64, micro_batch_size=3)
    with pytest.raises(DataError, match="one batch of 3 x 64 takes 193; use a larger file") as caught:
        smoke_data(config, layout=layout).batches()
    words = str(caught.value).split()
    named = {word: int(value) for word, value in zip(words, words[1:], strict=False) if word.startswith("--data.m")}
    named |= {word: int(value) for word, value in zip(words, words[1:], strict=False) if word.startswith("--data.seq")}
    sizes = {"sequence_length": 64} | {flag.removeprefix("--data."): value for flag, value in named.items()}
    if "micro_batch_size" in sizes:
        assert len(smoke_data(DataConfig(source=f"text:{path}", **sizes), layout=layout).batches()) == 3
    else:
        assert size == 3


def test_what_needs_no_reading_is_refused_at_once():
    with pytest.raises(DataError, match="--steps 0"):
        smoke_data(steps=0)
    with pytest.raises(DataError, match="no such file"):
        smoke_data(DataConfig(source="text:/missing"))


class Counter(LightningModule):
    """The least module that a Trainer takes; keeps the hashes of what it was given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch):
        self.seen.append(batch_sha256(batch))
        return self.weight * batch["tokens"].sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_a_trainer_reads_every_batch_once(layout, tmp_path, monkeypatch):
    # Lightning asks for workers where there are cores; pretend that there are many, to see that the filter is right.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    data, module = smoke_data(layout=layout), Counter()
    trainer = Trainer(max_epochs=1, enable_model_summary=False, default_root_dir=tmp_path, devices=1, **options)
    state = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=data)
    assert module.seen == [batch_sha256(batch) for batch in data.batches()]
    assert torch.equal(torch.get_rng_state(), state)
    # With torch 2.13 Lightning 2.6 also warns about a pytree class of its own use; that is not about the data.
    (warned,) = [warning for warning in raised if "LeafSpec" not in str(warning.message)]
    assert re.match(WORKERS_WARNING, str(warned.message))


def test_reading_the_sources_needs_neither_torch_nor_lightning():
    code = (
        "import sys; from smoke.config import DataConfig; from smoke.data import sources, packing\n"
        "sources.preflight(DataConfig(), vocab_size=288)\n"
        "print([m for m in ('torch', 'lightning', 'datasets') if m in sys.modules])"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
