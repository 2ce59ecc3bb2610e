"""From what workers generate to the answer: text, log-probabilities, usage, streamed or whole."""
