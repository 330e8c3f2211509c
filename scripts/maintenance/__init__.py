"""Scripts that rewrite generated documentation and check that a change leaves training unaltered."""
