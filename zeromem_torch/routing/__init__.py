"""From the words of a query to its profile and its route (paper Eqs. 6-7)."""
