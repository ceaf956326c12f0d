"""The algorithm as pure functions of tensors: neither Ray nor transformers."""
