"""Rows to samples to packed micro-batches."""
