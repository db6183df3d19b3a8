"""One process that owns the memory and answers many agents at once, inside a declared budget."""
