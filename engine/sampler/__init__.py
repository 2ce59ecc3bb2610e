"""Chooses each sequence's next token from its logits."""
