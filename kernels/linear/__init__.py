"""Products with a fixed weight, whose layout an implementation may change beforehand."""
