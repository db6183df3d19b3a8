"""Benchmarks: loaders of the data sets, measures of retrieval, baselines and the runs that compare them."""
