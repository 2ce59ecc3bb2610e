"""The HTTP server: connections, limits, and what happens around every request."""
