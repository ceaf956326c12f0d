"""Engines: what turns prompts into completions with exact behaviour logprobs."""
