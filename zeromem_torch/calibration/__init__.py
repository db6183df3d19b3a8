"""Calibration: of the evidence (paper Eq. 15) before it is handed to a reader."""
