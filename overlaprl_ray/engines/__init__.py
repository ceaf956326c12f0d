"""Engines: prompts in, completions with exact behaviour logprobs out."""
