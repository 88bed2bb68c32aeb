"""Certificates: made by runs on two devices, issued, signed and verified."""
