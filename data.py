"""Everything around the method: processes, the command line, files of text, runs, formats, GLUE.

    text --prepare()--> tokenizer.json, train.bin, valid.bin, meta.json --get_batch()--> ids (B, L)

The token files are one long stream of ids, little-endian uint16 (uint32 above 65,535 entries), in
which every document ends with [SEP]. They are memory-mapped: a corpus may be larger than memory.

Sections: programs and processes; devices and numbers; the command line; reading text; tokenizer;
token files; batches; measures; the folder of a run; what a run shows; Hugging Face folders; the
built-in corpus; downloads; OpenWebText; GLUE; what `python data.py` does.
"""

import argparse
import ast
import contextlib
import csv
import ctypes
import dataclasses
import datetime
import hashlib
import http.client
import importlib.util
import io
import itertools
import json
import lzma
import math
import os
import re
import shutil
import signal
import statistics
import sys
import sysconfig
import tarfile
import tempfile
import textwrap
import timeit
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import numpy as np
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECE = 1 << 16  # bytes of text in one string, however long the lines
BATCH = 1 << 20  # bytes of text that are encoded together
SAMPLE_SLICES = 40  # batches, spread over the text, that train the tokenizer: that takes 126 MB
HELD_OUT = 100  # every 100th document is kept for evaluation


# ---- Programs and processes --------------------------------------------------------------------
class InputError(Exception):
    """Something is wrong with what the user gave us: says what, where, and what to do."""


def keep_memory() -> None:
    """Ask the C library to keep the memory it frees instead of returning it to the system.

    Otherwise every step fetches its large tensors anew, page by page: a quarter of a CPU's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for a large tensor
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: what is free stays


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a JSON object.")
    return content


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write, sync, rename. The one before stays as <name>.old: one of the two is always whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch hides the first behind the second
        cause = error.__context__ or error
        raise InputError(f"{path}: cannot be written ({cause!s:.60}). Is the disk full?") from None
    if path.exists():
        os.replace(path, path.with_name(path.name + ".old"))
    os.replace(temporary, path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The newest whole checkpoint, None where there never was one. It is read, never executed."""
    found = [p for p in (path, path.with_name(path.name + ".old")) if p.exists()]
    for candidate in found:
        try:
            return torch.load(candidate, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001, torch raises many kinds for a damaged file
            print(f"{candidate} is damaged: {str(error)!r:.60}", file=sys.stderr)
    if found:
        raise InputError(f"{path}: no whole checkpoint left. Move it away to begin anew.")
    return None


def lock(folder: Path, wait: bool) -> TextIO:
    """Keep a folder to this process until the file is closed or the process ends, however it ends.

    If another process has it: wait, or InputError. (Without effect where the system has no flock.)
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise InputError(
                f"{folder}: another process works there. Choose another --out."
            ) from None
        print(f"{folder}: waiting for another process that prepares it", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def run_program(name: str, work: Callable[[], None]) -> int:
    """Exit code of a program: 0; 2 after one line about a bad input; 130 after Ctrl-C."""
    try:
        work()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except (InputError, OSError) as error:  # a full disk is an OSError
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"{name}: {error!s:.60}: choose a smaller --micro_batch.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command goes on from there.", file=sys.stderr)
        return 130
    return 0


def catch_signals() -> list[int]:
    """A list that is empty until Ctrl-C or SIGTERM asks to stop; a second Ctrl-C stops at once."""
    caught: list[int] = []

    def catch(number: int, _: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        caught.append(number)

    signal.signal(signal.SIGINT, catch)
    signal.signal(signal.SIGTERM, catch)
    return caught


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


def any_process(caught: list[int], device: torch.device) -> bool:
    """Whether one of the processes has caught a signal: they have to stop at the same step."""
    if not torch.distributed.is_initialized():
        return bool(caught)
    flag = torch.tensor(float(bool(caught)), device=device)
    torch.distributed.all_reduce(flag)
    return bool(flag > 0)


# ---- Devices and numbers -------------------------------------------------------------------------
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def mean_losses(recent: list[torch.Tensor], step: int, fp16: bool, world: int) -> list[float]:
    """Mean losses of the steps up to `step`; stops the run at the first that is not finite."""
    values = torch.stack(recent)  # (steps, 3): both losses and the gradient's norm
    if world > 1:
        torch.distributed.all_reduce(values)  # a sum
    values = values.cpu() / world
    # In fp16 a gradient may overflow: GradScaler leaves such a step out and lowers its scale.
    bad = (~values[:, : 2 if fp16 else 3].isfinite().all(1)).nonzero()
    if len(bad):
        losses = "generator loss {}, discriminator loss {}, gradient norm {}"
        raise InputError(
            f"step {step - len(recent) + 1 + int(bad[0, 0])} is not finite: "
            f"{losses.format(*values[bad[0, 0]].tolist())}. The last checkpoint is untouched: "
            "go on with --precision fp32 or a lower --learning_rate."
        )
    return values[:, :2].double().mean(0).tolist()


# ---- The command line ----------------------------------------------------------------------------
@contextlib.contextmanager
def profiler(run: Any) -> Iterator[None]:
    """With --profile N: N steps in a temporary folder, then a table of where their time went."""
    if run.profile == 0:
        yield
        return
    run.steps, run.eval_sequences = run.profile, 1
    with tempfile.TemporaryDirectory() as run.out, torch.profiler.profile() as found:
        yield
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=40))


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """An option for each field of a dataclass that has a help text; left out, it is not there."""
    for f in dataclasses.fields(config):
        switch = isinstance(f.default, bool)
        kind = {"action": argparse.BooleanOptionalAction} if switch else {"type": type(f.default)}
        if f.metadata:
            help = " ".join([f.metadata["help"], ", ".join(f.metadata["choices"])]).strip()
            parser.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=help, **kind)


def check_choices(settings: Any) -> None:
    """InputError where a field of a dataclass has none of the values that it may have."""
    for f in dataclasses.fields(settings):
        choices, value = f.metadata.get("choices"), getattr(settings, f.name)
        if choices and value not in choices:
            raise InputError(f"--{f.name} {value}: choose one of {', '.join(choices)}.")


def parse_run(
    arguments: list[str] | None,
    sizes: dict[str, tuple[Any, Any]],
    demo: dict[str, Any],
    narrow: Callable[[Any], Any],
    table: dict[str, str],
) -> tuple[Any, Any, str | None]:
    """The command line of electra.py: the size's model and recipe, with what is given instead.

    The third is the text of --detect. `demo` are the settings of a run without --data; `narrow` and
    `table` see hugging_face_config.
    """
    parser = argparse.ArgumentParser(description="Pre-train ELECTRA on a text.", allow_abbrev=False)
    parser.add_argument("--detect", metavar="TEXT", help="show what looks replaced; - reads stdin")
    for settings in reversed(sizes["small"]):
        add_options(parser, type(settings))
    given = vars(parser.parse_args(arguments))
    text = given.pop("detect")
    size = given.get("size", "small" if given.get("data") else "tiny")
    if size not in sizes:
        raise InputError(f"--size {size}: choose one of {', '.join(sizes)}.")
    config, run = sizes[size]
    given = given if given.get("data") else demo | given
    of_model = {name: given.pop(name) for name in list(given) if hasattr(config, name)}
    config, run = dataclasses.replace(config, **of_model), dataclasses.replace(run, **given)
    for settings in (config, run):
        check_choices(settings)
    if config.objective in ("mlm", "two_stage"):  # one network, or two of the same size in turn
        config.generator_size = 1.0
        config.embedding_sharing = "all" if config.objective == "mlm" else "separate"
    if run.init_from:
        config = hugging_face_config(table, Path(run.init_from), config, narrow)
        if other := [k for k, v in of_model.items() if getattr(config, k) != v]:
            raise InputError(f"{run.init_from} decides --{other[0]}: leave the option out.")
        if not {"tokenizer", "vocab"} & set(given):
            run.tokenizer = str(find_tokenizer(Path(run.init_from)))
    check_settings(config, narrow(config), run)
    return config, run, text


def check_settings(config: Any, narrow: Any, run: Any) -> None:
    """InputError for a model, its generator (`narrow`) or a run that cannot be."""
    share = (run.micro_batch or 1) * int(os.environ.get("WORLD_SIZE", "1"))
    every = (run.log_every, run.eval_every, run.eval_sequences)
    for wrong, problem in (
        (not 8 <= run.length <= config.max_positions, "--length must be 8 to --max_positions"),
        (min(run.batch_size, run.steps, *every) < 1, "sizes and intervals must be at least 1"),
        (run.batch_size % share, "--micro_batch, times the processes, must divide --batch_size"),
        (config.hidden_size % config.num_heads, "--num_heads must divide --hidden_size"),
        (narrow.hidden_size % narrow.num_heads, "a generator of this width cannot have its heads"),
        (
            config.embedding_sharing == "all" and narrow != config,
            "--embedding_sharing all needs --generator_size 1",
        ),
        (not 0 < config.mask_prob < 1, "--mask_prob must lie between 0 and 1"),
    ):
        if wrong:
            raise InputError(f"{problem}.")


# ---- Reading text ------------------------------------------------------------------------------
def read_pieces(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Lines with their newline and the offset behind them; lines over PIECE bytes come in parts.

    A part ends before a space, so that no word is torn, or else before the last character.
    """
    rest = b""
    while line := rest + file.readline(PIECE - len(rest)):
        cut = len(line)
        if cut >= PIECE and not line.endswith(b"\n"):
            cut = line.rfind(b" ", 1)
            if cut < 1:
                cut = len(line) - 1
                while cut > len(line) - 4 and line[cut] & 0xC0 == 0x80:  # inside a character
                    cut -= 1
        rest = line[cut:]
        yield line[:cut], file.tell() - len(rest)


def has_blank_lines(path: Path) -> bool:
    """Whether a blank line stands between two lines of text: then blank lines end documents."""
    text = blank = False
    with path.open("rb") as file:
        for piece, _ in read_pieces(file):
            if piece.strip():
                if text and blank:
                    return True
                text, blank = True, False
            else:
                blank = True
    return False


def decode(piece: bytes, offset: int, path: Path) -> str:
    try:
        if b"\0" not in piece:
            return piece.decode("utf-8")
        where = offset - len(piece) + piece.index(b"\0")
    except UnicodeDecodeError as error:
        where = offset - len(piece) + error.start
    raise InputError(
        f"{path}: byte {where:,} is not UTF-8 text. Unpack the file if it is an archive; convert "
        f"another encoding with: iconv -f latin1 -t utf-8 {path} > text.txt"
    )


def fingerprint(path: Path) -> str:
    """Hash of the size and of 64 slices: notices another text without reading all of it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(64):
            file.seek(size * i // 64)
            digest.update(file.read(1 << 16))
    return digest.hexdigest()


# ---- Tokenizer ---------------------------------------------------------------------------------
def sample_lines(path: Path) -> Iterator[str]:
    """Lines to train a tokenizer on: the whole text, or SAMPLE_SLICES pieces of a large one."""
    size = path.stat().st_size
    slices = [(0, size)]
    if size > SAMPLE_SLICES * BATCH:
        slices = [(size * i // SAMPLE_SLICES, BATCH) for i in range(SAMPLE_SLICES)]
    with path.open("rb") as file:
        for start, length in slices:
            file.seek(start)
            if start > 0:
                file.readline(PIECE)  # we are in the middle of a line
            for piece, offset in read_pieces(file):
                # A slice of a very long line may begin inside a character: do without it.
                text = piece.decode("utf-8", "ignore") if start else decode(piece, offset, path)
                # One line of 13 MB costs the trainer 836 MB of memory, many short ones 52 MB.
                yield from (text[i : i + 10_000] for i in range(0, len(text), 10_000))
                if offset >= start + length:
                    break


def train_tokenizer(lines: Iterable[str], kind: str, vocab_size: int) -> Tokenizer:
    """A WordPiece (uncased, as BERT's) or byte-level BPE tokenizer of at most vocab_size entries.

    The result differs a little from call to call (ties are broken at random in `tokenizers`), so
    it is trained once and kept with the tokens and with every run.
    """
    settings: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": SPECIAL_TOKENS}
    settings |= {"min_frequency": 2, "show_progress": False}
    if kind == "wordpiece":
        tokenizer = word_piece(models.WordPiece(unk_token="[UNK]"))
        trainer = trainers.WordPieceTrainer(limit_alphabet=1000, **settings)
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **settings)
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def word_piece(model: models.WordPiece, **normalizer: Any) -> Tokenizer:
    """BERT's tokenizer: uncased, or as the options of BertNormalizer say."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(**{"lowercase": True} | normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json, or a WordPiece vocab.txt with one entry a line.

    A tokenizer_config.json beside vocab.txt says whether it is cased and what becomes of accents.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file. Give a tokenizer.json or a vocab.txt.")
    try:
        if path.suffix == ".json":
            tokenizer = Tokenizer.from_file(str(path))
        else:
            vocabulary = models.WordPiece.read_file(str(path))
            beside = path.with_name("tokenizer_config.json")
            settings = read_json(beside) if beside.exists() else {}
            normalizer = {"lowercase": settings.get("do_lower_case", True)}
            normalizer["strip_accents"] = settings.get("strip_accents")
            model = models.WordPiece(vocabulary, unk_token="[UNK]")
            tokenizer = word_piece(model, **normalizer)
    except Exception as error:  # noqa: BLE001, `tokenizers` raises nothing narrower
        raise InputError(f"{path}: not a tokenizer ({error}).") from None
    return finish_tokenizer(tokenizer, path)


def finish_tokenizer(tokenizer: Tokenizer, origin: Path | str) -> Tokenizer:
    """Check the special tokens; make "[MASK]" in a text five characters like any others."""
    missing = [token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        raise InputError(
            f"{origin}: the vocabulary has no {', '.join(missing)}. ELECTRA needs them."
        )
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    cls, sep = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # not kept in the file: set after every loading
    return tokenizer


def fit_to_tokenizer(config: Any, tokenizer: Tokenizer, exact: bool) -> Any:
    """`config` with the special tokens of a tokenizer, and exactly, or at least, its vocabulary."""
    entries = tokenizer.get_vocab_size()
    if not exact and entries > config.vocab_size:
        raise InputError(
            f"the tokenizer has {entries:,} entries, the model {config.vocab_size:,}: "
            "they do not belong together."
        )
    ids = [tokenizer.token_to_id(token) for token in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")]
    special = dict(zip(("pad_id", "cls_id", "sep_id", "mask_id"), ids, strict=True))
    size = entries if exact else config.vocab_size
    return dataclasses.replace(config, vocab_size=size, **special)


# ---- Token files -------------------------------------------------------------------------------
class Corpus(NamedTuple):
    """A text as a model reads it: two streams of ids, mapped from the files."""

    tokenizer: Tokenizer
    train: np.ndarray
    valid: np.ndarray
    fingerprint: str  # of the text


def prepare(text: str, tokens: str, tokenizer: str, vocab: str, vocab_size: int) -> Corpus:
    """Turn a text into token files, once. No text: the built-in corpus; no folder: <text>.tokens.

    An interrupted preparation goes on where it was; what is done is not done again; another text or
    tokenizer in the same folder is refused. Memory does not grow with the text.
    """
    path = Path(text or "builtin.txt")
    if not text and not path.exists():
        write_builtin_corpus(path)
    folder = Path(tokens or f"{path}.tokens")
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise InputError(f"{path}: {what}. --data takes one UTF-8 text file.")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read. Check its permissions.")
    if path.stat().st_size == 0 or not any(line.strip() for line in sample_lines(path)):
        raise InputError(f"{path}: no text in it. Give a file with some megabytes of text.")
    with lock(folder, wait=True):
        meta = open_folder(path, folder, vocab or tokenizer, vocab_size)
        if not meta["complete"]:
            encode_text(path, folder, meta)
    train, valid = (open_tokens(folder, split, meta) for split in ("train", "valid"))
    return Corpus(load_tokenizer(folder / "tokenizer.json"), train, valid, meta["text"])


def open_folder(path: Path, folder: Path, asked: str, vocab_size: int) -> dict[str, Any]:
    """What meta.json says, if it fits what is asked; or a new tokenizer and a new meta.json."""
    wanted: dict[str, Any] = {"text": fingerprint(path)}
    tokenizer = None
    if asked in ("wordpiece", "bpe"):
        wanted |= {"tokenizer": asked, "vocab_size": vocab_size}
    else:  # what counts is what is in the file, wherever it lies
        tokenizer = load_tokenizer(Path(asked))
        content = tokenizer.to_str(pretty=True).encode()
        wanted["tokenizer_sha256"] = hashlib.sha256(content).hexdigest()
    meta_path, tokenizer_path = folder / "meta.json", folder / "tokenizer.json"
    if meta_path.exists():
        meta = read_json(meta_path)
        for key, value in wanted.items():
            if meta.get(key) != value:
                raise InputError(
                    f"{folder}: made from another {key.removesuffix('_sha256')} (then "
                    f"{meta.get(key)}, now {value}). "
                    f"Choose another folder with --tokens, or delete this one."
                )
        digest = hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
        if digest != meta["tokenizer_sha256"]:
            raise InputError(
                f"{tokenizer_path}: not the tokenizer of these tokens. Delete {folder}."
            )
        return meta
    if tokenizer is None:
        print(f"training a {asked} tokenizer of {vocab_size:,} entries on {path}", flush=True)
        tokenizer = train_tokenizer(sample_lines(path), asked, vocab_size)
        finish_tokenizer(tokenizer, path)
    write_atomically(tokenizer_path, tokenizer.to_str(pretty=True))
    meta = wanted | {
        "tokenizer_sha256": hashlib.sha256(tokenizer_path.read_bytes()).hexdigest(),
        "blank_lines": has_blank_lines(path),
        "dtype": "<u2" if tokenizer.get_vocab_size() <= 65536 else "<u4",
        "complete": False,
        "offset": 0,  # bytes of the text that are done
        "between_documents": True,  # whether the text behind them begins a document
        "documents": 0,  # begun so far
        "last_document": 0,  # where the last one in train.bin begins, in tokens
        "train": 0,  # tokens in train.bin
        "valid": 0,
    }
    write_atomically(meta_path, json.dumps(meta, indent=1))
    return meta


class TextBatch(NamedTuple):
    """Some pieces of a text that are encoded together."""

    pieces: list[str]
    begins: list[bool]  # whether a piece begins a document
    offset: int  # bytes of the text up to their end
    between_documents: bool  # whether the text behind them begins a document


def read_batches(path: Path, meta: dict[str, Any]) -> Iterator[TextBatch]:
    """The text behind meta["offset"], about BATCH bytes at a time."""
    pieces, begins, amount = [], [], 0
    begin, offset = meta["between_documents"], meta["offset"]
    with path.open("rb") as text:
        text.seek(offset)
        for piece, offset in read_pieces(text):
            if offset == len(piece):
                piece = piece.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark is no text
            if piece.strip():
                pieces.append(decode(piece, offset, path))
                begins.append(begin)
                begin = not meta["blank_lines"] and piece.endswith(b"\n")
            elif piece.endswith(b"\n"):
                begin = True
            amount += len(piece)
            if amount >= BATCH:
                yield TextBatch(pieces, begins, offset, begin)
                pieces, begins, amount = [], [], 0
    yield TextBatch(pieces, begins, offset, begin)


def encode_text(path: Path, folder: Path, meta: dict[str, Any]) -> None:
    """Append the tokens of the text behind meta["offset"], a batch of pieces at a time.

    meta.json is written after each batch; what a crash left behind it is cut off and done again.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    dtype = np.dtype(meta["dtype"])
    end = np.array([tokenizer.token_to_id("[SEP]")], dtype=dtype)
    files = {split: (folder / f"{split}.bin").open("ab") for split in ("train", "valid")}
    for split, file in files.items():
        file.truncate(meta[split] * dtype.itemsize)
    size = path.stat().st_size
    progress = tqdm(total=size, initial=meta["offset"], unit="B", unit_scale=True, disable=None)

    def append(ids: np.ndarray) -> None:
        split = "valid" if meta["documents"] % HELD_OUT == 0 else "train"
        files[split].write(ids.tobytes())
        meta[split] += len(ids)

    def save() -> None:
        for file in files.values():
            file.flush()
        write_atomically(folder / "meta.json", json.dumps(meta, indent=1))

    def write(batch: TextBatch, job: Future) -> None:
        for encoding, begin in zip(job.result(), batch.begins, strict=True):
            if begin:
                if meta["documents"] > 0:
                    append(end)
                meta["documents"] += 1
                if meta["documents"] % HELD_OUT != 0:
                    meta["last_document"] = meta["train"]
            append(np.array(encoding.ids, dtype=dtype))
        progress.update(batch.offset - meta["offset"])
        meta["offset"], meta["between_documents"] = batch.offset, batch.between_documents
        save()

    with ThreadPoolExecutor(1) as pool:  # encodes a batch while the one before it is written
        previous = None
        for batch in read_batches(path, meta):
            job = pool.submit(tokenizer.encode_batch_fast, batch.pieces, add_special_tokens=False)
            if previous:
                write(*previous)
            previous = batch, job
        write(*previous)
    append(end)
    if meta["valid"] == 0:
        # Fewer than 100 documents: hold out the last, or the end of the only one. train.bin keeps
        # these tokens behind meta["train"], so that a crash right here can be made good.
        start = meta["last_document"] or meta["train"] - max(1, meta["train"] // HELD_OUT)
        files["train"].flush()
        tail = np.fromfile(folder / "train.bin", dtype, offset=start * dtype.itemsize)
        files["valid"].write(tail.tobytes())
        meta["train"], meta["valid"] = start, len(tail)
    meta["complete"] = True
    save()
    progress.close()
    for file in files.values():
        file.close()


def open_tokens(folder: Path, split: str, meta: dict[str, Any]) -> np.ndarray:
    """The stream of ids of "train" or "valid", mapped: nothing is read before it is used."""
    tokens = np.memmap(folder / f"{split}.bin", dtype=meta["dtype"], mode="r")[: meta[split]]
    if len(tokens) != meta[split]:
        raise InputError(f"{folder}/{split}.bin: damaged. Delete {folder} to make it again.")
    return tokens


# ---- Batches -----------------------------------------------------------------------------------
def scramble(x: np.ndarray, key: int) -> np.ndarray:
    """Random-looking 64-bit numbers that follow from x and key (the finaliser of SplitMix64)."""
    x = x.astype(np.uint64) + np.uint64((key + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where a random order of 0 .. n-1 puts each index, without storing the order.

    A Feistel network permutes the numbers of 2 * half bits; one that falls outside 0 .. n-1 goes
    through again until it falls inside.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    x = index.astype(np.uint64)
    outside = np.ones(len(x), dtype=bool)
    while outside.any():
        left, right = x[outside] >> half, x[outside] & low
        for r in range(4):
            left, right = right, left ^ (scramble(right, 4 * key + r) & low)
        x[outside] = left << half | right
        outside = x >= n
    return x.astype(np.int64)


def sequences_per_epoch(tokens: int, length: int) -> int:
    """How many sequences it takes to visit every token; see get_batch."""
    n = max(1, 10 * tokens // (10 * (length - 3) + 1) - 1)
    while n * (length - 3) + n // 10 < tokens:
        n += 1
    return n


def get_batch(
    tokens: np.ndarray, first: int, count: int, length: int, seed: int, cls_id: int, sep_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Training sequences first .. first + count - 1: ids and token_type_ids, both (count, length).

    Nine of ten are [CLS] A [SEP] B [SEP], one is [CLS] A [SEP]; A and B are one cut from the stream
    without a gap. Every epoch rotates the stream by a random amount, cuts it into such pieces one
    behind the other, and visits them in a random order: each token once, at fresh cuts. (The last
    piece is filled up with the first tokens.) All of it follows from the numbers given here.
    """
    n = sequences_per_epoch(len(tokens), length)
    number = np.arange(first, first + count)
    epoch, index = number // n, number % n
    rotation = np.zeros(count, dtype=np.int64)
    for e in np.unique(epoch):
        key, here = (seed << 32) + int(e), epoch == e
        index[here] = permute(index[here], n, key)
        rotation[here] = int(scramble(np.zeros(1), key)[0]) % len(tokens)
    single = (index % 10 == 9)[:, None]  # these hold L - 2 tokens of the stream, the others L - 3
    start = rotation + index * (length - 3) + index // 10
    # A is a quarter to three quarters of the piece.
    payload = length - 3
    cut = payload // 4 + scramble(number, seed) % np.uint64(payload // 2 + 1)
    cut = np.where(single[:, 0], length, np.maximum(1, cut.astype(np.int64)))[:, None]
    column = np.arange(length)
    source = start[:, None] + column - np.where(column <= cut, 1, 2)
    ids = tokens[source % len(tokens)].astype(np.int64)
    ids[:, 0], ids[:, -1] = cls_id, sep_id
    ids[np.broadcast_to(column == cut + 1, ids.shape)] = sep_id
    return ids, (column > cut + 1).astype(np.int64)


def batch_on(device: torch.device, *arguments: Any) -> list[torch.Tensor]:
    """get_batch as tensors on a device; pinned memory is copied while a GPU works."""
    tensors = [torch.from_numpy(array) for array in get_batch(*arguments)]
    if device.type == "cuda":
        tensors = [x.pin_memory() for x in tensors]
    return [x.to(device, non_blocking=True) for x in tensors]


def find_sentence(tokens: np.ndarray, tokenizer: Tokenizer, length: int) -> list[int]:
    """The first whole sentence of 12 to 24 tokens, to show what a model makes of it."""
    ids, end = tokens[:100_000].tolist(), tokenizer.token_to_id("[SEP]")
    stops = [-1] + [i for i, token in enumerate(ids) if token in (tokenizer.token_to_id("."), end)]
    for before, stop in itertools.pairwise(stops):
        if ids[stop] != end and 12 <= stop - before <= min(24, length - 2):
            return ids[before + 1 : stop + 1]
    return ids[: min(24, length - 2)]


# ---- Measures ------------------------------------------------------------------------------------
def mean_ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal numbers share the mean of theirs."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that a replaced token scores above an original one; ties, and no pairs, count half."""
    n = int(labels.sum())  # replaced tokens
    pairs, above = n * (len(labels) - n), mean_ranks(scores)[labels].sum() - n * (n + 1) / 2
    return float(above / pairs) if pairs else 0.5


def detects_nothing(result: dict[str, float]) -> bool:
    """Whether an evaluation shows a discriminator that learned nothing. Early on that is normal."""
    return result["valid_recall"] == 0 or result["valid_auc"] < 0.55


def collapse_advice(config: Any) -> str:
    """A line for a discriminator that has told nothing apart in four evaluations in a row."""
    if config.generator_size > 1 / 4 and config.embedding_sharing != "all":
        cause, remedy = "the generator is too large for it", "--generator_size 0.25"
    else:  # measured: README, "How large a generator?"
        cause, remedy = "it has read too little yet", "more --steps"
        if config.embedding_sharing != "all":
            remedy += ", or one encoder for both: --generator_size 1 --embedding_sharing all"
    return (
        f"The discriminator tells nothing apart, four evaluations in a row: as a rule {cause}, or "
        f"the learning rate is too high. Try {remedy}; or half the --learning_rate.\n"
    )


def flops_per_token(config: Any, narrow: Any, length: int) -> tuple[float, float]:
    """FLOPs of a training step per token: those of the generator (`narrow`), of the main network.

    The rule: two for each multiply-add of a matrix product, forward once and backward twice; all
    else is small, and a looked-up embedding costs nothing.
    """
    chosen = max(1, min(int((config.mask_prob + 0.005) * length), round(config.mask_prob * length)))

    def encoder(c: Any) -> int:
        projection = c.embedding_size * c.hidden_size * (c.embedding_size != c.hidden_size)
        layer = 4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size
        return projection + c.num_layers * (layer + 2 * length * c.hidden_size)

    def names_tokens(c: Any, share: float) -> float:
        return share * c.embedding_size * (c.hidden_size + c.vocab_size)

    generator = 6 * (encoder(narrow) + names_tokens(narrow, chosen / length))
    detects = config.hidden_size**2 + config.hidden_size
    main = {
        "mlm": 0.0,
        "replace_mlm": encoder(config) + names_tokens(config, chosen / length),
        "all_tokens_mlm": encoder(config) + names_tokens(config, 1.0) + detects,
    }.get(config.objective, encoder(config) + detects)
    if config.objective == "two_stage":  # means: a half each; the generator then goes forward only
        return generator * (1 + 1 / 3) / 2, 6 * main / 2
    return generator, 6 * main


# ---- The folder of a run -----------------------------------------------------------------------
VALID_METRICS = [
    "valid_generator_loss", "valid_generator_accuracy", "valid_sampled_accuracy",
    "valid_discriminator_loss", "valid_accuracy", "valid_precision", "valid_recall", "valid_auc",
    "valid_replaced",
]  # fmt: skip
METRICS = [
    "step", "tokens", "seconds", "learning_rate", "generator_loss", "discriminator_loss",
    *VALID_METRICS, "flops",
]  # fmt: skip
# What may change when a run goes on (a text may move, not change). Anything else: another run.
MAY_CHANGE = {
    "data", "tokens", "out", "steps", "micro_batch", "precision", "device", "log_every",
    "eval_every", "eval_sequences", "save_minutes", "compile", "profile",
}  # fmt: skip


def open_run(out: Path, settings: dict[str, Any], tokenizer: str, write: bool) -> TextIO:
    """Make the run's folder, or check that it holds this very run; keep other processes out of it.

    They stay out until the file that is returned is closed. Only a process that writes locks.
    """
    if (out / "config.json").exists():
        then = read_json(out / "config.json")
        changed = {k for k, v in settings.items() if then.get(k) != v} - MAY_CHANGE
        problems = [f"{k} was {then.get(k)}, now {settings[k]}" for k in sorted(changed)]
        if (out / "tokenizer.json").read_text() != tokenizer:
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
    held = lock(out, wait=False)
    write_atomically(out / "tokenizer.json", tokenizer)
    write_atomically(out / "config.json", json.dumps(settings, indent=1))
    return held


def open_metrics(path: Path, step: int) -> csv.DictWriter:
    """A writer of rows behind those of metrics.csv, less what a crash left there after `step`."""
    text = path.read_text() if path.exists() else ",".join(METRICS) + "\n"
    lines = text[: text.rfind("\n")].split("\n")
    whole = [line for line in lines[1:] if line.count(",") == len(METRICS) - 1]
    kept = lines[:1] + [line for line in whole if int(line.split(",")[0]) <= step]
    if path.is_file() or not path.exists():  # not the null device of the other processes
        write_atomically(path, "\n".join(kept) + "\n")
    file = path.open("a", buffering=1, newline="")  # each row is in the file at once
    return csv.DictWriter(file, METRICS, lineterminator="\n")


# ---- What a run shows ----------------------------------------------------------------------------
def show_run(settings: dict[str, Any], model: torch.nn.Module) -> None:
    """Print the settings and how large the networks are."""
    print(textwrap.fill(", ".join(f"{k} {v}" for k, v in settings.items() if v != ""), 100))
    for part in ("generator", "discriminator", "together"):
        parameters = getattr(model, part, model).parameters()
        print(f"parameters, {part}: {sum(p.numel() for p in parameters):,}")


def show_status(bar: tqdm, step: int, seconds: float, status: str) -> None:
    """Put it on the progress bar; without a terminal print a line. `seconds`: those of a step."""
    bar.set_postfix_str(status)
    if bar.disable:
        left = tqdm.format_interval((bar.total - step) * seconds)
        print(f"step {step:,} of {bar.total:,}: {status}, {left} left", flush=True)


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
    room = shutil.get_terminal_size().columns - 11
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
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
def show_lesson(model: torch.nn.Module, tokenizer: Tokenizer, ids: torch.Tensor) -> str:
    """What the two networks make of one held-out sentence (1, L); fakes and verdicts coloured."""
    model.eval()
    torch.manual_seed(1)
    out = model(ids)
    model.train()
    shown = (("original", ids), ("masked", out.masked.ids), ("generator", out.corrupted_ids))
    rows = [(name, row[0].tolist(), (row[0] != ids[0]).tolist()) for name, row in shown]
    verdicts = out.discriminator_logits[0]
    return show_tokens(tokenizer, rows, verdicts.sigmoid().tolist() if verdicts.any() else [])


@torch.no_grad()
def detect(
    model: torch.nn.Module, tokenizer: Tokenizer, settings: dict[str, Any], text: str
) -> None:
    """Print every token of the text, or of stdin, with the probability that it is a replacement."""
    if settings.get("objective") in ("mlm", "replace_mlm"):
        raise InputError(
            f"--detect needs a discriminator, and --objective {settings['objective']} trains none: "
            "name the folder of another run with --out."
        )
    room = settings["length"] - 2  # what it was trained on: positions behind that know nothing
    for line in sys.stdin if text == "-" else [text]:
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        for part in (ids[i : i + room] for i in range(0, len(ids), room)):
            sentence = torch.tensor([[model.config.cls_id, *part, model.config.sep_id]])
            chances = model.discriminator(sentence)[0, 1:-1].sigmoid()
            rows = [("token", part, (chances > 0.5).tolist())]
            print(show_tokens(tokenizer, rows, chances.tolist()))


def digest(network: torch.nn.Module) -> str:
    """A dozen letters that stand for the weights of a network."""
    content = b"".join(value.numpy().tobytes() for value in network.state_dict().values())
    return hashlib.sha256(content).hexdigest()[:12]


# ---- Hugging Face folders ----------------------------------------------------------------------
# What is the same in every ELECTRA that we can be: another value is another architecture.
FIXED = {"model_type": "electra", "hidden_act": "gelu", "layer_norm_eps": 1e-12}
FIXED |= {"type_vocab_size": 2}
KINDS = {"generator": "ElectraForMaskedLM", "discriminator": "ElectraForPreTraining"}


def hugging_face_names(table: dict[str, str], half: str, name: str) -> list[str]:
    """Their name, or three, of the parameter `name` of our "generator" or "discriminator"."""
    part, _, kind = (name if name.startswith("encoder.") else f"{half}.{name}").rpartition(".")
    number = "".join(filter(str.isdigit, part))
    theirs = f"{table[part.replace(f'.{number}.', '.#.')].replace('#', number)}.{kind}"
    if "*" not in theirs:
        return [theirs]
    return [theirs.replace("*", third) for third in ("query", "key", "value")]


def run_settings(folder: Path) -> dict[str, Any]:
    """config.json of a run's folder; nothing for one of Hugging Face's."""
    path = folder / "config.json"
    settings = read_json(path) if path.exists() else {}
    return {} if "model_type" in settings else settings


def write_hugging_face(
    table: dict[str, str],
    folder: Path,
    half: str,
    network: torch.nn.Module,
    config: Any,
    tokenizer: Tokenizer,
) -> None:
    """A generator, discriminator or encoder as `from_pretrained` of `transformers` reads it.

    `table` leads from the names of our settings and parts to theirs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, torch.Tensor] = {}
    ours = network.state_dict()
    for base in network.encoder.embeddings.base:  # gdes: the table there is the sum of two here
        ours["encoder.embeddings.word.weight"] = (
            base.weight + ours["encoder.embeddings.word.weight"]
        )
    for name, value in ours.items():
        names = hugging_face_names(table, half, name)
        pieces = (piece.cpu().clone() for piece in value.chunk(len(names)))
        state |= zip(names, pieces, strict=True)
    head = any(not name.startswith("electra.") for name in state)
    settings = FIXED | {"architectures": [KINDS[half] if head else "ElectraModel"]}
    settings |= {table[name]: x for name, x in vars(config).items() if name in table}
    settings |= {"attention_probs_dropout_prob": config.dropout, "pad_token_id": config.pad_id}
    normalizer = json.loads(tokenizer.to_str())["normalizer"] or {}
    special = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    reads = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_positions}
    reads |= dict(zip(special, SPECIAL_TOKENS, strict=True))
    reads |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    reads |= {"do_lower_case": normalizer.get("lowercase", False)}
    reads |= {"strip_accents": normalizer.get("strip_accents")}
    try:
        from safetensors.torch import save  # if it is there: the format that they prefer
    except ImportError:
        content = io.BytesIO()
        torch.save(state, content)
        write_atomically(folder / "pytorch_model.bin", content.getvalue())
    else:
        write_atomically(folder / "model.safetensors", save(state, {"format": "pt"}))
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_atomically(folder / "tokenizer_config.json", json.dumps(reads, indent=1))
    write_atomically(folder / "config.json", json.dumps(settings, indent=1))


def read_hugging_face(
    table: dict[str, str], folder: Path
) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Our settings and their weights of the generator, the discriminator, or both.

    They are in the folder itself, or in folders of these names in it. An encoder without a head, or
    with the head of another task, is taken for a discriminator's.
    """
    halves = {}
    inner = [folder / half for half in KINDS if (folder / half / "config.json").exists()]
    if not inner and (not (folder / "config.json").exists() or run_settings(folder)):
        raise InputError(
            f"{folder}: no trained model. Train one (python electra.py --out {folder}), or give "
            "the folder of an ELECTRA in Hugging Face's format."
        )
    for place in inner or [folder]:
        settings = read_json(place / "config.json")
        for key, value in FIXED.items():
            if settings.get(key, value if key != "model_type" else None) != value:
                raise InputError(
                    f"{place / 'config.json'}: {key} is {settings.get(key)}, not {value}. "
                    "That is another architecture than ELECTRA's."
                )
        state = read_weights(place)
        is_generator = any(name.startswith("generator_") for name in state)
        ours = {name: settings[theirs] for name, theirs in table.items() if theirs in settings}
        halves["generator" if is_generator else "discriminator"] = ours, state
    return halves


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """model.safetensors or pytorch_model.bin; names as in a network with a head."""
    found = [folder / name for name in ("model.safetensors", "pytorch_model.bin")]
    found = [path for path in found if path.is_file()]
    if not found:
        raise InputError(f"{folder}: no model.safetensors and no pytorch_model.bin.")
    try:
        if found[0].suffix == ".bin":
            state = torch.load(found[0], map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load_file

            state = load_file(found[0])
    except ImportError:
        raise InputError(f"{found[0]}: reading it takes: pip install safetensors") from None
    except Exception as error:  # noqa: BLE001, both raise many kinds for a damaged file
        raise InputError(f"{found[0]}: cannot be read ({str(error)!r:.60}).") from None
    bare = ("embeddings.", "embeddings_project.", "encoder.")  # ElectraModel: without a head
    return {f"electra.{k}" if k.startswith(bare) else k: v for k, v in state.items()}


def hugging_face_config(
    table: dict[str, str], folder: Path, config: Any, narrow: Callable[[Any], Any]
) -> Any:
    """`config` with the shape of the networks in a folder; narrow(config) is a generator's."""
    shapes = {half: shape for half, (shape, _) in read_hugging_face(table, folder).items()}
    for half, shape in shapes.items():
        if absent := [table[k] for k in table if hasattr(config, k) and k not in shape]:
            raise InputError(f"{folder}: config.json of the {half} has no {absent[0]}.")
    generator = shapes.get("generator", {})
    own = ("hidden_size", "num_heads", "intermediate_size")
    common = {name: value for name, value in generator.items() if name not in own}
    config = dataclasses.replace(config, **shapes.get("discriminator", common))
    if generator:
        config.generator_size = generator["hidden_size"] / config.hidden_size
        ours = dataclasses.asdict(narrow(config)) | {"dropout": generator["dropout"]}
        if wrong := [f"{k} {v} (not {ours[k]})" for k, v in generator.items() if v != ours[k]]:
            raise InputError(f"{folder}: cannot use a generator of {', '.join(wrong)}.")
    return config


def load_hugging_face(table: dict[str, str], folder: Path, model: torch.nn.Module) -> list[str]:
    """Copy the weights of a folder into a model; a head without weights there is named.

    Returns the halves that the folder does not have.
    """
    halves = read_hugging_face(table, folder)
    for half, (_, theirs) in halves.items():
        ours = getattr(model, half).state_dict()
        names = {name: hugging_face_names(table, half, name) for name in ours}
        wanted = {name for each in names.values() for name in each}
        missing = wanted - set(theirs)
        if missing and missing != {name for name in wanted if not name.startswith("electra.")}:
            raise InputError(f"{folder}: the {half} has no weights {min(missing)}.")
        if missing:
            print(f"{folder}: the {half} has no head. Ours starts from random weights.")
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
    return [half for half in KINDS if half not in halves]


def find_tokenizer(folder: Path) -> Path:
    """tokenizer.json or vocab.txt of a Hugging Face folder or of its halves."""
    for place in (folder, folder / "discriminator", folder / "generator"):
        for name in ("tokenizer.json", "vocab.txt"):
            if (place / name).is_file():
                return place / name
    raise InputError(f"{folder}: no tokenizer.json and no vocab.txt. Name one with --tokenizer.")


# ---- The built-in corpus: English that comes with every Python ---------------------------------
def write_builtin_corpus(path: Path, size: int = 4_000_000) -> None:
    """Collect about `size` bytes of English from the documentation of the installed packages.

    The language reference (pydoc_data), the standard library, numpy and torch are parsed with
    `ast`, never imported. Each string in them is a document, if it has paragraphs of prose.
    """
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for package in ("numpy", "torch"):
        spec = importlib.util.find_spec(package)
        roots += [Path(folder) for folder in (spec.submodule_search_locations or []) if spec]
    files = [roots[0] / "pydoc_data" / "topics.py"]
    for root in roots:
        files += sorted(
            file
            for file in root.rglob("*.py")
            if not {"site-packages", "test", "tests", "idlelib", "testing"}
            & set(file.relative_to(root).parts)
        )
    seen: set[str] = set()
    documents: list[str] = []
    total = 0
    for file in tqdm(files, desc="collecting English", disable=None, leave=False):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            paragraphs = [p for p in prose(node.value) if p not in seen]
            if paragraphs:
                seen.update(paragraphs)
                documents.append("\n".join(paragraphs))
                total += len(documents[-1])
        if total >= size:
            break
    write_atomically(path, "\n\n".join(documents) + "\n")


def prose(text: str) -> Iterator[str]:
    """The paragraphs of a docstring that read like English, each on one line, without markup."""
    for paragraph in re.split(r"\n\s*\n", text):
        words = re.sub(r":\w+:`~?([^`]*)`|[`*]+", r"\1", paragraph).split()
        line = " ".join(words)
        letters = sum(character.isalpha() or character == " " for character in line)
        if len(words) >= 6 and letters >= 0.85 * len(line) and ">>>" not in line:
            yield line


# ---- Downloads -----------------------------------------------------------------------------------
def download(url: str, path: Path) -> None:
    """Fetch a file, going on where an earlier try was cut; it is whole or not there."""
    part = path.with_name(path.name + ".part")
    for _ in range(5):
        have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                have = have if response.status == 206 else 0  # else it is sent from the start
                total = have + int(response.headers.get("Content-Length", 0))
                with (
                    part.open("ab" if have else "wb") as file,
                    tqdm(desc=path.name, total=total or None, initial=have, unit="B",
                         unit_scale=True, disable=None) as progress,
                ):  # fmt: skip
                    while block := response.read(1 << 16):
                        progress.update(file.write(block))
            if part.stat().st_size >= total:
                os.replace(part, path)
                return
        except urllib.error.HTTPError as error:
            if error.code != 416:  # "nothing behind these bytes": not ours, or of an older file
                raise InputError(f"{url}: {error.code} {error.reason}.") from None
            part.unlink()
        except (OSError, http.client.HTTPException):
            continue  # cut, or no network: try again
    have = part.stat().st_size if part.exists() else 0
    raise InputError(f"{url}: no connection, or cut after {have:,} bytes. Try again: it goes on.")


# ---- OpenWebText -------------------------------------------------------------------------------
OWT = "https://zenodo.org/record/3834942/files/openwebtext.tar.xz"
OWT_SHA256 = "9fe39d154c5bc67da8c359415372b79510eb1e2edb0d035fe4f7fc3a732b9336"
OWT_DOCUMENTS = 8_013_769  # its published count; only the progress bar needs it
OWT_ROOM = 52e9  # bytes: 12 GB of archive and 38 of text


def fetch_owt(path: Path) -> None:
    """OpenWebText, the text to repeat the paper's small model on, as one file.

    The archive lies beside it: a download that was cut goes on, one put there by hand will do.
    """
    if path.exists():
        print(f"{path}: is there already. Move it away to make it anew.")
        return
    archive, temporary = path.with_name(OWT.rpartition("/")[2]), path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    missing = OWT_ROOM - sum(file.stat().st_size for file in path.parent.glob(f"{archive.name}*"))
    if missing > (free := shutil.disk_usage(path.parent).free):
        raise InputError(f"{path}: {free / 1e9:.0f} GB are free here, {missing / 1e9:.0f} needed.")
    if not archive.exists():
        print(f"fetching {OWT}", flush=True)
        download(OWT, archive)
    print(f"checking {archive}", flush=True)
    found = hashlib.sha256()
    with archive.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    if found.hexdigest() != OWT_SHA256:
        raise InputError(f"{archive}: not the published file. Delete it and try again.")
    print(f"unpacking {archive}", flush=True)
    with (
        temporary.open("wb") as text,
        tqdm(total=OWT_DOCUMENTS, unit=" documents", disable=None) as progress,
    ):
        for document in owt_documents(archive):
            text.write(document + b"\n\n")
            progress.update()
    os.replace(temporary, path)
    print(f"{path}: whole. {archive} is not needed any more.")


def owt_documents(archive: Path) -> Iterator[bytes]:
    """The texts in a tar of .xz files, each a tar of one file per document; nothing is unpacked.

    A blank line would end a document, so they go. So do the zero bytes that a few documents have,
    and what is not UTF-8 becomes U+FFFD: for them no training should stop.
    """
    try:  # lzma.open reads .xz files of several streams, too; tarfile by itself only the first
        with lzma.open(archive) as packed, tarfile.open(fileobj=packed, mode="r|") as outer:
            for part in outer:
                if not part.name.endswith(".xz"):
                    continue
                with (
                    lzma.open(outer.extractfile(part)) as texts,
                    tarfile.open(fileobj=texts, mode="r|") as inner,
                ):
                    for member in inner:
                        content = inner.extractfile(member) if member.isfile() else None
                        if content:
                            text = content.read().decode("utf-8", "replace").replace("\0", "")
                            lines = [line for line in text.split("\n") if line.strip()]
                            if lines:
                                yield "\n".join(lines).encode()
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise InputError(f"{archive}: cannot be unpacked ({error}). Try again.") from None


# ---- GLUE: archives and TSV files --------------------------------------------------------------
class GlueTask(NamedTuple):
    """Where a task of GLUE is fetched, and where its texts and labels stand (columns from 0)."""

    sources: tuple[str, ...]  # addresses
    rows: dict[str, int]  # file -> rows of the official release, headers not counted
    texts: tuple[int, ...]  # columns of the text, or of both texts, in train and dev
    test_texts: tuple[int, ...]
    label: int  # column of the label in train and dev
    labels: tuple[str, ...]  # in the order of a model's outputs; none: a score from 0 to 5


def splits(train: int, dev: int, test: int) -> dict[str, int]:
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
    "CoLA": GlueTask((AT + "CoLA.zip",), splits(8551, 1043, 1063), (3,), (1,), 1, YES_NO),
    "SST-2": GlueTask((AT + "SST-2.zip",), splits(67349, 872, 1821), (0,), (1,), 1, YES_NO),
    "MRPC": GlueTask(MRPC, splits(3668, 408, 1725), (3, 4), (3, 4), 0, YES_NO),
    "STS-B": GlueTask((AT + "STS-B.zip",), splits(5749, 1500, 1379), (-3, -2), (-2, -1), -1, ()),
    "QQP": GlueTask(
        (AT + "QQP-clean.zip",), splits(363846, 40430, 390965), (3, 4), (1, 2), 5, YES_NO
    ),
    "MNLI": GlueTask((AT + "MNLI.zip",), MNLI_ROWS, (8, 9), (8, 9), -1, NLI),
    "QNLI": GlueTask((AT + "QNLIv2.zip",), splits(104743, 5463, 5463), (1, 2), (1, 2), 3, ENTAILED),
    "RTE": GlueTask((AT + "RTE.zip",), splits(2490, 277, 3000), (1, 2), (1, 2), 3, ENTAILED),
    "WNLI": GlueTask((AT + "WNLI.zip",), splits(635, 71, 146), (1, 2), (1, 2), 3, YES_NO),
    "diagnostic": GlueTask((AT + "AX.tsv",), {"diagnostic": 1104}, (1, 2), (1, 2), -1, NLI),
}


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

    A bad row is left out of train. Elsewhere it stays, without text and label, so that the
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
            if not all(text.strip() for text in texts):
                raise ValueError("an empty text")
            label = parse_label(row[facts.label], facts.labels) if labelled else math.nan
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


def put(path: Path, content: bytes) -> None:
    """Write a file of GLUE; another one that is there already is kept as <name>.old."""
    if path.exists() and path.read_bytes() != content:
        os.replace(path, path.with_name(path.name + ".old"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


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
                put(folder / task / f"{name}.tsv", zipped.read(f"{task}/{name}.tsv"))
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
        put(folder / "MRPC" / f"{name}.tsv", b"\n".join(rows) + b"\n")


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
            download(url, path)
    try:
        if task == "MRPC":
            build_mrpc(*fetched, folder)
        elif task == "diagnostic":
            put(folder / task / "diagnostic.tsv", fetched[0].read_bytes())
        else:
            unpack(fetched[0], folder, task)
    finally:  # unpacked, or of no use
        for path in fetched:
            path.unlink()


def fetch_all_glue(folder: Path, tasks: list[str]) -> None:
    """Download what is missing of these tasks, and say of every file whether it is whole."""
    bad = 0
    for task in tasks:
        try:
            if any(check_glue(folder, task).values()):
                fetch_glue(folder, task)
        except (InputError, OSError) as error:
            print(f"data.py: {error}", file=sys.stderr)
        for name, problem in check_glue(folder, task).items():
            print(f"{folder / task / name}.tsv: {problem or 'whole'}", flush=True)
            bad += bool(problem)
    if bad:
        raise InputError(f"{folder}: {bad} files are not whole. The same command tries again.")


# ---- python data.py ------------------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Download what to train on, and check it.")
    what = parser.add_subparsers(dest="what", required=True, metavar="owt or glue")
    what.add_parser("owt", help="OpenWebText, 12 GB of archive, into owt.txt (38 GB)")
    glue = what.add_parser("glue", help="the nine tasks of GLUE and the diagnostic set")
    glue.add_argument("--dir", default="glue", help="folder for <TASK>/*.tsv")
    glue.add_argument("--tasks", nargs="+", choices=GLUE, default=list(GLUE), metavar="TASK",
                      help=f"some of {', '.join(GLUE)} (default: all)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.what == "owt":
        return run_program("data.py", lambda: fetch_owt(Path("owt.txt")))
    return run_program("data.py", lambda: fetch_all_glue(Path(options.dir), options.tasks))


if __name__ == "__main__":
    sys.exit(main())
