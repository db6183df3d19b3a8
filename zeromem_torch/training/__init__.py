"""Learn what the paper fixes by hand: mixing weights, gamma, hop decay, contrasts, and the route of a query."""
