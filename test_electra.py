"""What must hold, one fact a test: the method, texts and batches, runs, formats, GLUE."""

import contextlib
import csv
import dataclasses
import hashlib
import http.server
import io
import itertools
import json
import lzma
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef, roc_auc_score
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraModel,
    ElectraTokenizerFast,
    PreTrainedModel,
    pipeline,
)
from transformers import ElectraConfig as HFConfig

import data
import electra
import train_glue
from electra import SIZES, Electra, ElectraConfig, RunConfig, gumbel_sample, mask_tokens

PAD, UNK, CLS, SEP, MASK = range(5)
TINY = ElectraConfig(
    vocab_size=100,
    embedding_size=16,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    intermediate_size=64,
    generator_size=1 / 2,
    max_positions=128,
    dropout=0.0,
    pad_id=PAD,
    cls_id=CLS,
    sep_id=SEP,
    mask_id=MASK,
)
OBJECTIVES = next(
    f.metadata["legal"] for f in dataclasses.fields(ElectraConfig) if f.name == "objective"
)
NO_RANDOM_KEEPING = dataclasses.replace(TINY, mask_share=1.0)


def sentences(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random [CLS] ... [SEP] ids (rows, length) without special tokens inside."""
    ids = torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0], ids[:, -1] = CLS, SEP
    return ids


def padded(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The rows cut to these lengths, and their attention mask."""
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, ids, PAD)
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = SEP
    return ids, mask.long()


def model(config: ElectraConfig = TINY, seed: int = 0) -> Electra:
    torch.manual_seed(seed)
    # Large weights: a fact that holds only near zero would not show otherwise.
    return Electra(dataclasses.replace(config, init_std=0.2, embedding_std=0.2)).eval()


# ---------------------------------------------------------------------------- 2. Configuration


@pytest.mark.parametrize(
    ("size", "discriminator", "both"),
    [
        ("small", 13_549_057, 14_196_219),
        ("base", 109_483_009, 119_386_427),
        ("large", 335_142_913, 354_655_291),
    ],
)
def test_parameter_counts_are_those_of_the_paper(size: str, discriminator: int, both: int) -> None:
    with torch.device("meta"):
        net = Electra(SIZES[size][0])
    assert sum(p.numel() for p in net.discriminator.parameters()) == discriminator
    assert sum(p.numel() for p in net.parameters()) == both


def test_recipes_are_those_of_table_6() -> None:
    def recipe(size: str) -> tuple[float, ...]:
        config, run = SIZES[size]
        decay, peak = run.weight_decay, run.learning_rate
        return (
            run.length,
            run.batch_size,
            peak,
            config.mask_prob,
            run.steps,
            run.warmup_steps,
            decay,
        )

    assert recipe("small") == (128, 128, 5e-4, 0.15, 1_000_000, 10_000, 0.01)
    assert recipe("base") == (512, 256, 2e-4, 0.15, 766_000, 10_000, 0.01)
    assert recipe("large") == (512, 2048, 2e-4, 0.25, 400_000, 10_000, 0.01)
    for size in ("small", "base", "large"):
        config = SIZES[size][0]
        assert (config.dropout, config.init_std, config.embedding_std) == (0.1, 0.02, 0.02)
        assert config.discriminator_weight == 50


@pytest.mark.parametrize(
    ("size", "shape"),
    [("small", (64, 1, 256, 12)), ("base", (256, 4, 1024, 12)), ("large", (256, 4, 1024, 24))],
)
def test_generator_shrinks_in_width_heads_and_feed_forward_only(
    size: str, shape: tuple[int, ...]
) -> None:
    c = electra.generator_config(SIZES[size][0])
    assert (c.hidden_size, c.num_heads, c.intermediate_size, c.num_layers) == shape
    assert c.embedding_size == SIZES[size][0].embedding_size


# ---------------------------------------------------------------------------- 3. Encoder


def test_dropout_acts_in_training_only() -> None:
    net = model(dataclasses.replace(TINY, dropout=0.5))
    ids = sentences(2, 16)
    assert torch.equal(net.discriminator(ids), net.discriminator(ids))
    net.train()
    assert not torch.equal(net.discriminator(ids), net.discriminator(ids))


def test_dropout_drops_at_its_rate_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, 1003, requires_grad=True)
    y = electra.dropout(x, 0.1, training=True)
    dropped = y == 0
    assert dropped.float().mean().item() == pytest.approx(26 / 256, abs=1e-3)
    assert y.mean().item() == pytest.approx(1, abs=1e-3)
    assert torch.equal(y[~dropped], torch.full_like(y[~dropped], 256 / 230))
    y.sum().backward()
    assert torch.equal(x.grad, y)
    assert torch.equal(electra.dropout(x, 0.1, training=False), x)


def test_dropout_draws_every_element_on_its_own() -> None:
    torch.manual_seed(0)
    dropped = (electra.dropout(torch.ones(4000, 64), 0.5, training=True) == 0).float()
    # 64 columns: eight words of eight random bytes. No byte and no bit depends on another.
    correlation = torch.corrcoef(dropped.T) - torch.eye(64)
    assert correlation.abs().max() < 5 / math.sqrt(4000)
    assert torch.corrcoef(torch.stack([dropped[:-1].flatten(), dropped[1:].flatten()]))[
        0, 1
    ].abs() < 5 / math.sqrt(64 * 4000)
    assert (dropped.mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(4000)


def test_the_fused_attention_kernel_gives_the_formulas_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, mask = padded(sentences(4, 40), [40, 30, 20, 3])
    mask[3] = 0  # nothing to look at: must stay finite
    results = []
    for fused in ((), ("cpu",)):
        monkeypatch.setattr(electra, "FUSED_ATTENTION", fused)
        net = model().discriminator
        logits = net(ids, mask)
        (logits * mask).sum().backward()
        results.append((logits.detach(), [p.grad for p in net.parameters()]))
    (logits, grads), (fused_logits, fused_grads) = results
    assert torch.allclose(logits[:3], fused_logits[:3], atol=1e-4)
    assert fused_logits.isfinite().all()
    for grad, fused_grad in zip(grads, fused_grads, strict=True):
        assert torch.allclose(grad, fused_grad, atol=1e-3)


def test_initial_weights_are_truncated_normal_with_the_papers_exceptions() -> None:
    torch.manual_seed(0)
    net = Electra(dataclasses.replace(SIZES["small"][0], num_layers=1))
    xavier = {"discriminator.prediction.weight"}
    xavier |= {f"{part}.encoder.project.weight" for part in ("generator", "discriminator")}
    for name, p in net.named_parameters():
        if name in xavier:
            assert 0.9 < p.abs().max() / math.sqrt(6 / sum(p.shape)) <= 1, name
        elif p.ndim > 1:
            assert p.abs().max() <= 0.04, name
            if p.numel() > 1000:
                # truncation at two standard deviations leaves 0.88 of the standard deviation
                assert abs(p.std() / (0.02 * 0.8796) - 1) < 0.05, name
        else:
            assert (p == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name


# ---------------------------------------------------------------------------- 4. ELECTRA


@pytest.mark.parametrize(
    ("length", "share", "expected"),
    [(128, 0.15, 19), (512, 0.15, 77), (512, 0.25, 128), (8, 0.15, 1)],
)
def test_number_of_masked_positions(length: int, share: float, expected: int) -> None:
    config = dataclasses.replace(TINY, mask_prob=share)
    masked = mask_tokens(sentences(4, length), config)
    assert masked.positions.shape == (4, expected)
    assert masked.chosen.all()


def test_short_rows_get_their_share_of_masked_positions() -> None:
    lengths = [100, 60, 14, 3]
    ids, mask = padded(sentences(4, 100), lengths)
    masked = mask_tokens(ids, TINY, mask)
    assert masked.chosen.sum(1).tolist() == [round(0.15 * n) for n in lengths[:3]] + [1]


def test_masked_positions_are_distinct_and_legal_over_many_draws() -> None:
    ids, mask = padded(sentences(200, 40), [40, 30, 20, 10] * 50)
    ids[:, 5] = MASK
    ids[:, 7] = SEP
    for seed in range(20):
        torch.manual_seed(seed)
        masked = mask_tokens(ids, TINY, mask)
        for row in range(200):
            positions = masked.positions[row][masked.chosen[row]]
            assert len(set(positions.tolist())) == len(positions)
            assert (ids[row][positions] > MASK).all()


def test_unknown_tokens_may_be_masked() -> None:
    ids = torch.full((50, 20), UNK)
    ids[:, 0], ids[:, -1] = CLS, SEP
    masked = mask_tokens(ids, TINY)
    assert (masked.ids == MASK).any()


def test_every_legal_position_is_masked_equally_often() -> None:
    torch.manual_seed(0)
    positions = mask_tokens(sentences(20_000, 22), TINY).positions
    counts = torch.bincount(positions.flatten(), minlength=22)
    assert counts[0] == counts[21] == 0
    assert chisquare(counts[1:21].numpy()).pvalue > 1e-4


def test_85_percent_of_the_chosen_tokens_are_hidden_and_the_rest_are_kept() -> None:
    torch.manual_seed(0)
    ids = sentences(2000, 100)
    masked = mask_tokens(ids, TINY)
    shown, original = masked.ids.gather(1, masked.positions), ids.gather(1, masked.positions)
    hidden = shown == MASK
    assert torch.equal(shown[~hidden], original[~hidden])
    assert abs(hidden.float().mean() - 0.85) < 4 * math.sqrt(0.85 * 0.15 / hidden.numel())
    untouched = torch.ones_like(ids).scatter(1, masked.positions, 0).bool()
    assert torch.equal(masked.ids[untouched], ids[untouched])


def test_a_row_with_nothing_to_mask_keeps_losses_and_gradients_finite() -> None:
    net = model().train()
    ids, mask = padded(sentences(2, 12), [12, 2])
    out = net(ids, mask)
    assert out.masked.chosen[1].sum() == 0
    only = net(torch.tensor([[CLS, SEP, PAD, PAD]]), torch.tensor([[1, 1, 0, 0]]))
    (out.loss + only.loss).backward()
    assert only.generator_loss == 0
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


def test_too_many_positions_and_ids_beyond_the_vocabulary_are_named_with_both_numbers() -> None:
    net = model()
    with pytest.raises(ValueError, match="129 tokens, but 128 positions"):
        net(sentences(1, 129))
    with pytest.raises(ValueError, match="id 100, but 100 words"):
        net(torch.full((1, 8), 100))


def test_temperature_zero_is_the_largest_and_a_negative_one_an_error() -> None:
    assert gumbel_sample(torch.tensor([[0.0, 2.0, 1.0]]), 0).tolist() == [1]
    with pytest.raises(ValueError, match="negative"):
        gumbel_sample(torch.zeros(3), -1)


# Sampling has two ways: noise for every token, and on a CPU two draws for all of them.
both_ways_to_sample = pytest.mark.parametrize("slow_draws", [(), ("cpu",)])


@both_ways_to_sample
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_gumbel_sampling_follows_the_softmax(
    temperature: float, slow_draws: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(electra, "SLOW_DRAWS", slow_draws)
    torch.manual_seed(0)
    logits = torch.linspace(-1.5, 1.5, 130)  # two blocks of 64 and a part of one
    n = 200_000
    counts = gumbel_sample(logits.expand(n, 130), temperature).bincount(minlength=130)
    expected = (logits.double() / temperature).softmax(0) * n
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-24])  # both ends of torch.rand, and between
def test_a_token_of_probability_zero_is_never_sampled(
    draw: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, draw))
    never = -math.inf
    assert gumbel_sample(torch.tensor([never, 0.0, never, 0.0, never])) in (1, 3)


@both_ways_to_sample
def test_gumbel_sampling_stays_uniform_over_a_large_vocabulary_under_bf16(
    slow_draws: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(electra, "SLOW_DRAWS", slow_draws)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(torch.zeros(2000, 8), torch.ones(30_522, 8))
        sampled = gumbel_sample(logits)
    assert logits.dtype == torch.bfloat16
    spread = 30_522 / math.sqrt(12 * len(sampled))
    assert abs(sampled.float().mean() - 15_260.5) < 4 * spread
    assert len(sampled.unique()) > 1900


def with_generator(net: Electra, token_at: Callable[[Tensor], Tensor]) -> Electra:
    """Replace the generator by one that is certain of token_at(positions) (B, K)."""

    def forward(ids: Tensor, mask: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        return 1e4 * F.one_hot(token_at(positions), TINY.vocab_size).float()

    net.generator.forward = forward
    return net


def test_a_generator_that_is_right_leaves_no_replaced_token() -> None:
    ids = sentences(8, 60)
    out = with_generator(model(), lambda positions: ids.gather(1, positions))(ids)
    assert torch.equal(out.corrupted_ids, ids)
    assert not out.labels.any()
    assert out.generator_loss == 0


def test_labels_are_exactly_corrupted_unequal_original_on_the_chosen_positions() -> None:
    ids = sentences(8, 60)
    ids[:, 10:30] = 42
    out = with_generator(model(), lambda positions: torch.full_like(positions, 42))(ids)
    chosen = torch.zeros_like(ids).scatter(1, out.masked.positions, out.masked.chosen.long()).bool()
    assert torch.equal(out.labels, chosen & (ids != 42))
    assert torch.equal(out.corrupted_ids, torch.where(chosen, 42, ids))
    assert (chosen & (ids == 42)).any()


def test_the_discriminator_reads_the_corrupted_input() -> None:
    ids, mask = padded(sentences(4, 40), [40, 30, 20, 10])
    types = (torch.arange(40) > 8).long().expand(4, 40)
    net = model()
    out = net(ids, mask, types)
    expected = net.discriminator(out.corrupted_ids, mask, types)
    assert torch.equal(out.discriminator_logits, expected)


def test_corrupted_input_holds_the_original_where_nothing_was_chosen_and_no_mask() -> None:
    ids, mask = padded(sentences(50, 40), [40, 25] * 25)
    net = model()
    net.generator.bias.data[MASK] = -1e4  # or a random generator may sample it
    out = net(ids, mask)
    assert (out.masked.ids == MASK).any()
    assert not (out.corrupted_ids == MASK).any()
    chosen = torch.zeros_like(ids).scatter(1, out.masked.positions, out.masked.chosen.long()).bool()
    assert torch.equal(out.corrupted_ids[~chosen], ids[~chosen])


def test_losses_are_means_over_the_tokens_of_all_rows_not_over_rows() -> None:
    ids, mask = padded(sentences(4, 100), [100, 60, 20, 7])
    types = (torch.arange(100) > 5).long().expand(4, 100)
    net = model()
    out = net(ids, mask, types)
    # The closed forms, one token at a time.
    nats = []
    for b in range(4):
        for k in range(out.masked.positions.shape[1]):
            if out.masked.chosen[b, k]:
                target = ids[b, out.masked.positions[b, k]]
                nats.append(-out.generator_logits[b, k].log_softmax(0)[target])
    torch.testing.assert_close(out.generator_loss, torch.stack(nats).mean())
    nats = []
    for b in range(4):
        for i in range(int(mask[b].sum())):  # [CLS] and [SEP] count, padding does not
            sign = 1 if out.labels[b, i] else -1
            nats.append(-F.logsigmoid(sign * out.discriminator_logits[b, i]))
    torch.testing.assert_close(out.discriminator_loss, torch.stack(nats).mean())
    torch.testing.assert_close(out.loss, out.generator_loss + 50 * out.discriminator_loss)


def fixed_choice(ids: Tensor, config: ElectraConfig, mask: Tensor | None = None) -> electra.Masked:
    """Mask the positions 1, 3 and 4 of every row: no random numbers."""
    positions = torch.tensor([[1, 3, 4]]).expand(len(ids), 3)
    return electra.Masked(ids.scatter(1, positions, MASK), positions, positions > 0)


def no_noise(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return logits.argmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_generator_samples_at_the_temperature_of_its_config(temperature: float) -> None:
    net = model(dataclasses.replace(TINY, temperature=temperature))
    nn.init.normal_(net.generator.bias, std=2.0)  # some words are likely
    out = net(sentences(2000, 16))
    sampled = out.corrupted_ids.gather(1, out.masked.positions)[out.masked.chosen]
    likeliest, word = (out.generator_logits[out.masked.chosen] / temperature).softmax(-1).max(-1)
    deviation = (likeliest * (1 - likeliest)).sum().sqrt()
    assert abs((sampled == word).sum() - likeliest.sum()) < 4 * deviation


def test_padding_to_another_length_changes_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(electra, "mask_tokens", fixed_choice)
    monkeypatch.setattr(electra, "gumbel_sample", no_noise)
    ids, mask = padded(sentences(3, 30), [30, 20, 8])
    net = model()
    short = net(ids, mask)
    long = net(F.pad(ids, (0, 34)), F.pad(mask, (0, 34)))
    torch.testing.assert_close(short.generator_loss, long.generator_loss)
    torch.testing.assert_close(short.discriminator_loss, long.discriminator_loss)


def test_without_padding_an_attention_mask_of_ones_changes_nothing() -> None:
    ids, net = sentences(3, 30), model()
    torch.manual_seed(1)
    without = net(ids)
    torch.manual_seed(1)
    with_ones = net(ids, torch.ones_like(ids))
    torch.testing.assert_close(without.loss, with_ones.loss)


def test_embeddings_are_one_object_in_both_networks_and_in_the_output_layer() -> None:
    net = model()
    assert net.generator.encoder.embeddings is net.discriminator.encoder.embeddings
    names = [name for name, _ in net.named_parameters()]
    assert sum("embeddings" in name for name in names) == 5
    # What the output layer multiplies by is this very table: a row of zeros leaves the bias.
    net.generator.bias.data[77] = 3.0
    with torch.no_grad():
        assert (net.generator(sentences(1, 8))[0, :, 77] - 3).abs().max() > 0.1
        net.discriminator.encoder.embeddings.word.weight[77] = 0
        assert (net.generator(sentences(1, 8))[0, :, 77] == 3).all()


def test_the_discriminators_loss_reaches_the_generator_only_through_the_embeddings() -> None:
    net = model()
    net(sentences(4, 40)).discriminator_loss.backward()
    for name, p in net.named_parameters():
        reached = p.grad is not None and bool(p.grad.abs().sum() > 0)
        assert reached == ("embeddings" in name or name.startswith("discriminator")), name


def test_the_generators_loss_does_not_reach_the_discriminators_layers() -> None:
    net = model()
    net(sentences(4, 40)).generator_loss.backward()
    for name, p in net.named_parameters():
        assert (p.grad is None) == name.startswith("discriminator"), name


def test_sections_2_to_4_run_alone_with_nothing_but_torch() -> None:
    source = Path(electra.__file__).read_text("utf-8")
    pasted = source[source.index("# ---- 2.") : source.index("# ---- 5.")]
    imports = (
        "import math\nfrom dataclasses import dataclass, field, replace\n"
        "from typing import Any, NamedTuple\nimport torch\nimport torch.nn.functional as F\n"
        "from torch import Tensor, nn\n"
    )
    space: dict = {"__name__": "pasted"}
    sys.modules["pasted"] = type(sys)("pasted")  # where dataclasses look their names up
    exec(imports + pasted, space)  # noqa: S102, our own file
    config = space["ElectraConfig"](num_layers=1, vocab_size=200)
    assert space["Electra"](config)(torch.randint(104, 200, (2, 16))).loss.isfinite()


# ---------------------------------------------------------------------------- 4. Other objectives


def other(objective: str, **settings: Any) -> Electra:
    """A model of another objective, as the command line would set it up."""
    arguments = {"generator_size": 1.0, "num_heads": 1} if objective in ("mlm", "two_stage") else {}
    if objective in ("mlm", "two_stage"):
        arguments["embedding_sharing"] = "all" if objective == "mlm" else "separate"
    return model(dataclasses.replace(TINY, objective=objective, **arguments | settings))


def step_of(net: Electra) -> tuple[Tensor, Tensor, electra.ElectraOutput]:
    ids, mask = padded(sentences(8, 40), [40, 40, 40, 30, 30, 20, 20, 10])
    torch.manual_seed(1)
    return ids, mask, net(ids, mask)


def parts_with_gradient(net: Electra) -> set[str]:
    """The parts of a model that its loss trains, the shared embeddings left out."""
    net.zero_grad()
    step_of(net)[2].loss.backward()
    names = [name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()]
    parts = {".".join(name.split(".")[:2]) for name in names if "embeddings" not in name}
    return {part.removesuffix(".weight").removesuffix(".bias") for part in parts}


GENERATOR = {"generator.encoder", "generator.dense", "generator.norm", "generator"}
DETECTS = {"discriminator.encoder", "discriminator.dense", "discriminator.prediction"}
NAMES = {"corrector.dense", "corrector.norm", "corrector"}


@pytest.mark.parametrize(
    ("objective", "parts"),
    [
        ("electra", GENERATOR | DETECTS),
        ("mlm", GENERATOR),
        ("electra_15", GENERATOR | DETECTS),
        ("replace_mlm", GENERATOR | {"discriminator.encoder"} | NAMES),
        ("all_tokens_mlm", GENERATOR | DETECTS | NAMES),
        ("two_stage", GENERATOR),
        ("adversarial", GENERATOR | DETECTS),
    ],
)
def test_an_objective_trains_its_parts_and_no_others(objective: str, parts: set[str]) -> None:
    assert parts_with_gradient(other(objective)) == parts


def test_mlm_is_one_network_of_full_size() -> None:
    net = other("mlm")
    assert net.generator.encoder is net.discriminator.encoder
    _, _, out = step_of(net)
    assert out.loss == out.generator_loss
    assert out.discriminator_loss == 0


def test_electra_15_learns_from_the_chosen_tokens_only() -> None:
    ids, _, out = step_of(other("electra_15"))
    terms = []
    for row in range(len(ids)):
        for position, chosen in zip(out.masked.positions[row], out.masked.chosen[row], strict=True):
            if chosen:
                x, label = out.discriminator_logits[row, position], out.labels[row, position]
                terms.append(F.softplus(-x if label else x))
    expected = torch.stack(terms).mean()
    assert torch.allclose(out.discriminator_loss, expected)
    assert torch.allclose(out.loss, out.generator_loss + 50 * expected)


def test_replace_mlm_predicts_the_originals_from_the_samples() -> None:
    net = other("replace_mlm")
    ids, mask, out = step_of(net)
    with torch.no_grad():
        x = net.discriminator.encoder(out.corrupted_ids, mask)
        log_p = net.corrector.head(x).log_softmax(-1)
    chosen = torch.zeros_like(out.labels).scatter(1, out.masked.positions, out.masked.chosen)
    expected = -log_p.gather(2, ids[:, :, None])[chosen].mean()
    assert torch.allclose(out.discriminator_loss, expected, rtol=1e-5)
    assert torch.allclose(out.loss, out.generator_loss + expected)


def test_all_tokens_mlm_mixes_copying_and_predicting_all_tokens() -> None:
    net = other("all_tokens_mlm")
    ids, mask, out = step_of(net)
    with torch.no_grad():
        x = net.discriminator.encoder(out.corrupted_ids, mask)
        copy = torch.sigmoid(-net.discriminator.head(x))[:, :, None]
        p = (1 - copy) * net.corrector.head(x).softmax(-1)
        p += copy * F.one_hot(out.corrupted_ids, 100)
    assert torch.allclose(p.sum(-1), torch.ones(ids.shape), atol=1e-5)  # a distribution
    expected = -p.gather(2, ids[:, :, None])[:, :, 0].log()[mask == 1].mean()
    assert torch.allclose(out.discriminator_loss, expected, rtol=1e-4)
    assert torch.allclose(out.loss, out.generator_loss + expected)


def test_two_stage_trains_the_generator_and_then_a_discriminator_that_starts_as_it() -> None:
    net, run = other("two_stage"), RunConfig(steps=6, warmup_steps=1, learning_rate=1e-2)
    optimizer = electra.make_optimizer(net, run.weight_decay)
    for step in range(1, 7):
        before = {name: p.clone() for name, p in net.named_parameters()}
        electra.enter_stage(net, step, 6)
        if step == 4:
            for name, value in net.discriminator.encoder.state_dict().items():
                assert torch.equal(value, net.generator.encoder.state_dict()[name])
        step_of(net)[2].loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        optimizer.zero_grad()
        changed = {
            n.split(".")[0] for n, p in net.named_parameters() if not torch.equal(p, before[n])
        }
        assert changed == {"generator" if step <= 3 else "discriminator"}


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_adversarial_gradient_raises_the_expected_loss_of_the_discriminator(
    temperature: float,
) -> None:
    arguments = {"discriminator_weight": 0.0, "mask_share": 1.0, "temperature": temperature}
    net = other("adversarial", **arguments)
    ids = sentences(1, 8)  # so short that one position is chosen
    expected_nats = []
    for position in range(1, 7):
        masked = ids.clone()
        masked[0, position] = MASK
        logits = net.generator(masked, positions=torch.tensor([[position]]))[0, 0]
        p = (logits / temperature).softmax(-1)
        filled = ids.repeat(100, 1)
        filled[:, position] = torch.arange(100)
        with torch.no_grad():
            scores = net.discriminator(filled)[:, position]
        label = torch.arange(100) != ids[0, position]
        expected_nats.append((p * F.softplus(torch.where(label, -scores, scores))).sum())
    expected = torch.autograd.grad(torch.stack(expected_nats).mean(), net.generator.bias)[0]
    torch.manual_seed(0)
    out = net(ids.expand(20_000, 8))
    sampled = -torch.autograd.grad(out.loss, net.generator.bias, retain_graph=True)[0]
    head = net.discriminator.prediction.weight  # learns from its own loss alone, here times zero
    assert not torch.autograd.grad(out.loss, head)[0].any()
    assert F.cosine_similarity(sampled, expected, dim=0) > 0.95
    assert sampled.norm() == pytest.approx(float(expected.norm()), rel=0.1)


def test_separate_embeddings_share_nothing() -> None:
    net = model(dataclasses.replace(TINY, embedding_sharing="separate"))
    ours = {id(p) for p in net.generator.parameters()}
    assert ours.isdisjoint(id(p) for p in net.discriminator.parameters())


def test_gdes_trains_the_discriminators_difference_and_not_the_generators_table() -> None:
    gdes = model(dataclasses.replace(TINY, embedding_sharing="gdes"))
    word, difference = (
        half.encoder.embeddings.word.weight for half in (gdes.generator, gdes.discriminator)
    )
    assert not difference.any()
    _, _, out = step_of(gdes)
    out.discriminator_loss.backward()
    assert word.grad is None
    assert difference.grad is not None
    assert difference.grad.any()
    with torch.no_grad():  # the discriminator sees what the generator learns
        before = gdes.discriminator(sentences(2, 10))
        word += torch.randn_like(word)
        assert not torch.allclose(gdes.discriminator(sentences(2, 10)), before)


def test_with_gdes_the_corrector_names_tokens_by_the_generators_words_too() -> None:
    net = model(dataclasses.replace(TINY, embedding_sharing="gdes", objective="replace_mlm"))
    x = torch.randn(1, 3, TINY.hidden_size)
    y = net.corrector.norm(F.gelu(net.corrector.dense(x)))
    words = net.generator.encoder.embeddings.word.weight  # the difference starts at zero
    torch.testing.assert_close(net.corrector.head(x), y @ words.T)


def test_two_stage_copies_between_networks_of_the_same_heads() -> None:
    net = other("two_stage", num_heads=4)  # width 32: by the rule of 64 it would be one
    heads = {block.attention.num_heads for block in net.generator.encoder.layers}
    assert heads == {block.attention.num_heads for block in net.discriminator.encoder.layers} == {4}


def test_sharing_layers_divides_the_parameters_and_not_the_work() -> None:
    own = model(dataclasses.replace(TINY, num_layers=6))
    shared = model(dataclasses.replace(TINY, num_layers=6, share_layers=True))

    def size(net: Electra) -> int:
        return sum(p.numel() for p in net.discriminator.encoder.layers.parameters())

    def work(net: Electra) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net.discriminator(sentences(2, 16))
        return counter.get_total_flops()

    assert size(own) == 6 * size(shared)
    assert work(own) == work(shared)
    groups = electra.make_optimizer(shared, 0.01).param_groups
    trained = [id(p) for group in groups for p in group["params"]]
    assert len(trained) == len(set(trained)) == len(list(shared.parameters()))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_counted_flops_are_those_that_torch_counts(objective: str) -> None:
    net = other(objective)
    ids = sentences(4, 40)
    counts = []
    for second_stage in (False, True):
        net.second_stage = second_stage and objective == "two_stage"
        with FlopCounterMode(display=False) as counter:
            net(ids).loss.backward()
        counts.append(counter.get_total_flops() / ids.numel())
    ours = electra.flops_per_token(net.config, 40)
    assert sum(ours) == pytest.approx(statistics.mean(counts))


def test_flops_of_small_are_the_official_count_within_two_percent() -> None:
    config, run = SIZES["small"]
    generator, main = electra.flops_per_token(config, 128)
    # The official rule counts the backward pass once, not twice, and looking up an embedding as a
    # product with a one-hot vector. (It counts small operations, too, such as dropout.)
    looking_up = 2 * (2 * config.embedding_size * config.vocab_size)
    tokens = run.steps * run.batch_size * run.length
    assert tokens * (2 / 3 * (generator + main) + 2 * looking_up) == pytest.approx(
        1.294e18, rel=0.02
    )


# ---------------------------------------------------------------------------- 5. Optimiser


def test_every_parameter_is_in_one_group_and_biases_and_norms_do_not_decay() -> None:
    net = model()
    optimizer = electra.make_optimizer(net, 0.01)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in net.parameters())
    undecayed = {
        id(p) for g in optimizer.param_groups if g["weight_decay"] == 0 for p in g["params"]
    }
    for name, p in net.named_parameters():
        assert (id(p) in undecayed) == (name.endswith("bias") or "norm" in name), name


def test_every_parameter_moves() -> None:
    net = model().train()
    optimizer = electra.make_optimizer(net, 0.01)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    before = {name: p.clone() for name, p in net.named_parameters()}
    for step in range(2):
        net(sentences(8, 64, seed=step), token_type_ids=sentences(8, 64) % 2).loss.backward()
        optimizer.step()
    still = [name for name, p in net.named_parameters() if torch.equal(p, before[name])]
    assert still == []


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 9.9e-6), (5, 4.75e-5), (10, 9e-5), (55, 4.5e-5), (100, 0)]
)
def test_learning_rate_is_that_of_the_official_code(step: int, expected: float) -> None:
    run = RunConfig(learning_rate=1e-4, steps=100, warmup_steps=10)
    assert electra.learning_rate(step, run) == pytest.approx(expected)


def test_micro_batches_give_the_gradient_of_one_big_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(electra, "mask_tokens", fixed_choice)
    monkeypatch.setattr(electra, "gumbel_sample", no_noise)
    ids, big, small = sentences(8, 32), model(), model()
    big(ids).loss.backward()
    for part in ids.chunk(4):
        (small(part).loss / 4).backward()
    for (name, p), q in zip(big.named_parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=2e-5, rtol=1e-4, msg=name)


def test_bf16_training_stays_near_float32() -> None:
    def losses(enabled: bool) -> Tensor:
        net = Electra(dataclasses.replace(TINY, init_std=0.06, embedding_std=0.05)).train()
        optimizer = electra.make_optimizer(net, 0.01)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1e-3
        history = []
        for step in range(200):
            torch.manual_seed(step)
            ids = sentences(8, 32, seed=step % 20)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out = net(ids)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(torch.stack([out.generator_loss, out.discriminator_loss]).detach())
        return torch.stack(history[-20:]).mean(0)

    torch.manual_seed(0)
    full = losses(False)
    torch.manual_seed(0)
    mixed = losses(True)
    assert torch.allclose(full, mixed, rtol=0.02)
    assert full[0] < 4.55  # log 95 is 4.55: it has learned


# ---------------------------------------------------------------------------- 6. Evaluation


def test_area_under_curve_equals_scikit_learn_also_with_ties() -> None:
    random = np.random.default_rng(0)
    for digits in (1, 6):
        scores = random.normal(size=500).round(digits)
        labels = random.random(500) < 0.2
        ours = electra.area_under_curve(scores, labels)
        assert ours == pytest.approx(roc_auc_score(labels, scores))
    assert electra.area_under_curve(np.ones(4), np.zeros(4, dtype=bool)) == 0.5


def test_evaluation_repeats_exactly_and_leaves_the_model_in_training_mode() -> None:
    net = model(dataclasses.replace(TINY, dropout=0.3)).train()
    batches = [(sentences(4, 32, seed), torch.zeros(4, 32, dtype=torch.long)) for seed in range(2)]
    off = torch.autocast("cpu", enabled=False)
    first, second = electra.evaluate(net, batches, off), electra.evaluate(net, batches, off)
    assert first == second
    assert net.training
    assert list(first) == electra.VALID_METRICS


def test_precision_recall_and_accuracies_count_what_they_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(electra, "mask_tokens", fixed_choice)
    ids = sentences(2, 10)
    ids[0, 1] = 42  # one of the six predictions is right
    net = with_generator(model(), lambda positions: torch.full_like(positions, 42))
    verdict = torch.full((2, 10), -1.0)
    verdict[0, 1:4] = 1.0  # flags 1 (original), 2 (original), 3 (replaced) of five replaced ones
    net.discriminator.forward = lambda *_: verdict
    result = electra.evaluate(
        net, [(ids, torch.zeros_like(ids))], torch.autocast("cpu", enabled=False)
    )
    assert result["valid_generator_accuracy"] == result["valid_sampled_accuracy"] == 1 / 6
    assert result["valid_precision"] == 1 / 3
    assert result["valid_recall"] == 1 / 5
    assert result["valid_accuracy"] == pytest.approx((20 - 2 - 4) / 20)
    assert result["valid_replaced"] == pytest.approx(5 / 20)


# ---------------------------------------------------------------------------- data.py: text


TEXT = "\n\n".join(
    f"Document {i} tells of the number {i * 7} .\nA second line has {'very ' * (i % 5)}few words ."
    for i in range(250)
)


def prepare(
    folder: Path, text: str | bytes, vocab_size: int = 200, kind: str = "wordpiece"
) -> tuple[dict, Path]:
    path = folder / "text.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    tokens = folder / "tokens"
    data.prepare(str(path), str(tokens), kind, vocab_size)
    return json.loads((tokens / "meta.json").read_text("utf-8")), tokens


def stream(meta: dict, tokens: Path) -> list[int]:
    return [
        i for split in ("train", "valid") for i in data.open_tokens(tokens, split, meta).tolist()
    ]


def test_token_files_hold_every_document_once_each_ended_by_sep(tmp_path: Path) -> None:
    meta, folder = prepare(tmp_path, TEXT)
    tokenizer = data.load_tokenizer(folder / "tokenizer.json")
    sep = tokenizer.token_to_id("[SEP]")
    found = []
    for split in ("train", "valid"):
        document: list[int] = []
        for i in data.open_tokens(folder, split, meta).tolist():
            if i == sep:
                found.append(document)
                document = []
            else:
                document.append(i)
        assert document == []
    expected = [tokenizer.encode(d, add_special_tokens=False).ids for d in TEXT.split("\n\n")]
    assert sorted(found) == sorted(expected)
    assert found[-2:] == [expected[99], expected[199]]  # the held-out hundredth ones


def test_without_blank_lines_every_line_is_a_document(tmp_path: Path) -> None:
    meta, _ = prepare(tmp_path, TEXT.replace("\n\n", "\n"))
    assert meta["documents"] == 500


def test_crlf_and_blanks_on_empty_lines_end_documents_too(tmp_path: Path) -> None:
    meta, _ = prepare(tmp_path, TEXT.replace("\n\n", "\r\n \t\r\n"))
    assert meta["documents"] == 250


@pytest.mark.parametrize(
    ("text", "documents", "held_out"),
    [
        ("one two .\n\nthree four five .\n", 2, 1),  # a tenth of it would be too much
        ("a b c d e f g h " * 100 + "\nlast words .\n", 2, 11),  # the last document
        ("a b c " * 100, 1, 15),  # a twentieth
        ("\n\n".join(["a b c "] * 99 + ["d e f " * 900] + ["g h i "] * 10), 110, 156),
    ],
)
def test_what_is_held_out_is_documents_and_at_most_a_twentieth_of_the_tokens(
    text: str, documents: int, held_out: int, tmp_path: Path
) -> None:
    meta, folder = prepare(tmp_path, text)
    tokenizer = data.load_tokenizer(folder / "tokenizer.json")
    lines = [line for line in text.split("\n") if line.strip()]
    ids = [
        i for line in lines for i in [*tokenizer.encode(line, add_special_tokens=False).ids, SEP]
    ]
    assert sorted(stream(meta, folder)) == sorted(ids)
    assert (meta["documents"], meta["valid"]) == (documents, held_out)


def test_one_stray_blank_line_does_not_make_two_documents(tmp_path: Path) -> None:
    lines = [f"line {i} of many ." for i in range(180)]
    meta, _ = prepare(tmp_path, "\n".join([*lines[:20], "", *lines[20:]]))
    assert meta["documents"] == 180


def test_a_line_of_a_million_words_loses_no_token(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    text = " ".join(
        np.array(["tide", "moon", "öre", "sandbank", "x"])[random.integers(0, 5, 1_000_000)]
    )
    meta, folder = prepare(tmp_path, text)
    tokenizer = data.load_tokenizer(folder / "tokenizer.json")
    expected = np.array(tokenizer.encode(text, add_special_tokens=False).ids + [3])
    assert np.array_equal(np.array(stream(meta, folder)), expected)


def test_a_long_line_without_blanks_is_cut_between_characters(tmp_path: Path) -> None:
    text = "x" + "é" * 1_200_000 + "\nend\n"
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    with path.open("rb") as file:
        pieces = [(piece.decode(), offset) for piece, offset in data.read_pieces(file)]
    assert len(pieces) > 3
    assert "".join(piece for piece, _ in pieces) == text
    assert [offset for _, offset in pieces][-1] == path.stat().st_size


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    streams = []
    for mark in ("", "\ufeff"):
        path.write_text(mark + TEXT, "utf-8")
        tokenizer = str(tmp_path / "plain" / "tokenizer.json") if mark else "bpe"
        name = "marked" if mark else "plain"
        corpus = data.prepare(str(path), str(tmp_path / name), tokenizer, 300)
        streams.append(corpus.train.tolist())
    assert streams[0] == streams[1]


# Words that BERT's uncased normaliser would make others of, but for the last.
SCRIPTS = {
    "Hindi": "है में पढ़ना", "Thai": "ข้าวผัด ที่นี่", "Japanese": "がぎぐげご パン です",
    "Korean": "한국어 말씀",
    "Vietnamese": "má mà mả mã mạ", "German": "schön größer", "Spanish": "hacía año",
    "Arabic": "مُحَمَّد كِتَابٌ", "Hebrew": "שָׁלוֹם עֲלֵיכֶם",
    "Tamil": "தமிழ் மொழி", "Greek": "άνθρωπος ή",
    "Russian": "ёлка йод", "Chinese": "中文 維基百科",
}  # fmt: skip


@pytest.mark.parametrize("language", SCRIPTS)
def test_no_language_loses_its_marks(language: str) -> None:
    text = SCRIPTS[language]
    tokenizer, _ = data.train_tokenizer(lambda: [f"{text} \n"] * 20, "wordpiece", 400)
    data.finish_tokenizer(tokenizer, "")
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(encoding.tokens).replace("##", "") == text.replace(" ", "")


def test_english_is_stripped_of_accents_as_by_bert_and_turkish_and_german_keep_their_letters() -> (
    None
):
    def normalized(sample: str, text: str, kind: str = "wordpiece") -> str:
        tokenizer, _ = data.train_tokenizer(lambda: [sample] * 9, kind, 300)
        return tokenizer.normalizer.normalize_str(text)

    assert normalized("the plain words of a text " * 99 + "café", "Café İß") == "cafe iß"
    assert normalized("İstanbul ılık güneş", "İI ı ŞĞ") == "i\u0307i ı şğ"  # I becomes i, not ı
    assert normalized("größer schön", "GRÖSSE ẞ ß") == "grösse ß ß"
    assert normalized("größer schön", "GRÖSSE ẞ", "wordpiece_cased") == "GRÖSSE ẞ"


def test_all_but_one_in_2000_of_3000_chinese_characters_have_their_entry(tmp_path: Path) -> None:
    characters = [chr(0x4E00 + i) for i in range(3000)]
    meta, _ = prepare(tmp_path, "".join(characters * 3) + "\n", 30_522)
    assert meta["unknown"] <= 0.0005 * 9000


def test_a_vocabulary_that_does_not_fit_is_reported_with_the_letters_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*data.SPECIAL_TOKENS, "a", "b"]), "utf-8")
    prepare(tmp_path, "a b é b a\n" * 50, kind=str(tmp_path / "vocab.txt"))
    printed = capsys.readouterr().out
    assert "50 documents, 300 tokens of 1.7 characters, 16.67% of them [UNK]; 6 are" in printed
    assert "warning: 16.7% of the tokens are [UNK]" in printed
    assert "mostly for want of: e" in printed
    assert "--tokenizer bpe" in printed


def test_lines_of_json_are_documents_and_other_json_is_refused(tmp_path: Path) -> None:
    texts = ["one\n\nline", "two " * 40_000, "drei"]
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    meta, folder = prepare(tmp_path, "\n".join(lines), 300, "bpe")
    tokenizer = data.load_tokenizer(folder / "tokenizer.json")
    documents = tokenizer.decode(stream(meta, folder), skip_special_tokens=False).split("[SEP]")
    assert documents == ["one\nline", texts[1], texts[2], ""]  # a blank line is no text
    for number, other in enumerate(('{"body": "x"}', '[\n{"text": "x"}\n]', '["a"]')):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(data.InputError, match='objects with a "text"'):
            prepare(tmp_path / str(number), other)
    (tmp_path / "bad").mkdir()
    with pytest.raises(data.InputError, match="line that ends at byte 22 is no JSON object"):
        prepare(tmp_path / "bad", '{"text": "x y"}\n{oops\n', kind="bpe", vocab_size=300)


@pytest.mark.parametrize("kind", data.TOKENIZERS)
def test_a_word_of_300_characters_comes_back_from_its_tokens(kind: str, tmp_path: Path) -> None:
    word = "ab" * 150
    meta, folder = prepare(tmp_path, f"few words {word} more words\n" * 3, 300, kind)
    tokenizer = data.load_tokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode(word, add_special_tokens=False).ids
    assert UNK not in ids
    assert tokenizer.decode(ids).replace(" ", "") == word
    assert meta["unknown"] == 0


CHARACTERS = st.text(st.sampled_from("ab \n\r\t\u0085\u2028\ufeffé字😀"), max_size=120)


@settings(max_examples=4000, deadline=None, derandomize=True)
@given(CHARACTERS, st.integers(8, 40))
def test_any_text_is_read_in_pieces_without_loss_and_without_torn_characters(
    text: str, piece: int
) -> None:
    content = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "PIECE", piece)
        pieces = list(data.read_pieces(io.BytesIO(content)))
    assert b"".join(part for part, _ in pieces) == content
    end = 0
    for part, offset in pieces:
        part.decode()  # raises where a character is torn
        end += len(part)
        assert offset == end
        assert len(part) <= piece
        assert b"\n" not in part[:-1]


def documents_of(text: str) -> list[list[str]]:
    """The documents of a text and their lines, as README describes them."""
    lines = text.split("\n")
    full = [bool(line.encode().strip()) for line in lines]
    first, last = full.index(True), len(full) - full[::-1].index(True)
    gaps = sum(a and not b for a, b in itertools.pairwise(full[first:last]))
    blank_lines = gaps > 1
    documents: list[list[str]] = [[]]
    for line, any_text in zip(lines, full, strict=True):
        if any_text:
            documents[-1].append(line)
        if not any_text or not blank_lines:
            documents.append([])
    return [document for document in documents if document]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("ab \n\n\r\u0085\u2028é字"), min_size=1, max_size=80))
def test_any_text_becomes_the_tokens_of_its_documents_in_order(text: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_bytes(text.encode())
        (folder / "vocab.txt").write_text(
            "\n".join([*data.SPECIAL_TOKENS, "a", "##a", "b", "##b"]), "utf-8"
        )
        arguments = (str(folder / "text.txt"), "", str(folder / "vocab.txt"), 0)
        if not text.strip():
            with pytest.raises(data.InputError, match="no text in it"):
                data.prepare(*arguments)
            return
        corpus = data.prepare(*arguments)
        train, valid = corpus.train.tolist(), corpus.valid.tolist()
    tokenizer = corpus.tokenizer
    expected = []
    for document in documents_of(text):
        for line in document:
            expected += tokenizer.encode(line, add_special_tokens=False).ids
        expected.append(SEP)
    assert train + valid == expected  # fewer than 100 documents: the last is held out
    assert valid
    assert max(expected) < tokenizer.get_vocab_size()


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_literal_special_tokens_in_the_text_stay_ordinary_text(tmp_path: Path, kind: str) -> None:
    text = "we write [MASK] and [SEP] and [CLS] and [PAD] here .\n" * 50
    meta, folder = prepare(tmp_path, text, 400, kind)
    ids = stream(meta, folder)
    assert ids.count(SEP) == 50  # the ends of the documents, nothing else
    assert not {PAD, CLS, MASK} & set(ids)


def test_bpe_keeps_the_text_exactly(tmp_path: Path) -> None:
    text = "A Line with Capitals, ünïcödé and  two blanks .\n" * 40
    meta, folder = prepare(tmp_path, text, 400, "bpe")
    tokenizer = data.load_tokenizer(folder / "tokenizer.json")
    assert tokenizer.decode([i for i in stream(meta, folder) if i != SEP]) == text


def test_a_berts_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    vocabulary = ["[PAD]", "x", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n", "utf-8")
    path = tmp_path / "text.txt"
    path.write_text("The cats\n\nthe dog\n", "utf-8")
    vocab, tokens = str(tmp_path / "vocab.txt"), str(tmp_path / "tokens")
    corpus = data.prepare(str(path), tokens, vocab, 100)
    assert [*corpus.train.tolist(), *corpus.valid.tolist()] == [6, 7, 8, 4, 6, 2, 4]


def test_a_vocabulary_above_65535_entries_is_stored_in_four_bytes(tmp_path: Path) -> None:
    vocabulary = [*data.SPECIAL_TOKENS, *(f"w{i}" for i in range(70_000))]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n", "utf-8")
    path = tmp_path / "text.txt"
    path.write_text("w69999 w1\n\nw65536\n", "utf-8")
    vocab, tokens = str(tmp_path / "vocab.txt"), str(tmp_path / "tokens")
    corpus = data.prepare(str(path), tokens, vocab, 100)
    assert [*corpus.train.tolist(), *corpus.valid.tolist()] == [70_004, 6, SEP, 65_541, SEP]


@pytest.mark.parametrize("pieces", [150, 200, 499])
def test_an_interrupted_preparation_goes_on_and_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(data, "BATCH", 2000)
    meta, folder = prepare(tmp_path, TEXT)
    whole = {path.name: path.read_bytes() for path in folder.glob("*.bin")}
    decode, calls = data.decode, iter(range(10_000))

    def interrupted(piece: bytes, offset: int, path: Path) -> str:
        if next(calls) == pieces:
            raise KeyboardInterrupt
        return decode(piece, offset, path)

    begin = {"offset": 0, "train": 0, "valid": 0, "documents": 0, "last_document": 0}
    begin |= {"complete": False, "between_documents": True, "characters": 0, "unknown": 0}
    (folder / "meta.json").write_text(json.dumps(meta | begin), "utf-8")
    monkeypatch.setattr(data, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, TEXT)
    assert 0 < json.loads((folder / "meta.json").read_text("utf-8"))["offset"] < len(TEXT)
    monkeypatch.setattr(data, "decode", decode)
    assert prepare(tmp_path, TEXT)[0] == meta
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == whole


def test_another_text_or_tokenizer_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    _, folder = prepare(tmp_path, TEXT)
    with pytest.raises(data.InputError, match="another text"):
        prepare(tmp_path, TEXT.replace("Document 3", "Document 4"))
    with pytest.raises(data.InputError, match="another vocab_size"):
        prepare(tmp_path, TEXT, 300)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text("utf-8").replace("document", "documemt"), "utf-8")
    with pytest.raises(data.InputError, match="not the tokenizer"):
        prepare(tmp_path, TEXT)


# ---------------------------------------------------------------------------- data.py: batches


@pytest.mark.parametrize(("tokens", "length"), [(1000, 16), (12_345, 64), (63, 64), (5, 8)])
def test_an_epoch_visits_every_token_and_almost_none_twice(tokens: int, length: int) -> None:
    text = np.arange(10, 10 + tokens)
    n = data.sequences_per_epoch(tokens, length)
    for epoch in range(3):
        ids, _ = data.get_batch(text, epoch * n, n, length, 0, CLS, SEP)
        counts = np.bincount(ids[ids >= 10] - 10, minlength=tokens)
        assert counts.min() == 1 or tokens < length
        assert counts.sum() < tokens + length  # only the last sequence is filled up


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(st.integers(1, 400), st.integers(8, 70), st.integers(0, 2**40), st.integers(0, 5))
def test_any_epoch_of_any_corpus_visits_every_token(
    tokens: int, length: int, seed: int, epoch: int
) -> None:
    n = data.sequences_per_epoch(tokens, length)
    stream = np.arange(3, tokens + 3)
    ids, types = data.get_batch(stream, epoch * n, n, length, seed, 1, 2)
    payload = ids[(ids != 1) & (ids != 2)]
    assert set(payload.tolist()) == set(stream.tolist())
    assert len(payload) < tokens + length
    assert ids.shape == types.shape == (n, length)
    assert (ids[:, 0] == 1).all()
    assert (ids[:, -1] == 2).all()


def test_sequences_are_cls_a_sep_b_sep_in_nine_of_ten_cases() -> None:
    text = np.arange(10, 50_010)
    n = data.sequences_per_epoch(50_000, 32)
    ids, types = data.get_batch(text, 0, n, 32, 0, CLS, SEP)
    assert (ids[:, 0] == CLS).all()
    assert (ids[:, -1] == SEP).all()
    inner = (ids[:, 1:-1] == SEP).sum(1)
    assert set(inner.tolist()) == {0, 1}
    assert abs(inner.mean() - 0.9) < 0.001
    for row, type_row in zip(ids[:300], types[:300], strict=True):
        content = row[row >= 10]
        assert ((np.diff(content) == 1) | (np.diff(content) == 1 - 50_000)).all()  # no gap
        seps = np.flatnonzero(row == SEP)
        assert type_row.tolist() == [int(i > seps[0] and len(seps) == 2) for i in range(32)]


def test_batches_follow_from_seed_and_number_alone() -> None:
    text = np.arange(10, 5010)
    n = data.sequences_per_epoch(5000, 32)
    whole, _ = data.get_batch(text, n - 6, 12, 32, 0, CLS, SEP)  # across the end of an epoch
    parts = [data.get_batch(text, n - 6 + i, 3, 32, 0, CLS, SEP)[0] for i in range(0, 12, 3)]
    assert np.array_equal(whole, np.concatenate(parts))
    other_seed, _ = data.get_batch(text, n - 6, 12, 32, 1, CLS, SEP)
    assert not np.array_equal(whole, other_seed)


def test_epochs_have_fresh_cuts_and_another_order() -> None:
    text = np.arange(10, 5010)
    n = data.sequences_per_epoch(5000, 32)
    first = data.get_batch(text, 0, n, 32, 0, CLS, SEP)[0][:, 1]
    second = data.get_batch(text, n, n, 32, 0, CLS, SEP)[0][:, 1]
    assert len(set(first.tolist()) & set(second.tolist())) < 0.2 * n
    assert np.corrcoef(first, np.arange(n))[0, 1] < 0.3


def test_builtin_corpus_is_english_prose_without_importing_anything(tmp_path: Path) -> None:
    path = tmp_path / "builtin.txt"
    program = (
        "import sys, pathlib, data\n"
        f"data.write_builtin_corpus(pathlib.Path({str(path)!r}), 200_000)\n"
        "assert not {'this', 'tkinter', 'antigravity'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(data.__file__).parent)
    text = path.read_text("utf-8")
    assert 200_000 <= len(text) < 400_000
    assert len(re.findall(r"\bthe\b", text)) > 2000
    assert ">>>" not in text


# ---------------------------------------------------------------------------- The whole program


def start_program(
    folder: Path, *arguments: str, program: ModuleType = electra
) -> subprocess.CompletedProcess:
    """The program as a user starts it, in a process of its own."""
    command = [sys.executable, str(Path(program.__file__).resolve()), *arguments]
    return subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, timeout=240
    )


def run_program(
    folder: Path, *arguments: str, stdin: str = "", program: ModuleType = electra
) -> subprocess.CompletedProcess:
    """The same within this process: two seconds less, those that importing torch takes."""
    printed, errors = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        patch.chdir(folder)
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        name = Path(program.__file__).name
        try:
            code = data.run_program(name, lambda: program.main(list(arguments)))
        except SystemExit as stop:  # argparse's own
            code = stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, code, printed.getvalue(), errors.getvalue())


SMALL_RUN = [
    *("--data", "text.txt", "--size", "tiny", "--vocab_size", "200", "--num_layers", "1"),
    *("--length", "64"),
    *("--batch_size", "4", "--micro_batch", "2", "--log_every", "2", "--eval_every", "4"),
    *("--eval_sequences", "4", "--precision", "fp32", "--steps", "8"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT, "utf-8")
    result = start_program(folder, *SMALL_RUN)
    assert result.returncode == 0, result.stderr
    (folder / "printed").write_text(result.stdout, "utf-8")
    return folder


def test_a_run_writes_its_settings_tokenizer_metrics_and_checkpoint(finished: Path) -> None:
    with (finished / "out" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4", "6", "8"]
    assert [bool(row["valid_auc"]) for row in rows] == [False, True, False, True]
    assert rows[-1]["tokens"] == str(8 * 4 * 64)
    assert float(rows[0]["seconds"]) < float(rows[1]["seconds"])
    settings = json.loads((finished / "out" / "config.json").read_text("utf-8"))
    assert (settings["vocab_size"], settings["mask_id"], settings["num_layers"]) == (200, MASK, 1)
    assert data.load_tokenizer(finished / "out" / "tokenizer.json").get_vocab_size() == 200


def test_a_run_prints_settings_parameter_counts_and_the_lesson(finished: Path) -> None:
    printed = (finished / "printed").read_text("utf-8")
    assert "learning_rate 0.001" in printed
    assert "parameters, generator: " in printed
    for row in ("original ", "masked ", "generator ", "replaced? "):
        assert re.search(rf"^{re.escape(row)}", printed, re.MULTILINE)
    assert "\x1b" not in printed  # no colours into a pipe


def test_a_finished_run_says_so_and_changes_nothing(finished: Path) -> None:
    before = (finished / "out" / "checkpoint.pt").read_bytes()
    result = run_program(finished, *SMALL_RUN)
    assert result.returncode == 0
    assert "8 of 8 steps are done" in result.stdout
    assert (finished / "out" / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("objective", OBJECTIVES[1:])
def test_a_run_of_another_objective_evaluates_and_leaves_an_encoder_to_fine_tune(
    objective: str, finished: Path
) -> None:
    run = [*SMALL_RUN, "--objective", objective, "--out", objective, "--eval_every", "8"]
    assert run_program(finished, *run).returncode == 0
    out = finished / objective
    with (out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    config, settings = SIZES["tiny"][0], json.loads((out / "config.json").read_text("utf-8"))
    config = dataclasses.replace(config, **{k: settings[k] for k in vars(config)})
    flops = sum(electra.flops_per_token(config, 64))
    assert float(rows[-1]["flops"]) == pytest.approx(8 * 4 * 64 * flops)
    assert rows[-1]["valid_auc"]
    net, _, _ = electra.load_run(out)
    state = data.load_checkpoint(out / "checkpoint.pt")
    assert state is not None
    for name, value in net.discriminator.encoder.state_dict().items():
        assert torch.equal(value, state["model"][f"discriminator.encoder.{name}"]), name


def test_a_run_with_gdes_and_shared_layers_is_exported_as_one_that_has_neither(
    finished: Path,
) -> None:
    run = [*SMALL_RUN, "--embedding_sharing", "gdes", "--share_layers", "--num_layers", "3"]
    assert run_program(finished, *run, "--out", "gdes").returncode == 0
    net, _, _ = electra.load_run(finished / "gdes")
    state = data.load_checkpoint(finished / "gdes" / "checkpoint.pt")
    assert state is not None
    word = "encoder.embeddings.word.weight"
    words = state["model"][f"generator.{word}"] + state["model"][f"discriminator.{word}"]
    assert torch.equal(net.discriminator.state_dict()[word], words)
    layers = [layer.state_dict() for layer in net.discriminator.encoder.layers]
    assert all(torch.equal(layers[0][name], layers[2][name]) for name in layers[0])
    # An unshared network starts from it: each layer from the copy, and then on its own.
    run = [*SMALL_RUN, "--init_from", "gdes", "--num_layers", "3", "--out", "unshared"]
    assert run_program(finished, *run).returncode == 0
    net, _, _ = electra.load_run(finished / "unshared")
    layers = [layer.state_dict() for layer in net.discriminator.encoder.layers]
    assert len(layers) == 3
    assert not torch.equal(layers[0]["output.weight"], layers[2]["output.weight"])


def test_a_discriminator_that_learns_nothing_for_long_is_named_with_a_remedy(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = electra.evaluate
    for out, auc, recall in (
        ("early", 0.68, 0.05),
        ("no_auc", 0.52, 0.05),
        ("no_recall", 0.68, 0.0),
    ):
        found = {"valid_auc": auc, "valid_recall": recall}
        monkeypatch.setattr(electra, "evaluate", lambda *a, found=found: evaluate(*a) | found)
        run = [*SMALL_RUN, "--eval_every", "1", "--warmup_steps", "2", "--out", out]
        result = run_program(finished, *run)
        assert result.returncode == 0
        printed = result.stdout
        # Warm-up ends with step 2; the fourth evaluation behind it is step 6.
        assert printed.count("tells nothing apart") == (0 if out == "early" else 1)
        assert "tells nothing apart" not in printed.partition("after step 6")[0]


@pytest.mark.parametrize(
    ("size", "sharing", "remedy"),
    [
        (1.0, "shared", "Try --generator_size 0.25;"),
        (0.25, "shared", "Try more --steps, or one encoder for both: --generator_size 1"),
        (1.0, "all", "Try more --steps;"),
    ],
)
def test_the_remedy_for_a_collapse_is_not_what_the_run_has_already(
    size: float, sharing: str, remedy: str
) -> None:
    config = dataclasses.replace(TINY, generator_size=size, embedding_sharing=sharing)
    assert remedy in electra.collapse_advice(config)


def test_profile_shows_where_the_time_goes_and_keeps_no_run(finished: Path) -> None:
    result = run_program(finished, *SMALL_RUN, "--profile", "2", "--out", "profiled")
    assert result.returncode == 0, result.stderr
    assert "step 2 of 2" in result.stdout
    assert re.search(r"aten::addmm +\d", result.stdout)
    assert not (finished / "profiled").exists()


def test_a_run_stopped_and_continued_ends_with_the_weights_of_one_never_stopped(
    finished: Path,
) -> None:
    # The learning rate depends on the number of steps: stop it with a signal instead.
    program = (
        "import sys, signal, os, data, electra; sys.argv[0] = 'electra.py'\n"
        "step = electra.learning_rate\n"
        "def stop_at_3(number, run):\n"
        "    if number == 3: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return step(number, run)\n"
        "electra.learning_rate = stop_at_3\n"
        "sys.exit(data.run_program('electra.py', electra.main))"
    )
    command = [sys.executable, "-c", program, *SMALL_RUN, "--out", "stopped"]
    environment = os.environ | {"PYTHONPATH": str(Path(electra.__file__).parent)}
    result = subprocess.run(
        command, check=False, cwd=finished, env=environment, capture_output=True, text=True
    )
    assert "3 of 8 steps are done; the same command" in result.stdout, result.stderr
    assert run_program(finished, *SMALL_RUN, "--out", "stopped").returncode == 0
    one, two = (
        data.load_checkpoint(finished / name / "checkpoint.pt") for name in ("out", "stopped")
    )
    assert one["step"] == two["step"] == 8
    for name, weights in one["model"].items():
        assert torch.equal(weights, two["model"][name]), name

    def losses(name: str) -> list[list[str]]:
        rows = (finished / name / "metrics.csv").read_text("utf-8").splitlines()
        return [row.split(",")[:2] + row.split(",")[3:] for row in rows]

    assert losses("out") == losses("stopped")


def run_processes(
    folder: Path, *arguments: str, program: str = electra.__file__
) -> subprocess.CompletedProcess:
    """Two processes on this machine, as torchrun starts them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(Path(program).resolve()), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(Path(electra.__file__).parent)}
    return subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, timeout=240,
        env=environment,
    )  # fmt: skip


def weights_and_metrics(folder: Path) -> tuple[dict[str, Tensor], list[list[str]]]:
    state = data.load_checkpoint(folder / "checkpoint.pt")
    assert state is not None
    lines = (folder / "metrics.csv").read_text("utf-8").splitlines()
    skipped = electra.METRICS.index("seconds")
    rows = [line.split(",") for line in lines[1:]]
    return state["model"], [row[:skipped] + row[skipped + 1 :] for row in rows]


def test_two_processes_train_as_one_and_a_run_may_change_their_number(finished: Path) -> None:
    run = [*SMALL_RUN, "--batch_size", "8", "--out"]  # micro-batches of 2: four, or twice two
    one = run_program(finished, *run, "one")
    assert one.returncode == 0, one.stderr
    two = run_processes(finished, *run, "two")
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("step 8 of 8") == 1
    weights, rows = weights_and_metrics(finished / "one")
    same_weights, same_rows = weights_and_metrics(finished / "two")
    for name, value in weights.items():
        assert torch.allclose(value, same_weights[name], atol=1e-5), name
    assert [row[0] for row in rows] == [row[0] for row in same_rows]
    for row, same in zip(rows, same_rows, strict=True):
        numbers = [(float(x), float(y)) for x, y in zip(row, same, strict=True) if x]
        assert all(x == pytest.approx(y, abs=1e-3) for x, y in numbers)
    # Longer, on one process and on two: the schedule is another one, but the same for both.
    for out, program in (("one", run_processes), ("two", run_program)):
        result = program(finished, *run, out, "--steps", "12")
        assert result.returncode == 0, result.stderr
    weights, rows = weights_and_metrics(finished / "one")
    same_weights, same_rows = weights_and_metrics(finished / "two")
    assert len(rows) == len(same_rows) == 6
    for name, value in weights.items():
        assert torch.allclose(value, same_weights[name], atol=1e-5), name


def test_the_error_of_one_process_ends_all(finished: Path) -> None:
    result = run_processes(finished, *SMALL_RUN, "--out", "three", "--batch_size", "2")
    assert result.returncode != 0
    assert "must divide --batch_size" in result.stderr
    assert not (finished / "three").exists()


# A process is killed (it ends there, as by kill -9) in the n-th ...
FAULTS = {
    "step": "electra.learning_rate = die_at(electra.learning_rate, 3 * n)",
    "evaluation": "electra.area_under_curve = die_at(electra.area_under_curve, n)",
    "row of metrics": (
        "part = lambda *_: open(sys.argv[-1] + '/metrics.csv', 'a').write('4,10')\n"
        "writer = electra.csv.DictWriter\n"
        "writer.writerow = die_at(writer.writerow, n, part)"
    ),
    "checkpoint, half written": (
        "part = lambda state, file: (file.write(b'half'), file.flush())\n"
        "data.torch.save = die_at(data.torch.save, n, part)"
    ),
    "checkpoint, before its sync": "data.os.fsync = die_at(data.os.fsync, n, lambda _: None)",
    "checkpoint, between two renames": (
        "real = data.os.replace\n"
        "dying = die_at(real, n)\n"
        "data.os.replace = lambda a, b: (dying if str(b).endswith('.old') else real)(a, b)"
    ),
}
DIE_AT = """
import os, sys, data, electra
def die_at(function, count, instead=None):
    calls = iter(range(1, 1000))
    def wrapper(*arguments):
        if next(calls) < count:
            return function(*arguments)
        (instead or function)(*arguments)
        os._exit(9)
    return wrapper
"""


@pytest.fixture(scope="module")
def never_stopped(finished: Path) -> tuple[dict[str, Tensor], list[list[str]]]:
    result = run_program(finished, *FAULTY_RUN, "--out", "never_stopped")
    assert result.returncode == 0, result.stderr
    return weights_and_metrics(finished / "never_stopped")


FAULTY_RUN = [*SMALL_RUN, "--eval_every", "2", "--steps", "12", "--save_minutes", "0"]
ROUNDS = int(os.environ.get("ELECTRA_FAULTS", "1"))  # more of them: hours of being killed


@pytest.mark.parametrize("count", range(1, ROUNDS + 1))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_is_killed_ends_bit_equal_to_one_never_stopped(
    fault: str,
    count: int,
    finished: Path,
    never_stopped: tuple[dict[str, Tensor], list[list[str]]],
) -> None:
    out = f"killed {fault} {count}"
    program = DIE_AT + f"n = {1 + count % 4}\n" + FAULTS[fault] + "\nelectra.main()"
    command = [sys.executable, "-c", program, *FAULTY_RUN, "--out", out]
    killed = subprocess.run(
        command, check=False, cwd=finished, capture_output=True, timeout=240,
        env=os.environ | {"PYTHONPATH": str(Path(electra.__file__).parent)},
    )  # fmt: skip
    assert killed.returncode == 9, killed.stderr
    result = run_program(finished, *FAULTY_RUN, "--out", out)
    assert result.returncode == 0, result.stderr
    weights, rows = weights_and_metrics(finished / out)
    expected_weights, expected_rows = never_stopped
    assert rows == expected_rows
    assert all(torch.equal(value, weights[name]) for name, value in expected_weights.items())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_steps(finished: Path) -> None:
    program = (
        "import data, electra\n"
        "rate, sizes = electra.learning_rate, {}\n"
        "def note(step, run):\n"
        "    sizes[step] = int(open('/proc/self/statm').read().split()[1])\n"
        "    return rate(step, run)\n"
        "electra.learning_rate = note\n"
        "electra.main()\n"
        "print('grown by', sizes[1000] / sizes[200])"
    )
    steps = ["--steps", "1000", "--log_every", "50", "--eval_every", "250", "--micro_batch", "0"]
    steps += ["--hidden_size", "32", "--num_heads", "1", "--intermediate_size", "64"]
    result = subprocess.run(
        [sys.executable, "-c", program, *SMALL_RUN, *steps, "--out", "long"],
        check=False, cwd=finished, capture_output=True, text=True, timeout=240,
        env=os.environ | {"PYTHONPATH": str(Path(electra.__file__).parent)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[-1]) < 1.02


def test_a_second_process_stays_out_of_a_run(finished: Path) -> None:
    with data.lock(finished / "out", wait=False):
        result = run_program(finished, *SMALL_RUN)
    assert result.returncode == 2
    assert "another process works there" in result.stderr
    assert run_program(finished, *SMALL_RUN).returncode == 0


def test_two_processes_prepare_one_text_once(finished: Path) -> None:
    command = [sys.executable, str(Path(electra.__file__).resolve()), *SMALL_RUN]
    command += ["--steps", "2", "--tokens", "together", "--out"]
    processes = [
        subprocess.Popen([*command, f"together{i}"], cwd=finished, stdout=subprocess.PIPE)
        for i in range(2)
    ]
    printed = [process.communicate(timeout=240)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("training a wordpiece tokenizer" in text for text in printed) == 1
    first, second = (finished / f"together{i}" / "tokenizer.json" for i in range(2))
    assert first.read_bytes() == second.read_bytes()


def test_a_full_disk_and_too_little_memory_get_one_line(capsys: pytest.CaptureFixture) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "out/checkpoint.pt.tmp")

    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    assert data.run_program("electra.py", full) == 2
    assert data.run_program("electra.py", too_large) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "No space left on device: 'out/checkpoint.pt.tmp'" in errors[0]
    assert "choose a smaller --micro_batch" in errors[1]
    assert len(errors) == 2


def test_a_disk_that_fills_up_ends_preparation_or_training_with_one_line(finished: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs limits on the size of files")
    for size, out, options in (
        (5000, "full1", ["--tokens", "full1.tokens"]),  # no room for the tokens
        (200_000, "full2", []),  # no room for a checkpoint
    ):
        command = [sys.executable, str(Path(electra.__file__).resolve()), *SMALL_RUN, *options]
        result = subprocess.run(
            [*command, "--out", out], check=False, cwd=finished, capture_output=True, text=True,
            preexec_fn=lambda size=size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        )  # fmt: skip
        assert result.returncode == 2
        assert "File too large" in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert run_program(finished, *SMALL_RUN, *options, "--out", out).returncode == 0


def test_a_text_shorter_than_a_batch_trains(finished: Path) -> None:
    (finished / "short.txt").write_text("just these few words .\n", "utf-8")
    result = run_program(finished, *SMALL_RUN, "--data", "short.txt", "--out", "short")
    assert result.returncode == 0, result.stderr
    assert "8 of 8 steps are done" in result.stdout


def test_a_process_that_dies_ends_the_others(finished: Path) -> None:
    (finished / "dies.py").write_text(
        DIE_AT + "if os.environ['RANK'] == '1': "
        "electra.learning_rate = die_at(electra.learning_rate, 3)\n"
        "sys.exit(data.run_program('electra.py', electra.main))\n",
        "utf-8",
    )
    result = run_processes(finished, *SMALL_RUN, "--out", "dies", program=str(finished / "dies.py"))
    assert result.returncode != 0
    assert not (finished / "dies" / "checkpoint.pt").exists()


def test_more_steps_go_on_with_the_new_schedule_and_say_so(finished: Path) -> None:
    more = [*SMALL_RUN, "--out", "more"]
    assert run_program(finished, *more).returncode == 0
    result = run_program(finished, *more, "--steps", "10")
    assert "--steps was 8 and is now 10" in result.stdout
    _, rows = weights_and_metrics(finished / "more")
    assert [row[0] for row in rows] == ["2", "4", "6", "8", "10"]


def test_settings_that_matter_may_not_change_when_a_run_goes_on(finished: Path) -> None:
    result = run_program(finished, *SMALL_RUN, "--batch_size", "8")
    assert result.returncode == 2
    assert "batch_size was 4, now 8" in result.stderr


def test_a_run_from_before_there_was_an_option_goes_on_with_its_default(
    finished: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(finished / "out", tmp_path / "out")
    settings = json.loads((out / "config.json").read_text("utf-8"))
    del settings["temperature"]
    (out / "config.json").write_text(json.dumps(settings), "utf-8")
    run = [*SMALL_RUN, "--out", str(out)]
    assert (
        "temperature was 1.0, now 3.0" in run_program(finished, *run, "--temperature", "3").stderr
    )
    same = run_program(finished, *run, "--temperature", "1")
    assert same.returncode == 0, same.stderr


def test_detect_prints_every_token_with_a_probability(finished: Path) -> None:
    result = run_program(finished, "--detect", "The number has a line .")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]  # as many as the terminal needs
    tokens = [word for row in rows if row[:1] == ["token"] for word in row[1:]]
    percentages = [word for row in rows if row[:1] == ["replaced?"] for word in row[1:]]
    assert "number" in tokens
    assert len(tokens) == len(percentages)
    assert all(re.fullmatch(r"\d+%", p) for p in percentages)
    piped = run_program(finished, "--detect", "-", stdin="The number has a line .\n")
    assert piped.stdout == result.stdout


@pytest.mark.parametrize("objective", ["mlm", "replace_mlm"])
def test_a_run_without_a_discriminator_shows_no_verdicts_and_refuses_to_detect(
    objective: str, finished: Path
) -> None:
    out = f"blind_{objective}"
    result = run_program(finished, *SMALL_RUN, "--objective", objective, "--out", out)
    assert result.returncode == 0
    assert "generator_accuracy" in result.stdout and "\ngenerator  " in result.stdout
    assert not re.search(r"auc|recall|replaced", result.stdout)
    refused = run_program(finished, "--detect", "The number has a line .", "--out", out)
    assert refused.returncode == 2
    assert refused.stdout == "" and f"--objective {objective} trains none" in refused.stderr


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_checkpoint(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (finished / "out" / "checkpoint.pt").read_bytes()
    rate = electra.learning_rate
    monkeypatch.setattr(
        electra, "learning_rate", lambda step, run: math.nan if step == 10 else rate(step, run)
    )
    result = run_program(finished, *SMALL_RUN, "--steps", "20")
    assert result.returncode == 2
    assert re.search(
        r"step 11 is not finite: generator loss nan, discriminator loss nan", result.stderr
    )
    assert (finished / "out" / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, ["--data", "text.txt"], "text.txt: no such file"),
        (b"", ["--data", "text.txt"], "no text in it"),
        (b"\n \n\n", ["--data", "text.txt"], "no text in it"),
        (b"PK\x03\x04\xff\xfe\x00", ["--data", "text.txt"], "byte 6 is not UTF-8"),
        (b"good start\nand \x00 zero\n", ["--data", "text.txt"], "byte 15 is not UTF-8"),
        (b"some words\n", ["--data", "."], "is a folder. Join its files: cat"),
        (b"some words\n", ["--data", os.devnull], "not a regular file"),
        (b"some words\n", ["--data", "/dev/stdin"], "not a regular file"),
        (
            b"some words\n",
            ["--data", "text.txt", "--hidden_size", "400", "--generator_size", "0.5"],
            "a generator of width 200 has 3 heads, one for every 64, which do not divide it",
        ),
        (b"some words\n", ["--data", "text.txt", "--vocab", "none.txt"], "none.txt: no such file"),
        (b"some words\n", ["--data", "text.txt", "--vocab", "text.txt"], "has no [PAD]"),
        (
            b"some words\n",
            ["--data", "text.txt", "--bogus", "1"],
            "unrecognized arguments: --bogus",
        ),
        (b"some words\n", ["--data", "text.txt", "--size", "huge"], "choose one of tiny, small"),
        (b"some words\n", ["--data", "text.txt", "--objective", "gan"], "one of electra, mlm, "),
        (b"some words\n", ["--data", "text.txt", "--precision", "int8"], "one of auto, fp32, "),
        (
            b"some words\n",
            ["--data", "text.txt", "--embedding_sharing", "all"],
            "--embedding_sharing all needs --generator_size 1",
        ),
        (b"some words\n", ["--data", "text.txt", "--length", "4096"], "--length must be"),
        (
            b"some words\n",
            ["--data", "text.txt", "--micro_batch", "3"],
            "--micro_batch, times the processes, must divide --batch_size",
        ),
        (b"some words\n", ["--detect", "hello", "--out", "nothing"], "nothing: no trained model"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    tmp_path: Path, content: bytes | None, arguments: list[str], message: str
) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    result = run_program(tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("program", "option"), [(electra, "--data"), (train_glue, "--model")])
def test_the_exit_code_reaches_the_shell(program: ModuleType, option: str, tmp_path: Path) -> None:
    result = start_program(tmp_path, option, "nowhere", program=program)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


NUMBERS = [
    (program, f.name)
    for program, config in (
        *[(electra, ElectraConfig), (electra, RunConfig)],
        (train_glue, train_glue.GlueConfig),
    )
    for f in dataclasses.fields(config)
    if type(f.default) in (int, float) and f.metadata
]


@pytest.mark.parametrize(("program", "name"), NUMBERS)
def test_a_number_out_of_its_range_is_refused_by_name(program: ModuleType, name: str) -> None:
    legal = {f.name: f for c in (ElectraConfig, RunConfig, train_glue.GlueConfig)
             for f in dataclasses.fields(c)}[name].metadata["legal"]  # fmt: skip
    parse = train_glue.parse_arguments if program is train_glue else electra.parse_run
    for value in ("nan", "inf", "-1", "1e30", "9" * 30):
        with pytest.raises((data.InputError, SystemExit)) as error:  # SystemExit: argparse's own
            parse([f"--{name}", value])
        assert error.type is SystemExit or f"--{name}" in str(error.value)
    if legal.startswith(("(0", "[1", "[2", "[8")):
        with pytest.raises(data.InputError, match=f"--{name} 0"):
            parse([f"--{name}", "0"])


def test_what_others_put_into_a_folder_is_left_alone(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "out" / "generator", tmp_path / "hf" / "generator")
    for name in ("metrics.csv", "tokenizer.json", "config.json", "train.bin"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("{}", "utf-8")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for name in ("hf", "metrics.csv", "tokenizer.json", "config.json"):
        result = run_program(finished, *SMALL_RUN, "--out", str(tmp_path / name))
        assert result.returncode == 2
        assert "of another program. Change --out" in result.stderr
    tokens = str(tmp_path / "train.bin")
    result = run_program(finished, *SMALL_RUN, "--out", "new", "--tokens", tokens)
    assert "of another program. Change --tokens" in result.stderr
    assert "--out is empty" in run_program(finished, *SMALL_RUN, "--out", "").stderr
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_run_goes_on_without_its_token_folder_and_in_another_precision(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [*SMALL_RUN, "--out", "moved", "--tokens", "moved.tokens"]
    assert run_program(finished, *run).returncode == 0
    shutil.rmtree(finished / "moved.tokens")
    monkeypatch.setattr(electra, "DTYPES", electra.DTYPES | {"fp16": torch.bfloat16})
    result = run_program(finished, *run, "--steps", "10", "--precision", "fp16")
    assert result.returncode == 0, result.stderr
    assert "10 of 10 steps are done" in result.stdout
    fewer = run_program(finished, *run, "--steps", "5")
    assert "10 of 10 steps are done; --steps asks for more" in fewer.stdout
    torch.save([1, 2], finished / "moved" / "checkpoint.pt")
    refused = run_program(finished, *run, "--steps", "12")
    assert refused.returncode == 2
    assert "checkpoint.pt: not written by this program" in refused.stderr


@pytest.mark.parametrize("old, new", [(",", ";"), ("4,", "4.0,"), ("0.", "0,"), ("", '"')])
def test_metrics_that_a_spreadsheet_has_changed_are_kept_aside(
    old: str, new: str, finished: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(finished / "out", tmp_path / "out")
    path = out / "metrics.csv"
    path.write_text(edited := path.read_text("utf-8").replace(old, new), "utf-8")
    result = run_program(finished, *SMALL_RUN, "--out", str(out), "--steps", "10")
    assert "It is now metrics.csv.old" in result.stdout
    assert path.with_name("metrics.csv.old").read_text("utf-8") == edited
    assert path.read_text("utf-8").splitlines()[0] == ",".join(electra.METRICS)


def test_the_checkpoint_that_was_read_does_not_stay_in_memory(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(finished / "out", tmp_path / "out")
    read, rate = data.load_checkpoint, electra.learning_rate
    tensors, alive = [], []

    def load(*arguments: Any) -> dict[str, Any] | None:
        state = read(*arguments)
        tensors.extend(weakref.ref(tensor) for tensor in state["model"].values())
        return state

    def count(*arguments: Any) -> float:
        alive.append(sum(tensor() is not None for tensor in tensors))
        return rate(*arguments)

    monkeypatch.setattr(data, "load_checkpoint", load)
    monkeypatch.setattr(electra, "learning_rate", count)
    result = run_program(finished, *SMALL_RUN, "--out", str(out), "--steps", "10")
    assert result.returncode == 0, result.stderr
    assert len(tensors) > 10
    assert alive == [0, 0]


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    "stream, code, says",
    [
        ("<&-", 2, "- reads standard input, which is closed"),
        ("< /dev/null", 0, ""),
        ("< latin.txt", 0, "replaced?"),
    ],
)
def test_detect_reads_any_standard_input(stream: str, code: int, says: str, finished: Path) -> None:
    (finished / "latin.txt").write_bytes(b"caf\xe9 \xff\xfe\n")
    command = shlex.join([sys.executable, electra.__file__, "--detect", "-"])
    result = subprocess.run(
        f"{command} {stream}", shell=True, check=False, cwd=finished, capture_output=True,
        encoding="utf-8", timeout=240, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    assert says in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    "streams", [">&-", "2>&-", ">&- 2>&-", "| head -1", "> /dev/null"]
)  # fmt: skip
def test_no_stream_ends_a_run(streams: str, finished: Path) -> None:
    out = f"streams {streams}".translate(str.maketrans(">&|/", "____"))
    words = "ünï 字 " * 40
    (finished / "words.txt").write_text(f"{words}\n" * 200, "utf-8")
    command = [sys.executable, electra.__file__, *SMALL_RUN, "--data", "words.txt", "--out", out]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    shell = f"{shlex.join(command)} {streams}"
    subprocess.run(shell, shell=True, check=False, cwd=finished, env=environment, timeout=240,
                   capture_output=True)  # fmt: skip
    state = data.load_checkpoint(finished / out / "checkpoint.pt")
    assert state is not None
    assert state["step"] == 8


def test_training_works_in_a_thread_of_a_notebook(finished: Path) -> None:
    config, run, _ = electra.parse_run([*SMALL_RUN, "--out", str(finished / "thread")])
    run.data = str(finished / "text.txt")
    thread = threading.Thread(target=electra.pretrain, args=(config, run))
    thread.start()
    thread.join()
    assert (finished / "thread" / "checkpoint.pt").exists()


def test_a_damaged_checkpoint_is_named_and_never_executed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "bomb.pt").write_bytes(b"cos\nsystem\n(S'touch exploded'\ntR.")
    (tmp_path / "short.pt").write_bytes((finished / "out" / "checkpoint.pt").read_bytes()[:1000])
    for name in ("bomb.pt", "short.pt"):
        with pytest.raises(data.InputError, match=f"{name}: no whole checkpoint left"):
            data.load_checkpoint(tmp_path / name)
        assert f"{name} is damaged" in capsys.readouterr().err
    assert not Path("exploded").exists()


def test_the_checkpoint_before_is_used_where_the_newest_is_damaged_or_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "checkpoint.pt"
    assert data.load_checkpoint(path) is None
    data.save_checkpoint(path, {"step": 1})
    data.save_checkpoint(path, {"step": 2})
    assert data.load_checkpoint(path) == {"step": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.pt", "checkpoint.pt.old"]
    path.write_bytes(path.read_bytes()[:100])
    assert data.load_checkpoint(path) == {"step": 1}
    assert "checkpoint.pt is damaged" in capsys.readouterr().err
    path.unlink()  # a crash between the two renames
    assert data.load_checkpoint(path) == {"step": 1}


# ---------------------------------------------------------------------------- 8. Hugging Face


def exported(net: Electra, tokenizer: data.Tokenizer, folder: Path) -> Path:
    """The folder of a run, as far as `transformers` reads it."""
    narrow = electra.generator_config(net.config)
    electra.write_hugging_face(folder / "generator", "generator", net.generator, narrow, tokenizer)
    electra.write_hugging_face(
        folder / "discriminator",
        "discriminator",
        net.discriminator,
        net.config,
        tokenizer,
    )
    return folder


def load_theirs(cls: type, folder: Path) -> PreTrainedModel:
    """Load a model with `transformers`; no key may be missing or unexpected."""
    net, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return net.eval()


@pytest.fixture(scope="module")
def letters() -> data.Tokenizer:
    """A tokenizer of 100 entries."""
    characters = ["#", *map(chr, range(33, 35)), *map(chr, range(36, 123))][:95]
    words = [*data.SPECIAL_TOKENS, *characters][:100]
    words += [f"w{i}" for i in range(100 - len(words))]
    vocabulary = {word: i for i, word in enumerate(words)}
    return data.finish_tokenizer(
        data.word_piece(data.models.WordPiece(vocabulary, unk_token="[UNK]"), True, None), ""
    )


PADDED = padded(sentences(3, 20), [20, 13, 6])
TYPES = (torch.arange(20) > 7).long().expand(3, 20)


@pytest.mark.parametrize("embedding_size", [16, 32])
def test_an_exported_discriminator_gives_our_logits_in_transformers(
    embedding_size: int, letters: data.Tokenizer, tmp_path: Path
) -> None:
    net = model(dataclasses.replace(TINY, embedding_size=embedding_size))
    exported(net, letters, tmp_path)
    theirs = load_theirs(ElectraForPreTraining, tmp_path / "discriminator")
    ids, mask = PADDED
    with torch.no_grad():
        ours = net.discriminator(ids, mask, TYPES)
        expected = theirs(ids, mask, TYPES).logits
    torch.testing.assert_close(ours[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1 / 2, 1.0])
def test_an_exported_generator_gives_our_logits_in_transformers(
    size: float, letters: data.Tokenizer, tmp_path: Path
) -> None:
    net = model(dataclasses.replace(TINY, generator_size=size))
    nn.init.normal_(net.generator.bias)
    exported(net, letters, tmp_path)
    theirs = load_theirs(ElectraForMaskedLM, tmp_path / "generator")
    ids, mask = PADDED
    positions = torch.tensor([[1, 18], [5, 2], [0, 4]])
    with torch.no_grad():
        ours = net.generator(ids, mask, TYPES, positions)
        expected = theirs(ids, mask, TYPES).logits[torch.arange(3)[:, None], positions]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_both_networks_of_a_shared_encoder_are_exported(
    letters: data.Tokenizer, tmp_path: Path
) -> None:
    net = model(dataclasses.replace(TINY, generator_size=1.0, embedding_sharing="all", num_heads=1))
    exported(net, letters, tmp_path)
    discriminator = load_theirs(ElectraForPreTraining, tmp_path / "discriminator")
    generator = load_theirs(ElectraForMaskedLM, tmp_path / "generator")
    ids, mask = PADDED
    with torch.no_grad():
        one, two = discriminator.electra(ids, mask)[0], generator.electra(ids, mask)[0]
    assert torch.equal(one, two)


def test_the_encoder_loads_for_other_purposes_and_a_fresh_head_is_all_that_is_missing(
    letters: data.Tokenizer, tmp_path: Path
) -> None:
    exported(model(), letters, tmp_path)
    net, info = AutoModel.from_pretrained(tmp_path / "discriminator", output_loading_info=True)
    assert isinstance(net, ElectraModel)
    assert not info["missing_keys"]
    assert {key.split(".")[0] for key in info["unexpected_keys"]} == {"discriminator_predictions"}
    _, info = ElectraForSequenceClassification.from_pretrained(
        tmp_path / "discriminator", output_loading_info=True
    )
    assert {key.split(".")[0] for key in info["missing_keys"]} == {"classifier"}


@pytest.mark.parametrize("kind", ["wordpiece", "cased", "bpe"])
def test_the_exported_tokenizer_gives_our_ids(kind: str, tmp_path: Path) -> None:
    text = "The Café of Zürich,\tNAÏVE and cased: résumé! " * 50
    if kind == "cased":
        (tmp_path / "vocab.txt").write_text(
            "\n".join([*data.SPECIAL_TOKENS, "The", "the", "Café", "Cafe", "of", ",", "##s"]),
            "utf-8",
        )
        (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}', "utf-8")
        tokenizer = data.load_tokenizer(tmp_path / "vocab.txt")
    else:
        tokenizer = data.finish_tokenizer(data.train_tokenizer(lambda: [text], kind, 300)[0], "")
    config = dataclasses.replace(TINY, vocab_size=tokenizer.get_vocab_size())
    exported(model(config), tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "discriminator")
    for texts in (("The Café of Zürich",), ("the cafe", "of résumé,s Café")):
        ours, expected = tokenizer.encode(*texts), theirs(*texts)
        assert expected["input_ids"] == ours.ids
        assert expected["token_type_ids"] == ours.type_ids
    settings = json.loads((tmp_path / "discriminator" / "tokenizer_config.json").read_text("utf-8"))
    assert settings["do_lower_case"] == (kind == "wordpiece")
    assert (theirs.mask_token_id, theirs.pad_token_id) == (MASK, PAD)


def test_fill_mask_works_on_an_exported_generator(letters: data.Tokenizer, tmp_path: Path) -> None:
    exported(model(), letters, tmp_path)
    fill = pipeline("fill-mask", model=str(tmp_path / "generator"), device="cpu")
    answers = fill("a b [MASK] d", top_k=3)
    assert len(answers) == 3
    assert answers[0]["score"] >= answers[1]["score"] > 0


def test_without_the_safetensors_package_weights_are_a_state_dict(
    letters: data.Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        exported(net, letters, tmp_path)
        again, _, _ = electra.load_run(tmp_path / "discriminator")
    assert not list(tmp_path.glob("*/model.safetensors"))
    state = torch.load(tmp_path / "generator" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(state["generator_lm_head.bias"], net.generator.bias)
    for name, value in net.discriminator.state_dict().items():
        assert torch.equal(again.discriminator.state_dict()[name], value), name
    with monkeypatch.context() as patch:
        exported(net, letters, tmp_path / "safe")
        patch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(data.InputError, match="pip install safetensors"):
            electra.load_run(tmp_path / "safe" / "discriminator")


MANY = "\n".join([*data.SPECIAL_TOKENS, *map(str, range(200))])
HF_TINY: dict[str, Any] = {
    "vocab_size": 120, "embedding_size": 16, "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 40,
}  # fmt: skip


def released(
    folder: Path, cls: type, seed: int = 0, binary: bool = False, **settings: Any
) -> PreTrainedModel:
    """A stand-in for a released model: random weights, saved by `transformers`."""
    torch.manual_seed(seed)
    net = cls(HFConfig(**HF_TINY | settings)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.2)
    net.save_pretrained(folder)
    if binary:
        (folder / "model.safetensors").unlink()
        torch.save(net.state_dict(), folder / "pytorch_model.bin")
    words = [*data.SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz", "##a", "##b"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    return net


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("embedding_size", [16, 128])
def test_a_hugging_face_discriminator_gives_their_logits_here(
    binary: bool, embedding_size: int, tmp_path: Path
) -> None:
    theirs = released(tmp_path, ElectraForPreTraining, binary=binary, embedding_size=embedding_size)
    net, tokenizer, _ = electra.load_run(tmp_path)
    assert (net.config.vocab_size, tokenizer.get_vocab_size()) == (120, 33)
    ids, mask = PADDED
    with torch.no_grad():
        ours = net.discriminator(ids, mask, TYPES)
        expected = theirs(ids, mask, TYPES).logits
    torch.testing.assert_close(ours[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_a_hugging_face_generator_of_any_fraction_gives_their_logits_here(
    width: int, tmp_path: Path
) -> None:
    released(tmp_path / "discriminator", ElectraForPreTraining, seed=1)
    shape = {"hidden_size": width, "intermediate_size": width // 2}
    theirs = released(
        tmp_path / "generator", ElectraForMaskedLM, num_attention_heads=max(1, width // 64), **shape
    )
    words = electra.read_hugging_face(tmp_path)["discriminator"][1][
        "electra.embeddings.word_embeddings.weight"
    ]
    net = Electra(electra.hugging_face_config(tmp_path, ElectraConfig())).eval()
    electra.load_hugging_face(tmp_path, net)
    # Two models that were not trained together: here both use the discriminator's table.
    assert torch.equal(net.generator.encoder.embeddings.word.weight, words)
    theirs.electra.embeddings.load_state_dict(
        load_theirs(
            ElectraForPreTraining, tmp_path / "discriminator"
        ).electra.embeddings.state_dict()
    )
    ids, mask = PADDED
    with torch.no_grad():
        ours, expected = net.generator(ids, mask, TYPES), theirs(ids, mask, TYPES).logits
    torch.testing.assert_close(ours[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-5)


def test_what_has_no_weights_in_the_folder_starts_fresh_and_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    released(tmp_path / "one", ElectraForPreTraining)
    config = electra.hugging_face_config(tmp_path / "one", ElectraConfig())
    net = Electra(config)
    assert electra.load_hugging_face(tmp_path / "one", net) == ["generator"]
    released(tmp_path / "bare", ElectraModel)
    electra.load_run(tmp_path / "bare")
    printed = capsys.readouterr().out
    assert "the discriminator has no head" in printed
    released(tmp_path / "tuned", ElectraForSequenceClassification)
    electra.load_run(tmp_path / "tuned")
    printed = capsys.readouterr().out
    assert "not used: classifier.dense.bias, classifier.dense.weight" in printed
    shape = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 256}
    released(tmp_path / "gen", ElectraForMaskedLM, **shape)
    config = electra.hugging_face_config(tmp_path / "gen", ElectraConfig())
    assert (config.hidden_size, config.vocab_size, config.num_layers) == (256, 120, 2)
    missing = electra.load_hugging_face(tmp_path / "gen", Electra(config))
    assert missing == ["discriminator"]
    with pytest.raises(data.InputError, match="is a generator: name the folder of its discrim"):
        electra.load_run(tmp_path / "gen")


def other_layers(folder: Path) -> None:
    state = torch.load(folder / "pytorch_model.bin")
    del state["electra.encoder.layer.1.attention.self.key.bias"]
    torch.save(state, folder / "pytorch_model.bin")


def with_setting(folder: Path, **changed: Any) -> None:
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(settings | changed), "utf-8")


def another_generator(folder: Path) -> None:
    released(folder / "generator", ElectraForMaskedLM, hidden_size=64)
    shutil.copytree(folder, folder / "discriminator", ignore=shutil.ignore_patterns("generator"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_layers, "no weights electra.encoder.layer.1.attention.self.key.bias"),
        (
            partial(with_setting, vocab_size=99),
            r"word_embeddings.weight is \[120, 16\], not \[99, 16\]",
        ),
        (partial(with_setting, hidden_act="relu"), "hidden_act is relu, not gelu"),
        (partial(with_setting, position_embedding_type="relative_key"), "is relative_key, not abs"),
        (partial(with_setting, is_decoder=True), "is_decoder is True, not False"),
        (partial(with_setting, num_attention_heads=3), "num_attention_heads do not divide"),
        (
            partial(with_setting, num_hidden_layers="2"),
            "num_hidden_layers is 2; it has to be a num",
        ),
        (lambda f: (f / "vocab.txt").write_text(MANY, "utf-8"), "has 205 entries, the model 120"),
        (partial(with_setting, hidden_size=None), "hidden_size is None; it has to be a number"),
        (another_generator, "cannot use a generator of num_heads 2"),
        (
            lambda f: BertModel(BertConfig(vocab_size=9)).config.save_pretrained(f),
            "model_type is bert",
        ),
        (lambda f: (f / "config.json").unlink(), "no trained model"),
        (lambda f: (f / "config.json").write_text("{", "utf-8"), "not JSON"),
        (lambda f: (f / "pytorch_model.bin").unlink(), "no model.safetensors and no"),
        (lambda f: (f / "pytorch_model.bin").write_bytes(b"PK"), "cannot be read"),
        (lambda f: (f / "vocab.txt").unlink(), "no tokenizer.json and no vocab.txt"),
    ],
)
def test_a_hugging_face_folder_that_does_not_fit_is_refused_by_name(
    damage: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    released(folder, ElectraForPreTraining, binary=True)
    damage(folder)
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    arguments = ["--data", "text.txt", "--init_from", "hf", "--length", "32", "--batch_size", "2"]
    result = run_program(tmp_path, *arguments, "--steps", "1")
    assert result.returncode == 2
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.count("\n") == 1


def test_export_import_export_gives_byte_equal_files(finished: Path, tmp_path: Path) -> None:
    net, tokenizer, _ = electra.load_run(finished / "out")
    exported(net, tokenizer, tmp_path / "one")
    again = Electra(
        electra.fit_to_tokenizer(
            electra.hugging_face_config(tmp_path / "one", ElectraConfig()),
            tokenizer,
            exact=False,
        )
    )
    electra.load_hugging_face(tmp_path / "one", again)
    tokenizer = data.load_tokenizer(electra.find_tokenizer(tmp_path / "one"))
    exported(again, tokenizer, tmp_path / "two")
    names = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").glob("*/*"))
    assert len(names) == 8
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), (
            name
        )
    # The run wrote the same at its end.
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (finished / "out" / name).read_bytes(), (
            name
        )


def test_pre_training_starts_from_a_hugging_face_folder_and_its_tokenizer(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 1, "hidden_size": 32, "intermediate_size": 16}
    theirs = released(tmp_path / "hf" / "generator", ElectraForMaskedLM, **shape)
    released(tmp_path / "hf" / "discriminator", ElectraForPreTraining)
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    arguments = ["--data", "text.txt", "--init_from", "hf", "--length", "32", "--batch_size", "4"]
    arguments += ["--steps", "1", "--precision", "fp32", "--eval_sequences", "4"]
    result = run_program(tmp_path, *arguments, "--learning_rate", "0")
    assert result.returncode == 0, result.stderr
    settings = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert (settings["vocab_size"], settings["generator_size"], settings["mask_id"]) == (
        120,
        0.25,
        4,
    )
    state = load_theirs(ElectraForMaskedLM, tmp_path / "out" / "generator").state_dict()
    for name, value in theirs.state_dict().items():
        if name.startswith("electra.encoder") or "predictions" in name:
            assert torch.equal(state[name], value), name
    vocabulary = data.load_tokenizer(tmp_path / "out" / "tokenizer.json").get_vocab()
    assert vocabulary == data.load_tokenizer(tmp_path / "hf/generator/vocab.txt").get_vocab()
    refused = run_program(tmp_path, *arguments, "--out", "two", "--hidden_size", "64")
    assert refused.returncode == 2
    assert "hf decides --hidden_size" in refused.stderr
    # A run's own folder will do, once it has ended.
    again = run_program(tmp_path, *arguments[:3], "out", *arguments[4:], "--out", "three")
    assert again.returncode == 0, again.stderr
    # And so will one half.
    half = run_program(tmp_path, *arguments, "--init_from", "hf/discriminator", "--out", "four")
    assert "hf/discriminator: no generator" in half.stdout


def test_a_vocab_txt_may_begin_with_a_mark_and_hold_an_entry_twice(tmp_path: Path) -> None:
    words = [*data.SPECIAL_TOKENS, "a", "a", "b"]
    (tmp_path / "vocab.txt").write_text("\ufeff" + "\n".join(words), "utf-8")
    tokenizer = data.load_tokenizer(tmp_path / "vocab.txt")
    assert tokenizer.encode("a b", add_special_tokens=False).ids == [6, 7]
    assert electra.fit_to_tokenizer(TINY, tokenizer, exact=True).vocab_size == 8


@pytest.mark.parametrize(("lower", "strip"), [(True, None), (False, None), (True, False)])
def test_a_vocab_txt_is_read_as_tokenizer_config_says(
    lower: bool, strip: bool | None, tmp_path: Path
) -> None:
    words = [*data.SPECIAL_TOKENS, "The", "the", "café", "cafe", "Café", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), "utf-8")
    settings = {"do_lower_case": lower, "strip_accents": strip}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    theirs = ElectraTokenizerFast(
        vocab=str(tmp_path / "vocab.txt"),
        vocab_file=str(tmp_path / "vocab.txt"),
        **settings,
    )
    ours = data.load_tokenizer(tmp_path / "vocab.txt")
    for text in ("The Café", "the cafés", "THE cafe"):
        assert ours.encode(text).ids == theirs(text)["input_ids"]


# ---------------------------------------------------------------------------- train_glue.py: files

# Columns of texts and label in train and dev, columns of the texts in test, as the task's authors
# laid them out; and how many columns train, dev and test have.
LAYOUTS = {
    "CoLA": ((3,), 1, (1,), (4, 4, 2)),
    "SST-2": ((0,), 1, (1,), (2, 2, 2)),
    "MRPC": ((3, 4), 0, (3, 4), (5, 5, 5)),
    "STS-B": ((7, 8), 9, (7, 8), (10, 10, 9)),
    "QQP": ((3, 4), 5, (1, 2), (6, 6, 3)),
    "MNLI": ((8, 9), -1, (8, 9), (12, 16, 10)),
    "QNLI": ((1, 2), 3, (1, 2), (4, 4, 3)),
    "RTE": ((1, 2), 3, (1, 2), (4, 4, 3)),
    "WNLI": ((1, 2), 3, (1, 2), (4, 4, 3)),
}
LABELS = {
    "STS-B": ["2.500", "0.000", "5.000"],
    "MNLI": ["neutral", "contradiction", "entailment"],
    "QNLI": ["not_entailment", "entailment", "not_entailment"],
    "RTE": ["not_entailment", "entailment", "not_entailment"],
}
NUMBERS = {"STS-B": [2.5, 0.0, 5.0], "MNLI": [2, 0, 1]}


def write_tsv(path: Path, rows: list[list[str]], end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join("\t".join(row) + end for row in rows).encode())


def write_glue_file(
    folder: Path, task: str, file: str, texts: list[tuple[str, ...]], labels: list[str]
) -> None:
    """A file of the task in its official layout, the other columns filled with x."""
    columns, label, test_columns, widths = LAYOUTS[task]
    split = file.split("_")[0]
    width = widths[("train", "dev", "test").index(split)]
    rows = [] if task == "CoLA" and split != "test" else [[f"head{i}" for i in range(width)]]
    for row_texts, row_label in zip(texts, labels, strict=True):
        row = ["x"] * width
        for column, text in zip(
            test_columns if split == "test" else columns, row_texts, strict=True
        ):
            row[column] = text
        if split != "test":
            row[label] = row_label
        rows.append(row)
    write_tsv(folder / task / f"{file}.tsv", rows)


@pytest.mark.parametrize("task", LAYOUTS)
def test_texts_and_labels_are_found_in_every_file_of_a_task(task: str, tmp_path: Path) -> None:
    columns = len(LAYOUTS[task][0])
    texts = [tuple(f"text {i} {k}" for k in range(columns)) for i in range(3)]
    for file in train_glue.GLUE[task].rows:
        write_glue_file(tmp_path, task, file, texts, LABELS.get(task, ["1", "0", "1"]))
        examples, problems = train_glue.read_glue(tmp_path, task, file)
        assert [example.texts for example in examples] == texts
        assert not problems
        if file.startswith("test"):
            assert all(math.isnan(example.label) for example in examples)
        else:
            assert [example.label for example in examples] == NUMBERS.get(task, [1, 0, 1])


def test_quotes_and_unicode_line_separators_stay_inside_their_field(tmp_path: Path) -> None:
    texts = [('"', 'he said "no'), ("a\u0085b", "c\u2028d\x1ce"), ("\ufeffq", "\u00a0'")]
    write_glue_file(tmp_path, "RTE", "train", texts, ["entailment"] * 3)
    examples, problems = train_glue.read_glue(tmp_path, "RTE", "train")
    assert [example.texts for example in examples] == texts
    assert not problems


@pytest.mark.parametrize("variant", ["byte-order mark", "CRLF", "no final newline", "blank end"])
def test_ends_and_beginnings_of_files_change_nothing(variant: str, tmp_path: Path) -> None:
    write_glue_file(tmp_path, "MRPC", "dev", [("a", "b"), ("c", "d")], ["1", "0"])
    path = tmp_path / "MRPC" / "dev.tsv"
    content = path.read_bytes()
    path.write_bytes(
        {
            "byte-order mark": b"\xef\xbb\xbf" + content,
            "CRLF": content.replace(b"\n", b"\r\n"),
            "no final newline": content.rstrip(b"\n"),
            "blank end": content + b"\n",
        }[variant]
    )
    examples, problems = train_glue.read_glue(tmp_path, "MRPC", "dev")
    assert examples == [(("a", "b"), 1.0), (("c", "d"), 0.0)]
    assert not problems
    assert train_glue.read_rows(path)[0][0] == "head0"


def bad_qqp_rows(path: Path) -> None:
    """Eight rows: a cut one, an empty question and a foreign label among good ones."""
    good = ["1", "2", "3", "how?", "why?", "1"]
    bad = [["4", "5", "6", "a line that"], ["broke", "1"], [*good[:4], " ", "0"], [*good[:5], "2"]]
    write_tsv(path, [["head"] * 6, good, *bad[:2], good, *bad[2:], good, good])


def test_bad_training_rows_are_left_out_and_named_by_line(tmp_path: Path) -> None:
    bad_qqp_rows(tmp_path / "QQP" / "train.tsv")
    examples, problems = train_glue.read_glue(tmp_path, "QQP", "train")
    assert examples == [(("how?", "why?"), 1.0)] * 4
    assert [re.search(r"line (\d+)", problem)[1] for problem in problems] == ["3", "4", "6", "7"]
    assert "4 columns instead of 6" in problems[0]
    assert "an empty text" in problems[2]
    assert "label '2'" in problems[3]


def test_bad_dev_rows_keep_their_place(tmp_path: Path) -> None:
    bad_qqp_rows(tmp_path / "QQP" / "dev.tsv")
    examples, problems = train_glue.read_glue(tmp_path, "QQP", "dev")
    assert len(examples) == 8
    assert len(problems) == 4
    assert [math.isnan(e.label) for e in examples] == [0, 1, 1, 0, 0, 1, 0, 0]  # 4: no text


CELLS = st.sampled_from(["", " ", "a", "0", "1", "2.5", "nan", "entailment", '"', "\u0085", "é\r"])
LINES = st.lists(st.lists(CELLS, max_size=7).map("\t".join), max_size=8)


@settings(max_examples=4500, deadline=None, derandomize=True)
@given(LINES, st.sampled_from(["CoLA", "STS-B", "QQP", "RTE"]), st.sampled_from(["train", "dev"]))
def test_any_tsv_gives_examples_and_line_numbers_or_one_clear_error(
    lines: list[str], task: str, file: str
) -> None:
    content = "\n".join(lines)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / task / f"{file}.tsv"
        path.parent.mkdir()
        path.write_bytes(content.encode())
        try:
            examples, problems = train_glue.read_glue(Path(name), task, file)
        except data.InputError as error:
            assert str(path) in str(error)
            return
    header = 0 if task == "CoLA" else 1
    rows = len(content.rstrip("\r\n").split("\n")) - header
    bad = [int(re.search(r"line (\d+): ", problem)[1]) for problem in problems]
    assert bad == sorted(set(bad))
    assert all(header < number <= rows + header for number in bad)
    assert len(examples) == rows - (len(bad) if file == "train" else 0)
    good = [e for e in examples if not math.isnan(e.label) and all(t.strip() for t in e.texts)]
    assert len(good) == rows - len(bad)


def test_a_file_of_another_task_is_refused(tmp_path: Path) -> None:
    write_glue_file(tmp_path, "CoLA", "test", [("a",)], [""])
    (tmp_path / "RTE").mkdir()
    (tmp_path / "CoLA" / "test.tsv").rename(tmp_path / "RTE" / "train.tsv")
    with pytest.raises(data.InputError, match="Is it a file of RTE"):
        train_glue.read_glue(tmp_path, "RTE", "train")


REAL_GLUE = Path(__file__).resolve().parent.parent / "shared" / "data" / "glue"


@pytest.mark.skipif(not REAL_GLUE.exists(), reason="needs the real GLUE files beside the project")
def test_every_row_of_the_real_files_is_read() -> None:
    partial = {"QQP/train", "QQP/dev", "MNLI/train", "QNLI/train"}
    for task, facts in train_glue.GLUE.items():
        for file, rows in facts.rows.items():
            if (REAL_GLUE / task / f"{file}.tsv").exists():
                examples, problems = train_glue.read_glue(REAL_GLUE, task, file)
                assert not problems
                assert len(examples) == rows or f"{task}/{file}" in partial


# ------------------------------------------------------------------ Downloads: GLUE and OpenWebText


class Server:
    """GLUE's site on this machine: `files` by path, and moods it may have for a path."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}  # connections that break after half of what was asked for
        self.requests: list[tuple[str, str | None]] = []  # path and Range
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers.get("Range")
                server.requests.append((self.path, asked))
                if self.path not in server.files:
                    return self.send_error(404)
                content = server.files[self.path]
                start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
                if start and start >= len(content):
                    return self.send_error(416)
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                content = content[start:]
                if server.cut.get(self.path, 0) > 0:
                    server.cut[self.path] -= 1
                    content = content[: len(content) // 2]
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


def archive(members: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as zipped:
        for name, member in members.items():
            zipped.writestr(name, member)
    return content.getvalue()


COLA = {
    "CoLA/train.tsv": b"x\t1\t\tone\nx\t0\t*\ttwo\nx\t1\t\tthree\n",
    "CoLA/dev.tsv": b"x\t1\t\tfour\nx\t0\t*\tfive",
    "CoLA/test.tsv": b"index\tsentence\n0\tsix\n",
}
RTE = {f"RTE/{file}.tsv": b"index\tsentence1\tsentence2\n" for file in ("train", "dev", "test")}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A site with a CoLA of 3, 2 and 1 rows; data.py's table points there."""
    server = Server()
    site = f"http://127.0.0.1:{server.http.server_port}/"
    rows = {"CoLA": train_glue.rows(3, 2, 1), "MRPC": train_glue.rows(2, 1, 2)}
    rows["RTE"] = train_glue.rows(0, 0, 0)
    for task, facts in list(train_glue.GLUE.items()):
        sources = tuple(site + source.rpartition("/")[2] for source in facts.sources)
        moved = facts._replace(sources=sources, rows=rows.get(task, facts.rows))
        monkeypatch.setitem(train_glue.GLUE, task, moved)
    server.files["/CoLA.zip"] = archive(COLA | {"CoLA/original/raw.tsv": b"", "../evil": b"x"})
    yield server
    server.http.shutdown()
    server.http.server_close()


def fetch(folder: Path, *tasks: str) -> int:
    arguments = ["--fetch", "--glue", str(folder / "glue"), "--task", ",".join(tasks)]
    return data.run_program("train_glue.py", lambda: train_glue.main(arguments))


def test_glue_is_fetched_checked_and_not_fetched_again(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert fetch(tmp_path, "CoLA") == 0
    assert "train.tsv: whole" in capsys.readouterr().out
    for name, content in COLA.items():
        assert (tmp_path / "glue" / name).read_bytes() == content
    requests = len(server.requests)
    assert fetch(tmp_path, "CoLA") == 0
    assert len(server.requests) == requests


def test_an_archive_writes_nothing_but_the_tasks_files(server: Server, tmp_path: Path) -> None:
    fetch(tmp_path, "CoLA")
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {f"glue/{name}" for name in COLA}


def test_files_put_there_by_hand_are_as_good_as_downloaded_ones(
    server: Server, tmp_path: Path
) -> None:
    for name, content in COLA.items():
        (tmp_path / "glue" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "glue" / name).write_bytes(content)
    assert fetch(tmp_path, "CoLA") == 0
    assert server.requests == []


def test_a_download_goes_on_where_the_connection_was_cut(server: Server, tmp_path: Path) -> None:
    server.cut["/CoLA.zip"] = 2
    assert fetch(tmp_path, "CoLA") == 0
    half = len(server.files["/CoLA.zip"]) // 2
    assert [asked for _, asked in server.requests][:2] == [None, f"bytes={half}-"]
    assert len(server.requests) == 3


def test_a_download_that_is_cut_again_and_again_goes_on_with_the_next_command(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    server.cut["/CoLA.zip"] = 5
    assert fetch(tmp_path, "CoLA") == 2
    assert "cut after" in capsys.readouterr().err
    assert fetch(tmp_path, "CoLA") == 0
    assert server.requests[-1][1] is not None


@pytest.mark.parametrize(
    ("mood", "message"),
    [
        ("missing", "404"),
        ("truncated", "no whole zip archive"),
        ("HTML page", "it begins b'<!DOCTYPE html>"),
        ("swapped", "no CoLA/train.tsv in it, but RTE/train.tsv"),
    ],
)
def test_a_bad_archive_is_named_and_the_next_task_goes_on(
    mood: str, message: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    good = server.files["/CoLA.zip"]
    bad = {
        "truncated": good[:-30],
        "HTML page": b"<!DOCTYPE html><p>Sorry",
        "swapped": archive(RTE),
    }
    server.files["/CoLA.zip"] = bad.get(mood, b"")
    if mood == "missing":
        del server.files["/CoLA.zip"]
    server.files["/RTE.zip"] = archive(RTE)
    assert fetch(tmp_path, "CoLA", "RTE") == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "glue: 3 files are not whole" in printed.err.splitlines()[1]
    assert len(printed.err.splitlines()) == 2
    assert "CoLA/train.tsv: missing" in printed.out
    assert "RTE/train.tsv: whole" in printed.out
    server.files["/CoLA.zip"] = good
    assert fetch(tmp_path, "CoLA") == 0


def test_a_partial_file_is_replaced_but_kept(server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "glue" / "CoLA" / "train.tsv"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"x\t1\t\tmine\n")
    assert fetch(tmp_path, "CoLA") == 0
    assert mine.read_bytes() == COLA["CoLA/train.tsv"]
    assert mine.with_name("train.tsv.old").read_bytes() == b"x\t1\t\tmine\n"


def test_mrpc_is_built_from_its_pairs_and_the_list_of_dev_ids(
    server: Server, tmp_path: Path
) -> None:
    head = b"\xef\xbb\xbfQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    pairs = [b'1\t10\t11\tA " a\tB b', b"0\t12\t13\tC\tD", b"1\t14\t15\tE\tF"]
    server.files["/msr_paraphrase_train.txt"] = head + b"".join(p + b"\r\n" for p in pairs)
    server.files["/msr_paraphrase_test.txt"] = head + b"".join(p + b"\r\n" for p in pairs[:2])
    server.files["/mrpc_dev_ids.tsv"] = b"12\t13\n"
    assert fetch(tmp_path, "MRPC") == 0
    folder, header = tmp_path / "glue" / "MRPC", head.replace(b"\r", b"")
    assert (folder / "train.tsv").read_bytes() == header + pairs[0] + b"\n" + pairs[2] + b"\n"
    assert (folder / "dev.tsv").read_bytes() == header + pairs[1] + b"\n"
    test = b'index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t10\t11\tA " a\tB b\n1\t12\t13\tC\tD\n'
    assert (folder / "test.tsv").read_bytes() == test


@pytest.mark.skipif(not REAL_GLUE.exists(), reason="needs the real GLUE files beside the project")
def test_the_real_mrpc_files_are_reproduced_byte_for_byte(tmp_path: Path) -> None:
    real = {
        file: (REAL_GLUE / "MRPC" / f"{file}.tsv").read_bytes() for file in train_glue.rows(0, 0, 0)
    }
    header, *train = real["train"].split(b"\n")[:-1]
    pairs = [*train, *real["dev"].split(b"\n")[1:-1]]
    test = [b"0" + row[row.index(b"\t") :] for row in real["test"].split(b"\n")[:-1]]
    (tmp_path / "train.txt").write_bytes(b"\n".join([header, *pairs]))
    (tmp_path / "test.txt").write_bytes(b"\n".join(test))
    ids = REAL_GLUE / "MRPC" / "dev_ids.tsv"
    train_glue.build_mrpc(tmp_path / "train.txt", tmp_path / "test.txt", ids, tmp_path)
    for file, content in real.items():
        assert (tmp_path / "MRPC" / f"{file}.tsv").read_bytes() == content


def tar_xz(members: dict[str, bytes]) -> bytes:
    """A tar in two streams of xz, as some tools write it."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as packed:
        for name, member in members.items():
            facts = tarfile.TarInfo(name)
            facts.size = len(member)
            packed.addfile(facts, io.BytesIO(member))
    tar = content.getvalue()
    return lzma.compress(tar[:700]) + lzma.compress(tar[700:])


@pytest.fixture
def owt(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An OpenWebText of five files in two parts on the server; tmp_path is where it is fetched."""
    first = tar_xz({"1.txt": b"One.\n\n \nStill one.\n", "2.txt": b"Two\0\0\0.", "3.txt": b"\n"})
    second = tar_xz({"../evil.txt": b"Caf\xc3\xa9.\n", "5.txt": b"Caf\xe9."})
    content = tar_xz({"owt/a.xz": first, "/evil.xz": second, "owt/README": b"no text"})
    server.files["/openwebtext.tar.xz"] = content
    site = f"http://127.0.0.1:{server.http.server_port}/"
    monkeypatch.setattr(data, "OWT", site + "openwebtext.tar.xz")
    monkeypatch.setattr(data, "OWT_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(data, "OWT_ROOM", 1e6)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def fetch_owt() -> int:
    return data.run_program("data.py", lambda: data.main(["owt"]))


def test_openwebtext_is_one_text_in_which_blank_lines_end_its_documents(owt: Path) -> None:
    assert fetch_owt() == 0
    text = (owt / "owt.txt").read_text("utf-8")
    assert text == "One.\nStill one.\n\nTwo.\n\nCafé.\n\nCaf\ufffd.\n\n"
    assert data.prepare("owt.txt", "", "bpe", 300).fingerprint  # a text that can be trained on
    assert json.loads((owt / "owt.txt.tokens" / "meta.json").read_text("utf-8"))["documents"] == 4


def test_openwebtext_unpacks_into_its_text_and_nowhere_else(owt: Path) -> None:
    fetch_owt()
    files = {str(p.relative_to(owt.parent)) for p in owt.parent.rglob("*") if p.is_file()}
    assert files == {"here/owt.txt", "here/openwebtext.tar.xz"}


def test_openwebtext_that_is_there_is_left_alone(
    owt: Path, server: Server, capsys: pytest.CaptureFixture
) -> None:
    (owt / "owt.txt").write_text("mine", "utf-8")
    assert fetch_owt() == 0
    assert "is there already" in capsys.readouterr().out
    assert (owt / "owt.txt").read_text("utf-8") == "mine"
    assert server.requests == []


def test_an_openwebtext_archive_put_there_by_hand_is_not_fetched(owt: Path, server: Server) -> None:
    (owt / "openwebtext.tar.xz").write_bytes(server.files["/openwebtext.tar.xz"])
    assert fetch_owt() == 0
    assert server.requests == []


@pytest.mark.parametrize(
    ("problem", "message"),
    [("other file", "not the published file"), ("no tar", "cannot be unpacked"),
     ("full disk", "GB are free here")],
)  # fmt: skip
def test_openwebtext_ends_with_one_line_and_no_text(
    problem: str, message: str, owt: Path, server: Server, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    content = server.files["/openwebtext.tar.xz"]
    if problem == "other file":
        server.files["/openwebtext.tar.xz"] = content + b"x"
    if problem == "no tar":
        server.files["/openwebtext.tar.xz"] = content[: len(content) // 2]
        found = hashlib.sha256(content[: len(content) // 2]).hexdigest()
        monkeypatch.setattr(data, "OWT_SHA256", found)
    if problem == "full disk":
        monkeypatch.setattr(data, "OWT_ROOM", 1e18)
    assert fetch_owt() == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1
    assert message in printed[0]
    assert not (owt / "owt.txt").exists()


# ---------------------------------------------------------------------------- train_glue.py

TWO_CLASSES = np.array([[0, 1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 1, 1, 1]])


def test_classification_metrics_equal_scikit_learn() -> None:
    predicted, true = TWO_CLASSES
    assert math.isclose(train_glue.pearson(predicted, true), matthews_corrcoef(true, predicted))
    assert math.isclose(train_glue.f1(predicted, true), f1_score(true, predicted))
    assert train_glue.accuracy(predicted, true) == 5 / 7


def test_correlations_equal_scipy_also_with_ties() -> None:
    generator = np.random.default_rng(0)
    predicted, true = generator.normal(size=50).round(1), generator.integers(0, 6, 50) / 1.0
    assert math.isclose(train_glue.pearson(predicted, true), pearsonr(predicted, true)[0])
    assert math.isclose(train_glue.spearman(predicted, true), spearmanr(predicted, true)[0])


@pytest.mark.parametrize("task", train_glue.METRICS)
def test_constant_predictions_and_labels_give_numbers(task: str) -> None:
    for metric in train_glue.METRICS[task].values():
        for predicted, true in [(np.zeros(4), np.zeros(4)), (np.zeros(4), np.arange(4.0) % 2)]:
            value = metric(predicted, true)
            assert 0 <= value <= 1
            if metric is not train_glue.accuracy:
                assert value == 0


def test_examples_without_a_label_are_not_scored() -> None:
    true = np.array([1.0, np.nan, 0.0, 0.0])
    measured = train_glue.score("SST-2", "dev", np.array([1, 1, 0, 1]), true)
    assert math.isclose(measured["accuracy"], 100 * 2 / 3)


def test_mnli_is_scored_on_both_dev_sets_by_name() -> None:
    same = np.array([0.0, 1.0, 2.0])
    assert train_glue.score("MNLI", "dev_matched", same, same) == {"accuracy matched": 100}
    assert train_glue.score("MNLI", "dev_mismatched", same, same) == {"accuracy mismatched": 100}


@pytest.mark.parametrize(
    ("a", "b", "room", "kept"),
    [
        (200, 20, 125, (105, 20)),
        (100, 100, 125, (63, 62)),
        (20, 200, 125, (20, 105)),
        (5, 6, 125, (5, 6)),
        (200, 0, 126, (126, 0)),
    ],
)
def test_truncation_shortens_the_longer_text(
    a: int, b: int, room: int, kept: tuple[int, int]
) -> None:
    assert train_glue.truncate(a, b, room) == kept


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> data.Tokenizer:
    """Words a to z are ids 5 to 30."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text(
        "\n".join([*data.SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz"]) + "\n", "utf-8"
    )
    return data.load_tokenizer(path)


def test_one_text_and_two_texts_become_ids_with_token_types(
    word_tokenizer: data.Tokenizer,
) -> None:
    pair = train_glue.Example(("a b", "c"), 1.0)
    for example, ids, types in (
        (pair, [CLS, 5, 6, SEP, 7, SEP], [0, 0, 0, 0, 1, 1]),
        (train_glue.Example(("a b",), 0.0), [CLS, 5, 6, SEP], [0, 0, 0, 0]),
        (train_glue.Example(("", ""), math.nan), [CLS, SEP, SEP], [0, 0, 1]),
    ):
        encoded = train_glue.encode([example, pair], word_tokenizer, 128)
        batch = train_glue.collate(encoded, np.array([0]), torch.device("cpu"))
        assert [x.tolist() for x in batch] == [[ids], [[1] * len(ids)], [types]]


def test_long_pairs_are_cut_to_the_length(word_tokenizer: data.Tokenizer) -> None:
    example = train_glue.Example(("a " * 100, "b " * 100), 0.0)
    encoded = train_glue.encode([example], word_tokenizer, 128)
    assert encoded.ids[0].tolist() == [CLS, *[5] * 63, SEP, *[6] * 62, SEP]


def random_pairs(count: int, tokenizer: data.Tokenizer) -> train_glue.Encoded:
    """Pairs of 1 to 20 random words; the label is their number."""
    generator = np.random.default_rng(1)

    def words() -> str:
        return " ".join(generator.choice(list("abcdefghij"), generator.integers(1, 20)))

    examples = [train_glue.Example((words(), words()), float(i)) for i in range(count)]
    return train_glue.encode(examples, tokenizer, 128)


def small_classifier(head: str = "first", classes: int = 3) -> train_glue.Classifier:
    net = train_glue.Classifier(model().discriminator.encoder, classes, head)
    return net.eval()


@pytest.mark.parametrize("head", ["first", "mean"])
def test_padding_to_the_longest_row_gives_the_logits_of_padding_to_128(
    head: str, word_tokenizer: data.Tokenizer
) -> None:
    encoded, net = random_pairs(8, word_tokenizer), small_classifier(head)
    ids, mask, types = train_glue.collate(encoded, np.arange(8), torch.device("cpu"))
    padded_to_128 = [F.pad(x, (0, 128 - x.shape[1]), value=v) for x, v in ((ids, 7), (mask, 0))]
    expected = net(*padded_to_128, F.pad(types, (0, 128 - types.shape[1]), value=1))
    assert torch.allclose(net(ids, mask, types), expected, atol=1e-5)


def test_a_row_that_is_all_padding_gets_a_number() -> None:
    zeros = torch.zeros(1, 4, dtype=torch.long)
    assert small_classifier("mean")(zeros, zeros, zeros).isfinite().all()


def test_every_example_is_answered_once_and_in_order(word_tokenizer: data.Tokenizer) -> None:
    encoded, net = random_pairs(300, word_tokenizer), small_classifier(classes=2)
    with torch.no_grad():
        alone = torch.cat(
            [train_glue.classify(net, encoded, np.array([i]), "fp32") for i in range(300)]
        )
        lead = alone[:, 1] - alone[:, 0]
        net.prediction.bias[0] += lead.median()  # half of the answers are 0, half are 1
    predicted = train_glue.predict(net, encoded, "MRPC", "fp32")
    clear = (lead - lead.median()).abs() > 1e-3  # rounding decides the others
    assert clear.sum() > 250
    assert np.array_equal(predicted[clear], (lead > lead.median())[clear])


def test_scores_are_answered_from_0_to_5(word_tokenizer: data.Tokenizer) -> None:
    encoded, net = random_pairs(200, word_tokenizer), small_classifier(classes=1)
    with torch.no_grad():  # logits spread around 0.5, most of them outside 0 to 1
        logits = train_glue.classify(net, encoded, np.arange(200), "fp32")
        net.prediction.weight *= 5 / logits.std()
        net.prediction.bias += 0.5 - 5 * logits.mean() / logits.std()
    predicted = train_glue.predict(net, encoded, "STS-B", "fp32")
    assert predicted.min() == 0
    assert predicted.max() == 5
    assert ((predicted > 0) & (predicted < 5)).any()


def test_training_batches_hold_every_example_once_with_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 1000)
    batches = train_glue.shuffled_batches(lengths, 32, np.random.default_rng(1))
    assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
    assert sorted(map(len, batches)) == [8] + [32] * 31
    padded_tokens = sum(len(rows) * lengths[rows].max() for rows in batches)
    assert padded_tokens < 1.1 * lengths.sum()
    others = train_glue.shuffled_batches(lengths, 32, np.random.default_rng(2))
    assert any(set(a) != set(b) for a, b in zip(batches, others, strict=True))


def test_layers_learn_the_more_slowly_the_lower_they_are() -> None:
    config = dataclasses.replace(SIZES["small"][0], vocab_size=50)
    net = train_glue.Classifier(Electra(config).discriminator.encoder, 2, "first")
    groups = train_glue.layerwise_optimizer(net, 0.8).param_groups
    factors = [float(f"{group['factor']:.3g}") for group in groups]
    assert factors[:4] == [1, 0.8, 0.64, 0.512]
    assert factors[-2:] == [0.0687, 0.0550]
    assert len(factors) == 14
    parameters = [id(p) for group in groups for p in group["params"]]
    assert sorted(parameters) == sorted(id(p) for p in net.parameters())
    names = {id(p): name for name, p in net.named_parameters()}
    assert {names[id(p)].split(".")[0] for p in groups[0]["params"]} == {"prediction"}
    assert {names[id(p)].split(".")[2] for p in groups[1]["params"]} == {"11"}
    assert all(group["weight_decay"] == 0 for group in groups)


run_glue = partial(run_program, program=train_glue)


def separable(task: str, rows: int, seed: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """Texts, or pairs of them, whose label shows in the last word: number or second."""
    generator = np.random.default_rng(seed)
    classes = generator.integers(2, size=rows)
    texts = []
    for number in classes:
        filler = " ".join(generator.choice(["a", "of", "the", "has", "few"], 4))
        last = f"{filler} {('number', 'second')[number]}"
        texts.append((last,) if task == "SST-2" else ("document", last))
    return texts, [train_glue.GLUE[task].labels[number] for number in classes]


SWEEP = ["--task", "SST-2,RTE", "--epochs", "4", "--learning_rate", "3e-3", "--precision", "fp32"]


@pytest.fixture(scope="module")
def sweep(finished: Path) -> Path:
    """A finished sweep over two synthetic tasks, with saved models and a submission."""
    for task in ("SST-2", "RTE"):
        for seed, (file, rows) in enumerate((("train", 400), ("dev", 40), ("test", 30))):
            write_glue_file(finished / "glue", task, file, *separable(task, rows, seed))
    arguments = [*SWEEP, "--seeds", "2", "--predict"]
    result = start_program(finished, *arguments, program=train_glue)
    assert result.returncode == 0, result.stderr
    (finished / "glue.txt").write_text(result.stdout, "utf-8")
    shutil.copy(finished / "out/glue/results.csv", finished / "results.csv")
    return finished


def glue_results(folder: Path, name: str = "out/glue/results") -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_separable_task_is_learned_and_the_table_shows_it(sweep: Path) -> None:
    rows = glue_results(sweep, "results")
    assert [(row["task"], row["seed"]) for row in rows] == [
        *[("SST-2", "0"), ("SST-2", "1"), ("RTE", "0"), ("RTE", "1")]
    ]
    assert all(float(row["value"]) > 90 for row in rows)
    printed = (sweep / "glue.txt").read_text("utf-8")
    medians = []
    for task, published in (("SST-2", "88.3"), ("RTE", "68.5")):
        values = [float(row["value"]) for row in rows if row["task"] == task]
        mean, spread = statistics.mean(values), statistics.stdev(values)
        medians.append(statistics.median(values))
        numbers = [f"{x:.1f}" for x in (medians[-1], mean, spread, max(values))]
        line = next(line for line in printed.splitlines() if line.startswith(f"{task:8} accuracy"))
        assert line.split()[2:7] == [*numbers, "2"]
        assert line.split()[-1] == published
    assert f"paper's mean, 2 of 8 tasks: {statistics.mean(medians):.2f}" in printed


def test_a_finished_sweep_prints_its_table_and_a_longer_one_goes_on(sweep: Path) -> None:
    before = glue_results(sweep)
    again = run_glue(sweep, *SWEEP, "--seeds", "2")
    assert again.stdout[again.stdout.index("task  ") :].splitlines()[1].startswith("SST-2")
    assert "seed 0" not in again.stdout
    assert glue_results(sweep) == before
    longer = run_glue(sweep, *SWEEP, "--seeds", "3")
    assert re.findall(r"(\S+) seed (\d)", longer.stdout) == [("SST-2", "2"), ("RTE", "2")]
    assert glue_results(sweep)[: len(before)] == before


def test_other_settings_and_random_weights_are_runs_of_their_own(sweep: Path) -> None:
    before = len(glue_results(sweep))
    result = run_glue(sweep, *SWEEP[2:], "--task", "RTE", "--model", "none")
    assert "RTE seed 0" in result.stdout
    result = run_glue(sweep, *SWEEP[2:], "--task", "RTE", "--head", "first")
    assert "RTE seed 0" in result.stdout
    rows = glue_results(sweep)[before:]
    assert [(row["origin"], row["head"]) for row in rows] == [
        *[("none", "mean"), ("pre-trained", "first")]
    ]


def test_a_saved_model_names_its_labels_and_classifies(sweep: Path) -> None:
    config = json.loads((sweep / "out" / "glue" / "RTE" / "config.json").read_text("utf-8"))
    assert config["labels"] == ["entailment", "not_entailment"]
    pairs = "document\tof the few a number\ndocument\ta of the the second\n"
    result = run_glue(sweep, "--model", "out/glue/RTE", "--classify", "-", stdin=pairs)
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == ["entailment", "not_entailment"]
    assert all(float(line[1].rstrip("%")) > 50 for line in lines)
    # As long as the texts it was trained on: what it makes of other lengths is chance.
    one = run_glue(sweep, "--model", "out/glue/SST-2", "--classify", "of the few a number")
    assert one.stdout.startswith("0\t")


def test_fine_tuning_can_start_from_a_fine_tuned_model(sweep: Path) -> None:
    arguments = ["--task", "SST-2", "--epochs", "1", "--init_from", "out/glue/RTE"]
    result = run_glue(sweep, *arguments, "--learning_rate", "1e-9")
    assert "SST-2 seed 0" in result.stdout
    assert glue_results(sweep)[-1]["origin"] == "out/glue/RTE"


def test_runs_start_from_the_weights_that_model_and_init_from_name(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sweep)

    def first_weights(seed: int, *arguments: str) -> Tensor:
        start, _ = train_glue.load_start(train_glue.parse_arguments(list(arguments)))
        torch.manual_seed(seed)
        return train_glue.new_classifier(start, "RTE", "first").encoder.embeddings.word.weight

    pre_trained = electra.load_run(Path("out"))[0].discriminator.encoder.embeddings.word.weight
    tuned = train_glue.load_model(Path("out/glue/RTE"))[0].encoder.embeddings.word.weight
    assert not torch.equal(pre_trained, tuned)
    assert torch.equal(first_weights(0), pre_trained)
    assert torch.equal(first_weights(0, "--init_from", "out/glue/RTE"), tuned)
    random = [first_weights(seed, "--model", "none") for seed in (0, 1)]
    assert not torch.equal(*random)
    assert not torch.equal(random[0], pre_trained)


def test_a_hugging_face_model_is_fine_tuned_by_the_recipe_of_its_size(sweep: Path) -> None:
    released(sweep / "released", ElectraForPreTraining, vocab_size=40)
    result = run_glue(sweep, "--model", "released", "--task", "RTE", "--epochs", "1")
    assert result.returncode == 0, result.stderr
    assert "RTE seed 0: accuracy" in result.stdout
    with (sweep / "released" / "glue" / "results.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["learning_rate"], row["length"]) == ("0.0003", "40")


def test_an_exported_task_has_our_encoder_and_labels_and_no_head(sweep: Path) -> None:
    result = run_glue(sweep, "--model", "out/glue/RTE", "--export", "exported")
    assert result.returncode == 0, result.stderr
    assert "The head stays behind" in result.stdout
    theirs = load_theirs(ElectraModel, sweep / "exported")
    ours, _, _ = train_glue.load_model(sweep / "out" / "glue" / "RTE")
    encoded = AutoTokenizer.from_pretrained(sweep / "exported")(
        "the few", "a number", return_tensors="pt"
    )
    with torch.no_grad():
        expected = theirs(**encoded).last_hidden_state
        order = ("input_ids", "attention_mask", "token_type_ids")
        assert torch.allclose(ours.encoder(*[encoded[name] for name in order]), expected, atol=1e-5)
    net = ElectraForSequenceClassification.from_pretrained(sweep / "exported")
    assert net.config.id2label == {0: "entailment", 1: "not_entailment"}
    again = run_glue(sweep, "--model", "out/glue/RTE", "--export", "exported")
    assert again.returncode == 2
    assert "exported holds a config.json already" in again.stderr


def test_the_commands_of_the_readme_with_hugging_face_work(sweep: Path) -> None:
    readme = (Path(electra.__file__).parent / "README.md").read_text("utf-8")
    section = readme[readme.index("## With Hugging Face") : readme.index("## Options")]
    folder = sweep / "readme"
    shutil.copytree(sweep / "out", folder / "out")
    shutil.copytree(sweep / "glue", folder / "glue")
    (folder / "owt.txt").write_text(TEXT, "utf-8")
    narrow = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 1}
    released(folder / "electra-small" / "generator", ElectraForMaskedLM, vocab_size=40, **narrow)
    released(folder / "electra-small" / "discriminator", ElectraForPreTraining, vocab_size=40)
    tiny = ["--steps", "2", "--length", "32", "--batch_size", "4", "--eval_sequences", "4"]
    small = {"--init_from": tiny, "--task": ["--epochs", "1"], "--detect": [], "--export": []}
    commands = re.findall(r"^    python (\w+\.py)(.*)$", section, re.MULTILINE)
    assert len(commands) == 4
    for program, arguments in commands:
        given = shlex.split(arguments, comments=True)
        (more,) = [small[name] for name in small if name in given]
        module = electra if program == "electra.py" else train_glue
        result = start_program(folder, *given, *more, program=module)
        assert result.returncode == 0, result.stderr
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "sequence" in result.stdout


def test_the_submission_has_eleven_files_with_labels_by_name(sweep: Path) -> None:
    rows = {"AX": 1104, "CoLA": 1063, "MNLI-m": 9796, "MNLI-mm": 9847, "MRPC": 1725}
    rows |= {"QNLI": 5463, "QQP": 390965, "RTE": 30, "SST-2": 30, "STS-B": 1379, "WNLI": 146}
    with zipfile.ZipFile(sweep / "out" / "glue" / "submission.zip") as zipped:
        files = {name: zipped.read(name).decode().split("\n") for name in zipped.namelist()}
    assert {name.removesuffix(".tsv"): len(lines) - 2 for name, lines in files.items()} == rows
    assert all(lines[0] == "index\tprediction" for lines in files.values())
    printed = (sweep / "glue.txt").read_text("utf-8")
    wanting = "SST-2.tsv (1,821 rows), RTE.tsv (3,000 rows)"
    assert f"for gluebenchmark.com is not ready: the site wants {wanting}\n" in printed
    expected = separable("RTE", 30, 2)[1]
    assert files["RTE.tsv"][1:-1] == [f"{i}\t{label}" for i, label in enumerate(expected)]
    assert files["AX.tsv"][1].split("\t")[1] in train_glue.GLUE["MNLI"].labels
    assert float(files["STS-B.tsv"][1].split("\t")[1]) >= 0


def test_a_model_is_not_saved_over_files_of_other_programs(sweep: Path, tmp_path: Path) -> None:
    for task, name in (("RTE", "model.pt"), ("SST-2", "config.json")):
        (tmp_path / "glue" / task).mkdir(parents=True)
        (tmp_path / "glue" / task / name).write_text("{}", "utf-8")
        arguments = [*SWEEP[2:], "--task", task, "--save", "last", "--out", str(tmp_path)]
        result = run_glue(sweep, *arguments)
        assert result.returncode == 2
        assert f"has a {name} of another program. Change --out" in result.stderr


def test_a_length_beyond_the_positions_is_said_with_both_numbers(sweep: Path) -> None:
    result = run_glue(sweep, *SWEEP, "--length", "512")  # as a sweep that is finished
    assert "--length 512: cut to 128, the positions of the model" in result.stdout


def test_a_saved_model_of_other_settings_is_not_overwritten(sweep: Path) -> None:
    before = (sweep / "out" / "glue" / "RTE" / "model.pt").read_bytes()
    result = run_glue(sweep, *SWEEP[2:], "--task", "RTE", "--epochs", "1", "--save", "last")
    assert result.returncode == 2
    assert "holds another model (epochs" in result.stderr
    assert (sweep / "out" / "glue" / "RTE" / "model.pt").read_bytes() == before


def test_pairs_of_mrpc_and_sts_b_are_trained_in_both_orders(
    finished: Path, monkeypatch: pytest.MonkeyPatch, word_tokenizer: data.Tokenizer
) -> None:
    seen: list[train_glue.Encoded] = []
    real_fine_tune = train_glue.fine_tune

    def spy(task: str, train: train_glue.Encoded, *rest: Any) -> train_glue.Classifier:
        seen.append(train)
        return real_fine_tune(task, train, *rest)

    monkeypatch.setattr(train_glue, "fine_tune", spy)
    monkeypatch.chdir(finished)
    for task in ("MRPC", "STS-B", "QQP"):
        for file in ("train", "dev"):
            label = LABELS.get(task, ["1"])[0]
            write_glue_file(finished / "pairs", task, file, [("of", "the")], [label])
    arguments = ["--glue", "pairs", "--out", "pairs", "--epochs", "1", "--task"]
    train_glue.main([*arguments, "MRPC,STS-B,QQP"])
    assert [len(train.ids) for train in seen] == [2, 2, 1]
    first, swapped = (ids.tolist() for ids in seen[0].ids)
    assert first[1] == swapped[3]
    assert first[3] == swapped[1]
    train_glue.main([*arguments, "MRPC", "--no-double_pairs"])
    assert len(seen[-1].ids) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere: no trained model"),
        (["--task", "SST2"], "--task SST2: choose all, or of CoLA, SST-2"),
        (["--head", "last"], "--head last: choose one of auto, first, mean"),
        (["--model", "out", "--classify", "x"], "out: no model.pt"),
        (["--model", "out", "--classify", ""], "--classify is empty"),
        (["--model", "none", "--init_from", "out/glue/RTE"], "--init_from needs a --model"),
    ],
)
def test_bad_input_to_train_glue_gets_one_line_and_exit_code_2(
    arguments: list[str], message: str, finished: Path
) -> None:
    result = run_glue(finished, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_task_without_files_is_fetched_or_left_out_with_a_line_that_says_why(
    sweep: Path, server: Server
) -> None:
    arguments = [*SWEEP[2:], "--task", "CoLA,RTE", "--seeds", "2", "--out", "fetched"]
    (content,) = [server.files.pop("/CoLA.zip")]
    result = run_glue(sweep, *arguments)
    assert "CoLA is left out: no train.tsv and dev.tsv in glue/CoLA" in result.stdout
    assert "RTE      accuracy" in result.stdout
    server.files["/CoLA.zip"] = content
    assert "CoLA seed 1" in run_glue(sweep, *arguments).stdout
    shutil.rmtree(sweep / "glue" / "CoLA")
