"""Calibration: of the evidence before it is handed over (Eq. 15), and of the answer that comes back (Eq. 16)."""
