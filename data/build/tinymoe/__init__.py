"""Builds labkit's bundled model: texts -> tokenizer -> training -> GGUF -> model card."""
