"""The Panel app over run directories and a live engine."""
