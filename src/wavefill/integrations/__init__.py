"""wavefill inside other engines."""
