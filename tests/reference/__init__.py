"""Plain float32 implementations written from published formulas, for architectures that no library here has."""
