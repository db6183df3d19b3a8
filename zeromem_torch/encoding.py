"""The encoder of a memory: loaded when it is first needed, none but the one that made it, its tokens counted."""

from collections.abc import Callable, Sequence
from pathlib import Path

from zeromem_torch.errors import ZeroMemError
from zeromem_torch.ledger import Ledger, MeteredEncoder
from zeromem_torch.substrate.encoder import Encoder, RecentTexts, encoder_bytes
from zeromem_torch.substrate.forward import encoded_texts
from zeromem_torch.substrate.lexicon import check_sparse_head
from zeromem_torch.substrate.traces import Trace


def check_name(named: str, own: str, made_with: str) -> None:
    """Refuse another encoder by its name where that tells: loading it may mean gigabytes, or waiting for a hub.

    A fingerprint begins with the encoder's name; whether that of the memory's ``own`` does so is looked at first.
    """
    if made_with.startswith(f"{Path(own).name}-") and not made_with.startswith(f"{Path(named).name}-"):
        raise _another(made_with, named)


def _another(made_with: str, got: str) -> ZeroMemError:
    return ZeroMemError.of(
        "encoder",
        f"the one this memory was made with, {made_with}",
        got,
        "open the memory without naming an encoder, then change it for all traces with reencode(encoder), or "
        "on the command line: zeromem reencode NAME",
    )


class MemoryEncoder:
    """``made_with`` is the fingerprint of the encoder that made the memory, None before there is one.

    ``learned``: its lexicon is what a sparse head has learnt, so it needs an encoder that has one.
    """

    def __init__(self, load: Callable[[], Encoder], made_with: str | None, ledger: Ledger, *, learned: bool) -> None:
        self.made_with, self.ledger, self.learned = made_with, ledger, learned
        self.loaded: Encoder | None = None
        self._load = load
        self._recent: RecentTexts | None = None

    def get(self) -> Encoder:
        if self.loaded is not None:
            return self.loaded
        encoder = self._load()
        if self.made_with is not None and encoder.fingerprint != self.made_with:
            raise _another(self.made_with, encoder.fingerprint)
        return self.change(encoder)

    def change(self, encoder: Encoder) -> Encoder:
        """From now on this one makes the memory."""
        if self.learned:
            check_sparse_head(encoder)
        self.loaded, self.made_with = encoder, encoder.fingerprint
        return encoder

    def metered(self) -> Encoder:
        return MeteredEncoder(self.get(), self.ledger)

    def remember_queries(self, most: int) -> None:
        """Keep what the encoder says of the last ``most`` texts of queries; asked again, they are not encoded again."""
        self._recent = RecentTexts(self.metered(), most)

    def for_queries(self) -> Encoder:
        if self._recent is None:
            return self.metered()
        if self._recent.fingerprint != self.get().fingerprint:
            self.remember_queries(self._recent.most)
        return self._recent

    def forget(self, traces: Sequence[Trace]) -> None:
        """Have a cache of texts drop those of the traces."""
        if forget := getattr(self.loaded, "forget", None):
            forget(encoded_texts(traces, self.get()))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in use."""
        return 0 if self.loaded is None else encoder_bytes(self.loaded)
