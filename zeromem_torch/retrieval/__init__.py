"""Views over a memory: what a query is compared with, walked through and ranked by (paper Eqs. 8-13)."""
