"""Fixtures for exports of adapters."""

from ..tuners.conftest import ids, tokenizer


__all__ = ["ids", "tokenizer"]
