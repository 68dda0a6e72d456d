"""Models: loading, packed forwards, heads."""
