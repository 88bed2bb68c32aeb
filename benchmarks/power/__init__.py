"""The parts of `parity_power.py`."""
