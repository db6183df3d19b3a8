"""Text in, tensors out: traces, units, entities, graph, lexicon and encoders (paper Eqs. 3-5)."""
