"""How fast texts become vectors, beside sentence-transformers with the same weights: `python bench/encoder.py`.

Three loads, each of texts of mixed lengths: questions, turns of a conversation, and all of these with paragraphs. First
both have to agree (cosine); then each encodes the load again and again, and their calls alternate, so that what else
the machine does falls on both. Beside them stand our packed forward at other batch sizes, and the same model as
transformers runs it, padded. A single text at a time shows what a query waits for.

The floor is what the model's matrix products would take at the rate of one large product on this machine.

Without data the texts are made, and without the offline MiniLM the weights are too: times do not depend on them.

  python bench/encoder.py --quick
  python bench/encoder.py --locomo locomo10.json --corpus hotpot_corpus.jsonl.gz --json bench/results/encoder-cpu.json
  python bench/encoder.py --device cuda --model bge-m3-shape --json OUT
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script knows only its own folder

from bench.measure import Peak, Timing, floor_of, floors, has, lines, made_by, package, say, timed
from zeromem_torch.substrate.encoder import TransformerEncoder, load_encoder, minilm_folder
from zeromem_torch.substrate.traces import ZeroMemError

SHAPES = {
    "bge-m3-shape": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 250_002, "max_position_embeddings": 8194,
    },
    "minilm-shape": {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
        "vocab_size": 30_522, "max_position_embeddings": 514,
    },
    "tiny-shape": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "vocab_size": 6_000, "max_position_embeddings": 514,
    },
}  # fmt: skip
"""Models of these sizes with random weights, for a machine that has none: XLM-R with a tokenizer of made words."""
LONGEST = 256  # tokens of a text
BUDGETS = (1024, 4096, 16_384, 32_768)
SHOWN = (
    "load", "what", "batch_tokens", "median_us", "iqr_us", "p50_us", "p95_us", "p99_us", "cold_us", "tokens_s",
    "floor_share", "peak_mib",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """The same weights behind both: ours, and sentence-transformers' where it is installed."""

    name: str
    ours: TransformerEncoder
    theirs: Any  # a SentenceTransformer, or None

    @property
    def weights(self) -> int:
        """Those of the products that every token takes part in."""
        return sum(p.numel() for p in self.ours.model.encoder.layer.parameters() if p.ndim == 2)

    def flops(self, lengths: Sequence[int]) -> float:
        """Operations of the products for texts of these lengths, attention included."""
        config = self.ours.model.config
        attention = 4 * config.hidden_size * config.num_hidden_layers * sum(length**2 for length in lengths)
        return float(2 * self.weights * sum(lengths) + attention)


def open_model(name: str, folder: Path, device: str, dtype: torch.dtype) -> Model:
    """``minilm``, the folder of a model, or one of SHAPES, made in ``folder``."""
    path = make_model(folder / name, name) if name in SHAPES else minilm_folder() if name == "minilm" else Path(name)
    if name == "minilm":
        ours = load_encoder(name, device=device, dtype=dtype)
    else:
        ours = TransformerEncoder(path, max_tokens=LONGEST, device=device, dtype=dtype)
    theirs = None
    if has("sentence_transformers"):
        try:
            theirs = sentence_transformer(str(path), device, dtype)
            theirs.max_seq_length = ours.max_tokens
        except (ImportError, OSError, RuntimeError) as error:  # a host's own, which may not fit its other packages
            say(f"sentence-transformers is there, but does not load: {error}")
    return Model(name, ours, theirs)


def sentence_transformer(folder: str, device: str, dtype: torch.dtype) -> Any:
    make = package("sentence_transformers").SentenceTransformer
    return make(folder, device=device, model_kwargs={"dtype": dtype}, local_files_only=True)


def make_model(folder: Path, shape: str) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

    known = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    known |= {word: len(known) + place for place, word in enumerate(made_words())}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=tokenizer, model_max_length=512, unk_token="<unk>", **names).save_pretrained(folder)
    torch.manual_seed(0)
    numbers: dict[str, Any] = {**SHAPES[shape], "type_vocab_size": 1}
    config = XLMRobertaConfig(**numbers, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    model: Any = XLMRobertaModel(config)
    model.half().save_pretrained(folder)
    return folder


# Loads


def loads_of(locomo: Path | None, corpus: Path | None, count: int, seed: int = 0) -> dict[str, list[str]]:
    """Texts by the load's name: from the files, or made where there is none."""
    draw = random.Random(seed)
    if locomo is None:
        said = [" ".join(draw.choices(made_words(), k=draw.randint(8, 22))) for _ in range(2 * count)]
        asked = [" ".join(draw.choices(made_words(), k=draw.randint(5, 14))) for _ in range(2 * count)]
    else:
        samples = _rows(locomo)
        said = [turn["text"] for sample in samples for turn in _turns_of(sample["conversation"])]
        asked = [qa["question"] for sample in samples for qa in sample["qa"]]
    if corpus is None:
        long = [" ".join(draw.choices(said, k=draw.randint(3, 12))) for _ in range(count)]
    else:
        long = [row["text"] for row in _rows(corpus)]
    parts = {"questions": asked, "turns": said, "paragraphs": long}
    drawn = {name: draw.sample(sorted(set(texts)), min(count, len(set(texts)))) for name, texts in parts.items()}
    mixed = [text for texts in drawn.values() for text in texts[: max(1, count // 3)]]
    draw.shuffle(mixed)
    return {"questions": drawn["questions"], "turns": drawn["turns"], "mixed": mixed}


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    from zeromem_torch.evaluation.datasets import read_rows

    return read_rows(path)


@cache
def made_words(count: int = 4000) -> list[str]:
    syllables = [first + second for first in "bdfgklmnprstv" for second in "aeiou"]
    draw = random.Random(0)
    made = ("".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(4 * count))
    return list(dict.fromkeys(made))[:count]


def _turns_of(conversation: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for value in conversation.values():
        if isinstance(value, list):
            yield from (turn for turn in value if turn["text"].strip())


# Figures


def compare(model: Model, load: str, texts: Sequence[str], device: str, calls: int) -> list[dict[str, Any]]:
    """Ours and sentence-transformers on one load: they must agree first."""
    ours, theirs = model.ours, model.theirs
    counts = ours.encode(texts).counts
    lengths = [len(ids) for ids in ours.tokenizer(list(texts), truncation=True, max_length=ours.max_tokens).input_ids]

    def figure(what: str, timing: Timing, peak: float | None, batch_tokens: int | None = None) -> dict[str, Any]:
        row: dict[str, Any] = {"figure": "encoder", "model": model.name, "load": load, "what": what}
        row |= {"texts": len(texts), "tokens": int(counts.sum()), "dtype": str(ours.model.dtype).removeprefix("torch.")}
        row |= {} if batch_tokens is None else {"batch_tokens": batch_tokens}
        row |= timing.to_dict() | {"tokens_s": round(sum(lengths) / (timing.median * timing.items))}
        floor = floor_of(timing, device, flops=model.flops(lengths), dtype=_product_dtype(device, ours.model.dtype))
        return row | {"floor_share": floor["floor_share"]} | ({} if peak is None else {"peak_mib": peak})

    does: dict[str, Callable[[], Any]] = {"ours": lambda: ours.encode(texts).vectors}
    if theirs is not None:
        does["sentence-transformers"] = lambda: torch.from_numpy(theirs.encode(list(texts), show_progress_bar=False))
        apart = _apart(does["ours"](), does["sentence-transformers"]())
        bound = 1e-5 if ours.model.dtype == torch.float32 else 5e-3
        if not apart <= bound:
            raise SystemExit(f"encoder, {load}: expected vectors within {bound} of sentence-transformers, got {apart}")
    peaks = {}
    for name, do in does.items():
        peak = Peak(device)
        do()
        peaks[name] = peak.mib
    spent = alternate(does, len(texts), calls, device)
    return [
        figure(name, timing, peaks[name], ours.batch_tokens if name == "ours" else None)
        for name, timing in spent.items()
    ]


def alternate(does: Mapping[str, Callable[[], Any]], items: int, calls: int, device: str) -> dict[str, Timing]:
    """Call each in turn, so that what disturbs one disturbs all."""
    cold = {name: timed(do, calls=0, device=device)[0].cold for name, do in does.items()}
    warm: dict[str, list[float]] = {name: [] for name in does}
    for _ in range(calls):
        for name, do in does.items():
            warm[name].append(timed(do, calls=0, device=device)[0].cold)
    return {name: Timing(cold[name], warm[name], items) for name in does}


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest 1 - cosine of two vectors of one text."""
    return float((1 - torch.nn.functional.cosine_similarity(ours.double(), theirs.double())).max())


def _product_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """Half precisions have one rate on a GPU."""
    return torch.bfloat16 if device != "cpu" and dtype != torch.float32 else torch.float32


def sweep(model: Model, load: str, texts: Sequence[str], device: str, calls: int) -> Iterator[dict[str, Any]]:
    """Ours at other batch sizes, padded as transformers runs it, and one text at a time."""
    ours = model.ours
    tokens = int(ours.encode(texts).counts.sum())
    base = {
        "figure": "encoder",
        "model": model.name,
        "load": load,
        "dtype": str(ours.model.dtype).removeprefix("torch."),
    }
    held, packed = ours.batch_tokens, ours.packed
    try:
        for budget in BUDGETS:
            ours.batch_tokens = budget
            timing, _ = timed(lambda: ours.encode(texts), items=len(texts), calls=calls, device=device)
            yield {**base, "what": "ours", "batch_tokens": budget, **timing.to_dict(), **_rate(tokens, timing)}
        ours.batch_tokens = held
        if packed is not None:
            ours.packed = None
            timing, _ = timed(lambda: ours.encode(texts), items=len(texts), calls=calls, device=device)
            yield {**base, "what": "padded, by transformers", **timing.to_dict(), **_rate(tokens, timing)}
    finally:
        ours.batch_tokens, ours.packed = held, packed
    singles: dict[str, Callable[[str], Any]] = {"ours, one at a time": lambda text: ours.encode([text])}
    if model.theirs is not None:
        singles["sentence-transformers, one at a time"] = lambda text: model.theirs.encode(
            [text], show_progress_bar=False
        )
    for what, do in singles.items():
        spent = [timed(lambda: do(text), calls=0, device=device)[0].cold for text in texts[:200]]  # noqa: B023
        yield {**base, "what": what, **Timing(spent[0], spent[1:]).to_dict()}


def _rate(tokens: int, timing: Timing) -> dict[str, int]:
    return {"tokens_s": round(tokens / (timing.median * timing.items))}


def ratio(figures: Sequence[Mapping[str, Any]], load: str = "mixed") -> float | None:
    """Their time over ours, on one load."""
    median = {row["what"]: row["median_us"] for row in figures if row.get("load") == load and "peak_mib" in row}
    if "sentence-transformers" not in median:
        return None
    return float(np.round(median["sentence-transformers"] / median["ours"], 2))


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="minilm", help=f"minilm, a folder, or made: {', '.join(SHAPES)} (%(default)s)"
    )
    parser.add_argument("--locomo", type=Path, metavar="PATH", help="conversations and questions (default: made)")
    parser.add_argument("--corpus", type=Path, metavar="PATH", help="paragraphs (default: made)")
    parser.add_argument("--texts", type=int, default=384, metavar="N", help="texts of a load (%(default)s)")
    parser.add_argument("--calls", type=int, default=5, metavar="N", help="warm calls of each (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="(float32 on cpu, else float16)")
    parser.add_argument("--threads", type=int, metavar="N", help="of PyTorch (default: its own)")
    parser.add_argument("--quick", action="store_true", help="few texts, one load: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    args = parser.parse_args(words)
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "float16"))
    count, calls = (12, 2) if args.quick else (args.texts, args.calls)
    loads = loads_of(args.locomo, args.corpus, count)
    loads = {"mixed": loads["mixed"]} if args.quick else loads
    with tempfile.TemporaryDirectory(prefix="zeromem-encoder-") as folder:
        try:
            model = open_model(args.model, Path(folder), args.device, dtype)
        except ZeroMemError as error:
            say(f"{error}\ngoing on with random weights of its shape")
            model = open_model("minilm-shape", Path(folder), args.device, dtype)
        if model.theirs is None:
            say("sentence-transformers is not installed: ours alone")
        figures: list[dict[str, Any]] = []
        for load, texts in tqdm(loads.items(), desc="encoder", unit="load", disable=None):
            figures += compare(model, load, texts, args.device, calls)
            figures += sweep(model, load, texts, args.device, calls)
    result = {
        **made_by("encoder", words, args.device),
        "model": model.name,
        "data": {"locomo": str(args.locomo and args.locomo.name), "corpus": str(args.corpus and args.corpus.name)},
        "floors": floors(args.device),
        "ratios": {f"encoder_vs_sentence_transformers_{load}": ratio(figures, load) for load in loads},
        "figures": figures,
    }
    print("\n".join(lines(figures, SHOWN)))
    for name, value in result["ratios"].items():
        print(f"{name}: {value}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
