"""A model on disk: its files, their containers, and the defaults it brings."""
