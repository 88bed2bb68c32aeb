"""Stands in for torchvision, of which PyPI has no build for the CPU.

It is enough for vLLM to read the classes of vision-language models, and computes nothing: isotrain gives vLLM
pixels that are ready.
"""

__version__ = "0.28.0"
