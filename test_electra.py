"""What must hold, one fact a test, in the order of electra.py and data.py."""

import csv
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from sklearn.metrics import roc_auc_score
from torch import Tensor
from transformers import ElectraConfig as HFConfig
from transformers import ElectraForMaskedLM, ElectraForPreTraining

import data
import electra
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


def hugging_face(net: torch.nn.Module, config: ElectraConfig, cls: type) -> torch.nn.Module:
    """The same network as Hugging Face writes it, with the same weights."""
    theirs = cls(
        HFConfig(
            vocab_size=config.vocab_size,
            embedding_size=config.embedding_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_positions,
        )
    ).eval()
    names = [
        (
            r"^encoder\.embeddings\.(word|position|token_type)\.",
            r"electra.embeddings.\1_embeddings.",
        ),
        (r"^encoder\.embeddings\.norm", "electra.embeddings.LayerNorm"),
        (r"^encoder\.project", "electra.embeddings_project"),
        (r"^encoder\.layers\.(\d+)\.", r"electra.encoder.layer.\1."),
        (r"(layer\.\d+)\.attention\.output\.", r"\1.attention.output.dense."),
        (r"(layer\.\d+)\.attention_norm", r"\1.attention.output.LayerNorm"),
        (r"(layer\.\d+)\.intermediate\.", r"\1.intermediate.dense."),
        (r"(layer\.\d+)\.output\.", r"\1.output.dense."),
        (r"(layer\.\d+)\.output_norm", r"\1.output.LayerNorm"),
    ]
    head = {"dense": "dense", "norm": "LayerNorm", "prediction": "dense_prediction"}
    state = {}
    for name, value in net.state_dict().items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        part, _, rest = name.partition(".")
        if part in head:
            kind = "generator" if cls is ElectraForMaskedLM else "discriminator"
            name = f"{kind}_predictions.{head[part]}.{rest}"
        if "query_key_value" in name:
            for part, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                state[name.replace("query_key_value", f"self.{part}")] = third
        else:
            state["generator_lm_head.bias" if name == "bias" else name] = value
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"electra.embeddings.position_ids", "generator_lm_head.weight"}
    theirs.tie_weights()
    return theirs


@pytest.mark.parametrize("embedding_size", [16, 32])
def test_discriminator_logits_equal_hugging_face(embedding_size: int) -> None:
    net = model(dataclasses.replace(TINY, embedding_size=embedding_size))
    theirs = hugging_face(net.discriminator, net.config, ElectraForPreTraining)
    ids, mask = padded(sentences(3, 20), [20, 13, 6])
    types = (torch.arange(20) > 7).long().expand(3, 20)
    with torch.no_grad():
        ours = net.discriminator(ids, mask, types)
        expected = theirs(ids, mask, types).logits
    torch.testing.assert_close(ours[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)


def test_generator_logits_equal_hugging_face_at_the_chosen_positions() -> None:
    net = model()
    config = electra.generator_config(TINY)
    theirs = hugging_face(net.generator, config, ElectraForMaskedLM)
    ids, mask = padded(sentences(3, 20), [20, 13, 9])
    types = (torch.arange(20) > 7).long().expand(3, 20)
    positions = torch.tensor([[1, 18], [5, 2], [0, 7]])
    with torch.no_grad():
        ours = net.generator(ids, mask, types, positions)
        expected = theirs(ids, mask, types).logits[torch.arange(3)[:, None], positions]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_dropout_acts_in_training_only() -> None:
    net = model(dataclasses.replace(TINY, dropout=0.5))
    ids = sentences(2, 16)
    assert torch.equal(net.discriminator(ids), net.discriminator(ids))
    net.train()
    assert not torch.equal(net.discriminator(ids), net.discriminator(ids))


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


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_gumbel_sampling_follows_the_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    n = 200_000
    counts = gumbel_sample(logits.expand(n, 5), temperature).bincount(minlength=5)
    expected = (logits / temperature).softmax(0) * n
    assert chisquare(counts.numpy(), expected.double().numpy(), sum_check=False).pvalue > 1e-4


def test_gumbel_sampling_stays_uniform_over_a_large_vocabulary_under_bf16() -> None:
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
    with torch.no_grad():
        before = net.generator(sentences(1, 8))
        net.discriminator.encoder.embeddings.word.weight[77] += 1
        after = net.generator(sentences(1, 8))
    assert (before != after)[0, :, 77].all()


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
    source = Path(electra.__file__).read_text()
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


# ---------------------------------------------------------------------------- 5. Optimiser


def test_every_parameter_is_in_one_group_and_biases_and_norms_do_not_decay() -> None:
    net = model()
    optimizer = electra.make_optimizer(net, RunConfig())
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in net.parameters())
    undecayed = {
        id(p) for g in optimizer.param_groups if g["weight_decay"] == 0 for p in g["params"]
    }
    for name, p in net.named_parameters():
        assert (id(p) in undecayed) == (name.endswith("bias") or "norm" in name), name


def test_every_parameter_moves() -> None:
    net = model().train()
    optimizer = electra.make_optimizer(net, RunConfig())
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
    assert list(first) == data.METRICS[6:]


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
    data.prepare(str(path), str(tokens), kind, "", vocab_size)
    return json.loads((tokens / "meta.json").read_text()), tokens


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


def test_few_documents_hold_out_the_last_and_one_document_its_end(tmp_path: Path) -> None:
    for i, (text, documents) in enumerate(
        [("one two .\n\nthree four five .\n", 2), ("a b c " * 100, 1)]
    ):
        (tmp_path / str(i)).mkdir()
        meta, folder = prepare(tmp_path / str(i), text)
        tokenizer = data.load_tokenizer(folder / "tokenizer.json")
        ids = [
            i
            for d in text.split("\n\n")
            for i in [*tokenizer.encode(d, add_special_tokens=False).ids, 3]
        ]
        assert stream(meta, folder) == ids
        assert meta["valid"] == (len(ids) - ids.index(3) - 1 if documents == 2 else 3)


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
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    path = tmp_path / "text.txt"
    path.write_text("The cats\n\nthe dog\n")
    vocab, tokens = str(tmp_path / "vocab.txt"), str(tmp_path / "tokens")
    corpus = data.prepare(str(path), tokens, "wordpiece", vocab, 100)
    assert [*corpus.train.tolist(), *corpus.valid.tolist()] == [6, 7, 8, 4, 6, 2, 4]


def test_a_vocabulary_above_65535_entries_is_stored_in_four_bytes(tmp_path: Path) -> None:
    vocabulary = [*data.SPECIAL_TOKENS, *(f"w{i}" for i in range(70_000))]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    path = tmp_path / "text.txt"
    path.write_text("w69999 w1\n\nw65536\n")
    vocab, tokens = str(tmp_path / "vocab.txt"), str(tmp_path / "tokens")
    corpus = data.prepare(str(path), tokens, "wordpiece", vocab, 100)
    assert [*corpus.train.tolist(), *corpus.valid.tolist()] == [70_004, 6, SEP, 65_541, SEP]


@pytest.mark.parametrize("pieces", [60, 200, 499])
def test_an_interrupted_preparation_goes_on_and_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(data, "PIECE", 2000)
    meta, folder = prepare(tmp_path, TEXT)
    whole = {path.name: path.read_bytes() for path in folder.glob("*.bin")}
    decode, calls = data.decode, iter(range(10_000))

    def interrupted(piece: bytes, offset: int, path: Path) -> str:
        if next(calls) == pieces:
            raise KeyboardInterrupt
        return decode(piece, offset, path)

    begin = {"offset": 0, "train": 0, "valid": 0, "documents": 0, "last_document": 0}
    begin |= {"complete": False, "between_documents": True}
    (folder / "meta.json").write_text(json.dumps(meta | begin))
    monkeypatch.setattr(data, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, TEXT)
    assert 0 < json.loads((folder / "meta.json").read_text())["offset"] < len(TEXT)
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
    tokenizer.write_text(tokenizer.read_text().replace("document", "documemt"))
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
        "assert not {'torch', 'this', 'tkinter', 'antigravity'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(data.__file__).parent)
    text = path.read_text()
    assert 200_000 <= len(text) < 400_000
    assert len(re.findall(r"\bthe\b", text)) > 2000
    assert ">>>" not in text


# ---------------------------------------------------------------------------- The whole program


def run_program(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, str(Path(electra.__file__).resolve()), *arguments]
    return subprocess.run(
        command, check=False, cwd=folder, input=stdin, capture_output=True, text=True, timeout=240
    )


SMALL_RUN = [
    *("--data", "text.txt", "--size", "tiny", "--vocab_size", "200", "--num_layers", "1"),
    *("--batch_size", "4", "--micro_batch", "2", "--log_every", "2", "--eval_every", "4"),
    *("--eval_sequences", "4", "--precision", "fp32", "--steps", "8"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT)
    result = run_program(folder, *SMALL_RUN)
    assert result.returncode == 0, result.stderr
    (folder / "printed").write_text(result.stdout)
    return folder


def test_a_run_writes_its_settings_tokenizer_metrics_and_checkpoint(finished: Path) -> None:
    with (finished / "out" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4", "6", "8"]
    assert [bool(row["valid_auc"]) for row in rows] == [False, True, False, True]
    assert rows[-1]["tokens"] == str(8 * 4 * 64)
    assert float(rows[0]["seconds"]) < float(rows[1]["seconds"])
    settings = json.loads((finished / "out" / "config.json").read_text())
    assert (settings["vocab_size"], settings["mask_id"], settings["num_layers"]) == (200, MASK, 1)
    assert data.load_tokenizer(finished / "out" / "tokenizer.json").get_vocab_size() == 200


def test_a_run_prints_settings_parameter_counts_and_the_lesson(finished: Path) -> None:
    printed = (finished / "printed").read_text()
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


def test_a_run_stopped_and_continued_ends_with_the_weights_of_one_never_stopped(
    finished: Path,
) -> None:
    # The learning rate depends on the number of steps: stop it with a signal instead.
    program = (
        "import sys, signal, os, electra; sys.argv[0] = 'electra.py'\n"
        "step = electra.learning_rate\n"
        "def stop_at_3(number, run):\n"
        "    if number == 3: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return step(number, run)\n"
        "electra.learning_rate = stop_at_3\n"
        "sys.exit(electra.main())"
    )
    command = [sys.executable, "-c", program, *SMALL_RUN, "--out", "stopped"]
    environment = os.environ | {"PYTHONPATH": str(Path(electra.__file__).parent)}
    result = subprocess.run(
        command, check=False, cwd=finished, env=environment, capture_output=True, text=True
    )
    assert "3 of 8 steps are done; the same command" in result.stdout, result.stderr
    assert run_program(finished, *SMALL_RUN, "--out", "stopped").returncode == 0
    one, two = (
        electra.load_checkpoint(finished / name / "checkpoint.pt") for name in ("out", "stopped")
    )
    assert one["step"] == two["step"] == 8
    for name, weights in one["model"].items():
        assert torch.equal(weights, two["model"][name]), name

    def losses(name: str) -> list[list[str]]:
        rows = (finished / name / "metrics.csv").read_text().splitlines()
        return [row.split(",")[:2] + row.split(",")[3:] for row in rows]

    assert losses("out") == losses("stopped")


def test_settings_that_matter_may_not_change_when_a_run_goes_on(finished: Path) -> None:
    result = run_program(finished, *SMALL_RUN, "--batch_size", "8")
    assert result.returncode == 2
    assert "batch_size was 4, now 8" in result.stderr


def test_detect_prints_every_token_with_a_probability(finished: Path) -> None:
    result = run_program(finished, "--detect", "The number has a line .")
    assert result.returncode == 0, result.stderr
    tokens = result.stdout.splitlines()[0].split()[1:]
    percentages = result.stdout.splitlines()[1].split()[1:]
    assert "number" in tokens
    assert len(tokens) == len(percentages)
    assert all(re.fullmatch(r"\d+%", p) for p in percentages)
    piped = run_program(finished, "--detect", "-", stdin="The number has a line .\n")
    assert piped.stdout == result.stdout


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_checkpoint(finished: Path) -> None:
    before = (finished / "out" / "checkpoint.pt").read_bytes()
    program = (
        "import sys, math, electra; rate = electra.learning_rate\n"
        "electra.learning_rate = lambda step, run: math.nan if step == 10 else rate(step, run)\n"
        "sys.exit(electra.main())"
    )
    command = [sys.executable, "-c", program, *SMALL_RUN, "--steps", "20"]
    environment = os.environ | {"PYTHONPATH": str(Path(electra.__file__).parent)}
    result = subprocess.run(
        command, check=False, cwd=finished, env=environment, capture_output=True, text=True
    )
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
        (b"some words\n", ["--data", "."], "is a folder"),
        (b"some words\n", ["--data", "text.txt", "--vocab", "none.txt"], "none.txt: no such file"),
        (b"some words\n", ["--data", "text.txt", "--vocab", "text.txt"], "has no [PAD]"),
        (
            b"some words\n",
            ["--data", "text.txt", "--bogus", "1"],
            "unrecognized arguments: --bogus",
        ),
        (b"some words\n", ["--data", "text.txt", "--size", "huge"], "choose one of tiny, small"),
        (b"some words\n", ["--data", "text.txt", "--length", "4096"], "--length must be"),
        (
            b"some words\n",
            ["--data", "text.txt", "--micro_batch", "3"],
            "--micro_batch must divide --batch_size",
        ),
        (b"some words\n", ["--detect", "hello", "--out", "nothing"], "nothing: no trained model"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    content: bytes | None,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    try:
        code = electra.main(arguments)
    except SystemExit as stop:  # argparse's own
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_named_and_never_executed(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "bomb.pt").write_bytes(b"cos\nsystem\n(S'touch exploded'\ntR.")
    (tmp_path / "short.pt").write_bytes((finished / "out" / "checkpoint.pt").read_bytes()[:1000])
    for name in ("bomb.pt", "short.pt"):
        with pytest.raises(data.InputError, match=f"{name}: damaged"):
            electra.load_checkpoint(tmp_path / name)
    assert not Path("exploded").exists()
