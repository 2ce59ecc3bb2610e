"""The layers a decoder is put together from; each reads its own weights."""
