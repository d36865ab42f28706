"""Evaluation of reasoning models (DeepSeek-R1, 2025, arXiv:2501.12948)."""
