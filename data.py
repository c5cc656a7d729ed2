"""Text -> tokenizer -> token files -> batches, and files that are whole or not there.

    text --prepare()--> tokenizer.json, train.bin, valid.bin, meta.json --get_batch()--> ids (B, L)

The token files are one long stream of ids, little-endian uint16 (uint32 above 65,535 entries), in
which every document ends with [SEP]. They are memory-mapped: a corpus may be larger than memory.

Sections: programs; files; reading text; tokenizer; token files; batches; the built-in corpus;
downloads; OpenWebText (python data.py owt).
"""

import argparse
import ast
import contextlib
import hashlib
import http.client
import importlib.util
import io
import itertools
import json
import lzma
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import unicodedata
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import numpy as np
import torch
from tokenizers import (
    Regex,
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
TOKENIZERS = ("wordpiece", "wordpiece_cased", "bpe")  # those that are trained on the text
PIECE = 1 << 16  # bytes of text in one string, however long the lines
BATCH = 1 << 20  # bytes of text that are encoded together
SAMPLE_SLICES = 40  # batches, spread over the text, that train the tokenizer: that takes 126 MB
# What BERT makes one [UNK] of: over 100 characters without a blank, and most emoji.
LONG_WORD = re.compile(r"[^\s.,:;/?!-]{101,}|[\u2600-\u27bf\U0001f000-\U0001faff]")
HELD_OUT = 100  # every 100th document is kept for evaluation ...
MOST_HELD_OUT = 20  # ... but at most a twentieth of the tokens, however long those documents are


# ---- Programs ----------------------------------------------------------------------------------
class InputError(Exception):
    """Something is wrong with what the user gave us: says what, where, and what to do."""


class Display(io.TextIOBase):
    """stdout or stderr for a program that must not die of it: a stream may be closed or break."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115, for as long as we run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a letter that the terminal does not have: ?

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except (OSError, ValueError):  # the reader has gone, as with "| head -1"
            self.stream = open(os.devnull, "w")  # noqa: SIM115
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    @property
    def encoding(self) -> str:
        return self.stream.encoding


def run_program(program: str, work: Callable[[], None]) -> int:
    """Exit code of a program: 0; 2 after one line about a bad input; 130 after Ctrl-C."""
    sys.stdout, sys.stderr = Display(sys.stdout), Display(sys.stderr)
    try:
        work()
    except (InputError, OSError) as error:  # a full disk is an OSError
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"{program}: {error!s:.60}: choose a smaller --micro_batch.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: stopped; the same command goes on from there.", file=sys.stderr)
        return 130
    finally:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, getattr(stream, "stream", stream))
    return 0


def standard_input() -> Iterable[str]:
    """The lines of stdin; bytes that are not UTF-8 become U+FFFD."""
    if sys.stdin is None:
        raise InputError("- reads standard input, which is closed here.")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    return sys.stdin


# ---- Files that are whole or not there ---------------------------------------------------------
def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8-sig"))
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


def load_checkpoint(path: Path, keys: Iterable[str] = ()) -> dict[str, Any] | None:
    """The newest whole checkpoint, None where there never was one. It is read, never executed.

    InputError if none is whole, or if it is a file of another kind, without these keys.
    """
    candidates = [p for p in (path, path.with_name(path.name + ".old")) if p.exists()]
    for candidate in candidates:
        try:
            state = torch.load(candidate, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001, torch raises many kinds for a damaged file
            print(f"{candidate} is damaged: {str(error)!r:.60}", file=sys.stderr)
            continue
        if not isinstance(state, dict) or not set(keys) <= set(state):
            raise InputError(f"{candidate}: not written by this program. Move it away.")
        return state
    if candidates:
        raise InputError(f"{path}: no whole checkpoint left. Move it away to begin anew.")
    return None


def refuse_foreign(folder: Path, mark: str, key: str, files: Iterable[str], option: str) -> None:
    """InputError if we would overwrite what others put into a folder.

    It is ours if the JSON object in the file `mark` has this key; else none of `files` may exist.
    """
    if (folder / mark).exists() and key in read_json(folder / mark):
        return
    for name in (mark, *files):
        if (folder / name).exists():
            raise InputError(f"{folder} has a {name} of another program. Change {option}.")


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


# ---- Reading text ------------------------------------------------------------------------------
def check_text(path: Path) -> None:
    """InputError unless there is a file of text at this path."""
    problem = ""
    if path.is_dir():
        problem = f"is a folder. Join its files: cat {path}/* > text.txt"
    elif not path.exists():
        problem = "no such file. --data takes one UTF-8 text file"
    elif not path.is_file() or str(path).startswith(("/dev/stdin", "/dev/fd/", "/proc/")):
        problem = "not a regular file, as --data has to be: it is read several times"
    elif not os.access(path, os.R_OK):
        problem = "cannot be read. Check its permissions"
    elif not any(line.strip() for line in sample_lines(path)):
        problem = "no text in it. Give a file with some megabytes of text"
    if problem:
        raise InputError(f"{path}: {problem}.")


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


def has_json_lines(path: Path) -> bool:
    """Whether every line is a document {"text": "..."}, as web corpora are handed out.

    InputError for other JSON: nobody wants to train on its syntax.
    """
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"").strip()
    try:
        content = first in (b"[", b"{") or json.loads(first)
    except ValueError:
        return False
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return True
    if content is True or isinstance(content, dict | list):
        raise InputError(
            f'{path}: JSON. --data takes plain text, or lines that are objects with a "text": '
            f"jq -c '{{text: .content}}' {path} > text.jsonl"
        )
    return False


def json_text(line: bytes, offset: int, path: Path) -> str:
    try:
        return json.loads(line)["text"].replace("\0", "")
    except (ValueError, TypeError, KeyError, AttributeError):
        where = f"{path}: the line that ends at byte {offset:,}"
        raise InputError(f'{where} is no JSON object with a "text". Leave it out.') from None


def has_blank_lines(path: Path) -> bool:
    """Whether blank lines end documents: if they part lines of text in more than one place.

    One stray blank line in a text with a document a line would else make two documents of all.
    """
    gaps, text, blank = 0, False, False
    with path.open("rb") as file:
        for piece, _ in read_pieces(file):
            if piece.strip():
                gaps += text and blank
                if gaps > 1:
                    return True
                text, blank = True, False
            else:
                blank = True
    return False


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
def sample_lines(path: Path, json_lines: bool = False) -> Iterator[str]:
    """Lines to train a tokenizer on: the whole text, or SAMPLE_SLICES pieces of a large one."""
    size = path.stat().st_size
    slices = [(0, size)]
    if size > SAMPLE_SLICES * BATCH:
        slices = [(size * i // SAMPLE_SLICES, BATCH) for i in range(SAMPLE_SLICES)]
    with path.open("rb") as file:
        for start, length in slices:
            file.seek(start)
            if start > 0:  # we are in the middle of a line
                file.readline(-1 if json_lines else PIECE)
            lines = ((line, file.tell()) for line in iter(file.readline, b""))
            for piece, offset in lines if json_lines else read_pieces(file):
                if json_lines:
                    text = json_text(piece, offset, path) if piece.strip() else ""
                else:  # a slice of a very long line may begin inside a character: do without it
                    text = piece.decode("utf-8", "ignore") if start else decode(piece, offset, path)
                # One line of 13 MB costs the trainer 836 MB of memory, many short ones 52 MB.
                yield from (text[i : i + 10_000] for i in range(0, len(text), 10_000))
                if offset >= start + length:
                    break


def has_marks(character: str) -> bool:
    """Whether stripping accents, as BERT does, would change this character."""
    decomposed = unicodedata.normalize("NFD", character)
    return character != "".join(c for c in decomposed if unicodedata.category(c) != "Mn")


def train_tokenizer(
    lines: Callable[[], Iterable[str]], kind: str, vocab_size: int
) -> tuple[Tokenizer, str]:
    """One of TOKENIZERS with at most vocab_size entries, and a line about what it keeps.

    "wordpiece" is BERT's uncased one where that is harmless: it also strips accents, which makes
    other words of German, other syllables of Japanese, and no words at all of Hindi and Thai. So
    marks are kept where more than one letter in 500 has any. (English: one in 2,000.)

    The result differs a little from call to call (ties are broken at random in `tokenizers`), so
    it is trained once and kept with the tokens and with every run.
    """
    settings: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": SPECIAL_TOKENS}
    settings |= {"min_frequency": 2, "show_progress": False}
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **settings)
        kept = "bytes: case, accents and blanks are kept"
    else:
        characters: Counter[str] = Counter()
        long = 0  # characters in words that BERT would not read
        for number, line in enumerate(lines()):
            if number < 2000 or number % 16 == 0:  # a second of a large text, not ten
                characters.update(line)
                long += sum(map(len, LONG_WORD.findall(line)))
        letters = {c: n for c, n in characters.items() if c.isalpha() or has_marks(c)}
        marked = sum(n for c, n in letters.items() if has_marks(c)) / max(1, sum(letters.values()))
        lowercase, plain = kind == "wordpiece", marked < 1 / 500
        tokenizer = word_piece(
            models.WordPiece(unk_token="[UNK]"), lowercase, lowercase and plain, clean_text=plain
        )
        if long > 1e-5 * characters.total():  # where there are none it costs a tenth of the time
            pieces = Regex(r"[^\s\p{P}]{100}|[\x{2600}-\x{27BF}\x{1F000}-\x{1FAFF}]")
            split = pre_tokenizers.Split(pieces, "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
        # BERT's 1,000 characters, or what covers 99.95 % of the text, in half the entries at most.
        covered = np.cumsum([n for c, n in characters.most_common() if not c.isspace()])
        alphabet = int(np.searchsorted(covered, 0.9995 * covered[-1])) + 1 if len(covered) else 1
        alphabet = min(max(1000, alphabet), vocab_size // 2)
        trainer = trainers.WordPieceTrainer(limit_alphabet=alphabet, **settings)
        case = "lower case" if lowercase else "case is kept"
        marks = "stripped" if lowercase and plain else "kept"
        kept = f"{case}, accents are {marks} ({marked:.2%} of the letters have any)"
    tokenizer.train_from_iterator(lines(), trainer)
    return tokenizer, kept


def word_piece(
    model: models.WordPiece, lowercase: bool, strip_accents: bool | None, clean_text: bool = True
) -> Tokenizer:
    """BERT's tokenizer, cased or uncased; strip_accents None: where it is uncased."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=clean_text, lowercase=lowercase, strip_accents=strip_accents
    )
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
            entries = path.read_text("utf-8-sig").removesuffix("\n").split("\n")
            vocabulary = {entry.rstrip("\r"): number for number, entry in enumerate(entries)}
            beside = path.with_name("tokenizer_config.json")
            settings = read_json(beside) if beside.exists() else {}
            tokenizer = word_piece(
                models.WordPiece(vocabulary, unk_token="[UNK]"),
                settings.get("do_lower_case", True),
                settings.get("strip_accents"),
            )
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


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: an entry that is there twice leaves a gap."""
    return 1 + max(tokenizer.get_vocab().values())


# ---- Token files -------------------------------------------------------------------------------
class Corpus(NamedTuple):
    """A text as a model reads it: two streams of ids, mapped from the files."""

    tokenizer: Tokenizer
    train: np.ndarray
    valid: np.ndarray
    fingerprint: str  # of the text


def prepare(
    text: str, tokens: str, tokenizer: str, vocab_size: int, trained: Path | None = None
) -> Corpus:
    """Turn a text into token files, once. No text: the built-in corpus; no folder: <text>.tokens.

    `tokenizer` is one of TOKENIZERS or the path of one. `trained`, if there is such a file, stands
    in for the training of one. An interrupted preparation goes on where it was; what is done is not
    done again; another text or tokenizer in the same folder is refused. Memory does not grow with
    the text.
    """
    path = Path(text or "builtin.txt")
    if not text and not path.exists():
        write_builtin_corpus(path)
    folder = Path(tokens or f"{path}.tokens")
    check_text(path)
    with lock(folder, wait=True):
        meta = open_folder(path, folder, tokenizer, vocab_size, trained)
        if not meta["complete"]:
            encode_text(path, folder, meta)
    train, valid = (open_tokens(folder, split, meta) for split in ("train", "valid"))
    return Corpus(load_tokenizer(folder / "tokenizer.json"), train, valid, meta["text"])


def open_folder(
    path: Path, folder: Path, asked: str, vocab_size: int, trained: Path | None
) -> dict[str, Any]:
    """What meta.json says, if it fits what is asked; or a new tokenizer and a new meta.json."""
    wanted: dict[str, Any] = {"text": fingerprint(path)}
    tokenizer = None
    if asked in TOKENIZERS:
        wanted |= {"tokenizer": asked, "vocab_size": vocab_size}
    else:  # what counts is what is in the file, wherever it lies
        tokenizer = load_tokenizer(Path(asked))
        content = tokenizer.to_str(pretty=True).encode()
        wanted["tokenizer_sha256"] = hashlib.sha256(content).hexdigest()
    meta_path, tokenizer_path = folder / "meta.json", folder / "tokenizer.json"
    files = ("tokenizer.json", "train.bin", "valid.bin")
    refuse_foreign(folder, "meta.json", "tokenizer_sha256", files, "--tokens")
    if meta_path.exists() and tokenizer_path.exists():
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
        return {"json_lines": False, "characters": 0, "unknown": 0} | meta
    json_lines = has_json_lines(path)
    if tokenizer is None and trained and trained.exists():
        tokenizer = load_tokenizer(trained)
    elif tokenizer is None:
        print(f"training a {asked} tokenizer of {vocab_size:,} entries on {path}", flush=True)
        tokenizer, kept = train_tokenizer(lambda: sample_lines(path, json_lines), asked, vocab_size)
        print(f"{asked}: {kept}", flush=True)
        finish_tokenizer(tokenizer, path)
    content = tokenizer.to_str(pretty=True)
    meta = wanted | {
        "tokenizer_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "json_lines": json_lines,
        "blank_lines": has_blank_lines(path),
        "dtype": "<u2" if vocabulary_size(tokenizer) <= 65536 else "<u4",
        "complete": False,
        "offset": 0,  # bytes of the text that are done
        "between_documents": True,  # whether the text behind them begins a document
        "documents": 0,  # begun so far
        "last_document": 0,  # where the last one in train.bin begins, in tokens
        "train": 0,  # tokens in train.bin
        "valid": 0,
        "characters": 0,
        "unknown": 0,  # tokens that are [UNK]
    }
    write_atomically(meta_path, json.dumps(meta, indent=1))  # first: now the folder is ours
    write_atomically(tokenizer_path, content)
    return meta


class TextBatch(NamedTuple):
    """Some pieces of a text that are encoded together."""

    pieces: list[str]
    begins: list[bool]  # whether a piece begins a document
    offset: int  # bytes of the text up to their end
    between_documents: bool  # whether the text behind them begins a document


def read_lines(file: BinaryIO, path: Path, meta: dict[str, Any]) -> Iterator[TextBatch]:
    """The lines of a text, or parts of long ones, each as a batch."""
    begin = meta["between_documents"]
    for piece, offset in read_pieces(file):
        if offset == len(piece):
            piece = piece.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark is no text
        if piece.strip():
            begins = begin
            begin = not meta["blank_lines"] and piece.endswith(b"\n")
            yield TextBatch([decode(piece, offset, path)], [begins], offset, begin)
        else:
            begin |= piece.endswith(b"\n")
            yield TextBatch([], [], offset, begin)


def read_json_lines(file: BinaryIO, path: Path, meta: dict[str, Any]) -> Iterator[TextBatch]:
    """The documents of lines of JSON, each as a batch."""
    for line in iter(file.readline, b""):
        text = json_text(line, file.tell(), path) if line.strip() else ""
        parts = read_pieces(io.BytesIO(text.encode("utf-8", "replace")))
        pieces = [part.decode() for part, _ in parts if part.strip()]
        yield TextBatch(pieces, [i == 0 for i in range(len(pieces))], file.tell(), True)


def read_batches(path: Path, meta: dict[str, Any]) -> Iterator[TextBatch]:
    """The text behind meta["offset"], about BATCH bytes at a time."""
    pieces, begins, start = [], [], meta["offset"]
    last = TextBatch([], [], start, meta["between_documents"])
    with path.open("rb") as file:
        file.seek(start)
        for last in (read_json_lines if meta["json_lines"] else read_lines)(file, path, meta):
            pieces += last.pieces
            begins += last.begins
            if last.offset - start >= BATCH:
                yield last._replace(pieces=pieces, begins=begins)
                pieces, begins, start = [], [], last.offset
    yield last._replace(pieces=pieces, begins=begins)


def encode_text(path: Path, folder: Path, meta: dict[str, Any]) -> None:
    """Append the tokens of the text behind meta["offset"], a batch of pieces at a time.

    meta.json is written after each batch; what a crash left behind it is cut off and done again.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    dtype = np.dtype(meta["dtype"])
    unknown = tokenizer.token_to_id("[UNK]")
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
            meta["unknown"] += encoding.ids.count(unknown)
        meta["characters"] += sum(map(len, batch.pieces))
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
    # Fewer than 100 documents: hold out the last, or the end of the only one. The files keep the
    # tokens that change sides behind meta's counts, so that a crash right here can be made good.
    most = max(1, (meta["train"] + meta["valid"]) // MOST_HELD_OUT)
    files["train"].flush(), files["valid"].flush()
    if meta["valid"] == 0:
        start = max(meta["last_document"], meta["train"] - most)
        tail = np.fromfile(folder / "train.bin", dtype, offset=start * dtype.itemsize)
        files["valid"].write(tail.tobytes())
        meta["train"], meta["valid"] = start, len(tail)
    elif meta["valid"] > most:
        tail = np.fromfile(folder / "valid.bin", dtype, offset=most * dtype.itemsize)
        files["train"].write(tail.tobytes())
        meta["train"], meta["valid"] = meta["train"] + len(tail), most
    meta["complete"] = True
    save()
    progress.close()
    for file in files.values():
        file.close()
    show_preparation(path, meta, tokenizer)


def show_preparation(path: Path, meta: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Print what became of a text; a warning where words of it are lost."""
    tokens = meta["train"] + meta["valid"]
    share = meta["unknown"] / tokens
    print(
        f"{path}: {meta['documents']:,} documents, {tokens:,} tokens of "
        f"{meta['characters'] / tokens:.1f} characters, {share:.2%} of them [UNK]; "
        f"{meta['valid']:,} are held out",
        flush=True,
    )
    if share < 0.01:
        return
    vocabulary = set("".join(tokenizer.get_vocab()))
    missing: Counter[str] = Counter()
    for line in sample_lines(path, meta["json_lines"]):
        text = tokenizer.normalizer.normalize_str(line) if tokenizer.normalizer else line
        missing.update(c for c in text if c not in vocabulary and not c.isspace())
    names = " ".join(c for c, _ in missing.most_common(10))
    print(
        f"warning: {share:.1%} of the tokens are [UNK], words that this vocabulary cannot spell"
        f"{f', mostly for want of: {names}' if names else ''}. --tokenizer bpe has no [UNK]; one "
        "that is trained on this text, with a larger --vocab_size, has fewer.",
        flush=True,
    )


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

    A Feistel network permutes the numbers of 2 * bits bits; one that falls outside 0 .. n-1 goes
    through again until it falls inside.
    """
    bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    x = index.astype(np.uint64)
    outside = np.ones(len(x), dtype=bool)
    while outside.any():
        left, right = x[outside] >> bits, x[outside] & mask
        for r in range(4):
            left, right = right, left ^ (scramble(right, 4 * key + r) & mask)
        x[outside] = left << bits | right
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

        ids              [CLS] the chef cooked the [SEP] meal . it was good [SEP]
        token_type_ids     0    0   0     0     0    0    1   1  1  1   1     1

    Nine of ten are [CLS] A [SEP] B [SEP], one is [CLS] A [SEP]; A and B are one cut from the stream
    without a gap. There is no padding, so no attention mask either. Every epoch rotates the stream
    by a random amount, cuts it into such pieces one behind the other, and visits them in a random
    order: each token once, at fresh cuts. (The last piece is filled up with the first tokens.) All
    of it follows from the numbers given here.
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


def find_sentences(tokens: np.ndarray, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """Some whole sentences of 12 to 24 tokens, to show what a model makes of them."""
    ids, end = tokens[:100_000].tolist(), tokenizer.token_to_id("[SEP]")
    stops = [-1] + [i for i, token in enumerate(ids) if token in (tokenizer.token_to_id("."), end)]
    longest = min(24, length - 2)
    sentences = [
        ids[before + 1 : stop + 1]
        for before, stop in itertools.pairwise(stops)
        if ids[stop] != end and 12 <= stop - before <= longest
    ]
    return sentences[:20] or [ids[:longest]]


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


# ---- python data.py ------------------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Download OpenWebText into owt.txt (38 GB).")
    parser.add_argument("what", choices=["owt"], help="12 GB of archive, 38 GB of text")
    parser.parse_args(arguments)
    fetch_owt(Path("owt.txt"))


if __name__ == "__main__":
    sys.exit(run_program("data.py", main))
