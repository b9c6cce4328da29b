"""Kernels, timers, rows and drawings for prefill/decode separation of large language models."""

__version__ = "0.1.0"
