"""The front door: OpenAI API, KV index, routing policy, dispatch."""
