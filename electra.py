"""ELECTRA in one file: pre-train a language model by teaching it to spot replaced words.

BERT hides 15 % of the words and learns to guess them: 85 % of each sentence teach it nothing.
ELECTRA (Clark et al., ICLR 2020, https://arxiv.org/abs/2003.10555) trains two networks instead. A
small *generator*, a BERT itself, fills the hidden places with words it finds plausible. The
*discriminator* reads the filled-in sentence and says of EVERY token whether it is the original or
a replacement. It learns from all tokens, so the same quality costs about a quarter of the compute.
The generator is thrown away afterwards; the discriminator is what gets fine-tuned.

    original      the   chef   cooked   the   meal
                         |                |
    masked        the  [MASK]  cooked  [MASK] meal        15 % of the tokens
                         |                |
                     generator: a small masked language model, one distribution per [MASK]
                         |                |
    sampled              chef              a
    corrupted     the   chef   cooked    a    meal        the samples written over the original
                    |     |      |       |     |
                     discriminator: replaced or original?
    labels          0     0      0       1     0          a lucky guess counts as original

    loss = cross-entropy of the generator + 50 x binary cross-entropy of the discriminator

Run it:

    python electra.py                              a tiny ELECTRA on text this machine already has
    python electra.py --data owt.txt               ELECTRA-Small by the paper's recipe
    python electra.py --detect "the chef ate the sky"    which tokens look replaced?

Letters in shape comments: B batch, L length, E embedding width, D hidden width, H heads,
V vocabulary, K predictions per sequence.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import textwrap
import time
import timeit
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import data

# ----------------------------------------------------------------------------------------------
# 2. Configuration. Every `option` below is also a command-line option of the same name.
# ----------------------------------------------------------------------------------------------


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class ElectraConfig:
    """The model: both networks and the loss that ties them (paper, table 6). Defaults: small."""

    vocab_size: int = option(30522, "V, entries of the vocabulary")
    embedding_size: int = option(128, "E, width of the embeddings that both networks share")
    hidden_size: int = option(256, "D, width of the discriminator")
    num_layers: int = option(12, "layers of each network")
    num_heads: int = option(4, "H, attention heads of the discriminator")
    intermediate_size: int = option(1024, "width of the discriminator's feed-forward layers")
    generator_size: float = option(1 / 4, "width of the generator as a fraction of hidden_size")
    max_positions: int = option(512, "longest sequence the model can read")
    dropout: float = option(0.1, "dropout probability, everywhere")
    init_std: float = option(0.02, "standard deviation of the initial weights")
    embedding_std: float = option(0.02, "standard deviation of the initial embeddings")
    mask_prob: float = option(0.15, "share of the tokens that the generator predicts")
    mask_share: float = option(0.85, "share of those that it sees as [MASK]; it sees the others")
    temperature: float = option(1.0, "temperature of the generator's samples")
    generator_weight: float = option(1.0, "weight of the generator's loss")
    discriminator_weight: float = option(50.0, "lambda, weight of the discriminator's loss")
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
    size: str = option("small", "tiny, small, base or large (default: tiny without --data)")
    tokenizer: str = option("wordpiece", "wordpiece or bpe, trained on the text; or a file to use")
    vocab: str = option("", "a WordPiece vocabulary to use instead, such as BERT's vocab.txt")
    seed: int = option(0, "decides the initial weights, the order of the data, masks and samples")
    length: int = option(128, "L, tokens of a training sequence")
    batch_size: int = option(128, "sequences the optimiser sees in one step")
    micro_batch: int = option(0, "sequences that fit in memory at once; 0: all of batch_size")
    steps: int = option(1_000_000, "optimiser steps of the whole run")
    warmup_steps: int = option(10_000, "steps over which the learning rate rises")
    learning_rate: float = option(5e-4, "peak learning rate")
    weight_decay: float = option(0.01, "weight decay of matrices and embeddings")
    unigram_bias: bool = option(False, "start the generator's output bias at the token frequencies")
    precision: str = option("auto", "auto, fp32, bf16 or fp16")
    device: str = option("auto", "auto, cuda, mps or cpu")
    log_every: int = option(50, "steps between two rows of metrics.csv")
    eval_every: int = option(5000, "steps between two evaluations on held-out text")
    eval_sequences: int = option(512, "sequences of held-out text that an evaluation reads")
    save_minutes: float = option(10.0, "minutes between two checkpoints")


# A size is its model AND its recipe: a model trained at another's learning rate disappoints.
# small, base and large are the paper's (table 6); tiny is ours, made for two CPU cores.
TINY_MODEL = ElectraConfig(
    vocab_size=8192, hidden_size=192, num_layers=4, num_heads=3, intermediate_size=768,
    generator_size=2 / 3, max_positions=128, dropout=0.0, embedding_std=0.05
)  # fmt: skip
TINY_RECIPE = RunConfig(
    size="tiny", length=64, batch_size=32, steps=25_000, warmup_steps=1000, learning_rate=1e-3,
    unigram_bias=True, eval_every=1000
)  # fmt: skip
BASE_MODEL = ElectraConfig(
    embedding_size=768, hidden_size=768, num_heads=12, intermediate_size=3072, generator_size=1 / 3
)
BASE_RECIPE = RunConfig(size="base", length=512, batch_size=256, steps=766_000, learning_rate=2e-4)
LARGE_MODEL = ElectraConfig(
    embedding_size=1024, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096,
    mask_prob=0.25
)  # fmt: skip
LARGE_RECIPE = RunConfig(
    size="large", length=512, batch_size=2048, steps=400_000, learning_rate=2e-4
)
SIZES: dict[str, tuple[ElectraConfig, RunConfig]] = {
    "tiny": (TINY_MODEL, TINY_RECIPE),
    "small": (ElectraConfig(), RunConfig()),
    "base": (BASE_MODEL, BASE_RECIPE),
    "large": (LARGE_MODEL, LARGE_RECIPE),
}
# The built-in corpus is small and plain: a smaller vocabulary and minutes are enough for a demo.
DEMO: dict[str, Any] = {"vocab_size": 4096, "steps": 2000, "warmup_steps": 200, "eval_every": 400}


def generator_config(config: ElectraConfig) -> ElectraConfig:
    """The generator is the discriminator made narrower; depth and embeddings stay (section 3.2)."""
    width = round(config.hidden_size * config.generator_size)
    return dataclasses.replace(
        config,
        hidden_size=width,
        intermediate_size=round(config.intermediate_size * config.generator_size),
        num_heads=max(1, width // 64),
    )


# ----------------------------------------------------------------------------------------------
# 3. The transformer encoder: BERT's, with LayerNorm after each residual sum.
# ----------------------------------------------------------------------------------------------


class Embeddings(nn.Module):
    """Word + position + token type: ids (B, L) -> (B, L, E)."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.embedding_size)
        self.position = nn.Embedding(config.max_positions, config.embedding_size)
        self.token_type = nn.Embedding(2, config.embedding_size)
        self.norm = nn.LayerNorm(config.embedding_size, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(ids)
        x = self.word(ids) + self.position.weight[: ids.shape[1]] + self.token_type(token_type_ids)
        return self.dropout(self.norm(x))


class SelfAttention(nn.Module):
    """Every token looks at every other: (B, L, D) -> (B, L, D)."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        B, L, D = x.shape
        x = self.query_key_value(x).view(B, L, 3, self.num_heads, D // self.num_heads)
        q, k, v = x.permute(2, 0, 3, 1, 4)  # (B, L, 3, H, D/H) -> three of (B, H, L, D/H)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D // self.num_heads)  # (B, H, L, L)
        if attention_mask is not None:
            padding = attention_mask[:, None, None, :] == 0  # (B, 1, 1, L): for all H and queries
            scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)
        context = self.dropout(scores.softmax(dim=-1)) @ v  # (B, H, L, D/H)
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
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, attention_mask)))
        return self.output_norm(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


class Encoder(nn.Module):
    """Embeddings and a stack of blocks: ids (B, L) -> contextual vectors (B, L, D)."""

    def __init__(self, config: ElectraConfig, embeddings: Embeddings) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.project = None
        if config.embedding_size != config.hidden_size:
            self.project = nn.Linear(config.embedding_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        x = self.embeddings(ids, token_type_ids)
        if self.project is not None:
            x = self.project(x)  # (B, L, E) -> (B, L, D)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


# ----------------------------------------------------------------------------------------------
# 4. ELECTRA: mask, predict, sample, detect (section 2 and figure 2 of the paper).
# ----------------------------------------------------------------------------------------------


class Masked(NamedTuple):
    """What mask_tokens chose. K is the same for all rows; `chosen` says which of the K count."""

    ids: Tensor  # (B, L), what the generator sees
    positions: Tensor  # (B, K), distinct within a row
    chosen: Tensor  # (B, K), bool


def mask_tokens(ids: Tensor, config: ElectraConfig, attention_mask: Tensor | None = None) -> Masked:
    """Choose about `mask_prob` of each row's tokens and hide most of them behind [MASK].

    A row of n tokens, [CLS] and [SEP] among them, gets round(mask_prob * n) predictions, at least
    one and at most int((mask_prob + 0.005) * L). 85 % of them become [MASK]; the others keep their
    token but are predicted all the same, as in the official code (the paper masks all).
    """
    B, L = ids.shape
    K = max(1, min(int((config.mask_prob + 0.005) * L), round(config.mask_prob * L)))
    legal = torch.ones_like(ids).bool() if attention_mask is None else attention_mask != 0
    length = legal.sum(1)
    for special in (config.pad_id, config.cls_id, config.sep_id, config.mask_id):
        legal = legal & (ids != special)
    wanted = (config.mask_prob * length).round().clamp(min=1, max=K)
    wanted = torch.minimum(wanted, legal.sum(1))  # (B,)
    # The K largest of L random numbers are K distinct positions; illegal ones come last.
    order = torch.rand(B, L, device=ids.device).masked_fill(~legal, -1.0)
    positions = order.topk(K, dim=1).indices
    chosen = torch.arange(K, device=ids.device) < wanted[:, None]
    hidden = chosen & (torch.rand(B, K, device=ids.device) < config.mask_share)
    shown = torch.where(hidden, config.mask_id, ids.gather(1, positions))
    return Masked(ids.scatter(1, positions, shown), positions, chosen)


def gumbel_sample(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """One sample from softmax(logits / temperature): (..., V) -> (...).

    Adding Gumbel noise and taking the largest is sampling from the softmax (Gumbel 1954). The
    noise has to be float32: 16 bits cannot tell 30,522 tokens apart and favour the first ones.
    """
    logits = logits.float() / temperature
    noise = torch.rand_like(logits).log_().neg_().log_().neg_()  # -log(-log(u)), in one buffer
    return noise.add_(logits).argmax(dim=-1)


class Generator(nn.Module):
    """A small masked language model (equation 1)."""

    def __init__(self, config: ElectraConfig, embeddings: Embeddings) -> None:
        super().__init__()
        config = generator_config(config)
        self.encoder = Encoder(config, embeddings)
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.norm = nn.LayerNorm(config.embedding_size, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits over the vocabulary at `positions` (B, K), or at all: (B, L) -> (B, K or L, V)."""
        x = self.encoder(ids, attention_mask, token_type_ids)
        if positions is not None:  # the head costs V * E a token: only where it is asked for
            x = x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))  # (B, K, D)
        x = self.norm(F.gelu(self.dense(x)))  # (B, K, D) -> (B, K, E)
        return F.linear(x, self.encoder.embeddings.word.weight, self.bias)  # (B, K, V)


class Discriminator(nn.Module):
    """Tells replaced tokens from original ones (equation 2)."""

    def __init__(self, config: ElectraConfig, embeddings: Embeddings) -> None:
        super().__init__()
        self.encoder = Encoder(config, embeddings)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.prediction = nn.Linear(config.hidden_size, 1)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits of "this token was replaced": (B, L) -> (B, L)."""
        x = self.encoder(ids, attention_mask, token_type_ids)
        return self.prediction(F.gelu(self.dense(x))).squeeze(-1)


class ElectraOutput(NamedTuple):
    """Everything one step computes, for the loss and for looking at it."""

    loss: (
        Tensor  # (), generator_weight * generator_loss + discriminator_weight * discriminator_loss
    )
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


class Electra(nn.Module):
    """Generator and discriminator over shared embeddings, trained together (equation 3)."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.config = config
        # Section 3.2, weight sharing: one object in both networks. The generator learns about all
        # tokens of its softmax at once, the discriminator only about those it sees.
        embeddings = Embeddings(config)
        self.generator = Generator(config, embeddings)
        self.discriminator = Discriminator(config, embeddings)
        self.apply(self.initialize)
        for encoder in (self.generator.encoder, self.discriminator.encoder):
            if encoder.project is not None:
                nn.init.xavier_uniform_(encoder.project.weight)
        nn.init.xavier_uniform_(self.discriminator.prediction.weight)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            linear = isinstance(module, nn.Linear)
            std = self.config.init_std if linear else self.config.embedding_std
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            if linear:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ElectraOutput:
        """One step of figure 2 on ids (B, L); attention_mask (B, L) is 0 at padding."""
        config = self.config
        # Mask.
        masked = mask_tokens(ids, config, attention_mask)
        # Predict: the generator's loss is over the chosen positions.
        logits = self.generator(masked.ids, attention_mask, token_type_ids, masked.positions)
        original = ids.gather(1, masked.positions)  # (B, K)
        nats = F.cross_entropy(logits.float().transpose(1, 2), original, reduction="none")  # (B, K)
        generator_loss = masked_mean(nats, masked.chosen)
        # Sample: no gradient flows through it (section 2: it would have to pass a discrete choice).
        sampled = torch.where(
            masked.chosen, gumbel_sample(logits.detach(), config.temperature), original
        )
        corrupted_ids = ids.scatter(1, masked.positions, sampled)
        labels = corrupted_ids != ids
        # Detect: the discriminator's loss is over all tokens.
        scores = self.discriminator(corrupted_ids, attention_mask, token_type_ids)
        real = torch.ones_like(labels) if attention_mask is None else attention_mask != 0
        nats = F.binary_cross_entropy_with_logits(scores.float(), labels.float(), reduction="none")
        discriminator_loss = masked_mean(nats, real)
        loss = (
            config.generator_weight * generator_loss
            + config.discriminator_weight * discriminator_loss
        )
        return ElectraOutput(
            loss, generator_loss, discriminator_loss, masked, corrupted_ids, labels, logits, scores
        )


# ----------------------------------------------------------------------------------------------
# 5. Optimiser and schedule (appendix A).
# ----------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, run: RunConfig) -> torch.optim.AdamW:
    """AdamW; biases and LayerNorms, the parameters with one dimension, do not decay."""
    # model.parameters() is an iterator: passed to two groups, it would leave the second one empty.
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": run.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # fused: one pass over the parameters instead of a dozen
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-6, fused=fused)


def learning_rate(step: int, run: RunConfig) -> float:
    """That of step 1 ... run.steps; as in the official code it decays during warm-up, too."""
    return run.learning_rate * (1 - step / run.steps) * min(1.0, step / max(1, run.warmup_steps))


# ----------------------------------------------------------------------------------------------
# 6. Evaluation on held-out text.
# ----------------------------------------------------------------------------------------------


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that a replaced token scores above an original one; ties, and no pairs, count half."""
    positives = int(labels.sum())
    pairs = positives * (len(labels) - positives)
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # mean rank of each distinct score, from 1
    above = ranks[inverse[labels]].sum() - positives * (positives + 1) / 2
    return float(above / pairs) if pairs else 0.5


@torch.no_grad()
def evaluate(
    model: Electra, batches: list[tuple[Tensor, Tensor]], autocast: torch.autocast
) -> dict[str, float]:
    """Losses and accuracies without dropout, with the same masks and samples every time.

    "Always original" is right for most tokens: read the accuracy together with precision and recall
    of the verdict "replaced" (probability above 0.5) and with the area under the ROC curve.
    """
    model.eval()
    nats, predicted, right, lucky, scores, labels = 0.0, 0, 0, 0, [], []
    for number, (ids, token_type_ids) in enumerate(batches):
        torch.manual_seed(number)
        with autocast:
            out = model(ids, token_type_ids=token_type_ids)
        positions, chosen = out.masked.positions, out.masked.chosen
        original = ids.gather(1, positions)[chosen]
        nats += float(out.generator_loss) * len(original)
        predicted += len(original)
        right += int((out.generator_logits[chosen].argmax(-1) == original).sum())
        lucky += int((~out.labels.gather(1, positions)[chosen]).sum())
        scores.append(out.discriminator_logits.float().flatten().cpu())
        labels.append(out.labels.flatten().cpu())
    model.train()
    score, label = torch.cat(scores), torch.cat(labels)
    verdict = score > 0
    hits = int((verdict & label).sum())
    return {
        "valid_generator_loss": nats / max(1, predicted),
        "valid_generator_accuracy": right / max(1, predicted),
        "valid_sampled_accuracy": lucky / max(1, predicted),
        "valid_discriminator_loss": float(F.binary_cross_entropy_with_logits(score, label.float())),
        "valid_accuracy": float((verdict == label).float().mean()),
        "valid_precision": hits / max(1, int(verdict.sum())),
        "valid_recall": hits / max(1, int(label.sum())),
        "valid_auc": area_under_curve(score.numpy(), label.numpy()),
        "valid_replaced": float(label.float().mean()),
    }


def show_rows(rows: list[tuple[str, list[str], list[bool]]]) -> str:
    """Rows (name, words, which to colour) under one another, folded to the terminal's width."""
    width = max(len(word) for _, words, _ in rows for word in words) + 1
    per_line = max(1, (shutil.get_terminal_size().columns - 11) // width)
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    lines = []
    for start in range(0, len(rows[0][1]), per_line):
        for name, words, marks in rows:
            cells = [word.ljust(width) for word in words]
            if colours:
                red = "\033[31m{}\033[0m"
                cells = [red.format(c) if m else c for c, m in zip(cells, marks, strict=True)]
            lines.append(f"{name:11}" + "".join(cells[start : start + per_line]).rstrip())
        lines.append("")
    return "\n".join(lines)


@torch.no_grad()
def show_lesson(model: Electra, tokenizer: Any, ids: Tensor) -> str:
    """What the two networks make of one held-out sentence (1, L); fakes and verdicts coloured."""
    model.eval()
    torch.manual_seed(1)
    out = model(ids)
    model.train()
    original, masked, corrupted = (
        [tokenizer.id_to_token(i) for i in row[0].tolist()]
        for row in (ids, out.masked.ids, out.corrupted_ids)
    )
    fake = out.labels[0].tolist()
    chance = out.discriminator_logits[0].float().sigmoid().tolist()
    return show_rows(
        [
            ("original", original, [False] * len(fake)),
            ("masked", masked, [False] * len(fake)),
            ("generator", corrupted, fake),
            ("replaced?", [f"{p:.0%}" for p in chance], [p > 0.5 for p in chance]),
        ]
    )


# ----------------------------------------------------------------------------------------------
# 7. The run's folder: config.json, tokenizer.json, metrics.csv, checkpoint.pt.
# ----------------------------------------------------------------------------------------------

METRICS = [
    "step",
    "tokens",
    "seconds",
    "learning_rate",
    "generator_loss",
    "discriminator_loss",
    "valid_generator_loss",
    "valid_generator_accuracy",
    "valid_sampled_accuracy",
    "valid_discriminator_loss",
    "valid_accuracy",
    "valid_precision",
    "valid_recall",
    "valid_auc",
    "valid_replaced",
]
# What may change when a run goes on; a change of anything else makes it another run.
MAY_CHANGE = set(
    [
        "data",
        "out",
        "tokens",
        "steps",
        "micro_batch",
        "precision",
        "device",
        "log_every",
        "eval_every",
        "eval_sequences",
        "save_minutes",
    ]
)


def open_run(config: ElectraConfig, run: RunConfig, tokenizer: str) -> None:
    """Make the run's folder, or check that it holds this very run."""
    out = Path(run.out)
    settings = dataclasses.asdict(run) | dataclasses.asdict(config)
    if (out / "config.json").exists():
        then = json.loads((out / "config.json").read_text())
        changed = [
            f"{k} was {then.get(k)}, now {v}"
            for k, v in settings.items()
            if then.get(k) != v and k not in MAY_CHANGE
        ]
        if (out / "tokenizer.json").read_text() != tokenizer:
            changed.append("the tokenizer is another one")
        if changed:
            raise data.InputError(
                f"{out} holds another run ({'; '.join(changed)}). Choose another --out."
            )
    out.mkdir(parents=True, exist_ok=True)
    data.write_atomically(out / "tokenizer.json", tokenizer)
    data.write_atomically(out / "config.json", json.dumps(settings, indent=1))


def open_metrics(path: Path, step: int) -> Any:
    """metrics.csv, open for appending, without the rows after `step` that a crash left behind."""
    lines = path.read_text().splitlines() if path.exists() else [",".join(METRICS)]
    kept = lines[:1] + [line for line in lines[1:] if int(line.split(",")[0]) <= step]
    data.write_atomically(path, "\n".join(kept) + "\n")
    return path.open("a", newline="")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write, sync, rename: whatever happens, `path` is a whole checkpoint, the old or the new."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001, torch raises many kinds for a damaged file
        raise data.InputError(
            f"{path}: damaged ({str(error).splitlines()[0]}). Move it away."
        ) from None


# ----------------------------------------------------------------------------------------------
# 8. The training loop.
# ----------------------------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str) -> torch.device:
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise data.InputError(f"--device {name}: {str(error).splitlines()[0]}") from None


def choose_precision(name: str, device: torch.device) -> str:
    """bf16 where the hardware has it, fp16 on older GPUs; on a CPU what multiplies faster here."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "mps":
        return "fp32"
    seconds = {}
    for precision in ("fp32", "bf16"):
        x = torch.ones(512, 512, dtype=DTYPES[precision])
        seconds[precision] = min(timeit.repeat(lambda x=x: x @ x, number=1, repeat=10))
    return min(seconds, key=seconds.__getitem__)


class StopRequest:
    """Ctrl-C or SIGTERM: the step is finished and saved. A second Ctrl-C stops at once."""

    made = False

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, self.make)
        signal.signal(signal.SIGTERM, self.make)

    def make(self, number: int, frame: Any) -> None:
        self.made = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def mean_losses(recent: list[Tensor], step: int, fp16: bool) -> list[float]:
    """Mean losses of the steps up to `step`; stops the run at the first that is not finite."""
    values = torch.stack(recent).cpu()  # (steps, 3): both losses and the gradient's norm
    # In fp16 a gradient may overflow: GradScaler leaves such a step out and lowers its scale.
    bad = (~values[:, : 2 if fp16 else 3].isfinite().all(1)).nonzero()
    if len(bad):
        generator, discriminator, norm = values[bad[0, 0]].tolist()
        raise data.InputError(
            f"step {step - len(recent) + 1 + int(bad[0, 0])} is not finite: generator loss "
            f"{generator}, discriminator loss {discriminator}, gradient norm {norm}. The last "
            "checkpoint is untouched; go on from it with --precision fp32, or lower --learning_rate."
        )
    return values[:, :2].double().mean(0).tolist()


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def pretrain(config: ElectraConfig, run: RunConfig) -> None:
    """Everything from a text to a trained model in the folder `run.out`."""
    # Tokens.
    text = Path(run.data or "builtin.txt")
    if not run.data and not text.exists():
        data.write_builtin_corpus(text)
    folder = Path(run.tokens or f"{text}.tokens")
    meta = data.prepare(text, folder, run.tokenizer, run.vocab, config.vocab_size)
    tokenizer = data.load_tokenizer(folder / "tokenizer.json")
    special = {
        f"{name}_id": tokenizer.token_to_id(f"[{name.upper()}]")
        for name in ("pad", "cls", "sep", "mask")
    }
    config = dataclasses.replace(config, vocab_size=tokenizer.get_vocab_size(), **special)
    open_run(config, run, tokenizer.to_str(pretty=True))
    train, valid = (data.open_tokens(folder, split, meta) for split in ("train", "valid"))

    # Model and optimiser, where they start or where they stopped.
    device = choose_device(run.device)
    precision = choose_precision(run.precision, device)
    torch.manual_seed(run.seed)
    model = Electra(config)
    if run.unigram_bias:
        counts = np.bincount(train[:10_000_000], minlength=config.vocab_size) + 1.0
        model.generator.bias.data = torch.tensor(np.log(counts / counts.sum()), dtype=torch.float32)
    model.to(device).train()
    optimizer = make_optimizer(model, run)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    autocast = torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")
    step, seconds, logged = 0, 0.0, 0.0  # time spent training, and that of the last row logged
    recent: list[Tensor] = []  # losses since that row; they stay on the device
    out = Path(run.out)
    if (out / "checkpoint.pt").exists():
        state = load_checkpoint(out / "checkpoint.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        step, seconds, logged = state["step"], state["seconds"], state["logged"]
        recent = [losses.to(device) for losses in state["recent"]]

    settings = dataclasses.asdict(run) | dataclasses.asdict(config)
    print(textwrap.fill(", ".join(f"{k} {v}" for k, v in settings.items() if v != ""), 100))
    print(
        f"parameters: generator {count(model.generator):,}, discriminator "
        f"{count(model.discriminator):,}, both {count(model):,} since they share "
        f"{count(model.discriminator.encoder.embeddings):,} in the embeddings\n"
        f"tokens: {meta['train']:,} to train on, {meta['valid']:,} held out; {device}, {precision}"
    )
    if step:
        print(f"{out}: {step:,} of {run.steps:,} steps are done")

    def get_batch(tokens: np.ndarray, first: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        arrays = data.get_batch(tokens, first, rows, run.length, seed, config.cls_id, config.sep_id)
        ids, token_type_ids = (torch.from_numpy(array).to(device) for array in arrays)
        return ids, token_type_ids

    micro_batch = run.micro_batch or run.batch_size
    accumulation = run.batch_size // micro_batch
    held_out = min(run.eval_sequences, data.sequences_per_epoch(len(valid), run.length))
    starts = range(0, held_out, micro_batch)
    valid_batches = [get_batch(valid, i, min(micro_batch, held_out - i), 0) for i in starts]
    sentence = data.find_sentence(valid, tokenizer, run.length)
    lesson = torch.tensor([[config.cls_id, *sentence, config.sep_id]], device=device)
    stop = StopRequest()
    metrics = open_metrics(out / "metrics.csv", step)
    bar = tqdm(total=run.steps, initial=step, unit="step", disable=None)
    saved = clock = time.perf_counter()
    while step < run.steps and not stop.made:
        # One step. Everything random in it follows from the seed and its number.
        step += 1
        rate = learning_rate(step, run)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = torch.zeros(3, device=device)
        for micro in range(accumulation):
            first = (step - 1) * run.batch_size + micro * micro_batch
            ids, token_type_ids = get_batch(train, first, micro_batch, run.seed)
            torch.manual_seed(hash((run.seed, step, micro)))
            with autocast:
                output = model(ids, token_type_ids=token_type_ids)
            scaler.scale(output.loss / accumulation).backward()
            pair = torch.stack([output.generator_loss, output.discriminator_loss])
            losses[:2] += pair.detach() / accumulation
        scaler.unscale_(optimizer)  # so that the gradient itself is clipped
        losses[2] = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        recent.append(losses)
        bar.update()

        # Now and then look at it: reading a loss makes a GPU wait, so not at every step.
        done = step == run.steps
        evaluation = done or step % run.eval_every == 0
        log = evaluation or step % run.log_every == 0
        save = evaluation or stop.made or time.perf_counter() - saved > 60 * run.save_minutes
        if not (log or save):
            continue
        means = mean_losses(recent, step, precision == "fp16")
        seconds += time.perf_counter() - clock
        if log:
            speed = len(recent) * run.batch_size * run.length / (seconds - logged)
            recent, logged = [], seconds
            row = [step, step * run.batch_size * run.length, seconds, rate, *means]
            status = (
                f"generator {means[0]:.3f}, discriminator {means[1]:.4f}, {speed:,.0f} tokens/s"
            )
            bar.set_postfix_str(status)
            if bar.disable:  # no terminal: plain lines
                left = tqdm.format_interval((run.steps - step) * seconds / step)
                print(f"step {step:,} of {run.steps:,}: {status}, {left} left", flush=True)
            if evaluation:
                result = evaluate(model, valid_batches, autocast)
                row += result.values()
                numbers = ", ".join(f"{k[6:]} {v:.3f}" for k, v in result.items())
                bar.write(f"\nheld-out text after step {step:,}: {numbers}\n")
                bar.write(show_lesson(model, tokenizer, lesson))
            row += [""] * (len(METRICS) - len(row))
            metrics.write(",".join(x if x == "" else f"{x:.10g}" for x in row) + "\n")
            metrics.flush()
        if save:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scaler": scaler.state_dict(), "recent": recent, "step": step}
            save_checkpoint(out / "checkpoint.pt", state | {"seconds": seconds, "logged": logged})
            saved = time.perf_counter()
        clock = time.perf_counter()
    bar.close()
    metrics.close()
    if step == run.steps:
        print(f"{out}: all {step:,} steps are done; --steps asks for more, --detect tries it out.")
    else:
        print(f"{out}: stopped after step {step:,}; the same command goes on from there.")


# ----------------------------------------------------------------------------------------------
# 9. The command line.
# ----------------------------------------------------------------------------------------------


@torch.no_grad()
def detect(out: Path, text: str) -> None:
    """Print every token of the text with the probability that it is a replacement."""
    if not (out / "checkpoint.pt").exists():
        raise data.InputError(f"{out}: no trained model. Train one first, or name it with --out.")
    settings = json.loads((out / "config.json").read_text())
    names = [f.name for f in dataclasses.fields(ElectraConfig)]
    config = ElectraConfig(**{name: settings[name] for name in names})
    model = Electra(config).eval()
    model.load_state_dict(load_checkpoint(out / "checkpoint.pt")["model"])
    tokenizer = data.load_tokenizer(out / "tokenizer.json")
    room = settings["length"] - 2  # what it was trained on: positions behind that know nothing
    for line in sys.stdin if text == "-" else [text]:
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        for part in (ids[i : i + room] for i in range(0, len(ids), room)):
            scores = model.discriminator(torch.tensor([[config.cls_id, *part, config.sep_id]]))
            chance = scores[0, 1:-1].sigmoid().tolist()
            marks = [p > 0.5 for p in chance]
            words = [tokenizer.id_to_token(i) for i in part]
            print(
                show_rows(
                    [("token", words, marks), ("replaced?", [f"{p:.0%}" for p in chance], marks)]
                )
            )


def fraction(text: str) -> float:
    """0.25 or 1/4."""
    numerator, _, denominator = text.partition("/")
    return float(numerator) / float(denominator or 1)


def parse_arguments(arguments: list[str] | None) -> tuple[ElectraConfig, RunConfig, str | None]:
    """The size's model and recipe, with what the command line says instead."""
    parser = argparse.ArgumentParser(
        description="Pre-train ELECTRA on a text, or show what a trained one finds in a sentence.",
        epilog="What is not given comes from the size: see SIZES in electra.py.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--detect", metavar="TEXT", help="which tokens look replaced? - reads stdin"
    )
    names: dict[str, set[str]] = {}
    for cls in (RunConfig, ElectraConfig):
        options = [f for f in dataclasses.fields(cls) if f.metadata]
        names[cls.__name__] = {f.name for f in options}
        for f in options:
            kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            if not isinstance(f.default, bool):
                kind = {"type": fraction if isinstance(f.default, float) else type(f.default)}
            parser.add_argument(
                f"--{f.name}", help=f.metadata["help"], default=argparse.SUPPRESS, **kind
            )
    given = vars(parser.parse_args(arguments))
    text = given.pop("detect")
    size = given.get("size", "small" if given.get("data") else "tiny")
    if size not in SIZES:
        raise data.InputError(f"--size {size}: choose one of {', '.join(SIZES)}.")
    given = given if given.get("data") else DEMO | given
    config, run = (
        dataclasses.replace(
            part, **{k: v for k, v in given.items() if k in names[type(part).__name__]}
        )
        for part in SIZES[size]
    )
    width, micro_batch = generator_config(config), run.micro_batch or run.batch_size
    for wrong, problem in (
        (not 8 <= run.length <= config.max_positions, "--length must be 8 to --max_positions"),
        (run.batch_size % micro_batch, "--batch_size must be a multiple of --micro_batch"),
        (config.hidden_size % config.num_heads, "--hidden_size must be a multiple of --num_heads"),
        (
            width.hidden_size % width.num_heads,
            "the generator's width must be a multiple of its heads (one per 64)",
        ),
        (not 0 < config.mask_prob < 1, "--mask_prob must lie between 0 and 1"),
        (run.precision not in ("auto", *DTYPES), "--precision must be auto, fp32, bf16 or fp16"),
        (
            min(run.batch_size, run.steps, run.log_every, run.eval_every, run.eval_sequences) < 1,
            "sizes and intervals must be at least 1",
        ),
    ):
        if wrong:
            raise data.InputError(f"{problem}.")
    return config, run, text


def main(arguments: list[str] | None = None) -> int:
    try:
        config, run, text = parse_arguments(arguments)
        if text is None:
            pretrain(config, run)
        else:
            detect(Path(run.out), text)
    except data.InputError as error:
        print(f"electra.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
