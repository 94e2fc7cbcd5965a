"""What each check proves, how it measures, where its limit comes from, and what to do when it is red.

The texts of ``smoke explain CHECK``: data only. A test holds the list against the plan's list of checks.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Text:
    """Four answers, each a paragraph."""

    proves: str
    measures: str
    limit: str
    red: str


CHECKS: dict[str, Text] = {
    "preflight": Text(
        proves="The live model and batches have the sizes that the recipe and the kernels take.",
        measures="Sizes of every quantized leaf, the rows and width of the rope table and the number of tokens are "
        "read from the built model and the real batches, not from the configuration.",
        limit="Exact. The multiples are those of Transformer Engine's own gates for the recipe; the rope table "
        "must be as wide as the rotated columns and as long as the largest position.",
        red="The row names the module, its size and the multiple. If the plan accepted the configuration, a "
        "module was built with another size than its option says: look at the constructor of the module "
        "named.",
    ),
    "coverage": Text(
        proves="Exactly the GEMMs that the policy names ran quantized, and no others, in the first pass and in "
        "every replay of a recomputed region.",
        measures="Each of the three GEMMs of each leaf (output, grad_input, grad_weight) counts its quantized calls, "
        "replays apart; the output GEMM also counts its calls in BF16. Planned and counted rows are compared.",
        limit="Exact: a planned GEMM with a BF16 call, or without any call, is red; so is an unplanned quantized one, "
        "and a leaf that was to stay in BF16 and never ran.",
        red="No quantized call at all: conversion matched nothing, see the precision plug-in. BF16 calls in "
        "the replay only: the recompute runs outside the quantization context. An unexpected row: a "
        "pattern reached the head or the router; see --policy.keep_bf16.",
    ),
    "quantizer": Text(
        proves="The quantizers this run uses give the values and factors of the recipe, bit for bit.",
        measures="Hand-computed blocks (rows of zeros, subnormals, just saturating, ties, small beside large, NaN in "
        "the block formats, given random bits) go through the quantizers of the plug-in and of every leaf, in both "
        "directions, on the run's device; the operands that are multiplied are compared with stored answers. The "
        "update of the amax history is tested in the test suite, not here.",
        limit="Exact: no mismatch.",
        red="The case names the rule: scale rounded down in place of up, E5M2 gradients where E4M3 is due, a "
        "division by the zero amax of a padding row, a cast that does not saturate. Fix the quantizer; do "
        "not touch the answers.",
    ),
    "recompute_parity": Text(
        proves="Recompute changes no bit of training: with and without it, several optimizer steps give the same "
        "loss, gradients and weights.",
        measures="Two trajectories of --check.parity_steps steps from one snapshot (weights, optimizer, quantizer "
        "state, random state, router counters), with deterministic algorithms. A plain rerun comes first: "
        "if that is not bit-equal, the comparison means nothing and the check is ERROR.",
        limit="Exact: zero differing bits. There is no tolerance, because a replay with the same inputs and "
        "scales has no reason to differ.",
        red="The first difference is named by step, quantity, parameter and slice. From step 0: the replay has "
        "other inputs, other random state, or leaves the quantization context (see coverage). From a later "
        "step, under fp8-delayed: the replay uses a later scale, or its amax entered the history a second "
        "time. ERROR: an operation is not deterministic, or a draw of random numbers is not restored.",
    ),
    "gradient_parity": Text(
        proves="Gradients of the quantized run are as far from BF16 gradients as the recipe's rounding explains, "
        "and no farther: on every parameter and on every named slice (head, latent and rope rows, expert).",
        measures="Every --check.gradient_parity_every steps, from the first step whose scales are set (step 0, with "
        "delayed scaling later), a BF16 twin on the same weights and batch gives reference gradients; once "
        "with the run's expert choices replayed and, the first time, once with routing free. Error norm(g - g_ref) / "
        "norm(g_ref) and cosine, in float64.",
        limit="Five numbers of the recipe table, measured over seeds and layouts: the largest typical error of a "
        "parameter and of a slice (the lower median of its steps, because a gradient that nearly cancels in one step "
        "is far off without a fault), the largest and the least median over the parameters of one step, and the "
        "error of all gradients together with routing free.",
        red="One slice red, whole parameter green: look at that slice's path (a head mask, shared rope rows). "
        "All gradients behind one module red: that module's grad_input. Only the routing-free number red: "
        "many experts flipped, look at what feeds the router. Run quantizer and absorbed_parity first: "
        "they are more specific.",
    ),
    "quantization_engaged": Text(
        proves="Quantization really happened: quantized gradients differ from BF16 ones at least as much as the "
        "recipe must make them differ.",
        measures="The same rows as gradient_parity, read from the other side: the largest relative error over the "
        "steps of every parameter whose leaf is quantized. A BF16 leaf behind quantized ones has an error too, so "
        "this check is coarse: coverage says which leaf ran how.",
        limit="The lower limit of the recipe table (gradient_error_min), for every quantized parameter: well "
        "under the errors seen and well above what equal numbers give.",
        red="The leaf ran in BF16 although the report says otherwise, or weights and gradients were quantized "
        "onto a grid far finer than the recipe's. See coverage for the module, and quantizer for the "
        "recipe.",
    ),
    "absorbed_parity": Text(
        proves="Absorbed attention (queries meet the latent) and plain attention (keys and values expanded per "
        "head) are the same function of the same weights, forward and backward.",
        measures="The live model's weights, loaded into both forms in float64, on a real batch: logits, "
        "those of the prediction module, and the gradient of each parameter, by relative norm.",
        limit="1e-9 relative, in float64: rounding over the depth of the model stays far below, and errors of "
        "layout or of a missing factor are many orders of magnitude larger.",
        red="The tensor named first in the table is closest to the cause. Typical: K and V rows of "
        "linear_kv_up_proj split in another order, a transposed per-head weight, the softmax scale taken "
        "from the latent's width, or a weight read from storage that a converted leaf has laid out anew.",
    ),
    "packed_parity": Text(
        proves="Packed sequences are computed as if each were alone: attention, positions and routing "
        "do not cross an edge.",
        measures="A packed batch against its sequences run one by one in float64: logits of each sequence, and "
        "gradients of a sum over all of them. Then one sequence is changed, and all others are compared with what "
        "they were.",
        limit="1e-9 relative in float64 for the first; exact for the second: not one bit of B may change.",
        red="Leak red: the attention mask or the gather crosses an edge. Leak green, outputs red from the "
        "second sequence on: positions are not restarted, or restarted in the wrong place.",
    ),
    "rope_contract": Text(
        proves="The rotary embedding is the published one (YaRN with both corrections, pairs of neighbours), at short "
        "and long positions, and the kernels that compute it write every element, once, and nothing else.",
        measures="Tables and softmax scales of the live model, and of one with unequal corrections, against complex "
        "numbers computed one by one in float64, at positions 0, 1, 4096 and 16384. The run's kernels at head counts "
        "and widths that are no powers of two: values and gradients, in memory filled with NaN, from inputs between "
        "NaN, called twice; Triton's also between guard elements, for several block sizes. Positions of packed "
        "sequences and of context-parallel ranks against plain counting.",
        limit="Three rounding units of the tensor's type for values and gradients, one for tables, eight of float64 "
        "for scales: a few roundings each. Counts are exact: no element unwritten, outside, changed or different.",
        red="The row names tensor, position and case. Scale red: mscale is missing from the softmax scale. Tables "
        "red: it is on cos and sin as well, or the ramp of frequencies is wrong. Tables green, values red: pairs are "
        "taken from the wrong columns. outside: a mask takes the index inside the block for the index of the head. "
        "unwritten: a block is narrower than what it covers. repeat: the first call ran an in-place kernel more than "
        "once.",
    ),
    "saved_tensors": Text(
        proves="What backward computes with is what forward saved: no operation wrote into a tensor that another one "
        "had saved.",
        measures="Autograd counts the writes in place of each tensor. The hooks that do recompute note the count when "
        "a tensor is saved (in a region: in its replay) and compare it when backward asks for the tensor, in every "
        "step; autograd's own comparison is off inside hooks. Writes through .data, or by a kernel that does not tell "
        "autograd, are not counted.",
        limit="Exact: no tensor changed.",
        red="The row names step, module and recompute region that saved the tensor, its shape and both counts. Look "
        "for what writes in place behind that module: a rotary embedding that reuses the query's memory, a residual "
        "added in place, an activation with inplace=True. The gradient of that module's weight is wrong.",
    ),
    "finite": Text(
        proves="No NaN and no infinity appeared in losses, activations, gradients or weights.",
        measures="Every step looks at the loss, gradients and weights, and at inputs and output gradients of the "
        "GEMMs before they are quantized: NVFP4 turns a NaN into 6 and would hide it.",
        limit="Exact: no element.",
        red="The earliest row names step, kind and tensor. NaN in one weight gradient with a finite loss "
        "poisons the next checkpoint: do not resume from it. Infinity first in an output gradient: "
        "learning rate or loss scale. A batch whose every label is ignored gives 0/0 in the loss.",
    ),
    "weight_freshness": Text(
        proves="The weights that quantized GEMMs multiply are those of the present step, in forward, backward and "
        "replay: no quantized copy was left over from before an optimizer step.",
        measures="Each weight operand is caught as it enters the product and compared with a fresh quantization of the "
        "Parameter that the module registers, with the same scale. Leaves take turns, each is looked at in every "
        "eighth step (in shorter runs at least once), from the first step after an update on.",
        limit="Exact: no differing bit, in values and in factors.",
        red="The row names step, weight and direction. Only col red: the transposed copy is not refreshed. From step 1 "
        "on, every module: the cache is never invalidated. Losses and gradient_parity may be red too; mend this first.",
    ),
    "dtype_ledger": Text(
        proves="Every module keeps and computes in the planned types; none has slipped to float32 or to BF16.",
        measures="The types of all parameters, gradients, buffers, masters and moments, and of the first input and "
        "the outputs of every module's every forward, replays included, are counted. What happens between a module's "
        "input and output is not seen; gradients of activations have their activation's type by autograd's own rule.",
        limit="Exact. BF16 parameters, gradients and activations; float32 masters, moments, buffers and losses; the "
        "router float32 but for its input.",
        red="The first row names the module nearest to the cause; those behind it follow. Masters in BF16: small "
        "updates are lost. A float32 activation: a cast is missing at the end of the module named, and every module "
        "behind it is slower. A BF16 router: ties and balance change.",
    ),
    "gradient_presence": Text(
        proves="Every parameter takes part in learning: it has a gradient that is not zero.",
        measures="After each backward, before clipping, every parameter of the watched module is counted as present "
        "and as nonzero. None is expected of an expert that got no token in a step, nor in the first steps "
        "of delayed scaling, whose scales are not set yet.",
        limit="Exact: present and not zero in every step in which a gradient is expected.",
        red="Missing: the graph is cut (a detach, a no_grad, a view written in place), or the region that "
        "holds it is recomputed and its replay does not reach the parameter. Always zero: its output is "
        "multiplied by zero, or dropped.",
    ),
    "loss_tracking": Text(
        proves="The quantized run learns as the BF16 run does, on the same weights, data and order.",
        measures="Losses of the run and of a BF16 twin. The noise floor is the twin against itself with every "
        "weight moved by at most half a BF16 ulp, two draws. The gap of another seed is printed for scale "
        "only.",
        limit="The median gap from step 5 on is at most three times the median floor, or the recipe's own limit "
        "where that is larger. The mean of the last five losses is below that of the first five. At least "
        "one step differs.",
        red="Gap red while gradient_parity is green: a state across steps (amax history, weight cache, "
        "optimizer masters). Loss not falling in both runs: the learning rate or the data.",
    ),
    "memory": Text(
        proves="Recompute frees what it promises: bytes held between forward and backward fall by the discarded "
        "tensors.",
        measures="Autograd's saved tensors are counted by distinct storage at the end of forward, without and with "
        "recompute; for each region the discarded, the released and the newly held bytes.",
        limit="Exact: the bytes predicted from the run without recompute; every call of a region is replayed.",
        red="Outputs not released: a consumer saved a copy (a cast, contiguous, a padded tensor) in place of "
        "the output itself. More held than before: the region's inputs were free without recompute. Look "
        "at the region named.",
    ),
    "neutrality": Text(
        proves="The callbacks that watch the run do not change it: what they measure is the run without them.",
        measures="Before and after every hook of the callbacks: random states (torch, CUDA, Python, NumPy), grad mode, "
        "the train/eval flag of every module, version counters of all parameters, gradients and buffers, and values "
        "of the buffers (router counters, amax histories). And the losses of the first steps against those of a "
        "trajectory from the same state without Trainer and callbacks; on CUDA both with deterministic algorithms.",
        limit="Exact: nothing changed, every bit of the losses equal.",
        red="A state is named with step and hook: look at what the callbacks do in that hook. Only a loss is red: a "
        "forward hook of a callback, or a write past the version counter (.data). A router's expert_load: a twin or a "
        "replay counts its tokens in the live counter.",
    ),
    "throughput": Text(
        proves="The times in the report are consistent: the clock, the token count and what was left out add up. "
        "It does not judge speed, and times of an emulated run are times of the emulation.",
        measures="Label tokens and step times after the warm-up steps, without callbacks, validation and data "
        "loading; the sum of the steps is held against an independent wall clock, the tokens against the "
        "labels of the batches.",
        limit="Tokens and sums exact; the steps and the excluded time explain the wall clock to 1 %.",
        red="Tokens differ: padding or ignored labels are counted. Times differ: a callback's work, "
        "compilation or validation is inside a step, or a device was not waited for before the clock was "
        "read.",
    ),
    "determinism": Text(
        proves="The same steps from the same snapshot give the same bits again: the ground on which "
        "recompute_parity stands.",
        measures="One trajectory of --check.parity_steps steps run twice from one snapshot, with the recompute asked "
        "for and deterministic algorithms.",
        limit="Exact: zero differing bits.",
        red="The first difference names step and parameter. An operation adds atomically, a random state is "
        "not part of the snapshot (stochastic rounding draws in backward), or a buffer keeps state between "
        "runs.",
    ),
    "attention_backend": Text(
        proves="Core attention ran in a fused kernel, in every module and every call of training. Torch chooses by "
        "sizes, types and flags, and says nothing when it falls to the unfused path.",
        measures="Each call reads, off the graph that autograd recorded, which kernel made its result: flash, "
        "efficient, cudnn, or none of them. Calls in training are counted by module, replays included.",
        limit="Exact: no call unfused, and no module without a call.",
        red="The row names the module, and how many others fell. Every module: a flag (sdpa_kernel, "
        "torch.backends.cuda.enable_flash_sdp), deterministic algorithms left on, or a head wider than any fused "
        "kernel takes. Some: their query, key and value differ in width or type. The unfused path saves every "
        "probability, in float32 where it can, so recompute frees little there.",
    ),
    "accumulation_parity": Text(
        proves="Several micro-batches make the same optimizer step as one batch that holds them all, however "
        "unevenly their labels are spread.",
        measures="Lightning accumulates three micro-batches (every label, half of them, a quarter) from the live "
        "weights in float64, and then takes one batch of the same sequences; loss and every gradient are "
        "compared.",
        limit="1e-9 relative, in float64: only the order of additions differs.",
        red="Every gradient red, the loss green: the gradient of a micro-batch is dropped, or cleared too early. "
        "Loss red too: micro-batches are averaged without regard to their labels.",
    ),
    "resume_parity": Text(
        proves="A run that is stopped and resumed, once or twice, is the run that never stopped, to the last bit.",
        measures="Fresh sessions go on from the watched run's first checkpoint, a step each; their checkpoints are "
        "compared with the watched run's: weights, masters, moments, amax histories, router counters, "
        "random states, data position, callbacks. Times are left out.",
        limit="Exact: zero differing values.",
        red="The row names the resume, the step and the first value. Only a callback: it lost, or counted twice, "
        "what it had gathered. Weights too: a state that decides the numbers is not in the checkpoint; "
        "RandomStates or loops red beside them say which.",
    ),
    "baseline": Text(
        proves="The run repeats a reviewed run of the same toolchain, device, configuration and data: it gives the "
        "same numbers, and costs no more.",
        measures="With --baseline FILE, the exact loss of every step against the entry that has the run's key (torch, "
        "Python, smoke, device, CPU flags and threads, hashes of options and batches); tokens a second, peak and held "
        "memory against those of all recorded runs. Where no entry has the key the check is SKIP and says what "
        "differs, and with --require-baseline the run ends in exit code 6.",
        limit="Losses: exact, no step missing or extra, and no NaN. Costs: the prediction interval of the recorded "
        "runs (one normal run in a thousand is outside), at least 5 % (held memory 0.1 %), only for the worse, and "
        "only from three recorded runs on.",
        red="A loss: find the first change of numbers since the entry (smoke baseline diff shows how far it is; from "
        "step 0 on: initial weights, data or forward; later: gradients or optimizer). Where the change is wanted, "
        "smoke baseline update, with the reason. A cost: repeat the run on an idle machine first.",
    ),
}


def text(check: str) -> str:
    """The explanation of one check, ready to print. ``check`` is a key of CHECKS."""
    entry = CHECKS[check]
    parts = (("proves", entry.proves), ("measures", entry.measures), ("limit", entry.limit), ("red", entry.red))
    titles = {"proves": "What it proves", "measures": "How it measures", "limit": "Limit", "red": "When it is red"}
    body = "\n".join(f"{titles[name]}\n{_wrapped(words)}\n" for name, words in parts)
    return f"{check}\n\n{body}\nMore, with the faults that turn it red: docs/checks/{check}.md\n"


def _wrapped(body: str) -> str:
    return textwrap.fill(body, width=98, initial_indent="  ", subsequent_indent="  ")
