"""ELECTRA in one file: pre-train a language model by teaching it to spot replaced words.

BERT hides 15 % of the words and learns to guess them: 85 % of each sentence teach it nothing.
ELECTRA (Clark et al., ICLR 2020, https://arxiv.org/abs/2003.10555) trains two networks instead. A
small *generator*, a BERT itself, fills the hidden places with words it finds plausible. The
*discriminator* reads the filled-in sentence and says of EVERY token whether it is the original or
a replacement. It learns from all tokens, so the same quality costs about a quarter of the compute.

    original     the    chef    cooked    the    meal
                          |                |
    masked       the   [MASK]   cooked   [MASK]  meal      15 % of the tokens are chosen
                          |                |
                      generator: a small masked language model
                          |                |                one sample for each chosen token
    corrupted    the    chef    cooked     a     meal      written over the original
                  |       |        |       |      |
                      discriminator: replaced or original?
                  |       |        |       |      |
    labels        0       0        0       1      0        a lucky guess counts as original

    loss = cross-entropy of the generator + 50 x binary cross-entropy of the discriminator

(85 % of the chosen tokens are hidden behind [MASK]; the others are shown, and sampled as well.)

The generator is thrown away afterwards. The discriminator gets fine-tuned (train_glue.py): its
verdicts give way to one new layer that reads the vector of the first token, [CLS], and says what a
task asks for; that layer and all below it are trained together for a few epochs.

Run it:

    python electra.py                              # a tiny ELECTRA on text this machine already has
    python electra.py --data owt.txt               # ELECTRA-Small by the paper's recipe
    python electra.py --detect "the chef ate the sky"    # which tokens look replaced?

Part I is the method, sections 2 to 4; it needs torch alone. Part II is the program round it.
Shapes: B batch, L length, E embedding width, D hidden width, H heads, V vocabulary, K predictions.
"""

import argparse
import contextlib
import csv
import ctypes
import datetime
import io
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
import timeit
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

import data
from data import InputError

# ======== Part I: the method ====================================================================
# ---- 2. Configuration. Every `option` below is also a command-line option of the same name.


def option(default: Any, help: str, legal: str | tuple[str, ...] = "") -> Any:
    """A field with its help and what it may be: an interval such as "(0, 1]", or some words."""
    return field(default=default, metadata={"help": help, "legal": legal})


@dataclass
class ElectraConfig:
    """The model: both networks and the loss that ties them (paper, table 6). Defaults: small."""

    vocab_size: int = option(30522, "V, entries of the vocabulary", "[10, 1000000]")
    embedding_size: int = option(128, "E, width of the embeddings of both networks", "[2, 16384]")
    hidden_size: int = option(256, "D, width of the discriminator", "[1, 16384]")
    num_layers: int = option(12, "layers of each network", "[1, 1000]")
    num_heads: int = option(4, "H, attention heads of the discriminator", "[1, 1024]")
    intermediate_size: int = option(1024, "width of its feed-forward layers", "[1, 65536]")
    generator_size: float = option(1 / 4, "width of the generator / hidden_size", "(0, 4]")
    objective: str = option("electra", "what is learned", (
        "electra", "mlm", "electra_15", "replace_mlm", "all_tokens_mlm", "two_stage",
        "adversarial"))  # fmt: skip
    embedding_sharing: str = option(
        "shared", "between the networks", ("shared", "separate", "all", "gdes"))  # fmt: skip
    share_layers: bool = option(False, "one set of weights for all layers, as in ALBERT")
    max_positions: int = option(512, "longest sequence the model can read", "[8, 65536]")
    dropout: float = option(0.1, "dropout probability, everywhere", "[0, 1)")
    init_std: float = option(0.02, "standard deviation of the initial weights", "[0, 1]")
    embedding_std: float = option(0.02, "standard deviation of the initial embeddings", "[0, 1]")
    sinusoids: bool = option(False, "start the position embeddings as sinusoids, not at random")
    mask_prob: float = option(0.15, "share of the tokens that the generator predicts", "(0, 1)")
    mask_share: float = option(0.85, "share of those that it sees as [MASK]", "[0, 1]")
    temperature: float = option(1.0, "of the generator's samples; higher: wilder", "[0.01, 100]")
    discriminator_weight: float = option(50.0, "lambda, of the discriminator's loss", "[0, 1e6]")
    # The special tokens are where the tokenizer puts them. These are BERT's ids.
    pad_id: int = 0
    cls_id: int = 101
    sep_id: int = 102
    mask_id: int = 103


@dataclass
class RunConfig:
    """The run: what to train on and how. Defaults: small (paper, table 6)."""

    data: str = option("", "UTF-8 text; a blank line ends a document (default: a built-in corpus)")
    out: str = option("out", "folder of the run; the same command again continues it")
    tokens: str = option("", "folder for the token files (default: <data>.tokens)")
    size: str = option("small", "tiny, small, base or large: sets all else (no --data: tiny)")
    tokenizer: str = option("wordpiece", "wordpiece, wordpiece_cased or bpe, trained; or a file")
    vocab: str = option("", "a WordPiece vocabulary to use instead, such as BERT's vocab.txt")
    init_from: str = option("", "start from the networks in this Hugging Face folder")
    seed: int = option(0, "of the weights, the data's order, masks and samples", "[0, 4294967295]")
    length: int = option(128, "L, tokens of a training sequence", "[8, 65536]")
    batch_size: int = option(128, "sequences the optimiser sees in one step", "[1, 1000000]")
    micro_batch: int = option(0, "of these, fit in memory at once; 0: all", "[0, 1000000]")
    steps: int = option(1_000_000, "optimiser steps of the whole run", "[1, 1e9]")
    warmup_steps: int = option(10_000, "steps over which the learning rate rises", "[0, 1e9]")
    learning_rate: float = option(5e-4, "peak learning rate", "[0, 1]")
    weight_decay: float = option(0.01, "weight decay of matrices and embeddings", "[0, 1]")
    unigram_bias: bool = option(False, "start the generator's output bias at the token frequencies")
    precision: str = option("auto", "of the arithmetic", ("auto", "fp32", "bf16", "fp16"))
    compile: bool = option(False, "torch.compile the model: minutes to start, faster on a GPU")
    device: str = option("auto", "auto, cuda, mps or cpu")
    log_every: int = option(50, "steps between two rows of metrics.csv", "[1, 1e9]")
    eval_every: int = option(5000, "steps between two evaluations on held-out text", "[1, 1e9]")
    eval_sequences: int = option(512, "sequences that an evaluation reads", "[1, 1000000]")
    save_minutes: float = option(10.0, "minutes between two checkpoints", "[0, 1e6]")
    profile: int = option(0, "only show where the time of this many steps goes", "[0, 1000]")


# A size is its model AND its recipe. small, base and large are the paper's (table 6); tiny is ours,
# made for two CPU cores, with one encoder: two detect next to nothing at its learning rate, but do
# at 3e-4; at a loss weight of 50 the generator kept to counting words (trials of one seed each).
SIZES = {
    "tiny": (
        ElectraConfig(
            vocab_size=8192, embedding_size=128, hidden_size=192, num_layers=3, num_heads=3,
            intermediate_size=768, generator_size=1.0, embedding_sharing="all", max_positions=128,
            dropout=0.0, init_std=0.06, embedding_std=0.05, sinusoids=True, mask_prob=0.25,
            discriminator_weight=10.0),
        RunConfig(
            size="tiny", length=128, batch_size=16, steps=17_000, warmup_steps=500,
            learning_rate=1e-3, unigram_bias=True, eval_every=1000),
    ),
    "small": (
        ElectraConfig(
            embedding_size=128, hidden_size=256, num_layers=12, num_heads=4,
            intermediate_size=1024, generator_size=1 / 4, mask_prob=0.15),
        RunConfig(
            size="small", length=128, batch_size=128, steps=1_000_000, warmup_steps=10_000,
            learning_rate=5e-4),
    ),
    "base": (
        ElectraConfig(
            embedding_size=768, hidden_size=768, num_layers=12, num_heads=12,
            intermediate_size=3072, generator_size=1 / 3, mask_prob=0.15),
        RunConfig(
            size="base", length=512, batch_size=256, steps=766_000, warmup_steps=10_000,
            learning_rate=2e-4),
    ),
    "large": (
        ElectraConfig(
            embedding_size=1024, hidden_size=1024, num_layers=24, num_heads=16,
            intermediate_size=4096, generator_size=1 / 4, mask_prob=0.25),
        RunConfig(
            size="large", length=512, batch_size=2048, steps=400_000, warmup_steps=10_000,
            learning_rate=2e-4),
    ),
}  # fmt: skip


def generator_config(config: ElectraConfig) -> ElectraConfig:
    """The generator is the discriminator made narrower; depth and embeddings stay (section 3.2)."""
    if config.generator_size == 1:
        return config
    width, inner = config.hidden_size, config.intermediate_size
    width, inner = round(width * config.generator_size), round(inner * config.generator_size)
    heads = max(1, width // 64)
    return replace(config, hidden_size=width, intermediate_size=inner, num_heads=heads)


# ---- 3. The transformer encoder: BERT's, with LayerNorm after each residual sum. ---------------
MaybeTensor = Tensor | None  # an argument that may be left out


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """F.dropout; on a CPU a faster one, `byte_dropout` at the end of section 4."""
    if training and p > 0 and x.device.type in SLOW_DRAWS:
        return byte_dropout(x, p)
    return F.dropout(x, p, training)


class Embeddings(nn.Module):
    """Word + position + token type: ids (B, L) -> (B, L, E).

    With `base`, the words of other embeddings, ours are what is added to those ("gdes").
    """

    def __init__(self, config: ElectraConfig, base: nn.Embedding | None = None) -> None:
        super().__init__()
        self.base = base
        self.word = nn.Embedding(config.vocab_size, config.embedding_size)
        self.position = nn.Embedding(config.max_positions, config.embedding_size)
        self.token_type = nn.Embedding(2, config.embedding_size)
        self.norm = nn.LayerNorm(config.embedding_size, eps=1e-12)
        self.p = config.dropout

    def words(self) -> Tensor:
        """The vectors of all words (V, E)."""
        if self.base is None:
            return self.word.weight
        return self.base.weight.detach() + self.word.weight  # our loss leaves the base alone

    def forward(self, ids: Tensor, token_type_ids: MaybeTensor = None) -> Tensor:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(ids)
        if ids.shape[1] > len(self.position.weight):
            raise ValueError(f"{ids.shape[1]} tokens, but {len(self.position.weight)} positions")
        try:
            x = F.embedding(ids, self.words()) + self.position.weight[: ids.shape[1]]
        except IndexError:  # raised by CPUs alone
            raise ValueError(f"id {ids.max()}, but {len(self.word.weight)} words") from None
        return dropout(self.norm(x + self.token_type(token_type_ids)), self.p, self.training)


class SelfAttention(nn.Module):
    """Every token looks at every other: (B, L, D) -> (B, L, D)."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.p = config.dropout

    def forward(self, x: Tensor, attention_mask: MaybeTensor) -> Tensor:
        B, L, D = x.shape
        x = self.query_key_value(x).view(B, L, 3, self.num_heads, D // self.num_heads)
        q, k, v = x.permute(2, 0, 3, 1, 4)  # (B, L, 3, H, D/H) -> three of (B, H, L, D/H)
        bias = None
        if attention_mask is not None:
            padding = attention_mask[:, None, None, :] == 0  # (B, 1, 1, L): for all H and queries
            bias = padding.to(q.dtype) * torch.finfo(q.dtype).min
        if x.device.type in FUSED_ATTENTION:  # the same formula in one kernel
            p = self.p if self.training else 0.0
            context = F.scaled_dot_product_attention(q, k, v, bias, p)
        else:
            scores = (q / math.sqrt(D // self.num_heads)) @ k.transpose(-2, -1)  # (B, H, L, L)
            scores = scores if bias is None else scores + bias
            context = dropout(scores.softmax(dim=-1), self.p, self.training) @ v  # (B, H, L, D/H)
        return self.output(context.transpose(1, 2).reshape(B, L, D))


class Block(nn.Module):
    """One layer: attention, then a feed-forward network, each added to its input and normalised."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.p = config.dropout

    def forward(self, x: Tensor, attention_mask: MaybeTensor) -> Tensor:
        y = self.attention(x, attention_mask)
        x = self.attention_norm(x + dropout(y, self.p, self.training))
        y = self.output(F.gelu(self.intermediate(x)))
        return self.output_norm(x + dropout(y, self.p, self.training))


class Encoder(nn.Module):
    """Embeddings and a stack of blocks: ids (B, L) -> contextual vectors (B, L, D)."""

    def __init__(self, config: ElectraConfig, embeddings: Embeddings) -> None:
        super().__init__()
        self.embeddings = embeddings
        E, D = config.embedding_size, config.hidden_size
        self.project = nn.Linear(E, D) if E != D else None
        layers = [Block(config) for _ in range(config.num_layers)]
        # ALBERT: one layer in the place of all. Parameters shrink n-fold, the work stays.
        self.layers = nn.ModuleList(layers[:1] * len(layers) if config.share_layers else layers)

    def forward(
        self, ids: Tensor, attention_mask: MaybeTensor = None, token_type_ids: MaybeTensor = None
    ) -> Tensor:
        x = self.embeddings(ids, token_type_ids)
        if self.project is not None:
            x = self.project(x)  # (B, L, E) -> (B, L, D)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


# ---- 4. ELECTRA: mask, predict, sample, detect (section 2 and figure 2 of the paper). ----------
class Masked(NamedTuple):
    """What mask_tokens chose. K is the same for all rows; `chosen` says which of the K count."""

    ids: Tensor  # (B, L), what the generator sees
    positions: Tensor  # (B, K), distinct within a row
    chosen: Tensor  # (B, K), bool


def max_predictions(config: ElectraConfig, length: int) -> int:
    """K, the most predictions in a row of L tokens, as the official code bounds them."""
    return max(1, min(int((config.mask_prob + 0.005) * length), round(config.mask_prob * length)))


def real_tokens(ids: Tensor, attention_mask: MaybeTensor) -> Tensor:
    """Which of ids (B, L) are no padding: (B, L), bool."""
    return torch.ones_like(ids).bool() if attention_mask is None else attention_mask != 0


def mask_tokens(ids: Tensor, config: ElectraConfig, attention_mask: MaybeTensor = None) -> Masked:
    """Choose about `mask_prob` of each row's tokens and hide most of them behind [MASK].

    A row of n tokens gets round(mask_prob * n) predictions: at least one, at most K, and no more
    than it has tokens that may be chosen. n counts [CLS] and [SEP], as in the official code, but
    they are never chosen. 85 % of the chosen become [MASK]; the others keep their token but are
    predicted all the same, as in the official code (the paper masks all).
    """
    B, L = ids.shape
    K = max_predictions(config, L)
    legal = real_tokens(ids, attention_mask)
    n = legal.sum(1)  # (B,), before the special tokens are struck out
    for special in (config.pad_id, config.cls_id, config.sep_id, config.mask_id):
        legal = legal & (ids != special)
    wanted = (config.mask_prob * n).round().clamp(min=1, max=K).minimum(legal.sum(1))  # (B,)
    # The K largest of L random numbers are K distinct positions; illegal ones come last.
    order = torch.rand(B, L, device=ids.device).masked_fill(~legal, -1.0)
    positions = order.topk(K, dim=1).indices
    chosen = torch.arange(K, device=ids.device) < wanted[:, None]
    hidden = chosen & (torch.rand(B, K, device=ids.device) < config.mask_share)
    shown = torch.where(hidden, config.mask_id, ids.gather(1, positions))
    return Masked(ids.scatter(1, positions, shown), positions, chosen)


def gumbel_sample(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """One sample from softmax(logits / temperature): (..., V) -> (...). Temperature 0: the largest.

    Adding Gumbel noise and taking the largest is sampling from the softmax (Gumbel 1954). The
    noise has to be float32: 16 bits cannot tell 30,522 tokens apart and favour the first ones.
    On a CPU `sample_by_sums`, at the end of this section, has the same law and is faster.
    """
    if temperature < 0:
        raise ValueError(f"temperature {temperature} is negative")
    if temperature == 0:
        return logits.argmax(dim=-1)
    if logits.device.type in SLOW_DRAWS:
        return sample_by_sums(logits, temperature)
    noise = torch.rand_like(logits, dtype=torch.float32).log_().neg_().log_().neg_()
    return noise.add_(logits, alpha=1 / temperature).argmax(dim=-1)


class Generator(nn.Module):
    """A small masked language model (equation 1)."""

    def __init__(self, config: ElectraConfig, embeddings: Embeddings) -> None:
        super().__init__()
        self.encoder = Encoder(config, embeddings)
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.norm = nn.LayerNorm(config.embedding_size, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(
        self, ids: Tensor, attention_mask: MaybeTensor = None, token_type_ids: MaybeTensor = None,
        positions: MaybeTensor = None,
    ) -> Tensor:  # fmt: skip
        """Logits over the vocabulary at `positions` (B, K), or at all: (B, L) -> (B, K or L, V)."""
        x = self.encoder(ids, attention_mask, token_type_ids)
        if positions is not None:  # the head costs V * E a token: only where it is asked for
            x = x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))  # (B, K, D)
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.dense(x)))  # (B, K, D) -> (B, K, E)
        return F.linear(x, self.encoder.embeddings.words(), self.bias)  # (B, K, V)


class Discriminator(nn.Module):
    """Tells replaced tokens from original ones (equation 2)."""

    def __init__(self, config: ElectraConfig, embeddings: Embeddings) -> None:
        super().__init__()
        self.encoder = Encoder(config, embeddings)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.prediction = nn.Linear(config.hidden_size, 1)

    def forward(
        self, ids: Tensor, attention_mask: MaybeTensor = None, token_type_ids: MaybeTensor = None
    ) -> Tensor:
        """Logits of "this token was replaced": (B, L) -> (B, L)."""
        return self.head(self.encoder(ids, attention_mask, token_type_ids))

    def head(self, x: Tensor) -> Tensor:
        return self.prediction(F.gelu(self.dense(x))).squeeze(-1)  # (B, L, D) -> (B, L)


class ElectraOutput(NamedTuple):
    """Everything one step computes, for the loss and for looking at it."""

    loss: Tensor  # (), generator_loss + discriminator_weight * discriminator_loss
    generator_loss: Tensor  # (), nats per chosen position
    discriminator_loss: Tensor  # (), nats per token
    masked: Masked
    corrupted_ids: Tensor  # (B, L), what the discriminator sees
    labels: Tensor  # (B, L), bool: replaced?
    generator_logits: Tensor  # (B, K, V), at masked.positions
    discriminator_logits: Tensor  # (B, L)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where mask is true; 0, not NaN, where it is nowhere true."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of each target: (..., V) and (...) -> (...), in float32."""
    logits = logits.float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Nats of each label: (...) and (...) -> (...), in float32."""
    return F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")


def sinusoids(config: ElectraConfig) -> Tensor:
    """Position embeddings (max_positions, E) of wavelengths 2.5 to 250, to learn on from there.

    One rotation leads from each position to the next: attention to neighbours is learned once.
    """
    frequency = 2 * math.pi / 2.5 * 100 ** -torch.linspace(0, 1, config.embedding_size // 2)
    angle = torch.arange(config.max_positions)[:, None] * frequency
    return 2 * config.embedding_std * torch.cat([angle.sin(), angle.cos()], dim=1)


class Electra(nn.Module):
    """Generator and discriminator, trained together (equation 3).

    What they share (section 3.2; table 1), by config.embedding_sharing:

        shared      the embeddings. The generator learns about all tokens of its softmax at once,
                    the discriminator only about those that it sees.
        separate    nothing
        all         embeddings and encoder; only the heads are two. Needs generator_size 1.
        gdes        The discriminator reads the generator's words and adds its own difference to
                    them; its loss trains that difference alone (DeBERTaV3).
    """

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.config = config
        sharing = config.embedding_sharing
        generator_embeddings = discriminator_embeddings = Embeddings(config)  # one object
        if sharing in ("separate", "gdes"):
            base = generator_embeddings.word if sharing == "gdes" else None
            discriminator_embeddings = Embeddings(config, base)
        self.generator = Generator(generator_config(config), generator_embeddings)
        self.discriminator = Discriminator(config, discriminator_embeddings)
        if sharing == "all":
            self.generator.encoder = self.discriminator.encoder
        if config.objective in ("replace_mlm", "all_tokens_mlm"):  # the main network names tokens
            self.corrector = Generator(config, discriminator_embeddings)
            self.corrector.encoder = self.discriminator.encoder
        self.second_stage = False  # of the objective two_stage
        self.apply(self.initialize)
        for encoder in (self.generator.encoder, self.discriminator.encoder):
            if encoder.project is not None:
                nn.init.xavier_uniform_(encoder.project.weight)
            if encoder.embeddings.base is not None:
                nn.init.zeros_(encoder.embeddings.word.weight)
            if config.sinusoids:
                encoder.embeddings.position.weight.data = sinusoids(config)
        nn.init.xavier_uniform_(self.discriminator.prediction.weight)

    def initialize(self, module: nn.Module) -> None:
        embedding = isinstance(module, nn.Embedding)
        std = self.config.embedding_std if embedding else self.config.init_std
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(
        self, ids: Tensor, attention_mask: MaybeTensor = None, token_type_ids: MaybeTensor = None
    ) -> ElectraOutput:
        """One step of figure 2 on ids (B, L); attention_mask (B, L) is 0 at padding."""
        config = self.config
        # Mask.
        masked = mask_tokens(ids, config, attention_mask)
        # Predict: the generator's loss is over the chosen positions.
        logits = self.generator(masked.ids, attention_mask, token_type_ids, masked.positions)
        original = ids.gather(1, masked.positions)  # (B, K)
        generator_loss = masked_mean(cross_entropy(logits, original), masked.chosen)
        # Sample: no gradient flows through it (section 2: it would have to pass a discrete choice).
        sampled = gumbel_sample(logits.detach(), config.temperature)  # (B, K)
        sampled = torch.where(masked.chosen, sampled, original)
        corrupted_ids = ids.scatter(1, masked.positions, sampled)
        labels = corrupted_ids != ids
        if config.objective != "electra":  # what the paper compares it with: section 5
            losses = generator_loss, generator_loss, torch.zeros_like(generator_loss)
            no_scores = torch.zeros_like(ids, dtype=torch.float32)
            out = ElectraOutput(*losses, masked, corrupted_ids, labels, logits, no_scores)
            return OBJECTIVES[config.objective](self, out, ids, attention_mask, token_type_ids)
        # Detect: the discriminator's loss is over all tokens.
        scores = self.discriminator(corrupted_ids, attention_mask, token_type_ids)
        nats = binary_cross_entropy(scores, labels)  # (B, L)
        discriminator_loss = masked_mean(nats, real_tokens(ids, attention_mask))
        loss = generator_loss + config.discriminator_weight * discriminator_loss
        return ElectraOutput(
            loss, generator_loss, discriminator_loss, masked, corrupted_ids, labels, logits, scores
        )


# What a CPU does faster. It draws random numbers one by one: the fewer, the better. On a GPU
# attention is faster in one kernel; a CPU's kernel for it has a slower backward pass.
SLOW_DRAWS, FUSED_ATTENTION = ("cpu",), ("cuda",)


def byte_dropout(x: Tensor, p: float) -> Tensor:
    """Dropout from one random byte per element: p becomes a multiple of 1/256.

    With a Bernoulli draw per element a step of small takes a third longer (Zen 4 and 5).
    """
    dropped = round(256 * p)
    eights = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    draws = eights.view(torch.uint8)[: x.numel()].view(x.shape)
    return x * draws.ge_(dropped).to(x.dtype).mul_(256 / (256 - dropped))


def sample_by_sums(logits: Tensor, temperature: float) -> Tensor:
    """A sample by two draws, of 64 tokens and of one among these: (..., V) -> (...).

    V draws and logarithms less: with them a step of tiny takes a tenth longer (Zen 4 and 5).
    """
    V = logits.size(-1)
    logits = F.pad(logits, (0, -V % 64), value=-math.inf)
    logits = logits if temperature == 1 else logits.float() / temperature
    p = logits.softmax(dim=-1, dtype=torch.float32).unflatten(-1, (-1, 64))  # (..., V / 64, 64)
    block = draw(p.sum(dim=-1))
    token = draw(p.gather(-2, block[..., None, None].expand(*block.shape, 1, 64)).squeeze(-2))
    return (64 * block + token).clamp(max=V - 1)


def draw(p: Tensor) -> Tensor:
    """The index at which the running sum of p (..., n) passes a random number: (...)."""
    sums = p.cumsum(dim=-1)
    at = (1 - torch.rand_like(sums[..., :1])) * sums[..., -1:]  # > 0: nothing with p = 0
    return torch.searchsorted(sums, at).squeeze(-1).clamp(max=sums.size(-1) - 1)  # NaN: the last


# ======== Part II: the program ==================================================================
# ---- 5. The paper's other objectives (sections 3.3 and 3.4, appendix F). -----------------------
# Each gets what the generator has made of a batch, and returns it with the loss of a main network
# that is asked something else: "discriminator_loss" is the loss of that network. `inputs` are the
# attention_mask and the token_type_ids.
def mlm(model: Electra, out: ElectraOutput, *inputs: MaybeTensor) -> ElectraOutput:
    """BERT: the generator, in full size, is the main network and all there is."""
    return out


def electra_15(
    model: Electra, out: ElectraOutput, ids: Tensor, *inputs: MaybeTensor
) -> ElectraOutput:
    """ELECTRA 15%: detect, but learn from the chosen tokens only."""
    scores = model.discriminator(out.corrupted_ids, *inputs)
    at = out.masked.positions
    nats = binary_cross_entropy(scores.gather(1, at), out.labels.gather(1, at))  # (B, K)
    loss = masked_mean(nats, out.masked.chosen)
    total = out.generator_loss + model.config.discriminator_weight * loss
    return out._replace(loss=total, discriminator_loss=loss, discriminator_logits=scores)


def replace_mlm(
    model: Electra, out: ElectraOutput, ids: Tensor, *inputs: MaybeTensor
) -> ElectraOutput:
    """Replace MLM: BERT, with samples of the generator in the place of [MASK]."""
    at = out.masked.positions
    logits = model.corrector(out.corrupted_ids, *inputs, at)  # (B, K, V)
    loss = masked_mean(cross_entropy(logits, ids.gather(1, at)), out.masked.chosen)
    return out._replace(loss=out.generator_loss + loss, discriminator_loss=loss)


def all_tokens_mlm(
    model: Electra, out: ElectraOutput, ids: Tensor, *inputs: MaybeTensor
) -> ElectraOutput:
    """All-Tokens MLM: predict every token, P = D [copied] + (1 - D) softmax, D a sigmoid."""
    x = model.discriminator.encoder(out.corrupted_ids, *inputs)
    scores = model.discriminator.head(x).float()  # (B, L), the logit of 1 - D
    copied = F.logsigmoid(-scores).masked_fill(out.labels, -math.inf)
    predicted = F.logsigmoid(scores) - cross_entropy(model.corrector.head(x), ids)
    nats = -torch.logaddexp(copied, predicted)
    loss = masked_mean(nats, real_tokens(ids, inputs[0]))
    total = out.generator_loss + loss
    return out._replace(loss=total, discriminator_loss=loss, discriminator_logits=scores)


def two_stage(
    model: Electra, out: ElectraOutput, ids: Tensor, *inputs: MaybeTensor
) -> ElectraOutput:
    """The generator alone; then the discriminator alone, which starts from its weights."""
    if not model.second_stage:
        return out
    scores = model.discriminator(out.corrupted_ids, *inputs)
    nats = binary_cross_entropy(scores, out.labels)
    loss = masked_mean(nats, real_tokens(ids, inputs[0]))
    total = model.config.discriminator_weight * loss
    return out._replace(loss=total, discriminator_loss=loss, discriminator_logits=scores)


def adversarial(
    model: Electra, out: ElectraOutput, ids: Tensor, *inputs: MaybeTensor
) -> ElectraOutput:
    """The generator learns to fool the discriminator, by REINFORCE, instead of to be right."""
    scores = model.discriminator(out.corrupted_ids, *inputs)
    nats = binary_cross_entropy(scores, out.labels)  # (B, L)
    loss = masked_mean(nats, real_tokens(ids, inputs[0]))
    # A sample's reward is the nats that it costs the discriminator, less their mean. The expected
    # reward rises along reward x gradient of log p(sample). We descend, and cross_entropy is
    # -log p: the two signs cancel.
    at, chosen = out.masked.positions, out.masked.chosen
    reward = nats.detach().gather(1, at)
    reward = reward - masked_mean(reward, chosen)
    logits = out.generator_logits.float() / model.config.temperature  # of what was sampled from
    minus_log_p = cross_entropy(logits, out.corrupted_ids.gather(1, at))
    total = masked_mean(reward * minus_log_p, chosen) + model.config.discriminator_weight * loss
    return out._replace(loss=total, discriminator_loss=loss, discriminator_logits=scores)


OBJECTIVES = {
    "mlm": mlm, "electra_15": electra_15, "replace_mlm": replace_mlm, "two_stage": two_stage,
    "all_tokens_mlm": all_tokens_mlm, "adversarial": adversarial,
}  # fmt: skip


def enter_stage(model: Electra, step: int, steps: int) -> None:
    """two_stage: the discriminator has the second half of a run, and the generator's weights."""
    model.second_stage = model.config.objective == "two_stage" and step > steps // 2
    if model.second_stage and step == steps // 2 + 1:
        model.discriminator.encoder.load_state_dict(model.generator.encoder.state_dict())


# ---- 6. Optimiser, schedule and one step (appendix A). -----------------------------------------
def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW; biases and LayerNorms, the parameters with one dimension, do not decay."""
    parameters = list(model.parameters())  # an iterator would leave the second group empty
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cpu", "cuda")  # one pass over them, not a dozen
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-6, fused=fused)


def learning_rate(step: int, run: RunConfig) -> float:
    """That of step 1 ... run.steps; as in the official code it decays during warm-up, too.

    That code counts steps from 0: there the first has rate 0, here the last. The others agree.
    """
    return run.learning_rate * (1 - step / run.steps) * min(1.0, step / max(1, run.warmup_steps))


def train_step(
    model: nn.Module, batches: list[tuple[int, Tensor, Tensor]], optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler, autocast: torch.autocast, rate: float,
) -> Tensor:  # fmt: skip
    """One step on micro-batches (seed, ids, token_type_ids): both losses, gradient norm (3,)."""
    losses = torch.zeros(3, device=batches[0][1].device)
    for number, (seed, ids, token_type_ids) in enumerate(batches, 1):
        torch.manual_seed(seed)  # everything random follows from it
        # Several processes exchange their gradients once a step: forward has to know it, too.
        model.require_backward_grad_sync = number == len(batches)
        with autocast:
            out = model(ids, token_type_ids=token_type_ids)
        scaler.scale(out.loss / len(batches)).backward()  # fp16 underflows without a scale
        both = torch.stack([out.generator_loss, out.discriminator_loss])
        losses[:2] += both.detach() / len(batches)
    scaler.unscale_(optimizer)  # so that the gradient itself is clipped
    losses[2] = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return losses


# ---- 7. Evaluation on held-out text, and the lesson. -------------------------------------------
VALID_METRICS = [
    "valid_generator_loss", "valid_generator_accuracy", "valid_sampled_accuracy",
    "valid_discriminator_loss", "valid_accuracy", "valid_precision", "valid_recall", "valid_auc",
    "valid_replaced",
]  # fmt: skip


def mean_ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal numbers share the mean of theirs."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that a replaced token scores above an original one; ties, and no pairs, count half."""
    n = int(labels.sum())  # replaced tokens
    pairs, above = n * (len(labels) - n), mean_ranks(scores)[labels].sum() - n * (n + 1) / 2
    return float(above / pairs) if pairs else 0.5


@torch.no_grad()
def evaluate(
    model: Electra, batches: list[list[Tensor]], autocast: torch.autocast
) -> dict[str, float]:
    """Losses and accuracies without dropout, with the same masks and samples every time.

    "Always original" has an accuracy of 0.86 or more at 15 %, since few tokens are replaced: read
    it with precision and recall, which are 0 then, and the AUC: 0.5 is chance, 0.9 is good.
    """
    model.eval()
    sums, scores, labels = torch.zeros(4, dtype=torch.float64), [], []
    for number, (ids, token_type_ids) in enumerate(batches):
        torch.manual_seed(number)
        with autocast:
            out = model(ids, token_type_ids=token_type_ids)
        positions, chosen = out.masked.positions, out.masked.chosen
        original = ids.gather(1, positions)[chosen]
        right = (out.generator_logits[chosen].argmax(-1) == original).sum()
        lucky = (~out.labels.gather(1, positions)[chosen]).sum()
        sums += torch.tensor([out.generator_loss * len(original), right, lucky, len(original)])
        scores.append(out.discriminator_logits.float().flatten().cpu())
        labels.append(out.labels.flatten().cpu())
    model.train()
    generator = (sums[:3] / sums[3].clamp(min=1)).tolist()  # loss, accuracy, accuracy of samples
    score, label = torch.cat(scores), torch.cat(labels)
    verdict = score > 0
    hits = int((verdict & label).sum())
    loss = float(binary_cross_entropy(score, label).mean())
    accuracy = float((verdict == label).float().mean())
    precision, recall = hits / max(1, int(verdict.sum())), hits / max(1, int(label.sum()))
    auc = area_under_curve(score.numpy(), label.numpy())
    values = (*generator, loss, accuracy, precision, recall, auc, float(label.float().mean()))
    return dict(zip(VALID_METRICS, values, strict=True))


def detects_nothing(result: dict[str, float]) -> bool:
    """Whether an evaluation shows a discriminator that learned nothing. Early on that is normal."""
    return result["valid_recall"] == 0 or result["valid_auc"] < 0.55


def collapse_advice(config: ElectraConfig) -> str:
    """A line for a discriminator that has told nothing apart in four evaluations in a row."""
    if config.generator_size > 1 / 4 and config.embedding_sharing != "all":
        cause, remedy = "the generator is too large for it", "--generator_size 0.25"
    else:  # measured: assets/study.md, "How large a generator?"
        cause, remedy = "it has read too little yet", "more --steps"
        if config.embedding_sharing != "all":
            remedy += ", or one encoder for both: --generator_size 1 --embedding_sharing all"
    return (
        f"The discriminator tells nothing apart, four evaluations in a row: as a rule {cause}, or "
        f"the learning rate is too high. Try {remedy}; or half the --learning_rate, in another "
        "--out.\n"
    )


def flops_per_token(config: ElectraConfig, length: int) -> tuple[float, float]:
    """FLOPs of a training step per token: those of the generator, those of the main network.

    The rule: two for each multiply-add of a matrix product, forward once and backward twice; all
    else is small, and a looked-up embedding costs nothing.
    """

    def encoder(c: ElectraConfig) -> int:
        projection = c.embedding_size * c.hidden_size * (c.embedding_size != c.hidden_size)
        layer = 4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size
        return projection + c.num_layers * (layer + 2 * length * c.hidden_size)

    def names_tokens(c: ElectraConfig, share: float) -> float:
        return share * c.embedding_size * (c.hidden_size + c.vocab_size)

    chosen = max_predictions(config, length) / length
    generator = generator_config(config)
    first = 6 * (encoder(generator) + names_tokens(generator, chosen))
    detects = config.hidden_size**2 + config.hidden_size
    main = {
        "mlm": 0.0,
        "replace_mlm": encoder(config) + names_tokens(config, chosen),
        "all_tokens_mlm": encoder(config) + names_tokens(config, 1.0) + detects,
    }.get(config.objective, encoder(config) + detects)
    if config.objective == "two_stage":  # means: a half each; the generator then goes forward only
        return first * (1 + 1 / 3) / 2, 6 * main / 2
    return first, 6 * main


def show_result(result: dict[str, float]) -> str:
    """An evaluation in one line, less the verdicts where none is given (objective mlm)."""
    shown = [f"{name.removeprefix('valid_')} {value:.3f}" for name, value in result.items()]
    return ", ".join(shown[:3] if result["valid_auc"] == 0.5 else shown)  # 0.5: all scores are 0


def show_tokens(
    tokenizer: Tokenizer, rows: list[tuple[str, list[int], list[bool]]], chances: list[float]
) -> str:
    """Rows (name, ids, which to colour) of tokens, and the discriminator's verdicts, if any."""
    cells = [
        (name, [tokenizer.id_to_token(i) or f"[{i}]" for i in ids], marks)
        for name, ids, marks in rows
    ]
    if chances:
        cells.append(("replaced?", [f"{p:.0%}" for p in chances], [p > 0.5 for p in chances]))
    widths = [1 + max(map(len, column)) for column in zip(*(words for _, words, _ in cells))]
    total, room = sum(widths), max(9, shutil.get_terminal_size().columns - 11)
    room = min(room, total / math.ceil(total / room) + max(widths))  # blocks of similar width
    colours = sys.stdout.isatty() and not {"NO_COLOR"} & set(os.environ)
    colours = colours and os.environ.get("TERM") != "dumb"
    lines, start = [], 0
    while start < len(widths):
        end = start + 1
        while end < len(widths) and sum(widths[start : end + 1]) <= room:
            end += 1
        for name, words, marks in cells:
            line = f"{name:11}"
            for i in range(start, end):
                word = words[i].ljust(widths[i])
                line += f"\033[31m{word}\033[0m" if colours and marks[i] else word
            lines.append(line.rstrip())
        lines.append("")
        start = end
    return "\n".join(lines)


@torch.no_grad()
def show_lesson(model: Electra, tokenizer: Tokenizer, sentences: list[list[int]]) -> str:
    """What both networks make of held-out sentences: of the first, and of the one in which the
    discriminator's highest verdict is most sure and right. Fakes and verdicts are coloured.
    """
    model.eval()
    lessons = []  # (how sure it is of a fake, the sentence's rows)
    for sentence in sentences:
        ids = torch.tensor([[model.config.cls_id, *sentence, model.config.sep_id]])
        ids = ids.to(next(model.parameters()).device)
        torch.manual_seed(1)
        out = model(ids)
        versions = (("original", ids), ("masked", out.masked.ids), ("generator", out.corrupted_ids))
        rows = [(name, row[0].tolist(), (row[0] != ids[0]).tolist()) for name, row in versions]
        verdicts = out.discriminator_logits[0]
        sure, top = verdicts.sigmoid().max(0)
        chances = verdicts.sigmoid().tolist() if verdicts.any() else []
        found = float(sure) if chances and out.labels[0, top] else 0.0
        lessons.append((found, show_tokens(tokenizer, rows, chances)))
    model.train()
    first, best = lessons[0], max(lessons)
    return first[1] if best[0] == 0 or best is first else f"{first[1]}\n{best[1]}"


# ---- 8. Trained models: the folder of a run, and Hugging Face's. -------------------------------
# What our settings, and the parts of our networks, are called in `transformers`. There each of the
# two networks has a folder and a config.json of its own. * is query, key and value, # a number.
HUGGING_FACE = {
    "vocab_size": "vocab_size", "embedding_size": "embedding_size", "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size", "max_positions": "max_position_embeddings",
    "dropout": "hidden_dropout_prob",
    "encoder.embeddings.word": "electra.embeddings.word_embeddings",
    "encoder.embeddings.position": "electra.embeddings.position_embeddings",
    "encoder.embeddings.token_type": "electra.embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "electra.embeddings.LayerNorm",
    "encoder.project": "electra.embeddings_project",
    "encoder.layers.#.attention.query_key_value": "electra.encoder.layer.#.attention.self.*",
    "encoder.layers.#.attention.output": "electra.encoder.layer.#.attention.output.dense",
    "encoder.layers.#.attention_norm": "electra.encoder.layer.#.attention.output.LayerNorm",
    "encoder.layers.#.intermediate": "electra.encoder.layer.#.intermediate.dense",
    "encoder.layers.#.output": "electra.encoder.layer.#.output.dense",
    "encoder.layers.#.output_norm": "electra.encoder.layer.#.output.LayerNorm",
    "generator.dense": "generator_predictions.dense",
    "generator.norm": "generator_predictions.LayerNorm",
    "generator": "generator_lm_head",  # a bias; the matrix is that of the word embeddings
    "discriminator.dense": "discriminator_predictions.dense",
    "discriminator.prediction": "discriminator_predictions.dense_prediction",
}  # fmt: skip
# What is the same in every ELECTRA that we can be: another value is another architecture.
FIXED = {
    "model_type": "electra", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2,
    "position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False,
}  # fmt: skip
NETWORKS = {"generator": "ElectraForMaskedLM", "discriminator": "ElectraForPreTraining"}
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def hugging_face_names(network: str, name: str) -> list[str]:
    """Their name, or three, of the parameter `name` of our "generator" or "discriminator"."""
    part, _, kind = (name if name.startswith("encoder.") else f"{network}.{name}").rpartition(".")
    number = "".join(filter(str.isdigit, part))
    theirs = HUGGING_FACE[part.replace(f".{number}.", ".#.")].replace("#", number) + f".{kind}"
    if "*" not in theirs:
        return [theirs]
    return [theirs.replace("*", third) for third in ("query", "key", "value")]


def write_hugging_face(
    folder: Path, network: str, module: nn.Module, config: ElectraConfig, tokenizer: Tokenizer
) -> None:
    """A generator, discriminator or encoder as `from_pretrained` of `transformers` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = module.state_dict()
    if ours.pop("encoder.embeddings.base.weight", None) is not None:  # gdes: one table there
        ours["encoder.embeddings.word.weight"] = module.encoder.embeddings.words().detach()
    state: dict[str, Tensor] = {}
    for name, value in ours.items():
        names = hugging_face_names(network, name)
        pieces = (piece.cpu().clone() for piece in value.chunk(len(names)))
        state |= zip(names, pieces, strict=True)
    head = any(not name.startswith("electra.") for name in state)
    settings = FIXED | {"architectures": [NETWORKS[network] if head else "ElectraModel"]}
    settings |= {HUGGING_FACE[k]: v for k, v in asdict(config).items() if k in HUGGING_FACE}
    settings |= {"attention_probs_dropout_prob": config.dropout, "pad_token_id": config.pad_id}
    normalizer = json.loads(tokenizer.to_str())["normalizer"] or {}
    special = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    reads = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_positions}
    reads |= dict(zip(special, data.SPECIAL_TOKENS, strict=True))
    reads |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    reads |= {"do_lower_case": normalizer.get("lowercase", False)}
    reads |= {"strip_accents": normalizer.get("strip_accents")}
    try:
        from safetensors.torch import save  # if it is there: the format that they prefer
    except ImportError:
        content = io.BytesIO()
        torch.save(state, content)
        data.write_atomically(folder / "pytorch_model.bin", content.getvalue())
    else:
        data.write_atomically(folder / "model.safetensors", save(state, {"format": "pt"}))
    data.write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    data.write_atomically(folder / "tokenizer_config.json", json.dumps(reads, indent=1))
    data.write_atomically(folder / "config.json", json.dumps(settings, indent=1))


def read_settings(path: Path) -> dict[str, Any]:
    """Our settings from a config.json of theirs; InputError for what we cannot be."""
    settings = data.read_json(path)
    for key, value in FIXED.items():
        if settings.get(key, None if key == "model_type" else value) != value:
            raise InputError(
                f"{path}: {key} is {settings.get(key)}, not {value}. "
                "That is another architecture than ELECTRA's."
            )
    kinds = {f.name: type(f.default) for f in fields(ElectraConfig)}
    ours = {}
    for name in [name for name in kinds if name in HUGGING_FACE]:
        value = settings.get(HUGGING_FACE[name])
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or kinds[name](value) != value:
            raise InputError(f"{path}: {HUGGING_FACE[name]} is {value}; it has to be a number.")
        ours[name] = kinds[name](value)
    if ours["hidden_size"] % ours["num_heads"]:
        raise InputError(f"{path}: num_attention_heads do not divide hidden_size.")
    return ours


def read_weights(folder: Path) -> dict[str, Tensor]:
    """model.safetensors or pytorch_model.bin; names as in a network with a head."""
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise InputError(f"{folder}: no {' and no '.join(WEIGHTS)}.")
    try:
        if path.suffix == ".bin":
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load_file

            state = load_file(path)
    except ImportError:
        raise InputError(f"{path}: reading it takes: pip install safetensors") from None
    except Exception as error:  # noqa: BLE001, both raise many kinds for a damaged file
        raise InputError(f"{path}: cannot be read ({str(error)!r:.60}).") from None
    bare = ("embeddings.", "embeddings_project.", "encoder.")  # ElectraModel: without a head
    return {f"electra.{k}" if k.startswith(bare) else k: v for k, v in state.items()}


def read_hugging_face(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Our settings and their weights of the generator, the discriminator, or both.

    They are in the folder itself, or in folders of these names in it. An encoder without a head, or
    with the head of another task, is taken for a discriminator's.
    """
    inner = [folder / name for name in NETWORKS if (folder / name / "config.json").exists()]
    if not inner and (not (folder / "config.json").exists() or run_settings(folder)):
        raise InputError(
            f"{folder}: no trained model. Train one (python electra.py --out {folder}), or give "
            "the folder of an ELECTRA in Hugging Face's format."
        )
    networks = {}
    for place in inner or [folder]:
        settings, state = read_settings(place / "config.json"), read_weights(place)
        is_generator = any(name.startswith("generator_") for name in state)
        networks["generator" if is_generator else "discriminator"] = settings, state
    return networks


def hugging_face_config(folder: Path, config: ElectraConfig) -> ElectraConfig:
    """`config` with the shape of the networks in a folder."""
    shapes = {network: shape for network, (shape, _) in read_hugging_face(folder).items()}
    generator = shapes.get("generator", {})
    narrower = ("hidden_size", "num_heads", "intermediate_size")
    common = {name: value for name, value in generator.items() if name not in narrower}
    config = replace(config, **shapes.get("discriminator", common))
    if generator:
        config.generator_size = generator["hidden_size"] / config.hidden_size
        ours = asdict(generator_config(config)) | {"dropout": generator["dropout"]}
        if wrong := [f"{k} {v} (not {ours[k]})" for k, v in generator.items() if v != ours[k]]:
            raise InputError(f"{folder}: cannot use a generator of {', '.join(wrong)}.")
    return config


def load_hugging_face(folder: Path, model: Electra) -> list[str]:
    """Copy the weights of a folder into a model; a head without weights there is named.

    Returns the networks that the folder does not have.
    """
    networks = read_hugging_face(folder)
    for network, (_, theirs) in networks.items():
        ours = getattr(model, network).state_dict()
        ours.pop("encoder.embeddings.base.weight", None)
        names = {name: hugging_face_names(network, name) for name in ours}
        wanted = {name for each in names.values() for name in each}
        missing = wanted - set(theirs)
        if missing and missing != {name for name in wanted if not name.startswith("electra.")}:
            raise InputError(f"{folder}: the {network} has no weights {min(missing)}.")
        if missing:
            print(f"{folder}: the {network} has no head. Ours starts from random weights.")
        tied = {"generator_lm_head.weight", "electra.embeddings.position_ids"}
        if unused := sorted(set(theirs) - wanted - tied):
            print(f"{folder}: not used: {', '.join(unused)}")
        for name, each in names.items():
            if missing.isdisjoint(each):
                value = torch.cat([theirs[their] for their in each])
                if value.shape != ours[name].shape:
                    shapes = f"{list(value.shape)}, not {list(ours[name].shape)}"
                    raise InputError(f"{folder}: {each[0]} is {shapes} as config.json says.")
                ours[name].copy_(value)
    return [network for network in NETWORKS if network not in networks]


def find_tokenizer(folder: Path) -> Path:
    """tokenizer.json or vocab.txt of a Hugging Face folder or of its networks."""
    for place in (folder, folder / "discriminator", folder / "generator"):
        for name in ("tokenizer.json", "vocab.txt"):
            if (place / name).is_file():
                return place / name
    raise InputError(f"{folder}: no tokenizer.json and no vocab.txt. Name one with --tokenizer.")


def fit_to_tokenizer(config: ElectraConfig, tokenizer: Tokenizer, exact: bool) -> ElectraConfig:
    """`config` with the special tokens of a tokenizer, and exactly, or at least, its vocabulary."""
    entries = data.vocabulary_size(tokenizer)
    if not exact and entries > config.vocab_size:
        raise InputError(
            f"the tokenizer has {entries:,} entries, the model {config.vocab_size:,}: "
            "they do not belong together."
        )
    ids = [tokenizer.token_to_id(token) for token in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")]
    special = dict(zip(("pad_id", "cls_id", "sep_id", "mask_id"), ids, strict=True))
    return replace(config, vocab_size=entries if exact else config.vocab_size, **special)


def run_settings(folder: Path) -> dict[str, Any]:
    """config.json of a run's folder; nothing for one of Hugging Face's."""
    path = folder / "config.json"
    settings = data.read_json(path) if path.exists() else {}
    return {} if "model_type" in settings else settings


def load_run(folder: Path) -> tuple[Electra, Tokenizer, dict[str, Any]]:
    """Model, tokenizer and settings ("size", "length") of a run, or of a Hugging Face folder."""
    config = hugging_face_config(folder, ElectraConfig())
    tokenizer = data.load_tokenizer(find_tokenizer(folder))
    model = Electra(fit_to_tokenizer(config, tokenizer, exact=False))
    if "discriminator" in load_hugging_face(folder, model):
        raise InputError(f"{folder} is a generator: name the folder of its discriminator.")
    sizes = [size for size in SIZES if SIZES[size][0].hidden_size == config.hidden_size]
    settings = {"size": (sizes or ["small"])[0], "length": config.max_positions}
    return model.eval(), tokenizer, settings | run_settings(folder)


# ---- 9. The loop: step, log, evaluate, save, stop. ---------------------------------------------
METRICS = [
    "step", "tokens", "seconds", "learning_rate", "generator_loss", "discriminator_loss",
    *VALID_METRICS, "flops",
]  # fmt: skip
# What may change when a run goes on (a text may move, not change). Anything else: another run.
MAY_CHANGE = {
    "data", "tokens", "out", "steps", "micro_batch", "precision", "device", "log_every",
    "eval_every", "eval_sequences", "save_minutes", "compile", "profile",
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def keep_memory() -> None:
    """Ask the C library to keep the memory it frees instead of returning it to the system.

    Otherwise every step fetches its large tensors anew, page by page: a quarter of it (Zen 4).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for a large tensor
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: what is free stays


def choose_device(name: str) -> torch.device:
    if name == "auto":
        found = torch.accelerator.is_available()
        name = torch.accelerator.current_accelerator().type if found else "cpu"
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {name}: {str(error).splitlines()[0]}") from None


def choose_precision(name: str, device: torch.device) -> str:
    """bf16 where the hardware has it, fp16 on older GPUs; on a CPU what multiplies faster here."""
    if name != "auto" or device.type == "mps":
        return name.replace("auto", "fp32")
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    x = {p: torch.ones(512, 512, dtype=DTYPES[p]) for p in ("fp32", "bf16")}
    return min(x, key=lambda p: min(timeit.repeat(lambda: x[p] @ x[p], number=1, repeat=10)))


def join_processes() -> tuple[int, int]:
    """Rank of this process and how many there are, as torchrun says; 0 and 1 without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The others wait while the first prepares a text, for hours if it is a large one.
    torch.distributed.init_process_group(timeout=datetime.timedelta(days=1))
    rank = torch.distributed.get_rank()
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, one process speaks for all
    return rank, world


@contextlib.contextmanager
def first_process_first(rank: int, world: int) -> Iterator[None]:
    """What is in this block is done by the first process, and only then by the others."""
    if rank > 0:
        torch.distributed.barrier()
    yield
    if rank == 0 and world > 1:
        torch.distributed.barrier()


def open_run(out: Path, settings: dict[str, Any], tokenizer: str, write: bool) -> TextIO:
    """Make the run's folder, or check that it holds this very run; keep other processes out of it.

    They stay out until the file that is returned is closed. Only a process that writes locks.
    """
    if (out / "config.json").exists():
        then = asdict(ElectraConfig()) | asdict(RunConfig())  # options it is too old for
        then |= data.read_json(out / "config.json")
        changed = {k for k, v in settings.items() if then.get(k) != v} - MAY_CHANGE
        problems = [f"{k} was {then.get(k)}, now {settings[k]}" for k in sorted(changed)]
        path = out / "tokenizer.json"
        if path.exists() and path.read_text("utf-8") != tokenizer:
            problems.append("the tokenizer is another one")
        if problems:
            raise InputError(f"{out} holds another run: {'; '.join(problems)}. Change --out.")
        if then["steps"] != settings["steps"]:
            print(
                f"--steps was {then['steps']:,} and is now {settings['steps']:,}: from here on the "
                "learning rate follows the new schedule."
            )
    if not write:
        return open(os.devnull, "w")
    lock = data.lock(out, wait=False)
    data.write_atomically(out / "config.json", json.dumps(settings, indent=1))
    data.write_atomically(out / "tokenizer.json", tokenizer)
    return lock


class Run:
    """What belongs to a run beside the method: time, metrics, checkpoints, progress, signals.

    A checkpoint holds the states of `parts`: "model", "optimizer", "scaler".
    """

    def __init__(self, options: RunConfig, parts: dict[str, Any], rank: int, world: int) -> None:
        self.options, self.parts, self.rank, self.world = options, parts, rank, world
        self.out = Path(options.out)
        self.device = next(parts["model"].parameters()).device
        self.step, self.seconds, self.logged = 0, 0.0, 0.0  # time spent training; at the last row
        self.recent: list[Tensor] = []  # losses since that row; they stay on the device
        self.blind = 0  # evaluations in a row in which nothing was detected
        self.resume()
        self.metrics = self.open_metrics()
        silent = True if rank else None  # None: where there is no terminal
        self.bar = tqdm(total=options.steps, initial=self.step, unit="step", disable=silent)
        self.signals: list[int] = []  # those that asked us to stop
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():  # no other thread may do this
            stops = (signal.SIGINT, signal.SIGTERM)
            self.handlers = {number: signal.signal(number, self.caught) for number in stops}
        self.saved = self.clock = time.perf_counter()

    def caught(self, number: int, _: Any) -> None:
        """Ctrl-C and SIGTERM ask to stop after this step; a second Ctrl-C stops at once."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.signals.append(number)

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        counts = ("step", "seconds", "logged", "recent")
        state = data.load_checkpoint(self.out / "checkpoint.pt", (*self.parts, *counts))
        if state is None:
            return
        for name, part in self.parts.items():
            if state[name]:  # empty: a scaler without work, before --precision was fp16
                part.load_state_dict(state[name])
        self.step, self.seconds, self.logged = (state[name] for name in counts[:3])
        self.recent = [losses.to(self.device) for losses in state["recent"]]

    def open_metrics(self) -> csv.DictWriter:
        """A writer of rows behind those of metrics.csv, less what a crash left there afterwards."""
        path = self.out / "metrics.csv" if self.rank == 0 else Path(os.devnull)
        if self.rank == 0:
            text = path.read_text("utf-8-sig", "replace") if path.exists() else ""
            lines = [line.split(",") for line in text.split("\n")[:-1]]  # the last has no end yet
            rows = lines[1:]
            ours = all(len(row) == len(METRICS) and row[0].isdecimal() for row in rows)
            if text and (lines[:1] != [METRICS] or not ours):
                os.replace(path, path.with_name(path.name + ".old"))
                print(f"{path} was changed by another program. It is now {path.name}.old.")
                rows = []
            rows = [METRICS, *(row for row in rows if int(row[0]) <= self.step)]
            data.write_atomically(path, "".join(",".join(row) + "\n" for row in rows))
        file = path.open("a", buffering=1, newline="", encoding="utf-8")  # a row is there at once
        return csv.DictWriter(file, METRICS, lineterminator="\n")

    def stopping(self) -> bool:
        """Whether one of the processes has caught a signal: they have to stop at the same step."""
        if self.world == 1:
            return bool(self.signals)
        flag = torch.tensor(float(bool(self.signals)), device=self.device)
        torch.distributed.all_reduce(flag)
        return bool(flag > 0)

    def mean_losses(self, fp16: bool) -> list[float]:
        """Means of the recent losses; stops the run at the first that is not finite."""
        values = torch.stack(self.recent)  # (steps, 3): both losses and the gradient's norm
        if self.world > 1:
            torch.distributed.all_reduce(values)  # a sum
        values = values.cpu() / self.world
        # In fp16 a gradient may overflow: GradScaler leaves such a step out and lowers its scale.
        bad = (~values[:, : 2 if fp16 else 3].isfinite().all(1)).nonzero()
        if len(bad):
            losses = "generator loss {}, discriminator loss {}, gradient norm {}"
            lower = "egin anew with a lower --learning_rate and another --out"
            fp32 = self.options.precision == "fp32"
            raise InputError(
                f"step {self.step - len(self.recent) + 1 + int(bad[0, 0])} is not finite: "
                f"{losses.format(*values[bad[0, 0]].tolist())}. The last checkpoint is untouched. "
                + (f"B{lower}." if fp32 else f"Go on with --precision fp32, or b{lower}.")
            )
        return values[:, :2].double().mean(0).tolist()

    def log(self, rate: float, means: list[float], flops: float) -> dict[str, Any]:
        """Show how training goes, and begin a row of metrics.csv."""
        options, tokens = self.options, self.options.batch_size * self.options.length
        speed = len(self.recent) * tokens / (self.seconds - self.logged)
        self.recent, self.logged = [], self.seconds
        status = f"generator {means[0]:.3f}, discriminator {means[1]:.4f}, {speed:,.0f} tok/s"
        self.bar.set_postfix_str(status)
        if self.bar.disable:  # no terminal: plain lines
            left = tqdm.format_interval((options.steps - self.step) * self.seconds / self.step)
            print(f"step {self.step:,} of {options.steps:,}: {status}, {left} left", flush=True)
        tokens *= self.step
        row = dict(zip(METRICS, (self.step, tokens, self.seconds, rate, *means), strict=False))
        return row | {"flops": tokens * flops}

    def save(self, config: ElectraConfig, tokenizer: Tokenizer) -> None:
        """Write a checkpoint, and both networks for Hugging Face."""
        self.saved = time.perf_counter()
        if self.rank > 0:
            return
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"step": self.step, "seconds": self.seconds, "logged": self.logged}
        data.save_checkpoint(self.out / "checkpoint.pt", state | {"recent": self.recent})
        model = self.parts["model"]
        for name, shape in (("generator", generator_config(config)), ("discriminator", config)):
            write_hugging_face(self.out / name, name, getattr(model, name), shape, tokenizer)

    def close(self) -> None:
        self.bar.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        done, steps = self.step, self.options.steps
        more = "the same command goes on from there" if done < steps else "--steps asks for more"
        print(f"{self.out}: {done:,} of {max(done, steps):,} steps are done; {more}.")


def show_run(settings: dict[str, Any], model: nn.Module) -> None:
    """Print the settings and how large the networks are."""
    print(textwrap.fill(", ".join(f"{k} {v}" for k, v in settings.items() if v != ""), 100))
    for part in ("generator", "discriminator", "together"):
        parameters = getattr(model, part, model).parameters()
        print(f"parameters, {part}: {sum(p.numel() for p in parameters):,}")


def pretrain(config: ElectraConfig, options: RunConfig) -> None:
    """Everything from a text to a trained model in the folder `options.out`."""
    keep_memory()
    rank, world = join_processes()  # 0 and 1 without torchrun
    out = Path(options.out)
    with first_process_first(rank, world):
        files = ("tokenizer.json", "metrics.csv", "checkpoint.pt", *NETWORKS)
        data.refuse_foreign(out, "config.json", "warmup_steps", files, "--out")
        tokenizer, train, valid, fingerprint = data.prepare(
            options.data, options.tokens, options.vocab or options.tokenizer, config.vocab_size,
            trained=out / "tokenizer.json",
        )  # fmt: skip
        # A model from elsewhere may have rows that its tokenizer never uses.
        config = fit_to_tokenizer(config, tokenizer, exact=not options.init_from)
        settings = asdict(options) | asdict(config) | {"text": fingerprint}
        lock = open_run(out, settings, tokenizer.to_str(pretty=True), write=rank == 0)

    # Model and optimiser, where they start or where they stopped.
    device = choose_device(options.device)
    precision = choose_precision(options.precision, device)
    torch.manual_seed(options.seed)
    model = Electra(config)
    if options.init_from:
        for network in load_hugging_face(Path(options.init_from), model):
            print(f"{options.init_from}: no {network}. Beyond the embeddings, ours starts fresh.")
    elif options.unigram_bias:
        counts = np.bincount(train[:10_000_000], minlength=config.vocab_size) + 1.0
        model.generator.bias.data = torch.tensor(np.log(counts / counts.sum()), dtype=torch.float32)
    model.to(device).train()
    if options.compile:
        model.compile()
    optimizer = make_optimizer(model, options.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    autocast = torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")
    run = Run(options, {"model": model, "optimizer": optimizer, "scaler": scaler}, rank, world)
    # Each process takes its share of a batch; backward averages their gradients.
    trained: nn.Module = model
    if world > 1:  # other objectives leave a head or a network without a gradient
        unused = config.objective != "electra"
        trained = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)

    show_run(settings, model)
    print(f"tokens: {len(train):,} and {len(valid):,} held out; {device}, {precision}")
    flops = flops_per_token(config, options.length)
    print("FLOPs per token: generator {:,.0f}, main network {:,.0f}".format(*flops))

    def batch(tokens: np.ndarray, first: int, rows: int, seed: int) -> list[Tensor]:
        special = config.cls_id, config.sep_id
        arrays = data.get_batch(tokens, first, rows, options.length, seed, *special)
        tensors = [torch.from_numpy(array) for array in arrays]
        if device.type == "cuda":  # pinned memory is copied while the GPU works
            tensors = [x.pin_memory() for x in tensors]
        return [x.to(device, non_blocking=True) for x in tensors]

    micro_batch = options.micro_batch or options.batch_size // world
    accumulation = options.batch_size // (micro_batch * world)
    held_out = min(options.eval_sequences, data.sequences_per_epoch(len(valid), options.length))
    starts = range(0, held_out, micro_batch)
    valid_batches = [batch(valid, i, min(micro_batch, held_out - i), 0) for i in starts]
    sentences = data.find_sentences(valid, tokenizer, options.length)
    stop = False
    while run.step < options.steps and not stop:
        # One step. Everything random in it follows from the seed and its number.
        run.step = step = run.step + 1
        enter_stage(model, step, options.steps)
        rate = learning_rate(step, options)
        batches = []
        for micro in range(rank * accumulation, (rank + 1) * accumulation):
            first = (step - 1) * options.batch_size + micro * micro_batch
            seed = hash((options.seed, step, micro))
            batches.append((seed, *batch(train, first, micro_batch, options.seed)))
        run.recent.append(train_step(trained, batches, optimizer, scaler, autocast, rate))
        run.bar.update()

        # Now and then look at it: reading a loss makes a GPU wait, so not at every step.
        evaluation = step == options.steps or step % options.eval_every == 0
        log = evaluation or step % options.log_every == 0
        stop = run.stopping() if log or world == 1 else False
        late = time.perf_counter() - run.saved > 60 * options.save_minutes
        save = evaluation or stop or log and late
        if not (log or save):
            continue
        means = run.mean_losses(fp16=precision == "fp16")
        run.seconds += time.perf_counter() - run.clock
        if log:
            row = run.log(rate, means, sum(flops))
            if evaluation:
                result = evaluate(model, valid_batches, autocast)
                row |= result
                run.bar.write(f"\nheld-out text after step {step:,}: {show_result(result)}\n")
                run.bar.write(show_lesson(model, tokenizer, sentences))
                blind = step > options.warmup_steps and detects_nothing(result)
                run.blind = run.blind + 1 if blind else 0
                if run.blind == 4 and config.objective in ("electra", "electra_15"):
                    run.bar.write(collapse_advice(config))
            run.metrics.writerow(row)
        if save:
            run.save(config, tokenizer)
        run.clock = time.perf_counter()  # what came between was not training
    run.close()
    lock.close()
    if world > 1:
        torch.distributed.destroy_process_group()


# ---- 10. The command line. ---------------------------------------------------------------------
def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """An option for each field of a dataclass that has a help text; left out, it is not there."""
    for f in fields(config):
        if f.metadata:
            legal = f.metadata["legal"]
            legal = ": one of " + ", ".join(legal) if isinstance(legal, tuple) else " " + legal
            kind: dict[str, Any] = {"type": type(f.default)}
            if isinstance(f.default, bool):
                kind = {"action": argparse.BooleanOptionalAction}
            help = (f.metadata["help"] + legal).strip()
            parser.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=help, **kind)


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> dict[str, Any]:
    """The options that were given. (An empty one is a slip: a variable that is not set.)"""
    given = vars(parser.parse_args(arguments))
    for name, value in given.items():
        if value == "":
            raise InputError(f"--{name} is empty: name one, or leave the option out.")
    return given


def check_options(settings: Any) -> None:
    """InputError where a field of a dataclass is not what its `option` allows."""
    for f in fields(settings):
        legal, value = f.metadata.get("legal"), getattr(settings, f.name)
        if isinstance(legal, tuple) and value not in legal:
            raise InputError(f"--{f.name} {value}: choose one of {', '.join(legal)}.")
        if legal and isinstance(legal, str):
            low, high = map(float, legal[1:-1].split(","))
            above = value >= low if legal[0] == "[" else value > low  # false for nan
            below = value <= high if legal[-1] == "]" else value < high
            if not (above and below):
                raise InputError(f"--{f.name} {value}: it must lie in {legal}.")


def parse_run(arguments: list[str] | None) -> tuple[ElectraConfig, RunConfig, str | None]:
    """The command line: the size's model and recipe, with what is given instead; and --detect."""
    parser = argparse.ArgumentParser(description="Pre-train ELECTRA on a text.", allow_abbrev=False)
    parser.add_argument("--detect", metavar="TEXT", help="show what looks replaced; - reads stdin")
    add_options(parser, RunConfig)
    add_options(parser, ElectraConfig)
    given = parse(parser, arguments)
    text = given.pop("detect")
    size = given.get("size", "small" if given.get("data") else "tiny")
    if size not in SIZES:
        raise InputError(f"--size {size}: choose one of {', '.join(SIZES)}.")
    config, run = SIZES[size]
    given = given if given.get("data") else DEMO | given
    of_model = {name: given.pop(name) for name in list(given) if hasattr(config, name)}
    config, run = replace(config, **of_model), replace(run, **given)
    check_options(config)
    check_options(run)
    if config.objective in ("mlm", "two_stage"):  # one network, or two of the same size in turn
        config.generator_size = 1.0
        config.embedding_sharing = "all" if config.objective == "mlm" else "separate"
    if run.init_from:
        config = hugging_face_config(Path(run.init_from), config)
        if other := [k for k, v in of_model.items() if getattr(config, k) != v]:
            raise InputError(f"{run.init_from} decides --{other[0]}: leave the option out.")
        if not {"tokenizer", "vocab"} & set(given):
            run.tokenizer = str(find_tokenizer(Path(run.init_from)))
    check_run(config, run)
    return config, run, text


# The built-in corpus is small and plain: fewer words, layers and minutes show it learning.
DEMO: dict[str, Any] = {
    "vocab_size": 2048, "num_layers": 2, "learning_rate": 2e-3, "length": 64, "batch_size": 32,
    "warmup_steps": 200, "steps": 2000, "eval_every": 500,
}  # fmt: skip


def check_run(config: ElectraConfig, run: RunConfig) -> None:
    """InputError for settings that are legal each by itself, but not together."""
    generator = generator_config(config)
    width, heads = generator.hidden_size, generator.num_heads
    share = (run.micro_batch or 1) * int(os.environ.get("WORLD_SIZE", "1"))
    misfit = f"a generator of width {width} has {heads} heads, one for every 64, which do not"
    for wrong, problem in (
        (run.length > config.max_positions, "--length must be at most --max_positions"),
        (run.batch_size % share, "--micro_batch, times the processes, must divide --batch_size"),
        (config.hidden_size % config.num_heads, "--num_heads must divide --hidden_size"),
        (min(width, generator.intermediate_size) < 1, "--generator_size leaves it no width"),
        (width % heads, f"{misfit} divide it: change --generator_size or --hidden_size"),
        (
            config.embedding_sharing == "all" and config.generator_size != 1,
            "--embedding_sharing all needs --generator_size 1",
        ),
        (config.sinusoids and config.embedding_size % 2, "--embedding_size must be even here"),
    ):
        if wrong:
            raise InputError(f"{problem}.")


@torch.no_grad()
def detect(model: Electra, tokenizer: Tokenizer, settings: dict[str, Any], text: str) -> None:
    """Print every token of the text, or of stdin, with the probability that it is a replacement."""
    if settings.get("objective") in ("mlm", "replace_mlm"):
        raise InputError(
            f"--detect needs a discriminator, and --objective {settings['objective']} trains none: "
            "name the folder of another run with --out."
        )
    room = settings["length"] - 2  # what it was trained on: positions behind that know nothing
    for line in data.standard_input() if text == "-" else [text]:
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        for part in (ids[i : i + room] for i in range(0, len(ids), room)):
            sentence = torch.tensor([[model.config.cls_id, *part, model.config.sep_id]])
            chances = model.discriminator(sentence)[0, 1:-1].sigmoid()
            rows = [("token", part, (chances > 0.5).tolist())]
            print(show_tokens(tokenizer, rows, chances.tolist()))


@contextlib.contextmanager
def profiler(run: RunConfig) -> Iterator[None]:
    """With --profile N: N steps in a temporary folder, then a table of where their time went."""
    if run.profile == 0:
        yield
        return
    run.steps, run.eval_sequences = run.profile, 1
    with tempfile.TemporaryDirectory() as run.out, torch.profiler.profile() as profile:
        yield
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=40))


def main(arguments: list[str] | None = None) -> None:
    config, run, text = parse_run(arguments)
    if text is None:
        with profiler(run):
            pretrain(config, run)
    else:
        model, tokenizer, settings = load_run(Path(run.out))
        detect(model, tokenizer, settings, text)


if __name__ == "__main__":
    sys.exit(data.run_program("electra.py", main))
