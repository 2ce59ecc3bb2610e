"""What a worker's two roles share: what they are given, and what they are asked."""
