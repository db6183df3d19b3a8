"""Sizes and counts, as people write them."""

from __future__ import annotations

from zeromem_torch.errors import ZeroMemError


def bytes_of(name: str, size: int | str) -> int:
    """Bytes of a size such as "2GiB", "500 MB" or 1 << 30; ``name`` is what an error calls it."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if isinstance(size, str):
        number = size.strip().rstrip("BbIiKkMmGgTt ")
        unit = size.strip()[len(number) :].strip().lower().removesuffix("b")
        base, power = (1024 if unit.endswith("i") else 1000), " kmgt".find(unit.removesuffix("i") or " ")
        try:
            if power >= 0 and 0 < float(number) < float("inf"):
                return int(float(number) * base**power)
        except ValueError:
            pass
    raise ZeroMemError.of(name, 'bytes, or a size such as "2GiB"', size, "pass a size above 0, or None")


def check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ZeroMemError.of(name, "a whole number of at least 1", value, "pass 1 or more")
