"""Policies and tokenizers: loading, the built-in model, LoRA, log-probabilities."""
