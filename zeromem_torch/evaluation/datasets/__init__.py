"""Benchmark files in, traces and questions out; every repair and every omission is counted in `Dataset.notes`."""

from zeromem_torch.evaluation.datasets.loading import DATASETS, load_dataset
from zeromem_torch.evaluation.datasets.pools import hotpotqa_context
from zeromem_torch.evaluation.datasets.reading import read_rows
from zeromem_torch.evaluation.datasets.records import Dataset, Question

__all__ = ["DATASETS", "Dataset", "Question", "hotpotqa_context", "load_dataset", "read_rows"]
