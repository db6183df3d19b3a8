"""Fused scoring in Triton, interpreted: `test_fused_score` runs this file."""

import pytest
import torch
from builders import SIZES
from fused_score_cases import OPTIONS, check_scores

from zeromem_torch.kernels import fused_score_triton

RAGGED = (3, 0, 1, 7, 129, 0)


@pytest.mark.parametrize("size", SIZES)
def test_a_segment_in_one_program(size: int) -> None:
    check_scores("triton", "cpu", torch.float32, (size,))


def test_several_segments() -> None:
    check_scores("triton", "cpu", torch.float32, RAGGED, options=OPTIONS[-1:])


def test_segments_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_score_triton, "WHOLE", 64)
    monkeypatch.setattr(fused_score_triton, "CHUNK", 64)
    check_scores("triton", "cpu", torch.float32, (129,))
    check_scores("triton", "cpu", torch.float32, (3, 0, 70), options=OPTIONS[-1:])


@pytest.mark.parametrize("contrasts", [(1.0, 1.0), (0.5, 2.5), (3.0, 64.0)])
def test_contrasts(contrasts: tuple[float, float]) -> None:
    check_scores("triton", "cpu", torch.float32, (40,), contrasts=contrasts, options=((),))


@pytest.mark.parametrize("k", [0, 1, 32])
def test_depths(k: int) -> None:
    check_scores("triton", "cpu", torch.float32, (40,), k=k, options=(("admitted",),))


def test_half_precision() -> None:
    check_scores("triton", "cpu", torch.float16, (40,), options=OPTIONS[-1:])
