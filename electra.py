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

import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import data

# ---- 2. Configuration. Every `option` below is also a command-line option of the same name.


def option(default: Any, help: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


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
    objective: str = option("electra", "what is learned: one of", "electra", "mlm", "electra_15",
        "replace_mlm", "all_tokens_mlm", "two_stage", "adversarial")  # fmt: skip
    embedding_sharing: str = option(
        "shared", "between the networks: one of", "shared", "separate", "all", "gdes")  # fmt: skip
    share_layers: bool = option(False, "one set of weights for all layers, as in ALBERT")
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
    size: str = option("small", "tiny, small, base or large: sets all else (no --data: tiny)")
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
    precision: str = option("auto", "one of", "auto", "fp32", "bf16", "fp16")
    compile: bool = option(False, "torch.compile the model: minutes to start, faster on a GPU")
    device: str = option("auto", "auto, cuda, mps or cpu")
    log_every: int = option(50, "steps between two rows of metrics.csv")
    eval_every: int = option(5000, "steps between two evaluations on held-out text")
    eval_sequences: int = option(512, "sequences of held-out text that an evaluation reads")
    save_minutes: float = option(10.0, "minutes between two checkpoints")
    profile: int = option(0, "only show where the time of this many steps goes; no run is kept")


# A size is its model AND its recipe. small, base and large are the paper's (table 6); tiny is ours,
# made for two CPU cores, with one encoder: two detect next to nothing at its learning rate, but do
# at 3e-4; at a loss weight of 50 the generator kept to counting words (trials of one seed each).
TINY_MODEL = ElectraConfig(
    vocab_size=8192, hidden_size=192, num_layers=3, num_heads=3, intermediate_size=768,
    generator_size=1.0, embedding_sharing="all", max_positions=128, dropout=0.0, init_std=0.06,
    embedding_std=0.05, sinusoids=True, mask_prob=0.25, discriminator_weight=10.0)  # fmt: skip
TINY_RECIPE = RunConfig(
    size="tiny", batch_size=16, steps=17_000, warmup_steps=500, learning_rate=1e-3,
    unigram_bias=True, eval_every=1000)  # fmt: skip
BASE_MODEL = ElectraConfig(
    embedding_size=768, hidden_size=768, num_heads=12, intermediate_size=3072,
    generator_size=1 / 3)  # fmt: skip
BASE_RECIPE = RunConfig(size="base", length=512, batch_size=256, steps=766_000, learning_rate=2e-4)
LARGE_MODEL = ElectraConfig(
    embedding_size=1024, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096,
    mask_prob=0.25)  # fmt: skip
LARGE_RECIPE = replace(BASE_RECIPE, size="large", batch_size=2048, steps=400_000)
SIZES = {"tiny": (TINY_MODEL, TINY_RECIPE), "small": (ElectraConfig(), RunConfig())}
SIZES |= {"base": (BASE_MODEL, BASE_RECIPE), "large": (LARGE_MODEL, LARGE_RECIPE)}
# The built-in corpus is small and plain: fewer words, layers and minutes show it learning.
DEMO: dict[str, Any] = {"vocab_size": 2048, "num_layers": 2, "learning_rate": 2e-3}
DEMO |= {"length": 64, "batch_size": 32, "warmup_steps": 200, "steps": 2000, "eval_every": 500}


def generator_config(config: ElectraConfig) -> ElectraConfig:
    """The generator is the discriminator made narrower; depth and embeddings stay (section 3.2)."""
    width, inner = config.hidden_size, config.intermediate_size
    width, inner = round(width * config.generator_size), round(inner * config.generator_size)
    heads = max(1, width // 64)
    return replace(config, hidden_size=width, intermediate_size=inner, num_heads=heads)


# ---- 3. The transformer encoder: BERT's, with LayerNorm after each residual sum. ---------------
MaybeTensor = Tensor | None  # an argument that may be left out
FUSED_ATTENTION = ("cuda",)  # devices with a faster kernel for it; a CPU's backward is slower
SLOW_DRAWS = ("cpu",)  # devices that draw random numbers one by one: the fewer, the better


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """F.dropout. On a CPU from one random byte per element: p becomes a multiple of 1/256.

    A Bernoulli draw per element took 21 % of a step of small there, this takes 5 %.
    """
    if x.device.type not in SLOW_DRAWS or not training or p == 0:
        return F.dropout(x, p, training)
    dropped = round(256 * p)
    eights = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    draws = eights.view(torch.uint8)[: x.numel()].view(x.shape)
    return x * (draws >= dropped).to(x.dtype).mul_(256 / (256 - dropped))


class Embeddings(nn.Module):
    """Word + position + token type: ids (B, L) -> (B, L, E)."""

    def __init__(self, config: ElectraConfig, base: nn.Embedding | None = None) -> None:
        super().__init__()
        self.base = [base] if base else []  # in a list: no part of this module
        self.word = nn.Embedding(config.vocab_size, config.embedding_size)
        self.position = nn.Embedding(config.max_positions, config.embedding_size)
        self.token_type = nn.Embedding(2, config.embedding_size)
        self.norm = nn.LayerNorm(config.embedding_size, eps=1e-12)
        self.p = config.dropout

    def forward(self, ids: Tensor, token_type_ids: MaybeTensor = None) -> Tensor:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(ids)
        words = self.word(ids)
        if self.base:  # "gdes" (DeBERTaV3): ours is what is added to the generator's table
            words = words + self.base[0](ids).detach()
        x = words + self.position.weight[: ids.shape[1]] + self.token_type(token_type_ids)
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
    if logits.device.type in SLOW_DRAWS:  # where the sum of p passes ONE draw: 9 % off a tiny step
        sums = (logits.float() / temperature).softmax(dim=-1).cumsum(dim=-1)
        draw = (1 - torch.rand_like(sums[..., :1])) * sums[..., -1:]  # > 0: no token of p = 0
        return torch.searchsorted(sums, draw).squeeze(-1).clamp(max=sums.size(-1) - 1)  # NaN: last
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
    """Generator and discriminator over shared embeddings, trained together (equation 3)."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.config = config
        # Section 3.2, weight sharing: one object in both networks. The generator learns about all
        # tokens of its softmax at once, the discriminator only about those it sees.
        embeddings = own = Embeddings(config)
        if config.embedding_sharing == "separate":
            own = Embeddings(config)
        elif config.embedding_sharing == "gdes":
            own = Embeddings(config, embeddings.word)
        self.generator = Generator(config, embeddings)
        self.discriminator = Discriminator(config, own)
        if config.embedding_sharing == "all":  # table 1, "all weights": generator_size is 1
            self.generator.encoder = self.discriminator.encoder
        if config.objective in ("replace_mlm", "all_tokens_mlm"):  # the main network names tokens
            self.corrector = Generator(replace(config, generator_size=1.0), own)
            self.corrector.encoder = self.discriminator.encoder
        self.second_stage = False  # of the objective two_stage
        self.apply(self.initialize)
        if own.base:
            nn.init.zeros_(own.word.weight)
        for encoder in (self.generator.encoder, self.discriminator.encoder):
            if encoder.project is not None:
                nn.init.xavier_uniform_(encoder.project.weight)
        nn.init.xavier_uniform_(self.discriminator.prediction.weight)
        if config.sinusoids:
            for part in (embeddings, own):
                part.position.weight.data = sinusoids(config)

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
        sampled = gumbel_sample(logits.detach())  # (B, K)
        sampled = torch.where(masked.chosen, sampled, original)
        corrupted_ids = ids.scatter(1, masked.positions, sampled)
        labels = corrupted_ids != ids
        real = torch.ones_like(labels) if attention_mask is None else attention_mask != 0
        if config.objective != "electra":  # what the paper compares it with: below
            out = masked, logits, generator_loss, corrupted_ids
            return other_objective(self, ids, (attention_mask, token_type_ids), real, *out)
        # Detect: the discriminator's loss is over all tokens.
        scores = self.discriminator(corrupted_ids, attention_mask, token_type_ids)
        discriminator_loss = masked_mean(binary_cross_entropy(scores, labels), real)
        loss = generator_loss + config.discriminator_weight * discriminator_loss
        return ElectraOutput(
            loss, generator_loss, discriminator_loss, masked, corrupted_ids, labels, logits, scores
        )


def other_objective(
    model: Electra, ids: Tensor, inputs: tuple[MaybeTensor, MaybeTensor], real: Tensor,
    masked: Masked, logits: Tensor, generator_loss: Tensor, corrupted_ids: Tensor,
) -> ElectraOutput:  # fmt: skip
    """The paper's other objectives (sections 3.3 and 3.4, appendix F), from the samples on.

    "discriminator_loss" is the loss of the main network, whatever it is asked.
    """
    objective, weight = model.config.objective, model.config.discriminator_weight
    labels, positions, chosen = corrupted_ids != ids, masked.positions, masked.chosen
    scores, main_loss = torch.zeros(ids.shape, device=ids.device), torch.zeros_like(generator_loss)
    if objective in ("electra_15", "adversarial") or model.second_stage:
        scores = model.discriminator(corrupted_ids, *inputs)
        nats = binary_cross_entropy(scores, labels)  # (B, L)
        main_loss = masked_mean(nats, real)
    match objective:
        case "mlm":  # BERT: the generator is the main network, in full size, and all there is
            loss = generator_loss
        case "electra_15":  # detect, but learn from the chosen tokens only
            main_loss = masked_mean(nats.gather(1, positions), chosen)
            loss = generator_loss + weight * main_loss
        case "replace_mlm":  # BERT, with samples of the generator in the place of [MASK]
            guesses = model.corrector(corrupted_ids, *inputs, positions)
            main_loss = masked_mean(cross_entropy(guesses, ids.gather(1, positions)), chosen)
            loss = generator_loss + main_loss
        case "all_tokens_mlm":  # predict every token: P = D [copied] + (1 - D) softmax
            x = model.discriminator.encoder(corrupted_ids, *inputs)
            scores = model.discriminator.head(x).float()  # the logit of 1 - D
            copied = F.logsigmoid(-scores).masked_fill(labels, -math.inf)
            predicted = F.logsigmoid(scores) - cross_entropy(model.corrector.head(x), ids)
            main_loss = masked_mean(-torch.logaddexp(copied, predicted), real)
            loss = generator_loss + main_loss
        case "two_stage":  # the generator alone; then the discriminator alone, from its weights
            loss = weight * main_loss if model.second_stage else generator_loss
        case "adversarial":  # REINFORCE: the generator is rewarded with the nats that it costs
            reward = nats.detach().gather(1, positions)
            reward = reward - masked_mean(reward, chosen)
            sampled_nats = cross_entropy(logits, corrupted_ids.gather(1, positions))
            loss = masked_mean(reward * sampled_nats, chosen) + weight * main_loss
    out = loss, generator_loss, main_loss, masked, corrupted_ids, labels, logits, scores
    return ElectraOutput(*out)


def enter_stage(model: Electra, step: int, steps: int) -> None:
    """two_stage: the discriminator has the second half of a run, and the generator's weights."""
    model.second_stage = model.config.objective == "two_stage" and step > steps // 2
    if model.second_stage and step == steps // 2 + 1:
        model.discriminator.encoder.load_state_dict(model.generator.encoder.state_dict())


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
    model: Electra, batches: list[list[Tensor]], autocast: torch.autocast
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
    generator = (sums[:3] / sums[3].clamp(min=1)).tolist()  # loss, accuracy, accuracy of samples
    score, label = torch.cat(scores), torch.cat(labels)
    verdict = score > 0
    hits = int((verdict & label).sum())
    loss = float(binary_cross_entropy(score, label).mean())
    right = float((verdict == label).float().mean())
    precision, recall = hits / max(1, int(verdict.sum())), hits / max(1, int(label.sum()))
    area = data.area_under_curve(score.numpy(), label.numpy())
    found = (*generator, loss, right, precision, recall, area, float(label.float().mean()))
    return dict(zip(data.VALID_METRICS, found, strict=True))


# ---- 7. Trained models: the folder of a run, and Hugging Face's. -------------------------------
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


def load_run(folder: Path) -> tuple[Electra, Any, dict[str, Any]]:
    """Model, tokenizer and settings ("size", "length") of a run, or of a Hugging Face folder."""
    config = data.hugging_face_config(HUGGING_FACE, folder, ElectraConfig(), generator_config)
    tokenizer = data.load_tokenizer(data.find_tokenizer(folder))
    model = Electra(data.fit_to_tokenizer(config, tokenizer, exact=False))
    if "discriminator" in data.load_hugging_face(HUGGING_FACE, folder, model):
        raise data.InputError(f"{folder} is a generator: name the folder of its discriminator.")
    sizes = [size for size in SIZES if SIZES[size][0].hidden_size == config.hidden_size]
    settings = {"size": (sizes or ["small"])[0], "length": config.max_positions}
    return model.eval(), tokenizer, settings | data.run_settings(folder)


# ---- 8. The training loop. ---------------------------------------------------------------------
def pretrain(config: ElectraConfig, run: RunConfig) -> None:
    """Everything from a text to a trained model in the folder `run.out`."""
    data.keep_memory()
    rank, world = data.join_processes()  # 0 and 1 without torchrun
    out = Path(run.out)
    with data.first_process_first(rank, world):
        corpus = data.prepare(run.data, run.tokens, run.tokenizer, run.vocab, config.vocab_size)
        tokenizer, train, valid, fingerprint = corpus
        # A model from elsewhere may have rows that its tokenizer never uses.
        config = data.fit_to_tokenizer(config, tokenizer, exact=not run.init_from)
        settings = asdict(run) | asdict(config) | {"text": fingerprint}
        held = data.open_run(out, settings, tokenizer.to_str(pretty=True), write=rank == 0)

    # Model and optimiser, where they start or where they stopped.
    device = data.choose_device(run.device)
    precision = data.choose_precision(run.precision, device)
    torch.manual_seed(run.seed)
    model = Electra(config)
    if run.init_from:
        for half in data.load_hugging_face(HUGGING_FACE, Path(run.init_from), model):
            print(f"{run.init_from}: no {half}. Beyond the embeddings, ours starts fresh.")
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
    network = model
    if world > 1:  # other objectives leave a head or a network without a gradient
        other = config.objective != "electra"
        network = nn.parallel.DistributedDataParallel(model, find_unused_parameters=other)

    data.show_run(settings, model)
    print(f"tokens: {len(train):,} and {len(valid):,} held out; {device}, {precision}")
    flops = data.flops_per_token(config, generator_config(config), run.length)
    print("FLOPs per token: generator {:,.0f}, main network {:,.0f}".format(*flops))

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
    stopping, low = False, 0  # low: evaluations in a row in which nothing was detected
    while step < run.steps and not stopping:
        # One step. Everything random in it follows from the seed and its number.
        step += 1
        enter_stage(model, step, run.steps)
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
            row["flops"] = numbers[1] * sum(flops)
            status = f"generator {means[0]:.3f}, discriminator {means[1]:.4f}, {speed:,.0f} tok/s"
            data.show_status(bar, step, seconds / step, status)
            if evaluation:
                result = evaluate(model, valid_batches, autocast)
                row |= result
                bar.write(f"\nheld-out text after step {step:,}: {data.show_result(result)}\n")
                bar.write(data.show_lesson(model, tokenizer, lesson))
                low = low + 1 if step > run.warmup_steps and data.detects_nothing(result) else 0
                if low == 4 and config.objective in ("electra", "electra_15"):
                    bar.write(data.collapse_advice(config))
            metrics.writerow(row)
        if save and rank == 0:
            state = {"step": step, "seconds": seconds, "logged": logged, "recent": recent}
            state |= {name: part.state_dict() for name, part in parts.items()}
            data.save_checkpoint(out / "checkpoint.pt", state)
            for half, of in (("generator", generator_config(config)), ("discriminator", config)):
                trained = getattr(model, half)
                data.write_hugging_face(HUGGING_FACE, out / half, half, trained, of, tokenizer)
            saved = time.perf_counter()
        clock = time.perf_counter()
    bar.close()
    held.close()
    more = "--steps asks for more" if step == run.steps else "the same command goes on from there"
    print(f"{out}: {step:,} of {run.steps:,} steps are done; {more}.")


# ---- 9. The command line. ----------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> None:
    config, run, text = data.parse_run(arguments, SIZES, DEMO, generator_config, HUGGING_FACE)
    if text is None:
        with data.profiler(run):
            pretrain(config, run)
    else:
        model, tokenizer, settings = load_run(Path(run.out))
        data.detect(model, tokenizer, settings, text)


if __name__ == "__main__":
    sys.exit(data.run_program("electra.py", main))
