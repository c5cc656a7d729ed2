"""ELECTRA in one file: pre-train a language model by teaching it to spot replaced words.

BERT hides 15 % of the words and learns to guess them: 85 % of each sentence teach it nothing.
ELECTRA (Clark et al., ICLR 2020, https://arxiv.org/abs/2003.10555) trains two networks instead. A
small *generator*, a BERT itself, fills the hidden places with words it finds plausible. The
*discriminator* reads the filled-in sentence and says of EVERY token whether it is the original or
a replacement. It learns from all tokens, so the same quality costs about a quarter of the compute.
The generator is thrown away afterwards; the discriminator is what gets fine-tuned.

    original     the    chef    cooked    the    meal
                          |                |
    masked       the   [MASK]   cooked   [MASK]  meal      15 % of the tokens
                          |                |
                      generator: a small masked language model
                          |                |                sample one token for each [MASK]
    corrupted    the    chef    cooked     a     meal      written over the original
                  |       |        |       |      |
                      discriminator: replaced or original?
                  |       |        |       |      |
    labels        0       0        0       1      0        a lucky guess counts as original

    loss = cross-entropy of the generator + 50 x binary cross-entropy of the discriminator

Run it:

    python electra.py                              a tiny ELECTRA on text this machine already has
    python electra.py --data owt.txt               ELECTRA-Small by the paper's recipe
    python electra.py --detect "the chef ate the sky"    which tokens look replaced?

Shapes: B batch, L length, E embedding width, D hidden width, H heads, V vocabulary, K predictions.
"""

import argparse
import math
import os
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import data

# ---- 2. Configuration. Every `option` below is also a command-line option of the same name.


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
    share_encoder: bool = option(False, "one encoder for both networks, not only one embedding")
    max_positions: int = option(512, "longest sequence the model can read")
    dropout: float = option(0.1, "dropout probability, everywhere")
    init_std: float = option(0.02, "standard deviation of the initial weights")
    embedding_std: float = option(0.02, "standard deviation of the initial embeddings")
    sinusoids: bool = option(False, "start the position embeddings as sinusoids, not at random")
    mask_prob: float = option(0.15, "share of the tokens that the generator predicts")
    mask_share: float = option(0.85, "share of those that it sees as [MASK]; it sees the others")
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
    size: str = option(
        "small", "tiny, small, base, large: defaults for all else (without --data: tiny)"
    )
    tokenizer: str = option("wordpiece", "wordpiece or bpe, trained on the text; or a file to use")
    vocab: str = option("", "a WordPiece vocabulary to use instead, such as BERT's vocab.txt")
    init_from: str = option("", "start from the networks in this Hugging Face folder")
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
    compile: bool = option(False, "torch.compile the model: minutes to start, faster on a GPU")
    device: str = option("auto", "auto, cuda, mps or cpu")
    log_every: int = option(50, "steps between two rows of metrics.csv")
    eval_every: int = option(5000, "steps between two evaluations on held-out text")
    eval_sequences: int = option(512, "sequences of held-out text that an evaluation reads")
    save_minutes: float = option(10.0, "minutes between two checkpoints")


# A size is its model AND its recipe. small, base and large are the paper's (table 6); tiny is ours,
# made for two CPU cores: in single trials of a few million tokens, separate encoders learned to
# detect next to nothing, and at a loss weight of 50 the generator kept to counting words.
TINY_MODEL = ElectraConfig(
    vocab_size=4096, hidden_size=192, num_layers=3, num_heads=3, intermediate_size=768,
    generator_size=1.0, share_encoder=True, max_positions=128, dropout=0.0, init_std=0.06,
    embedding_std=0.05, sinusoids=True, mask_prob=0.25, discriminator_weight=10.0)  # fmt: skip
TINY_RECIPE = RunConfig(
    size="tiny", length=64, batch_size=32, steps=18_000, warmup_steps=500, learning_rate=1e-3,
    unigram_bias=True, eval_every=1000)  # fmt: skip
BASE_MODEL = ElectraConfig(
    embedding_size=768, hidden_size=768, num_heads=12, intermediate_size=3072, generator_size=1 / 3
)
BASE_RECIPE = RunConfig(size="base", length=512, batch_size=256, steps=766_000, learning_rate=2e-4)
LARGE_MODEL = ElectraConfig(
    embedding_size=1024, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096,
    mask_prob=0.25)  # fmt: skip
LARGE_RECIPE = replace(BASE_RECIPE, size="large", batch_size=2048, steps=400_000)
SIZES = {"tiny": (TINY_MODEL, TINY_RECIPE), "small": (ElectraConfig(), RunConfig())}
SIZES |= {"base": (BASE_MODEL, BASE_RECIPE), "large": (LARGE_MODEL, LARGE_RECIPE)}
# The built-in corpus is small and plain: fewer words, layers and minutes show it learning.
DEMO: dict[str, Any] = {"vocab_size": 2048, "num_layers": 2, "learning_rate": 2e-3}
DEMO |= {"warmup_steps": 200, "steps": 2000, "eval_every": 500}


def generator_config(config: ElectraConfig) -> ElectraConfig:
    """The generator is the discriminator made narrower; depth and embeddings stay (section 3.2)."""
    width, inner = config.hidden_size, config.intermediate_size
    width, inner = round(width * config.generator_size), round(inner * config.generator_size)
    heads = max(1, width // 64)
    return replace(config, hidden_size=width, intermediate_size=inner, num_heads=heads)


# ---- 3. The transformer encoder: BERT's, with LayerNorm after each residual sum. ---------------
MaybeTensor = Tensor | None  # an argument that may be left out
FUSED_ATTENTION = ("cuda",)  # devices with a faster kernel for it; a CPU's backward is slower


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """F.dropout. On a CPU from one random byte per element: p becomes a multiple of 1/256.

    A Bernoulli draw per element took 21 % of a step of small there, this takes 5 %.
    """
    if x.device.type != "cpu" or not training or p == 0:
        return F.dropout(x, p, training)
    dropped = round(256 * p)
    eights = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    draws = eights.view(torch.uint8)[: x.numel()].view(x.shape)
    return x * (draws >= dropped).to(x.dtype).mul_(256 / (256 - dropped))


class Embeddings(nn.Module):
    """Word + position + token type: ids (B, L) -> (B, L, E)."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.embedding_size)
        self.position = nn.Embedding(config.max_positions, config.embedding_size)
        self.token_type = nn.Embedding(2, config.embedding_size)
        self.norm = nn.LayerNorm(config.embedding_size, eps=1e-12)
        self.p = config.dropout

    def forward(self, ids: Tensor, token_type_ids: MaybeTensor = None) -> Tensor:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(ids)
        x = self.word(ids) + self.position.weight[: ids.shape[1]] + self.token_type(token_type_ids)
        return dropout(self.norm(x), self.p, self.training)


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
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))

    def forward(
        self, ids: Tensor, attention_mask: MaybeTensor = None, token_type_ids: MaybeTensor = None
    ) -> Tensor:
        x = self.embeddings(ids, token_type_ids)
        if self.project is not None:
            x = self.project(x)  # (B, L, E) -> (B, L, D)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


# ---- 4. ELECTRA: mask, predict, sample, detect (section 2 and figure 2 of the paper).
class Masked(NamedTuple):
    """What mask_tokens chose. K is the same for all rows; `chosen` says which of the K count."""

    ids: Tensor  # (B, L), what the generator sees
    positions: Tensor  # (B, K), distinct within a row
    chosen: Tensor  # (B, K), bool


def mask_tokens(ids: Tensor, config: ElectraConfig, attention_mask: MaybeTensor = None) -> Masked:
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
    wanted = (config.mask_prob * length).round().clamp(min=1, max=K).minimum(legal.sum(1))  # (B,)
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
    noise = torch.rand_like(logits, dtype=torch.float32).log_().neg_().log_().neg_()
    return noise.add_(logits, alpha=1 / temperature).argmax(dim=-1)


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
        attention_mask: MaybeTensor = None,
        token_type_ids: MaybeTensor = None,
        positions: MaybeTensor = None,
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
        self, ids: Tensor, attention_mask: MaybeTensor = None, token_type_ids: MaybeTensor = None
    ) -> Tensor:
        """Logits of "this token was replaced": (B, L) -> (B, L)."""
        x = self.encoder(ids, attention_mask, token_type_ids)
        return self.prediction(F.gelu(self.dense(x))).squeeze(-1)


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


def sinusoids(config: ElectraConfig) -> Tensor:
    """Position embeddings (max_positions, E) of wavelengths 2.5 to 250, to learn on from there.

    One rotation leads from each position to the next: attention to neighbours is learned once.
    """
    frequency = 2 * math.pi / 2.5 * 100 ** -torch.linspace(0, 1, config.embedding_size // 2)
    angle = torch.arange(config.max_positions)[:, None] * frequency
    return 2 * config.embedding_std * torch.cat([angle.sin(), angle.cos()], dim=1)


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
        if config.share_encoder:  # table 1, "all weights": generator_size has to be 1
            self.generator.encoder = self.discriminator.encoder
        self.apply(self.initialize)
        for encoder in (self.generator.encoder, self.discriminator.encoder):
            if encoder.project is not None:
                nn.init.xavier_uniform_(encoder.project.weight)
        nn.init.xavier_uniform_(self.discriminator.prediction.weight)
        if config.sinusoids:
            embeddings.position.weight.data = sinusoids(config)

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
        nats = F.cross_entropy(logits.float().flatten(0, 1), original.flatten(), reduction="none")
        generator_loss = masked_mean(nats.view_as(original), masked.chosen)
        # Sample: no gradient flows through it (section 2: it would have to pass a discrete choice).
        sampled = gumbel_sample(logits.detach())  # (B, K)
        sampled = torch.where(masked.chosen, sampled, original)
        corrupted_ids = ids.scatter(1, masked.positions, sampled)
        labels = corrupted_ids != ids
        # Detect: the discriminator's loss is over all tokens.
        scores = self.discriminator(corrupted_ids, attention_mask, token_type_ids)
        real = torch.ones_like(labels) if attention_mask is None else attention_mask != 0
        nats = F.binary_cross_entropy_with_logits(scores.float(), labels.float(), reduction="none")
        discriminator_loss = masked_mean(nats, real)
        loss = generator_loss + config.discriminator_weight * discriminator_loss
        return ElectraOutput(
            loss, generator_loss, discriminator_loss, masked, corrupted_ids, labels, logits, scores
        )


# ---- 5. Optimiser and schedule (appendix A). ---------------------------------------------------
def make_optimizer(model: nn.Module, run: RunConfig) -> torch.optim.AdamW:
    """AdamW; biases and LayerNorms, the parameters with one dimension, do not decay."""
    parameters = list(model.parameters())  # an iterator would leave the second group empty
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": run.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cpu", "cuda")  # one pass over them, not a dozen
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-6, fused=fused)


def learning_rate(step: int, run: RunConfig) -> float:
    """That of step 1 ... run.steps; as in the official code it decays during warm-up, too."""
    return run.learning_rate * (1 - step / run.steps) * min(1.0, step / max(1, run.warmup_steps))


# ---- 6. Evaluation on held-out text. -----------------------------------------------------------
@torch.no_grad()
def evaluate(
    model: Electra, batches: list[tuple[Tensor, ...]], autocast: torch.autocast
) -> dict[str, float]:
    """Losses and accuracies without dropout, with the same masks and samples every time.

    "Always original" is right for most tokens: read the accuracy with precision, recall and AUC.
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
    generator_loss, accuracy, sampled_accuracy = (sums[:3] / sums[3].clamp(min=1)).tolist()
    score, label = torch.cat(scores), torch.cat(labels)
    verdict = score > 0
    hits = int((verdict & label).sum())
    return {
        "valid_generator_loss": generator_loss,
        "valid_generator_accuracy": accuracy,
        "valid_sampled_accuracy": sampled_accuracy,
        "valid_discriminator_loss": float(F.binary_cross_entropy_with_logits(score, label.float())),
        "valid_accuracy": float((verdict == label).float().mean()),
        "valid_precision": hits / max(1, int(verdict.sum())),
        "valid_recall": hits / max(1, int(label.sum())),
        "valid_auc": data.area_under_curve(score.numpy(), label.numpy()),
        "valid_replaced": float(label.float().mean()),
    }


@torch.no_grad()
def show_lesson(model: Electra, tokenizer: Any, ids: Tensor) -> str:
    """What the two networks make of one held-out sentence (1, L); fakes and verdicts coloured."""
    model.eval()
    torch.manual_seed(1)
    out = model(ids)
    model.train()
    shown = (("original", ids), ("masked", out.masked.ids), ("generator", out.corrupted_ids))
    rows = [(name, row[0].tolist(), (row[0] != ids[0]).tolist()) for name, row in shown]
    return data.show_tokens(tokenizer, rows, out.discriminator_logits[0].sigmoid().tolist())


# ---- 7. Trained models: the folder of a run, and Hugging Face's. -------------------------------
# What our settings, and the parts of our networks, are called in `transformers`. There each of the
# two networks has a folder and a config.json of its own. * is query, key and value, # a number.
HUGGING_FACE = {
    "vocab_size": "vocab_size",
    "embedding_size": "embedding_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
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
}


def hugging_face_config(config: ElectraConfig, folder: Path) -> ElectraConfig:
    """`config` with the shape of the networks in a Hugging Face folder."""
    shapes = {
        half: shape for half, (shape, _) in data.read_hugging_face(HUGGING_FACE, folder).items()
    }
    generator = shapes.get("generator", {})
    narrow = ("hidden_size", "num_heads", "intermediate_size")
    common = {name: value for name, value in generator.items() if name not in narrow}
    config = replace(config, **shapes.get("discriminator", common))
    if generator:
        config.generator_size = generator["hidden_size"] / config.hidden_size
        ours = asdict(generator_config(config)) | {"dropout": generator.get("dropout")}
        if wrong := [f"{k} {v} (not {ours[k]})" for k, v in generator.items() if v != ours[k]]:
            raise data.InputError(f"{folder}: cannot use a generator of {', '.join(wrong)}.")
    return config


def load_run(out: Path) -> tuple[Electra, Any, dict[str, Any]]:
    """Model, tokenizer and settings of a run, or of a Hugging Face folder.

    settings["step"] says how far the run was trained; settings["size"] whose recipe it follows.
    """
    settings = data.read_json(out / "config.json") if (out / "config.json").exists() else {}
    if "model_type" in settings:
        config = hugging_face_config(ElectraConfig(), out)
        tokenizer = data.load_tokenizer(data.find_tokenizer(out))
        model = Electra(replace(config, **data.special_ids(tokenizer)))
        data.load_hugging_face(HUGGING_FACE, out, model)
        sizes = [size for size in SIZES if SIZES[size][0].hidden_size == config.hidden_size]
        settings = {"size": (sizes or ["small"])[0], "length": config.max_positions, "step": 0}
        return model.eval(), tokenizer, settings
    state = data.load_checkpoint(out / "checkpoint.pt")
    if state is None:
        raise data.InputError(f"{out}: no trained model. Train one: python electra.py --out {out}")
    known = {f.name for f in fields(ElectraConfig)} & set(settings)
    model = Electra(ElectraConfig(**{name: settings[name] for name in known}))
    model.load_state_dict(state["model"])
    tokenizer = data.load_tokenizer(out / "tokenizer.json")
    return model.eval(), tokenizer, settings | {"step": state["step"]}


# ---- 8. The training loop. ---------------------------------------------------------------------
def pretrain(config: ElectraConfig, run: RunConfig) -> None:
    """Everything from a text to a trained model in the folder `run.out`."""
    data.keep_memory()
    rank, world = data.join_processes()  # 0 and 1 without torchrun
    out = Path(run.out)
    with data.first_process_first(rank, world):
        corpus = data.prepare(run.data, run.tokens, run.tokenizer, run.vocab, config.vocab_size)
        tokenizer, train, valid, fingerprint = corpus
        config = replace(config, **data.special_ids(tokenizer))
        if not run.init_from:  # a model from elsewhere may have rows that its tokenizer never uses
            config.vocab_size = tokenizer.get_vocab_size()
        settings = asdict(run) | asdict(config) | {"text": fingerprint}
        held = data.open_run(out, settings, tokenizer.to_str(pretty=True), write=rank == 0)

    # Model and optimiser, where they start or where they stopped.
    device = data.choose_device(run.device)
    precision = data.choose_precision(run.precision, device)
    torch.manual_seed(run.seed)
    model = Electra(config)
    if run.init_from:
        data.load_hugging_face(HUGGING_FACE, Path(run.init_from), model)
    elif run.unigram_bias:
        counts = np.bincount(train[:10_000_000], minlength=config.vocab_size) + 1.0
        model.generator.bias.data = torch.tensor(np.log(counts / counts.sum()), dtype=torch.float32)
    model.to(device).train()
    if run.compile:
        model.compile()
    optimizer = make_optimizer(model, run)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    autocast = torch.autocast(device.type, data.DTYPES[precision], enabled=precision != "fp32")
    step, seconds, logged = 0, 0.0, 0.0  # time spent training, and that of the last row logged
    recent: list[Tensor] = []  # losses since that row; they stay on the device
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    if state := data.load_checkpoint(out / "checkpoint.pt"):
        for name, part in parts.items():
            part.load_state_dict(state[name])
        step, seconds, logged = state["step"], state["seconds"], state["logged"]
        recent = [losses.to(device) for losses in state["recent"]]
    # Each process takes its share of a batch; backward averages their gradients.
    network = DistributedDataParallel(model) if world > 1 else model

    print(textwrap.fill(", ".join(f"{k} {v}" for k, v in settings.items() if v != ""), 100))
    for part in ("generator", "discriminator", "together"):
        parameters = getattr(model, part, model).parameters()
        print(f"parameters, {part}: {sum(p.numel() for p in parameters):,}")
    print(f"tokens: {len(train):,} and {len(valid):,} held out; {device}, {precision}")

    def get_batch(tokens: np.ndarray, first: int, rows: int, seed: int) -> list[Tensor]:
        special = config.cls_id, config.sep_id
        return data.batch_on(device, tokens, first, rows, run.length, seed, *special)

    micro_batch = run.micro_batch or run.batch_size // world
    accumulation = run.batch_size // (micro_batch * world)
    held_out = min(run.eval_sequences, data.sequences_per_epoch(len(valid), run.length))
    starts = range(0, held_out, micro_batch)
    valid_batches = [get_batch(valid, i, min(micro_batch, held_out - i), 0) for i in starts]
    sentence = data.find_sentence(valid, tokenizer, run.length)
    lesson = torch.tensor([[config.cls_id, *sentence, config.sep_id]], device=device)
    stop = data.catch_signals()
    metrics = data.open_metrics(out / "metrics.csv" if rank == 0 else Path(os.devnull), step)
    bar = tqdm(total=run.steps, initial=step, unit="step", disable=True if rank else None)
    saved = clock = time.perf_counter()
    stopping = False
    while step < run.steps and not stopping:
        # One step. Everything random in it follows from the seed and its number.
        step += 1
        rate = learning_rate(step, run)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = torch.zeros(3, device=device)
        for micro in range(rank * accumulation, (rank + 1) * accumulation):
            first = (step - 1) * run.batch_size + micro * micro_batch
            ids, token_type_ids = get_batch(train, first, micro_batch, run.seed)
            torch.manual_seed(hash((run.seed, step, micro)))
            # Gradients are exchanged once a step, and the forward pass has to know it, too.
            last = world == 1 or micro == (rank + 1) * accumulation - 1
            with nullcontext() if last else network.no_sync():
                with autocast:
                    output = network(ids, token_type_ids=token_type_ids)
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
        evaluation = step == run.steps or step % run.eval_every == 0
        log = evaluation or step % run.log_every == 0
        stopping = data.any_process(stop, device) if log or world == 1 else False
        save = evaluation or stopping or log and time.perf_counter() - saved > 60 * run.save_minutes
        if not (log or save):
            continue
        means = data.mean_losses(recent, step, precision == "fp16", world)
        seconds += time.perf_counter() - clock
        if log:
            speed = len(recent) * run.batch_size * run.length / (seconds - logged)
            recent, logged = [], seconds
            numbers = (step, step * run.batch_size * run.length, seconds, rate, *means)
            row = dict(zip(data.METRICS, numbers, strict=False))
            status = f"generator {means[0]:.3f}, discriminator {means[1]:.4f}, {speed:,.0f} tok/s"
            bar.set_postfix_str(status)
            if bar.disable:  # no terminal: plain lines
                left = tqdm.format_interval((run.steps - step) * seconds / step)
                print(f"step {step:,} of {run.steps:,}: {status}, {left} left", flush=True)
            if evaluation:
                result = evaluate(model, valid_batches, autocast)
                row |= result
                shown = ", ".join(f"{k[6:]} {v:.3f}" for k, v in result.items())
                bar.write(f"\nheld-out text after step {step:,}: {shown}\n")
                bar.write(show_lesson(model, tokenizer, lesson))
            metrics.writerow(row)
        if save and rank == 0:
            state = {"step": step, "seconds": seconds, "logged": logged, "recent": recent}
            state |= {name: part.state_dict() for name, part in parts.items()}
            data.save_checkpoint(out / "checkpoint.pt", state)
            saved = time.perf_counter()
        clock = time.perf_counter()
    bar.close()
    if rank == 0:
        for half, of in (("generator", generator_config(config)), ("discriminator", config)):
            network = getattr(model, half)
            data.write_hugging_face(HUGGING_FACE, out / half, half, network, of, tokenizer)
    held.close()
    more = "--steps asks for more" if step == run.steps else "the same command goes on from there"
    print(f"{out}: {step:,} of {run.steps:,} steps are done; {more}.")


# ---- 9. The command line. ----------------------------------------------------------------------
@torch.no_grad()
def detect(out: Path, text: str) -> None:
    """Print every token of the text with the probability that it is a replacement."""
    model, tokenizer, settings = load_run(out)
    room = settings["length"] - 2  # what it was trained on: positions behind that know nothing
    for line in sys.stdin if text == "-" else [text]:
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        for part in (ids[i : i + room] for i in range(0, len(ids), room)):
            sentence = torch.tensor([[model.config.cls_id, *part, model.config.sep_id]])
            chances = model.discriminator(sentence)[0, 1:-1].sigmoid()
            rows = [("token", part, (chances > 0.5).tolist())]
            print(data.show_tokens(tokenizer, rows, chances.tolist()))


def parse_arguments(arguments: list[str] | None) -> tuple[ElectraConfig, RunConfig, str | None]:
    """The size's model and recipe, with what the command line says instead."""
    parser = argparse.ArgumentParser(description="Pre-train ELECTRA on a text.", allow_abbrev=False)
    parser.add_argument("--detect", metavar="TEXT", help="show what looks replaced; - reads stdin")
    data.add_options(parser, RunConfig)
    data.add_options(parser, ElectraConfig)
    given = vars(parser.parse_args(arguments))
    text = given.pop("detect")
    size = given.get("size", "small" if given.get("data") else "tiny")
    if size not in SIZES:
        raise data.InputError(f"--size {size}: choose one of {', '.join(SIZES)}.")
    config, run = SIZES[size]
    given = given if given.get("data") else DEMO | given
    of_model = {name: given.pop(name) for name in list(given) if hasattr(config, name)}
    config, run = replace(config, **of_model), replace(run, **given)
    if run.init_from:
        config = hugging_face_config(config, Path(run.init_from))
        if other := [k for k, v in of_model.items() if getattr(config, k) != v]:
            raise data.InputError(f"{run.init_from} decides --{other[0]}: leave the option out.")
        if not {"tokenizer", "vocab"} & set(given):
            run.tokenizer = str(data.find_tokenizer(Path(run.init_from)))
    data.check_settings(config, generator_config(config), run)
    return config, run, text


def main(arguments: list[str] | None = None) -> None:
    config, run, text = parse_arguments(arguments)
    if text is None:
        pretrain(config, run)
    else:
        detect(Path(run.out), text)


if __name__ == "__main__":
    sys.exit(data.run_program("electra.py", main))
