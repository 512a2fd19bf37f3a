"""Models made smaller with the help of calibration data."""
