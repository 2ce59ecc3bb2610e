"""Model definitions: configuration, the decoder, and loading."""
