"""Fine-tune ELECTRA on GLUE: nine tasks of understanding English, one table at the end.

    python train_glue.py --fetch                              # download and check the data
    python train_glue.py --model out --task all --seeds 5     # all tasks, five runs each
    python train_glue.py --model none --out out               # the same model from random weights
    python train_glue.py --model out/glue/SST-2 --classify "a gorgeous film"

The generator has done its work and is gone. One new linear layer reads the discriminator's vector
of the first token, [CLS], and says what the task asks for:

    [CLS] a gorgeous film [SEP]                           -> 1, a positive review
    [CLS] A man sleeps. [SEP] Someone is awake. [SEP]     -> contradiction

Everything is trained together for a few epochs, the lower layers more gently: what they learned in
pre-training is what all tasks have in common. The recipe is the paper's (appendix B, table 7).
"""

import argparse
import copy
import csv
import functools
import hashlib
import io
import itertools
import json
import math
import os
import statistics
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

import data
from data import InputError
from electra import (
    DTYPES,
    WEIGHTS,
    Electra,
    ElectraConfig,
    Encoder,
    RunConfig,
    add_options,
    check_options,
    choose_device,
    choose_precision,
    keep_memory,
    learning_rate,
    load_run,
    mean_ranks,
    option,
    parse,
    write_hugging_face,
)

EPOCHS = {"STS-B": 10, "RTE": 10}  # the other tasks: 3
# Peak learning rate, layer-wise decay (tables 6 and 7 of the paper) and head. tiny is ours: after
# so short a pre-training [CLS] has gathered less than the mean of all tokens holds.
RECIPES = {"tiny": (3e-4, 0.8, "mean"), "small": (3e-4, 0.8, "first")}
RECIPES |= {"base": (1e-4, 0.8, "first"), "large": (5e-5, 0.9, "first")}
POOL = 50  # batches that are sorted by length together
DOUBLED = ("MRPC", "STS-B")  # trained on both orders of a pair, as in the official code


@dataclass
class GlueConfig:
    """The command line."""

    model: str = option("out", "run or Hugging Face folder to start from, or none: random weights")
    out: str = option("", "run folder of architecture, tokenizer and results (default: --model)")
    glue: str = option("glue", "folder with <TASK>/*.tsv; what is missing is fetched")
    fetch: bool = option(False, "only download the tasks, and check every file")
    task: str = option("all", "all, or tasks with commas between them, such as CoLA,RTE")
    seeds: int = option(1, "runs of each task, with seeds 0, 1, ...", "[1, 1000]")
    init_from: str = option("", "folder of a fine-tuned model to start from, such as out/glue/MNLI")
    head: str = option(
        "auto", "what the new layer reads, the first token or the mean of all",
        ("auto", "first", "mean"))  # fmt: skip
    learning_rate: float = option(0.0, "peak (default: by size, 3e-4 for small)", "[0, 1]")
    layer_decay: float = option(0.0, "from a layer to that below (default: by size)", "[0, 1]")
    epochs: int = option(0, "default: 10 for STS-B and RTE, 3 for the others", "[0, 1000]")
    batch_size: int = option(32, "examples in a step", "[1, 100000]")
    length: int = option(128, "longest input in tokens; longer ones are cut", "[8, 65536]")
    double_pairs: bool = option(True, "train MRPC and STS-B on each pair in both orders")
    precision: str = option("auto", "of the arithmetic", ("auto", "fp32", "bf16", "fp16"))
    device: str = option("auto", "auto, cuda, mps or cpu")
    save: str = option("none", "model of a task to keep (best: on dev)", ("none", "best", "last"))
    predict: bool = option(False, "also write the submission for the GLUE site, a zip")
    export: str = option(
        "", "write the encoder of a saved --model to this folder, for Hugging Face"
    )
    classify: str = option(
        "", "TEXT, or two with a tab between them, for a saved --model; -: stdin"
    )


# ---- The data: archives and TSV files ----------------------------------------------------------
class GlueTask(NamedTuple):
    """Where a task of GLUE is fetched, and where its texts and labels stand (columns from 0)."""

    sources: tuple[str, ...]  # addresses
    rows: dict[str, int]  # file -> rows of the official release, headers not counted
    texts: tuple[int, ...]  # columns of the text, or of both texts, in train and dev
    test_texts: tuple[int, ...]
    label: int  # column of the label in train and dev
    labels: tuple[str, ...]  # in the order of a model's outputs; none: a score from 0 to 5


def rows(train: int, dev: int, test: int) -> dict[str, int]:
    return {"train": train, "dev": dev, "test": test}


SITE = "https://dl.fbaipublicfiles.com/"
AT, PAIRS = SITE + "glue/data/", SITE + "senteval/senteval_data/msr_paraphrase_"
YES_NO, ENTAILED = ("0", "1"), ("entailment", "not_entailment")
NLI = ("contradiction", "entailment", "neutral")
MNLI_ROWS = {"train": 392702, "dev_matched": 9815, "dev_mismatched": 9832}
MNLI_ROWS |= {"test_matched": 9796, "test_mismatched": 9847}
# MRPC has no archive: its pairs are two files, and a list says which of them are for dev. The
# diagnostic set, AX on the site, is test only and predicted with the MNLI model.
MRPC = (PAIRS + "train.txt", PAIRS + "test.txt", AT + "mrpc_dev_ids.tsv")
GLUE = {
    "CoLA": GlueTask((AT + "CoLA.zip",), rows(8551, 1043, 1063), (3,), (1,), 1, YES_NO),
    "SST-2": GlueTask((AT + "SST-2.zip",), rows(67349, 872, 1821), (0,), (1,), 1, YES_NO),
    "MRPC": GlueTask(MRPC, rows(3668, 408, 1725), (3, 4), (3, 4), 0, YES_NO),
    "STS-B": GlueTask((AT + "STS-B.zip",), rows(5749, 1500, 1379), (-3, -2), (-2, -1), -1, ()),
    "QQP": GlueTask(
        (AT + "QQP-clean.zip",), rows(363846, 40430, 390965), (3, 4), (1, 2), 5, YES_NO
    ),
    "MNLI": GlueTask((AT + "MNLI.zip",), MNLI_ROWS, (8, 9), (8, 9), -1, NLI),
    "QNLI": GlueTask((AT + "QNLIv2.zip",), rows(104743, 5463, 5463), (1, 2), (1, 2), 3, ENTAILED),
    "RTE": GlueTask((AT + "RTE.zip",), rows(2490, 277, 3000), (1, 2), (1, 2), 3, ENTAILED),
    "WNLI": GlueTask((AT + "WNLI.zip",), rows(635, 71, 146), (1, 2), (1, 2), 3, YES_NO),
    "diagnostic": GlueTask((AT + "AX.tsv",), {"diagnostic": 1104}, (1, 2), (1, 2), -1, NLI),
}
TASKS = [task for task in GLUE if task != "diagnostic"]


class Example(NamedTuple):
    texts: tuple[str, ...]  # one sentence, or two
    label: float  # number of the class, or the score; NaN where there is none


def read_rows(path: Path) -> list[list[str]]:
    """The cells of every line, headers too. A TSV is no CSV: quotes are ordinary characters.

    A line ends at a newline and nowhere else (str.splitlines would cut at U+0085, too).
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start:,} is not UTF-8. Fetch it again.") from None
    return [line.removesuffix("\r").split("\t") for line in text.rstrip("\r\n").split("\n")]


def header_lines(task: str, name: str) -> int:
    return 0 if task == "CoLA" and name != "test" else 1


def read_glue(folder: Path, task: str, name: str) -> tuple[list[Example], list[str]]:
    """The examples of folder/task/name.tsv, and a line about each row that cannot be read.

    A bad row is left out of train. Elsewhere it stays, with what can be read of it, so that the
    predictions keep their places.
    """
    path, facts = folder / task / f"{name}.tsv", GLUE[task]
    rows = read_rows(path)
    width = statistics.mode(map(len, rows))
    labelled = name.startswith(("train", "dev"))
    columns = facts.texts if labelled else facts.test_texts
    needed = (*columns, facts.label) if labelled else columns
    if not all(-width <= column < width for column in needed):
        raise InputError(f"{path}: {width} columns are too few. Is it a file of {task}?")
    examples, problems = [], []
    first = header_lines(task, name)
    if len(rows) == first:
        raise InputError(f"{path}: no rows. Fetch it again.")
    for number, row in enumerate(rows[first:], first + 1):
        try:
            if len(row) != width:
                raise ValueError(f"{len(row)} columns instead of {width}")
            texts = tuple(row[column] for column in columns)
            label = parse_label(row[facts.label], facts.labels) if labelled else math.nan
            empty = not all(text.strip() for text in texts)
            if empty:
                problems.append(f"{path}, line {number}: an empty text")
            if not empty or name != "train":
                examples.append(Example(texts, label))
        except ValueError as error:
            problems.append(f"{path}, line {number}: {error}")
            if name != "train":
                examples.append(Example(("",) * len(columns), math.nan))
    if len(problems) == len(rows) - first:
        raise InputError(f"{path}: no row can be read ({problems[0]}). Is it a file of {task}?")
    return examples, problems


def parse_label(cell: str, labels: tuple[str, ...]) -> float:
    """Number of the class, or the score where a task has no classes; ValueError for neither."""
    if cell in labels:
        return float(labels.index(cell))
    if labels or not 0 <= float(cell) <= 5:
        raise ValueError(f"label {cell!r:.40} is not {' or '.join(labels) or 'from 0 to 5'}")
    return float(cell)


def write_keeping(path: Path, content: bytes) -> None:
    """Write a file of GLUE; another one that is there already is kept as <name>.old."""
    if path.exists() and path.read_bytes() != content:
        os.replace(path, path.with_name(path.name + ".old"))
    path.parent.mkdir(parents=True, exist_ok=True)
    data.write_atomically(path, content)


def unpack(archive: Path, folder: Path, task: str) -> None:
    """Take the task's files, and nothing else, out of an archive, whatever its paths say."""
    try:
        with zipfile.ZipFile(archive) as zipped:
            members = zipped.namelist()
            for name in GLUE[task].rows:
                if f"{task}/{name}.tsv" not in members:
                    raise InputError(
                        f"{archive}: no {task}/{name}.tsv in it, but {', '.join(members[:3])}."
                    )
            for name in GLUE[task].rows:
                write_keeping(folder / task / f"{name}.tsv", zipped.read(f"{task}/{name}.tsv"))
    except (zipfile.BadZipFile, zlib.error, EOFError):
        start = archive.read_bytes()[:40]
        raise InputError(f"{archive}: no whole zip archive, it begins {start!r}.") from None


def build_mrpc(train: Path, test: Path, dev_ids: Path, folder: Path) -> None:
    """MRPC as GLUE has it: the pairs whose ids are listed become dev, the others stay in train."""

    def lines(path: Path) -> list[bytes]:
        return [line.removesuffix(b"\r") for line in path.read_bytes().rstrip().split(b"\n")]

    held_out = set(lines(dev_ids))
    header, *pairs = lines(train)
    files: dict[str, list[bytes]] = {"train": [header], "dev": [header]}
    for pair in pairs:
        name = "dev" if b"\t".join(pair.split(b"\t")[1:3]) in held_out else "train"
        files[name].append(pair)
    files["test"] = [b"index\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for index, pair in enumerate(lines(test)[1:]):
        files["test"].append(b"%d\t%s" % (index, pair.partition(b"\t")[2]))
    for name, rows in files.items():
        write_keeping(folder / "MRPC" / f"{name}.tsv", b"\n".join(rows) + b"\n")


def check_glue(folder: Path, task: str) -> dict[str, str]:
    """What is wrong with each file of a task; an empty string where it is whole."""
    problems = {}
    for name, official in GLUE[task].rows.items():
        path = folder / task / f"{name}.tsv"
        problems[name] = "missing"
        if path.is_file():
            rows = len(read_rows(path)) - header_lines(task, name)
            whole = rows == official
            problems[name] = "" if whole else f"{rows:,} rows, the official file has {official:,}"
    return problems


def fetch_glue(folder: Path, task: str) -> None:
    """Download a task and write its files in the official layout."""
    folder.mkdir(parents=True, exist_ok=True)
    fetched = [folder / url.rpartition("/")[2] for url in GLUE[task].sources]
    for url, path in zip(GLUE[task].sources, fetched, strict=True):
        if not path.exists():
            print(f"fetching {url}", flush=True)
            data.download(url, path)
    try:
        if task == "MRPC":
            build_mrpc(*fetched, folder)
        elif task == "diagnostic":
            write_keeping(folder / task / "diagnostic.tsv", fetched[0].read_bytes())
        else:
            unpack(fetched[0], folder, task)
    finally:  # unpacked, or of no use
        for path in fetched:
            path.unlink()


def fetch_tasks(folder: Path, tasks: list[str]) -> None:
    """Download what is missing of these tasks, and say of every file whether it is whole."""
    bad = 0
    for task in tasks + ["diagnostic"] * ("MNLI" in tasks):
        try:
            if any(check_glue(folder, task).values()):
                fetch_glue(folder, task)
        except (InputError, OSError) as error:
            print(f"train_glue.py: {error}", file=sys.stderr)
        for name, problem in check_glue(folder, task).items():
            print(f"{folder / task / name}.tsv: {problem or 'whole'}", flush=True)
            bad += bool(problem)
    if bad:
        raise InputError(f"{folder}: {bad} files are not whole. The same command tries again.")


# ---- Metrics: predicted and true values (N,) -> a number, 1.0 at best --------------------------
def accuracy(predicted: np.ndarray, true: np.ndarray) -> float:
    return float((predicted == true).mean())


def f1(predicted: np.ndarray, true: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1."""
    both = float(predicted.sum() + true.sum())
    return 2 * float((predicted * true).sum()) / both if both else 0.0


def pearson(predicted: np.ndarray, true: np.ndarray) -> float:
    """Linear correlation; of two classes it is the Matthews correlation.

    A constant tells nothing about anything else: its correlation is 0 here, not NaN.
    """
    if np.ptp(predicted) == 0 or np.ptp(true) == 0:
        return 0.0
    return float(np.corrcoef(predicted, true)[0, 1])


def spearman(predicted: np.ndarray, true: np.ndarray) -> float:
    """Linear correlation of the ranks; ties share their mean rank."""
    return pearson(mean_ranks(predicted), mean_ranks(true))


Metric = Callable[[np.ndarray, np.ndarray], float]
# The first metric of a task is the one that the paper averages.
METRICS: dict[str, dict[str, Metric]] = {
    "CoLA": {"Matthews": pearson},
    "SST-2": {"accuracy": accuracy},
    "MRPC": {"accuracy": accuracy, "F1": f1},
    "STS-B": {"Spearman": spearman, "Pearson": pearson},
    "QQP": {"accuracy": accuracy, "F1": f1},
    "MNLI": {"accuracy": accuracy},  # on two dev sets: matched and mismatched
    "QNLI": {"accuracy": accuracy},
    "RTE": {"accuracy": accuracy},
    "WNLI": {"accuracy": accuracy},
}
# ELECTRA-Small, released by its authors, on the dev sets (1M steps on OpenWebText).
PUBLISHED = {"CoLA": 56.8, "SST-2": 88.3, "MRPC": 87.4, "STS-B": 86.8, "QQP": 88.3, "MNLI": 78.9}
PUBLISHED |= {"QNLI": 87.9, "RTE": 68.5}


# ---- Examples ----------------------------------------------------------------------------------
class Encoded(NamedTuple):
    """Examples as token ids, without padding: [CLS] A [SEP], or [CLS] A [SEP] B [SEP]."""

    ids: list[np.ndarray]
    second: np.ndarray  # (N,), where B begins; token type 1 from there
    lengths: np.ndarray  # (N,)
    labels: np.ndarray  # (N,), NaN where there is none


def truncate(a: int, b: int, room: int) -> tuple[int, int]:
    """Lengths that fit: the longer text loses its last token, on a tie the second one does."""
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return a, b


def encode(examples: list[Example], tokenizer: Tokenizer, length: int) -> Encoded:
    cls, sep = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    texts = [text for example in examples for text in example.texts]
    pieces = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    ids, second = [], []
    for example in examples:
        parts = [next(pieces).ids for _ in example.texts]
        a, *rest = parts
        b = rest[0] if rest else []
        kept_a, kept_b = truncate(len(a), len(b), length - 1 - len(parts))
        row = [cls, *a[:kept_a], sep]
        second.append(len(row))
        ids.append(np.array(row + [*b[:kept_b], sep] * len(rest)))
    lengths = np.array([len(row) for row in ids])
    return Encoded(ids, np.array(second), lengths, np.array([e.label for e in examples]))


def collate(encoded: Encoded, rows: np.ndarray, device: torch.device) -> list[Tensor]:
    """ids, attention_mask and token_type_ids (B, L) of some rows, L their own longest."""
    column = np.arange(encoded.lengths[rows].max())
    mask = column < encoded.lengths[rows, None]
    ids = np.zeros(mask.shape)  # whatever stands at padding is never looked at
    ids[mask] = np.concatenate([encoded.ids[row] for row in rows])
    types = mask & (column >= encoded.second[rows, None])
    return [torch.from_numpy(x.astype(np.int64)).to(device) for x in (ids, mask, types)]


def shuffled_batches(
    lengths: np.ndarray, batch_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Every row once, in random batches of rows of similar length: little padding."""
    order = rng.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), POOL * batch_size):
        pool = order[start : start + POOL * batch_size]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


# ---- The model ---------------------------------------------------------------------------------
class Classifier(nn.Module):
    """The discriminator's encoder and one new layer: (B, L) -> (B, classes), or (B, 1), a score."""

    def __init__(self, encoder: Encoder, classes: int, head: str) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.dropout = nn.Dropout(0.1)
        self.prediction = nn.Linear(encoder.layers[0].output.out_features, classes)
        nn.init.xavier_uniform_(self.prediction.weight)
        nn.init.zeros_(self.prediction.bias)

    def forward(self, ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.encoder(ids, attention_mask, token_type_ids)  # (B, L, D)
        if self.head == "mean":
            mask = attention_mask[:, :, None]
            x = (x * mask).sum(1) / mask.sum(1).clamp(min=1)
        else:
            x = x[:, 0]  # [CLS]
        return self.prediction(self.dropout(x))  # (B, D) -> (B, classes)


def layerwise_optimizer(model: Classifier, decay: float) -> torch.optim.AdamW:
    """Adam, each layer learning `decay` times as fast as the one above it; embeddings slowest.

    The paper's factors: 1 for the head, then d, d^2, ... (the official code skips d).
    """
    encoder = model.encoder
    bottom = [encoder.embeddings] + [encoder.project] * (encoder.project is not None)
    parts = [model.prediction, *reversed(encoder.layers), nn.ModuleList(bottom)]
    groups = [
        {"params": list(part.parameters()), "factor": decay**depth}
        for depth, part in enumerate(parts)
    ]
    fused = model.prediction.weight.device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=0.0, eps=1e-6, weight_decay=0.0, fused=fused)


# ---- Fine-tuning -------------------------------------------------------------------------------
class Start(NamedTuple):
    """What every run of a sweep begins with."""

    config: ElectraConfig
    tokenizer: Tokenizer
    encoder: Encoder | None  # none: random weights, others for each seed
    origin: str  # "pre-trained", "none", or the folder of --init_from
    weights: str  # digest of the encoder that was pre-trained


def new_classifier(start: Start, task: str, head: str) -> Classifier:
    """A fresh head on a copy of the encoder, or on one with random weights."""
    encoder = copy.deepcopy(start.encoder) or Electra(start.config).discriminator.encoder
    return Classifier(encoder, len(GLUE[task].labels) or 1, head)


def classify(model: Classifier, encoded: Encoded, rows: np.ndarray, precision: str) -> Tensor:
    """Logits (B, classes) of some rows, in mixed precision."""
    device = model.prediction.weight.device
    with torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32"):
        return model(*collate(encoded, rows, device)).float()


def fine_tune(
    task: str, train: Encoded, start: Start, options: GlueConfig, seed: int
) -> Classifier:
    """One run: head and encoder trained together for a few epochs (appendix B)."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    device = choose_device(options.device)
    model = new_classifier(start, task, options.head).to(device).train()
    optimizer = layerwise_optimizer(model, options.layer_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
    steps = options.epochs * math.ceil(len(train.ids) / options.batch_size)
    schedule = RunConfig(steps=steps, warmup_steps=steps // 10, learning_rate=options.learning_rate)
    epochs = (
        shuffled_batches(train.lengths, options.batch_size, rng) for _ in range(options.epochs)
    )
    bar = tqdm(total=steps, desc=f"{task} seed {seed}", unit="step", disable=None, leave=False)
    for step, rows in enumerate(itertools.chain.from_iterable(epochs), 1):
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * learning_rate(step, schedule)
        labels = torch.from_numpy(train.labels[rows]).to(device)
        logits = classify(model, train, rows, options.precision)
        if GLUE[task].labels:
            loss = F.cross_entropy(logits, labels.long())
        else:  # a score from 0 to 5
            loss = F.mse_loss(logits[:, 0], labels.float() / 5)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        bar.update()
        if step % 50 == 0:
            bar.set_postfix_str(f"loss {loss:.3f}")
        if bar.disable and step % 1000 == 0:  # no terminal: plain lines
            print(f"{task} seed {seed}: step {step:,} of {steps:,}, loss {loss:.3f}", flush=True)
    bar.close()
    if not all(p.isfinite().all() for p in model.parameters()):
        raise InputError(f"{task} seed {seed} diverged. Choose a lower --learning_rate.")
    return model.eval()


@torch.no_grad()
def predict(model: Classifier, encoded: Encoded, task: str, precision: str) -> np.ndarray:
    """Number of the class, or score from 0 to 5, of all examples (N,), each exactly once."""
    order = np.argsort(encoded.lengths, kind="stable")  # similar lengths together: little padding
    batches = [order[i : i + 128] for i in range(0, len(order), 128)]
    logits = torch.cat([classify(model, encoded, rows, precision).cpu() for rows in batches])
    logits = logits.numpy()[np.argsort(order)]
    return logits.argmax(1) if GLUE[task].labels else np.clip(5 * logits[:, 0], 0, 5)


def score(task: str, file: str, predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Metrics on a dev set, in percent; what has no label is not counted."""
    known = ~np.isnan(true)
    kind = file.removeprefix("dev").replace("_", " ")  # MNLI: matched and mismatched
    return {
        name + kind: 100 * metric(predicted[known], true[known])
        for name, metric in METRICS[task].items()
    }


def measure(
    model: Classifier, task: str, file: str, dev: Encoded, constant: float, precision: str
) -> list[dict[str, str]]:
    """A row of results for each metric, with what always answering `constant` would get."""
    predicted = predict(model, dev, task, precision)
    if np.ptp(predicted) == 0:
        print(f"note: the answer to every example of {task} {file} is the same")
    baseline = score(task, file, np.full(len(predicted), constant), dev.labels)
    return [
        {"metric": name, "value": f"{value:.4f}", "majority": f"{baseline[name]:.4f}"}
        | {"dev_rows": str(len(predicted))}
        for name, value in score(task, file, predicted, dev.labels).items()
    ]


# ---- Results: one row per metric of a run, matched by all settings that shape it ---------------
SETTINGS = (
    "task", "origin", "weights", "head", "learning_rate", "layer_decay", "epochs", "batch_size",
    "length", "double_pairs", "train_rows",
)  # fmt: skip
COLUMNS = (*SETTINGS, "seed", "metric", "value", "majority", "dev_rows")


def read_results(path: Path, settings: dict[str, str]) -> list[dict[str, str]]:
    """The rows of a task that were made with these settings."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        if set(reader.fieldnames or []) != set(COLUMNS):
            raise InputError(f"{path}: not the columns {', '.join(COLUMNS)}. Move it away.")
        return [row for row in reader if all(row[k] == value for k, value in settings.items())]


def append_results(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add the rows of a finished run, in one write: several sweeps may share the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    writer.writerows(rows)
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write(text.getvalue())


def read_examples(options: GlueConfig, task: str, file: str) -> list[Example]:
    """The examples of a file; rows that cannot be read are reported."""
    folder = Path(options.glue)
    examples, problems = read_glue(folder, task, file)
    for problem in problems[:5]:
        print(problem)
    if problems:
        fate = "left out" if file == "train" else "kept, for the order's sake"
        print(f"{folder / task / file}.tsv: {len(problems)} bad rows, {fate}")
    return examples


def majority(examples: list[Example], task: str) -> float:
    """The best constant answer: the most frequent class, or the mean score."""
    labels = np.array([example.label for example in examples])
    return float(np.bincount(labels.astype(int)).argmax() if GLUE[task].labels else labels.mean())


def run_task(task: str, start: Start, options: GlueConfig, folder: Path) -> list[dict[str, str]]:
    """Fine-tune with each seed that is still missing; the results of all seeds.

    No results where files are missing and cannot be fetched, after a line that says so.
    """
    place = Path(options.glue) / task
    try:
        if not (place / "train.tsv").is_file() or not list(place.glob("dev*.tsv")):
            fetch_glue(Path(options.glue), task)
    except (InputError, OSError) as error:
        print(f"{task} is left out: no train.tsv and dev.tsv in {place}, and {error}")
        return []
    dev_files = [f for f in GLUE[task].rows if f[:3] == "dev" and (place / f"{f}.tsv").is_file()]
    examples = {file: read_examples(options, task, file) for file in ("train", *dev_files)}
    options = replace(options, task=task, epochs=options.epochs or EPOCHS.get(task, 3))
    settings = asdict(options) | {"origin": start.origin, "weights": start.weights}
    settings |= {"train_rows": len(examples["train"])}
    settings = {key: str(settings[key]) for key in SETTINGS}
    saved = folder / task / "config.json"
    if options.save != "none":
        files = ("model.pt", "tokenizer.json")
        data.refuse_foreign(saved.parent, saved.name, "train_rows", files, "--out")
        check_saved(saved, settings)

    @functools.cache  # tokenised once for all seeds, and not at all if there is nothing to do
    def encoded(file: str) -> Encoded:
        rows = examples[file]
        if file == "train" and options.double_pairs and task in DOUBLED:
            rows = rows + [Example(e.texts[::-1], e.label) for e in rows]
        return encode(rows, start.tokenizer, options.length)

    results = read_results(folder / "results.csv", settings)
    constant = majority(examples["train"], task)
    kept: dict[int, Classifier] = {}  # the model that --save asks for, so far
    for seed in range(options.seeds):
        if any(row["seed"] == str(seed) for row in results):
            continue
        began = time.perf_counter()
        model = fine_tune(task, encoded("train"), start, options, seed)
        rows = [
            settings | {"seed": str(seed)} | row
            for file in dev_files
            for row in measure(model, task, file, encoded(file), constant, options.precision)
        ]
        seconds = time.perf_counter() - began
        append_results(folder / "results.csv", rows)
        results += rows
        values = ", ".join(f"{row['metric']} {float(row['value']):.1f}" for row in rows)
        print(f"{task} seed {seed}: {values} ({seconds:.0f} s)", flush=True)
        if seed == wanted_seed(results, options):
            kept = {seed: model}
    results = [row for row in results if int(row["seed"]) < options.seeds]
    if options.save != "none":
        seed = wanted_seed(results, options)
        if not saved.exists() or data.read_json(saved)["seed"] != seed:
            # A run that was finished before --save asked for its model is done again.
            model = kept.get(seed) or fine_tune(task, encoded("train"), start, options, seed)
            save_model(folder / task, model, start, settings | {"seed": seed})
    return results


def wanted_seed(results: list[dict[str, str]], options: GlueConfig) -> int:
    """The seed whose model is kept: the last, or the one that is best on the first metric."""
    first = [row for row in results if row["metric"] == results[0]["metric"]]
    if options.save == "last":
        return max(int(row["seed"]) for row in first)
    return int(max(first, key=lambda row: float(row["value"]))["seed"])


# ---- Saved models ------------------------------------------------------------------------------
def save_model(folder: Path, model: Classifier, start: Start, settings: dict[str, Any]) -> None:
    """Weights, tokenizer, and a config.json with the label names in order."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = GLUE[settings["task"]].labels
    config = settings | {"labels": labels, "model": asdict(start.config)}
    data.save_checkpoint(folder / "model.pt", {"model": model.state_dict()})
    data.write_atomically(folder / "tokenizer.json", start.tokenizer.to_str(pretty=True))
    data.write_atomically(folder / "config.json", json.dumps(config, indent=1))


def check_saved(config: Path, settings: dict[str, Any]) -> None:
    """Refuse to overwrite a model of other settings; another seed of the same is fine."""
    then = data.read_json(config) if config.exists() else settings
    changed = [f"{k} {then[k]}, now {v}" for k, v in settings.items() if then.get(k) != v]
    if changed:
        raise InputError(f"{config.parent} holds another model ({'; '.join(changed)}). Move it.")


def load_model(folder: Path) -> tuple[Classifier, Tokenizer, dict[str, Any]]:
    """A model that --save has kept, its tokenizer and its settings."""
    for name in ("config.json", "model.pt", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InputError(f"{folder}: no {name}. Name a folder that --save has written.")
    settings = data.read_json(folder / "config.json")
    tokenizer = data.load_tokenizer(folder / "tokenizer.json")
    start = Start(ElectraConfig(**settings["model"]), tokenizer, None, "", "")
    model = new_classifier(start, settings["task"], settings["head"])
    model.load_state_dict(data.load_checkpoint(folder / "model.pt")["model"])
    return model.eval(), tokenizer, settings


# ---- The table ---------------------------------------------------------------------------------
def print_table(results: dict[str, list[dict[str, str]]]) -> None:
    """A line for each metric, then both averages: the paper's and that of the GLUE site."""
    header = ("task", "metric", "median", "mean", "std", "best", "seeds", "majority", "published")
    form = "{:8} {:20} {:>6} {:>6} {:>5} {:>6} {:>5} {:>8} {:>9}"
    print("\n" + form.format(*header))
    medians: dict[str, list[float]] = {}
    partial = []
    for task, rows in results.items():
        for metric in dict.fromkeys(row["metric"] for row in rows):
            chosen = [row for row in rows if row["metric"] == metric]
            values = np.array([float(row["value"]) for row in chosen])
            first = task not in medians
            medians.setdefault(task, []).append(float(np.median(values)))
            spread = f"{values.std(ddof=1):.1f}" if len(values) > 1 else "-"
            numbers = [f"{x:.1f}" for x in (np.median(values), values.mean())]
            numbers += [spread, f"{values.max():.1f}", len(values)]
            numbers += [f"{float(chosen[0]['majority']):.1f}"]
            print(form.format(task, metric, *numbers, PUBLISHED.get(task, "-") if first else ""))
        official = GLUE[task].rows["train"]
        if int(rows[0]["train_rows"]) < official:
            partial.append(f"{task} {int(rows[0]['train_rows']):,} of {official:,}")
    for name, tasks, average in (
        ("paper's mean", TASKS[:-1], lambda values: values[0]),
        ("GLUE's mean", TASKS, np.mean),
    ):
        found = [task for task in tasks if task in medians]
        mean = np.mean([average(medians[task]) for task in found]) if found else math.nan
        published = [PUBLISHED.get(task, math.nan) for task in found]
        theirs = f" (published: {np.mean(published):.2f})" if tasks == found[:8] else ""
        print(f"{name}, {len(found)} of {len(tasks)} tasks: {mean:.2f}{theirs}")
    if partial:
        print(f"not trained on the whole of: {', '.join(partial)}")


# ---- Submission and single texts ---------------------------------------------------------------
# File of the submission -> the task whose model answers, and the test set.
SUBMISSION = {task: (task, task, "test") for task in TASKS if task != "MNLI"}
SUBMISSION |= {"MNLI-m": ("MNLI", "MNLI", "test_matched")}
SUBMISSION |= {"MNLI-mm": ("MNLI", "MNLI", "test_mismatched")}
SUBMISSION |= {"AX": ("MNLI", "diagnostic", "diagnostic")}


def answer(value: float, task: str) -> str:
    labels = GLUE[task].labels
    return labels[int(value)] if labels else f"{value:.3f}"


def write_submission(options: GlueConfig, folder: Path) -> None:
    """submission.zip for the GLUE site: eleven files, "index" and "prediction", labels by name."""
    content, wanting = io.BytesIO(), []  # wanting: files with too few rows
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, (task, source, file) in SUBMISSION.items():
            test = Path(options.glue) / source / f"{file}.tsv"
            if test.is_file() and (folder / task / "model.pt").exists():
                model, tokenizer, settings = load_model(folder / task)
                model.to(choose_device(options.device))
                examples = read_examples(options, source, file)
                encoded = encode(examples, tokenizer, int(settings["length"]))
                predicted = predict(model, encoded, task, options.precision)
                origin = f"the model in {folder / task}"
            else:  # the site wants all files, with all rows
                train = Path(options.glue) / task / "train.tsv"
                there = train.is_file()
                constant = majority(read_examples(options, task, "train"), task) if there else 0.0
                predicted = np.full(GLUE[source].rows[file], constant)
                origin = "the majority answer"
            lines = [f"{i}\t{answer(value, task)}" for i, value in enumerate(predicted)]
            zipped.writestr(f"{name}.tsv", "\n".join(["index\tprediction", *lines]) + "\n")
            if len(lines) != GLUE[source].rows[file]:
                wanting.append(f"{name}.tsv ({GLUE[source].rows[file]:,} rows)")
            print(f"{name}.tsv: {len(lines):,} rows, {origin}")
    path = folder / "submission.zip"
    data.write_atomically(path, content.getvalue())
    verdict = f"not ready: the site wants {', '.join(wanting)}" if wanting else "ready"
    print(f"{path} for gluebenchmark.com is {verdict}")


def classify_texts(options: GlueConfig) -> None:
    """Print label and probability of each text, or the score, as the model in --model sees it."""
    model, tokenizer, settings = load_model(Path(options.model))
    task, length = settings["task"], int(settings["length"])
    wanted = len(GLUE[task].texts)
    for line in data.standard_input() if options.classify == "-" else [options.classify]:
        texts = tuple(line.rstrip("\n").split("\t"))
        if len(texts) != wanted:
            raise InputError(f"{task} takes {wanted} text(s), with a tab between: {line!r:.60}")
        encoded = encode([Example(texts, math.nan)], tokenizer, length)
        with torch.no_grad():
            chances = classify(model, encoded, np.array([0]), "fp32")[0].softmax(0)
        value = predict(model, encoded, task, "fp32")[0]
        print(answer(value, task) + (f"\t{chances.max():.1%}" if GLUE[task].labels else ""))


def export_encoder(options: GlueConfig) -> None:
    """Write the fine-tuned encoder and the label names as a Hugging Face folder, without a head."""
    model, tokenizer, settings = load_model(Path(options.model))
    folder = Path(options.export)
    files = ("config.json", *WEIGHTS, "tokenizer.json", "tokenizer_config.json")
    if there := [name for name in files if (folder / name).exists()]:
        raise InputError(f"{folder} holds a {there[0]} already. Choose another --export.")
    encoder = nn.ModuleDict({"encoder": model.encoder})
    shape = ElectraConfig(**settings["model"])
    write_hugging_face(folder, "discriminator", encoder, shape, tokenizer)
    labels = GLUE[settings["task"]].labels
    names = dict(enumerate(labels)) or {0: "score"}
    config = data.read_json(folder / "config.json") | {"id2label": names}
    config |= {"label2id": {name: number for number, name in names.items()}}
    config |= {"problem_type": "single_label_classification" if labels else "regression"}
    data.write_atomically(folder / "config.json", json.dumps(config, indent=1))
    print(
        f"{folder}: the encoder and the labels {', '.join(names.values())}. The head stays behind: "
        "ours, as the paper's, is one linear layer, Hugging Face's has another layer and a GELU "
        "before it, so that a head of theirs has to be trained."
    )


# ---- The command line --------------------------------------------------------------------------
def parse_arguments(arguments: list[str] | None) -> GlueConfig:
    parser = argparse.ArgumentParser(description="Fine-tune ELECTRA on GLUE.", allow_abbrev=False)
    add_options(parser, GlueConfig)
    options = GlueConfig(**parse(parser, arguments))
    check_options(options)
    tasks = TASKS if options.task == "all" else options.task.split(",")
    if set(tasks) - set(TASKS):
        raise InputError(f"--task {options.task}: choose all, or of {', '.join(TASKS)}.")
    if options.init_from and options.model == "none":
        raise InputError("--init_from needs a --model.")
    if options.predict and options.save == "none":
        options.save = "best"
    return replace(options, task=",".join(tasks))


def run_folder(options: GlueConfig) -> Path:
    """The pre-training run that gives architecture and tokenizer, and takes the results."""
    return Path(options.out or ("out" if options.model == "none" else options.model))


def load_start(options: GlueConfig) -> tuple[Start, str]:
    """The weights every run begins with, as --model and --init_from say; and the model's size."""
    random = options.model == "none"
    model, tokenizer, settings = load_run(run_folder(options) if random else Path(options.model))
    encoder = model.discriminator.encoder
    content = b"".join(value.numpy().tobytes() for value in encoder.state_dict().values())
    weights = hashlib.sha256(content).hexdigest()[:12]
    start = Start(model.config, tokenizer, encoder, "pre-trained", weights)
    if random:
        start = start._replace(encoder=None, origin="none", weights="")
    if options.init_from:
        tuned, other, _ = load_model(Path(options.init_from))
        if other.get_vocab() != tokenizer.get_vocab():
            raise InputError(f"{options.init_from}: not the vocabulary of {options.model}.")
        start = start._replace(encoder=tuned.encoder, origin=options.init_from)
    return start, settings["size"]


def sweep(options: GlueConfig) -> None:
    """All tasks with all seeds, and what is to be said about them at the end."""
    start, size = load_start(options)
    rate, decay, head = RECIPES[size]
    positions = start.config.max_positions
    if options.length > positions:
        print(f"--length {options.length}: cut to {positions}, the positions of the model.")
    options = replace(
        options,
        learning_rate=options.learning_rate or rate,
        layer_decay=options.layer_decay or decay,
        head=options.head.replace("auto", head),
        length=min(options.length, positions),
    )
    folder = run_folder(options) / "glue"
    folder.mkdir(parents=True, exist_ok=True)  # or an error now, not after the first run
    results = {task: run_task(task, start, options, folder) for task in options.task.split(",")}
    results = {task: rows for task, rows in results.items() if rows}
    if not results:
        raise InputError(f"{options.glue}: no task can be run. Put the files there by hand.")
    print_table(results)
    if options.predict:
        write_submission(options, folder)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.fetch:
        return fetch_tasks(Path(options.glue), options.task.split(","))
    keep_memory()
    precision = choose_precision(options.precision, choose_device(options.device))
    options = replace(options, precision=precision)
    if options.classify:
        classify_texts(options)
    elif options.export:
        export_encoder(options)
    else:
        sweep(options)


if __name__ == "__main__":
    sys.exit(data.run_program("train_glue.py", main))
