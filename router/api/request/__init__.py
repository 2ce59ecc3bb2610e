"""From a body's bytes to what is to be generated: read, bound, check, render, tokenize."""
